"""What pods use of real GPUs: time, activity, memory, and energy that adds up, over the fake of NVML."""

import math
from pathlib import Path
from typing import Any

import pytest
from carpool_deviceplugin.controller.meter import Meter
from carpool_deviceplugin.nvml.devices import NvmlDevices
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node, uid


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(FakeNvml(["H100", "H100"]), FakeMpsCommands(), tmp_path)


def test_measures_of_two_tenants(node: Node) -> None:
    devices = node.devices()
    gpu = devices.uuids[0]
    node.start(0, 42, "a", 2000, sm=0.6, dram=0.3)
    node.start(0, 43, "b", 1000, sm=0.2, dram=0.1)
    meter = Meter(gpu)
    for _ in range(30):
        meter.sample(devices.read(gpu))
        node.advance(1)
    a, b = meter.tenants()
    assert (a.pod_uid, b.pod_uid) == (uid("a"), uid("b"))
    assert (a.memory_mib, b.memory_mib) == (2000, 1000)
    assert a.gpu_util_percent == pytest.approx(60, abs=2)
    assert b.gpu_util_percent == pytest.approx(20, abs=2)
    assert a.sm_active_ratio == pytest.approx(0.6, abs=0.02)


class WithoutNumbers(FakeNvml):
    """The driver could not compute a metric, and says that it has."""

    def nvmlGpmMetricsGet(self, request: Any) -> Any:  # noqa: N802  # NVIDIA's name
        answer = super().nvmlGpmMetricsGet(request)
        answer.metrics[1].value = math.nan
        return answer


def test_what_is_no_number_is_absent(tmp_path: Path) -> None:
    """Regression: an SM activity that nobody could compute was shown as zero."""
    node = Node(WithoutNumbers(["H100"]), FakeMpsCommands(), tmp_path)
    devices = node.devices()
    node.start(0, 42, "a", sm=0.6, dram=0.3)
    for _ in range(3):
        reading = devices.read(devices.uuids[0])
        node.advance(1)
    assert "DCGM_FI_PROF_SM_ACTIVE" not in reading.counters
    assert reading.counters["DCGM_FI_PROF_DRAM_ACTIVE"] == pytest.approx(0.3)
    (use,) = reading.processes
    assert (use.sm_s, use.dram_s is not None) == (None, True)


@pytest.mark.parametrize("is_idle_first", [True, False])
def test_energy_of_pods_and_idle_add_up_to_the_counter(node: Node, is_idle_first: bool) -> None:
    devices = node.devices()
    gpu = devices.uuids[0]
    devices.read(gpu)
    if is_idle_first:
        node.advance(5)
        devices.read(gpu)
    began = node.nvml.gpus[0].energy_mj
    uses: dict[str, float] = {}
    node.start(0, 42, "a", sm=0.6)
    node.start(0, 43, "b", sm=0.3)
    for second in range(60):
        node.advance(1)
        if second == 30:
            node.nvml.gpus[0].processes[43].sm = 0.0
        reading = devices.read(gpu)
        uses |= {p.pod_uid: p.energy_j for p in reading.processes}
    spent = (node.nvml.gpus[0].energy_mj - began) / 1000
    idle = 60 * (reading.idle_power_w or 0.0)
    assert math.isclose(sum(uses.values()) + idle, spent, rel_tol=0.01)
    assert uses[uid("a")] > uses[uid("b")] > 0


