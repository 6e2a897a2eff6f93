"""The device plugin and a kubelet, over real gRPC on real sockets."""

import asyncio
import dataclasses
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import carpool_simulated
import grpc
import pytest
from agent_world import registry_of, reservation, reserve_on, status_of
from carpool_core.clock import SystemClock
from carpool_core.keys import ANNOTATION_PROBE, CDI_KIND
from carpool_core.kube.api import PODS
from carpool_core.kube.errors import Unreachable
from carpool_core.kube.pods import (
    Container,
    Pod,
    PodMeta,
    PodSpec,
    PodStatus,
    ResourceRequirements,
    SecurityContext,
    container_uid,
)
from carpool_core.resources.node import Partition, Reservation, TenantProfile
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import PartitionState, PodUid, SharingMode
from carpool_deviceplugin import cdi
from carpool_deviceplugin.app import build
from carpool_deviceplugin.gpu import Access
from carpool_deviceplugin.plugin import (
    AgentState,
    KubeletError,
    LaterError,
    Owner,
    Plugin,
    RefusedError,
    Registration,
    check_same_user,
    earlier_reservations,
    full_gpus,
    living_pod,
    owner_of,
    ready_reservation,
)
from carpool_deviceplugin.plugin import PodResources as PodResourcesClient
from carpool_deviceplugin.protos import deviceplugin_pb2, podresources_pb2
from carpool_deviceplugin.protos.podresources_pb2 import ContainerDevices, ContainerResources, PodResources
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.node import flowing, running, until
from carpool_deviceplugin.timeouts import Intervals
from fake_kubelet import Kubelet
from google.protobuf import descriptor_pb2
from msgspec.structs import replace

EXCLUSIVE, TIME_SLICING, MPS, _ = SharingMode


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    (tmp_path / "plugins").mkdir()
    return AgentSettings(
        node_name="node-1",
        device_plugin_dir=tmp_path / "plugins",
        pod_resources_socket=tmp_path / "resources.sock",
        cdi_dir=tmp_path / "cdi",
        state_dir=tmp_path / "state",
        simulated_gpus="NVIDIA A100-SXM4-40GB:2",
        slots_per_gpu=4,
    )


@pytest.fixture
async def kubelet(settings):
    kubelet = Kubelet(settings.device_plugin_dir, settings.pod_resources_socket)
    await kubelet.start()
    yield kubelet
    await kubelet.stop()


@pytest.fixture
async def agent(settings, kube, kubelet):
    async with running(flowing(settings, kube)) as agent:
        await kubelet.registered.get()
        await until(lambda: agent.unready() is None)
        await until(lambda: status_of(kube).devices)
        yield agent


async def test_the_preflight_is_reported_before_the_agent_registers(settings, kube, kubelet) -> None:
    seen: list[list[str]] = []
    kubelet.registered.put_nowait = lambda _: seen.append([one.type for one in status_of(kube).conditions])
    async with running(flowing(settings, kube)):
        await until(lambda: seen)
    assert "Preflight" in seen[0]


async def place(kube: FakeKube, *reservations: Any) -> None:
    """Reserve, wait until ready and bind, as the scheduler does."""
    await reserve_on(kube, *reservations)
    await until(lambda: [p.state.value for p in status_of(kube).partitions] == ["Ready"] * len(reservations))
    for one in reservations:
        pod(kube, one.pod_name)


