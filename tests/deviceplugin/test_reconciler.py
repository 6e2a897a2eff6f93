"""One node's GpuNode, its status and its events, against an API server in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from agent_world import agent_on, reserve_on, status_of
from carpool_core.kube.api import EVENTS, GPU_NODES, NODES
from carpool_core.kube.errors import Forbidden, Invalid, Overloaded
from carpool_core.resources.node import Device, GpuNodeStatus, NodeSummary, Partition, Tenant
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, GpuUuid, NodeName, PartitionState, PodUid, SharingMode
from carpool_deviceplugin import commands
from carpool_deviceplugin.app import Agent
from carpool_deviceplugin.gpu import NoDevicesError
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.simulated import SimulatedDevices
from carpool_deviceplugin.status import (
    EventWriter,
    NodeEvent,
    Reporter,
    device_events,
    node_conditions,
    partition_events,
    struck_events,
)
from carpool_deviceplugin.testing.node import Node, flowing, running, uid, until
from carpool_deviceplugin.timeouts import HARDWARE_INTERVALS
from msgspec.structs import replace
from structlog.testing import capture_logs


@pytest.fixture
def agent(kube, devices, tmp_path) -> Agent:
    return agent_on(devices, tmp_path, kube)


def exists(kube: FakeKube) -> bool:
    return bool(status_of(kube).devices)


def writes(kube: FakeKube) -> int:
    return sum(call.subresource == "status" for call in kube.calls)


def states(kube: FakeKube) -> dict[str, str]:
    return {p.pod_uid: p.state.value for p in status_of(kube).partitions}


async def test_creates_its_gpunode_with_the_node_as_owner_also_after_a_deletion(kube, agent, devices) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        found = kube.dump(GPU_NODES, "node-1")
        assert found["metadata"]["ownerReferences"][0]["uid"] == kube.dump(NODES, "node-1")["metadata"]["uid"]
        status = status_of(kube)
        assert [d.uuid for d in status.devices] == list(devices.uuids)
        assert status.simulated
        assert [(c.type, c.status, c.reason) for c in status.conditions] == [
            ("Ready", "True", "GpusHealthy"),
            ("MpsAvailable", "True", "Available"),
            ("Preflight", status.conditions[2].status, status.conditions[2].reason),  # of the machine that tests
        ]
        assert status.summary == NodeSummary(
            gpus="2x Simulated NVIDIA A100-SXM4-40GB", healthy=2, tenants=0, memory="40 GiB"
        )
        assert agent.unready() is None
        await kube.delete(GPU_NODES, "node-1")
        await until(lambda: exists(kube))


async def test_without_a_driver_the_gpunode_has_the_row_of_the_preflight(kube, tmp_path, monkeypatch) -> None:
    """The agent ends, because a driver that is installed later is found only by another process."""

    @asynccontextmanager
    async def connect(_: object) -> AsyncIterator[FakeKube]:
        yield kube

    monkeypatch.setattr(commands, "connect", connect)
    info = {"containerRuntimeVersion": "containerd://1.6.33", "osImage": "Ubuntu 24.04.3 LTS"}
    await kube.patch(NODES, "node-1", {"status": {"nodeInfo": info}}, subresource="status")
    kube.seed(GPU_NODES, {"metadata": {"name": "node-1"}, "spec": {}, "status": {"devices": []}})
    for _ in range(2):
        with pytest.raises(NoDevicesError, match=r"expected libnvidia-ml.so.1, found none"):
            await commands.serve(AgentSettings(node_name="node-1", state_dir=tmp_path / "state"))
        conditions = {one.type: one for one in status_of(kube).conditions}
        assert {kind: one.status for kind, one in conditions.items()} == dict.fromkeys(
            ("Ready", "MpsAvailable", "Preflight"), "False"
        )
        assert conditions["Ready"].reason == "DriverUnusable"
        assert "FAILED driver: expected libnvidia-ml.so.1, found none" in conditions["Preflight"].message
        assert "found containerd 1.6.33; update it" in conditions["Preflight"].message, "by the Node"
        assert "operating-system" in conditions["Preflight"].message.partition("passed: ")[2]
        await kube.delete(GPU_NODES, "node-1")  # the next time it is created


async def test_gpunode_has_no_owner_if_the_node_cannot_be_read(kube, agent) -> None:
    for _ in ("preflight", "owner"):
        kube.fail_next("get", NODES, Forbidden("nodes is forbidden", status=403))
    async with running(agent):
        await until(lambda: exists(kube))
        assert not kube.dump(GPU_NODES, "node-1")["metadata"].get("ownerReferences")


async def test_a_reservation_becomes_ready_and_is_released(kube, agent, devices, reserve) -> None:
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


async def test_status_is_written_on_change_only(kube, agent, devices, reserve) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("a", devices.uuids[0]))
        await until(lambda: states(kube) == {"uid-a": "Ready"})
        await until(lambda: status_of(kube).devices[0].mode is SharingMode.TIME_SLICING)
        count = writes(kube)
        later = agent.clock.monotonic() + 60
        await until(lambda: agent.clock.monotonic() > later)
        assert writes(kube) == count


async def test_measures_of_a_tenant_reach_the_status_also_without_a_reservation(
    kube, agent, devices, reserve, enter
) -> None:
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
            await reserve_on(kube)
            await until(lambda: not states(kube))
            await until(lambda: any(t.memory_mib >= 2000 for t in status_of(kube).tenants))
            await reserve_on(kube, reserve("a", gpu))
            await until(lambda: states(kube) == {"uid-a": "Ready"})
        await until(lambda: status_of(kube).tenants[0].memory_mib == 0)
        assert status_of(kube).tenants[0].peak_memory_mib >= 2000
        await reserve_on(kube)
        await until(lambda: not status_of(kube).tenants)


async def test_a_failed_write_is_retried(kube, agent, devices, reserve) -> None:
    async with running(agent):
        await until(lambda: exists(kube))
        kube.fail_next("patch", GPU_NODES, Overloaded("busy", status=429), subresource="status")
        kube.fail_next("patch", GPU_NODES, Overloaded("lost", status=500), subresource="status", after=True)
        await reserve_on(kube, reserve("a", devices.uuids[0]))
        await until(lambda: states(kube) == {"uid-a": "Ready"})


async def test_a_new_agent_keeps_ready_reservations(kube, agent, devices, reserve, tmp_path) -> None:
    gpu = devices.uuids[0]
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("b", gpu, mode=SharingMode.EXCLUSIVE))
        await until(lambda: states(kube) == {"uid-b": "Ready"})
    await reserve_on(kube, reserve("a", gpu, mode=SharingMode.MPS), reserve("b", gpu, mode=SharingMode.EXCLUSIVE))
    async with running(agent_on(devices, tmp_path, kube)):
        await until(lambda: states(kube) == {"uid-a": "Failed", "uid-b": "Ready"})


async def test_a_new_agent_keeps_a_stall(kube, agent, devices, reserve, enter, tmp_path) -> None:
    gpu, stall = devices.uuids[0], {"type": "Stalled", "reason": "DataWait", "message": "no step for 60 s"}
    async with running(agent):
        await until(lambda: exists(kube))
        await reserve_on(kube, reserve("a", gpu))
        await until(lambda: states(kube) == {"uid-a": "Ready"})
    written = kube.dump(GPU_NODES, "node-1")
    written["status"]["tenants"] = [{"podUid": "uid-a", "gpuUuid": gpu, "anomalies": [stall]}]
    kube.seed(GPU_NODES, written)
    with enter(gpu, "a") as (opened,):
        opened.allocate(2000)
        async with running(agent_on(devices, tmp_path, kube)):
            tenant = await until(lambda: next((t for t in status_of(kube).tenants if t.memory_mib >= 2000), None))
            assert [one.reason for one in tenant.anomalies] == ["DataWait"]


async def test_several_agents_share_an_event_loop(kube, tmp_path) -> None:
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
    """Simulated GPUs that count their descriptions."""

    simulated, unreadable, mps_problem = True, (), ""

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
            tenants=lambda: self.tenants,
            on_devices=lambda _: None,
            on_missing=self.nothing,
        )
        self.tenants: list[Tenant] = []
        self.reporter.appeared(GpuNodeStatus())

    async def nothing(self) -> None: ...

    @property
    def written(self) -> list[int]:
        return [tenant["memoryMib"] for tenant in self.kube.dump(GPU_NODES, "n")["status"]["tenants"]]

    async def reads(self) -> int:
        """Run one cycle; return how many GPUs it read."""
        before = self.devices.described
        await self.reporter.once()
        return self.devices.described - before


@pytest.fixture
def world(devices: SimulatedDevices) -> World:
    return World(devices)


def measure(world: World, memory_mib: int) -> None:
    world.tenants = [Tenant(pod_uid=PodUid("a"), gpu_uuid=world.devices.uuids[0], memory_mib=memory_mib)]
    world.reporter.report(())


async def test_new_measurements_alone_read_no_gpu(world: World) -> None:
    """Regression: each new measurement read the health and processes of every GPU, half of the agent's cost."""
    assert await world.reads() == 2
    for at in range(1, 5):
        world.clock.advance(5)
        measure(world, 1000 * at)
        assert await world.reads() == 0
    assert world.written == [4000]


