"""Real GPUs behind the port, over the fake: what the contract of all adapters does not say."""

from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from carpool_core.values import DeviceHealth, SharingMode
from carpool_deviceplugin.devices.gpu import DeviceError, SetMode
from carpool_deviceplugin.devices.port import NoDevicesError
from carpool_deviceplugin.nvml.values import linked
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_hardware import HARDWARE
from carpool_deviceplugin.testing.nvml_node import Node

MPS, TIME_SLICING = SharingMode.MPS, SharingMode.TIME_SLICING


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(FakeNvml(["H100", "H100"]), FakeMpsCommands(), tmp_path)


@pytest.mark.parametrize("kind", list(HARDWARE))
def test_every_kind_of_gpu_is_described(tmp_path: Path, kind: str) -> None:
    (found,) = Node(FakeNvml([kind]), FakeMpsCommands(), tmp_path).devices().inventory()
    assert (found.product, found.health) == (HARDWARE[kind].product, DeviceHealth.HEALTHY)
    assert found.modes == [SharingMode.EXCLUSIVE, TIME_SLICING, MPS]
    assert found.reserved_mib == HARDWARE[kind].reserved_mib + 256
    assert len(found.mig_profiles) == (len(HARDWARE[kind].mig.profiles) if HARDWARE[kind].mig else 0)
    assert found.numa_node == 0


@pytest.mark.parametrize("kind", list(HARDWARE))
def test_what_a_gpu_cannot_say_is_absent(tmp_path: Path, kind: str) -> None:
    node = Node(FakeNvml([kind]), FakeMpsCommands(), tmp_path)
    devices = node.devices()
    (gpu,) = devices.uuids
    node.start(0, 42, "a", sm=0.5, dram=0.2)
    for _ in range(3):
        reading = devices.read(gpu)
        node.advance(1)
    assert ("DCGM_FI_PROF_SM_ACTIVE" in reading.counters) == HARDWARE[kind].has_gpm
    assert ("DCGM_FI_DEV_ROW_REMAP_FAILURE" in reading.counters) == HARDWARE[kind].has_row_remap
    (process,) = reading.processes
    assert (process.sm_s is not None) == HARDWARE[kind].has_gpm
    assert process.busy_s == pytest.approx(0.5 * 2, rel=0.1)


def test_links_and_numa_nodes_are_told(tmp_path: Path) -> None:
    a, b, alone = (
        Node(FakeNvml(kinds), FakeMpsCommands(), tmp_path / kinds[0]).devices()
        for kinds in (["H100"] * 3, ["A100-40"] * 2, ["T4"] * 2)
    )
    assert [d.nvlink_peers for d in a.inventory()] == [[u for u in a.uuids if u != uuid] for uuid in a.uuids]
    assert [d.nvlink_peers for d in b.inventory()] == [[b.uuids[1]], [b.uuids[0]]]
    assert [d.nvlink_peers for d in alone.inventory()] == [[], []]
    assert [d.numa_node for d in Node(FakeNvml(["T4"] * 5), FakeMpsCommands(), tmp_path).devices().inventory()] == [
        0, 0, 0, 0, 1,
    ]  # fmt: skip


def test_gpus_at_the_same_switch_are_linked(node: Node) -> None:
    """An NVSwitch machine shows switches at the other ends, and no GPU."""
    devices = node.devices()
    first, second = (devices.identity(uuid) for uuid in devices.uuids)
    switch, another = "00000000:C1:00.0", "00000000:C2:00.0"
    apart = [replace(first, nvlink_peers=(switch,)), replace(second, nvlink_peers=(another,))]
    together = [replace(first, nvlink_peers=(switch,)), replace(second, nvlink_peers=(another, switch))]
    for known, peers in ((apart, []), (together, [second.uuid])):
        assert linked(known[0], {one.uuid: one for one in known}) == peers


def test_process_of_the_host_keeps_new_work_away_and_is_named(node: Node) -> None:
    devices = node.devices()
    node.start(0, 42, None)
    first, second = devices.inventory()
    assert first.health is DeviceHealth.UNHEALTHY
    assert "process 42 (python (3)) on the GPU belong to no pod" in first.health_message
    assert second.health is DeviceHealth.HEALTHY
    with pytest.raises(DeviceError, match="found process 42"):
        devices.apply(devices.uuids[0], SetMode(TIME_SLICING))


def test_full_disk_is_said(node: Node) -> None:
    devices = node.devices()
    (node.root / "state").write_text("a file where a directory should be")
    with pytest.raises(DeviceError, match=r"expected to keep the GPU's mode there.*free some space|expected to read"):
        devices.apply(devices.uuids[0], SetMode(TIME_SLICING))


def test_damaged_mode_is_idle(node: Node) -> None:
    devices = node.devices()
    gpu = devices.uuids[0]
    devices.apply(gpu, SetMode(TIME_SLICING))
    (node.root / "state" / "gpus" / f"{gpu}.json").write_text('{"mode": "Tur')
    assert devices.actual(gpu).mode is None


@pytest.mark.parametrize(
    ("kinds", "failing", "says"),
    [([], "", "found a driver and none"), (["T4"], "nvmlDeviceGetName", "nvmlDeviceGetName failed: Unknown Error")],
)
def test_node_without_gpus_that_can_be_read_says_so(tmp_path: Path, kinds: list[str], failing: str, says: str) -> None:
    nvml = FakeNvml(kinds)
    nvml.fail_next(failing, pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(NoDevicesError, match=says):
        Node(nvml, FakeMpsCommands(), tmp_path).devices()
