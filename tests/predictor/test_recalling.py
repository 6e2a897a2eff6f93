"""Predictions from earlier runs of the same job."""

import math
from typing import Any

import msgspec
import pytest
from carpool_core.products import GpuProduct, find_product
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.resources.prediction import MemoryPrediction, Prediction
from carpool_core.values import Optimizer, Precision
from carpool_predictor.calibration.document import MIN_JOBS, Calibration, RunMeasurement, Stack
from carpool_predictor.calibration.observe import PER_MODEL, observe
from carpool_predictor.calibration.run_history import (
    FIRST_RUN_FACTOR,
    FIRST_RUN_FACTOR_UNENFORCED,
    MAX_OOM_DEATHS,
    OOM_FACTOR,
    RUN_TOLERANCE,
    RunHistory,
    find_history,
    fingerprint,
    first_run_bound,
    is_equivalent,
    is_refused,
    runs_alone,
)
from carpool_predictor.calibration.scales import MAX_SCALE, MIN_SCALE, activity_scale
from carpool_predictor.catalog import store
from carpool_predictor.models.memory import shipped
from carpool_predictor.predict import PredictionContext, predict, prepare, run_prediction_of
from hypothesis import given
from hypothesis import strategies as st
from job_runs import NAME, STACK, T4, asked, features, predict_on_t4, runs


def test_a_measured_peak_replaces_the_prediction() -> None:
    plain = predict_on_t4(Calibration()).memory
    for peak in (5000, 9000):
        memory = predict_on_t4(runs(peak)).memory
        assert memory.median_mib == pytest.approx(peak, abs=1)
        assert memory.upper_mib == pytest.approx(peak * (1 + RUN_TOLERANCE), abs=1)
        assert (memory.learned_runs, memory.trusted) == (1, True)
        assert memory.class_lower_mib < memory.median_mib <= memory.class_upper_mib
    assert plain.learned_runs == 0
    assert predict_on_t4(runs(5000, 5600)).memory.median_mib == pytest.approx(5600, abs=1)


def test_a_run_that_has_just_begun_only_raises_the_bound() -> None:
    plain = predict_on_t4(Calibration()).memory
    begun = predict_on_t4(runs(4000, ended=False, steady=False)).memory
    assert (begun.median_mib, begun.upper_mib) == (plain.median_mib, plain.upper_mib)
    more = predict_on_t4(runs(12_000, ended=False, steady=False)).memory
    assert more.upper_mib == pytest.approx(12_000 * (1 + RUN_TOLERANCE), abs=1)
    steady = predict_on_t4(runs(4000, ended=False, steady=True)).memory
    assert steady.median_mib == 4000


def test_other_sizes_and_models_are_other_jobs() -> None:
    calibration = runs(5000, batch=32, before=runs(5000, name="other"))
    assert predict_on_t4(calibration).memory.learned_runs == 0
    size = asked().reserved_mib
    assert find_history(calibration, T4.name, Precision.FP32, NAME, size) is None
    assert find_history(runs(5000), T4.name, Precision.FP32, NAME, size) is not None
    assert find_history(runs(5000), T4.name, Precision.BF16_MIXED, NAME, size) is None


RUN = runs(5000)


@pytest.mark.parametrize(
    ("earlier", "later", "is_another"),
    [
        pytest.param(RUN, runs(5000), False, id="the same"),
        pytest.param(RUN, runs(5010), False, id="as good as the same"),
        pytest.param(RUN, runs(5000, 5010), True, id="one more run"),
        pytest.param(RUN, runs(5600), True, id="more memory"),
        pytest.param(RUN, runs(4400), True, id="less"),
        pytest.param(RUN, runs(5000, out_of_memory=True), True, id="as much was not enough"),
        pytest.param(RUN, runs(5000, ended=False, steady=False), True, id="as much so far"),
        pytest.param(RUN, runs(5001, before=runs(5000), ended=False, steady=False), True, id="one more that goes on"),
        pytest.param(RUN, Calibration(), True, id="none"),
        pytest.param(runs(5000, out_of_memory=True), runs(5010, out_of_memory=True), False, id="a death"),
        pytest.param(runs(5000, out_of_memory=True), runs(5600, out_of_memory=True), True, id="a larger death"),
    ],
)
def test_the_fingerprint_changes_with_the_run_history(
    earlier: Calibration, later: Calibration, is_another: bool
) -> None:
    def fingerprint_of(calibration: Calibration) -> str:
        found = fingerprint(find_history(calibration, T4.name, Precision.FP32, NAME, asked().reserved_mib))
        assert predict_on_t4(calibration).memory.learned_gist == found, "a prediction holds its fingerprint"
        return found

    assert is_equivalent(fingerprint_of(later), fingerprint_of(earlier)) is not is_another


