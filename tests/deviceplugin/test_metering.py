"""Measurements: from counters to the status and the metrics."""

import asyncio
import dataclasses
import math
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pynvml
import pytest
from agent_world import agent_on, first_gpu, registry_of, reservation, reserve_on
from carpool_core.clock import parse_rfc3339, rfc3339
from carpool_core.durations import measured_step_time
from carpool_core.resources.node import Reservation, Tenant
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode
from carpool_deviceplugin.app import Agent
from carpool_deviceplugin.gpu import DeviceError, ProcessUsage, Reading, SetMode, StepCounts, StepReport
from carpool_deviceplugin.metering import JOB_ENERGY_S, JobEnergy, Meter, SavedTime, StepMeans, damp_changes
from carpool_deviceplugin.metrics import DEVICE_GAUGES, ENERGY
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, running, uid, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

NOW = "2026-01-01T00:00:00Z"
GPU, A, B = GpuUuid("GPU-1"), PodUid("uid-a"), PodUid("uid-b")


def process(pod: PodUid = A, name: str = "p1", **more) -> ProcessUsage:
    """A process that did nothing in the last second, unless said otherwise."""
    idle = {"elapsed_s": 1.0, "busy_s": 0.0, "sm_s": 0.0, "dram_s": 0.0, "energy_j": 0.0}
    return ProcessUsage(**{"id": name, "pod_uid": pod, "memory_mib": 100, "peak_memory_mib": 100, **idle, **more})


def reading(*processes: ProcessUsage) -> Reading:
    return Reading(0.0, processes, power_w=100.0, idle_power_w=50.0, power_limit_w=400.0, energy_j=0.0)


def metered(*readings: Reading) -> Meter:
    meter = Meter(GPU)
    for one in readings:
        meter.sample(one)
    return meter


NEW = process(elapsed_s=0.0)
USED = process(busy_s=0.8, sm_s=0.4, dram_s=0.2, energy_j=100, steps=2, steps_s=1, peak_memory_mib=700)
LARGE = process(name="p2", memory_mib=300, peak_memory_mib=300)


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        pytest.param([reading(NEW)], {"gpu_util_percent": None}, id="one-reading-gives-no-rate"),
        pytest.param(
            [reading(NEW), reading(USED)],
            {
                "gpu_util_percent": 80,
                "sm_active_ratio": 0.4,
                "power_w": 150,
                "step_time_seconds": 0.5,
                "memory_mib": 100,
                "peak_memory_mib": 700,
            },
            id="rates-over-a-window",
        ),
        pytest.param([reading(), reading(process(elapsed_s=0.5, busy_s=0.4))], {"gpu_util_percent": 80},
                     id="a-process-counts-since-its-start"),
        pytest.param([reading(NEW, LARGE), reading(process())], {"memory_mib": 100, "peak_memory_mib": 400},
                     id="processes-add-up-and-the-peak-stays"),
        pytest.param([reading(NEW), reading(process(busy_s=0.8)), reading()],
                     {"memory_mib": 0, "gpu_util_percent": 80}, id="measurements-of-an-ended-process-stay"),
    ],
)  # fmt: skip
def test_readings_become_measurements_of_a_pod(readings: list[Reading], expected: dict[str, float | None]) -> None:
    (tenant,) = metered(*readings).tenants(NOW)
    assert {name: getattr(tenant, name) for name in expected} == pytest.approx(expected)


def test_only_pods_with_a_reservation_or_a_process_are_kept() -> None:
    """Regression: an ended pod stayed in the status until the next reading, and kept the next job off the GPU."""

    def pods() -> list[PodUid]:
        return [tenant.pod_uid for tenant in meter.tenants(NOW)]

    both = (process(A), process(B, "p2"))
    meter = metered(reading(*both))
    meter.keep(set())
    assert pods() == [A, B]
    meter.discard({A})
    assert pods() == [B]
    meter.sample(reading(*both))
    assert pods() == [A, B]
    meter.sample(reading(process(A)))
    meter.keep({A})
    assert pods() == [A]
    meter.sample(reading())
    assert meter.total(is_concurrent=True).busy == 0, "an ended process counts no more"


def after(*phases: tuple[int, list[ProcessUsage]]) -> Meter:
    """A meter after phases of so many seconds with these processes."""
    return metered(*(reading(*processes) for seconds, processes in phases for _ in range(seconds)))


def test_work_shows_in_full_soon_after_it_begins() -> None:
    """Regression: the window before the work halved the utilization of a short job."""
    for seconds in range(1, 4):
        meter = after((2, [process()]), (1, [process(busy_s=0.1)]), (seconds, [process(busy_s=0.8)]))
        assert meter.tenants(NOW)[0].gpu_util_percent == pytest.approx(80)


