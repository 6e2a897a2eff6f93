"""The shipped step-time model, and its scale by measured steps."""

import math

import pytest
from carpool_core.products import PRODUCTS, GpuProduct, find_product
from carpool_core.resources.prediction import Interval
from carpool_core.values import Precision
from carpool_predictor.calibration.colocation import MAX_RATIO, SoloRecord, solo_family, solo_name
from carpool_predictor.calibration.scales import SAME_JOB, StepTimeScale, scale_step_time, step_time_scale
from carpool_predictor.features import StepCost
from carpool_predictor.models.step_time import shipped, step_time_on
from hypothesis import given
from hypothesis import strategies as st

COST = StepCost(peak_bytes=0, reserved_bytes=0, flops=1e13, bytes_moved=1e11, kernels=1000)
A100 = find_product("A100-SXM4-40GB")


def test_a_step_takes_as_long_as_the_formula_says() -> None:
    found = step_time_on(COST, A100, Precision.FP32, convolutional=False)
    learned = shipped().learned
    expected = 1e13 / (19.5e12 * learned.matrix) + 1e11 / (1555e9 * learned.bandwidth) + 1000 * learned.kernel_s
    assert found.seconds.median == pytest.approx(expected, rel=1e-5)
    assert found.seconds.lower < found.seconds.median < found.seconds.upper
    assert found.inside


@pytest.mark.parametrize(
    ("product", "precision", "convolutional", "inside"),
    [
        pytest.param("A100-SXM4-40GB", Precision.BF16_MIXED, False, False, id="tensor cores"),
        pytest.param("A100-SXM4-40GB", Precision.FP32, True, False, id="TF32 by itself"),
        pytest.param("A100-SXM4-40GB", Precision.TF32, False, False, id="TF32 on demand"),
        pytest.param("V100-SXM2-16GB", Precision.FP32, True, True, id="no TF32 before Ampere"),
        pytest.param("V100-SXM2-16GB", Precision.TF32, False, True, id="nor on demand"),
        pytest.param("V100-SXM2-16GB", Precision.BF16_MIXED, False, True, id="no BF16 before Ampere"),
    ],
)
def test_tensor_cores_widen_the_interval(product: str, precision: Precision, convolutional: bool, inside: bool) -> None:
    found = step_time_on(COST, find_product(product), precision, convolutional=convolutional)
    plain = step_time_on(COST, find_product(product), Precision.FP32, convolutional=False)
    assert found.inside is inside
    assert (found == plain) is inside
    if not inside:
        assert found.seconds.median < plain.seconds.median
        assert found.seconds.upper / found.seconds.median > 1.5 * plain.seconds.upper / plain.seconds.median


@pytest.mark.parametrize(
    ("product", "share"),
    [
        pytest.param("GeForce RTX 4090", 1.0, id="GeForce"),
        pytest.param("H200", 0.45, id="Hopper"),
        pytest.param("B200", 0.45, id="newer in data centers"),
        pytest.param("A100-SXM4-40GB", 0.8, id="others"),
    ],
)
def test_tensor_cores_reach_a_share_of_their_peak(product: str, share: float) -> None:
    gpu = find_product(product)
    found = step_time_on(COST._replace(flops=1e15), gpu, Precision.BF16_MIXED, convolutional=False).seconds.median
    expected = 1e15 / (gpu.tensor_tflops * 1e12 * share) + 1e11 / (gpu.memory_bandwidth_gb_s * 1e9) + 1000 * 3e-6
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_processor_limits_a_step_of_many_small_kernels() -> None:
    small = COST._replace(flops=1e10, bytes_moved=1e8)
    found = step_time_on(small, A100, Precision.FP32, convolutional=False)
    assert found.seconds.median == pytest.approx(0.04)
    assert not found.inside


@given(
    st.floats(0, 1e18), st.floats(0, 1e15), st.floats(1, 1e6), st.sampled_from(PRODUCTS), st.sampled_from(Precision),
    st.booleans(),
)  # fmt: skip
def test_times_are_positive_and_ordered(
    flops: float, moved: float, kernels: float, product: GpuProduct, precision: Precision, convolutional: bool
) -> None:
    cost = StepCost(peak_bytes=0, reserved_bytes=0, flops=flops, bytes_moved=moved, kernels=kernels)
    found = step_time_on(cost, product, precision, convolutional=convolutional).seconds
    assert 0 < found.lower <= found.median <= found.upper


