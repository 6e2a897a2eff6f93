"""One node's GpuNode, against an API server in memory."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from carpool_core.kube.api import EVENTS, GPU_NODES, NODES
from carpool_core.kube.errors import Forbidden, Invalid, NotFound, Overloaded
from carpool_core.resources.node import Device, GpuNode, GpuNodeStatus, NodeSummary, Partition, Tenant
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, GpuUuid, NodeName, PartitionState, PodUid, SharingMode
from carpool_deviceplugin.app import Agent
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.simulated import SimulatedDevices
from carpool_deviceplugin.status import (
    EventWriter,
    NodeEvent,
    Reporter,
    device_events,
    partition_events,
    ready_condition,
    struck_events,
)
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, flowing, running, uid, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import HARDWARE_INTERVALS, CallThreads, Intervals
from msgspec.structs import replace
from structlog.testing import capture_logs


@pytest.fixture
def kube() -> FakeKube:
    kube = FakeKube()
    kube.seed(NODES, {"metadata": {"name": "node-1"}})
    return kube


@pytest.fixture
def agent(kube, devices, tmp_path) -> Agent:
    return flowing(AgentSettings(node_name="node-1", kubelet=False, state_dir=tmp_path), kube, devices)


def status_of(kube: FakeKube, name: str = "node-1") -> Any:
    return msgspec.convert(kube.dump(GPU_NODES, name), GpuNode).status


def exists(kube: FakeKube) -> bool:
    try:
        return bool(status_of(kube).devices)
    except NotFound:
        return False


def writes(kube: FakeKube) -> int:
    return sum(call.subresource == "status" for call in kube.calls)


async def reserve_on(kube: FakeKube, *reservations: Any) -> None:
    await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": msgspec.to_builtins(list(reservations))}})


def states(kube: FakeKube) -> dict[str, str]:
    return {p.pod_uid: p.state.value for p in status_of(kube).partitions}


async def test_creates_its_gpunode_with_the_node_as_owner(kube, agent, devices) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        found = kube.dump(GPU_NODES, "node-1")
        assert found["metadata"]["ownerReferences"][0]["uid"] == kube.dump(NODES, "node-1")["metadata"]["uid"]
        status = status_of(kube)
        assert [d.uuid for d in status.devices] == list(devices.uuids)
        assert status.simulated
        assert status.heartbeat_time
        assert [(c.type, c.status, c.reason) for c in status.conditions] == [("Ready", "True", "GpusHealthy")]
        assert status.summary == NodeSummary(
            gpus="2x Simulated NVIDIA A100-SXM4-40GB", healthy=2, tenants=0, memory="40 GiB"
        )
        assert agent.unready() is None


async def test_no_owner_where_the_node_may_not_be_read(kube, agent) -> None:
    kube.fail_next("get", NODES, Forbidden("nodes is forbidden", status=403))
    async with running(agent):
        await until(lambda: exists(kube))
        assert not kube.dump(GPU_NODES, "node-1")["metadata"].get("ownerReferences")


async def test_gpunode_deleted_is_created_again(kube, agent) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        await kube.delete(GPU_NODES, "node-1")
        await until(lambda: exists(kube))


async def test_reservation_becomes_ready_and_is_returned(kube, agent, devices, reserve) -> None:
    first, second = devices.uuids
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(
            kube, reserve("a", first, mode=SharingMode.MPS, memory_limit_mib=1000), reserve("b", first, second)
        )
        await until(lambda: states(kube) == {"uid-a": "Ready", "uid-b": "Failed"})
        assert "is MPS for default/a" in status_of(kube).partitions[1].message
        await until(lambda: status_of(kube).devices[0].mode is SharingMode.MPS)
        await reserve_on(kube, reserve("c", first, second, mode=SharingMode.EXCLUSIVE))
        await until(lambda: states(kube) == {"uid-c": "Ready"})
        await reserve_on(kube)
        await until(lambda: [d.mode for d in status_of(kube).devices] == [None, None])


async def test_gpu_of_another_node_is_refused(kube, agent, reserve) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("a", "GPU-elsewhere"))
        await until(lambda: states(kube) == {"uid-a": "Failed"})
        assert "expected a GPU out of GPU-" in status_of(kube).partitions[0].message


async def test_status_is_written_on_change_only(kube, agent, devices, reserve) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("a", devices.uuids[0]))
        await until(lambda: states(kube) == {"uid-a": "Ready"})
        await until(lambda: status_of(kube).devices[0].mode is SharingMode.TIME_SLICING)
        count = writes(kube)
        later = agent.clock.monotonic() + 0.8 * Intervals().heartbeat_s
        await until(lambda: agent.clock.monotonic() > later)
        assert writes(kube) == count, "many samples and resyncs later"


async def test_measures_of_a_tenant_reach_the_status(kube, agent, devices, reserve, enter) -> None:
    gpu = devices.uuids[0]
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("a", gpu))
        await until(lambda: states(kube) == {"uid-a": "Ready"})
        with enter(gpu, "a") as (opened,):
            opened.allocate(2000)
            for _ in range(10):
                await asyncio.to_thread(opened.run, 0.02)
            tenant = await until(lambda: next((t for t in status_of(kube).tenants if t.gpu_util_percent), None))
            assert (tenant.pod_uid, tenant.gpu_uuid) == (PodUid("uid-a"), gpu)
            assert tenant.memory_mib >= 2000
            assert tenant.step_time_seconds >= 0.02
        await until(lambda: status_of(kube).tenants[0].memory_mib == 0)
        assert status_of(kube).tenants[0].peak_memory_mib >= 2000
        await reserve_on(kube)
        await until(lambda: not status_of(kube).tenants)


async def test_pod_that_runs_on_without_its_reservation_is_told_again(kube, agent, devices, reserve, enter) -> None:
    gpu = devices.uuids[0]
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("a", gpu))
        await until(lambda: states(kube) == {"uid-a": "Ready"})
        with enter(gpu, "a") as (opened,):
            opened.allocate(2000)
            await until(lambda: any(t.memory_mib >= 2000 for t in status_of(kube).tenants))
            await reserve_on(kube)
            await until(lambda: not states(kube))
            await until(lambda: any(t.memory_mib >= 2000 for t in status_of(kube).tenants))


async def test_sick_gpu_is_told_and_mends(kube, agent, devices, tmp_path) -> None:
    path = tmp_path / "state" / "simulated" / devices.uuids[0] / "device.json"
    good = path.read_bytes()
    async with running(agent):
        await until(lambda: exists(kube))
        path.write_text("{")
        await until(lambda: status_of(kube).conditions[0].reason == "SomeGpusUnhealthy")
        assert "expected JSON" in status_of(kube).devices[0].health_message
        path.write_bytes(good)
        await until(lambda: status_of(kube).conditions[0].reason == "GpusHealthy")


async def test_failed_write_is_tried_again(kube, agent, devices, reserve) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        kube.fail_next("patch", GPU_NODES, Overloaded("busy", status=429), subresource="status")
        kube.fail_next("patch", GPU_NODES, Overloaded("lost", status=500), subresource="status", after=True)
        await reserve_on(kube, reserve("a", devices.uuids[0]))
        await until(lambda: states(kube) == {"uid-a": "Ready"})


async def test_new_agent_keeps_what_the_old_one_promised(kube, agent, devices, reserve, tmp_path) -> None:
    gpu = devices.uuids[0]
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("b", gpu, mode=SharingMode.EXCLUSIVE))
        await until(lambda: states(kube) == {"uid-b": "Ready"})
    await reserve_on(kube, reserve("a", gpu, mode=SharingMode.MPS), reserve("b", gpu, mode=SharingMode.EXCLUSIVE))
    settings = AgentSettings(node_name="node-1", kubelet=False, state_dir=tmp_path)
    async with running(flowing(settings, kube, devices)):
        await until(lambda: states(kube) == {"uid-a": "Failed", "uid-b": "Ready"})


async def test_several_agents_live_in_one_loop(kube, tmp_path) -> None:
    agents = []
    for name in ("node-1", "node-2", "node-3"):
        settings = AgentSettings(node_name=name, kubelet=False, state_dir=tmp_path, simulated_gpus="Tesla T4:2")
        agents.append(flowing(settings, kube))
    async with running(*agents):
        await until(lambda: len(kube.dump_all(GPU_NODES)) == 3)
        await until(lambda: all(status_of(kube, n).devices for n in ("node-1", "node-2", "node-3")))
    uuids = {d.uuid for n in ("node-1", "node-2", "node-3") for d in status_of(kube, n).devices}
    assert len(uuids) == 6


class Counted:
    """The simulated GPUs, and how often each was described."""

    simulated, unreadable = True, ()

    def __init__(self, devices: SimulatedDevices) -> None:
        self._devices, self.uuids, self.described = devices, devices.uuids, 0
        self.sick = ""

    def describe(self, uuid: GpuUuid) -> Device:
        self.described += 1
        found = self._devices.describe(uuid)
        return replace(found, health=DeviceHealth.UNHEALTHY, health_message=self.sick) if self.sick else found


class World:
    """A reporter whose GpuNode has just appeared."""

    def __init__(self, devices: SimulatedDevices) -> None:
        self.devices, self.kube, self.clock = Counted(devices), FakeKube(), FakeClock()
        self.kube.seed(GPU_NODES, {"metadata": {"name": "n"}, "spec": {"reservations": []}})
        self.reporter = Reporter(
            NodeName("n"),
            self.kube,
            self.clock,
            self.devices,
            HARDWARE_INTERVALS,
            CallThreads(),
            on_devices=lambda _: None,
            on_missing=self.nothing,
        )
        self.reporter.appeared(GpuNodeStatus())

    async def nothing(self) -> None: ...

    @property
    def written(self) -> list[int]:
        return [tenant["memoryMib"] for tenant in self.kube.dump(GPU_NODES, "n")["status"]["tenants"]]

    async def looks(self) -> int:
        """Let it do what is due; return how many GPUs it asked for that."""
        before = self.devices.described
        await self.reporter.once()
        return self.devices.described - before


@pytest.fixture
def world(devices: SimulatedDevices) -> World:
    return World(devices)


def measured(world: World, memory_mib: int) -> list[Tenant]:
    return [Tenant(pod_uid=PodUid("a"), gpu_uuid=world.devices.uuids[0], memory_mib=memory_mib)]


async def test_measures_are_no_reason_to_look_at_the_gpus(world: World) -> None:
    """Each new measure asked every GPU for its health and its processes: half of what the agent cost."""
    assert await world.looks() == 2
    for at in range(1, 5):
        world.clock.advance(5)
        world.reporter.report((), measured(world, 1000 * at))
        assert await world.looks() == 0
    assert world.written == [4000]


async def test_changed_shares_health_and_time_are(world: World) -> None:
    await world.looks()
    partition = Partition(pod_uid=PodUid("a"), generation=1, state=PartitionState.READY)
    world.reporter.report([partition], ())
    assert await world.looks() == 2, "a mode has changed"
    world.reporter.look_again()
    assert await world.looks() == 2
    assert await world.looks() == 0
    world.clock.advance(HARDWARE_INTERVALS.heartbeat_s)
    assert await world.looks() == 2


async def test_measures_wake_it_when_they_may_be_written(world: World) -> None:
    """Woken each time, it compared all tenants only to find that it was too early."""
    await world.looks()
    awake = world.reporter._awake
    awake.clear()
    world.reporter.report((), measured(world, 1000))
    assert not awake.is_set()
    world.clock.advance(HARDWARE_INTERVALS.measures_s)
    world.reporter.report((), measured(world, 1000))
    assert awake.is_set(), "also where they are the same as those that were too early"


async def test_what_nobody_would_read_is_not_written(world: World) -> None:
    """The API server would take it, and every reader would leave out the whole GpuNode from then on."""
    await world.looks()
    told = Partition(pod_uid=PodUid("p"), generation=1, state=PartitionState.FAILED, message="!" * 5000)
    world.reporter.report([told], ())
    with pytest.raises(Invalid):
        await world.looks()
    assert world.kube.dump(GPU_NODES, "n")["status"]["partitions"] == []


async def test_what_is_said_of_sick_gpus_is_cut_and_the_status_written(world: World) -> None:
    """Regression: clients of MPS wrote so many numbers into a GPU's message that no status of its node was accepted."""
    world.devices.sick = "12345, " * 20_000
    await world.reporter.once()
    status = world.kube.dump(GPU_NODES, "n")["status"]
    assert [len(device["healthMessage"]) for device in status["devices"]] == [4096] * len(world.devices.uuids)
    assert [len(c["message"]) for c in status["conditions"]] == [len("0 of 2 GPUs are healthy: ; ") + 2 * 4096]
    many = ready_condition(world.reporter.devices * 8, (), (), world.clock.now())
    assert len(many.message) == 32_768


