"""Calibration from finished jobs: the stack's line, bounds, coverage, bad observations, and predictions with it."""

import json
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from calibration_world import CAPACITY, INTERCEPT, SLOPE, STACK, T4, job, learn, state_of
from carpool_core.values import Precision
from carpool_predictor.calibration.document import (
    MAX_RUNS,
    MAX_SAMPLES,
    MAX_STACKS,
    MAX_WIDENING,
    MIN_JOBS,
    SIMULATED,
    Calibration,
    RunMeasurement,
    RunPrediction,
    StackState,
    model_for,
    read_calibration,
    write_calibration,
)
from carpool_predictor.calibration.observe import PER_MODEL, observe, refusal_of
from carpool_predictor.cli import predict as command
from carpool_predictor.cli import write_features
from carpool_predictor.features import MalformedError
from carpool_predictor.models.memory import shipped
from carpool_predictor.predict import PredictionContext, prepare
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from job_runs import asked, features


def error(state: StackState) -> float:
    """Median error of the line over the sizes of jobs."""
    sizes = [500 * 60 ** (i / 20) for i in range(21)]
    return sorted(abs(state.at(x) / (SLOPE * x + INTERCEPT) - 1) for x in sizes)[10]


@pytest.mark.parametrize(("jobs", "most"), [(10, 0.06), (20, 0.04), (60, 0.025)])
@pytest.mark.parametrize("seed", range(4))
def test_a_few_jobs_fit_the_line_of_a_stack(jobs: int, most: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert error(state_of(learn(job(i, rng) for i in range(jobs)))) < most


def test_the_first_job_does_not_overturn_the_shipped_line() -> None:
    rng = np.random.default_rng(0)
    expected, measured = job(0, rng)
    state = state_of(learn([(expected, msgspec.structs.replace(measured, peak_mib=3 * measured.peak_mib))]))
    model = shipped()
    assert state.at(8000) == pytest.approx(model.slope * 8000 + model.intercept_mib, rel=0.15)


def poisoned(
    kind: str, expected: RunPrediction, measured: RunMeasurement, rng: np.random.Generator
) -> tuple[RunPrediction, RunMeasurement]:
    if kind == "neighbour":
        more = min(measured.peak_mib + float(rng.uniform(2000, 20_000)), CAPACITY)
        return expected, msgspec.structs.replace(measured, peak_mib=more)
    if kind == "cut short":
        return expected, msgspec.structs.replace(measured, peak_mib=measured.peak_mib * float(rng.uniform(0.05, 0.95)))
    if kind == "no steps":
        return expected, msgspec.structs.replace(measured, complete=False, peak_mib=300.0)
    return expected, msgspec.structs.replace(measured, peak_mib=10 * CAPACITY)


@cache
def history(seed: int) -> tuple[list[tuple[RunPrediction, RunMeasurement]], StackState]:
    """Return valid jobs of a seed, and the stack that learned from them."""
    rng = np.random.default_rng(seed)
    jobs = [job(i, rng, bound=1.15) for i in range(60)]
    return jobs, state_of(learn(jobs))


@pytest.mark.parametrize("kind", ["neighbour", "cut short", "no steps", "impossible"])
def test_bad_observations_do_not_poison_it(kind: str) -> None:
    """Most of ten histories hold; a rare history of bad luck may not."""
    errors, shifts, widenings = [], [], []
    for seed in range(10):
        jobs, clean = history(seed)
        rng = np.random.default_rng(seed)
        bad = [poisoned(kind, *each, rng) if rng.random() < 0.25 else each for each in jobs]
        dirty = state_of(learn(bad))
        errors.append(error(dirty))
        shifts.append(abs(dirty.at(8000) / clean.at(8000) - 1))
        widenings.append(dirty.widening)
    assert np.quantile(errors, 0.8) < 0.06
    assert np.quantile(shifts, 0.8) < 0.08
    assert np.quantile(widenings, 0.8) < math.log(1.3)


def test_one_model_cannot_outvote_the_others() -> None:
    rng = np.random.default_rng(1)
    good = [job(i, rng) for i in range(12)]
    expected, measured = job(99, rng)
    wrong = (expected, msgspec.structs.replace(measured, peak_mib=min(2.5 * measured.peak_mib, CAPACITY)))
    state = state_of(learn([*good, *([wrong] * 200)]))
    assert sum(row.model == "m99" for row in state.rows) == PER_MODEL
    assert error(state) < 0.06


def test_misses_widen_the_bound_and_hits_narrow_it() -> None:
    rng = np.random.default_rng(2)
    tight = learn(job(i, rng, bound=0.97) for i in range(40))
    state = state_of(tight)
    assert state.coverage is not None
    assert state.coverage < 0.6
    assert state.widening > math.log(1.2)
    after = state_of(learn((job(i, rng, bound=1.3) for i in range(100, 200)), tight))
    assert after.coverage == 1
    assert after.widening < state.widening


def test_widened_bounds_hold_the_coverage() -> None:
    """The loop closed: each bound is the line with the widening of that moment, too narrow by itself."""
    rng = np.random.default_rng(3)
    calibration = learn(job(i, rng) for i in range(20))
    held = []
    for number in range(20, 320):
        expected, measured = job(number, rng)
        state = state_of(calibration)
        upper = state.at(expected.reserved_mib) * 1.01 * math.exp(state.widening)
        expected = msgspec.structs.replace(expected, upper_mib=upper)
        held.append(measured.peak_mib <= upper)
        calibration = observe(calibration, STACK, expected, measured, shipped())
    assert 0.92 <= sum(held[60:]) / len(held[60:]) <= 0.99


def test_out_of_memory_below_the_line_changes_nothing() -> None:
    rng = np.random.default_rng(4)
    base = learn(job(i, rng) for i in range(20))
    before = state_of(base)
    expected = RunPrediction(model="big", reserved_mib=70_000, live_mib=60_000, upper_mib=90_000)
    measured = RunMeasurement(peak_mib=10_000, capacity_mib=CAPACITY, out_of_memory=True)
    after = state_of(learn([(expected, measured)], base))
    assert (after.slope, after.intercept_mib) == pytest.approx((before.slope, before.intercept_mib))
    assert after.outcomes == before.outcomes


def test_out_of_memory_above_the_bound_is_a_miss_and_raises_the_line() -> None:
    expected = [RunPrediction(model=f"o{i}", reserved_mib=8000, live_mib=7000, upper_mib=9500) for i in range(12)]
    measured = RunMeasurement(peak_mib=14_000, capacity_mib=CAPACITY, out_of_memory=True)
    state = state_of(learn((each, measured) for each in expected))
    assert state.at(8000) > 0.95 * 14_000
    assert state.coverage == 0
    assert state.widening > 0


@pytest.mark.parametrize(
    ("measured", "refusal"),
    [
        pytest.param(RunMeasurement(peak_mib=900, capacity_mib=CAPACITY), None, id="plausible"),
        pytest.param(RunMeasurement(peak_mib=799, capacity_mib=CAPACITY), "CutShort", id="less than one step"),
        pytest.param(RunMeasurement(peak_mib=900, capacity_mib=CAPACITY, complete=False), "CutShort", id="no steps"),
        pytest.param(
            RunMeasurement(peak_mib=CAPACITY + 1, capacity_mib=CAPACITY), "Impossible", id="more than there is"
        ),
        pytest.param(
            RunMeasurement(peak_mib=0, capacity_mib=CAPACITY, out_of_memory=True), "Impossible", id="out of no memory"
        ),
    ],
)
def test_impossible_observations_are_refused_and_counted(measured: RunMeasurement, refusal: str | None) -> None:
    expected = RunPrediction(model="m", reserved_mib=1000, live_mib=800, upper_mib=2000)
    assert refusal_of(expected, measured) == refusal
    state = state_of(learn([(expected, measured)]))
    assert (state.seen, state.refused) == ((1, 0) if refusal is None else (0, 1))


def test_each_run_counts_once_and_its_end_replaces_its_row() -> None:
    rng = np.random.default_rng(10)
    expected, measured = job(0, rng, bound=1.3)
    seen = msgspec.structs.replace(measured, sample="a", ended=False, steady=False, peak_mib=0.9 * measured.peak_mib)
    begun = learn([(expected, seen)])
    assert (len(state_of(begun).rows), state_of(begun).seen, state_of(begun).outcomes) == (1, 0, "")
    assert learn([(expected, seen)], begun) is begun
    end = msgspec.structs.replace(measured, sample="a")
    over = learn([(expected, end)], begun)
    assert [row.value_mib for row in state_of(over).rows] == [measured.peak_mib]
    assert (state_of(over).seen, state_of(over).outcomes) == (1, "1")
    for again in (end, seen):
        assert learn([(expected, again)], over) is over


@pytest.mark.parametrize(
    ("before", "at_least", "kept"),
    [
        pytest.param([], 0.4, [None], id="less than predicted is ignored"),
        pytest.param([], 0.7, [0.7], id="more than predicted counts"),
        pytest.param([0.9], 0.7, [0.9, None], id="less than a run alone is ignored"),
        pytest.param([0.3], 0.4, [0.3, 0.4], id="more than all runs counts"),
        pytest.param([0.3, 0.5], 0.4, [0.3, 0.5, None], id="less than the largest run is ignored"),
    ],
)
def test_a_lower_limit_of_activity_only_raises_it(
    before: list[float], at_least: float, kept: list[float | None]
) -> None:
    expected = RunPrediction(model="m", reserved_mib=1000, live_mib=800, upper_mib=2000, util=0.5, sm_active=0.5)
    measures = RunMeasurement(peak_mib=1500, capacity_mib=CAPACITY)

    def ran(number: int, activity: float, *, at_least: bool) -> RunMeasurement:
        return msgspec.structs.replace(
            measures, sample=f"s{number}", util=activity, sm_active=activity, at_least=at_least
        )

    runs = [ran(number, activity, at_least=False) for number, activity in enumerate(before)]
    known = learn((expected, run) for run in [*runs, ran(len(before), at_least, at_least=True)])
    assert [row.util for row in state_of(known).rows] == kept
    assert [row.sm_active for row in state_of(known).rows] == kept
    again = learn([(expected, ran(len(before), 0.01, at_least=True))], known)
    assert [row.util for row in state_of(again).rows] == kept, "the run keeps its earlier activity"


def test_a_refused_run_counts_once_after_its_end() -> None:
    expected = RunPrediction(model="m", reserved_mib=1000, live_mib=800, upper_mib=2000)
    loads = RunMeasurement(peak_mib=300, capacity_mib=CAPACITY, sample="a", ended=False)
    assert learn([(expected, loads)]).stacks == []
    ended = msgspec.structs.replace(loads, ended=True)
    assert state_of(learn([(expected, ended)] * 3)).refused == 1


def test_the_oldest_samples_are_dropped() -> None:
    expected = RunPrediction(model="m", reserved_mib=1000, live_mib=800, upper_mib=2000)
    found = learn(
        (expected, RunMeasurement(peak_mib=1500, capacity_mib=CAPACITY, sample=f"s{i}")) for i in range(MAX_SAMPLES + 9)
    )
    assert found.counted == [f"s{i}" for i in range(9, MAX_SAMPLES + 9)]


def test_an_unused_bound_neither_holds_nor_fails() -> None:
    rng = np.random.default_rng(11)
    jobs = [
        (msgspec.structs.replace(expected, upper_mib=0), measured)
        for expected, measured in (job(i, rng) for i in range(9))
    ]
    state = state_of(learn(jobs))
    assert (state.seen, state.outcomes, state.widening) == (9, "", 0)


def test_hardware_and_simulated_gpus_are_calibrated_apart() -> None:
    rng = np.random.default_rng(13)
    simulated = msgspec.structs.replace(STACK, driver=SIMULATED)
    found = Calibration()
    for i in range(20):
        found = observe(found, simulated, *job(i, rng), shipped())
    best = found.best(T4.name, Precision.FP32)
    assert best is not None
    assert best.is_simulated
    assert found.for_gpus({T4.name}) is found
    assert found.for_gpus({"NVIDIA L4"}).best(T4.name, Precision.FP32) is None
    found = observe(found, STACK, *job(99, rng), shipped())
    best = found.best(T4.name, Precision.FP32)
    assert best is not None
    assert not best.is_simulated


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(1, 1e5), st.floats(0, 1e5), st.booleans()), max_size=40))
@settings(deadline=None)
def test_the_document_stays_valid(rows: list[tuple[int, float, float, bool]]) -> None:
    found = learn(
        (
            RunPrediction(model=f"m{number}", reserved_mib=reserved, live_mib=0.5 * reserved, upper_mib=reserved),
            RunMeasurement(peak_mib=peak, capacity_mib=CAPACITY, out_of_memory=gone),
        )
        for number, reserved, peak, gone in rows
    )
    for state in found.stacks:
        assert state.slope > 0
        assert state.intercept_mib >= 0
        assert 0 <= state.widening <= MAX_WIDENING
        assert state.seen + state.refused == len(rows)
    assert read_calibration(write_calibration(found)) == found


