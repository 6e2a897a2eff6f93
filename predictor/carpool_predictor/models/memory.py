"""From the simulated step to what `nvidia-smi` will show: a calibrated line, a learned correction, a bound, a class.

    line   = slope · reserved + intercept - context(A100) + context(product)
    median = line · exp(residual)          the residual only inside what was learned
    upper  = median · factor(stratum)      steps that are likelier to exceed it have a larger one
    class  = the one that holds median · factor(stratum) ^ share

What no static tool sees (CUDA context, cuDNN and cuBLAS workspaces) belongs to the site, not to the model: slope and
intercept are fitted for one stack. Trees correct what is left; both are shipped as plain numbers with their provenance.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.features import LayerCounts, ModelFeatures
from carpool_core.resources.prediction import MemoryPrediction
from carpool_core.values import MIB, Precision
from msgspec import Meta

from carpool_predictor.features import MalformedError, StepCost
from carpool_predictor.models.artifacts import load
from carpool_predictor.models.trees import Forest

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


_NUMBER = Annotated[float, Meta(gt=0, le=1e6)]

FORMAT = 5
"""Version of the artifact's layout; another one is refused."""
CONTEXT_BASE_MIB = 130
CONTEXT_PER_SM_MIB = 2.8
"""CUDA context with PyTorch's kernels loaded: a part that does not depend on the GPU, and local memory reserved for
each SM. About 430 MiB on an A100 (108 SMs), 240 on a T4 (40 SMs). An assumption, not a fit."""

STRATA = 16
"""Most strata of steps, each with a bound of its own: what jobs teach is kept for so many."""
ELSEWHERE_FACTOR = 1.25
"""Widens the bound for a stack that was never calibrated: another product, or another precision."""
ELSEWHERE_COVERAGE = 0.9
"""Coverage claimed for such a stack, and for models outside what was learned: assumed, and said in the message."""
OUTSIDE_FACTOR = 1.15
"""Widens the bound for a model outside what was learned; the line alone holds it, as the model card shows."""
MAX_CORRECTION = 0.35
"""Largest logarithm that the residual may answer."""


class Risk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A linear score that says how likely a step exceeds its median by much, and how it divides steps into strata."""

    weights: list[float]
    """One for each column."""
    intercept: float
    edges: list[float]
    """Scores at which a stratum ends and the next one begins, ascending."""

    def stratum(self, row: Sequence[float]) -> int:
        """Return the stratum of a step: 0 for those that are least likely to."""
        score = self.intercept + sum(w * x for w, x in zip(self.weights, row, strict=True))
        return bisect_right(self.edges, score)


class MemoryModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory model of one stack, with provenance."""

    format: int
    """Layout of this file."""
    version: str
    """Version of this file's numbers; becomes part of `Prediction.modelVersion`."""
    product: str
    """GPU product of the stack."""
    precision: Precision
    """Precision of the stack."""
    slope: _NUMBER
    """MiB measured for each MiB that the allocator holds."""
    intercept_mib: Annotated[float, Meta(ge=0, le=1e6)]
    """MiB measured at nothing held: context, workspaces and libraries."""
    columns: list[str]
    """Names of the numbers that `row_of` returns."""
    residual: Forest
    """Logarithm of measured over line, from `row_of`."""
    hull: list[tuple[float, float]]
    """For each column, the range that was learned from, with its margin."""
    risk: Risk
    """Divides steps into strata, each with a bound of its own."""
    factors: list[Annotated[float, Meta(ge=1, le=100)]]
    """Bound over median, for each stratum of `risk`."""
    class_share: Annotated[float, Meta(ge=0, le=1)]
    """How far from median (0) to bound (1), in logarithms, lies the value whose class is named."""
    coverage: Annotated[float, Meta(ge=0, le=1)]
    """Coverage that the bound is shipped with."""
    provenance: dict[str, str | float | int]
    """Data, rows, split, seed, versions and the figures on families that no number saw."""

    def check(self) -> None:
        """Make sure that the artifact fits this code.

        Raises:
            MalformedError: It does not; the message says why.
        """
        if tuple(self.columns) != COLUMNS or len(self.hull) != len(COLUMNS):
            raise MalformedError("the memory model was trained on other columns than this version computes")
        if len(self.risk.weights) != len(COLUMNS) or len(self.factors) != len(self.risk.edges) + 1:
            raise MalformedError("the memory model's strata are not those of its columns and factors")
        if len(self.factors) > STRATA:
            raise MalformedError(f"expected at most {STRATA} strata, found {len(self.factors)}")
        if any(later < edge for edge, later in pairwise(self.risk.edges)):
            raise MalformedError(f"expected the edges of strata to ascend, found {self.risk.edges}")
        if any(later < factor for factor, later in pairwise(self.factors)):
            raise MalformedError(f"expected no factor to be smaller than that of calmer steps, found {self.factors}")
        if any(high < low for low, high in self.hull):
            raise MalformedError("a range of the memory model's hull ends before it begins")
        self.residual.check(len(COLUMNS))


class _Format(msgspec.Struct, frozen=True):
    """As much of an artifact as says whether the rest can be read."""

    format: int


