"""A step traced on meta tensors has the numbers of fake tensors, and optimizers differ by their state."""

import pytest
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer

pytest.importorskip("torch")

from carpool_predictor.catalog.recipes import Recipe, recipe_of
from carpool_predictor.tracing.models import trace_under
from carpool_predictor.tracing.operators import OperatorCache
from carpool_predictor.tracing.step import fake_mode, meta_mode
from torch import nn

TRAINING = Training(batch_size=8, optimizer=Optimizer.SGD_MOMENTUM)


@pytest.mark.parametrize("name", ["timm/test_resnet", "timm/test_vit", "timm/test_efficientnet"])
def test_meta_tensors_count_as_fake_ones(name: str) -> None:
    recipe = recipe_of(CatalogModel(name=name))
    meta, fake = (trace_under(mode, recipe, TRAINING, (4, 8)) for mode in (meta_mode(), fake_mode()))
    assert meta == fake
    for step in meta.steps:
        assert step.activation_bytes <= step.peak_bytes <= step.reserved_bytes
        assert 0 < step.largest_bytes < step.peak_bytes
        assert step.unfolded_bytes > 0


def test_optimizers_differ_by_their_state_and_share_operator_results() -> None:
    recipe, operators = Recipe("mostly weights", lambda: nn.Linear(4096, 1024), (4096,)), OperatorCache()
    peaks = {
        optimizer: trace_under(meta_mode(), recipe, Training(optimizer=optimizer), (8,), operators).steps[0].peak_bytes
        for optimizer in Optimizer
    }
    assert peaks[Optimizer.SGD] < peaks[Optimizer.SGD_MOMENTUM] < peaks[Optimizer.RMSPROP] < peaks[Optimizer.ADAM]
    for optimizer, peak in peaks.items():
        assert trace_under(fake_mode(), recipe, Training(optimizer=optimizer), (8,)).steps[0].peak_bytes == peak
