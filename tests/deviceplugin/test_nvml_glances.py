"""What the driver is asked once for two."""

from pathlib import Path

import pytest
from carpool_core.values import DeviceHealth, SharingMode
from carpool_deviceplugin.devices.gpu import DeviceError, SetMode
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node, uid


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path)


def asked(node: Node) -> int:
    """How often for telemetry, and for processes."""
    found = {node.nvml.calls.count(f"nvmlDeviceGet{what}") for what in ("PowerUsage", "ComputeRunningProcesses")}
    assert len(found) == 1
    return found.pop()


def test_health_is_taken_from_measures_of_a_moment_ago_once(node: Node) -> None:
    devices = node.devices()
    (gpu,) = devices.uuids
    for _ in range(3):
        before = asked(node)
        devices.read(gpu)
        node.advance(0.1)
        devices.describe(gpu)
        assert asked(node) == before + 1
        devices.describe(gpu)
        assert asked(node) == before + 2
        node.advance(5)
    before = asked(node)
    devices.read(gpu)
    node.advance(1)
    devices.describe(gpu)
    assert asked(node) == before + 2, "that was too long ago"


def test_what_happened_to_the_gpu_since_is_seen_all_the_same(node: Node) -> None:
    devices = node.devices()
    (gpu,) = devices.uuids
    devices.inventory()
    devices.read(gpu)
    node.nvml.raise_xid(0, 95)
    assert "XID 95" in devices.describe(gpu).health_message
    devices.read(gpu)
    node.nvml.restart_driver()
    assert devices.describe(gpu).health is DeviceHealth.UNHEALTHY
    devices.read(gpu)
    node.nvml.gpus[0].is_lost = True
    assert "fallen off the bus" in devices.describe(gpu).health_message


def test_who_came_since_the_measures_is_seen_by_whoever_plans(node: Node) -> None:
    devices = node.devices()
    (gpu,) = devices.uuids
    devices.read(gpu)
    node.start(0, 42, "a")
    assert devices.actual(gpu).tenants == {uid("a")}
    devices.read(gpu)
    node.start(0, 43, None)
    with pytest.raises(DeviceError, match="expected no process on the GPU, found"):
        devices.apply(gpu, SetMode(SharingMode.EXCLUSIVE))
    assert devices.describe(gpu).health is DeviceHealth.UNHEALTHY, "and afterwards by everybody"
