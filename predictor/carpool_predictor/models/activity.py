"""Activity of a job alone on a GPU: boosted trees inside the training data, the roofline elsewhere.

The trees see the step as dimensionless physics, so that they carry over to other GPU products: GPU time over launch
time, arithmetic intensity over the product's ridge, work per kernel and SM. No feature grows with the model's depth.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import ActivityPrediction, Interval
from carpool_core.values import Precision

from carpool_predictor.features import MalformedError, StepCost, StepWork
from carpool_predictor.models import roofline
from carpool_predictor.models.artifacts import decode, load
from carpool_predictor.models.roofline import BANDWIDTH, KERNEL_S, LAUNCH_S, STEP_GAP_S, matrix_rate
from carpool_predictor.models.trees import Forest

NAMES = (
    "log_gpu_over_launch", "busy", "compute_share", "log_intensity_over_ridge", "log_flops_per_kernel_per_sm",
    "log_bytes_per_kernel_per_sm", "log_weights_over_bytes", "gap_share", "log_bytes_per_sample_per_kernel",
    "log_batch_size", "elementwise_per_product", "normalization_per_product", "convolution_share",
)  # fmt: skip
"""Names of the features, in order."""

_TINY = 1e-12


def work_of_features(features: ModelFeatures, cost: StepCost, batch_size: int) -> StepWork:
    """Return the work of the step with the given cost."""
    return StepWork(
        batch_size=batch_size,
        parameter_bytes=float(features.parameter_bytes),
        flops=cost.flops,
        bytes_moved=cost.bytes_moved,
        kernels=cost.kernels,
        layers=features.layers,
    )


def features_of(work: StepWork, product: GpuProduct, precision: Precision) -> tuple[float, ...]:
    """Return the features of one step on a GPU product, in the order of `NAMES`."""
    layers = work.layers
    # Recurrent layers and embeddings multiply matrices too.
    products = max(layers.convolution + layers.linear + layers.recurrent + layers.embedding, 1)
    rate = matrix_rate(product, precision, convolutional=layers.convolution > layers.linear)
    bandwidth = product.memory_bandwidth_gb_s * 1e9 * BANDWIDTH
    compute_s, memory_s = work.flops / rate, work.bytes_moved / bandwidth
    gpu_s = compute_s + memory_s + KERNEL_S * work.kernels
    launch_s = LAUNCH_S * work.kernels
    blocks = work.kernels * product.sm_count
    step_s = max(gpu_s, launch_s) + STEP_GAP_S
    return (
        _log(gpu_s / launch_s),
        gpu_s / step_s,
        compute_s / gpu_s,
        _log(work.flops / max(work.bytes_moved, 1.0) / (rate / bandwidth)),
        _log(work.flops / blocks),
        _log(work.bytes_moved / blocks),
        _log(work.parameter_bytes / max(work.bytes_moved, 1.0)),
        STEP_GAP_S / step_s,
        _log(work.bytes_moved / work.batch_size / work.kernels),
        _log(work.batch_size),
        (layers.activation + layers.normalization + layers.other) / products,
        layers.normalization / products,
        layers.convolution / products,
    )


def _log(value: float) -> float:
    return math.log(max(value, _TINY))


class Bins(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of a forest's errors on held-out architectures, binned by its prediction."""

    edges: list[float]
    """Predictions between the bins, ascending; one fewer than the bins."""
    lower: list[float]
    """5% quantile of (measured - predicted) in each bin."""
    upper: list[float]
    """95% quantile in each bin."""

    def around(self, predicted: float) -> tuple[float, float]:
        """Return the interval around a prediction."""
        index = bisect.bisect_left(self.edges, predicted)
        return predicted + self.lower[index], predicted + self.upper[index]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One predicted quantity."""

    forest: Forest
    convolutional: Bins
    """Errors on models with convolutions."""
    plain: Bins
    """Errors on models without."""

    def around(self, median: float, *, convolutional: bool) -> tuple[float, float, float]:
        """Return median, lower and upper end, not clipped."""
        return median, *(self.convolutional if convolutional else self.plain).around(median)

    def check(self, features: int) -> None:
        """Refuse a target that cannot be evaluated.

        Raises:
            MalformedError: The forest is invalid, or bins and edges do not match.
        """
        self.forest.check(features)
        for bins in (self.convolutional, self.plain):
            if not len(bins.lower) == len(bins.upper) == len(bins.edges) + 1:
                raise MalformedError("expected one bin more than edges; install carpool again")


FORMAT = 2
"""Version of the artifact's layout."""
SLACK = 0.7
"""Distance outside the training range that a feature may have; about a factor of two, as most are logarithms."""
UNMEASURED_FACTOR = 1.5
"""Factor to the intervals on a product or precision that was not measured. Assumed: the data has one product."""


