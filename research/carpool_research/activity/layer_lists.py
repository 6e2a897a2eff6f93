"""Computes the work of GPUMemNet's layer lists by arithmetic, without PyTorch.

A list has an entry `(kind, outputs, parameters)` for each layer that computes; outputs are elements of one sample. It
lacks pooling between convolutions, concatenation and addition. Pooling shows as a smaller spatial size; the others cost
little and are omitted. Counting follows the tracer (`tracing.operators`): an operator reads each input once and writes
each output once. Dropout counts as CUDA's two fused kernels, while the tracer counts the CPU's four.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from carpool_core.resources.features import LayerCounts
from carpool_predictor.features import StepWork

Layer = tuple[str, int, int]
"""Kind, output elements of one sample, parameters."""

_CONVOLUTION, _LINEAR = "conv2d", "linear"
NORMALIZATION = frozenset({"batchnorm2d", "batch_normalization"})
_ACTIVATION = frozenset(
    {
        "ReLU", "LeakyReLU", "PReLU", "ELU", "SELU", "GELU", "Tanh", "SiLU", "Softplus", "Mish", "Sigmoid", "Softmax",
        "softmax",
    }
)  # fmt: skip
KINDS = tuple(
    sorted({_CONVOLUTION, _LINEAR, "dropout", "adaptive_avg_pool2d", "Identity"} | _ACTIVATION | NORMALIZATION)
)
"""Every kind of layer that the notation has."""
_ELEMENT_BYTES = 4
_ADAM_ELEMENTS = 13
"""Elements that Adam touches for each parameter: lerp 2, mul 1, addcmul 3, sqrt 2, div 1, add 1, addcdiv 3."""
_ADAM_OPERATORS = 8
_FOREACH_TENSORS = 48
_FOREACH_ELEMENTS = 320 * 65536
_LOSS_KERNELS = 9
_LOSS_ELEMENTS = 8
"""Elements for each logit: log-softmax 2, its loss 1, both backward 2 and 3."""


class NotationError(ValueError):
    """A layer list is invalid; the message names the layer."""


class _Tally:
    """Sums the work of a step, layer by layer."""

    def __init__(self, batch_size: int, channels: int, spatial: int) -> None:
        self.batch = batch_size
        self.inputs = channels * spatial * spatial
        self.spatial = spatial
        self.channels = self.reads = channels
        self.counts = dict.fromkeys(LayerCounts.__struct_fields__, 0)
        self.parameters = self.tensors = self.kernels = 0
        self.flops = self.elements = 0.0
        self.first = True

    def product(self, outputs: int, weights: int, bias: int, flops: float) -> None:
        """Count the common work of convolutions and linear layers; the first layer needs no gradient of its input."""
        self.elements += self.inputs * self.batch + weights + bias + outputs * self.batch
        self.kernels += 3 if self.first else 4
        self.flops += flops * (2 if self.first else 3)
        self.first = False
        self.tensors += 2
        self.inputs = outputs

    def each(self, outputs: int, elements: float, kernels: int) -> None:
        """Count an element-wise layer, with elements per output of forward and backward."""
        self.elements += elements * outputs * self.batch
        self.kernels += kernels


def work_of(layers: Sequence[Layer], batch_size: int, input_shape: Sequence[int]) -> StepWork:
    """Count one training step of a layer list.

    Args:
        layers: The list, in the order of execution.
        batch_size: Samples of the step.
        input_shape: Shape of one sample: (features,), or (channels, height, width) with height = width.

    Raises:
        NotationError: A layer is of an unknown kind, or its numbers fit no shape.
    """
    channels, spatial = input_shape[0], input_shape[1] if len(input_shape) > 1 else 1
    tally = _Tally(batch_size, channels, spatial)
    for index, layer in enumerate(layers):
        try:
            _count(tally, layer)
        except NotationError as e:
            raise NotationError(f"layer {index} {layer}: {e}") from e
        tally.parameters += layer[2]
    if layers:
        tally.each(layers[-1][1], _LOSS_ELEMENTS, _LOSS_KERNELS)
    launches = max(1, math.ceil(tally.tensors / _FOREACH_TENSORS), math.ceil(tally.parameters / _FOREACH_ELEMENTS))
    return StepWork(
        batch_size=batch_size,
        parameter_bytes=float(tally.parameters * _ELEMENT_BYTES),
        flops=tally.flops,
        bytes_moved=_ELEMENT_BYTES * (tally.elements + _ADAM_ELEMENTS * tally.parameters),
        kernels=float(max(tally.kernels + _ADAM_OPERATORS * launches, 1)),
        layers=LayerCounts(**tally.counts),
    )


def _count(tally: _Tally, layer: Layer) -> None:
    kind, outputs, parameters = layer
    if kind == _CONVOLUTION:
        _convolution(tally, outputs, parameters)
    elif kind == _LINEAR:
        tally.counts["linear"] += 1
        weights = parameters - outputs
        x, y = tally.inputs * tally.batch, outputs * tally.batch
        # Gradients of weight, bias and input, an operator each.
        tally.elements += (y + x + weights) + (y + outputs) + (0 if tally.first else y + weights + x)
        tally.product(outputs, weights, outputs, 2.0 * weights * tally.batch)
    elif kind in NORMALIZATION:
        tally.counts["normalization"] += 1
        tally.tensors += 2
        tally.each(outputs, 5, 3)
    elif kind in _ACTIVATION:
        tally.counts["activation"] += 1
        tally.each(outputs, 5, 2)
    elif kind == "dropout":
        tally.counts["other"] += 1
        tally.each(outputs, 5.5, 2)
    elif kind == "adaptive_avg_pool2d":
        tally.counts["other"] += 1
        tally.elements += 2 * (tally.inputs + outputs) * tally.batch
        tally.kernels += 2
        tally.inputs = outputs
    elif kind != "Identity":
        raise NotationError(f"expected one of {', '.join(KINDS)}")


def _convolution(tally: _Tally, outputs: int, parameters: int) -> None:
    tally.counts["convolution"] += 1
    found = shape_of(Place(tally.spatial, tally.channels, tally.reads), outputs, parameters)
    if found.size < tally.spatial:
        pooled = tally.inputs * (found.size / tally.spatial) ** 2
        tally.elements += tally.batch * (3 * tally.inputs + 6 * pooled)
        tally.kernels += 2
        tally.spatial = found.size
    tally.inputs = found.reads * found.size**2
    tally.reads, tally.channels = found.reads, found.channels
    weights = parameters - found.channels
    x, y = tally.inputs * tally.batch, outputs * tally.batch
    # One operator for all gradients.
    tally.elements += y + x + 2 * weights + found.channels + (0 if tally.first else x)
    tally.product(outputs, weights, found.channels, 2.0 * weights * found.size**2 * tally.batch)


class Place(NamedTuple):
    """Input of a convolution."""

    size: int
    """Height and width of the previous layer's output."""
    channels: int
    """Channels of that output."""
    reads: int
    """Input channels of the previous convolution."""


