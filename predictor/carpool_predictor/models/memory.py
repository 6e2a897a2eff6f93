"""Memory model: from the simulated step to the peak that `nvidia-smi` shows, with an upper bound and a class.

    line   = slope · reserved + intercept - context(A100) + context(product)
    median = line · exp(residual)          inside the training data; outside of it the line, or for steps without
                                           large workspaces of convolutions reserved + 1250 MiB
    upper  = median · factor(stratum)      steps with more risk to exceed the median have a larger factor
    class  = the class of median · factor(stratum) ^ share

Static tools cannot see the CUDA context and the workspaces of cuDNN and cuBLAS. They belong to the site: slope and
intercept are fitted for one stack. Trees correct the rest. All numbers are shipped with their provenance.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import mul
from typing import Annotated, NamedTuple

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.features import LayerCounts, ModelFeatures
from carpool_core.resources.prediction import MemoryPrediction
from carpool_core.values import MIB, Precision
from msgspec import Meta

from carpool_predictor.features import MalformedError, StepCost
from carpool_predictor.models.artifacts import decode, load
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
"""Names of the model's inputs, in the artifact's order."""


def row_of(features: ModelFeatures, cost: StepCost, batch_size: int) -> tuple[float, ...]:
    """Return the model's inputs for a step, one number for each of `COLUMNS`."""
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
"""Version of the artifact's layout."""
CONTEXT_BASE_MIB = 130
CONTEXT_PER_SM_MIB = 2.8
"""CUDA context with PyTorch's kernels: a constant part, and local memory for each SM. Assumed, not fitted.

About 430 MiB on an A100 (108 SMs), 240 MiB on a T4 (40 SMs)."""

STRATA = 16
"""Most strata that a model may have and that the calibration keeps."""
ELSEWHERE_FACTOR = 1.25
"""Factor to the bound on an uncalibrated stack: another product or precision."""
DERIVED_FACTOR = 1.25
"""Further factor to the bound and to the step time's interval on a product that is derived from NVML. Assumed."""
ELSEWHERE_COVERAGE = 0.9
"""Coverage claimed on an uncalibrated stack and outside the training data. Assumed."""
OUTSIDE_FACTOR = 1.15
"""Factor to the bound outside the training data, where only the line predicts; see the model card."""
PLAIN_MIB = 1250
"""Memory of a process without tensors on the fitted product, for steps outside the training data whose convolutions
need no large workspaces. It was chosen on peaks of processes, as the next two numbers were; see decision 70."""
PLAIN_OUTSIDE_FACTOR = 1.07
"""The factor outside the training data for these steps, on every stack: of 53 peaks of processes without quantized
weights one is further above its median than the bound, by 4%."""
QUANTIZED_FACTOR = 1.2
"""Further factor to it with quantized weights: of 20 peaks two of one model are further above, by 7% and 9%."""
WORKSPACE_SHARE = 0.05
"""Largest unfolded input of a convolution, as a share of reserved memory, up to which cuDNN's workspaces do not matter.

Patch embeddings of transformers stay below a hundredth."""
MAX_CORRECTION = 0.35
"""Largest absolute residual, a logarithm."""


class Risk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A linear score of a step's risk to exceed its median by much, and its division into strata."""

    weights: list[float]
    """One weight for each column."""
    intercept: float
    edges: list[float]
    """Scores between strata, ascending."""

    def stratum(self, row: Sequence[float]) -> int:
        """Return the stratum of a step; 0 has the least risk."""
        score = self.intercept + sum(w * x for w, x in zip(self.weights, row, strict=True))
        return bisect_right(self.edges, score)


class MemoryModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The memory model of one stack, with provenance."""

    format: int
    """Version of the layout, `FORMAT`."""
    version: str
    """Version of the numbers, a part of `Prediction.modelVersion`."""
    product: str
    """GPU product of the stack."""
    precision: Precision
    """Precision of the stack."""
    slope: _NUMBER
    """Measured MiB per MiB that the allocator holds."""
    intercept_mib: Annotated[float, Meta(ge=0, le=1e6)]
    """Measured MiB without tensors: context, workspaces and libraries."""
    columns: list[str]
    """Names of the numbers that `row_of` returns."""
    residual: Forest
    """Logarithm of measured memory over the line."""
    hull: list[tuple[float, float]]
    """Range of each column in the training data, with a margin."""
    risk: Risk
    """Division of steps into strata."""
    factors: list[Annotated[float, Meta(ge=1, le=100)]]
    """Bound over median, for each stratum of `risk`."""
    class_share: Annotated[float, Meta(ge=0, le=1)]
    """Position of the class's value between median (0) and bound (1), in logarithms."""
    coverage: Annotated[float, Meta(ge=0, le=1)]
    """Coverage of the bound."""
    provenance: dict[str, str | float | int]
    """Data, rows, split, seed, versions, and errors on held-out families."""
    doubt: Annotated[float, Meta(ge=1, le=ELSEWHERE_FACTOR)] = 1.0
    """Further factor to the bounds of steps that may need large workspaces, on a stack that learned from its jobs."""

    def check(self) -> None:
        """Refuse an artifact that does not fit this code.

        Raises:
            MalformedError: Columns, strata, hull or trees are inconsistent.
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


def read_model(content: bytes) -> MemoryModel:
    """Return the model of an artifact's content.

    Raises:
        MalformedError: The content is truncated, changed, or of another version.
    """
    model = decode(content, MemoryModel, "a memory model", FORMAT)
    model.check()
    return model


@cache
def shipped() -> MemoryModel:
    """Return the memory model in the package."""
    return load("memory.json", read_model)


def context_mib(product: GpuProduct) -> float:
    """Return the estimated CUDA context of a PyTorch process, in MiB."""
    return CONTEXT_BASE_MIB + CONTEXT_PER_SM_MIB * product.sm_count


def is_calibrated(model: MemoryModel, product: GpuProduct, precision: Precision) -> bool:
    """Whether the model was fitted on this product and precision; TF32 takes the memory of FP32."""
    stored = Precision.FP32 if precision is Precision.TF32 else precision
    return product.name == model.product and stored is model.precision


@dataclass(frozen=True, slots=True)
class Correction:
    """The model's correction of one step; independent of the GPU product."""

    line_factor: float
    """Factor to the line."""
    bound_factor: float
    """Bound over median."""
    elsewhere_factor: float
    """The same on an uncalibrated stack; greater only for steps that may need large workspaces."""
    stratum: int
    """Index of the model's factor that `bound_factor` is made of."""
    inside: bool
    """Whether the step lies inside the training data."""