@given(st.lists(st.floats(0.98, 1.02), min_size=6, max_size=30), st.floats(1000.0, 40_000.0))
def test_runs_within_the_tolerance_have_equivalent_fingerprints(factors: list[float], centre: float) -> None:
    """Regression: at the edge of a step every other run had each waiting job of its kind predicted anew."""
    seen = [factor * centre for factor in factors]
    fingerprints = []
    for last in range(PER_MODEL, len(seen)):
        kept, begun = seen[last - PER_MODEL : last], seen[last]
        recalled = RunHistory(observed=3, runs=3, deaths=0, peak_mib=max(kept), so_far_mib=begun, least_mib=0.0)
        fingerprints += [fingerprint(recalled), fingerprint(msgspec.structs.replace(recalled, so_far_mib=0.0))]
    assert all(is_equivalent(one, fingerprints[0]) for one in fingerprints)


def test_deaths_raise_the_bound_and_then_remove_trust() -> None:
    plain = predict_on_t4(Calibration()).memory
    once = predict_on_t4(runs(6000, out_of_memory=True)).memory
    assert once.upper_mib == max(plain.upper_mib, round(OOM_FACTOR * 6000))
    assert once.trusted
    calibration = runs(*[6000] * MAX_OOM_DEATHS, out_of_memory=True)
    assert not predict_on_t4(calibration).memory.trusted
    message = predict(features(), Training(batch_size=64), [T4], calibration, NAME).message
    assert (
        "runs alone on Tesla T4, because earlier runs of this model (other jobs' too) died of memory there" in message
    )
    after = predict_on_t4(runs(7000, before=calibration)).memory
    assert after.trusted, "another run succeeded with more"
    assert after.upper_mib == pytest.approx(7000 * (1 + RUN_TOLERANCE), abs=1)


def test_after_a_death_on_most_of_a_gpu_the_job_runs_alone() -> None:
    """Regression: the bound was raised above all GPUs and still trusted, so that the job waited for ever."""
    within = predict_on_t4(runs(0.6 * T4.memory_mib, out_of_memory=True)).memory
    assert within.trusted
    beyond = predict_on_t4(runs(0.7 * T4.memory_mib, out_of_memory=True)).memory
    assert beyond.upper_mib > T4.memory_mib
    assert not beyond.trusted


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_death_with_a_whole_gpu_excludes_the_product(is_strict: bool) -> None:
    """Regression: a job that had a whole GPU, and died of its memory, was given another one like it, for ever."""
    calibration = runs(0.96 * T4.memory_mib, out_of_memory=True)
    for deaths in (1, MAX_OOM_DEATHS):
        refused = predict_on_t4(calibration, is_strict=is_strict).memory
        assert refused.trusted, "placement uses the bound"
        assert refused.upper_mib > T4.memory_mib, "more than such a GPU has"
        assert refused.learned_runs == deaths
        calibration = runs(T4.memory_mib, before=calibration, out_of_memory=True)
    gpus = [T4, find_product("A100-SXM4-40GB")]
    answer = predict(features(), Training(batch_size=64), gpus, calibration, NAME, is_strict=is_strict)
    assert "does not fit Tesla T4, where a run of this model (maybe another job's) died of memory" in answer.message
    elsewhere = answer.products[1].memory
    assert elsewhere.upper_mib < gpus[1].memory_mib
    assert elsewhere.learned_runs == 0