def pod(kube: FakeKube, name: str, annotations: dict[str, str] | None = None, **status: Any) -> None:
    metadata = {"name": name, "uid": f"uid-{name}", "annotations": annotations or {}}
    kube.seed(PODS, {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": status})


def edits(settings: AgentSettings, slot: str) -> dict[str, Any]:
    spec = json.loads((settings.cdi_dir / f"carpool.dev-{slot}.json").read_text())
    (device,) = spec["devices"]
    assert device["name"] == slot
    edits = device["containerEdits"]
    return {
        "env": dict(e.split("=", 1) for e in edits.get("env", [])),
        "mounts": [m["hostPath"] for m in edits["mounts"]],
        "paths": {m["containerPath"]: m["hostPath"] for m in edits["mounts"]},
    }


async def test_allocate_names_slots_and_requires_prestart(agent, kubelet, settings) -> None:
    options = await kubelet.options()
    assert (options.pre_start_required, options.get_preferred_allocation_available) == (True, False)
    assert await kubelet.admit("a", "slot-3", "slot-5") == ["carpool.dev/slot=slot-3", "carpool.dev/slot=slot-5"]
    assert kubelet.environment == {"NVIDIA_VISIBLE_DEVICES": "void"}, "for a container runtime that ignores CDI devices"
    assert not settings.cdi_dir.exists() or not list(settings.cdi_dir.iterdir())


async def test_container_gets_its_reservation(agent, kubelet, settings, kube, reserve) -> None:
    first = agent.devices.uuids[0]
    await place(kube, reserve("a", first, mode=MPS, memory_limit_mib=9216, thread_percentage=30))
    await kubelet.admit("a", "slot-7")
    await kubelet.start_container("a")
    found = edits(settings, "slot-7")
    assert found["env"]["CARPOOL_VISIBLE_GPUS"] == first
    assert found["env"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=9216M"
    device = settings.state_dir / "simulated" / first
    assert found["mounts"] == [str(device), str(device / "claims"), str(settings.state_dir / "mps" / first)]
    assert all(map(os.path.exists, found["mounts"]))


async def start_with_probe(agent, kubelet, settings, kube, reservation, mode="Auto") -> dict[str, Any]:
    """Start a container of a job with this `spec.probe`; return its edits."""
    await place(kube, reservation)
    pod(kube, reservation.pod_name, {ANNOTATION_PROBE: mode})
    await kubelet.admit(reservation.pod_name, "slot-7")
    await until(lambda: agent.kubelet and agent.kubelet._pods.store.get("default/a").metadata.annotations)
    await kubelet.start_container(reservation.pod_name)
    return edits(settings, "slot-7")


@pytest.mark.parametrize("mode", ["Auto", "Off"])
async def test_a_container_gets_the_probe_unless_its_job_declines(
    agent, kubelet, settings, kube, reserve, mode
) -> None:
    found = await start_with_probe(agent, kubelet, settings, kube, reserve("a", agent.devices.uuids[0]), mode)
    variables = {name: found["env"].get(name) for name in ("CARPOOL_PROBE_FILE", "PYTHONUSERBASE")}
    if mode == "Off":
        assert set(variables.values()) == {None}
        assert not any("probe" in path for path in found["mounts"])
        return
    assert variables == {"CARPOOL_PROBE_FILE": "/run/carpool/steps", "PYTHONUSERBASE": "/run/carpool/probe/user"}
    assert found["paths"]["/run/carpool/steps"] == str(settings.state_dir / "probe/pods/uid-a")
    assert found["paths"]["/run/carpool/probe"] == str(settings.state_dir / "probe/code")


async def test_steps_of_a_container_reach_status_and_metrics(settings, kube, kubelet, reserve) -> None:
    """The container is a process whose paths are the node's."""
    intervals = Intervals(sample_s=0.1, measures_s=0.1)
    async with running(build(settings, kube, SystemClock(), intervals=intervals)) as agent:
        await kubelet.registered.get()
        await until(lambda: status_of(kube).devices)
        found = await start_with_probe(agent, kubelet, settings, kube, reserve("a", agent.devices.uuids[0]))
        env = dict(found["env"])
        for there, here in sorted(found["paths"].items(), reverse=True):
            env = {name: value.replace(there, here) for name, value in env.items()}
        gpus = settings.state_dir / "simulated"
        env |= {"PYTHONPATH": str(settings.state_dir / "libraries"), "CARPOOL_SIMULATED_GPUS_DIR": str(gpus)}
        libraries = settings.state_dir / "libraries"
        libraries.mkdir()
        (libraries / "carpool_simulated").symlink_to(Path(carpool_simulated.__file__).parent)
        script = (
            "from carpool_simulated import open_gpus\nfrom carpool_probe import step\n"
            "with open_gpus() as (gpu,):\n while True: gpu.run(0.01); step(8)"
        )
        training = await asyncio.create_subprocess_exec(sys._base_executable, "-c", script, env=env)
        try:
            await until(lambda: any((one.steps or 0) >= 100 for one in status_of(kube).tenants))
        finally:
            training.kill()
            await training.wait()
        (tenant,) = status_of(kube).tenants
        assert tenant.step_time_seconds is not None
        assert 0.009 < tenant.step_time_seconds < 5  # a loaded machine makes steps longer, never shorter
        assert tenant.samples_per_second == pytest.approx(8 / tenant.step_time_seconds, rel=0.3)
        assert tenant.solo_step_time_seconds is not None
        value = registry_of(agent).get_sample_value
        labels = {"UUID": tenant.gpu_uuid, "namespace": "default", "pod": "a", "training_job": "job-a"}
        assert (value("carpool_gpu_tenant_steps_total", labels) or 0) >= 100
        assert (value("carpool_gpu_tenant_solo_step_seconds", labels) or 0) > 0.009


async def test_metrics_name_the_container_that_holds_the_gpu(agent, kubelet, kube, reserve) -> None:
    gpu = agent.devices.uuids[0]
    await place(kube, reserve("a", gpu, mode=EXCLUSIVE))
    await kubelet.admit("a", "slot-0", container="learn")
    registry = registry_of(agent)

    def owners() -> set[tuple[str, str]]:
        samples = [s for m in registry.collect() if m.name == "DCGM_FI_DEV_FB_USED" for s in m.samples]
        return {(s.labels["pod"], s.labels["container"]) for s in samples if s.labels["UUID"] == gpu}

    await until(lambda: owners() == {("a", "learn")})
    kubelet.held.clear()
    await until(lambda: owners() == {("a", "")})


async def test_two_pods_of_one_size_each_get_their_own(agent, kubelet, settings, kube, reserve) -> None:
    """Matching pods in Allocate by their amount swaps their GPUs."""
    first, second = agent.devices.uuids
    await place(kube, reserve("a", second, mode=EXCLUSIVE), reserve("b", first, mode=EXCLUSIVE))
    await asyncio.gather(kubelet.admit("a", "slot-0"), kubelet.admit("b", "slot-1"))
    await asyncio.gather(kubelet.start_container("b"), kubelet.start_container("a"))
    assert edits(settings, "slot-0")["env"]["CARPOOL_VISIBLE_GPUS"] == second
    assert edits(settings, "slot-1")["env"]["CARPOOL_VISIBLE_GPUS"] == first


async def refused(kubelet: Kubelet, pod: str) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await kubelet.start_container(pod)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return error.value.details()


async def test_pod_without_reservation_never_starts(agent, kubelet, settings, kube, reserve) -> None:
    """A pod with spec.nodeName set skips the scheduler and still reaches the kubelet. Annotations give no GPU."""
    gpu = agent.devices.uuids[0]
    await place(kube, reserve("a", gpu))
    metadata = {"name": "sneaky", "uid": "uid-sneaky", "annotations": {"carpool.dev/gpus": gpu}}
    kube.seed(PODS, {"metadata": metadata, "spec": {"nodeName": "node-1"}})
    await kubelet.admit("sneaky", "slot-0")
    assert "expected a reservation for pod default/sneaky" in await refused(kubelet, "sneaky")
    assert not list(settings.cdi_dir.glob("*.json"))


async def test_clients_of_one_mps_daemon_run_as_one_user(agent, kubelet, settings, kube, reserve) -> None:
    gpu = agent.devices.uuids[0]
    await place(kube, reserve("a", gpu, mode=MPS), reserve("b", gpu, mode=MPS), reserve("c", gpu, mode=MPS))
    for number, (name, user) in enumerate((("a", 1000), ("b", 1001), ("c", 1000))):
        spec = {"nodeName": "node-1", "securityContext": {"runAsUser": user}}
        kube.seed(PODS, {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": spec})
        await kubelet.admit(name, f"slot-{number}")
    await until(lambda: agent.kubelet._pods.store.get("default/c"))
    await kubelet.start_container("a")
    assert "run as user 1000, as pod default/a does, found 1001" in await refused(kubelet, "b")
    assert "run as user 1001, as pod default/b does, found 1000" in await refused(kubelet, "c"), (
        "in the order of reservations"
    )
    pod(kube, "a", phase="Succeeded")
    await until(lambda: agent.kubelet._pods.store.get("default/a").is_finished)
    await kubelet.start_container("b")


async def test_the_api_server_confirms_the_uid_as_the_watch_may_be_old(agent, kubelet, kube, reserve) -> None:
    """The kubelet may start a pod of an ended worker's name before the agent's watch shows the worker's end."""
    await place(kube, reserve("a", agent.devices.uuids[0]))
    await kubelet.admit("a", "slot-0")
    kube.fail_next("get", PODS, Unreachable("connection refused"))
    await kubelet.start_container("a")
    kube.lose(PODS, "a", "default")
    assert "expected pod default/a on this node, found none" in await refused(kubelet, "a")


async def test_a_late_reservation_is_waited_for(agent, kubelet, settings, kube, reserve) -> None:
    await kubelet.admit("a", "slot-0")
    starting = asyncio.ensure_future(kubelet.start_container("a"))
    await place(kube, reserve("a", agent.devices.uuids[0]))
    await starting
    assert edits(settings, "slot-0")["env"]["CARPOOL_POD_UID"] == "uid-a"


async def test_kubelet_restart(agent, kubelet, settings, kube, reserve) -> None:
    await kubelet.stop()
    again = Kubelet(settings.device_plugin_dir, settings.pod_resources_socket)
    await again.start()
    assert not (settings.device_plugin_dir / "carpool.sock").exists(), "a kubelet that starts deletes it"
    request = await asyncio.wait_for(again.registered.get(), 60)
    assert (request.version, request.endpoint, request.resource_name) == ("v1beta1", "carpool.sock", "carpool.dev/gpu")
    await place(kube, reserve("a", agent.devices.uuids[0]))
    await again.admit("a", "slot-0")
    await again.start_container("a")
    await again.stop()


async def test_kubelet_that_comes_later(settings, kube) -> None:
    async with running(flowing(settings, kube)) as agent:
        await until(lambda: agent.reconciler.reflector.store.synced)
        assert "is not registered with the kubelet" in agent.unready()
        kubelet = Kubelet(settings.device_plugin_dir, settings.pod_resources_socket)
        await kubelet.start()
        await until(lambda: agent.unready() is None)
        await kubelet.stop()


async def test_agent_without_contact_to_the_api_server_offers_no_gpus(settings, kube, kubelet) -> None:
    """The kubelet then offers none of its GPUs, so that no pod comes for which the agent knows no reservation."""
    socket = settings.device_plugin_dir / "carpool.sock"
    async with running(flowing(settings, kube)) as agent:
        await kubelet.registered.get()
        agent.reconciler.reflector.store.contact_at = -1e9
        await until(lambda: not socket.exists())
        assert "has received no answer from the API server" in agent.unready()
        agent.reconciler.reflector.store.contact_at = agent.clock.monotonic()
        await kubelet.registered.get()
        assert socket.exists()


async def test_agent_killed_between_allocate_and_start(settings, kube, kubelet, reserve) -> None:
    async with running(flowing(settings, kube)) as agent:
        await kubelet.registered.get()
        await until(lambda: status_of(kube).devices)
        gpu = agent.devices.uuids[1]
        await place(kube, reserve("a", gpu, mode=MPS))
        await kubelet.admit("a", "slot-6")
    kubelet.registered = asyncio.Queue()
    async with running(flowing(settings, kube)):
        await kubelet.registered.get()
        await kubelet.start_container("a")
    assert edits(settings, "slot-6")["env"]["CARPOOL_VISIBLE_GPUS"] == gpu


async def test_slots_of_ended_pods_are_removed_also_by_the_next_agent(settings, kube, kubelet, reserve) -> None:
    async with running(flowing(settings, kube)) as agent:
        await kubelet.registered.get()
        await until(lambda: status_of(kube).devices)
        first, second = agent.devices.uuids
        await place(kube, reserve("a", first), reserve("b", second))
        for number, name in enumerate("ab"):
            await kubelet.admit(name, f"slot-{number}")
            await kubelet.start_container(name)
    await kube.delete(PODS, "a", namespace="default")
    async with running(flowing(settings, kube)):
        await until(lambda: os.listdir(settings.cdi_dir) == ["carpool.dev-slot-1.json"])
        pod(kube, "b", phase="Failed")
        await until(lambda: os.listdir(settings.cdi_dir) == [])


async def test_health_changes_reach_the_kubelet_and_slots_that_pods_hold_stay_healthy(agent, kubelet, settings) -> None:
    """Regression: after a reboot with a sick GPU the kubelet did not admit the pods with the last slots again."""
    await kubelet.admit("a", "slot-6", "slot-7")
    stream = kubelet.lists()
    assert set((await anext(stream)).values()) == {"Healthy"}
    path = settings.state_dir / "simulated" / agent.devices.uuids[0] / "device.json"
    good = path.read_bytes()
    path.write_text("{")
    health = await asyncio.wait_for(anext(stream), 60)
    assert [slot for slot, state in health.items() if state == "Healthy"] == ["slot-0", "slot-1", "slot-6", "slot-7"]
    path.write_bytes(good)
    assert set((await asyncio.wait_for(anext(stream), 60)).values()) == {"Healthy"}
    await stream.aclose()


@pytest.mark.parametrize("nodes", [[], [1], [0, 1]])
async def test_each_slot_has_the_numa_nodes_of_all_gpus(agent, nodes: list[int]) -> None:
    """The kubelet's topology manager aligns CPUs with it; two nodes are no constraint."""
    state = agent.kubelet.registration._plugin._state
    plugin = Plugin(state, Path(), gpus=agent.devices.uuids, numa_nodes=nodes, slots_per_gpu=4, clock=FakeClock())
    answers = plugin.ListAndWatch(None, None)
    devices = (await anext(answers)).devices
    assert [[node.ID for node in device.topology.nodes] for device in devices] == [nodes] * 8
    assert all(device.HasField("topology") == bool(nodes) for device in devices)
    await answers.aclose()


class TestAutoscaling:
    @pytest.fixture
    def settings(self, settings):
        return dataclasses.replace(settings, autoscaling=True)

    async def test_a_gpu_that_one_pod_has_alone_offers_no_slot_until_the_pod_ends(self, agent, kubelet, kube, reserve):
        async def offered():
            health = await asyncio.wait_for(anext(stream), 60)
            return [int(slot.removeprefix("slot-")) for slot, state in health.items() if state == "Healthy"]

        every = list(range(8))
        first, second = agent.devices.uuids
        shared = reserve("b", second, tenant=TenantProfile(memory_mib=8192))
        stream = kubelet.lists()
        assert await offered() == every
        await place(kube, reserve("a", first, mode=EXCLUSIVE))
        await kubelet.admit("a", "slot-5")
        assert await offered() == [0, 1, 2, 3, 5]
        await place(kube, reserve("a", first, mode=EXCLUSIVE), shared)
        assert await offered() == every, "the next reserved pod may need any slot"
        await kubelet.admit("b", "slot-7")
        assert await offered() == [0, 1, 2, 5, 7]
        del kubelet.held["default", "a", "train"]
        await place(kube, shared)
        assert await offered() == every
        await stream.aclose()

    async def test_a_kubelet_that_does_not_answer_changes_no_slot(self, agent, kubelet, kube, reserve):
        await place(kube, reserve("a", agent.devices.uuids[0], mode=EXCLUSIVE))
        await kubelet.admit("a", "slot-5")
        plugin = agent.kubelet.registration._plugin
        answers = plugin.ListAndWatch(None, None)
        assert sum(device.health == "Healthy" for device in (await anext(answers)).devices) == 5
        await kubelet.stop()
        again = asyncio.ensure_future(anext(answers))
        for _ in range(3):
            plugin.look_again()
            await asyncio.sleep(0)
        assert not again.done()
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)


UNKNOWN, KNOWN = TenantProfile(), TenantProfile(memory_mib=8192)


@pytest.mark.parametrize(
    ("mode", "tenant", "holding", "full"),
    [
        pytest.param(EXCLUSIVE, KNOWN, {"default/a"}, ["GPU-1", "GPU-2"], id="exclusive"),
        pytest.param(TIME_SLICING, UNKNOWN, {"default/a"}, ["GPU-1", "GPU-2"], id="alone until measured"),
        pytest.param(TIME_SLICING, replace(UNKNOWN, measured_mib=900), {"default/a"}, [], id="measured"),
        pytest.param(MPS, KNOWN, {"default/a"}, [], id="shared"),
        pytest.param(EXCLUSIVE, KNOWN, set(), [], id="not started, or after a reboot"),
        pytest.param(EXCLUSIVE, KNOWN, {"default/b", "other/a"}, [], id="only others have started"),
    ],
)
def test_gpus_are_full_if_a_started_pod_has_them_alone(reserve, mode, tenant, holding, full) -> None:
    reservations = [reserve("a", "GPU-1", "GPU-2", mode=mode, tenant=tenant)]
    assert sorted(full_gpus(reservations, holding)) == full
    assert full_gpus([*reservations, reserve("late", "GPU-3")], holding) == set(), "the late pod may need any slot"


OWNER = Owner("default", "a", "train", ("slot-2",))


def holds(name: str, *slots: str, container: str = "train", resource: str = "carpool.dev/gpu") -> PodResources:
    devices = [ContainerDevices(resource_name=resource, device_ids=slots)]
    return PodResources(
        name=name, namespace="default", containers=[ContainerResources(name=container, devices=devices)]
    )


def starting_pod(*, phase: str = "Pending", deleted: str | None = None, uid: str = "uid-a") -> Pod:
    meta = PodMeta(name="a", namespace="default", uid=uid, deletion_timestamp=deleted)
    return Pod(metadata=meta, status=PodStatus(phase=phase))


def partition(name: str = "a", state: PartitionState = PartitionState.READY, message: str = "") -> Partition:
    return Partition(pod_uid=PodUid(f"uid-{name}"), generation=1, state=state, message=message)


def test_owner_is_the_container_that_holds_the_slots() -> None:
    held = [holds("b", "slot-1"), holds("other", "slot-10", "slot-2", resource="nvidia.com/gpu")]
    found = owner_of(["slot-10", "slot-2"], [*held, holds("a", "slot-10", "slot-2")])
    assert found == Owner("default", "a", "train", ("slot-2", "slot-10"))


HELD = holds("a", "slot-1")


@pytest.mark.parametrize(
    ("slot", "held", "error", "message"),
    [
        ("slot-1", [], LaterError, "expected a container that holds slot-1, found none"),
        ("slot-1", [HELD, holds("b", "slot-1")], RefusedError, "found default/a/train, default/b/train"),
        ("slot-1", [holds("a", "slot-1", "slot-2")], RefusedError, "expected default/a to start with slot-1, slot-2"),
        ("GPU-1", [], RefusedError, "expected a slot such as slot-3, found 'GPU-1'"),
    ],
    ids=["no-owner", "two-owners", "other-slots-too", "no-slot"],
)
def test_slots_without_one_owner_are_refused(slot: str, held, error, message: str) -> None:
    with pytest.raises(error, match=message):
        owner_of([slot], held)


@pytest.mark.parametrize("found", [None, starting_pod(phase="Succeeded"), starting_pod(deleted="2026-01-31T12:00:00Z")])
def test_a_pod_that_is_unknown_or_ending_is_refused_for_now(found: Pod | None) -> None:
    with pytest.raises(LaterError, match="expected pod default/a"):
        living_pod(OWNER, found)


FAILED = partition(state=PartitionState.FAILED, message="no MIG")
WAITING = partition(state=PartitionState.PREPARING, message="waits for b")
EARLIER = reservation("a", pod_uid="uid-earlier")


@pytest.mark.parametrize(
    ("reservations", "partitions", "error", "message"),
    [
        ([], [], LaterError, "expected a reservation for pod default/a .uid-a.*submit a GpuTrainingJob"),
        ([reservation("b")], [partition("b")], LaterError, "expected a reservation for pod default/a"),
        ([EARLIER], [partition("earlier")], LaterError, "expected a reservation for pod default/a"),
        ([reservation("a")], [], LaterError, "found them being prepared"),
        ([reservation("a")], [WAITING], LaterError, "prepared .waits for b"),
        ([reservation("a")], [FAILED], RefusedError, "to be ready, found: no MIG"),
        ([reservation("a", "GPU-1", "GPU-2")], [partition()], RefusedError, "as reserved, found 1"),
    ],
    ids=["none", "another-pods", "earlier-pod-of-the-name", "new", "preparing", "failed", "two-containers"],
)
def test_a_pod_without_a_ready_reservation_is_refused(reservations, partitions, error, message) -> None:
    """Reservations are written for verified pods only, so the agent compares the UID and reads no job."""
    with pytest.raises(error, match=message):
        ready_reservation(OWNER, starting_pod(), reservations, partitions)


def test_the_ready_reservation_is_that_of_the_pod_and_its_generation(reserve) -> None:
    both = [partition("b"), partition()]
    assert ready_reservation(OWNER, starting_pod(), [reserve("b"), reserve("a")], both) == reserve("a")
    with pytest.raises(LaterError, match="being prepared"):
        ready_reservation(OWNER, starting_pod(), [reserve("a", generation=2)], both)


def running_as(pod_user: int | None, **containers: int | None) -> Pod:
    """A pod whose container `train` has a GPU."""
    made = [
        Container(
            name=name,
            resources=ResourceRequirements(limits={"carpool.dev/gpu": 1} if name == "train" else {}),
            security_context=SecurityContext(run_as_user=user),
        )
        for name, user in containers.items()
    ]
    return Pod(
        metadata=PodMeta(name="a"),
        spec=PodSpec(containers=made, security_context=SecurityContext(run_as_user=pod_user)),
    )


@pytest.mark.parametrize(
    ("found", "container", "user"),
    [
        (running_as(None, train=None), "train", None),
        (running_as(1000, train=None), "train", 1000),
        (running_as(1000, side=7, train=0), "train", 0),
        (running_as(1000, side=7, train=1001), "", 1001),
        (running_as(1000), "train", 1000),
    ],
    ids=["image", "pod", "container-root", "container-with-the-gpu", "unknown-container"],
)
def test_user_is_the_containers_or_the_pods(found: Pod, container: str, user: int | None) -> None:
    assert container_uid(found.spec, container) == user
    assert container_uid(replace(found.spec, host_users=False), container) is None, "in a user namespace"


@pytest.mark.parametrize(
    ("user", "served", "is_fine"),
    [(1000, 1000, True), (None, 1000, True), (1000, None, True), (0, 1000, False), (1001, 1000, False)],
)
def test_an_mps_daemon_serves_one_user_at_a_time(user: int | None, served: int | None, is_fine: bool) -> None:
    """A client of another user would block in CUDA until the first one ends."""
    beside = {"pod default/x": None, "the MPS server of GPU GPU-1": served}
    if is_fine:
        check_same_user(OWNER, user, beside)
        return
    with pytest.raises(
        LaterError, match=f"run as user {served}, as the MPS server of GPU GPU-1 does, found {user}; .*runAsUser"
    ):
        check_same_user(OWNER, user, beside)


def test_the_first_reservation_waits_for_no_other(reserve) -> None:
    """Otherwise neither would ever start."""
    first, second, elsewhere = reserve("a"), reserve("b"), reserve("0", "GPU-9")
    reservations = [second, elsewhere, first]
    assert earlier_reservations(first, reservations) == []
    assert earlier_reservations(second, reservations) == [first]


class Prestart:
    """A plugin whose pod `a` holds slot 0 and has a ready reservation; PodResources fails as often as `failures`."""

    def __init__(self, directory: Path, reservation: Reservation, wait_s: float = 5.0) -> None:
        self.directory, self.clock, self.failures, self.asked = directory, FakeClock(), 0, 0
        self.answer: asyncio.Future[Pod | None] = asyncio.Future()
        """Answer of the API server."""
        state = AgentState(
            pod=lambda _: starting_pod(),
            read_pod=lambda *_: self.answer,
            reservations=lambda: [reservation],
            partitions=lambda: [partition()],
            access=lambda uuid, pod_uid: Access(env={"A": "b"}, mounts=()),
            held=self._held,
        )
        self.plugin = Plugin(
            state,
            directory,
            also_read=(directory.with_name("etc"),),
            gpus=("GPU-1",),
            slots_per_gpu=8,
            clock=self.clock,
            reservation_wait_s=wait_s,
            sleep=self._sleep,
        )

    async def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def _held(self) -> list[PodResources]:
        self.asked += 1
        if self.failures:
            self.failures -= 1
            raise KubeletError("kubelet.sock: expected an answer, found DEADLINE_EXCEEDED: Deadline Exceeded")
        return [holds("a", "slot-0")]


@pytest.fixture
async def prestart(tmp_path: Path, reserve) -> Prestart:
    prestart = Prestart(tmp_path / "cdi", reserve("a", "GPU-1"))
    prestart.answer.set_result(starting_pod())
    return prestart


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param(starting_pod(uid="uid-new"), "to have UID uid-a, as reserved, found uid-new", id="another pod"),
        pytest.param(starting_pod(deleted="now"), "to be alive, found it finished or being deleted", id="deleted"),
        pytest.param(Unreachable("refused"), "to confirm UID uid-a of pod default/a, found refused", id="unreachable"),
        pytest.param(None, "to confirm UID uid-a of pod default/a, found no answer in time", id="silent"),
    ],
)
async def test_a_pod_is_read_again_before_its_container_starts(tmp_path: Path, reserve, answer, message: str) -> None:
    prestart = Prestart(tmp_path / "cdi", reserve("a", "GPU-1"), wait_s=0.0)
    if isinstance(answer, Exception):
        prestart.answer.set_exception(answer)
    elif answer:
        prestart.answer.set_result(answer)
    async with asyncio.timeout(20):
        with pytest.raises(LaterError, match=message):
            await prestart.plugin.pre_start(["slot-0"])
    assert not prestart.directory.exists()


async def test_podresources_are_waited_for_and_refused_in_time(prestart: Prestart) -> None:
    """The kubelet gives PreStartContainer 30 s, and tries again."""
    prestart.failures = 10**6
    began = prestart.clock.monotonic()
    expected = r"expected the kubelet's PodResources to name the holder of slot-0.*DEADLINE"
    with pytest.raises(RefusedError, match=expected):
        await prestart.plugin.pre_start(["slot-0"])
    assert 5 <= prestart.clock.monotonic() - began < 6
    prestart.failures, prestart.asked = 3, 0
    await prestart.plugin.pre_start(["slot-0"])
    assert (prestart.asked, cdi.path_of(prestart.directory, "slot-0").exists()) == (4, True)


async def test_podresources_without_an_answer_times_out(tmp_path: Path) -> None:
    """A kubelet that hangs accepts its socket's calls, and never answers."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "kubelet.sock"))
        silent.listen()
        client = PodResourcesClient(tmp_path / "kubelet.sock", within_s=0.1)
        for _ in range(2):
            with pytest.raises(KubeletError, match=r"kubelet.sock: expected an answer, found DEADLINE_EXCEEDED"):
                await client.list()


async def test_a_missing_kubelet_directory_is_an_error(prestart: Prestart, tmp_path: Path, capfd) -> None:
    """Regression: gRPC wrote a line of its own each second."""
    with pytest.raises(KubeletError, match=r"nowhere: expected the kubelet's device plugin directory, found none"):
        await Registration(tmp_path / "nowhere", prestart.plugin).serve()
    assert capfd.readouterr() == ("", "")


async def test_cdi_specification_is_replaced_or_left_as_it_was_if_the_disk_is_full(prestart: Prestart) -> None:
    prestart.directory.mkdir()
    path = cdi.path_of(prestart.directory, "slot-0")
    path.write_text("a file of others with this name")
    await prestart.plugin.pre_start(["slot-0"])
    written, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    assert b'"CARPOOL_POD_UID=uid-a"' in written
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file of this process may grow
    try:
        with pytest.raises(RefusedError, match=r"expected to write the CDI specification of pod default/a: "):
            await prestart.plugin.pre_start(["slot-0"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in prestart.directory.iterdir()] == [path.name], "nothing half-written is left"
    assert path.read_bytes() == written


@pytest.mark.parametrize("name", ["theirs.json", "nvidia.yaml", "../etc/theirs.yaml"])
async def test_specification_of_others_for_our_devices(prestart: Prestart, name: str) -> None:
    """The runtime refuses a device that two files describe, without a reason in the pod's events."""
    prestart.directory.mkdir()
    prestart.directory.with_name("etc").mkdir()
    theirs = (prestart.directory / name).resolve()
    theirs.write_text(f'{{"cdiVersion": "0.6.0", "kind": "{CDI_KIND}", "devices": [{{"name": "slot-0"}}]}}')
    with pytest.raises(RefusedError, match=rf"expected Carpool alone to describe.*found {theirs}; remove it"):
        await prestart.plugin.pre_start(["slot-0"])
    theirs.write_text('{"kind": "vendor.com/net", "devices": []}')
    await prestart.plugin.pre_start(["slot-0"])


FOLDER = Path(__file__).parents[2] / "deviceplugin"
VERSIONS = ("Protobuf Python Version", "GRPC_GENERATED_VERSION =")
LABELS = {1: "", 3: "repeated "}


def test_generated_messages_are_those_of_the_protos(tmp_path: Path) -> None:
    subprocess.run([str(FOLDER / "protos.sh"), sys.executable, str(tmp_path)], check=True)
    generated = sorted((tmp_path / "carpool_deviceplugin" / "protos").iterdir())
    assert len(generated) == 6
    for path in generated:
        committed = FOLDER / "carpool_deviceplugin" / "protos" / path.name

        assert without_versions(path) == without_versions(committed), "run deviceplugin/protos.sh"


def without_versions(path: Path) -> list[str]:
    """Return the lines of a module without the generator's version: three numbers on lines of their own."""
    lines = [line for line in path.read_text().splitlines() if not any(word in line for word in VERSIONS)]
    return [line for line in lines if not line.strip().rstrip(",").isdecimal()]


@pytest.mark.parametrize(
    ("module", "message", "fields"),
    [
        (deviceplugin_pb2, "RegisterRequest", "1 version, 2 endpoint, 3 resource_name, 4 options"),
        (deviceplugin_pb2, "DevicePluginOptions", "1 pre_start_required, 2 get_preferred_allocation_available"),
        (deviceplugin_pb2, "ListAndWatchResponse", "1 repeated devices"),
        (deviceplugin_pb2, "Device", "1 ID, 2 health, 3 topology"),
        (deviceplugin_pb2, "TopologyInfo", "1 repeated nodes"),
        (deviceplugin_pb2, "NUMANode", "1 ID"),
        (deviceplugin_pb2, "AllocateRequest", "1 repeated container_requests"),
        (deviceplugin_pb2, "ContainerAllocateRequest", "1 repeated devices_ids"),
        (deviceplugin_pb2, "AllocateResponse", "1 repeated container_responses"),
        (deviceplugin_pb2, "ContainerAllocateResponse", "1 repeated envs, 5 repeated cdi_devices"),
        (deviceplugin_pb2, "CDIDevice", "1 name"),
        (deviceplugin_pb2, "PreStartContainerRequest", "1 repeated devices_ids"),
        (podresources_pb2, "ListPodResourcesResponse", "1 repeated pod_resources"),
        (podresources_pb2, "PodResources", "1 name, 2 namespace, 3 repeated containers"),
        (podresources_pb2, "ContainerResources", "1 name, 2 repeated devices"),
        (podresources_pb2, "ContainerDevices", "1 resource_name, 2 repeated device_ids"),
    ],
)
def test_field_numbers_are_the_kubelets(module, message: str, fields: str) -> None:
    found = descriptor_pb2.DescriptorProto()
    module.DESCRIPTOR.message_types_by_name[message].CopyToProto(found)
    assert module.DESCRIPTOR.package == {deviceplugin_pb2: "v1beta1", podresources_pb2: "v1"}[module]
    assert ", ".join(f"{f.number} {LABELS[f.label]}{f.name}" for f in found.field) == fields
