"""Health of GPUs, from NVML and calls that hang to the status."""

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest
from agent_world import agent_on, first_gpu, mig_node, registry_of, reserve_on, status_of
from carpool_core.resources.node import Device, GpuNodeStatus
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, GpuUuid, SharingMode
from carpool_deviceplugin.gpu import DeviceError, GpuActual, Reading
from carpool_deviceplugin.health import Health, Signals, Xid, XidClass, XidWatch, next_health, xid_class
from carpool_deviceplugin.simulated import SimulatedDevices, parse_inventory
from carpool_deviceplugin.testing.node import Node, running, until
from carpool_deviceplugin.timeouts import Intervals, TimeLimitedCaller
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("is_damaged", [False, True])
def test_after_a_reboot_or_with_a_damaged_file_gpus_start_healthy(node: Node, is_damaged: bool) -> None:
    """A reboot resets the GPUs."""
    devices = node.devices()
    devices.inventory()
    node.nvml.raise_xid(0, 95)
    devices.inventory()
    assert node.devices().inventory()[0].health is DeviceHealth.UNHEALTHY
    file = node.root / "state" / "gpus" / f"{devices.uuids[0]}.health.json"
    rebooted = json.dumps({**json.loads(file.read_text()), "boot": "another"})
    file.write_text('{"boot": ' if is_damaged else rebooted)
    assert node.devices().inventory()[0].health is DeviceHealth.HEALTHY


def test_health_outlives_the_agent_and_a_reset_meanwhile_counts(node: Node) -> None:
    devices = node.devices()
    devices.inventory()
    node.nvml.raise_xid(0, 95)
    first, second = devices.inventory()
    assert "XID 95 (uncontained ECC error): drain the GPU and reset it" in first.health_message
    assert second.health is DeviceHealth.HEALTHY
    node.advance(3600)
    assert "XID 95" in node.devices().inventory()[0].health_message, "time alone does not help"
    node.nvml.restart_driver()
    later = node.devices()
    assert "XID 95" in later.inventory()[0].health_message
    node.advance(61)
    assert later.inventory()[0].health is DeviceHealth.HEALTHY


def test_gpu_that_is_busy_at_idle_power_is_stuck(node: Node) -> None:
    devices, gpu = first_gpu(node)
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


@pytest.mark.parametrize(
    ("counters", "message", "heals"),
    [
        ({"ecc_uncorrectable": 2}, "2 uncorrectable ECC errors", True),
        ({"remap": (0, 1, 1, 0)}, "a row of its memory waits to be remapped: drain the GPU and reset it", False),
        ({"remap": (0, 1, 0, 1)}, "a row of its memory could not be remapped: replace the GPU", False),
        (
            {"clock_reasons": pynvml.nvmlClocksEventReasonHwThermalSlowdown},
            "it has slowed down for heat for more than 30 s",
            False,
        ),
    ],
    ids=["errors", "waiting-row", "no-spare-row", "heat"],
)
def test_counters_of_the_driver_make_a_gpu_unhealthy(node: Node, counters: dict, message: str, heals: bool) -> None:
    """It is healthy again after a quiet minute."""
    devices = node.devices()
    devices.inventory()
    for name, value in counters.items():
        setattr(node.nvml.gpus[0], name, value)
    devices.inventory()
    node.advance(31)
    first, second = devices.inventory()
    assert (first.health, second.health) == (DeviceHealth.UNHEALTHY, DeviceHealth.HEALTHY)
    assert message in first.health_message
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


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "library and kernel module are of different versions: restart the"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "load the driver"),
    ],
    ids=["updated", "unloaded"],
)
def test_a_driver_that_does_not_restart_is_reported_until_it_does(node: Node, code: int, message: str) -> None:
    devices = node.devices()
    devices.inventory()
    node.nvml.restart_driver()
    node.nvml.init_error = code
    devices.inventory()
    for device in devices.inventory():
        assert device.health is DeviceHealth.UNHEALTHY
        assert message in device.health_message
    node.nvml.init_error = None
    devices.inventory()
    node.advance(61)
    assert {device.health for device in devices.inventory()} == {DeviceHealth.HEALTHY}


def test_the_mig_instance_of_an_xid_is_named(tmp_path: Path) -> None:
    """Regression: which of seven instances had it was lost."""
    devices = (node := mig_node(tmp_path)).devices()
    devices.inventory()
    node.nvml.raise_xid(0, 13, 2)
    assert devices.inventory()[0].health_message == ""
    node.nvml.raise_xid(0, 95, 3)
    assert devices.inventory()[0].health_message.startswith("XID 95 (uncontained ECC error) of MIG instance 3: drain")