def test_the_document_stays_small() -> None:
    rng = np.random.default_rng(7)
    found = Calibration()
    full = state_of(learn(job(i, rng) for i in range(MAX_RUNS + 10)))
    for number in range(MAX_STACKS + 3):
        stack = msgspec.structs.replace(STACK, driver=str(number))
        held = [*found.stacks, msgspec.structs.replace(full, stack=stack)]
        found = observe(Calibration(stacks=held), stack, *job(0, rng), shipped())
    assert len(full.rows) == MAX_RUNS
    assert len(found.stacks) == MAX_STACKS
    assert found.state(msgspec.structs.replace(STACK, driver="0")) is None
    assert len(write_calibration(found)) < 400_000


@pytest.mark.parametrize(
    ("content", "word"),
    [
        pytest.param(b'{"format":3,"stacks":[', "expected a calibration", id="truncated"),
        pytest.param(b'{"format":4,"stacks":7}', "found 4; upgrade carpool", id="newer"),
        pytest.param(b'{"format":2}', "found 2; remove it", id="older"),
        pytest.param(b"\x80\x04", "expected a calibration", id="pickle"),
        pytest.param(
            b'{"stacks":[{"stack":{"product":"Tesla T4","precision":"fp32"},"slope":-1,"intercept_mib":0}]}', "slope",
            id="tampered",
        ),
    ],
)  # fmt: skip
def test_a_broken_document_is_refused(content: bytes, word: str) -> None:
    with pytest.raises(MalformedError, match=word):
        read_calibration(content)