def test_others_are_admitted_by_a_mean_over_a_minute_and_a_half() -> None:
    """An evaluation or a checkpoint of some seconds does not make room on a GPU."""
    meter = after((120, [process(busy_s=0.8, sm_s=0.5)]), (15, [process()]))
    (tenant,) = meter.tenants(NOW)
    assert tenant.gpu_util_percent == pytest.approx(80 * math.exp(-15 / 90), rel=0.02)
    assert tenant.sm_active_ratio == pytest.approx(0.5 * math.exp(-15 / 90), rel=0.02)
    rates = meter.usage[A].rates
    assert rates is not None
    assert rates.busy == pytest.approx(0.8 * math.exp(-15 / 5), rel=0.02), "metrics follow at once"


@pytest.mark.parametrize(("seconds", "is_settled"), [(89, False), (90, True)])
def test_activity_settles_after_the_averaging_time_and_that_is_written(seconds, is_settled) -> None:
    (tenant,) = after((seconds, [process(busy_s=0.8)])).tenants(NOW)
    assert tenant.settled is is_settled
    written = replace(tenant, settled=not is_settled)
    assert damp_changes([written], [tenant]) == [tenant]


def test_activity_beside_former_neighbours_counts_little() -> None:
    beside = [process(busy_s=0.4), process(B, "p2", busy_s=0.4)]
    a, _ = after((150, beside), (50, [process(busy_s=0.8)])).tenants(NOW)
    assert a.gpu_util_percent == pytest.approx(80, rel=0.06), "and not 56, as 50 s into the exponential average"


def test_a_pause_when_a_neighbour_leaves_is_not_taken_for_idleness() -> None:
    a, _ = after((150, [process(busy_s=0.8), process(B, "p2")]), (3, [process()])).tenants(NOW)
    assert a.gpu_util_percent is not None
    assert a.gpu_util_percent > 40


def test_a_restarted_process_is_not_its_own_neighbour() -> None:
    """Regression: an evaluation in another process looked like room on the GPU."""
    (tenant,) = after((120, [process(busy_s=0.8)]), (1, []), (10, [process(name="p2")])).tenants(NOW)
    assert tenant.gpu_util_percent == pytest.approx(80 * math.exp(-10 / 90), rel=0.02)


@pytest.mark.parametrize("step_s", [1, 5])
def test_a_paused_pod_is_reported_idle_before_its_mean_drops(step_s: int) -> None:
    """Regression: a peak from loading counted as stable during a pause, and others were admitted by it."""
    works, pauses = process(elapsed_s=step_s, busy_s=0.8 * step_s), process(elapsed_s=step_s)
    assert [one.working for one in after((60 // step_s, [works])).tenants(NOW)] == [True]
    (tenant,) = after((60 // step_s, [works]), (30 // step_s, [pauses])).tenants(NOW)
    assert tenant.working is False
    assert tenant.gpu_util_percent is not None
    assert tenant.gpu_util_percent > 40
    assert damp_changes([replace(tenant, working=True)], [tenant]) == [tenant]


def test_total_is_not_additive() -> None:
    meter = after((1, [process(busy_s=0.6, sm_s=0.3), process(B, "p2", busy_s=0.5, sm_s=0.3)]))
    assert meter.total(is_concurrent=True).busy == pytest.approx(0.8)
    assert meter.total(is_concurrent=False).busy == 1.0
    assert meter.total(is_concurrent=True).sm == pytest.approx(0.6)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 10)), max_size=20))
def test_rates_stay_ratios(samples) -> None:
    meter = Meter(GPU)
    for elapsed_s, worked_s in samples:
        meter.sample(reading(process(elapsed_s=elapsed_s, busy_s=worked_s, sm_s=worked_s)))
        for tenant in meter.tenants(NOW):
            assert tenant.gpu_util_percent is None or 0 <= tenant.gpu_util_percent <= 100


WRITTEN = Tenant(
    pod_uid=A, gpu_uuid=GPU, memory_mib=10_000, peak_memory_mib=10_000, gpu_util_percent=50.0, step_time_seconds=0.1
)


@pytest.mark.parametrize(
    ("change", "is_written"),
    [
        ({"memory_mib": 10_900}, False),
        ({"memory_mib": 11_100}, True),
        ({"peak_memory_mib": 10_090}, False),
        ({"peak_memory_mib": 10_110}, True),
        ({"gpu_util_percent": 54.9}, False),
        ({"gpu_util_percent": 55.1}, True),
        ({"gpu_util_percent": None}, True),
        ({"step_time_seconds": 0.109}, False),
        ({"step_time_seconds": 0.111}, True),
        ({"power_w": 5.0}, True),
    ],
)
def test_only_what_moved_by_a_tenth_is_written(change, is_written) -> None:

    measured = replace(WRITTEN, **change)
    assert (damp_changes([WRITTEN], [measured]) == [measured]) is is_written
    other = Tenant(pod_uid=B, gpu_uuid=GPU)
    assert damp_changes([WRITTEN], [other]) == [other], "new tenants are written, and ended ones dropped"


@pytest.mark.parametrize("gap_s", [1, 5, 10, 60])
def test_busy_time_covers_the_time_between_two_readings(tmp_path: Path, gap_s: int) -> None:
    """Regression: the driver's one sample for each process counted for at most a second of the five between readings.

    On an H100 two pods that shared it in halves had 0.5 s each of the 5 s. A minute is longer than the buffer.
    """
    node = Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path)
    devices = node.devices()
    for number in range(8):
        node.start(0, 42 + number, f"p{number}", sm=0.02 * number)
    devices.read(devices.uuids[0])
    for _ in range(3):
        node.advance(gap_s)
        found = devices.read(devices.uuids[0]).processes
        assert [p.busy_s / gap_s for p in found] == pytest.approx([0.02 * number for number in range(8)])
    for process in node.nvml.gpus[0].processes.values():
        process.sm = 0.0
    node.advance(5)
    devices.read(devices.uuids[0])
    node.nvml.gpus[0].processes[42].sm = 0.5
    node.advance(5)
    assert devices.read(devices.uuids[0]).processes[0].busy_s == pytest.approx(2.5), "the pause before counts no more"


