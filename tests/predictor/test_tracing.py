"""Tracing against PyTorch's own trackers, on models small enough to be quick."""

from collections.abc import Callable

import pytest
import torch
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer, Precision
from carpool_predictor.catalog.recipes import Recipe
from carpool_predictor.features import Sample, TraceError
from carpool_predictor.tracing.models import batch_sizes, trace_recipe
from carpool_predictor.tracing.step import TensorMode, fake_mode, fake_weights, losses, meta_mode, prepare, trace_step
from carpool_predictor.tracing.tracker import Kind, LiveStorages
from small_models import Attention, cnn, fake, mlp
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED, Precision.BF16])
@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ADAMW])
@pytest.mark.parametrize("build", [cnn, mlp, Attention])
def test_peak_and_flops_equal_pytorchs(
    build: Callable[[], nn.Module], optimizer: Optimizer, precision: Precision
) -> None:
    training = fake(build, Training(optimizer=optimizer, precision=precision))
    step, _ = trace_step(training, 16)
    memory, flops = MemTracker(), FlopCounterMode(display=False)
    inputs = training.inputs(16)
    memory.track_external(training.model, training.optimizer, *inputs)
    with training.mode, memory, flops:
        training.step(inputs)
    oracle = memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    # MemTracker does not round external tensors up to 512 bytes.
    tensors = sum(1 for _ in training.model.parameters()) * 4 + sum(1 for _ in training.model.buffers()) + 1
    assert oracle <= step.peak_bytes <= oracle + 512 * tensors
    assert step.flops == flops.get_total_flops()


def test_peak_is_made_of_its_kinds() -> None:
    training = fake(cnn, Training(optimizer=Optimizer.ADAM))
    step, tracker = trace_step(training, 16)
    peak = tracker.storages.peak
    parameters = sum(p.numel() * 4 for p in training.model.parameters())
    assert peak.total_bytes == sum(peak.by_kind) == step.peak_bytes
    assert parameters <= peak.by_kind[Kind.PARAMETER] <= parameters + 8 * 512
    assert 2 * parameters <= peak.by_kind[Kind.OPTIMIZER] <= 2 * parameters + 24 * 512
    assert peak.by_kind[Kind.INPUT] == 16 * 3 * 32 * 32 * 4


def test_small_storages_count_as_the_allocators_smallest_block() -> None:
    storages = LiveStorages()
    kept = [torch.empty(1), torch.empty(129)]
    storages.adopt([*kept, kept[0].view(1)], Kind.ACTIVATION)
    assert storages.peak.total_bytes == 512 + 1024


@pytest.mark.parametrize("build", [cnn, Attention])
def test_memory_is_nearly_affine_in_the_batch(build: Callable[[], nn.Module]) -> None:
    training = fake(build, Training())
    low, middle, high = (trace_step(training, batch)[0].peak_bytes for batch in (16, 32, 48))
    assert middle == pytest.approx((low + high) / 2, rel=0.01)


def activations(build: Callable[[], nn.Module], **options: object) -> int:
    return trace_step(fake(build, Training(**options)), 64)[0].activation_bytes


def test_dropout_in_attention_does_not_keep_the_scores() -> None:
    assert activations(lambda: Attention(0.1)) == activations(lambda: Attention(0.0))


class Multihead(nn.Module):
    """PyTorch's own attention over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).unflatten(1, (-1, 8))
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED])
@pytest.mark.parametrize("mode", [fake_mode, meta_mode])
def test_pytorchs_own_attention_keeps_no_scores(mode: Callable[[], TensorMode], precision: Precision) -> None:
    """Regression: the call of the fused kernel inside `nn.MultiheadAttention` was not seen, which kept the scores."""
    tokens = 3 * 32 * 32 // 8
    made = mode()
    with fake_weights(made):
        model = Multihead()
    step, _ = trace_step(prepare(model, made, Training(precision=precision), Sample((3, 32, 32))), 64)
    assert step.largest_bytes < 64 * 4 * tokens * tokens * 2


def test_checkpointing_recomputes_blocks() -> None:
    plain, saved = (trace_step(fake(Attention, Training(activation_checkpointing=on)), 64)[0] for on in (False, True))
    assert saved.activation_bytes < 0.7 * plain.activation_bytes
    assert saved.flops > plain.flops
    assert saved.kernels > plain.kernels


def test_a_model_without_blocks_cannot_be_checkpointed() -> None:
    with pytest.raises(TraceError, match="activationCheckpointing needs blocks") as caught:
        fake(mlp, Training(activation_checkpointing=True))
    assert caught.value.reason == "CheckpointingUnsupported"


class Dense(nn.Module):
    """Returns a segmentation, a list, and values that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 1)

    def forward(self, x: Tensor) -> dict[str, object]:
        y = self.conv(x)
        return {"out": y, "more": [y.mean((2, 3)), y.flatten(2).transpose(1, 2)], "scale": 3, "labels": y.argmax(1)}


def test_nested_outputs_each_get_a_loss() -> None:
    training = fake(Dense, Training())
    with training.mode:
        assert len(list(losses(training.model(*training.inputs(2))))) == 3
    assert trace_step(training, 2)[0].flops > 0


def test_logits_of_tokens_are_cast_and_kept() -> None:
    """The loss of 16-bit logits takes 14 bytes for each: themselves, the softmax in FP32, and two gradients of it."""
    tokens, classes = 128, 1000

    def logit_bytes(precision: Precision) -> float:
        training = fake(lambda: nn.Linear(8, classes), Training(precision=precision), (tokens, 8))
        step = trace_step(training, 64)[0]
        return step.activation_bytes / (64 * tokens * classes)

    assert logit_bytes(Precision.BF16) == pytest.approx(14, rel=0.02)
    assert logit_bytes(Precision.FP32) == pytest.approx(12, rel=0.02)


class NeedsNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise KeyError("no such thing")


def frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


@pytest.mark.parametrize(
    ("build", "shape", "reason", "word"),
    [
        pytest.param(
            lambda: nn.Sequential(mlp(), NeedsNumbers()), (3, 32, 32), "DataDependentGraph", "data", id="data"
        ),
        pytest.param(Raises, (3, 32, 32), "TraceFailed", "its constructor failed: KeyError", id="constructor raises"),
        pytest.param(frozen, (4,), "TraceFailed", "no trainable parameters", id="frozen"),
        pytest.param(cnn, (4, 32, 32), "TraceFailed", r"\[16, 4, 32, 32\] failed", id="wrong channels"),
        pytest.param(cnn, (3, 0, 32), "InputShapeInvalid", "shape of one sample", id="empty sample"),
        pytest.param(cnn, (3, 2**20, 2**20), "InputShapeInvalid", "shape of one sample", id="absurd sample"),
    ],
)
def test_untraceable_models_are_explained(
    build: Callable[[], nn.Module], shape: tuple[int, ...], reason: str, word: str
) -> None:
    with pytest.raises(TraceError, match=word) as caught:
        trace_recipe(Recipe("m", build, shape), Training(batch_size=32))
    assert caught.value.reason == reason


@pytest.mark.parametrize(("batch", "traced"), [(128, (64, 128)), (4, (2, 4)), (3, (3, 6)), (1, (1, 2))])
def test_two_batch_sizes_are_traced(batch: int, traced: tuple[int, int]) -> None:
    assert batch_sizes(batch) == traced
