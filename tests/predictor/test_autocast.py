"""Precision: what autocast keeps, casts and leaves, with data and without."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Precision
from carpool_predictor.catalog.recipes import Recipe, recipe_of
from carpool_predictor.features import Sample, TraceError
from carpool_predictor.tracing.autocast import MetaAutocast
from carpool_predictor.tracing.models import trace_recipe
from carpool_predictor.tracing.step import fake_mode, fake_weights, meta_mode, prepare, trace_step
from carpool_predictor.tracing.tracker import Kind
from msgspec.structs import replace
from small_models import Attention, cnn, fake, is_same_step, mlp
from torch import Tensor, nn


def test_mixed_precision_keeps_full_weights_and_smaller_activations() -> None:
    full = trace_step(fake(cnn, Training()), 64)[1].storages.peak.by_kind
    for precision in (Precision.BF16_MIXED, Precision.FP16_MIXED):
        mixed = trace_step(fake(cnn, Training(precision=precision)), 64)[1].storages.peak.by_kind
        assert mixed[Kind.PARAMETER] == full[Kind.PARAMETER]
        assert mixed[Kind.ACTIVATION] < 0.8 * full[Kind.ACTIVATION]


def test_true_bf16_halves_the_weights() -> None:
    full, half = (
        trace_step(fake(mlp, Training(precision=precision)), 4)[1].storages.peak.by_kind[Kind.PARAMETER]
        for precision in (Precision.FP32, Precision.BF16)
    )
    assert half == pytest.approx(full / 2, rel=0.01)


def test_autocast_runs_norms_in_full_precision_as_on_cuda() -> None:
    seen: list[torch.dtype] = []

    def build() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.LayerNorm(64), nn.Linear(64, 10))
        model[2].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        return model

    trace_step(fake(build, Training(precision=Precision.BF16_MIXED)), 4)
    assert seen == [torch.float32]


@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.FP16_MIXED])
@pytest.mark.parametrize("build", [cnn, mlp, Attention])
def test_autocast_on_meta_tensors_equals_pytorchs(build: Callable[[], nn.Module], precision: Precision) -> None:
    training = Training(precision=precision)
    mode = meta_mode()
    with fake_weights(mode):
        model = build()
    bare, _ = trace_step(prepare(model, mode, training, Sample((3, 32, 32))), 16)
    faked, _ = trace_step(fake(build, training), 16)
    # Batch normalization on meta tensors saves its statistics in FP32.
    assert is_same_step(replace(bare, bytes_moved=0), replace(faked, bytes_moved=0))
    assert bare.bytes_moved == pytest.approx(faked.bytes_moved, rel=1e-3)


class Product(nn.Module):
    """A weight and a function that multiplies by it."""

    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32, 32))
        self.multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x.flatten(0, -2), self.weight)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.flatten(0, -2))[0]


MISSED = {
    "RNN": lambda: Recurrent(nn.RNN),
    "RNNCell": lambda: Recurrent(nn.RNNCell),
    "tensordot": lambda: Product(lambda x, w: torch.tensordot(x, w, 1)),
    "inner": lambda: Product(torch.inner),
    "multi_dot": lambda: Product(lambda x, w: torch.linalg.multi_dot([x, w, w])),
    "linalg.matmul": lambda: Product(torch.linalg.matmul),
    "addbmm": lambda: Product(lambda x, w: w.addbmm(x.view(-1, 32, 32), x.view(-1, 32, 32))),
    "conv_tbc": lambda: Product(lambda x, w: torch.conv_tbc(x[None], w[None], w[0])),
    "aten.mm": lambda: Product(torch.ops.aten.mm),
}


@pytest.mark.parametrize("name", MISSED)
def test_an_unlisted_product_falls_back_to_pytorchs_autocast(name: str) -> None:
    """Regression: they stayed in FP32 silently."""
    training, recipe = Training(precision=Precision.BF16_MIXED), Recipe(name, MISSED[name], (32, 32))
    mode = meta_mode()
    with fake_weights(mode):
        model = MISSED[name]()
    with pytest.raises(TraceError, match="not in the list of operators"):
        trace_step(prepare(model, mode, training, Sample((32, 32))), 4)
    with fake_weights(faked := fake_mode()):
        model = MISSED[name]()
    expected, _ = trace_step(prepare(model, faked, training, Sample((32, 32))), 4)
    found = trace_recipe(recipe, training, [4]).steps[0]
    assert (found.peak_bytes, found.bytes_moved) == (expected.peak_bytes, expected.bytes_moved)


def test_a_product_in_cudas_list_only_is_cast() -> None:
    with torch.device("meta"), MetaAutocast(torch.bfloat16):
        assert torch.addr(torch.empty(4, 4), torch.empty(4), torch.empty(4)).dtype is torch.bfloat16


def test_a_weight_that_is_used_twice_is_cast_once() -> None:
    weight = torch.empty(8, 8, requires_grad=True)
    with MetaAutocast(torch.bfloat16):
        first, second = (torch.mm(torch.empty(4, 8), weight) for _ in range(2))
        total = F.mse_loss(first, second)
    assert (first.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    casts = {step[0].next_functions[1][0] for step in ([first.grad_fn], [second.grad_fn]) if step[0] is not None}
    assert len(casts) == 1


@pytest.mark.parametrize("name", ["convnext_femto", "hiera_tiny_224"])
def test_blocks_of_timm_are_recomputed_under_the_same_autocast(name: str) -> None:
    """Regression: blocks were recomputed in other types, which PyTorch refuses, because timm's models take no rules."""
    recipe = recipe_of(CatalogModel(name=f"timm/{name}"))
    plain, checkpointed = (
        trace_recipe(recipe, Training(batch_size=4, precision=Precision.BF16_MIXED, activation_checkpointing=on))
        for on in (False, True)
    )
    assert checkpointed.steps[1].activation_bytes < plain.steps[1].activation_bytes
    assert checkpointed.steps[1].flops > plain.steps[1].flops
