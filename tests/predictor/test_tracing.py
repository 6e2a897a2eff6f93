"""Tracing against PyTorch's own trackers, on models small enough to be quick."""

from collections.abc import Callable

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from carpool_core.resources.job import GraphLayer, GraphModel, Training
from carpool_core.values import Optimizer, Precision
from carpool_predictor.abstention import TraceError
from carpool_predictor.autocast import MetaAutocast
from carpool_predictor.catalog import Recipe
from carpool_predictor.fake import fake_mode, fake_weights, meta_mode
from carpool_predictor.inline import build_inline
from carpool_predictor.layers import count_layers
from carpool_predictor.operators import attention_backward_flops, attention_flops
from carpool_predictor.step import FakeTraining, losses, prepare, trace_step, weight_dtype
from carpool_predictor.tracing import batch_sizes, record_recipe, trace_recipe
from carpool_predictor.trackers import Kind, LiveStorages
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, stride=2, bias=False), nn.BatchNorm2d(64), nn.GELU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.Tanh(), nn.Linear(256, 10))


class Attention(nn.Module):
    """Patches, two blocks of attention, a classifier."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 64, 4, stride=4)
        self.blocks = nn.ModuleList(Block(64, dropout) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        x = x + y.transpose(1, 2).reshape(batch, tokens, width)
        return x + self.mlp(x)


def fake(build: Callable[[], nn.Module], training: Training, shape: tuple[int, ...] = (3, 32, 32)) -> FakeTraining:
    mode = fake_mode()
    with fake_weights(mode, weight_dtype(training.precision)):
        model = build()
    return prepare(model, mode, training, shape)


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
    memory.track_external(training.model, training.optimizer, inputs)
    with training.mode, memory, flops:
        training.step(inputs)
    oracle = memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    # MemTracker does not round what it is told of from outside up to 512 bytes.
    tensors = sum(1 for _ in training.model.parameters()) * 4 + sum(1 for _ in training.model.buffers()) + 1
    assert oracle <= step.peak_bytes <= oracle + 512 * tensors
    assert step.flops == flops.get_total_flops()


def test_attention_flops_are_counted_by_our_own_formulas() -> None:
    step, _ = trace_step(fake(Attention, Training()), 16)
    shape = (16, 4, 64, 16)
    assert step.flops > 3 * (attention_flops(shape, shape, shape) + attention_backward_flops(shape, shape, shape))


def test_peak_is_made_of_its_kinds() -> None:
    training = fake(cnn, Training(optimizer=Optimizer.ADAM))
    step, tracker = trace_step(training, 16)
    peak = tracker.storages.peak
    parameters = sum(p.numel() * 4 for p in training.model.parameters())
    assert peak.total_bytes == sum(peak.by_kind) == step.peak_bytes
    assert parameters <= peak.by_kind[Kind.PARAMETER] <= parameters + 8 * 512
    assert 2 * parameters <= peak.by_kind[Kind.OPTIMIZER] <= 2 * parameters + 24 * 512
    assert peak.by_kind[Kind.INPUT] == 16 * 3 * 32 * 32 * 4


def test_after_a_step_only_weights_and_state_are_alive() -> None:
    training = fake(cnn, Training())
    _, tracker = trace_step(training, 16)
    alive = tracker.storages._by_kind
    assert alive[Kind.ACTIVATION] == alive[Kind.TEMPORARY] == alive[Kind.GRADIENT] == alive[Kind.INPUT] == 0


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


def test_dropout_in_attention_does_not_keep_the_scores() -> None:
    assert activations(lambda: Attention(0.1)) == activations(lambda: Attention(0.0))


def test_checkpointing_recomputes_blocks() -> None:
    plain, saved = (trace_step(fake(Attention, Training(activation_checkpointing=on)), 64)[0] for on in (False, True))
    assert saved.activation_bytes < 0.7 * plain.activation_bytes
    assert saved.flops > plain.flops
    assert saved.kernels > plain.kernels


def test_nothing_to_checkpoint_is_said() -> None:
    with pytest.raises(TraceError, match="activationCheckpointing needs blocks") as caught:
        fake(mlp, Training(activation_checkpointing=True))
    assert caught.value.reason == "CheckpointingUnsupported"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(4))


def test_weights_turn_fake_and_stay_tied() -> None:
    mode = fake_mode()
    with fake_weights(mode):
        model = Tied()
    assert isinstance(model.mask, FakeTensor)
    assert isinstance(model.head.weight, nn.Parameter)
    assert model.head.weight is model.embedding.weight
    assert [p.numel() for p in model.parameters()] == [800]


class AsksForNumbers(nn.Module):
    """Builds as timm's transformers do: a schedule out of a tensor, an initialiser that looks at its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4, 8))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.blocks = nn.Sequential(*(nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.1, 3)))


