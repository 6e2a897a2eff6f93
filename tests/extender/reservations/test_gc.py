"""Reservations that are released or restored."""

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.keys import ANNOTATION_GPUS
from carpool_core.kube.api import EVENTS, GPU_NODES, GPU_TRAINING_JOBS, PODS
from carpool_core.kube.errors import Forbidden
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import Tenant
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, SharingMode
from carpool_extender.cache.cluster import ClusterCache, may_free_capacity
from carpool_extender.informers import Informers
from carpool_extender.reservations.gc import (
    CONCURRENT,
    GRACE_S,
    UNCONFIRMED_S,
    ReservationGC,
    Restorer,
    release_reason,
)
from carpool_extender.reservations.writer import ReservationWriter
from carpool_extender.testing import device, gpu_node, pod_of, seed_node, seed_pod, tenant, until
from extender_world import World, args, background, filtering
from msgspec.structs import replace
from prometheus_client import generate_latest

NOW = FakeClock().now()
POD = "x-worker-0-1"
X = replace(tenant("x", ["GPU-a-0"]), deadline=rfc3339(NOW))
RUNNING = {"containerStatuses": [{"name": "train", "state": {"running": {"startedAt": rfc3339(NOW)}}}]}


@pytest.fixture
def world():
    """A world whose extender leads: no other collects reservations."""
    return World(leads=True)


def later(seconds):
    return NOW + timedelta(seconds=seconds)


def pod(node="a", *, uid="pod-x", deleted_s=None, **status):
    """A pod whose grace period, if it was deleted, ended `deleted_s` seconds ago."""
    metadata = {"name": POD, "uid": uid}
    if deleted_s is not None:
        metadata["deletionTimestamp"] = rfc3339(later(-deleted_s))
    return msgspec.convert({"metadata": metadata, "spec": {"nodeName": node}, "status": status}, Pod)


@pytest.mark.parametrize(
    ("found", "now", "reason"),
    [
        pytest.param(None, NOW, "its pod is gone", id="no pod"),
        pytest.param(pod(uid="another"), NOW, "its pod is gone", id="another pod has its name"),
        pytest.param(pod(phase="Failed"), NOW, "its pod has ended with Failed", id="ended"),
        pytest.param(pod("b"), NOW, "its pod runs on node b", id="bound elsewhere"),
        pytest.param(pod(), later(10**6), None, id="bound, whatever its deadline"),
        pytest.param(pod(""), later(GRACE_S), None, id="not bound, within the grace"),
        pytest.param(pod(""), later(GRACE_S + 1), "its pod was not bound by", id="not bound, lapsed"),
        pytest.param(pod(deleted_s=UNCONFIRMED_S - 1), NOW, None, id="deleted, its kubelet may still confirm it"),
        pytest.param(
            pod(deleted_s=UNCONFIRMED_S + 1),
            NOW,
            "its pod was deleted before it started",
            id="never started, dead node",
        ),
        pytest.param(pod(deleted_s=UNCONFIRMED_S + 1, **RUNNING), NOW, None, id="deleted, it ran and may still run"),
    ],
)
def test_when_a_reservation_is_no_longer_needed(found, now, reason):
    """Regression: on a dead node no kubelet confirms a deletion, and the reservation was held forever."""
    result = release_reason(X, "a", found, now)
    assert result is None if reason is None else result.startswith(reason)


# Through a whole extender


async def test_only_the_leader_releases_reservations(world):
    """Regression: a standby released what the leader had just prolonged."""
    seed_node(world.kube, gpu_node("a", 1, [X]))
    world.hold("elsewhere_1")
    world.clock.advance(GRACE_S + UNCONFIRMED_S)
    async with world.extender() as extender:
        await extender.gc.sweep()
        assert len(world.reservations("a")) == 1
        world.hold("here_2")
        await until(lambda: not world.reservations("a"))


@pytest.mark.parametrize("how", ["deleted", "Succeeded", "Failed", "job deleted"])
async def test_the_reservation_of_an_ended_pod_is_released(world, how):
    world.add("x")
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        if how == "deleted":
            await world.kube.delete(PODS, POD, namespace="default")
        elif how == "job deleted":
            await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
        else:
            status = {"status": {"phase": how}}
            await world.kube.patch(PODS, POD, status, namespace="default", subresource="status")
        await until(lambda: world.held() == {})
    assert (world.held(), world.events()) == ({}, [])


async def test_a_pod_that_the_watch_has_not_seen_is_confirmed_on_the_server(world):
    """A watch may be late, or select other pods."""
    world.add("x")
    seed_node(world.kube, gpu_node("a", 1, [tenant("x", ["GPU-a-0"])]))
    hidden = pod_of("x", schedulerName="another", nodeName="a")
    hidden["metadata"]["name"] = "x"
    world.kube.seed(PODS, hidden)
    async with world.extender() as extender:
        await extender.gc.sweep()
    assert world.held() == {"a": ["pod-x"]}


