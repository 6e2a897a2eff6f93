"""Steps on meta and on fake tensors have equal numbers; optimizers and adapters differ by their state."""

import pytest
import torch
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer

pytest.importorskip("torch")

from carpool_predictor.catalog.recipes import Recipe, recipe_of
from carpool_predictor.tracing.models import trace_under
from carpool_predictor.tracing.operators import OperatorCache
from carpool_predictor.tracing.step import fake_mode, meta_mode
from small_models import is_same
from torch import Tensor, nn

TRAINING = Training(batch_size=8, optimizer=Optimizer.SGD_MOMENTUM)


@pytest.mark.parametrize("name", ["timm/test_resnet", "timm/test_vit", "timm/test_efficientnet"])
def test_meta_tensors_count_as_fake_ones(name: str) -> None:
    recipe = recipe_of(CatalogModel(name=name))
    meta, fake = (trace_under(mode, recipe, TRAINING, (4, 8)) for mode in (meta_mode(), fake_mode()))
    assert is_same(meta, fake)
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


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank adapter, which its constructor moves as `peft` does."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        down = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float64)
        self.adapter = nn.Sequential(down, nn.Linear(rank, base.out_features, bias=False)).to(
            base.weight.device, torch.float32
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def test_an_adapter_costs_no_state_for_frozen_weights() -> None:
    """Regression: `Module.to` in a constructor failed with "Couldn't swap Linear.weight"."""
    recipe = Recipe("adapted", lambda: Adapted(nn.Linear(1024, 1024), 4), (1024,))
    whole = Recipe("whole", lambda: nn.Linear(1024, 1024), (1024,))
    training = Training(optimizer=Optimizer.ADAM)
    found = [trace_under(mode, recipe, training, (1, 2)) for mode in (meta_mode(), fake_mode())]
    assert is_same(*found)
    assert (found[0].trainable_parameters, found[0].parameters) == (2 * 4 * 1024, 2 * 4 * 1024 + 1024 * 1025)
    assert found[0].parameter_bytes == 4 * found[0].parameters
    assert found[0].steps[0].peak_bytes < 0.5 * trace_under(meta_mode(), whole, training, (1, 2)).steps[0].peak_bytes
