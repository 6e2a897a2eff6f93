"""Anomalies of trainings: each appears with its number and cause, and ends; healthy trainings show none."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from carpool_core.resources.node import Anomaly, Tenant
from carpool_core.values import GpuUuid, PodUid
from carpool_deviceplugin.anomalies import AnomalyWatch, Sample
from carpool_deviceplugin.gpu import Counters, ProcessUsage, Reading, StepCounts, StepReport
from carpool_deviceplugin.metering import Meter, damp_changes
from carpool_deviceplugin.probe import ProbeFiles
from carpool_deviceplugin.status import presentable
from carpool_probe.recorder import Recorder

NOW = "2026-01-01T00:00:00Z"
GPU, A, B = GpuUuid("GPU-1"), PodUid("uid-a"), PodUid("uid-b")


class Training:
    """A training of which one reading is taken a second; its steps vary by some percent."""

    def __init__(self, step_s: float = 0.1, watch: AnomalyWatch | None = None) -> None:
        self.watch = AnomalyWatch() if watch is None else watch
        self.at, self.steps, self.step_s, self.debt_s = 1000.0, 0, step_s, 0.0
        self.noise = random.Random(1)  # noqa: S311
        self.changes = 0

    def run(self, seconds: float, *, longer: float = 1.0, data: float = 0.0, **more: object) -> list[str]:
        """Train for so many seconds with longer steps; `data` is the share of time that waits for data."""
        for _ in range(int(seconds)):
            self.at += 1.0
            self.debt_s += 1.0
            step_s = self.step_s * longer * self.noise.uniform(0.97, 1.03)
            done = int(self.debt_s / step_s)
            self.debt_s -= done * step_s
            self.steps += done
            counts = StepCounts(1.0, steps=done, steps_s=done * step_s, timed_steps=done, data_s=data, batches=done)
            self.add(counts, **more)
        return self.types

    def pause(self, seconds: float, *, batches: int = 0, **more: object) -> list[str]:
        """Make no step for so many seconds."""
        for _ in range(int(seconds)):
            self.at += 1.0
            self.add(StepCounts(1.0, batches=batches), **more)
        return self.types

    def add(self, counts: StepCounts, **more: object) -> None:
        before = self.watch.anomalies
        self.watch.add(Sample(self.at, self.steps, counts, **{"busy": 0.9, **more}))  # type: ignore[arg-type]
        self.changes += self.watch.anomalies != before

    @property
    def types(self) -> list[str]:
        return [one.type for one in self.watch.anomalies]

    @property
    def found(self) -> Anomaly:
        (anomaly,) = self.watch.anomalies
        return anomaly


@pytest.fixture
def training() -> Training:
    """A training with a baseline of more than ten minutes."""
    training = Training()
    assert training.run(900) == []
    return training


# Step time


@pytest.mark.parametrize(("longer", "minutes"), [(1.5, 4), (1.8, 2)])
def test_longer_steps_for_minutes_are_a_drift(training: Training, longer: float, minutes: int) -> None:
    """Regression: half-longer steps for two or three minutes were often a neighbour on the CPU."""
    assert training.run(60 * minutes - 20, longer=longer) == []
    assert training.run(40, longer=longer) == ["StepTimeDrift"]
    assert training.found.reason == "Unknown"
    assert training.found.message.startswith(f"a step takes {100 * longer:.0f} ms, ")
    assert f"above its usual 100 ms for {6 * minutes}" in training.found.message


def test_a_drift_ends_after_two_minutes_at_the_usual_step_time(training: Training) -> None:
    training.run(300, longer=1.5)
    assert training.run(60) == ["StepTimeDrift"]
    assert training.run(90) == []
    assert training.changes == 2


def test_a_drift_that_becomes_smaller_does_not_flap(training: Training) -> None:
    """Between two and three deviations nothing changes."""
    training.run(300, longer=1.5)
    for _ in range(10):
        assert training.run(60, longer=1.12) == ["StepTimeDrift"]
        assert training.run(60, longer=1.085) == ["StepTimeDrift"]
    assert training.changes == 1


def test_steps_that_stay_long_for_an_hour_become_usual(training: Training) -> None:
    assert training.run(3000, longer=1.5) == ["StepTimeDrift"]
    assert training.run(1000, longer=1.5) == []
    assert training.run(600, longer=1.5) == []
    assert training.run(300, longer=2.25) == ["StepTimeDrift"]


@pytest.mark.parametrize(
    ("more", "reason", "text"),
    [
        pytest.param({"data": 0.4}, "DataWait", "ms longer for input data in each step", id="data"),
        pytest.param({"clock_mhz": 900.0, "temperature_c": 86.0}, "LowerClock",
                     "the clock of the GPU fell from 1410 to 900 MHz at 86 °C", id="clock"),
        pytest.param({"others_busy": 0.5}, None, "", id="a-new-cotenant-explains-it"),
        pytest.param({"others_busy": 0.05}, "Unknown", "", id="an-idle-cotenant-does-not"),
    ],
)  # fmt: skip
def test_the_cause_of_a_drift_is_measured(more: dict[str, float], reason: str | None, text: str) -> None:
    training = Training()
    training.run(900, clock_mhz=1410.0)
    training.run(300, longer=1.6, **{"clock_mhz": 1410.0, **more})
    assert [one.reason for one in training.watch.anomalies] == ([] if reason is None else [reason])
    assert text in "".join(one.message for one in training.watch.anomalies)


@pytest.mark.parametrize(
    "healthy",
    [
        pytest.param(lambda t: [(t.run(280), t.pause(200, batches=5)) for _ in range(10)], id="evaluations"),
        pytest.param(lambda t: [(t.run(60), t.run(60, longer=1.3)) for _ in range(40)], id="alternating-samples"),
        pytest.param(lambda t: [(t.run(280), t.pause(300, waits_for="checkpoint")) for _ in range(10)],
                     id="checkpoints"),
        pytest.param(lambda t: [t.run(60, longer=1 + n / 200) for n in range(20)], id="a-little-slower"),
        pytest.param(lambda t: [t.run(600, longer=0.5)], id="faster"),
    ],
)  # fmt: skip
def test_healthy_trainings_show_none(training: Training, healthy: Callable[[Training], object]) -> None:
    healthy(training)
    assert training.changes == 0


def test_nothing_is_judged_before_the_baseline() -> None:
    training = Training()
    training.run(400)
    assert training.run(200, longer=3.0) == []


# Stalls


@pytest.mark.parametrize(
    ("more", "reason", "cause"),
    [
        ({"waits_for": "data"}, "DataWait", "it waits for its data loader"),
        ({"busy": 0.0}, "IdleGpu", "its GPU is idle"),
        ({"busy": 1.0}, "BusyGpu", "its kernels run 100% of the time"),
        ({"busy": None}, "Unknown", "it waits for no data"),
    ],
)
def test_a_minute_without_steps_is_a_stall(training: Training, more: dict, reason: str, cause: str) -> None:
    assert training.pause(55, **more) == []
    assert training.pause(10, **more) == ["Stalled"]
    assert training.found.reason == reason
    assert training.found.message.startswith("no step for 60 s, where a step takes 100 ms: " + cause)
    assert training.run(50) == ["Stalled"], "one step is no recovery"
    assert training.run(20) == []


def test_a_checkpoint_may_take_ten_minutes(training: Training) -> None:
    assert training.pause(590, waits_for="checkpoint") == []
    assert training.pause(20, waits_for="checkpoint") == ["Stalled"]
    assert training.found.reason == "Checkpoint"


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_checkpoint_without_a_step_does_not_end_a_stall(training: Training, is_kept: bool) -> None:
    """Regression: a checkpoint's longer limit made the pause short enough."""
    training.pause(90)
    if is_kept:
        training.watch = AnomalyWatch(training.watch.anomalies)
    assert training.pause(200, waits_for="checkpoint") == ["Stalled"]
    assert training.run(70) == []


