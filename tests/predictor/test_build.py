"""Layers that a manifest lists, and how many of which kind a model has."""

import pytest
import torch
from carpool_core.resources.job import GraphLayer, GraphModel
from carpool_predictor.features import TraceError
from carpool_predictor.tracing.allocator import CachingAllocator
from carpool_predictor.tracing.models import build_inline, count_layers
from carpool_predictor.tracing.step import fake_mode, fake_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

CONV = GraphLayer(kind="Conv2d", out=8, kernel=3, padding=1, stride=2)


def test_inline_layers_take_the_previous_shape() -> None:
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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(4))


def test_weights_become_fake_and_stay_tied() -> None:
    mode = fake_mode()
    with fake_weights(mode):
        model = Tied()
    assert isinstance(model.mask, FakeTensor)
    assert isinstance(model.head.weight, nn.Parameter)
    assert model.head.weight is model.embedding.weight
    assert [p.numel() for p in model.parameters()] == [800]


class AsksForNumbers(nn.Module):
    """Builds as timm's transformers do: a schedule out of a tensor, an initialiser that reads its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4, 8))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.blocks = nn.Sequential(*(nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.1, 3)))


def test_constructors_may_read_numbers_of_tensors() -> None:
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


MIB = 1 << 20


SEQUENCES = {
    "small tensors share a segment of 2 MiB": ([(1, 100), (2, 500_000), (3, 1_000_000)], 2),
    "medium tensors share a segment of 20 MiB": ([(1, 5 * MIB), (2, 5 * MIB), (3, 9 * MIB)], 20),
    "a large tensor gets a segment rounded to 2 MiB": ([(1, 11 * MIB)], 12),
    "a released block is used again": ([(1, 40 * MIB), (1, -1), (2, 30 * MIB), (3, 9 * MIB)], 40),
    "neighbours merge": (
        [(1, 40 * MIB), (1, -1), (2, 20 * MIB), (3, 20 * MIB), (2, -1), (3, -1), (4, 40 * MIB)], 40,
    ),
    "fragments that fit no request stay reserved": (
        [(1, 30 * MIB), (2, 30 * MIB), (1, -1), (2, -1), (3, 60 * MIB)], 120,
    ),
    "empty and unknown tensors take nothing": ([(1, 0), (1, -1), (7, -1)], 0),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "reserved_mib"), SEQUENCES.values(), ids=SEQUENCES)
def test_segments_are_reserved_as_by_pytorch(steps: list[tuple[int, int]], reserved_mib: int) -> None:
    allocator = CachingAllocator()
    allocator.replay(steps)
    assert allocator.reserved_bytes == reserved_mib * MIB


@settings(deadline=None)  # wall-clock time varies on a shared machine
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64 * MIB)), max_size=60))
def test_live_bytes_are_reserved_and_freeing_leaves_whole_segments(steps: list[tuple[bool, int]]) -> None:
    allocator, live, number = CachingAllocator(), {}, 0
    for release, size in steps:
        if release and live:
            key = next(iter(live))
            allocator.free(key)
            del live[key]
        else:
            number += 1
            allocator.allocate(number, size)
            live[number] = size
        assert sum(live.values()) <= allocator.reserved_bytes
    before = allocator.reserved_bytes
    for key in live:
        allocator.free(key)
    assert sum(block.size for pool in allocator._free.values() for _, _, block in pool) == before
