"""Predicts memory, activity and step time from features. Pure, without PyTorch or NumPy; microseconds a product."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from carpool_core.products import GpuProduct, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import MemoryPrediction, Prediction, ProductPrediction

from carpool_predictor import activity, step_time
from carpool_predictor.abstention import Abstention
from carpool_predictor.calibration import Calibration, model_for
from carpool_predictor.checks import reason_to_abstain
from carpool_predictor.interpolation import StepCost, cost_at
from carpool_predictor.memory import (
    Corrected,
    MemoryModel,
    context_mib,
    correct,
    is_calibrated,
    predict_memory,
    shipped,
)

__all__ = ["Abstention", "Job", "OnProduct", "model_version", "predict", "prepare"]

_MAX_PEAK_BYTES = 2.0**50
"""1 PiB: beyond any single-GPU training step."""


def model_version(model: MemoryModel | None = None) -> str:
    """Return the versions of all that predicts: memory, activity, step time."""
    memory = (model or shipped()).version
    return f"memory/{memory} activity/{activity.shipped().version} step-time/{step_time.shipped().version}"


@cache
def _context_mib(product: str) -> float:
    return context_mib(find_product(product))


@dataclass(frozen=True, slots=True)
class OnProduct:
    """A job on one GPU product, and which of the answers were learned from such jobs."""

    prediction: ProductPrediction
    memory_calibrated: bool
    """Whether memory was measured on this product in this precision."""
    activity_inside: bool
    step_time_inside: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A job that can be predicted, whatever the product."""

    features: ModelFeatures
    training: Training
    cost: StepCost
    """Its step at its batch size."""
    model: MemoryModel
    corrected: Corrected

    def calibrated(self, calibration: Calibration | None, product: GpuProduct) -> "Job":
        """Return the job as the stack of a product sees it; the same one where nothing was learned of that stack."""
        if calibration is None:
            return self
        model = model_for(calibration, product, self.training.precision, self.model)
        if model is self.model:
            return self
        corrected = correct(model, self.features, self.cost, self.training.batch_size)
        return Job(self.features, self.training, self.cost, model, corrected)

    def memory_on(self, product: GpuProduct) -> MemoryPrediction:
        """Predict memory alone."""
        return predict_memory(
            self.cost,
            self.features.layers,
            self.model,
            self.corrected,
            calibrated=is_calibrated(self.model, product, self.training.precision),
            context_difference_mib=context_mib(product) - _context_mib(self.model.product),
        )

    def on(self, product: GpuProduct) -> OnProduct:
        """Predict memory, activity and step time."""
        layers, precision = self.features.layers, self.training.precision
        busy = activity.activity_on(self.features, self.cost, self.training, product)
        time = step_time.step_time_on(self.cost, product, precision, convolutional=layers.convolution > layers.linear)
        prediction = ProductPrediction(
            product=product.name,
            memory=self.memory_on(product),
            activity=busy.activity,
            step_time_seconds=time.seconds,
        )
        return OnProduct(prediction, is_calibrated(self.model, product, precision), busy.inside, time.inside)


def prepare(
    features: ModelFeatures | Abstention, training: Training, model: MemoryModel | None = None
) -> Job | Abstention:
    """Reckon what does not depend on the product, or say why there is no answer.

    Args:
        features: Traced features, or why there are none.
        training: The job's training; features must have been traced with its optimizer, precision and checkpointing.
        model: The memory model; the shipped one when left out.
    """
    if isinstance(features, Abstention):
        return features
    refusal = reason_to_abstain(features, training)
    if refusal is not None:
        return refusal
    cost = cost_at(features, training.batch_size)
    if cost.peak_bytes > _MAX_PEAK_BYTES:
        return Abstention(
            reason="FeaturesAbsurd",
            message=f"batch size {training.batch_size:,} needs {cost.peak_bytes:.3g} bytes; check the features",
        )
    model = model or shipped()
    return Job(features, training, cost, model, correct(model, features, cost, training.batch_size))


def predict(
    features: ModelFeatures | Abstention,
    training: Training,
    gpus: Sequence[GpuProduct],
    calibration: Calibration | None = None,
) -> Prediction:
    """Predict a job on each GPU product, or abstain.

    Args:
        features: Traced features, or why there are none.
        training: The job's training; features must have been traced with its optimizer, precision and checkpointing.
        gpus: Products to predict for; the answer keeps their order.
        calibration: What finished jobs taught of their stacks.

    Returns:
        A prediction whose `input_digest` is left to the caller, who knows the model's source.
    """
    job = prepare(features, training)
    if isinstance(job, Abstention):
        return abstained(job)
    return summary(job, [job.calibrated(calibration, product).on(product) for product in gpus])


def summary(job: Job, answers: Sequence[OnProduct]) -> Prediction:
    """Put the answers for all products together, with the sentence that says what they are worth."""
    return Prediction(
        outcome="Predicted",
        reason=reason_of(job, answers),
        message=_message(job, answers),
        model_version=model_version(job.model),
        products=[answer.prediction for answer in answers],
    )


def reason_of(job: Job, answers: Sequence[OnProduct]) -> str:
    """Say in one word what the bound on memory rests on."""
    if not all(answer.memory_calibrated for answer in answers):
        return "Uncalibrated"
    return "Calibrated" if job.corrected.inside else "OutsideTraining"


def _message(job: Job, answers: Sequence[OnProduct]) -> str:
    batches = ", ".join(str(step.batch_size) for step in job.features.steps)
    told = [f"from training steps traced at batch sizes {batches}"]
    if not job.corrected.inside:
        told.append("the model is unlike those that were measured, so the bound on memory is wider")
    if not all(answer.memory_calibrated for answer in answers):
        told.append(
            f"memory is calibrated on {job.model.product} in {job.model.precision} only, so the bound is wider on "
            "other GPU products and precisions"
        )
    outside = [a.prediction.product for a in answers if not a.activity_inside]
    if outside:
        where = "" if len(outside) == len(answers) else f" on {', '.join(outside)}"
        told.append(f"activity{where} is a roofline estimate, because no step like this was measured")
    measured = activity.shipped()
    elsewhere = job.training.precision is not measured.precision or any(
        answer.activity_inside and answer.prediction.product != measured.product for answer in answers
    )
    if elsewhere and len(outside) < len(answers):
        told.append(
            f"activity was measured on {measured.product} in {measured.precision} only, so its interval elsewhere is "
            "assumed"
        )
    if not all(answer.step_time_inside for answer in answers):
        told.append("step times with tensor cores were not measured, so their interval is wider")
    return "; ".join(told)


def abstained(abstention: Abstention) -> Prediction:
    """Return the prediction that says that there is none."""
    return Prediction(
        outcome="Abstained", reason=abstention.reason, message=abstention.message, model_version=model_version()
    )