def test_long_steps_stall_later() -> None:
    training = Training(step_s=30.0)
    training.run(1800)
    assert training.pause(240) == []
    assert training.pause(70) == ["Stalled"]
    assert "where a step takes 29.7 s" in training.found.message


def test_single_steps_do_not_end_a_stall(training: Training) -> None:
    training.pause(120)
    for _ in range(10):
        training.run(5)
        assert training.pause(50) == ["Stalled"]
    assert training.changes == 1


# Memory


def growing(training: Training, mib: Iterator[int], seconds: int = 10) -> list[str]:
    for value in mib:
        training.run(seconds, memory_mib=value, limit_mib=10_000)
    return training.types


def test_memory_near_its_limit_that_grows_is_an_anomaly() -> None:
    training = Training()
    assert growing(training, iter(range(9000, 9500, 10))) == []
    assert growing(training, iter(range(9500, 9600, 10))) == ["MemoryNearLimit"]
    assert "takes 9,500 MiB of 10,000 MiB (95%)" in training.found.message
    assert training.found.reason == "Growing"
    assert growing(training, iter([9400] * 20)) == ["MemoryNearLimit"], "still close to the limit"
    assert growing(training, iter([9200] * 10)) == []


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([9900] * 200, id="reserved-at-once"),
        pytest.param([*range(1000, 9900, 1500), *[9900] * 200], id="grown-while-loading"),
        pytest.param([9000] * 20 + [9900] * 200, id="one-larger-sample"),
        pytest.param(list(range(1000, 9400, 50)), id="far-from-the-limit"),
    ],
)
def test_memory_that_is_only_large_is_none(values: list[int]) -> None:
    assert growing(Training(), iter(values)) == []