DAY = 86_400.0
WHOLE = 0.96 * T4.memory_mib


def deaths(*namespaces: str, before: Calibration | None = None, peak_mib: float = WHOLE) -> Calibration:
    for namespace in namespaces:
        before = runs(peak_mib, before=before, out_of_memory=True, namespace=namespace, ended_at=1000)
    return before or Calibration()


@pytest.mark.parametrize(
    ("calibration", "excluded", "open_"),
    [
        pytest.param(deaths("a"), "a", "b", id="one namespace"),
        pytest.param(deaths("a", "a", "a"), "a", "b", id="one namespace three times"),
        pytest.param(deaths("a", "b"), "b", "c", id="two namespaces"),
        pytest.param(deaths("a", "b", "c"), "d", None, id="three namespaces agree"),
        pytest.param(runs(5000, before=deaths("a", "b", "c")), None, "a", id="a completed run there"),
        pytest.param(
            runs(0.5 * T4.memory_mib, out_of_memory=True, namespace="a"), None, "a", id="a death with half of a GPU"
        ),
    ],
)
def test_a_death_with_a_whole_gpu_excludes_its_namespace_until_three_agree(
    calibration: Calibration, excluded: str | None, open_: str | None
) -> None:
    for namespace, is_excluded in ((excluded, True), (open_, False)):
        if namespace is not None:
            memory = predict_on_t4(calibration.for_namespace(namespace)).memory
            assert is_refused(memory, T4) is is_excluded


@pytest.mark.parametrize(
    ("calibration", "raised", "plain"),
    [
        pytest.param(deaths("a", peak_mib=6000), "a", "b", id="one namespace"),
        pytest.param(deaths("a", "b", peak_mib=6000), "b", "c", id="two namespaces"),
        pytest.param(deaths("a", "b", "c", peak_mib=6000), "d", None, id="three namespaces agree"),
        pytest.param(
            deaths("a", before=deaths("b", "c", peak_mib=1000), peak_mib=6000), "a", "d", id="two died with less"
        ),
    ],
)
def test_a_death_raises_the_bound_of_its_namespace_until_three_agree(
    calibration: Calibration, raised: str, plain: str | None
) -> None:
    """Regression: one tenant's job that only printed the message raised the bound of its model for all tenants."""
    upper_mib = predict_on_t4(Calibration()).memory.upper_mib
    for namespace, is_raised in ((raised, True), (plain, False)):
        if namespace is not None:
            memory = predict_on_t4(calibration.for_namespace(namespace)).memory
            assert (memory.upper_mib >= OOM_FACTOR * 6000 > upper_mib) is is_raised


@pytest.mark.parametrize("peak_mib", [6000, WHOLE], ids=["part of a GPU", "a whole GPU"])
def test_deaths_of_one_namespace_change_nothing_for_others(peak_mib: float) -> None:
    """Regression: three of them displaced the measured peaks of all other tenants, and moved the line."""
    measured = runs(2000, batch=16, before=runs(3000, batch=32, before=runs(5000)))
    (before,), (after,) = measured.stacks, deaths("a", "a", "a", before=measured, peak_mib=peak_mib).stacks
    assert (after.slope, after.intercept_mib, after.reaches) == (before.slope, before.intercept_mib, before.reaches)
    assert [row for row in after.rows if not row.namespace] == before.rows
    calibration = deaths("a", "a", "a", before=measured, peak_mib=peak_mib).for_namespace("b")
    assert predict_on_t4(calibration).memory.median_mib == predict_on_t4(measured).memory.median_mib


def test_after_a_day_the_job_may_run_alone_on_the_largest_gpu() -> None:
    a100 = find_product("A100-SXM4-40GB")
    calibration = deaths("a")

    def found(now: float, *gpus: GpuProduct) -> MemoryPrediction:
        answer = predict(features(), Training(batch_size=64), gpus, calibration.for_namespace("a"), NAME, now=now)
        return answer.products[0].memory

    assert is_refused(found(1000 + DAY - 1, T4), T4)
    assert not is_refused(found(1000 + DAY, T4), T4)
    assert not found(1000 + DAY, T4).trusted, "it runs alone"
    assert is_refused(found(1000 + DAY, T4, a100), T4), "a larger GPU is tried first"


