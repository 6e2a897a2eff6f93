"""What the memory model sees of a training step: ratios and logarithms, from features alone."""

import math

from carpool_core.resources.features import ModelFeatures
from carpool_core.values import MIB

from carpool_predictor.features.interpolation import StepCost

COLUMNS = (
    "log reserved MiB",
    "log reserved over live",
    "log parameters over reserved",
    "log FLOPs a byte",
    "log bytes a kernel",
    "log kernels",
    "log batch",
    "share of convolutions",
    "share of linear layers",
    "share of activations",
    "share of normalizations",
    "share of other layers",
    "log convolutions",
    "log unfolded over reserved",
    "log largest over reserved",
)
"""Names of the columns; the order is the artifact's, and a test compares them."""


def row_of(features: ModelFeatures, cost: StepCost, batch_size: int) -> tuple[float, ...]:
    """Return one number for each of `COLUMNS`."""
    layers = features.layers
    total = 1 + sum(getattr(layers, name) for name in layers.__struct_fields__)
    reserved = max(cost.reserved_bytes, 1.0)
    return (
        math.log(reserved / MIB),
        math.log(reserved / max(cost.peak_bytes, 1.0)),
        math.log(features.parameter_bytes / reserved + 1e-6),
        math.log((cost.flops + 1) / (cost.bytes_moved + 1)),
        math.log((cost.bytes_moved + 1) / max(cost.kernels, 1.0)),
        math.log(max(cost.kernels, 1.0)),
        math.log(batch_size),
        layers.convolution / total,
        layers.linear / total,
        layers.activation / total,
        layers.normalization / total,
        (layers.other + layers.recurrent + layers.embedding) / total,
        math.log(1 + layers.convolution),
        math.log(cost.unfolded_bytes / reserved + 1e-3),
        math.log(cost.largest_bytes / reserved + 1e-4),
    )
