"""Whole binds on a server in memory: replays, races, conflicts."""

import asyncio
from datetime import timedelta

from carpool_core.clock import parse_rfc3339
from carpool_core.keys import ANNOTATION_GPUS, ANNOTATION_MODE
from carpool_core.kube.api import GPU_NODES
from carpool_core.kube.errors import Conflict, Unreachable
from carpool_extender.testing import (
    seed_job,
    until,
)
from extender_world import NAMES, args, background, filtering, named


async def test_a_pod_is_reserved_prepared_and_bound(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() == {"a": ["pod-x"]})
        assert not binding.done()
        assert world.bound_to() == ""
        await world.agent.report("a")
        assert (await binding).error == ""
    assert world.bound_to() == "a"
    annotations = world.pod()["metadata"]["annotations"]
    assert annotations[ANNOTATION_GPUS] == "GPU-a-0"
    assert annotations[ANNOTATION_MODE] == "MPS"
    [reservation] = world.reservations("a")
    assert reservation["memoryLimitMib"] == 4000
    assert reservation["policy"] == "least-slowdown"
    assert reservation["reason"].startswith("least-slowdown: MPS on GPU 0 of a alone; 36,960 of 40,960 MiB left")


async def test_filter_and_prioritize_write_nothing(world):
    world.add("x")
    async with world.extender() as extender:
        assert named(await extender.service.filter(filtering())) == NAMES
        assert {p.host: p.score for p in await extender.service.prioritize(filtering())}["a"] == 10
    assert not [call for call in world.kube.calls if call.verb in ("create", "patch", "delete")]


async def test_a_replay_for_the_same_node_joins_the_open_bind(world):
    world.add("x")
    async with world.extender() as extender:
        first = asyncio.create_task(extender.service.bind(args()))
        await until(lambda: world.held() != {})
        second = asyncio.create_task(extender.service.bind(args()))
        first.cancel()  # kube-scheduler hung up; the bind goes on
        await world.agent.report("a")
        assert (await second).error == ""
        assert (await extender.service.bind(args())).error == ""
    assert world.held() == {"a": ["pod-x"]}
    assert len([call for call in world.kube.calls if call.subresource == "binding"]) == 1


async def test_a_replay_for_another_node_is_told_where_the_pod_is_being_bound(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        assert "is being bound to node a at present" in (await extender.service.bind(args(node="b"))).error
        await world.agent.report("a")
        await binding
        answer = await extender.service.bind(args(node="b"))
    assert "is bound to node a, so it cannot be bound to b" in answer.error or "reservation on node a" in answer.error
    assert world.held() == {"a": ["pod-x"]}


async def test_two_pods_race_for_the_last_place_and_one_gets_it(world):
    world.add("x", "y", nodes=["a"])
    for job in ("x", "y"):
        seed_job(world.kube, job, memory_mib=30000)
    async with world.extender() as extender, background(world.agent.serve("a")):
        answers = await asyncio.gather(extender.service.bind(args("x")), extender.service.bind(args("y")))
    assert sorted(bool(answer.error) for answer in answers) == [False, True]
    assert "needs 30,000 MiB; freest NVIDIA A100-SXM4-40GB has 10,960 MiB free" in "".join(a.error for a in answers)
    assert len(world.reservations("a")) == 1


async def test_two_extenders_race_for_one_node(world):
    world.add("x", "y", nodes=["a"])
    for job in ("x", "y"):
        seed_job(world.kube, job, memory_mib=30000)
    async with world.extender() as one, world.extender() as other, background(world.agent.serve("a")):
        answers = await asyncio.gather(one.service.bind(args("x")), other.service.bind(args("y")))
    assert sorted(bool(answer.error) for answer in answers) == [False, True]
    assert len(world.reservations("a")) == 1


async def test_two_extenders_race_for_one_pod(world):
    world.add("x")
    async with (
        world.extender() as one,
        world.extender() as other,
        background(world.agent.serve("a")),
        background(world.agent.serve("b")),
    ):
        answers = await asyncio.gather(one.service.bind(args()), other.service.bind(args(node="b")))
        assert sorted(bool(answer.error) for answer in answers) == [False, True]
        assert world.bound_to() in NAMES
        await until(lambda: world.held() == {world.bound_to(): ["pod-x"]})


async def test_conflicts_are_decided_again(world):
    world.add("x")
    for _ in range(3):
        world.kube.fail_next("patch", GPU_NODES, Conflict("changed", status=409))
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""


async def test_endless_conflicts_end_in_an_error(world):
    world.add("x")
    for _ in range(50):
        world.kube.fail_next("patch", GPU_NODES, Conflict("changed", status=409))
    async with world.extender() as extender:
        assert "was not bound to node a: changed" in (await extender.service.bind(args())).error
    assert len([c for c in world.kube.calls if c.verb == "patch" and c.plural == "gpunodes"]) == 8


async def test_a_lost_answer_to_the_reservation_is_found_again(world):
    world.add("x")
    world.kube.fail_next("patch", GPU_NODES, Unreachable("reset"), after=True)
    async with (
        world.extender() as extender,
        background(world.agent.serve("a")),
        background(extender.service.bind(args())) as binding,
    ):
        await until(lambda: world.clock.sleeping != [])
        await until(lambda: min(world.clock.sleeping) < 1)
        world.clock.advance(0.1)
        assert (await binding).error == ""
    assert world.held() == {"a": ["pod-x"]}


async def test_the_deadline_counts_from_the_write_though_the_bind_waited_for_it(world):
    """Regression: a bind that waited for the write before it had so much less time until its reservation lapsed."""
    world.add("x", "y")
    async with world.extender(gather_s=4) as extender, background(extender.service.bind(args("x"))):
        await until(lambda: world.held() == {"a": ["pod-x"]})
        async with background(extender.service.bind(args("y"))):
            for _ in range(50):
                await asyncio.sleep(0)
            assert world.held() == {"a": ["pod-x"]}
            world.clock.advance(4)
            await until(lambda: world.held() == {"a": ["pod-x", "pod-y"]})
    first, second = (parse_rfc3339(one["deadline"]) for one in world.reservations("a"))
    assert second - first == timedelta(seconds=4)


async def test_a_reason_names_no_neighbour_that_left_while_the_bind_waited_to_be_written(world):
    """Regression: a decision that was made before was taken as it was, words and slowdown and limit of threads."""
    world.add("x", "y", nodes=["a"])
    async with world.extender(gather_s=4) as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args("x"))).error == ""
        await until(lambda: 4 in world.clock.sleeping)
        async with background(extender.service.bind(args("y"))) as binding:
            for _ in range(50):
                await asyncio.sleep(0)
            await world.kube.patch(GPU_NODES, "a", {"spec": {"reservations": []}})
            await until(lambda: not extender.informers.cluster.node("a").spec.reservations)
            world.clock.advance(4)
            assert (await binding).error == ""
    [held] = world.reservations("a")
    assert "MPS on GPU 0 of a alone; " in held["reason"]
    assert (held.get("threadPercentage"), held["expectedSlowdown"]) == (100, 1.0)