def test_constructors_may_ask_tensors_for_numbers() -> None:
    with fake_weights(fake_mode()):
        model = AsksForNumbers()
    assert model.blocks[2].p == pytest.approx(0.1)
    assert isinstance(model.position, FakeTensor)


def test_after_building_pytorch_is_as_before() -> None:
    before = dict(vars(nn.init))
    with fake_weights(fake_mode()):
        pass
    assert dict(vars(nn.init)) == before
    assert not isinstance(nn.Linear(2, 2).weight, FakeTensor)


class Dense(nn.Module):
    """Puts out a segmentation, a list beside it, and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 1)

    def forward(self, x: Tensor) -> dict[str, object]:
        y = self.conv(x)
        return {"out": y, "more": [y.mean((2, 3)), y.flatten(2).transpose(1, 2)], "scale": 3, "labels": y.argmax(1)}


def test_nested_outputs_each_get_a_loss() -> None:
    training = fake(Dense, Training())
    with training.mode:
        assert len(list(losses(training.model(training.inputs(2))))) == 3
    assert trace_step(training, 2)[0].flops > 0


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
def test_what_cannot_be_traced_is_explained(
    build: Callable[[], nn.Module], shape: tuple[int, ...], reason: str, word: str
) -> None:
    with pytest.raises(TraceError, match=word) as caught:
        trace_recipe(Recipe("m", build, shape), Training(batch_size=32))
    assert caught.value.reason == reason


@pytest.mark.parametrize(("batch", "traced"), [(128, (64, 128)), (4, (2, 4)), (3, (3, 6)), (1, (1, 2))])
def test_two_batch_sizes_are_traced(batch: int, traced: tuple[int, int]) -> None:
    assert batch_sizes(batch) == traced


def test_features_say_what_was_traced() -> None:
    training = Training(batch_size=8, optimizer=Optimizer.RMSPROP, precision=Precision.BF16)
    features = trace_recipe(Recipe("mine", cnn, (3, 32, 32)), training)
    assert features.name == "mine"
    assert features.parameters == features.trainable_parameters == sum(p.numel() for p in cnn().parameters())
    assert (features.optimizer, features.precision) == (Optimizer.RMSPROP, Precision.BF16)
    assert [step.batch_size for step in features.steps] == [4, 8]
    assert features.layers.convolution == features.layers.normalization == 2


def test_layers_count_by_kind_and_recurrent_ones_by_their_layers() -> None:
    """HotCloud '20 takes a recurrent cell for two linear layers."""
    model = nn.ModuleList(
        [nn.LSTM(4, 4, num_layers=3), nn.GRUCell(4, 4), nn.Embedding(4, 4), nn.ConvTranspose1d(1, 1, 1), nn.Identity(),
         nn.Softplus(), nn.GroupNorm(1, 4), nn.Dropout()]
    )  # fmt: skip
    counts = count_layers(model)
    assert (counts.recurrent, counts.linear, counts.embedding, counts.convolution) == (4, 8, 1, 1)
    both_ways = count_layers(nn.LSTM(4, 4, num_layers=2, bidirectional=True))
    assert (both_ways.recurrent, both_ways.linear) == (4, 8)
    assert (counts.activation, counts.normalization, counts.other) == (1, 1, 1)