def test_a_smaller_peak_on_another_product_disproves_an_exclusion() -> None:
    a100 = find_product("A100-SXM4-40GB")
    expected = run_prediction_of(asked(), NAME, a100.memory_mib, a100)
    measured = RunMeasurement(peak_mib=9000, capacity_mib=a100.memory_mib)
    stack = Stack(product=a100.name, precision=Precision.FP32)
    calibration = observe(deaths("a"), stack, expected, measured, shipped()).for_namespace("a")
    memory = predict_on_t4(calibration).memory
    assert not is_refused(memory, T4)
    assert not memory.trusted


def test_a_job_that_fitted_once_is_not_excluded_by_a_death() -> None:
    calibration = runs(0.96 * T4.memory_mib, before=runs(0.9 * T4.memory_mib), out_of_memory=True)
    assert not predict_on_t4(calibration).memory.trusted, "it runs alone again"


def test_a_job_with_a_measured_peak_is_never_refused_there() -> None:
    """Regression: a tenth more than the peak of a run that took nearly the whole GPU was more than any such GPU has."""
    for peak in (0.9 * T4.memory_mib, 0.97 * T4.memory_mib):
        found = predict_on_t4(runs(peak)).memory
        assert found.upper_mib > 0.95 * T4.memory_mib
        assert (found.trusted, found.learned_runs) == (False, 1)
    assert predict_on_t4(runs(0.85 * T4.memory_mib)).memory.trusted
    message = predict(features(), Training(batch_size=64), [T4], runs(0.9 * T4.memory_mib), NAME).message
    assert "because earlier runs of this model (other jobs' too) died of memory there, or took nearly all" in message


@pytest.mark.parametrize(
    ("predicted", "ran", "alone"),
    [
        pytest.param((9000, 14_000), False, False, id="the bound fits"),
        pytest.param((14_000, 14_700), False, True, id="only the median fits"),
        pytest.param((14_700, 15_000), False, False, id="nothing fits, so that placement refuses it"),
        pytest.param((14_700, 15_000), True, True, id="nothing fits, but it ran there"),
        pytest.param((9000, 14_000), True, False, id="it ran there, and the bound fits"),
    ],
)
def test_a_job_runs_alone_if_only_its_bound_exceeds_the_gpu(predicted: tuple[int, int], ran: bool, alone: bool) -> None:
    median, upper = predicted
    memory = msgspec.structs.replace(predict_on_t4(Calibration()).memory, median_mib=median, upper_mib=upper)
    calibration = RunHistory(observed=1, runs=1, deaths=0, peak_mib=0, so_far_mib=9000, least_mib=0) if ran else None
    assert runs_alone(memory, T4, calibration) is alone


def test_strict_trust_needs_a_measured_stack() -> None:
    assert predict_on_t4(Calibration()).memory.trusted
    assert not predict_on_t4(Calibration(), is_strict=True).memory.trusted
    assert predict_on_t4(runs(5000), is_strict=True).memory.trusted
    assert not predict_on_t4(runs(5000), batch=32, is_strict=True).memory.trusted
    three = runs(2000, batch=16, before=runs(3000, batch=32, before=runs(5000)))
    assert predict_on_t4(three, batch=48, is_strict=True).memory.trusted
    assert predict_on_t4(three, batch=48, is_strict=True).memory.learned_jobs == 3
    a100 = predict(features(), Training(batch_size=64), [find_product("A100-SXM4-40GB")], Calibration(), is_strict=True)
    assert a100.products[0].memory.trusted, "the shipped model was measured there"


