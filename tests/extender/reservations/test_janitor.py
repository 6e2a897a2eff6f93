"""When a reservation is needed no longer."""

import asyncio
from datetime import timedelta

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import GPU_NODES, NODES, PODS
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import Tenant
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, SharingMode
from carpool_extender.cache.cluster import ClusterCache, may_free_capacity
from carpool_extender.informers import Informers
from carpool_extender.reservations.gc import AT_ONCE, UNCONFIRMED_S, ReservationGC, Restorer, ended
from carpool_extender.reservations.writer import ReservationWriter
from carpool_extender.testing import device, gpu_node, seed_node, seed_pod, tenant, until
from extender_world import background
from janitor_world import Clean

NOW = FakeClock().now()
RUNNING = {"containerStatuses": [{"name": "train", "state": {"running": {"startedAt": rfc3339(NOW)}}}]}


def deleted(seconds_ago: float, **status: object) -> Pod:
    """A bound pod whose grace period ended so long ago."""
    metadata = {
        "name": "x-worker-0-1",
        "uid": "pod-x",
        "deletionTimestamp": rfc3339(NOW - timedelta(seconds=seconds_ago)),
    }
    return msgspec.convert(
        {"metadata": metadata, "spec": {"nodeName": "a"}, "status": {"phase": "Pending", **status}}, Pod
    )


@pytest.mark.parametrize(
    ("pod", "is_ended"),
    [
        pytest.param(deleted(UNCONFIRMED_S + 1), True, id="never started, on a node that confirms nothing"),
        pytest.param(deleted(UNCONFIRMED_S - 1), False, id="its node may still confirm it"),
        pytest.param(deleted(UNCONFIRMED_S + 1, **RUNNING), False, id="it ran, and nobody knows that it has ended"),
    ],
)
def test_pod_deleted_before_it_started_on_a_dead_node(pod: Pod, is_ended: bool) -> None:
    """Regression: its reservation was held for ever, because no kubelet was there to confirm the deletion."""
    assert (ended(tenant("x", ["GPU-a-0"]), "a", pod, NOW) is not None) == is_ended


def reporting(*devices, strangers=()):
    node = gpu_node("a", devices)
    return msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, tenants=list(strangers)))


SICK = {"health": DeviceHealth.UNHEALTHY}
STRANGER = [Tenant(pod_uid="pod-other", gpu_uuid="GPU-a-0", memory_mib=900)]


@pytest.mark.parametrize(
    ("old", "new", "is_more"),
    [
        pytest.param(None, reporting(device()), True, id="a node that is new"),
        pytest.param(reporting(device()), reporting(device(mode=SharingMode.MPS)), False, id="prepared for a tenant"),
        pytest.param(reporting(device(mode=SharingMode.MPS)), reporting(device()), False, id="idle after a release"),
        pytest.param(reporting(device()), reporting(device(**SICK)), False, id="fallen sick"),
        pytest.param(
            reporting(device(**SICK)), reporting(device(health_message="hot", **SICK)), False, id="sick otherwise"
        ),
        pytest.param(reporting(device(**SICK)), reporting(device()), True, id="healthy again"),
        pytest.param(reporting(device()), reporting(device(), device(1)), True, id="one more GPU"),
        pytest.param(reporting(device(), device(1)), reporting(device()), False, id="one GPU less"),
        pytest.param(reporting(device(reserved_mib=900)), reporting(device()), True, id="less is kept back"),
        pytest.param(reporting(device(modes=[SharingMode.EXCLUSIVE])), reporting(device()), True, id="other modes"),
        pytest.param(reporting(device(), strangers=STRANGER), reporting(device()), True, id="a stranger has left"),
    ],
)
def test_which_changes_may_give_a_waiting_pod_a_place(old, new, is_more):
    """Regression: every placement on an idle GPU had kube-scheduler try every waiting pod again."""
    assert may_free_capacity(old, new) == is_more


async def test_nothing_is_kept_of_nodes_that_are_gone():
    clock = FakeClock()
    kube = FakeKube(clock)
    informers = Informers(kube, clock, ClusterCache())
    writer = ReservationWriter(kube, informers, clock, clock.sleep, gather_s=0)
    restorer = Restorer(kube, informers, writer, EventRecorder(kube, clock, "test"), 8)
    gc = ReservationGC(kube, informers, writer, restorer, clock=clock, sleep=clock.sleep)
    running = asyncio.create_task(informers.run())
    try:
        await informers.wait_synced()
        for name in "abc":
            freed = {ANNOTATION_CAPACITY_FREED: rfc3339(clock.now())}
            odd = msgspec.structs.replace(tenant(name, [f"GPU-{name}-0"]), deadline="soon")
            seed_node(kube, gpu_node(name, 1, [odd], annotations=freed))
        await until(lambda: len(informers.cluster.nodes) == 3)
        seed_node(kube, gpu_node("d", 1))  # nothing is uncertain there
        await until(lambda: len(informers.cluster.nodes) == 4)
        await gc.sweep()
        assert len([call for call in kube.calls if call.plural == NODES.plural]) == 4
        for name in "bcd":
            await kube.delete(GPU_NODES, name)
        await until(lambda: len(informers.cluster.nodes) == 1)
        await gc.sweep()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert gc.remembered == {"a"}


