"""Reservations of pods that ended, and reservations that were lost."""

import asyncio

import msgspec
import pytest
from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import EVENTS, GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS
from carpool_core.kube.errors import Forbidden, Overloaded
from carpool_core.values import SharingMode
from carpool_extender.testing import (
    gpu_node,
    pod_of,
    seed_node,
    seed_pod,
    tenant,
    until,
)
from extender_world import args, background


@pytest.mark.parametrize("how", ["deleted", "Succeeded", "Failed"])
async def test_the_reservation_of_an_ended_pod_is_released_and_the_node_touched(world, how):
    world.add("x")
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        if how == "deleted":
            await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
        else:
            status = {"status": {"phase": how}}
            await world.kube.patch(PODS, "x-worker-0-1", status, namespace="default", subresource="status")
        await until(lambda: world.held() == {})
        await until(lambda: ANNOTATION_CAPACITY_FREED in world.kube.dump(NODES, "a")["metadata"].get("annotations", {}))


async def test_deleting_the_job_frees_its_gpu(world):
    world.add("x")
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
        await until(lambda: world.held() == {})


async def test_a_running_pod_keeps_its_reservation_beyond_any_deadline(world):
    world.add("x")
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        for _ in range(5):
            world.clock.advance(3600)
            await asyncio.sleep(0)
        await extender.gc.sweep()
    assert world.held() == {"a": ["pod-x"]}


@pytest.mark.parametrize("how", ["created anew", "emptied"])
async def test_a_running_pod_gets_the_reservation_back_that_its_node_lost(world, how):
    world.add("x", nodes=["a"], gpus=2)
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
    before = world.reservations("a")
    async with world.extender() as extender:
        if how == "emptied":
            await world.kube.patch(GPU_NODES, "a", {"spec": {"reservations": []}})
            await until(lambda: extender.informers.cluster.nodes_holding("pod-x") == [])
            world.clock.advance(5)
        else:
            await world.kube.delete(GPU_NODES, "a")
            for _ in range(50):
                await asyncio.sleep(0)
            seed_node(world.kube, another("a", devices=[]))
            for _ in range(50):
                await asyncio.sleep(0)
            assert world.reservations("a") == []  # its agent has not reported the GPUs yet
            seed_node(world.kube, another("a", devices=2))
        await until(lambda: world.reservations("a") == before)
    assert world.events() == []


def another(name, devices):
    """The GpuNode that an agent creates in place of one that was deleted."""
    node = gpu_node(name, devices)
    return msgspec.structs.replace(node, metadata=msgspec.structs.replace(node.metadata, uid="another"))


async def test_it_is_told_once_where_nobody_knows_the_reservation_that_was_lost(world):
    world.add("x")
    seed_pod(world.kube, "x", nodeName="a")
    async with world.extender() as extender:
        await until(lambda: world.events() != [])
        await extender.gc.sweep()
    [(reason, message)] = world.events()
    assert reason == "ReservationLost"
    assert message.startswith(
        "pod default/x-worker-0-1 runs on node a without a reservation, so nothing is kept for it"
    )
    assert "nothing is known of the reservation that it had" in message
    assert world.kube.dump_all(EVENTS)[0]["count"] == 1


async def test_it_is_told_where_the_place_was_given_to_another_meanwhile(world):
    world.add("x", "y", nodes=["a"])
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        taker = msgspec.structs.replace(tenant("y", ["GPU-a-0"], SharingMode.EXCLUSIVE), pod_name="y-worker-0-1")
        await world.kube.patch(GPU_NODES, "a", {"spec": {"reservations": [msgspec.to_builtins(taker)]}})
        await until(lambda: extender.informers.cluster.nodes_holding("pod-x") == [])
        world.clock.advance(5)
        await until(lambda: world.events() != [])
    assert "cannot be written again: GPU-a-0: wants it by MPS, it is used by Exclusive" in world.events()[0][1]


async def test_an_ended_pod_gets_no_reservation_back(world):
    world.add("x", nodes=["a"])
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
        await until(lambda: world.reservations("a") == [])
        await extender.gc.sweep()
        assert world.reservations("a") == []
    assert world.events() == []


async def test_a_pod_that_the_cache_has_not_seen_is_confirmed_on_the_server(world):
    """A reservation must not be taken from a pod only because its watch is late or selects other pods."""
    world.add("x")
    seed_node(world.kube, gpu_node("a", 1, [tenant("x", ["GPU-a-0"])]))
    hidden = pod_of("x", schedulerName="another", nodeName="a")
    hidden["metadata"]["name"] = "x"
    world.kube.seed(PODS, hidden)
    async with world.extender() as extender:
        await extender.gc.sweep()
    assert world.held() == {"a": ["pod-x"]}


@pytest.mark.parametrize("deadline", ["soon", "2026-01-31T11:00:00", "9999-12-31T23:59:59Z", "2026-13-31T12:00:00Z"])
async def test_a_deadline_that_nobody_can_read_counts_as_none(world, deadline):
    world.add("x")
    odd = msgspec.structs.replace(tenant("x", ["GPU-a-0"]), pod_name="x-worker-0-1", deadline=deadline)
    gone = tenant("gone", ["GPU-a-0"])
    seed_node(world.kube, gpu_node("a", 1, [odd, gone]))
    async with world.extender() as extender:
        await until(lambda: world.held() == {"a": ["pod-x"]})
        assert extender.informers.not_ready() is None


async def test_a_failing_release_is_tried_again(world):
    world.add("x")
    seed_node(world.kube, gpu_node("a", 1, [tenant("gone", ["GPU-a-0"])]))
    world.kube.fail_next("patch", GPU_NODES, Forbidden("not now", status=403))
    async with world.extender():
        await until(lambda: any(seconds >= 5 for seconds in world.clock.sleeping))
        assert world.held() == {"a": ["pod-gone"]}
        world.clock.advance(5)
        await until(lambda: world.held() == {})


async def test_a_failing_touch_is_tried_again(world):
    world.add("x")
    seed_node(world.kube, gpu_node("a", 1, [tenant("gone", ["GPU-a-0"])]))
    for _ in range(2):
        world.kube.fail_next("patch", NODES, Overloaded("busy", status=429))
    async with world.extender():
        await until(lambda: world.held() == {})
        for _ in range(50):
            await asyncio.sleep(0)
        assert "annotations" not in world.kube.dump(NODES, "a")["metadata"]
        world.clock.advance(5)
        await until(lambda: ANNOTATION_CAPACITY_FREED in world.kube.dump(NODES, "a")["metadata"].get("annotations", {}))


async def test_new_gpus_have_waiting_pods_tried_again(world):
    world.add("x", nodes=["a"])
    async with world.extender():
        patch = {"status": msgspec.to_builtins(gpu_node("a", 2).status)}
        await world.kube.patch(GPU_NODES, "a", patch, subresource="status")
        await until(lambda: ANNOTATION_CAPACITY_FREED in world.kube.dump(NODES, "a")["metadata"].get("annotations", {}))