def test_busy_time_after_a_reading_that_failed_counts_once(node: Node) -> None:
    devices = node.devices()
    node.start(0, 42, "a", sm=0.5)
    devices.read(devices.uuids[0])
    node.advance(5)
    node.nvml.fail_next("nvmlGpmSampleGet", pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(DeviceError):
        devices.read(devices.uuids[0])
    node.nvml.gpus[0].processes[42].sm = 0.0
    node.advance(5)
    assert devices.read(devices.uuids[0]).processes[0].busy_s == pytest.approx(2.5)


def test_samples_stay_valid_when_the_clock_is_set_back(node: Node) -> None:
    devices = node.devices()
    node.start(0, 42, "a", sm=0.5)
    devices.read(devices.uuids[0])
    node.nvml.gpus[0].samples.clear()
    node.nvml.now_us -= 3_600_000_000
    for _ in range(2):
        node.advance(5)
        assert devices.read(devices.uuids[0]).processes[0].busy_s == pytest.approx(2.5)


def test_a_survey_reads_telemetry_and_processes_once(node: Node) -> None:
    devices, gpu = first_gpu(node)
    node.start(0, 42, "a")
    devices.read(gpu)
    node.nvml.calls.clear()
    device, reading = devices.survey(gpu)
    assert (device.health, [p.pod_uid for p in reading.processes]) == (DeviceHealth.HEALTHY, [uid("a")])
    for name in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetComputeRunningProcesses"):
        assert node.nvml.calls.count(name) == 1
    node.nvml.gpus[0].is_lost = True
    device, reading = devices.survey(gpu)
    assert "fallen off the bus" in device.health_message
    assert str(reading) == device.health_message


class WithoutNumbers(FakeNvml):
    """The driver reports success for a metric that it could not compute."""

    def nvmlGpmMetricsGet(self, request: Any) -> Any:  # noqa: N802  # NVIDIA's name
        answer = super().nvmlGpmMetricsGet(request)
        answer.metrics[1].value = math.nan
        return answer


def test_a_value_that_is_not_a_number_is_absent(tmp_path: Path) -> None:
    """Regression: an SM activity without a value was exported as zero."""
    node = Node(WithoutNumbers(["H100"]), FakeMpsCommands(), tmp_path)
    devices = node.devices()
    node.start(0, 42, "a", sm=0.6, dram=0.3)
    for _ in range(3):
        reading = devices.read(devices.uuids[0])
        node.advance(1)
    assert "DCGM_FI_PROF_SM_ACTIVE" not in reading.counters.values
    assert reading.counters.values["DCGM_FI_PROF_DRAM_ACTIVE"] == pytest.approx(0.3)
    (use,) = reading.processes
    assert (use.sm_s, use.dram_s is not None) == (None, True)


def divide(node: Node) -> list[int]:
    """Create MIG instances of three slices and of one slice; return their IDs."""
    mig = node.nvml.gpus[0].mig
    mig.is_enabled = mig.is_pending = True
    three, one = (mig.table.profiles[at] for at in (2, 5))
    return [mig.create(p.id, start, p.memory_slices).id for p, start in ((three, 4), (one, 0))]


START_A, START_B = (0.0, "start", 42, "a", 0.6), (0.0, "start", 43, "b", 0.3)


@pytest.mark.parametrize("kind", ["whole", "mig"])
@pytest.mark.parametrize(
    "events",
    [
        pytest.param([START_A, START_B, (12.0, "start", 44, "c", 0.1)], id="starts-at-different-times"),
        pytest.param([START_A, (14.9, "end", 42)], id="the-only-process-ends"),
        pytest.param([START_A, START_B, (14.9, "end", 42)], id="one-of-two-ends"),
        pytest.param([START_A, START_B, (9.9, "end", 42), (14.9, "end", 43)], id="both-end"),
    ],
)
def test_energy_of_pods_and_idle_add_up_to_the_counter(tmp_path: Path, kind: str, events: list[tuple]) -> None:
    """Also in the readings after a start and after an end. Regression: the last interval was not assigned."""
    node = Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path)
    instances = divide(node) if kind == "mig" else [None, None]
    devices = node.devices()
    meter = Meter(devices.uuids[0])
    devices.actual(meter.uuid)
    for _ in range(2):
        meter.sample(devices.read(meter.uuid))
        node.advance(5)
    meter.sample(devices.read(meter.uuid))
    began, now = node.nvml.gpus[0].energy_mj, 0.0
    moments = sorted(
        [(at, what) for at, *what in events] + [(5.0 * i, ["read"]) for i in range(1, 6)], key=lambda m: m[0]
    )
    for at, (action, *more) in moments:
        node.advance(at - now)
        now = at
        if action == "read":
            meter.sample(devices.read(meter.uuid))
        elif action == "start":
            pid, pod, sm = more
            node.start(0, pid, pod, sm=sm, instance=instances[pid % 2])
        else:
            node.end(0, more[0])
    spent = (node.nvml.gpus[0].energy_mj - began) / 1000
    pods = {pod: use.energy_j for pod, use in meter.usage.items()}
    assert math.isclose(sum(pods.values()) + 25 * meter.reading.idle_power_w, spent, rel_tol=0.01)
    assert pods[uid("a")] > pods.get(uid("b"), 0)


