"""Health of real GPUs, from what the driver says to whether new work may come, over the fake of NVML."""

import json
from pathlib import Path

import pynvml
import pytest
from carpool_core.values import DeviceHealth
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_gpus import FakeGpu
from carpool_deviceplugin.testing.nvml_node import Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(FakeNvml(["H100", "H100"]), FakeMpsCommands(), tmp_path)


@pytest.mark.parametrize("xid", [13, 31, 43, 45])
def test_xid_of_an_application_leaves_the_gpu_well(node: Node, xid: int) -> None:
    devices = node.devices()
    devices.inventory()
    node.nvml.raise_xid(0, xid)
    assert devices.inventory()[0].health is DeviceHealth.HEALTHY


def test_fatal_xid_holds_until_the_driver_began_anew_and_was_quiet(node: Node) -> None:
    devices = node.devices()
    devices.inventory()
    node.nvml.raise_xid(0, 95)
    first, second = devices.inventory()
    assert "XID 95 (uncontained ECC error): drain the GPU and reset it" in first.health_message
    assert second.health is DeviceHealth.HEALTHY
    node.advance(3600)
    assert devices.inventory()[0].health is DeviceHealth.UNHEALTHY, "time does not heal it"
    node.nvml.restart_driver()
    devices.inventory()
    devices.inventory()
    assert devices.inventory()[0].health is DeviceHealth.UNHEALTHY, "it was not quiet for long enough"
    node.advance(61)
    assert devices.inventory()[0].health is DeviceHealth.HEALTHY


def test_node_that_has_restarted_begins_anew(node: Node) -> None:
    """What takes a reset has had one, whatever the counter of energy says."""
    devices = node.devices()
    devices.inventory()
    node.nvml.raise_xid(0, 95)
    devices.inventory()
    assert node.devices().inventory()[0].health is DeviceHealth.UNHEALTHY
    file = node.root / "state" / "gpus" / f"{devices.uuids[0]}.health.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "boot": "another"}))
    assert node.devices().inventory()[0].health is DeviceHealth.HEALTHY


def test_health_outlives_the_agent_and_a_reset_meanwhile_counts(node: Node) -> None:
    node.advance(10)
    devices = node.devices()
    devices.inventory()
    node.nvml.raise_xid(0, 95)
    devices.inventory()
    node.advance(3600)
    assert "XID 95" in node.devices().inventory()[0].health_message, "nothing has mended it"
    node.nvml.restart_driver()
    later = node.devices()
    assert "XID 95" in later.inventory()[0].health_message
    node.advance(61)
    assert later.inventory()[0].health is DeviceHealth.HEALTHY


def test_damaged_health_is_none(node: Node) -> None:
    devices = node.devices()
    devices.inventory()
    node.nvml.raise_xid(0, 95)
    devices.inventory()
    (node.root / "state" / "gpus" / f"{devices.uuids[0]}.health.json").write_text('{"boot": ')
    assert node.devices().inventory()[0].health is DeviceHealth.HEALTHY


def test_gpu_that_is_busy_at_idle_power_is_stuck(node: Node) -> None:
    devices = node.devices()
    gpu = devices.uuids[0]
    for _ in range(3):
        devices.read(gpu)
        node.advance(1)
    node.start(0, 42, "a", sm=1.0)
    node.nvml.gpus[0].is_stuck = True
    devices.inventory()
    node.advance(500)
    assert devices.inventory()[0].health is DeviceHealth.HEALTHY
    node.advance(101)
    assert "it is stuck" in devices.inventory()[0].health_message
    node.nvml.gpus[0].is_stuck = False
    devices.inventory()
    node.advance(61)
    assert devices.inventory()[0].health is DeviceHealth.HEALTHY


def errors(gpu: FakeGpu) -> None:
    gpu.ecc_uncorrectable += 2


def waiting_row(gpu: FakeGpu) -> None:
    gpu.remap = (0, 1, 1, 0)


def no_spare_row(gpu: FakeGpu) -> None:
    gpu.remap = (0, 1, 0, 1)


def heat(gpu: FakeGpu) -> None:
    gpu.clock_reasons = pynvml.nvmlClocksEventReasonHwThermalSlowdown


@pytest.mark.parametrize(
    ("happens", "says", "heals"),
    [
        (errors, "2 uncorrectable ECC errors", True),
        (waiting_row, "a row of its memory waits to be remapped: drain the GPU and reset it", False),
        (no_spare_row, "a row of its memory could not be remapped: replace the GPU", False),
        (heat, "it has slowed down for heat for more than 30 s", False),
    ],
)
def test_what_the_driver_counts_leads_to_a_sick_gpu(node: Node, happens, says: str, heals: bool) -> None:
    """And back by rule: after a minute in which it does not go on."""
    devices = node.devices()
    devices.inventory()
    happens(node.nvml.gpus[0])
    devices.inventory()
    node.advance(31)
    first, second = devices.inventory()
    assert (first.health, second.health) == (DeviceHealth.UNHEALTHY, DeviceHealth.HEALTHY)
    assert says in first.health_message
    node.advance(61)
    assert (devices.inventory()[0].health is DeviceHealth.HEALTHY) is heals


def test_lost_gpu_is_unhealthy_alone_and_comes_back_by_rule(node: Node) -> None:
    devices = node.devices()
    node.nvml.gpus[0].is_lost = True
    first, second = devices.inventory()
    assert (first.health, second.health) == (DeviceHealth.UNHEALTHY, DeviceHealth.HEALTHY)
    assert "fallen off the bus" in first.health_message
    assert first.product == "NVIDIA H100 80GB HBM3"
    node.nvml.gpus[0].is_lost = False
    assert devices.inventory()[0].health is DeviceHealth.UNHEALTHY
    node.advance(61)
    assert devices.inventory()[0].health is DeviceHealth.HEALTHY


def test_driver_that_was_updated_under_an_agent_is_said_until_it_fits(node: Node) -> None:
    devices = node.devices()
    devices.inventory()
    node.nvml.restart_driver()
    node.nvml.init_error = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    devices.inventory()
    for device in devices.inventory():
        assert device.health is DeviceHealth.UNHEALTHY
        assert "library and kernel module are of different versions: restart the node" in device.health_message
    node.nvml.init_error = None
    devices.inventory()
    node.advance(61)
    assert {device.health for device in devices.inventory()} == {DeviceHealth.HEALTHY}


def test_last_words_of_a_lost_gpu_are_not_told_of_its_neighbour(node: Node) -> None:
    """Regression: one look took the events of all GPUs, and whose this one was could not be asked any more."""
    devices = node.devices()
    devices.inventory()
    node.nvml.raise_xid(1, 79)
    node.nvml.raise_xid(0, 13)
    node.nvml.gpus[1].is_lost = True
    for _ in range(2):
        first, second = devices.inventory()
        assert (first.health, first.health_message) == (DeviceHealth.HEALTHY, "")
        assert second.health is DeviceHealth.UNHEALTHY


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMemoryInfo", "nvmlEventSetWait"]
)
def test_any_call_that_fails_is_unhealthy_for_now(node: Node, function: str) -> None:
    devices = node.devices()
    devices.inventory()
    node.nvml.fail_next(function, pynvml.NVML_ERROR_UNKNOWN)
    assert DeviceHealth.UNHEALTHY in [d.health for d in devices.inventory()]
    assert {d.health for d in devices.inventory()} == {DeviceHealth.HEALTHY}