def test_a_first_run_has_more_room_than_later_runs() -> None:
    a100 = find_product("A100-SXM4-40GB")

    def on_a100(**how: bool) -> Prediction:
        return predict(features(), Training(batch_size=64), [a100], Calibration(), NAME, **how)

    plain, first = on_a100().products[0].memory, on_a100(is_strict=True).products[0].memory
    assert first.upper_mib == math.ceil(FIRST_RUN_FACTOR * plain.upper_mib)
    assert first.upper_unenforced_mib == math.ceil(FIRST_RUN_FACTOR_UNENFORCED * plain.upper_mib)
    assert not plain.upper_unenforced_mib
    assert (first.median_mib, first.trusted) == (plain.median_mib, True)
    assert first.class_upper_mib == plain.class_upper_mib, "where the peak lies does not depend on what is reserved"
    assert (
        f"its first run on {a100.name} counts with {FIRST_RUN_FACTOR:g} times the bound"
        in on_a100(is_strict=True).message
    )
    assert f"with {FIRST_RUN_FACTOR_UNENFORCED:g} times under time-slicing" in on_a100(is_strict=True).message
    assert "first run" not in on_a100().message
    assert predict_on_t4(runs(5000), is_strict=True).memory == predict_on_t4(runs(5000)).memory


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        pytest.param((9000, 10_000), (10_900, True), id="more fits"),
        pytest.param((9000, 14_500), (14_500, False), id="alone where more does not fit"),
        pytest.param((15_000, 16_000), (16_000, True), id="refused as ever where the median does not fit"),
    ],
)
def test_a_first_run_whose_room_exceeds_the_gpu_runs_alone(
    predicted: tuple[int, int], expected: tuple[int, bool]
) -> None:
    assert T4.memory_mib == 15_360
    median, upper = predicted
    memory = msgspec.structs.replace(predict_on_t4(Calibration()).memory, median_mib=median, upper_mib=upper)
    found = first_run_bound(memory, T4)
    assert (found.upper_mib, found.trusted) == expected


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    ("runs_before", "expected"),
    [
        pytest.param([], (0, False), id="never ran"),
        pytest.param([{"steady": False, "ended": False}], (0, False), id="too short to show its peak or correct it"),
        pytest.param([{}], (1, True), id="has shown its peak"),
    ],
)
def test_a_job_is_not_refused_for_a_rare_peak(
    is_strict: bool, runs_before: list[dict[str, Any]], expected: tuple[int, bool]
) -> None:
    """Regression: after a run of two minutes the bound counted as it was, which no such GPU has."""
    a100 = find_product("A100-SXM4-40GB")
    training = Training(batch_size=112, optimizer=Optimizer.SGD_MOMENTUM)
    model = store.features(CatalogModel(name="timm/resnet152s"), training)
    assert model is not None
    stack, calibration = Stack(product=a100.name, precision=Precision.FP32), Calibration()
    job = prepare(model, training)
    assert isinstance(job, PredictionContext)
    for run in runs_before:
        measured = RunMeasurement(peak_mib=29_000, capacity_mib=a100.memory_mib, **run)
        calibration = observe(
            calibration, stack, run_prediction_of(job, NAME, a100.memory_mib, a100), measured, shipped()
        )
    answer = predict(model, training, [a100], calibration, NAME, is_strict=is_strict)
    memory = answer.products[0].memory
    assert memory.median_mib < a100.memory_mib
    assert (memory.learned_runs, memory.trusted) == expected
    assert answer.message.startswith("may not fit NVIDIA A100-SXM4-40GB (median ") is not memory.trusted


@pytest.mark.parametrize(("batch", "is_refused"), [(256, False), (512, True)])
def test_a_job_far_beyond_a_gpu_is_refused_there_although_nothing_was_measured(batch: int, is_refused: bool) -> None:
    """Regression: a job that takes nine times a GPU's memory got one of its own, until it died."""
    small = find_product("NVIDIA GeForce RTX 2080")
    answer = predict(features(), Training(batch_size=batch), [small], None, NAME, is_strict=True)
    memory = answer.products[0].memory
    assert memory.median_mib > small.memory_mib
    assert memory.trusted is is_refused
    assert ("may not fit" in answer.message) is not is_refused


def test_the_message_names_the_source_of_the_calibration() -> None:
    found = predict(features(), Training(batch_size=64), [T4], runs(5000), NAME)
    assert found.reason != "Uncalibrated"
    assert "memory on Tesla T4 is calibrated from 1 run of the same training" in found.message
    alone = predict(features(), Training(batch_size=64), [T4], Calibration(), NAME, is_strict=True)
    assert alone.reason == "Uncalibrated"
    assert "runs alone on Tesla T4 until enough jobs like it were measured there" in alone.message


