"""GPUs that their node's agent cannot prepare, or of which nobody hears."""

import asyncio
from datetime import timedelta

import pytest
from carpool_core.clock import rfc3339
from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import GPU_NODES, NODES
from carpool_core.values import PartitionState
from carpool_extender.testing import until
from extender_world import NAMES, args, background, filtering, named


async def test_a_partition_that_fails_is_given_back_with_an_event(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        await world.agent.report("a", PartitionState.FAILED, "the MPS daemon did not start")
        answer = await binding
        assert answer.error == "node a could not prepare MPS for pod default/x-worker-0-1: the MPS daemon did not start"
        await until(lambda: ANNOTATION_CAPACITY_FREED in world.kube.dump(NODES, "a")["metadata"].get("annotations", {}))
    assert world.held() == {}
    assert world.events() == [("PartitionFailed", answer.error)]


async def test_a_silent_agent_ends_at_the_deadline(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        await until(lambda: any(seconds > 10 for seconds in world.clock.sleeping))
        world.clock.advance(20)
        answer = await binding
    assert "did not prepare the GPU for pod default/x-worker-0-1 within 20 s" in answer.error
    assert world.held() == {}
    assert [reason for reason, _ in world.events()] == ["PartitionTimeout"]


def names_and_refusals(found):
    return named(found), set(found.failed_nodes.values())


async def fails(world, extender, node="a"):
    """A bind whose GPU the agent cannot prepare."""
    async with background(extender.service.bind(args(node=node))) as binding:
        await until(lambda: world.reservations(node))
        await world.agent.report(node, PartitionState.FAILED, "the MPS daemon did not start")
        assert "could not prepare MPS" in (await binding).error


async def test_a_gpu_that_cannot_be_prepared_is_left_alone_for_longer_and_longer(world):
    async def wait(seconds):
        world.clock.advance(seconds)
        await world.agent.beat(*NAMES)
        now, nodes = rfc3339(world.clock.now()), extender.informers.cluster.nodes
        await until(lambda: all(node.status.heartbeat_time == now for node in nodes.values()))

    world.add("x")
    async with world.extender() as extender:
        for rest in (30, 60, 120, 240, 480, 600, 600):
            await fails(world, extender)
            begins = world.clock.now() + timedelta(seconds=rest)
            sentence = f"NoGpuFits: 1 node: could not be prepared, is tried again at {begins:%Y-%m-%dT%H:%M:%SZ}"
            found = await extender.service.filter(filtering())
            assert names_and_refusals(found) == (["b"], {sentence})
            await wait(rest - 1)
            assert named(await extender.service.filter(filtering())) == ["b"]
            await wait(1)
            assert named(await extender.service.filter(filtering())) == NAMES


async def test_another_gpu_of_the_node_is_taken_meanwhile_and_a_success_ends_the_count(world):
    world.add("x", nodes=["a"], gpus=2)
    async with world.extender() as extender:
        await fails(world, extender)
        async with background(world.agent.serve("a")):
            assert (await extender.service.bind(args())).error == ""
        assert world.reservations("a")[0]["gpuUuids"] == ["GPU-a-1"]


async def test_a_gpu_that_fails_while_a_pod_waits_to_be_written_there_takes_it_no_more(world):
    """Regression: its bind had been decided before, and only what the node tells was compared."""
    world.add("x", "y")
    async with world.extender(gather_s=4) as extender, background(extender.service.bind(args("x"))) as failing:
        await until(lambda: world.held() == {"a": ["pod-x"]} and 4 in world.clock.sleeping)
        async with background(extender.service.bind(args("y"))) as waiting:
            for _ in range(50):
                await asyncio.sleep(0)
            await world.agent.report("a", PartitionState.FAILED, "the MPS daemon did not start")
            await until(lambda: extender.informers.cluster.unavailable_nodes() == {"a"})
            assert world.held() == {"a": ["pod-x"]}
            world.clock.advance(4)
            await until(lambda: failing.done() and waiting.done())
            assert "could not prepare MPS" in (await failing).error
            assert "could not be prepared, is tried again at" in (await waiting).error
    assert world.held() == {}


async def test_waiting_pods_are_tried_again_when_the_rest_is_over(world):
    world.add("x", nodes=["a"])

    def touched():
        return world.kube.dump(NODES, "a")["metadata"].get("annotations", {}).get(ANNOTATION_CAPACITY_FREED)

    async with world.extender() as extender:
        await fails(world, extender)
        await until(touched)
        first = touched()
        for _ in range(8):
            await until(lambda: any(seconds > 4 for seconds in world.clock.sleeping))
            world.clock.advance(5)
        await until(lambda: touched() != first)


async def test_an_agent_that_no_longer_reports_gets_no_more_jobs(world):
    """Counted from the last report that was seen: an old one at the start is no sign of silence."""
    world.add("x", nodes=["a"])

    async def beat(when):
        await world.kube.patch(GPU_NODES, "a", {"status": {"heartbeatTime": when}}, subresource="status")

    await beat("2020-01-01T00:00:00Z")
    async with world.extender() as extender:
        assert named(await extender.service.filter(filtering())) == ["a"]
        world.clock.advance(60)
        assert named(await extender.service.filter(filtering())) == ["a"]
        world.clock.advance(1)
        found = await extender.service.filter(filtering(names=["a"]))
        assert names_and_refusals(found) == ([], {"NoGpuFits: 1 node: its agent has not reported for more than 60 s"})
        await beat("2026-01-31T12:03:21Z")
        for _ in range(20):
            await asyncio.sleep(0)
        assert named(await extender.service.filter(filtering())) == ["a"]


async def test_a_report_about_another_generation_does_not_count(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        patch = {"status": {"partitions": [{"podUid": "pod-x", "generation": 0, "state": "Ready"}]}}
        await world.kube.patch(GPU_NODES, "a", patch, subresource="status")
        for _ in range(50):
            await asyncio.sleep(0)
        assert not binding.done()


@pytest.mark.parametrize("stale", [PartitionState.FAILED, PartitionState.READY])
@pytest.mark.parametrize("back_s", [0, 3600])
async def test_a_report_about_an_earlier_reservation_of_the_pod_does_not_count(world, stale, back_s):
    """Released and reserved again, a pod has another reservation, also where the clock was set back meanwhile."""
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())):
        await until(lambda: world.held() != {})
    first = world.reservations("a")[0]["generation"]
    await world.agent.report("a", stale)
    await world.kube.patch(GPU_NODES, "a", {"spec": {"reservations": []}})
    world.clock.advance(1 - back_s)
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        assert world.reservations("a")[0]["generation"] > first
        for _ in range(50):
            await asyncio.sleep(0)
        assert not binding.done()
        await world.agent.report("a")
        assert (await binding).error == ""
