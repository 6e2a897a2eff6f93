"""Layer lists by arithmetic, against the tracer."""

from collections.abc import Callable

import pytest
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer
from carpool_predictor.catalog.recipes import Recipe
from carpool_predictor.tracing.models import trace_recipe
from carpool_research.activity.layer_lists import NotationError, work_of
from torch import nn


def pyramid() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.GELU(),
        nn.Conv2d(12, 20, 3, padding=1), nn.BatchNorm2d(20), nn.GELU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 36, 3, padding=1), nn.BatchNorm2d(36), nn.GELU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(36, 17), nn.Softmax(1),
    )  # fmt: skip


PYRAMID = [
    ("conv2d", 12 * 256, 336), ("batchnorm2d", 12 * 256, 24), ("GELU", 12 * 256, 0),
    ("conv2d", 20 * 256, 2180), ("batchnorm2d", 20 * 256, 40), ("GELU", 20 * 256, 0),
    ("conv2d", 36 * 64, 6516), ("batchnorm2d", 36 * 64, 72), ("GELU", 36 * 64, 0),
    ("adaptive_avg_pool2d", 36, 0), ("linear", 17, 629), ("softmax", 17, 0),
]  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 150), nn.BatchNorm1d(150), nn.Tanh(), nn.Linear(150, 40), nn.Softmax(1))


MLP = [
    ("linear", 150, 45150), ("batch_normalization", 150, 300), ("Tanh", 150, 0), ("linear", 40, 6040),
    ("Softmax", 40, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "layers", "shape"), [(pyramid, PYRAMID, (3, 16, 16)), (mlp, MLP, (300,))], ids=["cnn", "mlp"]
)
def test_arithmetic_agrees_with_the_tracer(
    build: Callable[[], nn.Module], layers: list[tuple[str, int, int]], shape: tuple[int, ...]
) -> None:
    traced = trace_recipe(Recipe("x", build, shape), Training(batch_size=8, optimizer=Optimizer.ADAM))
    step = next(s for s in traced.steps if s.batch_size == 8)
    work = work_of(layers, 8, shape)
    assert work.flops == step.flops
    assert work.bytes_moved == pytest.approx(step.bytes_moved, rel=0.02)
    assert work.kernels == pytest.approx(step.kernels, rel=0.1)
    assert work.parameter_bytes == 4 * traced.parameters
    assert work.layers.convolution == traced.layers.convolution
    assert work.layers.linear == traced.layers.linear
    assert work.layers.normalization == traced.layers.normalization


@pytest.mark.parametrize(
    ("layers", "message"),
    [([("lstm", 5, 5)], "layer 0 .*expected one of"), ([("conv2d", 7, 11)], "no number of channels fits")],
)
def test_an_invalid_list_is_refused(layers: list[tuple[str, int, int]], message: str) -> None:
    with pytest.raises(NotationError, match=message):
        work_of(layers, 1, (3, 8, 8))
