"""Predicts memory, activity and step time from features. Pure, without PyTorch or NumPy; microseconds a product."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import msgspec
from carpool_core.products import GpuProduct, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import MemoryPrediction, Prediction, ProductPrediction
from carpool_core.values import MIB

from carpool_predictor.calibration import recalling
from carpool_predictor.calibration.busier import Busier, busier, scaled
from carpool_predictor.calibration.document import Calibration, model_for
from carpool_predictor.cost_models import activity, step_time
from carpool_predictor.cost_models.memory import (
    Corrected,
    MemoryModel,
    context_mib,
    correct,
    is_calibrated,
    predict_memory,
    shipped,
)
from carpool_predictor.features.abstention import Abstention
from carpool_predictor.features.checks import reason_to_abstain
from carpool_predictor.features.interpolation import StepCost, cost_at
from carpool_predictor.prediction.answers import OnProduct, message_of

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
class Job:
    """A job that can be predicted, whatever the product."""

    features: ModelFeatures
    training: Training
    cost: StepCost
    """Its step at its batch size."""
    model: MemoryModel
    corrected: Corrected
    jobs: int = 0
    """Jobs that the line of its stack was learned from; 0: as shipped."""
    recalled: recalling.Recalled | None = None
    """What earlier runs of it showed on that stack."""
    busier: Busier | None = None
    """How busy jobs like it were measured to keep that stack's GPUs; None: as shipped."""

    @property
    def reserved_mib(self) -> float:
        """What the simulated allocator holds."""
        return max(self.cost.reserved_bytes / MIB, 1.0)

    def calibrated(self, calibration: Calibration | None, product: GpuProduct, name: str = "") -> "Job":
        """Return the job as the stack of a product sees it; the same one where nothing was learned of that stack.

        Args:
            calibration: What jobs that ran taught.
            product: The product.
            name: Name or digest of the model, under which its runs were observed.
        """
        precision = self.training.precision
        state = None if calibration is None else calibration.best(product.name, precision)
        if calibration is None or state is None:
            return self
        model = model_for(calibration, product, precision, self.model)
        corrected = self.corrected
        if model is not self.model:
            # Trees, hull and strata are those of the model that it sets out from; only the bound is another.
            own, shipped_factor = model.factors[corrected.stratum], self.model.factors[corrected.stratum]
            corrected = replace(corrected, factor=corrected.factor * own / shipped_factor)
        recalled = recalling.recall(calibration, product.name, precision, name, self.reserved_mib) if name else None
        return replace(
            self,
            model=model,
            corrected=corrected,
            jobs=state.learned_from,
            recalled=recalled,
            busier=busier(calibration, product.name, precision, name),
        )

    def memory_on(self, product: GpuProduct) -> MemoryPrediction:
        """Predict memory alone; what earlier runs of the job showed takes the place of what is predicted."""
        found = predict_memory(
            self.cost,
            self.features.layers,
            self.model,
            self.corrected,
            calibrated=is_calibrated(self.model, product, self.training.precision),
            context_difference_mib=context_mib(product) - _context_mib(self.model.product),
        )
        recalled, correction = self.recalled, self.corrected.correction
        found = msgspec.structs.replace(found, learned_jobs=self.jobs, learned_gist=recalling.gist(recalled))
        if recalled is not None:
            found = recalling.with_memory(found, recalled, correction)
        if recalled is not None and recalling.is_in_vain(recalled, product, correction):
            # Trusted, so that placement refuses it such a GPU instead of giving it one of its own again.
            return msgspec.structs.replace(found, learned_runs=recalled.known, trusted=True)
        is_alone = recalling.is_alone(found, product, recalled)
        if recalled is None or (is_alone and not recalled.peak_mib and not recalled.deaths):
            # What ran too short to show its peak has taught nothing of it: the next run is a first one.
            return msgspec.structs.replace(found, trusted=not is_alone)
        return msgspec.structs.replace(found, learned_runs=recalled.known, trusted=not (recalled.is_lost or is_alone))

    def on(self, product: GpuProduct, *, is_strict: bool = False, before: OnProduct | None = None) -> OnProduct:
        """Predict memory, activity and step time.

        Args:
            product: The product.
            is_strict: Whether memory is trusted only where jobs were measured on such a stack, and with more room where
                the job itself never ran.
            before: The answer for this product as shipped, where it is known: activity and step time are taken from it.
        """
        found = self._reckoned(product) if before is None else before
        memory = found.prediction.memory if before is None else self.memory_on(product)
        recalled, busy = self.recalled, found.prediction.activity
        if self.busier is not None:
            busy = scaled(busy, self.busier)
        is_measured = is_calibrated(self.model, product, self.training.precision) or (
            recalled is not None and recalled.runs > 0
        )
        if is_strict and not is_measured and not recalling.is_excluded(memory, product):
            memory = msgspec.structs.replace(memory, trusted=False)
        upper_mib = memory.upper_mib
        if is_strict and is_measured and not memory.learned_runs:
            memory = recalling.for_a_first_run(memory, product)
        prediction = ProductPrediction(
            product=product.name,
            memory=memory,
            activity=busy if recalled is None else recalling.with_activity(busy, recalled),
            step_time_seconds=found.prediction.step_time_seconds,
        )
        return replace(
            found, prediction=prediction, memory_calibrated=is_measured, is_first=memory.upper_mib > upper_mib
        )

    def _reckoned(self, product: GpuProduct) -> OnProduct:
        layers, precision = self.features.layers, self.training.precision
        busy = activity.activity_on(self.features, self.cost, self.training, product)
        time = step_time.step_time_on(self.cost, product, precision, convolutional=layers.convolution > layers.linear)
        prediction = ProductPrediction(
            product=product.name,
            memory=self.memory_on(product),
            activity=busy.activity,
            step_time_seconds=time.seconds,
        )
        is_measured = is_calibrated(self.model, product, precision)
        return OnProduct(prediction, is_measured, busy.inside, busy.measured, time.inside)


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
    name: str = "",
    *,
    is_strict: bool = False,
) -> Prediction:
    """Predict a job on each GPU product, or abstain.

    Args:
        features: Traced features, or why there are none.
        training: The job's training; features must have been traced with its optimizer, precision and checkpointing.
        gpus: Products to predict for; the answer keeps their order.
        calibration: What jobs that ran taught of their stacks.
        name: Name or digest of the model, under which its runs were observed.
        is_strict: Whether memory is trusted only where jobs were measured on such a stack: elsewhere the job is to run
            alone, and there its first run counts with more room.

    Returns:
        A prediction whose `input_digest` is left to the caller, who knows the model's source.
    """
    job = prepare(features, training)
    if isinstance(job, Abstention):
        return abstained(job)
    return summary(
        job, [job.calibrated(calibration, product, name).on(product, is_strict=is_strict) for product in gpus]
    )


def summary(job: Job, answers: Sequence[OnProduct]) -> Prediction:
    """Put the answers for all products together, with the sentence that says what they are worth."""
    return Prediction(
        outcome="Predicted",
        reason=reason_of(job, answers),
        message=message_of(job.features, job.model, answers, is_inside=job.corrected.inside),
        model_version=model_version(job.model),
        products=[answer.prediction for answer in answers],
    )


def reason_of(job: Job, answers: Sequence[OnProduct]) -> str:
    """Say in one word what the bound on memory rests on."""
    if not all(answer.memory_calibrated for answer in answers):
        return "Uncalibrated"
    return "Calibrated" if job.corrected.inside else "OutsideTraining"


def abstained(abstention: Abstention) -> Prediction:
    """Return the prediction that says that there is none."""
    return Prediction(
        outcome="Abstained", reason=abstention.reason, message=abstention.message, model_version=model_version()
    )
