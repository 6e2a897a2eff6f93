"""Activity of a job alone on a GPU: learned where the training data reach, the roofline elsewhere."""

from functools import cache
from importlib.resources import files

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import ActivityPrediction, Interval
from carpool_core.values import Precision

from carpool_predictor import roofline
from carpool_predictor.activity_features import NAMES, features_of, work_of_features
from carpool_predictor.activity_trees import ArtifactError, Target
from carpool_predictor.interpolation import cost_at

FORMAT = 1
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


def read_model(content: bytes) -> ActivityModel:
    """Read a stored model.

    Raises:
        ArtifactError: It is truncated, was tampered with, or is of another version.
    """
    try:
        model = msgspec.json.decode(content, type=ActivityModel)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ArtifactError(f"the activity model cannot be read: {e}; build it again with `carpool train`") from e
    if model.format != FORMAT or tuple(model.features) != NAMES:
        raise ArtifactError(
            f"the activity model has format {model.format}, expected {FORMAT} with this version's features; "
            "build it again with `carpool train`"
        )
    if not len(model.low) == len(model.high) == len(NAMES):
        raise ArtifactError("the activity model's hull lacks features; build it again with `carpool train`")
    for target in (model.gpu_util_percent, model.sm_active_ratio, model.sm_occupancy_ratio):
        target.check(len(NAMES))
    return model


@cache
def shipped() -> ActivityModel:
    """Return the model that comes with the package."""
    return read_model(files("carpool_predictor").joinpath("activity.json").read_bytes())


def is_known(features: tuple[float, ...], model: ActivityModel) -> bool:
    """Whether a step lies within what the model has seen."""
    return all(
        low - SLACK <= value <= high + SLACK for value, low, high in zip(features, model.low, model.high, strict=True)
    )


def activity_on(features: ModelFeatures, training: Training, product: GpuProduct) -> ActivityPrediction:
    """Predict how busy a job keeps a GPU that it has alone.

    DRAM activity was not measured by anybody whose data may be used, so it is the roofline's everywhere, scaled by how
    busy the GPU is.
    """
    convolutional = features.layers.convolution > features.layers.linear
    plain = roofline.activity_on(
        cost_at(features, training.batch_size), product, training.precision, convolutional=convolutional
    )
    guess, _ = roofline.intervals(plain)
    model = shipped()
    found = features_of(work_of_features(features, training), product, training.precision)
    if not is_known(found, model):
        return guess
    widening = 1.0 if (product.name, training.precision) == (model.product, model.precision) else CARRIED
    some = features.layers.convolution > 0
    util = _interval(model.gpu_util_percent.predict(found, convolutional=some), 100.0, widening)
    sm_active = _interval(model.sm_active_ratio.predict(found, convolutional=some), 1.0, widening)
    busier = util.median / 100 / max(plain.gpu_util, 0.01)
    dram = Interval(
        median=round(min(plain.dram_active * busier, 1.0), 4),
        lower=guess.dram_active_ratio.lower,
        upper=guess.dram_active_ratio.upper,
    )
    inside = msgspec.structs.replace(dram, lower=min(dram.lower, dram.median), upper=max(dram.upper, dram.median))
    return ActivityPrediction(gpu_util_percent=util, sm_active_ratio=sm_active, dram_active_ratio=inside)


def occupancy_on(features: ModelFeatures, training: Training, product: GpuProduct) -> Interval | None:
    """Predict the share of warp slots in use, 0..1; None outside what was learned."""
    model = shipped()
    found = features_of(work_of_features(features, training), product, training.precision)
    if not is_known(found, model):
        return None
    widening = 1.0 if (product.name, training.precision) == (model.product, model.precision) else CARRIED
    some = features.layers.convolution > 0
    return _interval(model.sm_occupancy_ratio.predict(found, convolutional=some), 1.0, widening)


def _interval(predicted: tuple[float, float, float], unit: float, widening: float) -> Interval:
    median, lower, upper = predicted
    ends = (median - (median - lower) * widening, median + (upper - median) * widening)
    inside = [round(min(max(value, 0.0), unit), 4) for value in (median, *ends)]
    return Interval(median=inside[0], lower=min(inside[1], inside[0]), upper=max(inside[2], inside[0]))
