"""LoRA adapters, quantised weights and gradient accumulation in traced steps."""

import pytest
from carpool_core.resources.features import Adapter, ModelFeatures
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer, Precision, Quantization
from carpool_predictor.catalog.recipes import Recipe, recipe_of
from carpool_predictor.features import TraceError
from carpool_predictor.tracing.models import trace_under
from carpool_predictor.tracing.step import fake_mode, meta_mode
from small_models import is_same
from torch import nn

WIDTH, INNER, LAYERS, TOKENS = 256, 512, 4, 128
LLAMA = CatalogModel(
    name=f"transformers/LlamaConfig@hidden_size={WIDTH},intermediate_size={INNER},num_hidden_layers={LAYERS},"
    "num_attention_heads=4,num_key_value_heads=4,vocab_size=1000",
    input=[TOKENS],
)
LINEAR = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
"""Weights of linear layers without the head."""
OTHER = 2 * 1000 * WIDTH + (2 * LAYERS + 1) * WIDTH


def traced(**changes: object) -> ModelFeatures:
    training = Training(**{"optimizer": Optimizer.ADAMW_FUSED, "precision": Precision.BF16, **changes})
    found = [trace_under(mode, recipe_of(LLAMA), training, (2, 4)) for mode in (meta_mode(), fake_mode())]
    assert is_same(*found)
    return found[0]


def lora(rank: int, *shapes: tuple[int, int]) -> int:
    return LAYERS * sum(rank * (a + b) for a, b in shapes)


SQUARE = (WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("adapter", "trainable"),
    [
        pytest.param(Adapter(rank=4), lora(4, *[SQUARE] * 4, *[(WIDTH, INNER)] * 3), id="every linear layer"),
        pytest.param(Adapter(targets=["q_proj", "self_attn.v_proj"]), lora(8, SQUARE, SQUARE), id="by name"),
    ],
)
def test_only_the_adapter_is_trained(adapter: Adapter, trainable: int) -> None:
    found = traced(adapter=adapter)
    assert (found.parameters, found.trainable_parameters) == (LINEAR + OTHER + trainable, trainable)
    assert found.trainable_bytes == 4 * trainable  # FP32 beside BF16 weights
    assert found.parameter_bytes == pytest.approx(2 * (LINEAR + OTHER) + 4 * trainable, rel=0.001)
    step = found.steps[-1]
    alive = step.peak_bytes - step.activation_bytes - found.parameter_bytes
    assert 2 * 4 * trainable <= alive <= 1.02 * 3 * 4 * trainable + 2**16  # two moments, and gradients as they come


@pytest.mark.parametrize(
    ("kind", "bytes_per_weight"),
    [
        (Quantization.NF4, 0.5 + 4 / 64),
        (Quantization.NF4_DOUBLE, 0.5 + 1 / 64 + 4 / (64 * 256)),
        (Quantization.INT8, 1 + 4 / WIDTH),
    ],
)
def test_quantised_weights_have_their_stored_size(kind: Quantization, bytes_per_weight: float) -> None:
    plain, found = traced(adapter=Adapter(rank=4)), traced(adapter=Adapter(rank=4), quantization=kind)
    assert (found.parameters, found.trainable_parameters) == (plain.parameters, plain.trainable_parameters)
    saved = plain.parameter_bytes - found.parameter_bytes
    assert saved == pytest.approx((2 - bytes_per_weight) * LINEAR, rel=0.002)
    assert found.steps[-1].flops == plain.steps[-1].flops
    more = found.steps[-1].activation_bytes - plain.steps[-1].activation_bytes
    # The 8-bit product keeps its input, which the frozen layer does not.
    assert (more > 0) == (kind is Quantization.INT8)


def test_a_pass_dequantises_one_weight_at_a_time() -> None:
    """The workspace is one matrix in the type of the products, of a model that is almost only weights."""
    size, layers = 2048, 6
    recipe = Recipe("layers", lambda: nn.Sequential(*(nn.Linear(size, size) for _ in range(layers))), (size,))
    training = Training(adapter=Adapter(rank=1), quantization=Quantization.NF4, precision=Precision.BF16)
    found = trace_under(meta_mode(), recipe, training, (1,))
    assert found.steps[0].peak_bytes - found.parameter_bytes == pytest.approx(2 * size * size, rel=0.1)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_MIXED])
@pytest.mark.parametrize("quantization", [None, Quantization.NF4])
def test_frozen_layers_are_recomputed(precision: Precision, quantization: Quantization | None) -> None:
    plain, saved = (
        traced(adapter=Adapter(), quantization=quantization, precision=precision, activation_checkpointing=on)
        for on in (False, True)
    )
    assert saved.steps[-1].activation_bytes < 0.7 * plain.steps[-1].activation_bytes
    assert saved.steps[-1].flops > plain.steps[-1].flops
    assert saved.trainable_parameters == plain.trainable_parameters


def test_accumulation_keeps_gradients_and_repeats_passes() -> None:
    one, four = traced(), traced(gradient_accumulation=4)
    gradients = 2 * one.parameters
    for before, after in zip(one.steps, four.steps, strict=True):
        assert after.flops == 4 * before.flops
        added = 4 * (9 * LAYERS + 3)  # each pass adds its gradients to those of the passes before
        assert 4 * before.kernels < after.kernels < 4 * before.kernels + added  # the update is not repeated
        assert before.peak_bytes < after.peak_bytes <= before.peak_bytes + 1.05 * gradients


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": Adapter(targets=["q_pro"])}, "found 'q_pro'; did you mean q_proj?"),
        ({"adapter": Adapter(targets=["conv9"])}, "linear layers are q_proj, k_proj"),
        ({"quantization": Quantization.INT8}, "training.quantization needs training.adapter"),
    ],
)
def test_an_adapter_that_fits_nothing_is_explained(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=r"expected|quantized") as caught:
        traced(**changes)
    assert caught.value.reason == "AdapterInvalid"
    assert message in str(caught.value)
