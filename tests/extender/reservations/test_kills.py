"""A kill between each two steps of a bind."""

import asyncio

from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import GPU_NODES, NODES, PODS
from carpool_core.kube.errors import Unreachable
from carpool_extender.testing import until
from extender_world import NAMES, args, background, filtering, named


async def restarted(world):
    """A new extender finishes what an earlier one left, through filter and bind as kube-scheduler repeats them."""
    async with world.extender() as extender, background(world.agent.serve("a")), background(world.agent.serve("b")):
        for _ in range(100):
            fits = named(await extender.service.filter(filtering()))
            if fits:
                break
        if world.bound_to() == "":
            assert (await extender.service.bind(args(node=fits[0]))).error == ""
        assert world.bound_to() in NAMES
        await until(lambda: world.held() == {world.bound_to(): ["pod-x"]})
    return fits


async def test_killed_before_the_reservation(world):
    world.add("x")
    async with world.extender() as extender:
        await extender.service.filter(filtering())
    await restarted(world)


async def test_killed_after_the_reservation_the_retry_finishes_there(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args(node="b"))):
        await until(lambda: world.held() == {"b": ["pod-x"]})
    async with world.extender() as extender:
        found = await extender.service.filter(filtering())
        assert named(found) == ["b"]
        assert "has a reservation on node b, which lapses at" in found.failed_nodes["a"]
        assert {p.host: p.score for p in await extender.service.prioritize(filtering())} == {"a": 0, "b": 10}
        answer = await extender.service.bind(args(node="a"))
        assert "has a reservation on node b, so it cannot be bound to a; retry on b" in answer.error
    assert await restarted(world) == ["b"]
    assert world.bound_to() == "b"


async def test_killed_after_the_partition_was_ready(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())):
        await until(lambda: world.held() != {})
    await world.agent.report("a")
    assert await restarted(world) == ["a"]


async def test_killed_after_the_binding(world):
    world.add("x")
    world.kube.fail_next("create", PODS, Unreachable("killed here"), after=True, subresource="binding")
    async with (
        world.extender() as extender,
        background(world.agent.serve("a")),
        background(extender.service.bind(args())),
    ):
        await until(lambda: world.bound_to() == "a")
    await restarted(world)


async def test_killed_after_a_release_and_before_the_node_was_touched(world):
    world.add("x")
    freed = {"metadata": {"annotations": {ANNOTATION_CAPACITY_FREED: "2026-01-31T11:59:59.000000Z"}}}
    await world.kube.patch(GPU_NODES, "a", freed)
    async with world.extender():
        await until(lambda: ANNOTATION_CAPACITY_FREED in world.kube.dump(NODES, "a")["metadata"].get("annotations", {}))
        assert "annotations" not in world.kube.dump(NODES, "b")["metadata"]


async def test_a_reservation_of_a_node_that_is_not_offered_lapses_and_is_released(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())):
        await until(lambda: world.held() != {})
    async with world.extender() as extender:
        assert named(await extender.service.filter(filtering(names=["b"]))) == []
        world.clock.advance(29)
        for _ in range(100):
            await asyncio.sleep(0)
        assert world.held() != {}
        world.clock.advance(5)
        await until(lambda: world.held() == {})
        assert named(await extender.service.filter(filtering(names=["b"]))) == ["b"]