def test_energy_of_mig_instances_without_known_activity_is_unknown(tmp_path: Path) -> None:
    node = Node(FakeNvml(["A100-40"]), FakeMpsCommands(), tmp_path)
    instance, _ = divide(node)
    devices = node.devices()
    devices.actual(devices.uuids[0])
    node.start(0, 42, "a", sm=0.6, instance=instance)
    for _ in range(3):
        node.advance(5)
        reading = devices.read(devices.uuids[0])
    assert [p.energy_j for p in reading.processes] == [None]
    node.end(0, 42)
    node.advance(5)
    assert devices.read(devices.uuids[0]).energy_of_ended_j == {}


def test_energy_of_a_job_outlives_its_pods_by_an_hour() -> None:
    energy, first, second = JobEnergy(), reservation("a"), reservation("b", job_name="job-a")
    energy.add([first], {first.pod_uid: 100.0}, 0.0)
    energy.add([second], {second.pod_uid: 20.0, uid("stranger"): 5.0}, 9.0)
    energy.add([], {}, JOB_ENERGY_S)
    assert energy.joules == {("default", "job-a"): 120.0}
    energy.add([], {}, JOB_ENERGY_S + 10)
    assert energy.joules == {}


def test_tenants_save_gpus_as_far_as_they_are_not_slowed() -> None:
    saved, alone, beside = SavedTime(), reservation("a"), reservation("b")
    saved.add([alone, beside, reservation("c", "GPU-2")], 10.0)
    saved.add([alone], 14.0)
    saved.add([alone, beside], 20.0)
    saved.add([], 21.0)
    saved.add([], 30.0)
    assert saved.seconds == 5.0
    slowed = [reservation(pod, expected_slowdown=1.6) for pod in "ab"]
    saved.add(slowed, 30.0)
    saved.add([reservation(pod, expected_slowdown=2.5) for pod in "ab"], 38.0)
    saved.add([], 50.0)
    assert saved.seconds == 5.0 + 8 * 0.25


def test_restarted_counter_takes_no_energy_back(node: Node) -> None:
    devices = node.devices()
    meter = Meter(devices.uuids[0])
    node.start(0, 42, "a", sm=0.6)
    for _ in range(3):
        node.advance(1)
        meter.sample(devices.read(meter.uuid))
    (before,) = meter.usage.values()
    node.nvml.gpus[0].energy_mj = 0
    meter.sample(devices.read(meter.uuid))
    (after_restart,) = meter.usage.values()
    assert after_restart.energy_j == before.energy_j > 0


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


def test_health_right_after_a_measurement_contains_later_events(node: Node) -> None:
    devices, gpu = first_gpu(node)
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


def test_planning_sees_processes_that_started_since_the_measurement(node: Node) -> None:
    devices, gpu = first_gpu(node)
    devices.read(gpu)
    node.start(0, 42, "a")
    assert devices.actual(gpu).tenants == {uid("a")}
    devices.read(gpu)
    node.start(0, 43, None)
    with pytest.raises(DeviceError, match="expected no process on the GPU, found"):
        devices.apply(gpu, SetMode(SharingMode.EXCLUSIVE))
    assert devices.describe(gpu).health is DeviceHealth.UNHEALTHY


DCGM_LABELS = {
    "gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "Hostname", "pod", "namespace",
    "container",
}  # fmt: skip


@pytest.fixture
def agent(devices, tmp_path) -> Agent:
    return agent_on(devices, tmp_path, FakeKube())


