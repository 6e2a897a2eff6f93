"""What it takes of a node's GPUs to keep its status true."""

import pytest
from carpool_core.kube.api import GPU_NODES
from carpool_core.kube.errors import Invalid
from carpool_core.resources.node import Device, GpuNodeStatus, Partition, Tenant
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, GpuUuid, NodeName, PartitionState, PodUid
from carpool_deviceplugin.controller.reporter import Reporter
from carpool_deviceplugin.controller.status import ready_condition
from carpool_deviceplugin.devices.patience import REAL
from carpool_deviceplugin.devices.simulated import SimulatedDevices
from carpool_deviceplugin.devices.threads import Threads
from msgspec.structs import replace


class Counted:
    """The simulated GPUs, and how often each was described."""

    simulated = True

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
            REAL,
            Threads(),
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
    world.clock.advance(REAL.heartbeat_s)
    assert await world.looks() == 2


async def test_measures_wake_it_when_they_may_be_written(world: World) -> None:
    """Woken each time, it compared all tenants only to find that it was too early."""
    await world.looks()
    awake = world.reporter._awake
    awake.clear()
    world.reporter.report((), measured(world, 1000))
    assert not awake.is_set()
    world.clock.advance(REAL.measures_s)
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
    many = ready_condition(world.reporter.devices * 8, (), world.clock.now())
    assert len(many.message) == 32_768