GPU = GpuUuid("GPU-1")
WELL = Device(uuid=GPU, index=0, product="x", memory_mib=1)
SICK = msgspec.structs.replace(WELL, health=DeviceHealth.UNHEALTHY, health_message="XID 79")
HOT = msgspec.structs.replace(SICK, health_message="it is hot")
A, B = PodUid("uid-a"), PodUid("uid-b")


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        ({}, WELL, []),
        ({}, SICK, ["GpuUnhealthy"]),
        ({GPU: WELL}, SICK, ["GpuUnhealthy"]),
        ({GPU: SICK}, SICK, []),
        ({GPU: SICK}, HOT, []),
        ({GPU: SICK}, WELL, ["GpuHealthy"]),
    ],
)
def test_health_is_news_when_it_changes(before: dict, after: Device, reasons: list[str]) -> None:
    assert [n.reason for n in device_events(before, [after])] == reasons


def partition(state: PartitionState, generation: int = 1) -> Partition:
    return Partition(pod_uid=A, generation=generation, state=state, message="why")


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        (None, partition(PartitionState.READY), []),
        (None, partition(PartitionState.FAILED), ["GpuShareFailed"]),
        (partition(PartitionState.FAILED), partition(PartitionState.FAILED), []),
        (partition(PartitionState.FAILED), partition(PartitionState.FAILED, 2), ["GpuShareFailed"]),
        (partition(PartitionState.FAILED), partition(PartitionState.READY), ["GpuShareReady"]),
        (partition(PartitionState.PREPARING), partition(PartitionState.READY), []),
    ],
)
def test_shares_are_news_when_they_fail(reserve, before, after, reasons) -> None:
    known = {} if before is None else {A: before}
    assert [n.reason for n in partition_events(known, [after], {A: reserve("a")})] == reasons
    assert partition_events({}, [after], {}) == [], "nobody to tell"


