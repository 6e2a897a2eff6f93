"""The contract of `Devices`, over every adapter there is, and what is particular to the simulated one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode
from carpool_deviceplugin.devices.gpu import DeviceError, Limits, SetLimits, SetMode, StartMps, StopMps
from carpool_deviceplugin.devices.port import Devices, NoDevicesError
from carpool_deviceplugin.devices.simulated import SimulatedDevices, parse_inventory
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node, uid

POD = PodUid("uid-a")


@dataclass
class Ground:
    """An adapter, and the hands of who tests it."""

    devices: Devices
    enter: Callable[[str, str], AbstractContextManager[object]]
    """Be on a GPU as a process of a pod."""
    pod_uid: Callable[[str], str]


@pytest.fixture(params=["simulated", "nvml"])
def ground(request, tmp_path, devices: SimulatedDevices, enter) -> Ground:
    if request.param == "simulated":
        return Ground(devices, enter, lambda pod: f"uid-{pod}")
    node = Node(FakeNvml(["A100-40", "A100-40"]), FakeMpsCommands(), tmp_path)
    real = node.devices()
    pids = count(100)

    @contextmanager
    def be_there(gpu: str, pod: str) -> Iterator[None]:
        index, pid = real.uuids.index(GpuUuid(gpu)), next(pids)
        node.start(index, pid, pod)
        yield
        node.end(index, pid)

    return Ground(real, be_there, uid)


def test_inventory_describes_every_gpu_in_order(ground: Ground) -> None:
    devices = ground.devices
    found = devices.inventory()
    assert [d.uuid for d in found] == list(devices.uuids)
    assert [d.index for d in found] == [0, 1]
    for d in found:
        assert d.health is DeviceHealth.HEALTHY
        assert 0 < d.reserved_mib < d.memory_mib
        assert d.mode is None
        assert SharingMode.EXCLUSIVE in d.modes


@pytest.mark.parametrize("mode", [SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS])
def test_steps_are_read_back_and_idempotent(ground: Ground, mode: SharingMode) -> None:
    devices = ground.devices
    gpu = devices.uuids[0]
    for _ in range(2):
        devices.apply(gpu, SetMode(mode))
        assert devices.actual(gpu).mode is mode
    assert devices.actual(devices.uuids[1]).mode is None, "the other GPU is left alone"
    for _ in range(2):
        devices.apply(gpu, SetMode(None))
        assert devices.actual(gpu).mode is None


def test_mps_comes_with_limits_and_goes_without_them(ground: Ground) -> None:
    devices = ground.devices
    gpu = devices.uuids[0]
    devices.apply(gpu, SetMode(SharingMode.MPS))
    for _ in range(2):
        devices.apply(gpu, StartMps())
        devices.apply(gpu, SetLimits(POD, Limits(1024, 50)))
    assert devices.actual(gpu).mps_daemon
    assert devices.actual(gpu).limits == {POD: Limits(1024, 50)}
    devices.apply(gpu, SetLimits(POD, None))
    assert devices.actual(gpu).limits == {}
    devices.apply(gpu, SetLimits(POD, Limits(1024, None)))
    for _ in range(2):
        devices.apply(gpu, StopMps())
    assert (devices.actual(gpu).mps_daemon, devices.actual(gpu).limits) == (False, {})


def test_nothing_is_taken_from_who_is_there(ground: Ground) -> None:
    devices = ground.devices
    gpu = devices.uuids[0]
    devices.apply(gpu, SetMode(SharingMode.MPS))
    devices.apply(gpu, StartMps())
    with ground.enter(gpu, "a"):
        assert devices.actual(gpu).tenants == {ground.pod_uid("a")}
        for step in (SetMode(SharingMode.EXCLUSIVE), SetMode(None), StopMps()):
            with pytest.raises(DeviceError, match=f"expected no process on the GPU, found {ground.pod_uid('a')}"):
                devices.apply(gpu, step)
    assert devices.actual(gpu).tenants == frozenset()


def test_daemon_needs_its_mode(ground: Ground) -> None:
    devices = ground.devices
    with pytest.raises(DeviceError, match="expected mode MPS, found Idle"):
        devices.apply(devices.uuids[0], StartMps())


def test_reading_tells_processes_apart(devices: Devices, enter) -> None:
    gpu = devices.uuids[0]
    devices.apply(gpu, SetMode(SharingMode.TIME_SLICING))
    with enter(gpu, "a") as (first,), enter(gpu, "b"):
        first.allocate(1000)
        first.run(0.001)
        reading = devices.read(gpu)
    assert len({p.id for p in reading.processes}) == 2
    used = {p.pod_uid: p for p in reading.processes}
    assert used[POD].memory_mib == 1000 + used[PodUid("uid-b")].memory_mib
    assert used[POD].steps == 1
    assert used[POD].energy_j > 0
    assert devices.read(gpu).processes == ()
    assert devices.read(gpu).energy_j >= reading.energy_j


def test_access_differs_between_gpus(ground: Ground) -> None:
    devices = ground.devices
    first, second = (devices.access(uuid) for uuid in devices.uuids)
    assert first.env == second.env
    assert {m.container_path for m in first.mounts}.isdisjoint(m.container_path for m in second.mounts)


def test_nobody_elses_gpu(ground: Ground) -> None:
    devices = ground.devices
    with pytest.raises(DeviceError, match="expected one of GPU-"):
        devices.apply(GpuUuid("GPU-elsewhere"), SetMode(None))


def test_simulated_gpus_say_so(devices: SimulatedDevices) -> None:
    assert devices.simulated
    assert all(d.product.startswith("Simulated ") for d in devices.inventory())
    assert devices.inventory()[0].product == "Simulated NVIDIA A100-SXM4-40GB"


def test_simulated_uuids_survive_restarts_and_the_loss_of_all_state(tmp_path: Path) -> None:
    products = parse_inventory("H200:1,Tesla T4:2")
    uuids = {tuple(SimulatedDevices(products, "n", tmp_path / where).uuids) for where in ("one", "one", "two")}
    assert len(uuids) == 1
    assert list(SimulatedDevices(products, "m", tmp_path / "one").uuids) not in [list(u) for u in uuids]


def test_mode_survives_a_restart(devices: SimulatedDevices, tmp_path: Path) -> None:
    gpu = devices.uuids[0]
    devices.apply(gpu, SetMode(SharingMode.EXCLUSIVE))
    again = SimulatedDevices(parse_inventory("NVIDIA A100-SXM4-40GB:2"), "node-1", tmp_path / "state")
    assert again.actual(gpu).mode is SharingMode.EXCLUSIVE


def test_corrupt_device_is_unhealthy_alone(devices: SimulatedDevices, tmp_path: Path) -> None:
    sick, well = devices.uuids
    (tmp_path / "state" / "simulated" / sick / "device.json").write_text("{")
    found = {d.uuid: d for d in devices.inventory()}
    assert found[sick].health is DeviceHealth.UNHEALTHY
    assert "device.json: expected JSON, found" in found[sick].health_message
    assert "remove it" in found[sick].health_message
    assert found[well].health is DeviceHealth.HEALTHY
    for call in (devices.actual, devices.read):
        with pytest.raises(DeviceError, match="expected JSON"):
            call(sick)


def test_another_product_than_was_set_is_unhealthy(devices: SimulatedDevices, tmp_path: Path) -> None:
    changed = SimulatedDevices(parse_inventory("Tesla T4:2"), "node-1", tmp_path / "state")
    assert all("found Simulated NVIDIA A100-SXM4-40GB" in d.health_message for d in changed.inventory())


def test_corrupt_mode_of_an_idle_gpu_mends_itself(devices: SimulatedDevices, tmp_path: Path) -> None:
    gpu = devices.uuids[0]
    (tmp_path / "state" / "simulated" / gpu / "mode.json").write_text('{"mode": "Turbo"}')
    assert replace(devices.actual(gpu), modes=frozenset()).mode is None
    devices.apply(gpu, SetMode(SharingMode.MPS))
    devices.apply(gpu, StartMps())
    assert devices.actual(gpu).mps_daemon


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NVIDIA A100-SXM4-40GB:0", "count from 1"),
        ("NVIDIA A100-SXM4-40GB:many", "count from 1"),
        ("A100:2", "is ambiguous"),
        ("Banana:2", "is unknown; known products"),
        ("", "count"),
    ],
)
def test_inventory_that_makes_no_sense(text: str, says: str) -> None:
    with pytest.raises(NoDevicesError, match=f"CARPOOL_SIMULATED_GPUS.*{says}"):
        parse_inventory(text or ":")