async def hold(agent: Agent, *reservations: Reservation) -> None:
    """Make these the node's reservations, and wait until all are ready."""
    await reserve_on(agent.reconciler._api, *reservations)
    await until(lambda: [p.state.value for p in agent.reconciler.partitions] == ["Ready"] * len(reservations))


async def test_idle_gpus_under_dcgms_names(agent, devices) -> None:
    registry = registry_of(agent)
    async with running(agent):
        await until(lambda: agent.reconciler.reporter.devices)
        await until(lambda: all(meter.is_current for meter in agent.reconciler.meters.values()))
    found = {m.name: m for m in registry.collect()}
    names = {name for name in found if name.startswith("DCGM_")}
    assert {"DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_SM_ACTIVE", ENERGY} <= names
    assert names < {*DEVICE_GAUGES, ENERGY}, "what a simulated GPU cannot know is absent"
    for name in names:
        assert [set(s.labels) for s in found[name].samples] == [DCGM_LABELS] * 2
        assert {s.name for s in found[name].samples} == {name}
    (used, *_) = found["DCGM_FI_DEV_FB_USED"].samples
    assert (used.value, used.labels["gpu"], used.labels["Hostname"]) == (0, "0", "node-1")
    assert used.labels["modelName"] == "Simulated NVIDIA A100-SXM4-40GB"
    free, reserved = (found[f"DCGM_FI_DEV_FB_{what}"].samples[0].value for what in ("FREE", "RESERVED"))
    assert free + reserved == 40960
    assert generate_latest(registry)
    assert generate_openmetrics(registry)


OF_RESERVATIONS = (
    "memory_reserved_bytes", "predicted_utilization_ratio", "predicted_sm_active_ratio", "expected_slowdown_ratio",
)  # fmt: skip


async def test_tenants_have_series_of_their_own(agent, devices, reserve, enter) -> None:
    gpu = devices.uuids[0]
    wanted = [reserve(pod, gpu, mode=SharingMode.MPS, memory_limit_mib=9000) for pod in "ab"]
    registry = registry_of(agent)
    async with running(agent):
        await hold(agent, *wanted[:1])
        with enter(gpu, "a") as (opened,):
            opened.allocate(1000)
            labels = {"UUID": gpu, "namespace": "default", "pod": "a", "training_job": "job-a"}
            value = registry.get_sample_value
            working = asyncio.ensure_future(asyncio.to_thread(opened.run, 0.4, 0.5))
            active = await until(lambda: value("carpool_gpu_tenant_sm_active_ratio", labels))
            assert 0 < active <= 1
            await working
            assert value("carpool_gpu_tenant_memory_bytes", labels) >= 1000 * 1024 * 1024
            assert value("carpool_gpu_tenant_memory_limit_bytes", labels) == 9000 * 1024 * 1024
            joules = value("carpool_gpu_tenant_energy_joules_total", labels)
            of_job = {"namespace": "default", "training_job": "job-a"}
            assert value("carpool_job_energy_joules_total", of_job) >= joules > 0
            assert value("carpool_job_carbon_grams_total", of_job) is None, "no figure for the electricity is set"
            agent.settings = dataclasses.replace(agent.settings, carbon_grams_per_kwh=360.0)
            assert value("carpool_job_carbon_grams_total", of_job) >= joules / 10_000
            reserved = [value(f"carpool_gpu_tenant_{name}", labels) for name in OF_RESERVATIONS]
            assert reserved == [40960 * 1024 * 1024, 1, 1, 1], "a pod without a prediction counts as the whole GPU"
            assert value("carpool_agent_partitions", {"state": "Ready"}) == 1
            assert (
                value("carpool_agent_gpu_healthy", {"UUID": gpu, "gpu": "0", "Hostname": agent.settings.node_name}) == 1
            )
            assert value("carpool_agent_status_writes_total") > 0
            by_gpu = {
                s.labels["UUID"]: s for m in registry.collect() if m.name == "DCGM_FI_DEV_FB_USED" for s in m.samples
            }
            assert by_gpu[gpu].labels["pod"] == "a"
            assert by_gpu[gpu].value >= 1000
            await hold(agent, *wanted)
            await hold(agent, *wanted[1:])
            assert value("carpool_gpu_tenant_energy_joules_total", labels) is None
            assert value("carpool_job_energy_joules_total", of_job) >= joules, "it outlives the pod"
            await hold(agent, *wanted)
            (shared, *_) = next(m for m in registry.collect() if m.name == "DCGM_FI_DEV_FB_USED").samples
            assert shared.labels["pod"] == "", "a shared GPU belongs to no pod"


class Exporter:
    """dcgm-exporter, which exports some of the GPUs and instances."""

    name, is_scraped = "dcgm-exporter", True

    def __init__(self) -> None:
        self.shows: set[tuple[str, int | None]] = set()

    def values(self) -> dict:
        return {place: {"DCGM_FI_DEV_GPU_UTIL": 5.0, "DCGM_FI_PROF_SM_ACTIVE": 0.5} for place in self.shows}