def read_model(content: bytes) -> MemoryModel:
    """Read an artifact.

    Raises:
        MalformedError: It is cut short, changed, or of another version.
    """
    try:
        found = msgspec.json.decode(content, type=_Format).format
        if found != FORMAT:
            advice = "upgrade carpool" if found > FORMAT else "install carpool again"
            raise MalformedError(f"expected a memory model of format {FORMAT}, found {found}; {advice}")
        model = msgspec.json.decode(content, type=MemoryModel)
    except msgspec.DecodeError as e:
        raise MalformedError(f"expected a memory model: {e}") from e
    model.check()
    return model


@cache
def shipped() -> MemoryModel:
    """Return the memory model that the package carries."""
    return load("memory.json", read_model)


def context_mib(product: GpuProduct) -> float:
    """Estimate the CUDA context of a PyTorch process, in MiB."""
    return CONTEXT_BASE_MIB + CONTEXT_PER_SM_MIB * product.sm_count


def is_calibrated(model: MemoryModel, product: GpuProduct, precision: Precision) -> bool:
    """Whether the stack is the one that was measured."""
    return product.name == model.product and precision is model.precision


@dataclass(frozen=True, slots=True)
class Correction:
    """The model's correction of one step; independent of the GPU product."""

    line_factor: float
    """Factor to the line."""
    bound_factor: float
    """Bound over median."""
    stratum: int
    """Index of the model's factor that `bound_factor` is made of."""
    inside: bool
    """Whether the step lies inside the training data."""


def correction_of(model: MemoryModel, features: ModelFeatures, cost: StepCost, batch_size: int) -> Correction:
    """Look a step up in the trees and strata."""
    row = row_of(features, cost, batch_size)
    inside = all(low <= x <= high for x, (low, high) in zip(row, model.hull, strict=True))
    stratum = model.risk.stratum(row)
    factor = model.factors[stratum]
    if not inside:
        return Correction(1.0, factor * OUTSIDE_FACTOR, stratum, inside=False)
    answer = min(max(model.residual.predict(row), -MAX_CORRECTION), MAX_CORRECTION)
    return Correction(math.exp(answer), factor, stratum, inside=True)


def predict_memory(
    cost: StepCost,
    layers: LayerCounts,
    model: MemoryModel,
    correction: Correction,
    *,
    calibrated: bool,
    context_difference_mib: float,
) -> MemoryPrediction:
    """Predict the process's peak memory.

    Args:
        cost: The simulated step.
        layers: Decides the width of the memory class.
        model: Line and coverage.
        correction: The step's correction.
        calibrated: Whether the model was fitted on this very stack.
        context_difference_mib: CUDA context here less that of the calibrated product.
    """
    line = model.slope * cost.reserved_bytes / MIB + model.intercept_mib
    median = max(line * correction.line_factor + context_difference_mib, cost.peak_bytes / MIB)
    factor = correction.bound_factor * (1 if calibrated else ELSEWHERE_FACTOR)
    upper = math.ceil(median * factor)
    width = class_width_mib(layers)
    lower_edge = (math.ceil(median * factor**model.class_share) - 1) // width * width
    known = calibrated and correction.inside
    return MemoryPrediction(
        median_mib=math.ceil(median),
        upper_mib=upper,
        coverage=model.coverage if known else min(model.coverage, ELSEWHERE_COVERAGE),
        class_lower_mib=lower_edge,
        class_upper_mib=lower_edge + width,
    )


def class_width_mib(layers: LayerCounts) -> int:
    """Return the width of GPUMemNet's memory classes: 1 GiB for MLPs, 8 GiB for CNNs and transformers."""
    is_mlp = layers.linear > 0 and not (layers.convolution or layers.embedding or layers.recurrent)
    return 1024 if is_mlp and layers.normalization <= layers.linear else 8192


_ROUNDS = 60


class Pair(NamedTuple):
    """Simulated and measured peak of one run, in MiB."""

    simulated_mib: float
    measured_mib: float


def fit_line(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Fit `measured ≈ slope · simulated + intercept` by least absolute relative error.

    Iteratively reweighted least squares; outliers (failed runs that cleaning missed) pull with bounded weight.

    Returns:
        Slope, and intercept in MiB (at least 0).
    """
    weights = [1 / p.measured_mib**2 for p in pairs]
    slope, intercept = 1.0, 0.0
    for _ in range(_ROUNDS):
        total = sum(weights)
        x = sum(w * p.simulated_mib for w, p in zip(weights, pairs, strict=True)) / total
        y = sum(w * p.measured_mib for w, p in zip(weights, pairs, strict=True)) / total
        spread = sum(w * (p.simulated_mib - x) ** 2 for w, p in zip(weights, pairs, strict=True))
        joint = sum(w * (p.simulated_mib - x) * (p.measured_mib - y) for w, p in zip(weights, pairs, strict=True))
        slope = joint / spread if spread else 1.0
        intercept = max(y - slope * x, 0.0)
        errors = (abs(slope * p.simulated_mib + intercept - p.measured_mib) / p.measured_mib for p in pairs)
        weights = [1 / (p.measured_mib**2 * max(e, 1e-4)) for p, e in zip(pairs, errors, strict=True)]
    return slope, intercept
