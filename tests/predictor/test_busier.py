"""How busy others were, for a job that never ran there."""

import msgspec
import pytest
from carpool_core.values import Precision
from carpool_predictor.calibration.activity_scale import MAX_SCALE, MIN_SCALE, activity_scale
from carpool_predictor.calibration.document import MIN_JOBS, Calibration, RunMeasurement
from carpool_predictor.calibration.observe import observe
from carpool_predictor.models.memory import shipped
from carpool_predictor.predict import run_prediction_of
from job_runs import NAME, STACK, T4, asked, runs, told


def test_activity_that_was_measured_replaces_the_estimate() -> None:
    plain = told(Calibration()).activity
    found = told(runs(5000, util=0.5, sm_active=0.2)).activity
    assert (found.gpu_util_percent.median, found.sm_active_ratio.median) == (50, 0.2)
    assert found.dram_active_ratio == plain.dram_active_ratio
    assert told(runs(5000)).activity == plain


def test_other_sizes_of_a_model_tell_how_far_activity_lies_from_what_is_predicted() -> None:
    plain = told(Calibration()).activity
    other = told(Calibration(), batch=32).activity
    half, third = other.gpu_util_percent.median / 200, other.sm_active_ratio.median / 3
    found = told(runs(5000, batch=32, util=half, sm_active=third)).activity
    assert found.gpu_util_percent.median == pytest.approx(plain.gpu_util_percent.median / 2, rel=0.01)
    assert found.gpu_util_percent.upper == pytest.approx(plain.gpu_util_percent.upper / 2, rel=0.01)
    assert found.sm_active_ratio.median == pytest.approx(plain.sm_active_ratio.median / 3, rel=0.01)
    assert found.dram_active_ratio == plain.dram_active_ratio
    most = told(runs(5000, batch=32, util=1.0, sm_active=1.0)).activity
    assert most.gpu_util_percent.upper <= 100
    assert most.sm_active_ratio.upper <= 1


def test_other_models_tell_it_once_there_are_enough_and_only_where_the_model_never_ran() -> None:
    plain = told(Calibration()).activity.gpu_util_percent.median
    half, known = plain / 200, Calibration()
    for number in range(MIN_JOBS):
        assert told(known).activity.gpu_util_percent.median == plain
        known = runs(5000, name=f"other {number}", known=known, util=half)
    assert told(known).activity.gpu_util_percent.median == pytest.approx(plain / 2, rel=0.01)
    repeated = Calibration()
    for _ in range(MIN_JOBS):
        repeated = runs(5000, name="other", known=repeated, util=half)
    assert told(repeated).activity.gpu_util_percent.median == plain
    as_predicted = told(Calibration(), batch=32).activity.gpu_util_percent.median / 100
    own = runs(5000, batch=32, known=known, util=as_predicted)
    assert told(own).activity.gpu_util_percent.median == pytest.approx(plain, rel=0.01)


def test_a_run_that_slept_does_not_make_its_whole_model_idle() -> None:
    """Regression: one run at a thousandth of what was predicted spoke for all other sizes as it was."""
    plain = told(Calibration()).activity
    slept = told(runs(5000, batch=32, util=0.001, sm_active=0.0)).activity
    assert slept.gpu_util_percent.median == pytest.approx(MIN_SCALE * plain.gpu_util_percent.median)
    assert slept.sm_active_ratio.median == pytest.approx(MIN_SCALE * plain.sm_active_ratio.median)
    little = msgspec.structs.replace(run_prediction_of(asked(32), NAME, 0, T4), util=0.01)
    full = RunMeasurement(peak_mib=5000, capacity_mib=T4.memory_mib, util=1.0)
    known = observe(Calibration(), STACK, little, full, shipped())
    assert activity_scale(known, T4.name, Precision.FP32, NAME).util == MAX_SCALE


def test_of_three_runs_of_a_job_one_that_slept_changes_nothing() -> None:
    plain = told(Calibration(), batch=32).activity.gpu_util_percent.median / 100
    known = Calibration()
    for util in (plain / 2, 0.001, plain / 2):
        known = runs(5000, batch=32, known=known, util=util)
    assert activity_scale(known, T4.name, Precision.FP32, NAME).util == pytest.approx(0.5, rel=0.01)