def line_mib(model: MemoryModel, cost: StepCost) -> float:
    """Return the fitted line at a step."""
    return model.slope * cost.reserved_bytes / MIB + model.intercept_mib


def correction_of(model: MemoryModel, features: ModelFeatures, cost: StepCost, batch_size: int) -> Correction:
    """Return the correction of a step by the trees and strata."""
    row = row_of(features, cost, batch_size)
    inside = all(low <= x <= high for x, (low, high) in zip(row, model.hull, strict=True))
    stratum = model.risk.stratum(row)
    if not inside:
        if cost.unfolded_bytes <= WORKSPACE_SHARE * cost.reserved_bytes:
            # Strata rank the risk of large workspaces, and extrapolate badly to language models; see decision 57.
            factor = model.factors[0] * PLAIN_OUTSIDE_FACTOR * (QUANTIZED_FACTOR if features.quantization else 1)
            # A stack learns its line from measured peaks over this factor, which must not change with the line.
            plain_mib = cost.reserved_bytes / MIB + PLAIN_MIB
            return Correction(plain_mib / line_mib(shipped(), cost), factor, factor, 0, inside=False)
        factor = model.factors[stratum] * model.doubt * OUTSIDE_FACTOR
        return Correction(1.0, factor, factor * ELSEWHERE_FACTOR, stratum, inside=False)
    factor = model.factors[stratum] * model.doubt
    answer = min(max(model.residual.predict(row), -MAX_CORRECTION), MAX_CORRECTION)
    return Correction(math.exp(answer), factor, factor * ELSEWHERE_FACTOR, stratum, inside=True)


def predict_memory(
    cost: StepCost,
    layers: LayerCounts,
    model: MemoryModel,
    correction: Correction,
    *,
    calibrated: bool,
    context_difference_mib: float,
    is_derived: bool = False,
) -> MemoryPrediction:
    """Predict the peak memory of the process.

    The layers decide the width of the memory class. `calibrated` is whether the model was fitted on this stack, and
    `context_difference_mib` the CUDA context on this product less that on the calibrated one.
    """
    median = max(line_mib(model, cost) * correction.line_factor + context_difference_mib, cost.peak_bytes / MIB)
    factor = correction.bound_factor
    if not calibrated:
        factor = correction.elsewhere_factor * (DERIVED_FACTOR if is_derived else 1)
    # The stack of a derived product is unknown, too: its jobs have at least the fitted stack's memory without tensors.
    least = line_mib(model, cost) + context_difference_mib if is_derived and not correction.inside else 0.0
    upper = math.ceil(max(median, least) * factor)
    width = class_width_mib(layers)
    lower_edge = (math.ceil(median * factor**model.class_share) - 1) // width * width
    is_measured = calibrated and correction.inside
    return MemoryPrediction(
        median_mib=math.ceil(median),
        upper_mib=upper,
        coverage=model.coverage if is_measured else min(model.coverage, ELSEWHERE_COVERAGE),
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

    Iteratively reweighted least squares, so that outliers have bounded influence.

    Returns:
        Slope, and intercept in MiB (at least 0).
    """
    xs, ys = [p.simulated_mib for p in pairs], [p.measured_mib for p in pairs]
    weights = [1 / y**2 for y in ys]
    slope, intercept = 1.0, 0.0
    for _ in range(_ROUNDS):
        total = sum(weights)
        x, y = sum(map(mul, weights, xs)) / total, sum(map(mul, weights, ys)) / total
        offsets = [value - x for value in xs]
        spread = sum(w * offset**2 for w, offset in zip(weights, offsets, strict=True))
        joint = sum(w * offset * (value - y) for w, offset, value in zip(weights, offsets, ys, strict=True))
        slope = joint / spread if spread else 1.0
        intercept = max(y - slope * x, 0.0)
        lines = [slope * value + intercept for value in xs]
        errors = [abs(line - value) / value for line, value in zip(lines, ys, strict=True)]
        before, weights = weights, [1 / (y**2 * max(e, 1e-4)) for y, e in zip(ys, errors, strict=True)]
        if weights == before:
            break
    return slope, intercept