async def test_changed_partitions_and_health_read_the_gpus(world: World) -> None:
    await world.reads()
    partition = Partition(pod_uid=PodUid("a"), generation=1, state=PartitionState.READY)
    world.reporter.report([partition])
    assert await world.reads() == 2, "a mode may have changed"
    world.reporter.look_again()
    assert await world.reads() == 2
    assert await world.reads() == 0


async def test_measurements_wake_the_reporter_when_they_are_due(world: World) -> None:
    """Regression: each measurement compared all tenants, also when it was too early to write them."""
    await world.reads()
    awake = world.reporter._awake
    awake.clear()
    measure(world, 1000)
    assert not awake.is_set()
    world.clock.advance(HARDWARE_INTERVALS.measures_s)
    measure(world, 1000)
    assert awake.is_set()


async def test_an_invalid_status_is_not_written(world: World) -> None:
    """The API server would accept it, and every reader would ignore the whole GpuNode."""
    await world.reads()
    long = Partition(pod_uid=PodUid("p"), generation=1, state=PartitionState.FAILED, message="!" * 5000)
    world.reporter.report([long])
    with pytest.raises(Invalid):
        await world.reads()
    assert world.kube.dump(GPU_NODES, "n")["status"]["partitions"] == []


async def test_long_health_messages_are_cut_and_the_status_is_written(world: World) -> None:
    """Regression: with a long message of MPS clients, no status of the node was accepted."""
    world.devices.sick = "12345, " * 20_000
    await world.reporter.once()
    status = world.kube.dump(GPU_NODES, "n")["status"]
    assert [len(device["healthMessage"]) for device in status["devices"]] == [4096] * len(world.devices.uuids)
    assert len(status["conditions"][0]["message"]) == len("0 of 2 GPUs are healthy: ; ") + 2 * 4096
    many, _ = node_conditions(world.reporter.devices * 8, (), "", (), world.clock.now())
    assert len(many.message) == 32_768