def test_energy_as_it_is_shown_adds_up_too(node: Node) -> None:
    """Regression: what a pod drew before its processes were first seen was shared out, and then shown for nobody."""
    devices = node.devices()
    meter = Meter(devices.uuids[0])
    meter.sample(devices.read(meter.uuid))
    node.advance(5)
    meter.sample(devices.read(meter.uuid))
    began = node.nvml.gpus[0].energy_mj
    for at, pod in ((0, "a"), (10, "b")):
        for _ in range(at // 5):
            node.advance(5)
            meter.sample(devices.read(meter.uuid))
        node.start(0, 42 + at, pod, sm=0.4)
    for _ in range(4):
        node.advance(5)
        meter.sample(devices.read(meter.uuid))
    spent = (node.nvml.gpus[0].energy_mj - began) / 1000
    shown = sum(use.energy_j for use in meter.uses.values())
    assert math.isclose(shown + 30 * meter.reading.idle_power_w, spent, rel_tol=0.01)


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_a_process_drew_before_its_end_is_its_own(node: Node, is_alone: bool) -> None:
    """Regression: its last interval was nobody's, or its neighbour's, who did nothing."""
    devices = node.devices()
    meter = Meter(devices.uuids[0])
    meter.sample(devices.read(meter.uuid))
    node.advance(5)
    meter.sample(devices.read(meter.uuid))
    began = node.nvml.gpus[0].energy_mj
    node.start(0, 42, "a", sm=0.9)
    if not is_alone:
        node.start(0, 43, "b")
    for _ in range(3):
        node.advance(5)
        meter.sample(devices.read(meter.uuid))
    node.advance(4.9)
    node.end(0, 42)
    node.advance(0.1)
    meter.sample(devices.read(meter.uuid))
    node.advance(5)
    meter.sample(devices.read(meter.uuid))
    spent = (node.nvml.gpus[0].energy_mj - began) / 1000 - 25 * meter.reading.idle_power_w
    assert meter.uses[uid("a")].energy_j == pytest.approx(spent, rel=0.01)
    assert not meter.uses[uid("a")].is_running


def divided(root: Path, kind: str) -> tuple[Node, NvmlDevices, list[int]]:
    """A GPU with an instance of three slices, and one of one."""
    node = Node(FakeNvml([kind]), FakeMpsCommands(), root)
    mig = node.nvml.gpus[0].mig
    mig.is_enabled = mig.is_pending = True
    devices = node.devices()
    three, one = (mig.table.profiles[at] for at in (2, 5))
    instances = [mig.create(p.id, start, p.memory_slices).id for p, start in ((three, 4), (one, 0))]
    devices.actual(devices.uuids[0])
    return node, devices, instances


def test_energy_under_mig_of_a_process_that_ended(tmp_path: Path) -> None:
    """Its instance is there for a while longer; where it is not, nobody knows what ran on it."""
    node, devices, instances = divided(tmp_path, "H100")
    meter = Meter(devices.uuids[0])
    for _ in range(2):
        meter.sample(devices.read(meter.uuid))
        node.advance(5)
    meter.sample(devices.read(meter.uuid))
    began = node.nvml.gpus[0].energy_mj
    node.start(0, 42, "a", sm=0.6, instance=instances[0])
    node.start(0, 43, "b", sm=0.3, instance=instances[1])
    for end in (None, 42, 43):
        node.advance(4.9)
        if end is not None:
            node.end(0, end)
        node.advance(0.1)
        meter.sample(devices.read(meter.uuid))
    spent = (node.nvml.gpus[0].energy_mj - began) / 1000 - 15 * meter.reading.idle_power_w
    assert sum(use.energy_j for use in meter.uses.values()) == pytest.approx(spent, rel=0.01)


@pytest.mark.parametrize(("kind", "is_known"), [("H100", True), ("A100-40", False)])
def test_energy_under_mig_adds_up_where_the_instances_activity_is_known(tmp_path: Path, kind: str, is_known) -> None:
    """Without GPM nobody can say whose it was: then it is absent, not shared out by guess."""
    node, devices, instances = divided(tmp_path, kind)
    (gpu,) = devices.uuids
    devices.read(gpu)
    node.advance(5)
    devices.read(gpu)
    began = node.nvml.gpus[0].energy_mj
    for pid, pod, sm, instance in ((42, "a", 0.6, instances[0]), (43, "b", 0.3, instances[1])):
        node.start(0, pid, pod, sm=sm, instance=instance)
    for _ in range(60):
        reading = devices.read(gpu)
        node.advance(1)
    reading = devices.read(gpu)
    uses = {p.pod_uid: p.energy_j for p in reading.processes}
    if not is_known:
        assert set(uses.values()) == {None}
        return
    spent = (node.nvml.gpus[0].energy_mj - began) / 1000
    assert math.isclose(sum(uses.values()) + 60 * reading.idle_power_w, spent, rel_tol=0.01)
    assert uses[uid("a")] > uses[uid("b")] > 0


def test_counter_that_begins_anew_takes_no_energy_back(node: Node) -> None:
    devices = node.devices()
    gpu = devices.uuids[0]
    node.start(0, 42, "a", sm=0.6)
    for _ in range(3):
        node.advance(1)
        before = devices.read(gpu)
    node.nvml.gpus[0].energy_mj = 0
    after = devices.read(gpu)
    assert after.processes[0].energy_j == before.processes[0].energy_j


def test_process_id_used_again_is_another_process(node: Node) -> None:
    devices = node.devices()
    node.start(0, 42, "a")
    first = devices.read(devices.uuids[0]).processes[0]
    node.end(0, 42)
    node.start(0, 42, "b")
    (node.root / "proc" / "42" / "stat").write_text("42 (sh) S " + " ".join(["0"] * 18) + " 777 0 0\n")
    second = devices.read(devices.uuids[0]).processes[0]
    assert first.id != second.id
    assert second.pod_uid == uid("b")
