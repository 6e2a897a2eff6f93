"""The shipped step-time model."""

import pytest
from carpool_core.products import PRODUCTS, GpuProduct, find_product
from carpool_core.values import Precision
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