def test_an_xid_is_kept_where_its_instance_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the driver reports each event once, so the XID was lost."""
    devices = (node := mig_node(tmp_path)).devices()
    watch = XidWatch(devices.session, devices.uuids)
    watch.poll(devices.uuids[0])
    node.nvml.raise_xid(0, 95, 3)

    def failing(_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(node.nvml, "nvmlDeviceGetMigMode", failing)
    assert watch.poll(devices.uuids[0]) == [Xid(95)]


def test_events_of_a_lost_gpu_are_not_attributed_to_its_neighbour(node: Node) -> None:
    """Regression: one event set was shared by all GPUs."""
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
def test_a_failed_call_makes_the_gpu_unhealthy_until_the_next_read(node: Node, function: str) -> None:
    devices = node.devices()
    devices.inventory()
    node.nvml.fail_next(function, pynvml.NVML_ERROR_UNKNOWN)
    assert DeviceHealth.UNHEALTHY in [d.health for d in devices.inventory()]
    assert {d.health for d in devices.inventory()} == {DeviceHealth.HEALTHY}


WELL = Health()
XID_90 = "XID 90 (L2 cache error): no new work until it has been quiet"
XID_79 = "XID 79 (fallen off the bus): drain the GPU and reset it"
LOST = Signals(lost="fallen off the bus")
HOT, COOL = Signals(is_hot=True), Signals(is_hot=False)
STILL, MOVING = Signals(is_motionless=True), Signals(is_motionless=False)
NOTHING, RESET = Signals(), Signals(was_reset=True)
HEAT = [(0, HOT, ""), (10, COOL, ""), (40, HOT, ""), (71, HOT, "slowed down for heat"), (132, COOL, "")]
STUCK = [(0, STILL, ""), (300, MOVING, ""), (601, STILL, ""), (1201, STILL, "it is stuck"), (1262, MOVING, "")]
ANSWERS_AGAIN = [(0, LOST, "fallen"), (5000, LOST, "fallen"), (5001, NOTHING, "fallen"), (5061, NOTHING, "")]


def xid(*codes: int) -> Signals:
    return Signals(xids=[Xid(code) for code in codes])


FATAL_UNTIL_RESET = [
    (0, xid(79), XID_79), (10, xid(90), XID_79), (1e6, NOTHING, XID_79), (1e6 + 1, RESET, XID_79),
    (1e6 + 61, NOTHING, ""),
]  # fmt: skip
TWICE = [(0, xid(90), XID_90), (30, xid(90), XID_90), (89, NOTHING, XID_90), (151, NOTHING, "")]


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([(0, xid(13, 31, 94, 126), "")], id="restart-app"),
        pytest.param([(0, xid(43, 63, 92, 121, 154), "")], id="ignore"),
        pytest.param([(0, xid(4711), "XID 4711: no new work"), (60, NOTHING, "")], id="unknown-xid"),
        pytest.param([(0, xid(90), XID_90), (59, NOTHING, XID_90), (60, NOTHING, "")], id="recoverable"),
        pytest.param(TWICE, id="a-second-xid-restarts-the-minute"),
        pytest.param(FATAL_UNTIL_RESET, id="fatal-until-a-minute-after-a-reset"),
        pytest.param([(0, xid(95, 154), "XID 95"), (61, NOTHING, "XID 95")], id="recovery-action-of-a-fatal"),
        pytest.param(
            [(0, Signals(remap_failed=True), "replace the GPU"), (1e6, NOTHING, "replace")], id="no-spare-row"
        ),
        pytest.param([(0, Signals(ecc_uncorrectable=7), "")], id="ecc-errors-before-the-agent"),
        pytest.param(HEAT, id="heat"),
        pytest.param(STUCK, id="full-utilization-at-idle-power"),
        pytest.param(ANSWERS_AGAIN, id="lost-gpu-that-answers-again-counts-as-reset"),
    ],
)
def test_health_follows_from_what_happened(history: list[tuple[float, Signals, str]]) -> None:
    health = WELL
    for at, signals, problem in history:
        health = next_health(health, signals, at)
        assert problem in health.problem, at
        assert bool(problem) == bool(health.problem), at


PROGRAM, RECOVERS, SERIOUS = XidClass.APPLICATION, XidClass.RECOVERABLE, XidClass.FATAL
ACTIONS = {
    "IGNORE": (PROGRAM, (14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 161)),
    "RESTART_APP": (PROGRAM, (
        8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89, 94,
        *range(96, 106), *range(126, 136), 139,
    )),
    "WORKFLOW_XID_45": (PROGRAM, (45,)),
    "Follow guidance as it applies to another Xid": (PROGRAM, (154,)),
    "RESET_GPU": (SERIOUS, (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 162)),
    "RESTART_BM": (SERIOUS, (79, 160)),
    "RESTART_VM": (SERIOUS, (151,)),
    "CHECK_MECHANICALS": (SERIOUS, (54,)),
    "WORKFLOW_XID_48": (SERIOUS, (48,)),
    "WORKFLOW_NVLINK_ERR": (SERIOUS, (74,)),
    "WORKFLOW_NVLINK5_ERR": (SERIOUS, (144, 145, 146, 147, 148, 149, 150)),
    "UPDATE_SWFW": (RECOVERS, (78,)),
    "CHECK_UVM": (RECOVERS, (159,)),
}  # fmt: skip
"""Immediate actions of NVIDIA's catalog, as in NVSentinel 6f8b0fc: UNEXPECTED_ERR_REPORT_ISSUE for others up to 162."""