def series(registry: CollectorRegistry, prefix: str = "DCGM_") -> set[tuple[str, str]]:
    return {(s.name, s.labels["UUID"]) for m in registry.collect() for s in m.samples if s.name.startswith(prefix)}


async def test_series_of_dcgm_exporter_are_not_exported_twice(tmp_path) -> None:
    exporter = Exporter()
    devices = Node(FakeNvml(["H100", "A100-40"]), FakeMpsCommands(), tmp_path, sources=(exporter,)).devices()
    shown, other = devices.uuids
    exporter.shows = {(shown, None)}
    agent = agent_on(devices, tmp_path, FakeKube())
    registry = registry_of(agent)
    value = registry.get_sample_value
    async with running(agent):
        await until(lambda: value("carpool_agent_gpu_metrics_source", {"UUID": shown, "source": "dcgm-exporter"}))
        assert value("carpool_agent_gpu_metrics_source", {"UUID": other, "source": "nvml"}) == 1
        assert ("DCGM_FI_DEV_GPU_UTIL", shown) not in series(registry)
        assert {("DCGM_FI_DEV_GPU_TEMP", shown), ("DCGM_FI_DEV_GPU_UTIL", other)} <= series(registry)
        exporter.shows = set()
        await until(lambda: ("DCGM_FI_DEV_GPU_UTIL", shown) in series(registry))


async def test_each_place_is_shown_once_where_dcgm_exporter_shows_instances_only(tmp_path) -> None:
    """Regression: both exported the instances."""
    exporter = Exporter()
    node = Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path, sources=(exporter,))
    mig = node.nvml.gpus[0].mig
    mig.is_enabled = mig.is_pending = True
    shown, other = (mig.create(mig.table.profiles[-2].id, at, 1).id for at in (0, 1))
    devices = node.devices()
    exporter.shows = {(devices.uuids[0], shown)}
    agent = agent_on(devices, tmp_path, FakeKube())
    registry = registry_of(agent)
    source = {"UUID": devices.uuids[0], "source": "dcgm-exporter"}

    def places() -> set[str]:
        return {
            s.labels["GPU_I_ID"] for m in registry.collect() for s in m.samples if s.name == "DCGM_FI_PROF_SM_ACTIVE"
        }

    async with running(agent):
        await until(lambda: registry.get_sample_value("carpool_agent_gpu_metrics_source", source))
        await until(lambda: node.advance(0.1) or places() == {"", str(other)})
        exporter.shows = {(devices.uuids[0], None)}
        await until(lambda: node.advance(0.1) or places() == {str(shown), str(other)})