GPU = GpuUuid("GPU-1")
HEALTHY = Device(uuid=GPU, index=0, product="x", memory_mib=1)
XID = replace(HEALTHY, health=DeviceHealth.UNHEALTHY, health_message="XID 79")
HOT = replace(XID, health_message="it is hot")
A, B = PodUid("uid-a"), PodUid("uid-b")


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        ({}, HEALTHY, []),
        ({}, XID, ["GpuUnhealthy"]),
        ({GPU: HEALTHY}, XID, ["GpuUnhealthy"]),
        ({GPU: XID}, HOT, []),
        ({GPU: XID}, HEALTHY, ["GpuHealthy"]),
    ],
)
def test_a_changed_health_is_an_event(before: dict, after: Device, reasons: list[str]) -> None:
    assert [event.reason for event in device_events(before, [after])] == reasons


def partition(state: PartitionState, generation: int = 1) -> Partition:
    return Partition(pod_uid=A, generation=generation, state=state, message="why")


READY, PREPARING, FAILED = (partition(getattr(PartitionState, name)) for name in ("READY", "PREPARING", "FAILED"))


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        (None, READY, []),
        (None, FAILED, ["GpuShareFailed"]),
        (FAILED, FAILED, []),
        (FAILED, partition(PartitionState.FAILED, 2), ["GpuShareFailed"]),
        (FAILED, READY, ["GpuShareReady"]),
        (PREPARING, READY, []),
    ],
)
def test_a_share_that_fails_or_recovers_is_an_event(reserve, before, after, reasons) -> None:
    known = {} if before is None else {A: before}
    assert [event.reason for event in partition_events(known, [after], {A: reserve("a")})] == reasons
    assert partition_events({}, [after], {}) == [], "without a reservation there is no pod"


def test_each_pod_that_an_mps_fault_ends_gets_one_event(reserve) -> None:
    both = {A: reserve("a"), B: reserve("b")}
    (event,) = struck_events({A: "why"}, {A: "why", B: "why"}, both)
    assert (event.pod, event.reason, event.message) == (both[B], "MpsClientsEnd", "why")


async def test_events_beyond_the_queue_are_dropped_and_logged() -> None:
    writer = EventWriter(NodeName("n"), FakeKube(), FakeClock())
    with capture_logs() as logs:
        writer.enqueue([NodeEvent(None, "Warning", "GpuUnhealthy", str(i)) for i in range(300)], "uid")
    assert [entry["event"] for entry in logs] == ["event dropped"] * 44


def events_of(kube: FakeKube, reason: str) -> list[dict[str, Any]]:
    return [event for event in kube.dump_all(EVENTS) if event["reason"] == reason]


def health(kube: FakeKube) -> tuple[str, str]:
    """Health and message of the first GPU; empty before the first status."""
    found = kube.dump_all(GPU_NODES)
    devices = found[0].get("status", {}).get("devices") if found else None
    return (devices[0].get("health", "Healthy"), devices[0].get("healthMessage", "")) if devices else ("", "")


