"""All that `carpool predict` says of one job: the prediction, its parts, and what would fit."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from carpool_core.products import GpuProduct
from carpool_core.resources.prediction import ActivityPrediction, Interval, MemoryPrediction, Prediction

from carpool_predictor.calibration.document import Calibration
from carpool_predictor.features.abstention import Abstention
from carpool_predictor.prediction.estimator import Job, OnProduct, abstained, summary
from carpool_predictor.prediction.fitting import BatchFinder, LargestBatch, usable_mib, usable_of_profile_mib
from carpool_predictor.prediction.parts import MemoryParts, parts_of


@dataclass(frozen=True, slots=True)
class ProductReport:
    """What is said of one GPU product."""

    answer: OnProduct
    parts: MemoryParts
    largest: LargestBatch
    """On the whole GPU."""
    mig: dict[str, LargestBatch]
    """On an instance of each MIG profile."""


@dataclass(frozen=True, slots=True)
class Report:
    """What is said of one job."""

    name: str
    prediction: Prediction
    memory_inside: bool = False
    """Whether the model is like those whose memory was measured."""
    products: tuple[ProductReport, ...] = ()
    steps: int | None = None
    """Of the whole training; None where nobody said."""


def report_on(
    name: str, job: Job | Abstention, gpus: Sequence[GpuProduct], calibration: Calibration | None = None
) -> Report:
    """Predict a job on each product, and look at what would fit."""
    if isinstance(job, Abstention):
        return Report(name, abstained(job))
    common = BatchFinder(job)
    products = []
    for product in gpus:
        here = job.calibrated(calibration, product)
        products.append(_on(here, common if here is job else BatchFinder(here), product))
    prediction = summary(job, [product.answer for product in products])
    if not any(_fits(product, gpu) for product, gpu in zip(products, gpus, strict=True)):
        where = f"does not fit {gpus[0].name}" if len(gpus) == 1 else "fits none of these GPU products"
        message = f"by its bound, batch {job.training.batch_size:,} {where}; {prediction.message}"
        prediction = msgspec.structs.replace(prediction, message=message)
    return Report(name, prediction, job.corrected.inside, tuple(products), job.training.steps)


def length_of(steps: int, step_time_s: Interval) -> Interval:
    """Return how long a training takes alone, in seconds: what is wrong with the time of a step is so with each."""
    return Interval(**{end: steps * value for end, value in interval_json(step_time_s).items()})


def _fits(product: ProductReport, gpu: GpuProduct) -> bool:
    return product.answer.prediction.memory.upper_mib <= usable_mib(gpu)


def _on(job: Job, finder: BatchFinder, product: GpuProduct) -> ProductReport:
    answer = job.on(product)
    return ProductReport(
        answer,
        parts_of(job, product, answer.prediction.memory),
        finder.within(product, usable_mib(product)),
        {p: finder.within(product, usable_of_profile_mib(product, p)) for p in product.mig_profiles},
    )


def as_json(report: Report) -> dict[str, Any]:
    """Return plain values, units in the names."""
    prediction = report.prediction
    return {
        "id": report.name,
        "status": "ok" if prediction.outcome == "Predicted" else "abstained",
        "reason": prediction.reason,
        "message": prediction.message,
        "model_version": prediction.model_version,
        "products": [_product(report, product) for product in report.products],
    }


def _product(report: Report, product: ProductReport) -> dict[str, Any]:
    found = product.answer.prediction
    return {
        "gpu": found.product,
        "memory": {
            **memory_json(found.memory),
            "parts": {name: round(value, 1) for name, value in asdict(product.parts).items()},
        },
        "activity": activity_json(found.activity),
        "step_time_s": interval_json(found.step_time_seconds),
        **length_json(report.steps, found.step_time_seconds),
        "inside_training": {
            "memory": report.memory_inside and product.answer.memory_calibrated,
            "activity": product.answer.activity_measured,
            "step_time": product.answer.step_time_inside,
        },
        "largest_batch": _largest(product.largest),
        "mig": {profile: {"largest_batch": _largest(found)} for profile, found in product.mig.items()},
    }


def _largest(found: LargestBatch) -> dict[str, Any]:
    return {
        "batch_size": found.batch_size,
        "limited_by_trace": found.limited_by_trace,
        "fewer_than": found.fewer_than,
    }


def memory_json(memory: MemoryPrediction) -> dict[str, Any]:
    """Return memory with its unit in the names."""
    return {
        "median_mib": memory.median_mib,
        "upper_mib": memory.upper_mib,
        "coverage": memory.coverage,
        "class": {"lower_mib": memory.class_lower_mib, "upper_mib": memory.class_upper_mib},
    }


def activity_json(activity: ActivityPrediction) -> dict[str, Any]:
    """Return activity with its units in the names."""
    occupancy = activity.sm_occupancy_ratio
    return {
        "gpu_util_percent": interval_json(activity.gpu_util_percent),
        "sm_active_ratio": interval_json(activity.sm_active_ratio),
        "sm_occupancy_ratio": None if occupancy is None else interval_json(occupancy),
        "dram_active_ratio": interval_json(activity.dram_active_ratio),
    }


def length_json(steps: int | None, step_time_s: Interval) -> dict[str, dict[str, float]]:
    """Return how long the training takes alone, with its unit in the name; nothing where its steps are not known."""
    return {} if steps is None else {"length_s": interval_json(length_of(steps, step_time_s))}


def interval_json(interval: Interval) -> dict[str, float]:
    """Return median and ends."""
    return {"median": interval.median, "lower": interval.lower, "upper": interval.upper}
