"""The shipped activity model and its trees."""

import math
from typing import Any

import msgspec
import pytest
from carpool_core.products import PRODUCTS, GpuProduct, find_product
from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
from carpool_core.resources.job import Training
from carpool_core.values import Precision
from carpool_predictor.features import MalformedError, cost_at
from carpool_predictor.models import roofline
from carpool_predictor.models.activity import Answer, activity_on
from carpool_predictor.models.trees import Forest
from hypothesis import given, settings
from hypothesis import strategies as st

A100 = find_product("A100-SXM4-40GB")


def features(flops: float = 4e11, moved: float = 1.2e10, kernels: int = 120, batch: int = 32) -> ModelFeatures:
    step = TracedStep(
        batch_size=batch, peak_bytes=4 * 10**9, activation_bytes=3 * 10**9, flops=flops, bytes_moved=moved,
        kernels=kernels,
    )  # fmt: skip
    return ModelFeatures(
        parameters=5_000_000, trainable_parameters=5_000_000, parameter_bytes=20_000_000,
        layers=LayerCounts(convolution=12, linear=1, activation=12, normalization=12, other=2), steps=[step],
    )  # fmt: skip


def ask(model: ModelFeatures, product: GpuProduct = A100, batch: int = 32) -> Answer:
    return activity_on(model, cost_at(model, batch), Training(batch_size=batch), product)


def test_activity_follows_the_work() -> None:
    heavy, light = ask(features()).activity, ask(features(flops=1e9, moved=1e8)).activity
    assert heavy.gpu_util_percent.median > 85
    assert light.gpu_util_percent.median < 60
    assert light.sm_active_ratio.median < heavy.sm_active_ratio.median


def test_outside_the_training_data_the_roofline_predicts() -> None:
    strange = features(flops=1e17, moved=1e14, kernels=10**6)
    plain = roofline.activity_on(cost_at(strange, 32), A100, Precision.FP32, convolutional=True)
    assert ask(strange) == Answer(roofline.intervals(plain), inside=False)


@settings(deadline=None)  # wall-clock time varies on a shared machine
@given(st.floats(1, 1e18), st.floats(1, 1e15), st.integers(1, 10**6), st.integers(1, 4096), st.sampled_from(PRODUCTS))
def test_intervals_are_ordered_and_within_their_units(
    flops: float, moved: float, kernels: int, batch: int, product: GpuProduct
) -> None:
    found = ask(features(flops, moved, kernels, batch), product, batch).activity
    assert found.sm_occupancy_ratio is not None
    for interval, unit in (
        (found.gpu_util_percent, 100), (found.sm_active_ratio, 1), (found.dram_active_ratio, 1),
        (found.sm_occupancy_ratio, 1),
    ):  # fmt: skip
        assert 0 <= interval.lower <= interval.median <= interval.upper <= unit


def test_occupancy_lies_below_activity() -> None:
    found = ask(features()).activity
    assert found.sm_occupancy_ratio is not None
    assert found.sm_occupancy_ratio.median < found.sm_active_ratio.median


STUMP = Forest(
    roots=[0], feature=[0, -1, -1], threshold=[0.5, 0, 0], left=[1, 0, 0], right=[2, 0, 0], value=[0, 10, 20]
)


def test_a_tree_predicts_its_leaf() -> None:
    STUMP.check(1)
    assert [STUMP.predict([x]) for x in (0.5, 0.6)] == [10, 20]


@pytest.mark.parametrize(
    "fields",
    [
        {"left": [0, 0, 0]},
        {"right": [9, 0, 0]},
        {"feature": [5, -1, -1]},
        {"roots": [3]},
        {"value": [1]},
        {"value": [0, 1, math.inf]},
    ],
    ids=["loop", "beyond", "unknown feature", "no root", "short", "infinite"],
)
def test_a_forest_that_could_fail_or_never_end_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedError):
        msgspec.structs.replace(STUMP, **fields).check(1)