def agent_of(node: Node, kube: FakeKube) -> Agent:
    return agent_on(node.devices(), node.root, kube)


async def test_an_unhealthy_gpu_is_one_event_also_after_a_restart_of_the_agent(node: Node, kube: FakeKube) -> None:
    async with running(agent_of(node, kube)):
        await until(lambda: health(kube)[0])
        node.nvml.raise_xid(0, 95)
        (event,) = await until(lambda: events_of(kube, "GpuUnhealthy"))
        assert event["involvedObject"]["kind"] == "GpuNode"
        assert event["involvedObject"]["uid"] == kube.dump(GPU_NODES, "node-1")["metadata"]["uid"]
        assert "gets no new work: XID 95 (uncontained ECC error)" in event["message"]
        await until(lambda: health(kube)[0] == "Unhealthy")
    async with running(agent_of(node, kube)) as agent:
        await until(lambda: agent.reconciler.reporter.devices)
        assert agent.reconciler.reporter.devices[0].health is DeviceHealth.UNHEALTHY, "it needs a reset"
        assert [e["count"] for e in events_of(kube, "GpuUnhealthy")] == [1]
        node.nvml.restart_driver()
        await until(lambda: agent.reconciler.reporter.devices[0].health_message.startswith("XID 95"))
        await until(lambda: node.advance(10) or events_of(kube, "GpuHealthy"))


@pytest.mark.parametrize("fault", ["daemon-dies", "client-fault"])
async def test_pods_of_a_faulty_mps_daemon_get_an_event_and_keep_their_shares(
    node: Node, kube: FakeKube, reserve, fault: str
) -> None:
    agent = agent_of(node, kube)
    gpu = agent.devices.uuids[0]
    wanted = [reserve(pod, gpu, mode=SharingMode.MPS, memory_limit_mib=1000, pod_uid=uid(pod)) for pod in "ab"]
    pipe = str(node.root / "mps" / gpu / "pipe")

    def partitions() -> list[dict[str, Any]]:
        return kube.dump(GPU_NODES, "node-1")["status"]["partitions"]

    async with running(agent):
        await until(lambda: health(kube)[0])
        await reserve_on(kube, *wanted)
        await until(lambda: [p["state"] for p in partitions()] == ["Ready", "Ready"])
        for pid, pod in ((42, "a"), (43, "b")):
            node.start(0, pid, pod)
            node.mps.connect(pipe, pid)
        await until(lambda: agent.reconciler.meters[gpu].usage.keys() >= {uid("a"), uid("b")})
        if fault == "daemon-dies":
            node.mps.die(pipe)
        else:
            node.mps.daemons[pipe].fault()
            node.nvml.raise_xid(0, 31)
        await until(lambda: len(events_of(kube, "MpsClientsEnd")) == 2)
        events = events_of(kube, "MpsClientsEnd")
        assert {e["involvedObject"]["name"] for e in events} == {"a", "b"}
        assert all(f"pods that it ends together: {uid('a')}, {uid('b')}" in e["message"] for e in events)
        await until(lambda: all("ends together" in p.get("message", "") for p in partitions()))
        assert [p["state"] for p in partitions()] == ["Ready", "Ready"]
        assert "ends together" in health(kube)[1]
        assert node.mps.starts == 1, "a second daemon is never started beside clients"
        if fault == "client-fault":
            for pid in (42, 43):
                node.mps.daemons[pipe].leave(pid)
        for pid in (42, 43):
            node.end(0, pid)
        await until(lambda: health(kube)[0] == "Healthy")
        await until(lambda: all("message" not in p for p in partitions()))
        await until(lambda: node.mps.starts == (2 if fault == "daemon-dies" else 1))


async def test_an_event_that_cannot_be_written_does_not_stop_the_agent(node: Node, kube: FakeKube) -> None:
    async with running(agent_of(node, kube)):
        await until(lambda: health(kube)[0])
        kube.fail_next("create", EVENTS, Overloaded("busy", status=429))
        node.nvml.raise_xid(0, 95)
        await until(lambda: health(kube)[0] == "Unhealthy")
        assert events_of(kube, "GpuUnhealthy") == []


async def test_a_share_that_fails_is_an_event_of_its_pod(node: Node, kube: FakeKube, reserve) -> None:
    agent = agent_of(node, kube)
    async with running(agent):
        await until(lambda: kube.dump_all(GPU_NODES))
        await reserve_on(kube, reserve("a", agent.devices.uuids[0], mode=SharingMode.MIG))
        (event,) = await until(lambda: events_of(kube, "GpuShareFailed"))
        assert (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == ("Pod", "a")
        assert "expected a mode out of" in event["message"]
