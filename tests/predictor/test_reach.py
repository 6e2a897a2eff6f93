"""How far the bound reaches above a stack's line, and who may say so."""

import math
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from calibration_world import CAPACITY, INTERCEPT, SLOPE, T4, job, learn, state_of
from carpool_core.values import Precision
from carpool_predictor.calibration.document import RunMeasurement, RunPrediction, model_for
from carpool_predictor.calibration.observe import PER_MODEL
from carpool_predictor.models.memory import shipped


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


def test_the_bound_reaches_what_several_jobs_show() -> None:
    calibration = learn(rows_of((*CALM, 1.25, 1.25)))
    state = state_of(calibration)
    assert math.exp(state.reaches[0]) == pytest.approx(1.25, rel=0.02)
    model = model_for(calibration, T4, Precision.FP32, shipped())
    assert all(f >= math.exp(reach) for f, reach in zip(model.factors, state.reaches, strict=True))


@pytest.mark.parametrize("runs", [1, 2, PER_MODEL])
@pytest.mark.parametrize("by", [1.2, 1.3, 1.45, 2.0, 5.0])
def test_no_job_widens_a_bound_by_more_than_a_tenth_however_often_it_runs(by: float, runs: int) -> None:
    """Regression: one run at 1.45 times the others' made the bounds of all jobs of the stack as wide as itself."""
    *rows, wild = rows_of((*CALM, by))
    calm, one = learn(rows), learn([*rows, *[wild] * runs])
    before, after = (model_for(of, T4, Precision.FP32, shipped()).factors for of in (calm, one))
    assert all(late <= 1.12 * early for early, late in zip(before, after, strict=True))


def test_no_model_widens_a_bound_by_more_than_a_tenth_at_however_many_sizes() -> None:
    rows = rows_of((*CALM, 1.4, 1.42, 1.38))
    alone = [(msgspec.structs.replace(one, model="wild"), seen) for one, seen in rows[len(CALM) :]]
    several = state_of(learn(rows))
    assert state_of(learn([*rows[: len(CALM)], *alone])).reaches[0] < math.log(1.16) < several.reaches[0]


def test_a_run_that_was_likely_to_exceed_its_median_says_nothing_of_those_that_are_not() -> None:
    wild = rows_of((1.4, 1.42, 1.38), stratum=1, name="wild")
    state = state_of(learn([*rows_of(CALM), *wild]))
    assert state.reaches[0] < math.log(1.05)
    assert state.reaches[1] == state.reaches[2] > math.log(1.3)  # nor are likelier ones ever bound closer


def test_calm_runs_say_nothing_of_those_that_were_likely_to_exceed_their_median() -> None:
    """Regression: five rows of a stratum that all lay far out were lost among forty calm ones."""
    calm = [each for i in range(8) for each in rows_of(CALM[:5], name=f"calm{i}/")]
    state = state_of(learn([*calm, *rows_of((1.4, 1.42, 1.38, 1.4, 1.39), stratum=2, name="wild")]))
    assert state.reaches[1] < math.log(1.1)
    assert state.reaches[2] > math.log(1.3)


def test_no_outlier_counts_that_nothing_confirms() -> None:
    far = job(99, np.random.default_rng(12))
    far = (far[0], msgspec.structs.replace(far[1], peak_mib=min(CAPACITY, 5 * far[1].peak_mib)))
    also = (msgspec.structs.replace(far[0], model="also", reserved_mib=1.01 * far[0].reserved_mib), far[1])
    rows = rows_of(CALM)
    assert state_of(learn([*rows, far])).reaches[0] < math.log(1.05)
    assert state_of(learn([*rows, far, far])).reaches[0] < math.log(1.16)
    assert state_of(learn([*rows, far, far, also, also])).reaches[0] > math.log(1.5)
