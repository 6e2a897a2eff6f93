"""A GPU whose driver never answers takes nothing with it: neither its neighbours, nor the agent's own servers."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES
from carpool_core.resources.node import Device, GpuNode, GpuNodeStatus
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, GpuUuid, SharingMode
from carpool_deviceplugin.devices.gpu import DeviceError, GpuActual, Reading
from carpool_deviceplugin.devices.patience import Patient, Rhythm
from carpool_deviceplugin.devices.simulated import SimulatedDevices, parse_inventory
from carpool_deviceplugin.devices.threads import Threads
from carpool_deviceplugin.metrics import AgentCollector
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.agents import flowing, running, until
from prometheus_client import CollectorRegistry


class Hanging(SimulatedDevices):
    """Two GPUs; the calls to the first never come back once `hang` was set, until `release` is."""

    hang = False

    def __init__(self, directory: Path, release: threading.Event) -> None:
        super().__init__(parse_inventory("Tesla T4:2"), "node-1", directory)
        self._release = release

    def _wait(self, uuid: GpuUuid) -> None:
        if self.hang and uuid == self.uuids[0]:
            self._release.wait(60)

    def describe(self, uuid: GpuUuid) -> Device:
        self._wait(uuid)
        return super().describe(uuid)

    def actual(self, uuid: GpuUuid) -> GpuActual:
        self._wait(uuid)
        return super().actual(uuid)

    def read(self, uuid: GpuUuid) -> Reading:
        self._wait(uuid)
        return super().read(uuid)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def status_of(kube: FakeKube) -> GpuNodeStatus:
    found = kube.dump_all(GPU_NODES)
    return msgspec.convert(found[0], GpuNode).status if found else GpuNodeStatus()


async def test_hung_gpu_is_unhealthy_alone(tmp_path, release, reserve) -> None:
    """Every GPU of the node was called unhealthy, and a scrape stopped the event loop."""
    devices, kube, registry = Hanging(tmp_path, release), FakeKube(), CollectorRegistry()
    settings = AgentSettings(node_name="node-1", kubelet=False, state_dir=tmp_path)
    # Real seconds: on a busy machine a GPU that is well takes some of them, too.
    agent = flowing(settings, kube, devices, Rhythm(step_deadline_s=0.4))
    registry.register(AgentCollector(agent))
    hung, well = devices.uuids
    async with running(agent):
        await until(lambda: len(status_of(kube).devices) == 2)
        devices.hang = True
        await until(lambda: status_of(kube).devices[0].health is DeviceHealth.UNHEALTHY)
        await until(lambda: not agent.reconciler.meters[hung].is_current)
        assert [d.health.value for d in status_of(kube).devices] == ["Unhealthy", "Healthy"]
        assert hung in status_of(kube).devices[0].health_message
        reservation = reserve("a", well, mode=SharingMode.EXCLUSIVE)
        await kube.patch(GPU_NODES, "node-1", {"spec": {"reservations": [msgspec.to_builtins(reservation)]}})
        await until(lambda: [p.state.value for p in status_of(kube).partitions] == ["Ready"])
        used = next(m for m in registry.collect() if m.name == "DCGM_FI_DEV_FB_USED")
        assert [s.labels["UUID"] for s in used.samples] == [well]
        assert registry.get_sample_value("carpool_agent_gpu_healthy", {"UUID": hung}) == 0
        devices.hang = False
        release.set()
        await until(lambda: all(d.health is DeviceHealth.HEALTHY for d in status_of(kube).devices))


def test_scrape_calls_no_gpu(tmp_path, release) -> None:
    devices = Hanging(tmp_path, release)
    settings = AgentSettings(node_name="node-1", kubelet=False, state_dir=tmp_path)
    registry = CollectorRegistry()
    registry.register(AgentCollector(flowing(settings, FakeKube(), devices)))
    devices.hang = True
    assert [m for m in registry.collect() if m.name == "carpool_agent_gpu_healthy"]


async def test_calls_that_never_come_back_take_no_thread_from_others(release) -> None:
    """In a pool of threads, a few hung GPUs left none for the others."""
    stuck = [Patient(f"GPU {i}", 0.01) for i in range(100)]
    answers = await asyncio.gather(*(p.call(release.wait, 60) for p in stuck), return_exceptions=True)
    assert all(isinstance(a, DeviceError) for a in answers)
    assert await Patient("GPU well", 5).call(lambda: 1) == 1
    with pytest.raises(DeviceError, match="GPU 0: an earlier call has not come back yet"):
        await stuck[0].call(lambda: 1)


class Later(Threads):
    """Does the work when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []

    def run(self, work: Callable[[], None]) -> None:
        self.work.append(work)


async def test_what_a_call_raises_after_its_caller_has_left_is_nobodys() -> None:
    """Regression: an agent that ended while a sick GPU was looked at left an error that nobody took."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    def fail() -> None:
        raise DeviceError("sick")

    later = Later()
    calling = asyncio.ensure_future(Patient("GPU 0", 60, later).call(fail))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    later.work.pop()()
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def test_gpunode_that_vanishes_while_the_gpus_are_described_ends_nothing(tmp_path, release) -> None:
    """What was to be compared with the status last written was compared with nothing, and that ended the agent."""
    devices, kube = Hanging(tmp_path, release), FakeKube()
    settings = AgentSettings(node_name="node-1", kubelet=False, state_dir=tmp_path)
    reporter = flowing(settings, kube, devices).reconciler.reporter
    reporter.appeared(GpuNodeStatus())
    devices.hang = True
    looking = asyncio.ensure_future(reporter.once())
    await asyncio.sleep(0)
    reporter.vanished()
    release.set()
    assert await looking == 0
    assert reporter.writes == 0