@pytest.mark.parametrize("deadline", ["soon", "2026-01-31T11:00:00", "9999-12-31T23:59:59Z", "2026-13-31T12:00:00Z"])
async def test_a_reservation_with_an_unreadable_deadline_never_lapses(world, deadline):
    world.add("x")
    odd = replace(tenant("x", ["GPU-a-0"]), pod_name=POD, deadline=deadline)
    seed_node(world.kube, gpu_node("a", 1, [odd, tenant("gone", ["GPU-a-0"])]))
    async with world.extender() as extender:
        await until(lambda: world.held() == {"a": ["pod-x"]})
        assert extender.informers.not_ready() is None


async def test_a_failing_release_is_tried_again(world):
    world.add("x")
    seed_node(world.kube, gpu_node("a", 1, [tenant("gone", ["GPU-a-0"])]))
    world.kube.fail_next("patch", GPU_NODES, Forbidden("not now", status=403))
    async with world.extender() as extender:
        await until(lambda: extender.gc.orphaned == 1)
        for _ in range(3):
            world.clock.advance(5)
            for _ in range(50):
                await asyncio.sleep(0)
        assert (world.held(), extender.gc.orphaned) == ({}, 0)
    assert len([call for call in world.writes(GPU_NODES.plural) if not call.subresource]) == 2


def seed_running(kube, job, **annotations):
    """Put a job's pod on a server, running on node `a`."""
    pod = pod_of(job, nodeName="a") | {"status": RUNNING | {"phase": "Running"}}
    pod["metadata"]["annotations"] = annotations
    return kube.seed(PODS, pod)


def another(name, devices):
    """The GpuNode that an agent creates in place of a deleted one."""
    node = gpu_node(name, devices)
    return replace(node, metadata=replace(node.metadata, uid="another"))


@pytest.mark.parametrize("how", ["created again", "emptied"])
async def test_a_running_pod_gets_the_reservation_back_that_its_node_lost(world, how):
    world.add("x", nodes=["a"], gpus=2)
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
    await world.kube.patch(PODS, POD, {"status": RUNNING}, namespace="default", subresource="status")
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


async def test_the_reservation_of_a_suspended_jobs_pod_lapses_although_its_bind_is_repeated(world):
    """Until its deadline a Binding may be under way, so it is not released before."""
    world.add("x")
    held = replace(tenant("x", ["GPU-a-0"]), pod_name=POD, deadline=rfc3339(later(20)))
    seed_node(world.kube, gpu_node("a", 1, [held]))
    suspend = {"spec": {"runPolicy": {"suspend": True}}}
    await world.kube.patch(GPU_TRAINING_JOBS, "x", suspend, namespace="default")
    async with world.extender() as extender:
        for _ in range(6):
            assert "but it is suspended" in (await extender.service.bind(args())).error
            assert world.held() == {"a": ["pod-x"]}
            world.clock.advance(5)
        world.clock.advance(5)
        await extender.gc.sweep()
    assert world.held() == {}


async def test_an_earlier_reservation_of_a_bound_pod_is_not_restored(world):
    """Regression: a broken watch missed the reservation with which the pod was bound, on another GPU."""
    world.add("x", nodes=["a"], gpus=2)
    seed_node(world.kube, gpu_node("a", 2, [replace(tenant("x", ["GPU-a-0"]), pod_name=POD)]))
    async with world.extender() as extender:
        seed_running(world.kube, "x", **{ANNOTATION_GPUS: "GPU-a-1"})
        await world.kube.delete(GPU_NODES, "a")
        await until(lambda: extender.informers.cluster.node("a") is None)
        seed_node(world.kube, another("a", devices=2))
        await until(lambda: world.events() != [])
        await extender.gc.sweep()
    assert world.reservations("a") == []
    [(reason, message)] = world.events()
    assert reason == "ReservationLost"
    assert message.startswith(f"pod default/{POD} runs on node a without a reservation, so nothing is kept for it")
    assert "nothing is known of the reservation that it had" in message
    assert world.kube.dump_all(EVENTS)[0]["count"] == 1


