"""Losses that store fewer logits, compiled models and offloaded activations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from carpool_core.products import find_product
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import CrossEntropy, Optimizer, Precision
from carpool_predictor.catalog.recipes import Recipe, recipe_of
from carpool_predictor.features import Sample, TraceError
from carpool_predictor.predict import PredictionContext, predict
from carpool_predictor.predict import prepare as prepare_context
from carpool_predictor.tracing.allocator import events_at
from carpool_predictor.tracing.models import build, trace_recipe
from carpool_predictor.tracing.saved import KeptTensors
from carpool_predictor.tracing.step import fake_weights, meta_mode, prepare, trace_step
from carpool_predictor.tracing.tracker import Kind, StepTracker
from functorch.compile import aot_module, min_cut_rematerialization_partition, nop
from torch import Tensor, nn

_VOCABULARY, _WIDTH, _TOKENS, _BATCH = 4096, 64, 128, 4
_LOGITS = _BATCH * _TOKENS * _VOCABULARY


class Language(nn.Module):
    """An embedding and a head, whose logits are most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(_VOCABULARY, _WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids))
        return out


def traced(build: Callable[[], nn.Module] = Language, **options: Any) -> Any:
    training = Training(batch_size=_BATCH, optimizer=Optimizer.SGD, precision=Precision.BF16, **options)
    return trace_recipe(Recipe("m", build, (_TOKENS,), tokens=True), training, [_BATCH]).steps[0]


def test_batches_of_many_lengths_reserve_more_than_the_longest() -> None:
    recipe, training = Recipe("m", Language, (8 * _TOKENS,), tokens=True), Training(batch_size=_BATCH)
    one, many = (
        trace_recipe(recipe, msgspec.structs.replace(training, varying_lengths=varying), [_BATCH]).steps[0]
        for varying in (False, True)
    )
    assert many.reserved_bytes > 1.1 * one.reserved_bytes
    assert msgspec.structs.replace(many, reserved_bytes=one.reserved_bytes) == one


