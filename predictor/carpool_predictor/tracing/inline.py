"""Builds `spec.model.graph`: a model written down layer by layer."""

import math
from collections.abc import Callable

from carpool_core.resources.job import GraphLayer, GraphModel
from torch import nn

from carpool_predictor.features.abstention import TraceError

Shape = tuple[int, ...]
"""Shape of one sample, without the batch."""


def build_inline(graph: GraphModel) -> nn.Sequential:
    """Build the layers in order, each for the shape that the one before it puts out.

    Raises:
        TraceError: A layer does not fit its input; the message names the layer and the shape.
    """
    shape = tuple(graph.input)
    layers: list[nn.Module] = []
    for index, layer in enumerate(graph.layers):
        where = f"spec.model.graph.layers[{index}] ({layer.kind})"
        module, out = _BUILDERS[layer.kind](layer, shape, where)
        if min(out, default=1) < 1:
            raise TraceError("GraphInvalid", f"{where} leaves nothing of samples of shape {list(shape)}")
        layers.append(module)
        shape = out
    return nn.Sequential(*layers)


def _wanted(value: int | None, name: str, where: str) -> int:
    if value is None:
        raise TraceError("GraphInvalid", f"{where} needs `{name}`")
    return value


def _image(shape: Shape, where: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise TraceError(
            "GraphInvalid", f"{where} expects samples of shape [channels, height, width], found {list(shape)}"
        )
    return shape[0], shape[1], shape[2]


def _slid(length: int, kernel: int, stride: int, padding: int = 0) -> int:
    """Return how many places a kernel takes along one dimension (torch.nn.Conv2d's formula, dilation 1)."""
    return (length + 2 * padding - kernel) // stride + 1


def _linear(layer: GraphLayer, shape: Shape, where: str) -> tuple[nn.Module, Shape]:
    out = _wanted(layer.out, "out", where)
    return nn.Linear(shape[-1], out), (*shape[:-1], out)


def _conv(layer: GraphLayer, shape: Shape, where: str) -> tuple[nn.Module, Shape]:
    channels, height, width = _image(shape, where)
    out, kernel = _wanted(layer.out, "out", where), _wanted(layer.kernel, "kernel", where)
    stride, padding = layer.stride or 1, layer.padding or 0
    places = (_slid(height, kernel, stride, padding), _slid(width, kernel, stride, padding))
    return nn.Conv2d(channels, out, kernel, stride=stride, padding=padding), (out, *places)


def _pool(pool: Callable[..., nn.Module]) -> Callable[[GraphLayer, Shape, str], tuple[nn.Module, Shape]]:
    def build(layer: GraphLayer, shape: Shape, where: str) -> tuple[nn.Module, Shape]:
        channels, height, width = _image(shape, where)
        kernel = _wanted(layer.kernel, "kernel", where)
        stride = layer.stride or kernel
        return pool(kernel, stride=stride), (channels, _slid(height, kernel, stride), _slid(width, kernel, stride))

    return build


def _same(make: Callable[[Shape], nn.Module]) -> Callable[[GraphLayer, Shape, str], tuple[nn.Module, Shape]]:
    return lambda layer, shape, where: (make(shape), shape)


_BUILDERS: dict[str, Callable[[GraphLayer, Shape, str], tuple[nn.Module, Shape]]] = {
    "Linear": _linear,
    "Conv2d": _conv,
    "BatchNorm2d": lambda layer, shape, where: (nn.BatchNorm2d(_image(shape, where)[0]), shape),
    "LayerNorm": _same(lambda shape: nn.LayerNorm(shape[-1])),
    "ReLU": _same(lambda shape: nn.ReLU()),
    "GELU": _same(lambda shape: nn.GELU()),
    "Tanh": _same(lambda shape: nn.Tanh()),
    "MaxPool2d": _pool(nn.MaxPool2d),
    "AvgPool2d": _pool(nn.AvgPool2d),
    "Flatten": lambda layer, shape, where: (nn.Flatten(), (math.prod(shape),)),
    "Dropout": _same(lambda shape: nn.Dropout()),
}
