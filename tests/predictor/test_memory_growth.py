"""The memory bound grows with the batch, over the models of the feature store.

The line grows with the batch. The trees are step functions, so that the bound may fall by a hundredth from one batch to
the next. The stratum, whose factors differ more, falls in one of a thousand steps at most.
"""

from itertools import pairwise
from typing import NamedTuple

import pytest
from carpool_core.products import find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.values import Precision
from carpool_predictor.catalog import store
from carpool_predictor.features import MAX_EXTRAPOLATION
from carpool_predictor.predict import PredictionContext, prepare

A100 = find_product("A100-SXM4-40GB")
MOST_FALL = 0.015
"""Largest share by which the bound may fall from one batch to the next."""
GROWTH = 1.5
"""Ratio of batches from which the bound never falls."""


class Bound(NamedTuple):
    batch_size: int
    stratum: int
    upper_mib: int


def bounds(features: ModelFeatures, growth: float) -> list[Bound]:
    """Return bounds of ascending batches inside the training data; each batch is `growth` times the previous one."""
    found, batch = list[Bound](), max(1, -(-features.steps[0].batch_size // MAX_EXTRAPOLATION))
    while batch <= MAX_EXTRAPOLATION * features.steps[-1].batch_size:
        training = Training(batch_size=batch, optimizer=features.optimizer, precision=features.precision)
        job = prepare(features, training)
        assert isinstance(job, PredictionContext)
        if job.correction.inside:
            found.append(Bound(batch, job.correction.stratum, job.memory_on(A100).upper_mib))
        batch = max(batch + 1, int(batch * growth))
    return found


def features_of(name: str, precision: Precision) -> ModelFeatures:
    features = store.shipped(precision).traced(name)
    assert features is not None
    return features


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED])
@pytest.mark.parametrize(
    ("growth", "every", "most_fall", "falling_share"),
    [
        pytest.param(GROWTH, 3, 0.0, 0.0, id="much larger batches"),
        pytest.param(1.0, 60, MOST_FALL, 0.005, id="the next batch"),
    ],
)
def test_the_bound_grows_with_the_batch(
    growth: float, every: int, most_fall: float, falling_share: float, precision: Precision
) -> None:
    falls = calmer = total = 0
    for name in sorted(store.shipped(precision).document.entries)[::every]:
        for one, larger in pairwise(bounds(features_of(name, precision), growth)):
            calmer += larger.stratum < one.stratum
            assert larger.upper_mib >= (1 - most_fall) * one.upper_mib, (name, one, larger)
            falls += larger.upper_mib < one.upper_mib
            total += 1
    assert total > 500
    assert falls <= falling_share * total
    assert calmer <= 0.001 * total
