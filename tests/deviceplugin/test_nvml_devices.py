"""Real GPUs behind the port, over the fake: what the contract of all adapters does not say."""

import math
from pathlib import Path

import pynvml
import pytest
from carpool_core.values import DeviceHealth, PodUid, SharingMode
from carpool_deviceplugin.devices import NoDevicesError
from carpool_deviceplugin.gpu import DeviceError, Limits, SetLimits, SetMode, StartMps, StopMps
from carpool_deviceplugin.meter import Meter
from carpool_deviceplugin.plan import plan
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_hardware import HARDWARE
from carpool_deviceplugin.testing.nvml_node import Node, uid

MPS, TIME_SLICING = SharingMode.MPS, SharingMode.TIME_SLICING


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(FakeNvml(["H100", "H100"]), FakeMpsCommands(), tmp_path)


def pipe(node: Node, gpu: str) -> str:
    return str(node.root / "mps" / gpu / "pipe")


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


@pytest.mark.parametrize(("kind", "is_known"), [("H100", True), ("A100-40", False)])
def test_energy_under_mig_adds_up_where_the_instances_activity_is_known(tmp_path: Path, kind: str, is_known) -> None:
    """Without GPM nobody can say whose it was: then it is absent, not shared out by guess."""
    node = Node(FakeNvml([kind]), FakeMpsCommands(), tmp_path)
    mig = node.nvml.gpus[0].mig
    mig.is_enabled = mig.is_pending = True
    devices = node.devices()
    (gpu,) = devices.uuids
    devices.read(gpu)
    node.advance(5)
    devices.read(gpu)
    three, one = (mig.table.profiles[at] for at in (2, 5))
    instances = [mig.create(p.id, start, p.memory_slices).id for p, start in ((three, 4), (one, 0))]
    devices.actual(gpu)
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


def test_process_of_the_host_keeps_new_work_away_and_is_named(node: Node) -> None:
    devices = node.devices()
    node.start(0, 42, None)
    first, second = devices.inventory()
    assert first.health is DeviceHealth.UNHEALTHY
    assert "process 42 (python (3)) on the GPU belong to no pod" in first.health_message
    assert second.health is DeviceHealth.HEALTHY
    with pytest.raises(DeviceError, match="found process 42"):
        devices.apply(devices.uuids[0], SetMode(TIME_SLICING))


def test_mps_daemon_dies_and_is_started_again(node: Node, reserve) -> None:
    devices = node.devices()
    gpu = devices.uuids[0]
    wanted = [reserve("a", gpu, mode=MPS, memory_limit_mib=5000)]
    for step in plan(devices.actual(gpu), wanted).steps:
        devices.apply(gpu, step)
    assert node.mps.daemons[pipe(node, gpu)].environment["CUDA_VISIBLE_DEVICES"] == gpu
    assert plan(devices.actual(gpu), wanted).steps == ()
    node.mps.die(pipe(node, gpu))
    assert plan(devices.actual(gpu), wanted).steps == (StartMps(),)


def test_another_agent_takes_the_daemon_over(node: Node) -> None:
    gpu = node.devices().uuids[0]
    for _ in range(2):
        devices = node.devices()
        devices.apply(gpu, SetMode(MPS))
        devices.apply(gpu, StartMps())
        devices.apply(gpu, SetLimits(PodUid("p"), Limits(10, 20)))
    assert node.mps.starts == 1
    assert node.devices().actual(gpu).limits == {PodUid("p"): Limits(10, 20)}


def test_mps_server_is_nobodys_process(node: Node) -> None:
    devices = node.devices()
    gpu = devices.uuids[0]
    devices.apply(gpu, SetMode(MPS))
    devices.apply(gpu, StartMps())
    node.start(0, 42, "a")
    server = node.mps.connect(pipe(node, gpu), 42)
    node.start(0, server, None)
    actual = devices.actual(gpu)
    assert (actual.problem, actual.tenants) == ("", {uid("a")})
    with pytest.raises(DeviceError, match="expected no process"):
        devices.apply(gpu, StopMps())


def test_daemon_is_asked_rarely_while_the_same_processes_are_there(node: Node) -> None:
    """Each question starts a program; measuring once a second must not."""
    devices = node.devices()
    gpu = devices.uuids[0]
    devices.apply(gpu, SetMode(MPS))
    devices.apply(gpu, StartMps())
    node.start(0, 42, "a")
    devices.read(gpu)
    before = node.mps.asked
    for _ in range(4):
        node.advance(1)
        devices.read(gpu)
    assert node.mps.asked == before
    server = node.mps.connect(pipe(node, gpu), 42)
    node.start(0, server, "agent")
    assert [p.pod_uid for p in devices.read(gpu).processes] == [uid("a")], "a new server is known at once"


def test_access_says_whom_the_mps_server_serves(node: Node) -> None:
    devices = node.devices()
    gpu, other = devices.uuids
    devices.apply(gpu, SetMode(MPS))
    devices.apply(gpu, StartMps())
    assert devices.access(gpu).mps_user is None, "nobody yet"
    node.start(0, 42, "a", user=1000)
    node.start(0, node.mps.connect(pipe(node, gpu), 42), None, user=1000)
    devices.read(gpu)
    assert (devices.access(gpu).mps_user, devices.access(other).mps_user) == (1000, None)
    node.end(0, 42)
    node.mps.daemons[pipe(node, gpu)].clients.clear()
    devices.read(gpu)
    assert devices.access(gpu).mps_user is None, "a server without clients makes room for another user's"


def test_fatal_fault_of_a_client_names_all_clients(node: Node) -> None:
    devices = node.devices()
    gpu = devices.uuids[0]
    devices.apply(gpu, SetMode(MPS))
    devices.apply(gpu, StartMps())
    for pid, pod in ((42, "a"), (43, "b")):
        node.start(0, pid, pod)
        node.mps.connect(pipe(node, gpu), pid)
    node.mps.daemons[pipe(node, gpu)].is_faulty = True
    problem = devices.actual(gpu).problem
    assert "fatal fault (clients: 42, 43)" in problem
    assert f"pods that it ends together: {uid('a')}, {uid('b')}" in problem


def test_daemon_that_does_not_start_is_said(node: Node) -> None:
    devices = node.devices()
    node.mps.refuse = "nvidia-cuda-mps-control ended with 1: no"
    devices.apply(devices.uuids[0], SetMode(MPS))
    with pytest.raises(DeviceError, match="ended with 1: no"):
        devices.apply(devices.uuids[0], StartMps())


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
    "function", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMemoryInfo", "nvmlEventSetWait"]
)
def test_any_call_that_fails_is_unhealthy_for_now(node: Node, function: str) -> None:
    devices = node.devices()
    devices.inventory()
    node.nvml.fail_next(function, pynvml.NVML_ERROR_UNKNOWN)
    assert DeviceHealth.UNHEALTHY in [d.health for d in devices.inventory()]
    assert {d.health for d in devices.inventory()} == {DeviceHealth.HEALTHY}


@pytest.mark.parametrize(
    ("kinds", "failing", "says"),
    [([], "", "found a driver and none"), (["T4"], "nvmlDeviceGetName", "nvmlDeviceGetName failed: Unknown Error")],
)
def test_node_without_gpus_that_can_be_read_says_so(tmp_path: Path, kinds: list[str], failing: str, says: str) -> None:
    nvml = FakeNvml(kinds)
    nvml.fail_next(failing, pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(NoDevicesError, match=says):
        Node(nvml, FakeMpsCommands(), tmp_path).devices()