async def test_a_pod_that_has_not_started_does_not_get_a_lost_reservation_back(world):
    """Regression: the Binding of x arrived late, after its GPU had been given to y and the GpuNode was lost again."""
    world.add("x", "y", nodes=["a"])
    exclusive = {name: replace(tenant(name, ["GPU-a-0"], SharingMode.EXCLUSIVE)) for name in "xy"}
    seed_node(world.kube, gpu_node("a", 1, [exclusive["x"]]))
    async with world.extender() as extender:
        for held in ([exclusive["y"]], []):
            await world.kube.patch(GPU_NODES, "a", {"spec": {"reservations": msgspec.to_builtins(held)}})
            await until(lambda held=held: extender.informers.cluster.node("a").spec.reservations == held)
        seed_pod(world.kube, "x", nodeName="a")
        seed_running(world.kube, "y")
        await until(lambda: extender.informers.pod("pod-y").has_started)
        await extender.gc.sweep()
    assert [one["podUid"] for one in world.reservations("a")] == ["pod-y"]


@pytest.mark.parametrize("recorded", [True, False], ids=["a worker", "a pod that the operator did not create"])
async def test_a_node_created_again_is_not_offered_while_a_worker_runs_there_without_a_reservation(world, recorded):
    """Regression: its GPUs were given away. The extender started later, so it does not know the reservation."""
    world.add("x", "y")
    attempt = {"number": 1, "podUids": ["pod-x"] if recorded else ["another"]}
    await world.kube.patch(
        GPU_TRAINING_JOBS, "x", {"status": {"attempts": [attempt]}}, namespace="default", subresource="status"
    )
    seed_pod(world.kube, "x", nodeName="a")
    async with world.extender() as extender:
        found = await extender.service.filter(filtering("y"))
        assert found.node_names == (["b"] if recorded else ["a", "b"])
        if recorded:
            message = f"default/{POD} runs on its node without a reservation"
            assert message in extender.informers.cluster.snapshot().unavailable[0].reason
            metrics = generate_latest(extender.registry).decode()
            assert 'carpool_extender_unavailable_gpus{node="a",reason="unreserved_pod"} 1.0' in metrics
        await world.kube.patch(PODS, POD, {"status": {"phase": "Succeeded"}}, namespace="default", subresource="status")
        await until(lambda: extender.informers.pod("pod-x").is_finished)
        assert sorted((await extender.service.filter(filtering("y"))).node_names) == ["a", "b"]


async def test_a_reservation_whose_place_was_given_away_is_reported_once_and_restored_when_the_place_is_free(world):
    """Regression: the first refusal was the last attempt."""
    world.add("x", "y", nodes=["a"])
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        await world.kube.patch(PODS, POD, {"status": RUNNING}, namespace="default", subresource="status")
        taker = replace(tenant("y", ["GPU-a-0"], SharingMode.EXCLUSIVE), pod_name="y-worker-0-1")
        await world.kube.patch(GPU_NODES, "a", {"spec": {"reservations": [msgspec.to_builtins(taker)]}})
        seed_pod(world.kube, "y", nodeName="a")
        await until(lambda: extender.informers.cluster.nodes_holding("pod-x") == [])
        for _ in range(2):
            await extender.gc.sweep()
        [(_, message)] = world.events()
        assert "cannot be written again: GPU-a-0: wants it by MPS, it is used by Exclusive" in message
        assert world.kube.dump_all(EVENTS)[0]["count"] == 1
        await world.kube.delete(PODS, "y-worker-0-1", namespace="default")
        await until(lambda: "pod-y" not in {one["podUid"] for one in world.reservations("a")})
        await extender.gc.sweep()
        assert [one["podUid"] for one in world.reservations("a")] == ["pod-x"]


# Single sweeps


class Setup:
    """The garbage collector of a server, with real pauses between writes."""

    def __init__(self, server=FakeKube):
        self.clock = FakeClock()
        self.kube = server(self.clock)
        self.informers = Informers(self.kube, self.clock, ClusterCache())
        writer = ReservationWriter(self.kube, self.informers, self.clock.sleep)
        restorer = Restorer(self.kube, self.informers, writer, EventRecorder(self.kube, self.clock, "test"), 8)
        self.in_flight = set()
        self.gc = ReservationGC(
            self.kube,
            self.informers,
            writer,
            restorer,
            in_flight=self.in_flight,
            leads=lambda: True,
            clock=self.clock,
            sleep=self.clock.sleep,
        )

    async def sweep(self):
        sweeping = asyncio.create_task(self.gc.sweep())
        while not sweeping.done():
            await until(lambda: sweeping.done() or self.clock.sleeping != [])
            self.clock.advance(0.1)
        await sweeping

    def held(self, node="a"):
        return [one["podUid"] for one in self.kube.dump(GPU_NODES, node)["spec"]["reservations"]]

    def writes(self, kind=GPU_NODES):
        return [call for call in self.kube.calls if call.verb == "patch" and call.plural == kind.plural]

    @asynccontextmanager
    async def watching(self):
        async with background(self.informers.run()):
            await self.informers.wait_synced()
            yield


