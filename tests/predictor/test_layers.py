"""Layers that a manifest lists, and how many of which kind a model has."""

import pytest
import torch
from carpool_core.resources.job import GraphLayer, GraphModel
from carpool_predictor.features import TraceError
from carpool_predictor.tracing.models import build_inline, count_layers
from torch import nn

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