async def test_what_has_ended_on_a_node_is_released_together():
    """Regression: each release waited for the pause after the one before, a tenth of a second each."""
    clean = Clean()
    seed_node(clean.kube, gpu_node("a", 4, [tenant(f"t{i}", [f"GPU-a-{i // 4}"]) for i in range(16)]))
    async with clean.watching():
        await clean.finish(clean.gc.sweep())
    assert clean.kube.dump(GPU_NODES, "a")["spec"]["reservations"] == []
    assert len(clean.writes) <= 2


async def test_what_a_node_has_lost_is_restored_together():
    clean = Clean()
    held = [tenant(f"t{i}", [f"GPU-a-{i // 4}"]) for i in range(16)]
    seed_node(clean.kube, gpu_node("a", 4, held))
    for i in range(16):
        seed_pod(clean.kube, f"t{i}", nodeName="a")
    async with clean.watching():
        await clean.kube.patch(GPU_NODES, "a", {"spec": {"reservations": []}})
        await until(lambda: clean.informers.cluster.nodes_holding("pod-t0") == [])
        before = len(clean.writes)
        await clean.finish(clean.restorer.restore(()))
    assert len(clean.kube.dump(GPU_NODES, "a")["spec"]["reservations"]) == 16
    assert len(clean.writes) - before <= 2


class Stuck(FakeKube):
    """A server that never answers writes of the node `a`, nor reads of the pod `asked` until it may."""

    def __init__(self, clock):
        super().__init__(clock)
        self.may_answer = asyncio.Event()

    async def patch(self, kind, name, *args, **options):
        if name == "a":
            await asyncio.Event().wait()
        return await super().patch(kind, name, *args, **options)

    async def get(self, kind, name, *args, **options):
        if name == "asked":
            await self.may_answer.wait()
        return await super().get(kind, name, *args, **options)


async def test_a_node_that_cannot_be_written_holds_up_no_other():
    """Regression: nodes were written ten at a time, and the next ten waited for the slowest of them."""
    clean = Clean(Stuck)
    names = ["a", *(f"b{i}" for i in range(2 * AT_ONCE))]
    for name in names:
        seed_node(clean.kube, gpu_node(name, 1, [tenant(f"t-{name}", [f"GPU-{name}-0"])]))
    async with clean.watching(), background(clean.gc.sweep()):
        await until(lambda: not any(clean.kube.dump(GPU_NODES, name)["spec"]["reservations"] for name in names[1:]))


async def test_a_pod_that_ends_during_a_sweep_is_released_meanwhile():
    """Regression: until a sweep had released all, nobody looked at the pods that ended."""
    clean = Clean(Stuck)
    seed_node(clean.kube, gpu_node("a", 1, [tenant("x", ["GPU-a-0"])]))
    seed_node(clean.kube, gpu_node("b", 1, [tenant("y", ["GPU-b-0"])]))
    seed_pod(clean.kube, "y", nodeName="b")
    async with clean.watching(), background(clean.gc.run()):
        await until(lambda: any(call.verb == "get" for call in clean.kube.calls))
        await clean.kube.delete(PODS, "y-worker-0-1", namespace="default")
        await until(lambda: clean.kube.dump(GPU_NODES, "b")["spec"]["reservations"] == [])


async def test_what_is_bound_while_others_of_its_node_are_asked_about_is_kept():
    clean = Clean(Stuck)
    lapsed = rfc3339(clean.clock.now() - timedelta(hours=1))
    waiting = msgspec.structs.replace(tenant("y", ["GPU-b-1"]), pod_name="y-worker-0-1", deadline=lapsed)
    seed_node(clean.kube, gpu_node("b", 2, [tenant("asked", ["GPU-b-0"]), waiting]))
    seed_pod(clean.kube, "y")
    async with clean.watching(), background(clean.gc.sweep()):
        await until(lambda: any(call.verb == "get" and call.name.startswith("y-") for call in clean.kube.calls))
        await clean.kube.patch(PODS, "y-worker-0-1", {"spec": {"nodeName": "b"}}, namespace="default")
        await until(lambda: clean.informers.pod("pod-y").spec.node_name == "b")
        clean.kube.may_answer.set()
        await until(lambda: len(clean.kube.dump(GPU_NODES, "b")["spec"]["reservations"]) == 1)
    assert clean.informers.cluster.nodes_holding("pod-y") == ["b"]


async def test_what_is_told_while_a_node_is_touched_is_for_the_next_time(world):
    """Regression: it counted as told by the touch that was on its way."""
    world.add(nodes=["a"])
    async with world.extender() as extender:
        for _ in range(200):
            await asyncio.sleep(0)
        patch, gate, touched = world.kube.patch, asyncio.Event(), []

        async def slow(kind, name, *others, **more):
            found = await patch(kind, name, *others, **more)
            if kind is NODES:
                touched.append(name)
                await gate.wait()
            return found

        world.kube.patch = slow
        extender.gc.remind("a")
        await until(lambda: touched == ["a"])
        extender.gc.remind("a")
        gate.set()
        await until(lambda: touched == ["a", "a"])


async def test_nobody_is_reminded_of_a_node_that_is_not_there(world):
    async with world.extender() as extender:
        extender.gc.remind("gone")
        assert "gone" not in extender.gc.remembered