@pytest.mark.parametrize("is_restored", [False, True], ids=["released", "restored"])
async def test_reservations_of_one_node_are_released_or_restored_together(is_restored):
    """Regression: each release waited for the pause after the one before, a tenth of a second each."""
    setup = Setup()
    seed_node(setup.kube, gpu_node("a", 4, [tenant(f"t{i}", [f"GPU-a-{i // 4}"]) for i in range(16)]))
    async with setup.watching():
        if is_restored:
            for i in range(16):
                seed_running(setup.kube, f"t{i}")
            await setup.kube.patch(GPU_NODES, "a", {"spec": {"reservations": []}})
            await until(lambda: setup.informers.cluster.nodes_holding("pod-t0") == [])
            await until(lambda: setup.informers.pod("pod-t15") is not None)
            setup.kube.calls.clear()
        await setup.sweep()
    assert len(setup.held()) == 16 * is_restored
    assert len(setup.writes()) <= 2


class Stuck(FakeKube):
    """A server that never answers writes of node `a`, and answers reads of pods on node `b` when it may."""

    def __init__(self, clock):
        super().__init__(clock)
        self.may_answer = asyncio.Event()

    async def patch(self, kind, name, *args, **options):
        if name == "a":
            await asyncio.Event().wait()
        return await super().patch(kind, name, *args, **options)

    async def get(self, kind, name, *args, **options):
        found = await super().get(kind, name, *args, **options)
        if name.startswith("late"):
            await self.may_answer.wait()
        return found


async def test_a_node_that_cannot_be_written_delays_no_other():
    """Regression: nodes were written ten at a time, and the next ten waited for the slowest of them."""
    setup = Setup(Stuck)
    names = ["a", *(f"b{i}" for i in range(2 * CONCURRENT))]
    for name in names:
        seed_node(setup.kube, gpu_node(name, 1, [tenant(f"t-{name}", [f"GPU-{name}-0"])]))
    async with setup.watching(), background(setup.gc.sweep()):
        await until(lambda: not any(setup.held(name) for name in names[1:]))


async def test_a_pod_that_ends_during_a_sweep_is_released_meanwhile():
    """Regression: pods that ended had to wait until a sweep had released everything."""
    setup = Setup(Stuck)
    seed_node(setup.kube, gpu_node("a", 1, [tenant("x", ["GPU-a-0"])]))
    seed_node(setup.kube, gpu_node("b", 1, [tenant("y", ["GPU-b-0"])]))
    seed_pod(setup.kube, "y", nodeName="b")
    async with setup.watching(), background(setup.gc.run()):
        await until(lambda: any(call.verb == "get" for call in setup.kube.calls))
        await setup.kube.delete(PODS, "y-worker-0-1", namespace="default")
        await until(lambda: setup.held("b") == [])


@pytest.mark.parametrize("how", ["bound", "prolonged", "being bound"])
async def test_a_reservation_that_is_used_after_the_server_was_asked_is_kept(how):
    setup = Setup(Stuck)
    lapsed = rfc3339(setup.clock.now() - timedelta(hours=1))
    held = replace(tenant("late", ["GPU-b-0"]), pod_name="late-worker-0-1", deadline=lapsed)
    seed_node(setup.kube, gpu_node("b", 1, [held]))
    seed_pod(setup.kube, "late")
    async with setup.watching(), background(setup.gc.sweep()) as sweeping:
        await until(lambda: any(call.verb == "get" for call in setup.kube.calls))
        if how == "bound":
            await setup.kube.patch(PODS, "late-worker-0-1", {"spec": {"nodeName": "b"}}, namespace="default")
            await until(lambda: setup.informers.pod("pod-late").spec.node_name == "b")
        elif how == "prolonged":  # by another extender, and this one's watch is late
            prolonged = replace(held, deadline=rfc3339(later(20)))
            setup.kube.end_watches()
            await setup.kube.patch(GPU_NODES, "b", {"spec": {"reservations": [msgspec.to_builtins(prolonged)]}})
        else:
            setup.in_flight.add("pod-late")
        setup.kube.may_answer.set()
        await until(sweeping.done)
    assert setup.held("b") == ["pod-late"]


# Which changes of a node free capacity


def reporting(*devices, strangers=()):
    node = gpu_node("a", devices)
    return replace(node, status=replace(node.status, tenants=list(strangers)))


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
def test_which_changes_may_free_capacity_for_a_waiting_pod(old, new, is_more):
    """Regression: every placement on an idle GPU had kube-scheduler try every waiting pod again."""
    assert may_free_capacity(old, new) == is_more