def test_measured_activity_replaces_the_estimate() -> None:
    plain = predict_on_t4(Calibration()).activity
    found = predict_on_t4(runs(5000, util=0.5, sm_active=0.2)).activity
    assert (found.gpu_util_percent.median, found.sm_active_ratio.median) == (50, 0.2)
    assert found.dram_active_ratio == plain.dram_active_ratio
    assert predict_on_t4(runs(5000)).activity == plain


def test_other_sizes_of_a_model_scale_its_activity() -> None:
    plain = predict_on_t4(Calibration()).activity
    other = predict_on_t4(Calibration(), batch=32).activity
    half, third = other.gpu_util_percent.median / 200, other.sm_active_ratio.median / 3
    found = predict_on_t4(runs(5000, batch=32, util=half, sm_active=third)).activity
    assert found.gpu_util_percent.median == pytest.approx(plain.gpu_util_percent.median / 2, rel=0.01)
    assert found.gpu_util_percent.upper == pytest.approx(plain.gpu_util_percent.upper / 2, rel=0.01)
    assert found.sm_active_ratio.median == pytest.approx(plain.sm_active_ratio.median / 3, rel=0.01)
    assert found.dram_active_ratio == plain.dram_active_ratio
    most = predict_on_t4(runs(5000, batch=32, util=1.0, sm_active=1.0)).activity
    assert most.gpu_util_percent.upper <= 100
    assert most.sm_active_ratio.upper <= 1


def test_other_models_scale_activity_of_a_new_model() -> None:
    plain = predict_on_t4(Calibration()).activity.gpu_util_percent.median
    half, calibration = plain / 200, Calibration()
    for number in range(MIN_JOBS):
        assert predict_on_t4(calibration).activity.gpu_util_percent.median == plain
        calibration = runs(5000, name=f"other {number}", before=calibration, util=half)
    assert predict_on_t4(calibration).activity.gpu_util_percent.median == pytest.approx(plain / 2, rel=0.01)
    repeated = Calibration()
    for _ in range(MIN_JOBS):
        repeated = runs(5000, name="other", before=repeated, util=half)
    assert predict_on_t4(repeated).activity.gpu_util_percent.median == plain
    as_predicted = predict_on_t4(Calibration(), batch=32).activity.gpu_util_percent.median / 100
    own = runs(5000, batch=32, before=calibration, util=as_predicted)
    assert predict_on_t4(own).activity.gpu_util_percent.median == pytest.approx(plain, rel=0.01)


def test_an_idle_run_scales_activity_within_limits() -> None:
    """Regression: one run at a thousandth of what was predicted spoke for all other sizes as it was."""
    plain = predict_on_t4(Calibration()).activity
    slept = predict_on_t4(runs(5000, batch=32, util=0.001, sm_active=0.0)).activity
    assert slept.gpu_util_percent.median == pytest.approx(MIN_SCALE * plain.gpu_util_percent.median)
    assert slept.sm_active_ratio.median == pytest.approx(MIN_SCALE * plain.sm_active_ratio.median)
    little = msgspec.structs.replace(run_prediction_of(asked(32), NAME, 0, T4), util=0.01)
    full = RunMeasurement(peak_mib=5000, capacity_mib=T4.memory_mib, util=1.0)
    calibration = observe(Calibration(), STACK, little, full, shipped())
    assert activity_scale(calibration, T4.name, Precision.FP32, NAME).util == MAX_SCALE


def test_one_idle_run_of_three_changes_nothing() -> None:
    plain = predict_on_t4(Calibration(), batch=32).activity.gpu_util_percent.median / 100
    calibration = Calibration()
    for util in (plain / 2, 0.001, plain / 2):
        calibration = runs(5000, batch=32, before=calibration, util=util)
    assert activity_scale(calibration, T4.name, Precision.FP32, NAME).util == pytest.approx(0.5, rel=0.01)