def rows_of(noise: Iterable[float], stratum: int = 0, name: str = "m") -> list[tuple[RunPrediction, RunMeasurement]]:
    """Jobs of ascending sizes, each so far from the truth of the stack."""
    return [
        (
            RunPrediction(model=f"{name}{i}", reserved_mib=x, live_mib=x / 2, upper_mib=CAPACITY, stratum=stratum),
            RunMeasurement(peak_mib=(SLOPE * x + INTERCEPT) * by, capacity_mib=CAPACITY),
        )
        for i, by in enumerate(noise)
        for x in [1000.0 * 1.5**i]
    ]


CALM = (1.0, 1.02, 0.97, 1.01, 0.99, 1.02, 0.98, 1.0)


def test_the_bound_reaches_peaks_of_several_jobs() -> None:
    calibration = learn(rows_of((*CALM, 1.25, 1.25)))
    state = state_of(calibration)
    assert math.exp(state.reaches[0]) == pytest.approx(1.25, rel=0.02)
    model = model_for(calibration, T4, Precision.FP32, shipped())
    assert all(f >= math.exp(reach) for f, reach in zip(model.factors, state.reaches, strict=True))


@pytest.mark.parametrize("runs", [1, 2, PER_MODEL])
@pytest.mark.parametrize("by", [1.2, 1.3, 1.45, 2.0, 5.0])
def test_one_job_widens_the_bound_by_at_most_a_tenth(by: float, runs: int) -> None:
    """Regression: one run at 1.45 times the others' made the bounds of all jobs of the stack as wide as itself."""
    *rows, wild = rows_of((*CALM, by))
    calm, one = learn(rows), learn([*rows, *[wild] * runs])
    before, after = (model_for(of, T4, Precision.FP32, shipped()).factors for of in (calm, one))
    assert all(late <= 1.12 * early for early, late in zip(before, after, strict=True))