def alone(name: str, family: str, ratio: float, product: str = A100.name) -> SoloRecord:
    """A job that took so many times the predicted 0.1 s a step."""
    return SoloRecord(name, "a", "a", product, False, 0.1 * ratio, family=family, predicted_s=0.1)


def test_steps_of_a_job_that_ran_alone_take_as_long_again() -> None:
    records = [alone("x", "resnet", 3.0), alone("y", "resnet", 1.0), alone("x", "resnet", 9.0, "Tesla T4")]
    found = step_time_scale(records, A100.name, "resnet", "x")
    assert found == StepTimeScale(width=0.0, measured_s=pytest.approx(0.3))
    scaled = scale_step_time(Interval(median=0.2, lower=0.01, upper=1.0), found)  # a later model predicts another time
    assert scaled.median == pytest.approx(0.3)
    assert (scaled.lower, scaled.upper) == (pytest.approx(0.3 / SAME_JOB), pytest.approx(0.3 * SAME_JOB))


def test_other_jobs_follow_their_family_more_than_all_jobs() -> None:
    records = [alone(f"r{n}", "resnet", 3.0) for n in range(3)] + [alone(f"b{n}", "bert", 1.0) for n in range(3)]
    of = {family: step_time_scale(records, A100.name, family, "new") for family in ("resnet", "bert", "vgg")}
    assert 1.0 < of["bert"].factor < of["vgg"].factor < of["resnet"].factor < 3.0
    assert of["resnet"].width < of["vgg"].width < 1.0
    assert all(one.measured_s is None for one in of.values())


def test_the_interval_narrows_with_more_measured_jobs_and_never_below_that_of_one_more_run() -> None:
    shipped_s = Interval(median=0.1, lower=0.05, upper=0.2)
    widths = []
    for jobs in (0, 1, 4, 100):
        scale = step_time_scale([alone(f"r{n}", "resnet", 2.0) for n in range(jobs)], A100.name, "resnet", "new")
        scaled = scale_step_time(shipped_s, scale)
        widths.append(scaled.upper / scaled.median)
    assert widths[0] == 2.0
    assert sorted(widths, reverse=True) == widths
    narrow = scale_step_time(Interval(median=0.1, lower=0.099, upper=0.101), StepTimeScale(2.0, 0.5))
    assert narrow.upper / narrow.median == pytest.approx(SAME_JOB)


def test_a_job_that_sleeps_is_clipped_for_its_family_and_counts_in_full_for_itself() -> None:
    records = [alone("x", "resnet", 1000.0)]
    assert step_time_scale(records, A100.name, "resnet", "x").measured_s == pytest.approx(100.0)
    assert step_time_scale(records, A100.name, "resnet", "y").factor == pytest.approx(math.exp(0.75 * MAX_RATIO))


@pytest.mark.parametrize(
    ("records", "family"),
    [
        pytest.param([], "resnet", id="nothing measured"),
        pytest.param([alone("x", "resnet", 2.0, "Tesla T4")], "resnet", id="another product"),
        pytest.param([alone("y", "", 2.0)], "resnet", id="only jobs of several GPUs"),
        pytest.param([alone("y", "resnet", 2.0)], "", id="a job of several GPUs"),
        pytest.param([SoloRecord("y", "a", "a", A100.name, False, 0.2)], "resnet", id="of an earlier version"),
    ],
)
def test_without_comparable_measurements_the_model_s_step_time_remains(records: list[SoloRecord], family: str) -> None:
    scale = step_time_scale(records, A100.name, family, "x")
    assert scale == StepTimeScale()
    step_s = Interval(median=0.1, lower=0.099, upper=0.101)
    assert scale_step_time(step_s, scale) == step_s


def test_steps_of_a_job_on_several_gpus_belong_to_no_family_and_have_their_own_name() -> None:
    assert (solo_family("resnet", 1, 1), solo_family("resnet", 2, 1), solo_family("resnet", 1, 4)) == ("resnet", "", "")
    assert len({solo_name("x", *size) for size in ((1, 1), (2, 1), (1, 2))}) == 3