async def test_mig_instances_have_series_and_gone_ones_have_none(tmp_path, kube, reserve) -> None:
    node = Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path)
    node.nvml.gpus[0].mig.is_enabled = node.nvml.gpus[0].mig.is_pending = True
    devices = node.devices()
    agent = agent_on(devices, tmp_path, kube)
    registry = registry_of(agent)
    wanted = [
        reserve(pod, devices.uuids[0], mode=SharingMode.MIG, mig_profile=profile, pod_uid=uid(pod))
        for pod, profile in (("a", "3g.40gb"), ("b", "1g.10gb"))
    ]

    def mig_instances() -> dict[tuple[str, str], float]:
        return {
            (s.labels["GPU_I_PROFILE"], s.labels["pod"]): s.value
            for m in registry.collect()
            if m.name == "DCGM_FI_PROF_SM_ACTIVE"
            for s in m.samples
        }

    async with running(agent):
        await hold(agent, *wanted)
        instances = {i.profile.name: i.id for i in node.nvml.gpus[0].mig.instances.values()}
        node.start(0, 42, "a", 5000, sm=0.5, instance=instances["3g.40gb"])
        await until(lambda: node.advance(0.1) or mig_instances().get(("3g.40gb", "a"), 0) > 0.4)
        await until(lambda: node.advance(0.1) or len(mig_instances()) == 3)  # another thread reads one after the other
        assert mig_instances().keys() == {("", ""), ("3g.40gb", "a"), ("1g.10gb", "b")}
        assert mig_instances()["1g.10gb", "b"] == 0
        names = {s.name for m in registry.collect() for s in m.samples if s.labels.get("GPU_I_PROFILE") == "3g.40gb"}
        assert {"DCGM_FI_DEV_FB_USED", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"} <= names
        energy = next(m for m in registry.collect() if m.name == ENERGY)
        assert [s.labels["GPU_I_ID"] for s in energy.samples] == [""], "the counter is the whole GPU's"
        assert "DCGM_FI_DEV_POWER_USAGE" not in names, "the power of an instance is unknown"
        labels = {"UUID": devices.uuids[0], "namespace": "default", "pod": "a", "training_job": "job-a"}
        await until(
            lambda: node.advance(0.1) or registry.get_sample_value("carpool_gpu_tenant_sm_active_ratio", labels)
        )
        node.end(0, 42)
        await hold(agent, *wanted[1:])
        await until(lambda: node.advance(0.1) or mig_instances().keys() == {("", ""), ("1g.10gb", "b")})
        await until(lambda: registry.get_sample_value("carpool_gpu_tenant_memory_bytes", labels) is None)


async def test_series_are_bounded_by_reservations(agent, devices, reserve, enter) -> None:
    """Processes without a reservation have no series."""
    registry = registry_of(agent)
    async with running(agent):
        await until(lambda: agent.reconciler.reporter.devices)
        gpu = devices.uuids[0]
        await hold(agent, reserve("a", gpu))
        for number in range(5):
            with enter(gpu, f"uninvited-{number}"):
                await until(lambda: len(agent.reconciler.meters[gpu].usage) > 0)
        with enter(gpu, "a"):
            await until(lambda: series(registry, "carpool_gpu_tenant_memory_bytes"))
            shown = [s for m in registry.collect() if m.name == "carpool_gpu_tenant_memory_bytes" for s in m.samples]
            assert [s.labels["pod"] for s in shown] == ["a"]
        await until(lambda: set(agent.reconciler.meters[gpu].usage) <= {"uid-a"})


def reported(seconds: float, steps: int, step_s: float, **waits: float) -> StepReport:
    """A report about so many seconds with these steps."""
    counts = StepCounts(elapsed_s=seconds, steps=steps, steps_s=steps * step_s, timed_steps=steps, **waits)
    return StepReport(steps=1000 + steps, since=counts)


def stepping(meter: Meter, seconds: int, step_s: float, *processes: ProcessUsage, **waits: float) -> Meter:
    """Add readings of these processes; the steps are A's."""
    for _ in range(seconds):
        meter.sample(reading(*processes), {A: reported(1.0, 10, step_s, **waits)})
    return meter


BUSY = process(busy_s=0.5)
BESIDE = process(B, "p2", busy_s=0.5)


def test_reports_of_the_probe_become_measurements_of_a_pod() -> None:
    (tenant,) = stepping(metered(reading(NEW)), 30, 0.1, BUSY, samples=640, data_s=0.2, checkpoint_s=0.1).tenants(NOW)
    assert (tenant.steps, tenant.steps_at) == (1010, NOW)
    assert tenant.step_time_seconds == pytest.approx(0.09), "without checkpoints"
    assert (tenant.samples_per_second, tenant.data_wait_ratio, tenant.checkpoint_ratio) == (640, 0.2, 0.1)
    assert tenant.copy_ratio == 0


def test_a_checkpoint_is_complete_once_steps_follow_its_last_file() -> None:
    meter = stepping(metered(reading(NEW)), 30, 0.1, BUSY)
    assert meter.tenants(NOW)[0].checkpointed_at is None
    for steps, checkpoint_s in ((10, 0.4), (0, 0.9), (1, 0.2), (0, 0.0)):  # two files, and an evaluation
        counts = StepCounts(elapsed_s=1.0, steps=steps, steps_s=0.1, timed_steps=steps, checkpoint_s=checkpoint_s)
        meter.sample(reading(BUSY), {A: StepReport(steps=1010, since=counts)})
        assert meter.tenants(NOW)[0].checkpointed_at is None
    for after_s in (0, 1):
        meter.sample(reading(BUSY), {A: StepReport(steps=1012 + after_s, since=counts)})
        assert meter.tenants(NOW)[0].checkpointed_at == rfc3339(parse_rfc3339(NOW) - timedelta(seconds=after_s))


def test_the_status_tells_when_a_process_last_came_or_was_gone() -> None:
    def since(*processes: ProcessUsage, at: float) -> float:
        meter.sample(dataclasses.replace(reading(*processes), at=at))
        (first, *others) = meter.tenants(NOW)
        assert all(one.tenants_since == first.tenants_since for one in others)
        assert first.tenants_since is not None
        return (parse_rfc3339(NOW) - parse_rfc3339(first.tenants_since)).total_seconds()

    meter = Meter(GpuUuid("GPU-0"))
    assert [since(BUSY, at=10.0), since(BUSY, at=30.0)] == [0.0, 20.0]
    assert [since(BUSY, BESIDE, at=40.0), since(BUSY, BESIDE, at=45.0), since(BUSY, at=60.0)] == [0.0, 5.0, 0.0]
    before, after = (meter.tenants(rfc3339(parse_rfc3339(NOW) + timedelta(seconds=s))) for s in (0, 5))
    assert damp_changes(before, after) == after


def test_a_new_checkpoint_is_written_at_most_each_minute() -> None:
    (before,) = stepping(metered(reading(NEW)), 30, 0.1, BUSY).tenants(NOW)
    first, soon, later = (
        replace(before, checkpointed_at=rfc3339(parse_rfc3339(NOW) + timedelta(seconds=s))) for s in (0, 30, 60)
    )
    assert damp_changes([before], [first]) == [first]
    assert damp_changes([first], [soon]) == [first]
    assert damp_changes([first], [later]) == [later]


def test_one_long_evaluation_hardly_changes_the_step_time() -> None:
    meter = stepping(metered(reading(NEW)), 300, 0.1, BUSY)
    meter.sample(reading(BUSY), {A: reported(1.0, 1, 10.0)})
    assert meter.tenants(NOW)[0].step_time_seconds == pytest.approx(0.1, rel=0.15)


def test_the_step_time_has_a_deviation_after_twenty_readings_which_is_written_once() -> None:
    meter = metered(reading(NEW))
    for number in range(19):
        meter.sample(reading(BUSY), {A: reported(1.0, 10, 0.12 if number % 2 else 0.08)})
    (before,) = meter.tenants(NOW)
    (known,) = stepping(meter, 1, 0.12, BUSY).tenants(NOW)
    assert before.step_time_deviation_seconds is None
    assert known.step_time_deviation_seconds == pytest.approx(0.02, rel=0.05)
    assert damp_changes([before], [known]) == [known]
    wider = replace(known, step_time_deviation_seconds=1.0)
    assert damp_changes([known], [wider]) == [known], "its noise costs no writes"
    (steady,) = stepping(metered(reading(NEW)), 30, 0.1, BUSY).tenants(NOW)
    assert steady.step_time_deviation_seconds == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("step_s", [5, 30, 120, 300])
def test_nine_of_ten_next_readings_are_in_the_interval_also_of_long_steps(step_s: int) -> None:
    draw, means, inside = random.Random(7), StepMeans(), []  # noqa: S311
    for number in range(1500):
        own_s = step_s * draw.gauss(1, 0.2)
        if number >= 40:
            found = measured_step_time(None, number, means.step_time_s, means.deviation_s)
            assert found is not None
            inside.append(found.lower <= own_s <= found.upper)
        for _ in range(step_s // 5 - 1):
            means = means.add(StepCounts(elapsed_s=5.0))
        means = means.add(StepCounts(elapsed_s=5.0, steps=1, steps_s=own_s, timed_steps=1))
    assert sum(inside) / len(inside) == pytest.approx(0.9, abs=0.03)


def test_the_step_time_alone_is_measured_without_working_neighbours() -> None:
    meter = stepping(metered(reading(NEW)), 30, 0.1, BUSY)
    beside = stepping(meter, 60, 0.15, BUSY, BESIDE).tenants(NOW)[0]
    assert (beside.step_time_seconds, beside.solo_step_time_seconds) == (pytest.approx(0.15, rel=0.02), 0.1)
    paused = stepping(meter, 300, 0.12, BUSY, process(B, "p2")).tenants(NOW)[0]
    assert paused.solo_step_time_seconds == pytest.approx(0.12, rel=0.02), "the neighbour's pause counts as alone"


def test_the_step_time_alone_is_unknown_before_twenty_steps_and_beside_others() -> None:
    assert stepping(metered(reading(NEW)), 1, 0.1, BUSY).tenants(NOW)[0].solo_step_time_seconds is None
    meter = stepping(metered(reading(NEW, BESIDE)), 30, 0.1, BUSY, BESIDE)
    assert meter.tenants(NOW)[0].solo_step_time_seconds is None


@pytest.mark.parametrize(
    "processes",
    [pytest.param([process()], id="its-kernels-never-ran"), pytest.param([], id="no-process-on-the-gpu")],
)
def test_steps_without_work_on_the_gpu_are_not_believed(processes: list[ProcessUsage]) -> None:
    tenants = stepping(metered(reading(NEW)), 3, 0.1, *processes).tenants(NOW)
    assert [tenant.step_time_seconds for tenant in tenants] == [None]


def test_a_report_describes_its_own_pod_only() -> None:
    meter = stepping(metered(reading(NEW, BESIDE)), 30, 0.1, BUSY, BESIDE)
    assert [(t.pod_uid, t.steps) for t in meter.tenants(NOW)] == [(A, 1010), (B, None)]


@pytest.mark.parametrize(
    ("steps", "minute", "is_written"),
    [
        pytest.param(150, 1, False, id="readers-extrapolate"),
        pytest.param(200, 1, True, id="doubled"),
        pytest.param(101, 5, True, id="minutes-ago"),
        pytest.param(100, 9, False, id="no-progress"),
        pytest.param(3, 1, True, id="begun-again"),
    ],
)
def test_progress_is_written_rarely(steps: int, minute: int, is_written: bool) -> None:
    old = Tenant(pod_uid=A, gpu_uuid=GPU, steps=100, steps_at=NOW)
    new = Tenant(pod_uid=A, gpu_uuid=GPU, steps=steps, steps_at=f"2026-01-01T00:0{minute}:00Z")
    assert damp_changes([old], [new]) == [new if is_written else old]
