"""Pods that have ended and hold reservations still: who would be refused in that moment waits for what they held."""

import asyncio

import pytest
from carpool_core.kube.api import GPU_NODES, PODS
from carpool_core.kube.errors import Overloaded
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import PodUid
from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.informers import Informers
from carpool_extender.terminating_pods import PATIENCE_S, TerminatingPods
from carpool_extender.testing import gpu_node, pod_request, seed_job, seed_node, seed_pod, tenant, until
from extender_world import args, background, filtering, named
from prometheus_client import generate_latest


@pytest.fixture
def crowded(world):
    """A world in which one GPU holds one of two jobs."""
    seed_node(world.kube, gpu_node("a", 1))
    for name in ("x", "y"):
        seed_job(world.kube, name, memory_mib=30_000)
        seed_pod(world.kube, name)
    return world


def held(world):
    return [reservation["podUid"] for reservation in world.reservations("a")]


async def bound(world, extender):
    """Bind the first of the jobs, so that the other has no place."""
    async with background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
    assert named(await extender.service.filter(filtering("y", ["a"]))) == []


async def end(world, extender, how="Succeeded", left=("pod-x",)):
    """Let the pod of the first end, and the extender hear of it; what it held is not given back yet."""
    if how == "deleted":
        await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
    else:
        ended = {"status": {"phase": how}}
        await world.kube.patch(PODS, "x-worker-0-1", ended, namespace="default", subresource="status")
    seen = extender.informers.pod
    await until(lambda: (pod := seen(PodUid("pod-x"))) is None or pod.is_finished)
    assert held(world) == list(left)


@pytest.mark.parametrize("how", ["deleted", "Succeeded", "Failed"])
async def test_who_would_be_refused_gets_what_an_ended_pod_held(crowded, how):
    """Regression: kube-scheduler tries those that wait as soon as a pod ends; the first were refused, and sat out a
    backoff while one from the end of the queue took the GPU."""
    async with crowded.extender() as extender:
        await bound(crowded, extender)
        await end(crowded, extender, how)
        assert named(await extender.service.filter(filtering("y", ["a"]))) == ["a"]
        assert held(crowded) == []


async def test_waiting_is_told_apart_from_deciding(crowded):
    async with crowded.extender() as extender:
        await bound(crowded, extender)
        await end(crowded, extender)
        await extender.service.filter(filtering("y", ["a"]))
        assert "carpool_extender_kept_back_seconds_count 1.0" in generate_latest(extender.registry).decode()


async def test_who_has_a_place_elsewhere_does_not_wait(crowded):
    async with crowded.extender() as extender:
        await bound(crowded, extender)
        seed_node(crowded.kube, gpu_node("b", 1))
        await until(lambda: extender.informers.cluster.node("b") is not None)
        await end(crowded, extender)
        assert named(await extender.service.filter(filtering("y", ["a", "b"]))) == ["b"]
        assert held(crowded) == ["pod-x"]


async def test_what_cannot_be_given_back_keeps_nobody_for_long(crowded):
    async with crowded.extender() as extender:
        await bound(crowded, extender)
        for _ in range(10):
            crowded.kube.fail_next("patch", GPU_NODES, Overloaded("slow down", status=429))
        await end(crowded, extender)
        asking = asyncio.create_task(extender.service.filter(filtering("y", ["a"])))
        await until(lambda: PATIENCE_S in crowded.clock.sleeping)
        crowded.clock.advance(PATIENCE_S)
        assert named(await asking) == []
        # And the next one not at all.
        assert named(await extender.service.filter(filtering("y", ["a"]))) == []
        assert "carpool_extender_kept_back_seconds_count 1.0" in generate_latest(extender.registry).decode()


async def test_one_patience_serves_all_that_ask(crowded):
    """What ended half a second ago is waited for half a second, however many come meanwhile."""
    async with crowded.extender() as extender:
        await bound(crowded, extender)
        for _ in range(10):
            crowded.kube.fail_next("patch", GPU_NODES, Overloaded("slow down", status=429))
        await end(crowded, extender)
        crowded.clock.advance(PATIENCE_S / 2)
        asking = asyncio.create_task(extender.service.filter(filtering("y", ["a"])))
        await until(lambda: PATIENCE_S / 2 in crowded.clock.sleeping)
        crowded.clock.advance(PATIENCE_S / 2)
        assert named(await asking) == []