def test_each_xid_counts_by_its_immediate_action_in_nvidias_catalog() -> None:
    expected = {code: kind for kind, codes in ACTIONS.values() for code in codes}
    expected[61] = SERIOUS  # on Volta and older
    assert {code: xid_class(code) for code in range(1, 163)} == dict.fromkeys(range(1, 163), RECOVERS) | expected


def test_each_relapse_within_an_hour_doubles_the_minute() -> None:
    health, now, lasted = WELL, 0.0, []
    for _ in range(4):
        health = next_health(health, Signals(xids=[Xid(90)]), now)
        began = now
        while health.problem:
            now += 1
            health = next_health(health, Signals(), now)
        lasted.append(now - began)
    assert lasted == [60, 120, 240, 480]
    health = next_health(health, Signals(xids=[Xid(90)]), now + 7200)
    assert health.until == now + 7200 + 60


@given(st.lists(st.tuples(st.sampled_from([13, 31, 90, 42, 4711]), st.floats(0, 100)), max_size=30))
def test_recoverable_problems_always_end(history: list[tuple[int, float]]) -> None:
    health, now = WELL, 0.0
    for xid, later in history:
        now += later
        health = next_health(health, Signals(xids=[Xid(xid)]), now)
        assert not health.problem or health.until is not None
    assert not next_health(health, Signals(), now + 3601).problem


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


async def test_hung_gpu_is_unhealthy_alone(tmp_path, release, reserve) -> None:
    """Regression: every GPU of the node became unhealthy, and a scrape blocked the event loop."""
    devices, kube = Hanging(tmp_path, release), FakeKube()
    # Real seconds: on a busy machine a GPU that is well takes some of them, too.
    agent = agent_on(devices, tmp_path, kube, Intervals(step_deadline_s=0.4))
    registry = registry_of(agent)
    hung, well = devices.uuids
    async with running(agent):
        await until(lambda: len(status_of(kube).devices) == 2)
        devices.hang = True
        await until(lambda: status_of(kube).devices[0].health is DeviceHealth.UNHEALTHY)
        await until(lambda: not agent.reconciler.meters[hung].is_current)
        assert [d.health.value for d in status_of(kube).devices] == ["Unhealthy", "Healthy"]
        assert hung in status_of(kube).devices[0].health_message
        await reserve_on(kube, reserve("a", well, mode=SharingMode.EXCLUSIVE))
        await until(lambda: [p.state.value for p in status_of(kube).partitions] == ["Ready"])
        used = next(m for m in registry.collect() if m.name == "DCGM_FI_DEV_FB_USED")
        assert [s.labels["UUID"] for s in used.samples] == [well]
        assert (
            registry.get_sample_value(
                "carpool_agent_gpu_healthy", {"UUID": hung, "gpu": "0", "Hostname": agent.settings.node_name}
            )
            == 0
        )
        devices.hang = False
        release.set()
        await until(lambda: all(d.health is DeviceHealth.HEALTHY for d in status_of(kube).devices))


def test_scrape_calls_no_gpu(tmp_path, release) -> None:
    devices = Hanging(tmp_path, release)
    registry = registry_of(agent_on(devices, tmp_path, FakeKube()))
    devices.hang = True
    assert [m for m in registry.collect() if m.name == "carpool_agent_gpu_healthy"]


async def test_calls_that_never_come_back_take_no_thread_from_others(release) -> None:
    """Regression: in a bounded pool, a few hung GPUs left no thread for the others."""
    stuck = [TimeLimitedCaller(f"GPU {i}", 0.01) for i in range(100)]
    answers = await asyncio.gather(*(p.call(release.wait, 60) for p in stuck), return_exceptions=True)
    assert all(isinstance(a, DeviceError) for a in answers)
    assert await TimeLimitedCaller("GPU well", 5).call(lambda: 1) == 1
    with pytest.raises(DeviceError, match="GPU 0: an earlier call has not come back yet"):
        await stuck[0].call(lambda: 1)


async def test_late_exceptions_without_a_caller_are_ignored() -> None:
    """Regression: an agent that ended during a call left an unretrieved exception."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    def fail() -> None:
        raise DeviceError("sick")

    later: list[Callable[[], None]] = []
    calling = asyncio.ensure_future(TimeLimitedCaller("GPU 0", 60, later.append).call(fail))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    later.pop()()
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def test_a_gpunode_deleted_during_a_reading_does_not_stop_the_agent(tmp_path, release) -> None:
    """Regression: the missing status was compared, which ended the agent."""
    devices = Hanging(tmp_path, release)
    reporter = agent_on(devices, tmp_path, FakeKube()).reconciler.reporter
    reporter.appeared(GpuNodeStatus())
    devices.hang = True
    looking = asyncio.ensure_future(reporter.once())
    await asyncio.sleep(0)
    reporter.vanished()
    release.set()
    assert await looking == 0
    assert reporter.writes == 0