def test_memory_that_stays_near_its_limit_without_growing_ends_the_anomaly() -> None:
    training = Training()
    growing(training, iter(range(9000, 9600, 10)))
    assert growing(training, iter([9600] * 80)) == []


# Restarts


def test_processes_that_begin_again_have_a_new_baseline(training: Training) -> None:
    training.pause(90)
    assert training.types == ["Stalled"]
    training.steps, training.step_s = 0, 0.5
    assert training.run(900) == []
    assert training.run(200, longer=1.8) == ["StepTimeDrift"]
    assert "above its usual 500 ms" in training.found.message


def test_stalls_and_drifts_outlast_a_restart_of_the_agent(training: Training) -> None:
    """Regression: a drift was over once the agent was restarted, and its step time became the baseline."""
    training.run(300, longer=1.5)
    training.pause(90)
    assert training.types == ["Stalled", "StepTimeDrift"]
    later = Training(watch=AnomalyWatch(training.watch.anomalies))
    later.steps = training.steps
    assert later.pause(600) == ["Stalled", "StepTimeDrift"]
    assert later.watch.anomalies == training.watch.anomalies
    assert later.run(900, longer=1.5, others_busy=1.5) == ["StepTimeDrift"], "co-tenants were there before"
    assert later.run(150) == []


# From the readings to the status


def reading(at: float, *pods: tuple[PodUid, float], memory_mib: int = 100, clock_mhz: float = 1410.0) -> Reading:
    uses = tuple(
        ProcessUsage(f"p-{pod}", pod, memory_mib, memory_mib, 1.0, busy, busy / 2, busy / 4, 0.0) for pod, busy in pods
    )
    counters = Counters({"DCGM_FI_DEV_SM_CLOCK": clock_mhz})
    return Reading(at, uses, 100.0, 50.0, 400.0, 0.0, counters=counters)


def stepping(meter: Meter, seconds: range, step_s: float, *others: tuple[PodUid, float], steps: int = 10) -> list[str]:
    """Readings of A's steps; returns the anomalies of all pods."""
    for second in seconds:
        counts = StepCounts(1.0, steps, steps * step_s, steps)
        report = StepReport(steps=1000 + steps * second, since=counts)
        meter.sample(reading(float(second), (A, 0.9), *others), {A: report}, {A: None}, 10_000)
    return [f"{tenant.pod_uid} {one.type}" for tenant in meter.tenants(NOW) for one in tenant.anomalies]


def test_a_cotenants_arrival_explains_longer_steps() -> None:
    meter = Meter(GPU)
    stepping(meter, range(900), 0.1)
    assert stepping(meter, range(900, 1500), 0.18, (B, 0.8)) == []
    assert stepping(meter, range(1500, 2100), 0.1) == []
    assert stepping(meter, range(2100, 2300), 0.18) == [f"{A} StepTimeDrift"], "without one they are not explained"


def test_an_anomaly_is_written_once_when_it_begins_and_once_when_it_ends() -> None:
    meter, written, writes = Meter(GPU), list[Tenant](), 0
    for second in range(1400):
        step_s = 0.15 if second % 2 else 0.145  # less than the tenth that is written anyway
        stepping(meter, range(second, second + 1), step_s if 900 <= second < 1200 else 0.1)
        kept = damp_changes(written, meter.tenants(NOW))
        writes += [t.anomalies for t in kept] != [t.anomalies for t in written] and bool(written)
        written = kept
    assert writes == 2


@pytest.mark.parametrize("limit_mib", [None, 10_000])
def test_memory_is_compared_with_the_limit_or_what_cotenants_leave(limit_mib: int | None) -> None:
    meter = Meter(GPU)
    for second in range(900):
        report = StepReport(steps=10 * second, since=StepCounts(1.0, 10, 1.0, 10))
        own, other = (
            ProcessUsage(f"p-{pod}", pod, mib, mib, 1.0, 0.5, 0.2, 0.1, 0.0)
            for pod, mib in ((A, 9000 + second), (B, 2000))
        )
        whole = Reading(float(second), (own, other), 100.0, 50.0, 400.0, 0.0)
        meter.sample(whole, {A: report}, {A: limit_mib, B: limit_mib}, 12_000)
    found = {tenant.pod_uid: tenant.anomalies for tenant in meter.tenants(NOW)}
    assert [one.type for one in found[A]] == ["MemoryNearLimit"]
    assert " MiB of 10,000 MiB" in found[A][0].message
    assert found[B] == []