class ActivityModel(msgspec.Struct, frozen=True, kw_only=True):
    """The stored model."""

    format: int
    version: str
    product: str
    """GPU product of the measurements."""
    precision: Precision
    features: list[str]
    low: list[float]
    """Smallest value of each feature in the training data."""
    high: list[float]
    gpu_util_percent: Target
    sm_active_ratio: Target
    sm_occupancy_ratio: Target
    provenance: dict[str, str | int | float]

    @property
    def targets(self) -> tuple[Target, Target, Target]:
        """GPU utilization, SM activity and occupancy."""
        return self.gpu_util_percent, self.sm_active_ratio, self.sm_occupancy_ratio


def read_model(content: bytes) -> ActivityModel:
    """Return the model of an artifact's content.

    Raises:
        MalformedError: The content is truncated, changed, or of another version.
    """
    model = decode(content, ActivityModel, "an activity model", FORMAT)
    if tuple(model.features) != NAMES:
        raise MalformedError("expected an activity model with this version's features; install carpool again")
    if not len(model.low) == len(model.high) == len(NAMES):
        raise MalformedError("the activity model's hull lacks features; install carpool again")
    for target in model.targets:
        target.check(len(NAMES))
    return model


@cache
def shipped() -> ActivityModel:
    """Return the model in the package."""
    return load("activity.json", read_model)


def is_inside(features: Sequence[float], model: ActivityModel) -> bool:
    """Whether a step lies inside the training data."""
    return all(
        low - SLACK <= value <= high + SLACK for value, low, high in zip(features, model.low, model.high, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """Activity on one GPU product."""

    activity: ActivityPrediction
    inside: bool
    """Whether the trees answered; otherwise the roofline did."""
    measured: bool = False
    """Whether the trees answered for the measured product and precision; elsewhere the interval is assumed."""


def activity_on(features: ModelFeatures, cost: StepCost, training: Training, product: GpuProduct) -> Answer:
    """Predict the activity of a job alone on a GPU; `cost` is its step at the training's batch size.

    DRAM activity is the roofline's everywhere, scaled by the predicted utilization, because no data has it.
    """
    layers = features.layers
    plain = roofline.activity_on(cost, product, training.precision, convolutional=layers.convolution > layers.linear)
    guess = roofline.intervals(plain)
    model = shipped()
    row = features_of(work_of_features(features, cost, training.batch_size), product, training.precision)
    if not is_inside(row, model):
        return Answer(guess, inside=False)
    util, sm_active, occupancy = (target.forest.predict(row) for target in model.targets)
    measured = (product.name, training.precision) == (model.product, model.precision)
    widening = 1.0 if measured else UNMEASURED_FACTOR
    some = layers.convolution > 0
    busy = _interval(model.gpu_util_percent.around(util, convolutional=some), 100.0, widening)
    dram = guess.dram_active_ratio
    median = round(min(plain.dram_active * busy.median / 100 / max(plain.gpu_util, 0.01), 1.0), 4)
    activity = ActivityPrediction(
        gpu_util_percent=busy,
        sm_active_ratio=_interval(model.sm_active_ratio.around(sm_active, convolutional=some), 1.0, widening),
        dram_active_ratio=Interval(median=median, lower=min(dram.lower, median), upper=max(dram.upper, median)),
        sm_occupancy_ratio=_interval(model.sm_occupancy_ratio.around(occupancy, convolutional=some), 1.0, widening),
    )
    return Answer(activity, inside=True, measured=measured)


def _interval(predicted: tuple[float, float, float], unit: float, widening: float) -> Interval:
    median, lower, upper = predicted
    ends = (median - (median - lower) * widening, median + (upper - median) * widening)
    inside = [round(min(max(value, 0.0), unit), 4) for value in (median, *ends)]
    return Interval(median=inside[0], lower=min(inside[1], inside[0]), upper=max(inside[2], inside[0]))