def test_predictions_for_tokens_say_that_they_assume_one_length() -> None:
    for module, tokens, varying in (
        (Language, True, False),
        (Language, True, True),
        (lambda: nn.Linear(128, 2), False, False),
    ):
        recipe, training = (
            Recipe("m", module, (_TOKENS,), tokens=tokens),
            Training(batch_size=4, varying_lengths=varying),
        )
        answer = predict(trace_recipe(recipe, training), training, [find_product("A100-SXM4-40GB")])
        assert ("set training.varyingLengths to true" in answer.message) == (tokens and not varying)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tensors_of_a_length_have_the_sizes_between_two_traces(attention: str) -> None:
    name = "transformers/LlamaConfig@hidden_size=64,num_hidden_layers=2,num_attention_heads=2,vocab_size=4096"
    recipe = recipe_of(CatalogModel(name=f"{name},intermediate_size=128,attn_implementation={attention}"))

    def events(tokens: int) -> list[tuple[int, int]]:
        mode, training = meta_mode(), Training(batch_size=_BATCH)
        _, fake = build(replace(recipe, input_shape=(tokens,)), training, mode)
        return trace_step(fake, _BATCH)[1].storages.events

    half, between, whole = (dict(e for e in events(n) if e[1] >= 0) for n in (_TOKENS, _TOKENS * 3 // 2, _TOKENS * 2))
    found = dict(events_at(0.75, list(whole.items()), list(half.items())))
    assert found == pytest.approx(between, rel=0.01, abs=1024)


def test_lengths_vary_in_samples_of_tokens_only() -> None:
    with pytest.raises(TraceError, match="needs samples of two tokens or more"):
        trace_recipe(Recipe("m", lambda: nn.Linear(4, 2), (4,)), Training(batch_size=4, varying_lengths=True))


def test_each_loss_stores_fewer_logits_than_the_one_before() -> None:
    peaks = [traced(cross_entropy=kind).activation_bytes for kind in CrossEntropy]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    full, native, _, fused = peaks
    assert full - native >= 2 * _LOGITS * 4  # the FP32 copy, and what is kept of it
    assert fused < _LOGITS * 2


def test_a_fused_loss_never_holds_all_logits() -> None:
    assert traced(cross_entropy=CrossEntropy.NATIVE).largest_bytes == _LOGITS * 2
    assert traced(cross_entropy=CrossEntropy.FUSED).largest_bytes < _LOGITS * 2


@pytest.mark.parametrize("kind", [CrossEntropy.CHUNKED, CrossEntropy.FUSED])
def test_the_products_of_the_head_are_counted(kind: CrossEntropy) -> None:
    plain = traced(cross_entropy=CrossEntropy.NATIVE).flops
    assert plain == 3 * 2 * _LOGITS * _WIDTH
    assert traced(cross_entropy=kind).flops == plain * (4 / 3 if kind is CrossEntropy.FUSED else 1)


def test_a_model_without_a_linear_head_has_no_fused_loss() -> None:
    training = Training(cross_entropy=CrossEntropy.FUSED)
    with pytest.raises(TraceError, match="crossEntropy: fused needs a linear layer"):
        trace_recipe(Recipe("m", lambda: nn.Conv2d(3, 4, 3), (3, 8, 8)), training)


def block() -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2)
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            angles = x.new_zeros(x.shape[0], x.shape[1], 32)
            out: Tensor = self.layer(x, position_embeddings=(angles, angles))
            return out

    return Block()


class _Partitioned(Exception):  # noqa: N818  (ends the compilation)
    """Bytes that PyTorch's partitioner keeps."""


def partitioned_bytes(model: nn.Module, x: Tensor) -> int:
    """Return the bytes that `torch.compile` would keep of a forward pass, without the weights."""
    weights = {tuple(sorted(p.shape)) for p in model.parameters()}

    def partition(*args: Any, **options: Any) -> Any:
        forward, _ = min_cut_rematerialization_partition(*args, **options)
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        kept = {node: node.meta["val"] for node in output.args[0] if isinstance(node, torch.fx.Node)}
        raise _Partitioned(
            sum(v.numel() * v.element_size() for v in kept.values() if tuple(sorted(v.shape)) not in weights)
        )

    compiled = aot_module(model, fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    with pytest.raises(_Partitioned) as found:
        compiled(x)
    return int(found.value.args[0])


def test_a_compiled_block_keeps_what_pytorchs_partitioner_keeps() -> None:
    shape = (4, 64, 128)
    expected = partitioned_bytes(block(), torch.zeros(shape, requires_grad=True))
    with fake_weights(meta_mode()):
        model = block()
    kept = {}
    for compiled in (False, True):
        tracker = StepTracker()
        x = torch.empty(shape, device="meta", requires_grad=True)
        tracker.storages.adopt([*model.parameters(), x], Kind.INPUT)
        with meta_mode(), tracker, KeptTensors([*model.parameters(), x], compiled=compiled, offloaded=False):
            out = model(x)
        kept[compiled] = sum(tracker.storages._by_kind[kind] for kind in (Kind.ACTIVATION, Kind.TEMPORARY))
        del out
    assert kept[True] == pytest.approx(expected, rel=0.15)
    assert kept[False] > 1.3 * expected


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))))


def test_offloaded_activations_leave_the_gpu() -> None:
    recipe = Recipe("m", mlp, (256,))
    peaks = [
        trace_recipe(recipe, Training(batch_size=4096, activation_offloading=on, optimizer=Optimizer.SGD), [4096])
        for on in (False, True)
    ]
    kept, offloaded = (features.steps[0].activation_bytes for features in peaks)
    assert offloaded < kept / 2


def test_a_compiled_job_has_a_wider_interval_and_says_so() -> None:
    recipe, product = Recipe("m", mlp, (256,)), find_product("A100-SXM4-40GB")
    found = {}
    for compiled in (False, True):
        training = Training(batch_size=64, compile=compiled)
        context = prepare_context(trace_recipe(recipe, training), training)
        assert isinstance(context, PredictionContext)
        found[compiled] = context.on(product).prediction
    ratios = [found[on].memory.upper_mib / found[on].memory.median_mib for on in (False, True)]
    spans = [found[on].step_time_seconds.upper / found[on].step_time_seconds.lower for on in (False, True)]
    assert ratios[1] > 1.05 * ratios[0]
    assert spans[1] > 1.5 * spans[0]


def test_a_compiled_step_launches_fewer_kernels_and_moves_fewer_bytes() -> None:
    mode, steps = meta_mode(), []
    for compiled in (False, True):
        training = Training(compile=compiled)
        with fake_weights(mode):
            model = mlp()
        steps.append(trace_step(prepare(model, mode, training, Sample((256,))), 64)[0])
    assert steps[1].kernels < steps[0].kernels
    assert steps[1].bytes_moved < steps[0].bytes_moved
    assert steps[1].flops == steps[0].flops