def test_each_pod_that_ends_is_told_once(reserve) -> None:
    both = {A: reserve("a"), B: reserve("b")}
    (told,) = struck_events({A: "why"}, {A: "why", B: "why"}, both)
    assert (told.pod, told.reason, told.message) == (both[B], "MpsClientsEnd", "why")


async def test_too_much_news_keeps_nobody_waiting() -> None:
    writer = EventWriter(NodeName("n"), FakeKube(), FakeClock())
    with capture_logs() as logs:
        writer.enqueue([NodeEvent(None, "Warning", "GpuUnhealthy", str(i)) for i in range(300)], "uid")
    assert [entry["event"] for entry in logs] == ["event dropped"] * 44


def told(kube: FakeKube) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for event in kube.dump_all(EVENTS):
        found.setdefault(event["reason"], []).append(event)
    return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path)


def agent_of(node: Node, kube: FakeKube) -> Agent:
    settings = AgentSettings(node_name="node-1", kubelet=False, state_dir=node.root)
    return flowing(settings, kube, node.devices())


async def test_sick_gpu_is_told_and_a_new_agent_does_not_repeat_it(node: Node, kube: FakeKube) -> None:
    async with running(agent_of(node, kube)):
        await until(lambda: kube.dump_all(GPU_NODES) and kube.dump_all(GPU_NODES)[0].get("status"))
        node.nvml.raise_xid(0, 95)
        (event,) = (await until(lambda: told(kube).get("GpuUnhealthy"))) or []
        assert event["involvedObject"]["kind"] == "GpuNode"
        assert event["involvedObject"]["uid"] == kube.dump(GPU_NODES, "node-1")["metadata"]["uid"]
        assert "gets no new work: XID 95 (uncontained ECC error)" in event["message"]
        await until(lambda: kube.dump_all(GPU_NODES)[0]["status"]["devices"][0].get("health", "Healthy") == "Unhealthy")
    async with running(agent_of(node, kube)) as agent:
        await until(lambda: agent.reconciler.reporter.devices)
        assert agent.reconciler.reporter.devices[0].health is DeviceHealth.UNHEALTHY, (
            "it takes a reset, not a new agent"
        )
        assert [e["count"] for e in told(kube)["GpuUnhealthy"]] == [1]
        node.nvml.restart_driver()
        await until(lambda: agent.reconciler.reporter.devices[0].health_message.startswith("XID 95"))
        await until(lambda: node.advance(10) or told(kube).get("GpuHealthy"))