def test_one_model_widens_the_bound_by_at_most_a_tenth() -> None:
    rows = rows_of((*CALM, 1.4, 1.42, 1.38))
    alone = [(msgspec.structs.replace(one, model="wild"), seen) for one, seen in rows[len(CALM) :]]
    several = state_of(learn(rows))
    assert state_of(learn([*rows[: len(CALM)], *alone])).reaches[0] < math.log(1.16) < several.reaches[0]


def test_risky_runs_do_not_widen_bounds_of_calm_steps() -> None:
    wild = rows_of((1.4, 1.42, 1.38), stratum=1, name="wild")
    state = state_of(learn([*rows_of(CALM), *wild]))
    assert state.reaches[0] < math.log(1.05)
    assert state.reaches[1] == state.reaches[2] > math.log(1.3)  # nor are likelier ones ever bound closer


def test_calm_runs_do_not_narrow_bounds_of_risky_steps() -> None:
    """Regression: five rows of a stratum that all lay far out were lost among forty calm ones."""
    calm = [each for i in range(8) for each in rows_of(CALM[:5], name=f"calm{i}/")]
    state = state_of(learn([*calm, *rows_of((1.4, 1.42, 1.38, 1.4, 1.39), stratum=2, name="wild")]))
    assert state.reaches[1] < math.log(1.1)
    assert state.reaches[2] > math.log(1.3)