class Convolution(NamedTuple):
    """A convolution's shape, square."""

    size: int
    """Height and width of its output."""
    channels: int
    reads: int
    """Input channels."""
    taps: int
    """Elements of its kernel: 3 × 3, or 1 × 1 in shortcuts and transitions."""


def shape_of(place: Place, outputs: int, parameters: int) -> Convolution:
    """Solve `outputs = channels · size²`, `parameters = channels · (reads · taps + 1)`.

    Several shapes may fit. The choice prefers a shape that reads the previous layer's output, its input (a shortcut),
    or both (a concatenation), then 3 × 3 taps, then the largest size.

    Raises:
        NotationError: No shape fits.
    """
    fits: list[Convolution] = []
    for size in _sizes(place.size):
        channels, odd = divmod(outputs, size * size)
        if odd or not channels or parameters % channels:
            continue
        for taps in (9, 1):
            reads, rest = divmod(parameters // channels - 1, taps)
            if rest == 0 and reads > 0:
                fits.append(Convolution(size, channels, reads, taps))
    likely = {place.channels, place.reads, place.reads + place.channels}
    if not fits:
        raise NotationError(f"no number of channels fits its outputs at a size of {place.size} or a fraction of it")
    return min(fits, key=lambda fit: (fit.reads not in likely, fit.taps != 9))


def _sizes(size: int) -> list[int]:
    """Return the spatial sizes that halving gives, largest first."""
    found = {size}
    while size > 1:
        found |= {(size + 1) // 2, size // 2}
        size //= 2
    return sorted(found, reverse=True)