def _longer_after_none() -> Callable[[random.Random], StepCounts]:
    """Return counts of 800 s of steps that take no time, and of longer ones. Regression: they ended the agent."""
    readings = itertools.count()
    return lambda rng: StepCounts(1.0, 9, 0.0 if next(readings) < 800 else 0.9, 9)


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param(lambda rng: StepCounts(1.0), id="no-steps"),
        pytest.param(lambda rng: StepCounts(1.0, 40_000, 1.0, 40_000, 2**30, 1.0, 1.0, 1.0, 2**60), id="most"),
        pytest.param(lambda rng: StepCounts(1.0, rng.randrange(9), rng.random(), rng.randrange(9), 0, rng.random()),
                     id="contradictions"),
        pytest.param(lambda rng: StepCounts(1.0, steps := rng.choice([0] * 50 + [9]), steps, steps), id="pauses"),
        pytest.param(_longer_after_none(), id="no-time-at-first"),
    ],
)  # fmt: skip
def test_false_reports_affect_their_own_pod_and_are_bounded(counts: Callable[[random.Random], StepCounts]) -> None:
    """Whatever a container writes into its file, the other tenant has no anomaly, and the status stays valid."""
    meter, rng, changes, before = Meter(GPU), random.Random(2), 0, list[Anomaly]()  # noqa: S311
    for second in range(2000):
        steps = 1 if second == 1000 else rng.randrange(100) + 1000 * second
        own = StepReport(steps=steps, since=counts(rng), waits_for=rng.choice(["", "data"]))
        other = StepReport(steps=10 * second, since=StepCounts(1.0, 10, 1.0, 10))
        meter.sample(reading(float(second), (A, 0.5), (B, 0.5)), {A: own, B: other}, {A: 100, B: 1000}, 10_000)
        a, b = meter.tenants(NOW)
        assert b.anomalies == []
        changes, before = changes + (a.anomalies != before), a.anomalies
    assert changes <= 2 * 2000 / 60
    valid, removed = presentable(meter.tenants(NOW), {A, B})
    assert (len(valid), removed) == (2, [])


def test_an_earlier_agents_stall_is_remembered() -> None:
    stall = Anomaly(type="Stalled", reason="DataWait", message="no step for 60 s")
    drift = Anomaly(type="StepTimeDrift", reason="Unknown")
    meter = Meter(GPU)
    meter.remember([Tenant(pod_uid=A, gpu_uuid=GPU, anomalies=[stall, drift])])
    assert stepping(meter, range(100), 0.1, steps=0) == [f"{A} Stalled"]


# The probe


class _Loader:
    """An iterator that looks at the probe's file while the training waits for it."""

    def __init__(self, look: Callable[[], StepReport | None]) -> None:
        self.look, self.seen = look, list[str]()

    def __next__(self) -> list[int]:
        report = self.look()
        self.seen.append("" if report is None else report.waits_for)
        return [1]


def test_the_probe_reports_what_a_training_waits_for_at_this_moment(tmp_path: Path) -> None:
    files = ProbeFiles(tmp_path, lambda: 1e9)
    files.access(A)
    recorder = Recorder(str(tmp_path / "pods" / A), 1)
    recorder.count_step("optimizer")
    loader = _Loader(lambda: files.read(A))
    wait = recorder.timing_batches(_Loader.__next__)
    wait(loader)
    recorder.save(lambda: loader.seen.append((files.read(A) or StepReport(0, StepCounts())).waits_for), (), {})
    assert loader.seen == ["data", "checkpoint"]
    report = files.read(A)
    assert report is not None
    assert report.waits_for == ""


def test_an_evaluation_shows_in_the_probes_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: between steps the probe wrote nothing, so that a long evaluation looked like a stall."""
    now = 1_000_000_000
    monkeypatch.setattr("carpool_probe.recorder._clock", lambda: now)
    files = ProbeFiles(tmp_path, lambda: now / 1e9)
    files.access(A)
    recorder = Recorder(str(tmp_path / "pods" / A), 1)
    recorder.count_step("optimizer")
    wait = recorder.timing_batches(lambda loader: [1])
    files.read(A)
    for _ in range(20):
        now += 1_000_000_000
        wait(None)
    report = files.read(A)
    assert report is not None
    assert (report.since.steps, report.since.batches >= 19) == (0, True)