def test_an_unconfirmed_outlier_does_not_count() -> None:
    far = job(99, np.random.default_rng(12))
    far = (far[0], msgspec.structs.replace(far[1], peak_mib=min(CAPACITY, 5 * far[1].peak_mib)))
    also = (msgspec.structs.replace(far[0], model="also", reserved_mib=1.01 * far[0].reserved_mib), far[1])
    rows = rows_of(CALM)
    assert state_of(learn([*rows, far])).reaches[0] < math.log(1.05)
    assert state_of(learn([*rows, far, far])).reaches[0] < math.log(1.16)
    assert state_of(learn([*rows, far, far, also, also])).reaches[0] > math.log(1.5)


def test_predictions_follow_the_stack_and_bounds_narrow() -> None:
    rng = np.random.default_rng(5)
    steps = [msgspec.structs.replace(one, unfolded_bytes=one.peak_bytes) for one in features().steps]
    convolutions = msgspec.structs.replace(features(), steps=steps)  # a bound that is wider elsewhere
    context = prepare(convolutions, asked().training, shipped())
    assert isinstance(context, PredictionContext)
    before = context.memory_on(T4)
    widths = []
    for jobs in (MIN_JOBS, 20, 60):
        model = model_for(learn(job(i, rng) for i in range(jobs)), T4, Precision.FP32, shipped())
        again = prepare(context.features, context.training, model)
        assert isinstance(again, PredictionContext)
        memory = again.memory_on(T4)
        widths.append(memory.upper_mib / memory.median_mib)
    assert memory.median_mib > before.median_mib
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < before.upper_mib / before.median_mib


def test_learning_adds_no_doubt_to_a_step_without_large_workspaces() -> None:
    rng = np.random.default_rng(5)
    before = asked().memory_on(T4)
    learned = model_for(learn(job(i, rng) for i in range(MIN_JOBS)), T4, Precision.FP32, shipped())
    context = prepare(features(), asked().training, learned)
    assert isinstance(context, PredictionContext)
    memory = context.memory_on(T4)
    assert learned.doubt > 1
    assert memory.upper_mib / memory.median_mib == pytest.approx(before.upper_mib / before.median_mib, rel=0.01)


def test_a_stack_with_too_few_jobs_keeps_the_shipped_model() -> None:
    rng = np.random.default_rng(6)
    few = learn(job(i, rng) for i in range(MIN_JOBS - 1))
    assert model_for(few, T4, Precision.FP32, shipped()) is shipped()
    assert model_for(few, T4, Precision.BF16_MIXED, shipped()) is shipped()


def test_the_command_reads_a_calibration(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    block, document = tmp_path / "features.yaml", tmp_path / "calibration.json"
    block.write_text(write_features(features()))
    document.write_bytes(write_calibration(learn(job(i, rng) for i in range(20))))
    arguments = [str(block), "--batch-size", "64", "--gpu", "T4", "--json"]
    plain, found = (
        json.loads(CliRunner().invoke(command, [*arguments, *more]).stdout)["products"][0]
        for more in ([], ["--calibration", str(document)])
    )
    assert found["memory"]["median_mib"] > plain["memory"]["median_mib"]
    document.write_text("{")
    result = CliRunner().invoke(command, [*arguments, "--calibration", str(document)])
    assert result.exit_code == 2
    assert "expected a calibration" in result.stderr