@pytest.mark.parametrize("what", ["dies", "is hit by a fault"])
async def test_pods_behind_one_daemon_are_told_when_it(node: Node, kube: FakeKube, reserve, what: str) -> None:
    agent = agent_of(node, kube)
    gpu = agent.devices.uuids[0]
    wanted = [
        msgspec.structs.replace(
            reserve(pod, gpu, mode=SharingMode.MPS, memory_limit_mib=1000), pod_uid=PodUid(uid(pod))
        )
        for pod in "ab"
    ]
    pipe = str(node.root / "mps" / gpu / "pipe")

    def status() -> dict[str, Any]:
        return kube.dump(GPU_NODES, "node-1")["status"]

    async with running(agent):
        await until(lambda: kube.dump_all(GPU_NODES) and kube.dump_all(GPU_NODES)[0].get("status"))
        await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": msgspec.to_builtins(wanted)}})
        await until(lambda: [p["state"] for p in status()["partitions"]] == ["Ready", "Ready"])
        for pid, pod in ((42, "a"), (43, "b")):
            node.start(0, pid, pod)
            node.mps.connect(pipe, pid)
        await until(lambda: agent.reconciler.meters[gpu].usage.keys() >= {uid("a"), uid("b")})
        if what == "dies":
            node.mps.die(pipe)
        else:
            node.mps.daemons[pipe].is_faulty = True
            node.nvml.raise_xid(0, 31)
        events = await until(lambda: len(told(kube).get("MpsClientsEnd", [])) == 2 and told(kube)["MpsClientsEnd"])
        assert {e["involvedObject"]["name"] for e in events} == {"a", "b"}
        for event in events:
            assert f"pods that it ends together: {uid('a')}, {uid('b')}" in event["message"]
        await until(lambda: all("ends together" in p.get("message", "") for p in status()["partitions"]))
        assert [p["state"] for p in status()["partitions"]] == ["Ready", "Ready"], "nothing is taken from them"
        assert "ends together" in status()["devices"][0].get("healthMessage", "")
        assert node.mps.starts == 1, "under who is there no other daemon begins"
        if what != "dies":
            node.mps.daemons[pipe].is_faulty = False
            node.mps.daemons[pipe].clients.clear()
        for pid in (42, 43):
            node.end(0, pid)
        await until(lambda: status()["devices"][0].get("health", "Healthy") == "Healthy")
        await until(lambda: all("message" not in p for p in status()["partitions"]))
        await until(lambda: node.mps.starts == (2 if what == "dies" else 1))


async def test_event_that_cannot_be_written_ends_nothing(node: Node, kube: FakeKube) -> None:
    async with running(agent_of(node, kube)):
        await until(lambda: kube.dump_all(GPU_NODES) and kube.dump_all(GPU_NODES)[0].get("status"))
        kube.fail_next("create", EVENTS, Overloaded("busy", status=429))
        node.nvml.raise_xid(0, 95)
        await until(lambda: kube.dump_all(GPU_NODES)[0]["status"]["devices"][0].get("health", "Healthy") == "Unhealthy")
        assert told(kube) == {}


async def test_share_that_fails_is_told_to_its_pod(node: Node, kube: FakeKube, reserve) -> None:
    agent = agent_of(node, kube)
    async with running(agent):
        await until(lambda: kube.dump_all(GPU_NODES))
        impossible = reserve("a", agent.devices.uuids[0], mode=SharingMode.MIG)
        await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": [msgspec.to_builtins(impossible)]}})
        (event,) = await until(lambda: told(kube).get("GpuShareFailed"))
        assert (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == ("Pod", "a")
        assert "expected a mode out of" in event["message"]