@pytest.mark.parametrize(
    ("refused", "names"),
    [
        pytest.param({"memory_mib": 39_000}, ["a"], id="beside who stays there is no room either"),
        pytest.param({"memory_mib": 30_000}, ["b"], id="it may not go there"),
        pytest.param(
            {"memory_mib": 10_000, "spec": {"gpu": {"product": "H100-PCIE-80GB"}}}, ["a"], id="of the wrong product"
        ),
    ],
)
async def test_who_would_not_fit_then_either_keeps_nobody_waiting(world, refused, names):
    """kube-scheduler asks about one pod after the other: a queue of those would stand still with each end."""
    for node in "ab":
        seed_node(world.kube, gpu_node(node, 1))
    seed_job(world.kube, "x", memory_mib=30_000)
    seed_job(world.kube, "stays", memory_mib=5_000)
    seed_job(world.kube, "full", memory_mib=39_000)
    seed_job(world.kube, "y", **refused)
    for name in ("x", "stays", "full", "y"):
        seed_pod(world.kube, name)
    async with world.extender() as extender:
        for name, node in (("x", "a"), ("stays", "a"), ("full", "b")):
            async with background(world.agent.serve(node)):
                assert (await extender.service.bind(args(name, node))).error == ""
        await end(world, extender, left=["pod-x", "pod-stays"])
        assert named(await extender.service.filter(filtering("y", names))) == []
        assert held(world) == ["pod-x", "pod-stays"]
        assert "carpool_extender_kept_back_seconds_count 0.0" in generate_latest(extender.registry).decode()


class Counting(ClusterCache):
    """Counts how often somebody asks where a pod has a reservation."""

    asked = 0

    def nodes_holding(self, pod_uid):
        self.asked += 1
        return super().nodes_holding(pod_uid)


async def test_pods_that_end_together_are_each_looked_at_once():
    """As when a namespace is deleted: to go through all with each took seconds, in which nobody was answered."""
    clock, pods, cluster = FakeClock(), 100, Counting()
    kube = FakeKube(clock)
    names = [f"j{number}" for number in range(pods)]
    seed_node(kube, gpu_node("a", 1, [tenant(name, ["GPU-a-0"], memory_limit_mib=10) for name in names]))
    for name in names:
        seed_pod(kube, name, nodeName="a")
    informers = Informers(kube, clock, cluster)
    terminating_pods = TerminatingPods(
        informers, SchedulerConfig(find_policy("least-slowdown"), slots=8), clock, clock.sleep
    )
    async with background(informers.run()):
        await informers.wait_synced()
        for name in names:
            await kube.delete(PODS, f"{name}-worker-0-1", namespace="default")
        await until(lambda: not list(informers.pods()))
    assert cluster.asked <= 2 * pods
    assert len(terminating_pods.promising(pod_request(memory_limit_mib=30_000), ["a"])) == pods


async def test_a_measure_of_an_ended_pod_is_not_taken_for_a_stranger(crowded):
    """Its agent has not looked again yet, and tells of what the pod takes still."""
    async with crowded.extender() as extender:
        await bound(crowded, extender)
        use = {"podUid": "pod-x", "gpuUuid": "GPU-a-0", "memoryMib": 30_000, "peakMemoryMib": 30_000}
        await crowded.kube.patch(GPU_NODES, "a", {"status": {"tenants": [use]}}, subresource="status")
        await until(lambda: extender.informers.cluster.node("a").status.tenants)
        await end(crowded, extender)
        asked = await extender.service.filter(filtering("y", ["a"]))
        assert held(crowded) == []
        assert "carpool_extender_kept_back_seconds_count 1.0" in generate_latest(extender.registry).decode()
        assert named(asked) == []  # until the agent says that it is gone
