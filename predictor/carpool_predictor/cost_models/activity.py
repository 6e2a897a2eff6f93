"""Activity of a job alone on a GPU: learned where the training data reach, the roofline elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import ActivityPrediction, Interval
from carpool_core.values import Precision

from carpool_predictor.cost_models import roofline
from carpool_predictor.cost_models.activity_features import NAMES, features_of, work_of_features
from carpool_predictor.cost_models.activity_trees import Target
from carpool_predictor.cost_models.quickscorer import Ensemble
from carpool_predictor.cost_models.shipping import load
from carpool_predictor.features.interpolation import StepCost
from carpool_predictor.features.malformed import MalformedError

FORMAT = 2
"""Version of the artifact's layout."""
SLACK = 0.7
"""How far outside what was learned a feature may lie; nearly all are logarithms, so a factor of two."""
CARRIED = 1.5
"""Factor to the intervals on a product or precision that was not measured. Not learned: nobody measured two."""


class ActivityModel(msgspec.Struct, frozen=True, kw_only=True):
    """The stored model."""

    format: int
    version: str
    product: str
    """GPU product that it was measured on."""
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

    def ensemble(self) -> Ensemble:
        """Return what predicts the three targets at once, in their order."""
        return Ensemble([target.forest for target in self.targets], len(self.features))


def read_model(content: bytes) -> ActivityModel:
    """Read a stored model.

    Raises:
        MalformedError: It is truncated, was tampered with, or is of another version.
    """
    try:
        model = msgspec.json.decode(content, type=ActivityModel)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise MalformedError(f"the activity model cannot be read: {e}; build it again with `carpool train`") from e
    if model.format != FORMAT or tuple(model.features) != NAMES:
        raise MalformedError(
            f"the activity model has format {model.format}, expected {FORMAT} with this version's features; "
            "build it again with `carpool train`"
        )
    if not len(model.low) == len(model.high) == len(NAMES):
        raise MalformedError("the activity model's hull lacks features; build it again with `carpool train`")
    for target in model.targets:
        target.check(len(NAMES))
    return model


@cache
def shipped() -> ActivityModel:
    """Return the model that comes with the package."""
    return load("activity.json", read_model)


@cache
def _ensemble() -> Ensemble:
    return shipped().ensemble()


def is_known(features: Sequence[float], model: ActivityModel) -> bool:
    """Whether a step lies within what the model has seen."""
    return all(
        low - SLACK <= value <= high + SLACK for value, low, high in zip(features, model.low, model.high, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """Activity on one GPU product."""

    activity: ActivityPrediction
    inside: bool
    """Whether the step lies inside what was learned; otherwise the roofline answered."""
    measured: bool = False
    """Whether it does, and steps were measured on this product in this precision: elsewhere the interval is assumed."""


def activity_on(features: ModelFeatures, cost: StepCost, training: Training, product: GpuProduct) -> Answer:
    """Predict how busy a job keeps a GPU that it has alone.

    DRAM activity was not measured by anybody whose data may be used, so it is the roofline's everywhere, scaled by how
    busy the GPU is.

    Args:
        features: The model's layers and sizes.
        cost: Its step at the job's batch size.
        training: The job's batch size and precision.
        product: What it runs on.
    """
    layers = features.layers
    plain = roofline.activity_on(cost, product, training.precision, convolutional=layers.convolution > layers.linear)
    guess = roofline.intervals(plain)
    model = shipped()
    row = features_of(work_of_features(features, cost, training.batch_size), product, training.precision)
    if not is_known(row, model):
        return Answer(guess, inside=False)
    util, sm_active, occupancy = _ensemble().predict(row)
    measured = (product.name, training.precision) == (model.product, model.precision)
    widening = 1.0 if measured else CARRIED
    some = layers.convolution > 0
    busy = _interval(model.gpu_util_percent.around(util, convolutional=some), 100.0, widening)
    # What the roofline gives to DRAM it gives to a GPU as busy as the roofline thinks.
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
