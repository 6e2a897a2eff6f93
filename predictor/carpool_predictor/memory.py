"""From the simulated peak to what `nvidia-smi` will show: a calibrated line, a bound, a class.

    median = slope · simulated + intercept - context(A100) + context(product)
    upper  = median · factor

What no static tool sees (CUDA context, cuDNN and cuBLAS workspaces, fragmentation) belongs to the site, not to the
model: slope and intercept are fitted for one stack and shipped with their provenance.
"""

import math
from functools import cache
from importlib import resources
from typing import Annotated

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.features import LayerCounts
from carpool_core.resources.prediction import MemoryPrediction
from carpool_core.values import MIB, Precision
from msgspec import Meta

_NUMBER = Annotated[float, Meta(gt=0, le=1e6)]

CONTEXT_BASE_MIB = 130
CONTEXT_PER_SM_MIB = 2.8
"""CUDA context with PyTorch's kernels loaded: a part that does not depend on the GPU, and local memory reserved for
each SM. About 430 MiB on an A100 (108 SMs), 240 on a T4 (40 SMs). An assumption, not a fit."""

ELSEWHERE_FACTOR = 1.25
"""Widens the bound for a stack that was never calibrated: another product, or another precision."""
ELSEWHERE_COVERAGE = 0.9
"""Coverage claimed for such a stack: assumed, and said so in the prediction's message."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The line and the bound of one stack, with provenance. `python -m carpool_predictor.calibration` writes it."""

    version: str
    """Version of this file's numbers; becomes part of `Prediction.modelVersion`."""
    product: str
    """GPU product of the stack."""
    precision: Precision
    """Precision of the stack."""
    slope: _NUMBER
    """MiB measured for each MiB simulated."""
    intercept_mib: Annotated[float, Meta(ge=0, le=1e6)]
    """MiB measured at nothing simulated: context, workspaces and libraries."""
    upper_factor: Annotated[float, Meta(ge=1, le=100)]
    """Bound over median."""
    coverage: Annotated[float, Meta(ge=0, le=1)]
    """Coverage for which the factor was chosen."""
    provenance: dict[str, str | float | int]
    """Data, rows, split, seed, versions and the figures on families that neither number saw."""


@cache
def shipped() -> Calibration:
    """Return the calibration that the package carries."""
    text = resources.files("carpool_predictor").joinpath("calibration.json").read_bytes()
    return msgspec.json.decode(text, type=Calibration)


def context_mib(product: GpuProduct) -> float:
    """Estimate the CUDA context of a PyTorch process, in MiB."""
    return CONTEXT_BASE_MIB + CONTEXT_PER_SM_MIB * product.sm_count


def is_calibrated(calibration: Calibration, product: GpuProduct, precision: Precision) -> bool:
    """Whether the stack is the one that was measured."""
    return product.name == calibration.product and precision is calibration.precision


def predict_memory(
    peak_bytes: float,
    layers: LayerCounts,
    calibration: Calibration,
    *,
    calibrated: bool,
    context_difference_mib: float,
) -> MemoryPrediction:
    """Predict the process's peak memory.

    Args:
        peak_bytes: Simulated peak of live tensors.
        layers: Decides the width of the memory class.
        calibration: Line and bound.
        calibrated: Whether the line was fitted on this very stack.
        context_difference_mib: CUDA context here less that of the calibrated product.
    """
    median = calibration.slope * peak_bytes / MIB + calibration.intercept_mib + context_difference_mib
    median = max(median, peak_bytes / MIB)
    factor = calibration.upper_factor * (1 if calibrated else ELSEWHERE_FACTOR)
    upper = math.ceil(median * factor)
    width = class_width_mib(layers)
    lower_edge = (upper - 1) // width * width
    return MemoryPrediction(
        median_mib=math.ceil(median),
        upper_mib=upper,
        coverage=calibration.coverage if calibrated else min(calibration.coverage, ELSEWHERE_COVERAGE),
        class_lower_mib=lower_edge,
        class_upper_mib=lower_edge + width,
    )


def class_width_mib(layers: LayerCounts) -> int:
    """Return the width of GPUMemNet's memory classes: 1 GiB for MLPs, 8 GiB for CNNs and transformers."""
    is_mlp = layers.linear > 0 and not (layers.convolution or layers.embedding or layers.recurrent)
    return 1024 if is_mlp and layers.normalization <= layers.linear else 8192
