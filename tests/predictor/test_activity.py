"""The shipped activity model: what it answers, and what it refuses to load."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from carpool_core.products import PRODUCTS, find_product
from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
from carpool_core.resources.job import Training
from carpool_core.values import Precision
from carpool_predictor import roofline
from carpool_predictor.activity import activity_on, occupancy_on, read_model, shipped
from carpool_predictor.activity_trees import ArtifactError, Forest
from carpool_predictor.interpolation import cost_at
from hypothesis import given
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


def test_a_heavy_network_keeps_the_gpu_busy_and_a_light_one_does_not() -> None:
    heavy = activity_on(features(), Training(batch_size=32), A100)
    light = activity_on(features(flops=1e9, moved=1e8), Training(batch_size=32), A100)
    assert heavy.gpu_util_percent.median > 85
    assert light.gpu_util_percent.median < 60
    assert light.sm_active_ratio.median < heavy.sm_active_ratio.median


def test_another_product_is_less_sure() -> None:
    own, other = (activity_on(features(), Training(batch_size=32), find_product(n)) for n in ("SXM4-40GB", "A30"))
    assert other.sm_active_ratio.upper - other.sm_active_ratio.lower > 0
    assert own != other


def test_outside_what_was_learned_the_roofline_answers() -> None:
    strange = features(flops=1e17, moved=1e14, kernels=10**6)
    training = Training(batch_size=32)
    plain = roofline.activity_on(cost_at(strange, 32), A100, Precision.FP32, convolutional=True)
    assert activity_on(strange, training, A100) == roofline.intervals(plain)[0]
    assert occupancy_on(strange, training, A100) is None


@given(st.floats(1, 1e18), st.floats(1, 1e15), st.integers(1, 10**6), st.integers(1, 4096), st.sampled_from(PRODUCTS))
def test_intervals_are_ordered_and_within_their_units(
    flops: float, moved: float, kernels: int, batch: int, product: Any
) -> None:
    found = activity_on(features(flops, moved, kernels, batch), Training(batch_size=batch), product)
    for interval, unit in (
        (found.gpu_util_percent, 100), (found.sm_active_ratio, 1), (found.dram_active_ratio, 1)
    ):  # fmt: skip
        assert 0 <= interval.lower <= interval.median <= interval.upper <= unit


def test_occupancy_lies_below_activity() -> None:
    training = Training(batch_size=32)
    occupancy = occupancy_on(features(), training, A100)
    assert occupancy is not None
    assert occupancy.median < activity_on(features(), training, A100).sm_active_ratio.median


def test_predicting_imports_neither_numpy_nor_lightgbm() -> None:
    script = (
        "import sys\nfrom carpool_predictor.activity import shipped\nshipped()\n"
        "assert not {'numpy', 'lightgbm', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def changed(**fields: Any) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(shipped()), **fields})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (msgspec.json.encode(shipped())[:-100], "cannot be read"),
        (b"\x80\x04\x95", "cannot be read"),
        (changed(format=2), "format 2, expected 1"),
        (changed(features=["a"]), "this version's features"),
        (changed(low=[0.0]), "hull lacks features"),
    ],
    ids=["truncated", "pickle", "newer", "other features", "short hull"],
)
def test_a_broken_artifact_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        read_model(content)


STUMP = Forest(
    roots=[0], feature=[0, -1, -1], threshold=[0.5, 0, 0], left=[1, 0, 0], right=[2, 0, 0], value=[0, 10, 20]
)


def test_a_tree_is_walked_to_its_leaf() -> None:
    STUMP.check(1)
    assert [STUMP.predict([x]) for x in (0.5, 0.6)] == [10, 20]


@pytest.mark.parametrize(
    "fields",
    [{"left": [0, 0, 0]}, {"right": [9, 0, 0]}, {"feature": [5, -1, -1]}, {"roots": [3]}, {"value": [1]}],
    ids=["loop", "beyond", "unknown feature", "no root", "short"],
)
def test_a_forest_that_could_fail_or_never_end_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError):
        msgspec.structs.replace(STUMP, **fields).check(1)
