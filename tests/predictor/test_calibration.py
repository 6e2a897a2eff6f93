"""What finished jobs teach, and what they cannot: the stack's line, coverage, and poison."""

import math

import msgspec
import numpy as np
import pytest
from calibration_world import CAPACITY, INTERCEPT, SLOPE, STACK, T4, job, learn, state_of
from carpool_core.values import Precision
from carpool_predictor.calibration.document import (
    MAX_SAMPLES,
    SIMULATED,
    Calibration,
    RunMeasurement,
    RunPrediction,
    StackState,
)
from carpool_predictor.calibration.observe import PER_MODEL, observe, refusal_of
from carpool_predictor.models.memory import shipped


def error(state: StackState) -> float:
    """Median error of the line over the sizes of jobs."""
    sizes = [500 * 60 ** (i / 20) for i in range(21)]
    return sorted(abs(state.at(x) / (SLOPE * x + INTERCEPT) - 1) for x in sizes)[10]


@pytest.mark.parametrize(("jobs", "most"), [(10, 0.06), (20, 0.04), (60, 0.025)])
@pytest.mark.parametrize("seed", range(4))
def test_a_few_jobs_teach_the_line_of_a_stack(jobs: int, most: float, seed: int) -> None:
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


@pytest.mark.parametrize("kind", ["neighbour", "cut short", "no steps", "impossible"])
def test_bad_observations_do_not_poison_it(kind: str) -> None:
    """Of a dozen histories nearly all hold: no rule holds for each that chance can draw."""
    errors, shifts, widenings = [], [], []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        jobs = [job(i, rng, bound=1.15) for i in range(60)]
        bad = [poisoned(kind, *each, rng) if rng.random() < 0.25 else each for each in jobs]
        clean, dirty = state_of(learn(jobs)), state_of(learn(bad))
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


def test_coverage_that_drops_widens_the_bound_and_hits_narrow_it_again() -> None:
    rng = np.random.default_rng(2)
    tight = learn(job(i, rng, bound=0.97) for i in range(40))
    state = state_of(tight)
    assert state.coverage is not None
    assert state.coverage < 0.6
    assert state.widening > math.log(1.2)
    after = state_of(learn((job(i, rng, bound=1.3) for i in range(100, 200)), tight))
    assert after.coverage == 1
    assert after.widening < state.widening


def test_bounds_that_are_widened_by_it_hold() -> None:
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


def test_out_of_memory_is_at_least_what_was_there_and_never_a_label() -> None:
    rng = np.random.default_rng(4)
    base = learn(job(i, rng) for i in range(20))
    before = state_of(base)
    expected = RunPrediction(model="big", reserved_mib=70_000, live_mib=60_000, upper_mib=90_000)
    told = RunMeasurement(peak_mib=10_000, capacity_mib=CAPACITY, out_of_memory=True)
    after = state_of(learn([(expected, told)], base))
    assert (after.slope, after.intercept_mib) == pytest.approx((before.slope, before.intercept_mib))
    assert after.outcomes == before.outcomes


def test_out_of_memory_above_the_bound_is_a_miss_and_raises_the_line() -> None:
    expected = [RunPrediction(model=f"o{i}", reserved_mib=8000, live_mib=7000, upper_mib=9500) for i in range(12)]
    told = RunMeasurement(peak_mib=14_000, capacity_mib=CAPACITY, out_of_memory=True)
    state = state_of(learn((each, told) for each in expected))
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
def test_what_cannot_be_right_is_refused_and_counted(measured: RunMeasurement, refusal: str | None) -> None:
    expected = RunPrediction(model="m", reserved_mib=1000, live_mib=800, upper_mib=2000)
    assert refusal_of(expected, measured) == refusal
    state = state_of(learn([(expected, measured)]))
    assert (state.seen, state.refused) == ((1, 0) if refusal is None else (0, 1))


def test_each_run_counts_once_and_its_end_replaces_what_it_showed_before() -> None:
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
        pytest.param([], 0.4, [None], id="less than was predicted tells nothing"),
        pytest.param([], 0.7, [0.7], id="more than was predicted does"),
        pytest.param([0.9], 0.7, [0.9, None], id="less than a run showed alone tells nothing"),
        pytest.param([0.3], 0.4, [0.3, 0.4], id="more than all that is known does"),
        pytest.param([0.3, 0.5], 0.4, [0.3, 0.5, None], id="or than the most of it"),
    ],
)
def test_what_a_job_does_at_least_tells_nothing_against_more(
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
    assert [row.util for row in state_of(again).rows] == kept, "nor against what the same run showed before"


def test_a_refused_run_counts_once_too_and_one_that_has_begun_is_not_refused() -> None:
    expected = RunPrediction(model="m", reserved_mib=1000, live_mib=800, upper_mib=2000)
    loads = RunMeasurement(peak_mib=300, capacity_mib=CAPACITY, sample="a", ended=False)
    assert learn([(expected, loads)]).stacks == []
    ended = msgspec.structs.replace(loads, ended=True)
    assert state_of(learn([(expected, ended)] * 3)).refused == 1


def test_samples_that_are_forgotten_are_the_oldest() -> None:
    expected = RunPrediction(model="m", reserved_mib=1000, live_mib=800, upper_mib=2000)
    found = learn(
        (expected, RunMeasurement(peak_mib=1500, capacity_mib=CAPACITY, sample=f"s{i}")) for i in range(MAX_SAMPLES + 9)
    )
    assert found.counted == [f"s{i}" for i in range(9, MAX_SAMPLES + 9)]


def test_a_bound_that_nobody_counted_with_neither_holds_nor_fails() -> None:
    rng = np.random.default_rng(11)
    jobs = [
        (msgspec.structs.replace(expected, upper_mib=0), measured)
        for expected, measured in (job(i, rng) for i in range(9))
    ]
    state = state_of(learn(jobs))
    assert (state.seen, state.outcomes, state.widening) == (9, "", 0)


def test_hardware_and_simulated_gpus_never_teach_each_other() -> None:
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