CONV = GraphLayer(kind="Conv2d", out=8, kernel=3, padding=1, stride=2)


def test_inline_layers_follow_each_others_shapes() -> None:
    layers = [
        CONV, GraphLayer(kind="BatchNorm2d"), GraphLayer(kind="ReLU"), GraphLayer(kind="MaxPool2d", kernel=3, stride=2),
        GraphLayer(kind="AvgPool2d", kernel=2), GraphLayer(kind="Flatten"), GraphLayer(kind="LayerNorm"),
        GraphLayer(kind="GELU"), GraphLayer(kind="Dropout"), GraphLayer(kind="Linear", out=5), GraphLayer(kind="Tanh"),
    ]  # fmt: skip
    model = build_inline(GraphModel(input=[3, 33, 29], layers=layers))
    assert model(torch.zeros(2, 3, 33, 29)).shape == (2, 5)


@pytest.mark.parametrize(
    ("shape", "layers", "word"),
    [
        pytest.param([784], [CONV], r"layers\[0\] \(Conv2d\) expects samples of shape", id="convolution over a vector"),
        pytest.param([3, 8, 8], [GraphLayer(kind="Linear")], "needs `out`", id="width forgotten"),
        pytest.param(
            [3, 8, 8], [CONV, GraphLayer(kind="MaxPool2d", kernel=9)], r"layers\[1\].*leaves nothing", id="pool"
        ),
    ],
)
def test_inline_layers_that_do_not_fit_are_named(shape: list[int], layers: list[GraphLayer], word: str) -> None:
    with pytest.raises(TraceError, match=word):
        build_inline(GraphModel(input=shape, layers=layers))


@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.FP16_MIXED])
def test_mixed_precision_keeps_smaller_activations_than_fp32(precision: Precision) -> None:
    """Regression: autocast does nothing to meta tensors, so that mixed steps were traced in FP32."""
    recipe = Recipe("cnn", cnn, (3, 32, 32))
    full = trace_recipe(recipe, Training(batch_size=64, precision=Precision.FP32)).steps[-1]
    mixed = trace_recipe(recipe, Training(batch_size=64, precision=precision)).steps[-1]
    assert mixed.activation_bytes < 0.8 * full.activation_bytes


@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.FP16_MIXED])
@pytest.mark.parametrize("build", [cnn, mlp, Attention])
def test_autocast_without_data_is_pytorchs(build: Callable[[], nn.Module], precision: Precision) -> None:
    training = Training(precision=precision)
    mode = meta_mode()
    with fake_weights(mode):
        model = build()
    bare, _ = trace_step(prepare(model, mode, training, (3, 32, 32)), 16)
    faked, _ = trace_step(fake(build, training), 16)
    # Batch normalization on meta tensors saves its statistics in FP32.
    assert msgspec.structs.replace(bare, bytes_moved=0) == msgspec.structs.replace(faked, bytes_moved=0)
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
def test_a_product_that_no_list_names_is_left_to_pytorchs_autocast(name: str) -> None:
    """Regression: they stayed in FP32, and nobody said so."""
    training, recipe = Training(precision=Precision.BF16_MIXED), Recipe(name, MISSED[name], (32, 32))
    mode = meta_mode()
    with fake_weights(mode):
        model = MISSED[name]()
    with pytest.raises(TraceError, match="not known to be cast"):
        trace_step(prepare(model, mode, training, (32, 32)), 4)
    with fake_weights(faked := fake_mode()):
        model = MISSED[name]()
    expected, _ = trace_step(prepare(model, faked, training, (32, 32)), 4)
    found = record_recipe(recipe, training, [4]).steps[0]
    assert (found.peak_bytes, found.bytes_moved) == (expected.peak_bytes, expected.bytes_moved)


def test_a_product_of_cudas_list_that_the_cpus_lacks_is_cast() -> None:
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
