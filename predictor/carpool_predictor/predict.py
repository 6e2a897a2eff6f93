"""Predicts memory, activity and step time from features. Pure, without PyTorch or NumPy; microseconds a product."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import msgspec
from carpool_core.products import GpuProduct, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import MemoryPrediction, Prediction, ProductPrediction
from carpool_core.values import MIB, Optimizer

from carpool_predictor.calibration import run_history
from carpool_predictor.calibration.activity_scale import Busier, busier, scaled
from carpool_predictor.calibration.document import Calibration, Expected, model_for
from carpool_predictor.features import MAX_EXTRAPOLATION, Abstention, StepCost, cost_at, reason_to_abstain
from carpool_predictor.models import activity, step_time
from carpool_predictor.models.activity import activity_on
from carpool_predictor.models.memory import (
    Corrected,
    MemoryModel,
    context_mib,
    correct,
    is_calibrated,
    predict_memory,
    shipped,
)


@dataclass(frozen=True, slots=True)
class OnProduct:
    """A job on one GPU product, and which of the answers were learned from such jobs."""

    prediction: ProductPrediction
    memory_calibrated: bool
    """Whether memory was measured on this product in this precision."""
    activity_inside: bool
    activity_measured: bool
    """Whether such steps were measured on this very product in this precision."""
    step_time_inside: bool
    is_first: bool = False
    """Whether its memory counts with more room, because no run of it was seen there."""


def message_of(features: ModelFeatures, model: MemoryModel, answers: Sequence[OnProduct], *, is_inside: bool) -> str:
    """Say what a prediction comes from, and how far it can be relied on.

    Args:
        features: Of the job's model.
        model: The memory model.
        answers: What was predicted, product by product.
        is_inside: Whether the job is like those whose memory was measured.
    """
    batches = ", ".join(str(step.batch_size) for step in features.steps)
    told = [f"from training steps traced at batch sizes {batches}"]
    told += [said for answer in answers if (said := run_history.taught_by(answer.prediction)) is not None]
    known = [a.prediction for a in answers if a.prediction.memory.learned_runs]
    if excluded := [p.product for p in known if run_history.is_excluded(p.memory, find_product(p.product))]:
        told.append(
            f"does not fit {', '.join(excluded)}, where a run of this model (maybe another job's) died of memory with "
            "all that such a GPU has"
        )
    untrusted = [a.prediction for a in answers if not a.prediction.memory.trusted]
    if lost := [p.product for p in untrusted if p.memory.is_lost]:
        told.append(
            f"runs alone on {', '.join(lost)}, because earlier runs of this model (other jobs' too) died of memory "
            "there, or took nearly all"
        )
    unproven = [p for p in untrusted if not p.memory.is_lost]
    rare = [p.product for p in unproven if run_history.is_beyond(p.memory, find_product(p.product))]
    if alone := [p.product for p in unproven if p.product not in rare]:
        told.append(f"runs alone on {', '.join(alone)} until enough like it was measured there")
    if rare:
        told.append(f"runs alone on {', '.join(rare)} until a run has shown its peak, which in rare cases does not fit")
    if first := [answer.prediction.product for answer in answers if answer.is_first]:
        told.append(
            f"its first run on {', '.join(first)} counts with {run_history.FIRST:g} times the bound, and with "
            f"{run_history.FIRST_UNENFORCED:g} times where jobs of one GPU take turns, because nothing limits them "
            "there"
        )
    if not is_inside:
        told.append("the model is unlike those that were measured, so the bound on memory is wider")
    if not all(answer.memory_calibrated for answer in answers):
        told.append(
            f"memory is calibrated on {model.product} in {model.precision} only, so the bound is wider on "
            "other GPU products and precisions"
        )
    outside = [a.prediction.product for a in answers if not a.activity_inside]
    if outside:
        where = "" if len(outside) == len(answers) else f" on {', '.join(outside)}"
        told.append(f"activity{where} is a roofline estimate, because no step like this was measured")
    if any(answer.activity_inside and not answer.activity_measured for answer in answers):
        measured = activity.shipped()
        told.append(
            f"activity was measured on {measured.product} in {measured.precision} only, so its interval elsewhere is "
            "assumed, and holds less often than its 90%"
        )
    if not all(answer.step_time_inside for answer in answers):
        told.append("step times with tensor cores were not measured, so their interval is wider")
    return "; ".join(told)


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
    recalled: run_history.Recalled | None = None
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
        recalled = run_history.recall(calibration, product.name, precision, name, self.reserved_mib) if name else None
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
        found = msgspec.structs.replace(found, learned_jobs=self.jobs, learned_gist=run_history.gist(recalled))
        if recalled is not None:
            found = run_history.with_memory(found, recalled, correction)
        if recalled is not None and run_history.is_in_vain(recalled, product, correction):
            # Trusted, so that placement refuses it such a GPU instead of giving it one of its own again.
            return msgspec.structs.replace(found, learned_runs=recalled.known, trusted=True)
        is_alone = run_history.is_alone(found, product, recalled)
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
        if is_strict and not is_measured and not run_history.is_excluded(memory, product):
            memory = msgspec.structs.replace(memory, trusted=False)
        upper_mib = memory.upper_mib
        if is_strict and is_measured and not memory.learned_runs:
            memory = run_history.for_a_first_run(memory, product)
        prediction = ProductPrediction(
            product=product.name,
            memory=memory,
            activity=busy if recalled is None else run_history.with_activity(busy, recalled),
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


def expected_of(job: Job, name: str, counted_mib: float, product: GpuProduct) -> Expected:
    """Return what must be known of a prediction to learn from what became of it.

    Args:
        job: The job, as shipped: of no product.
        name: Name or digest of its model.
        counted_mib: The bound of the prediction that it was placed by; 0 where placement did not rely on it.
        product: What it ran on.
    """
    busy = activity_on(job.features, job.cost, job.training, product).activity
    return Expected(
        model=name,
        reserved_mib=job.reserved_mib,
        live_mib=job.cost.peak_bytes / MIB,
        correction=job.corrected.correction,
        stratum=job.corrected.stratum,
        upper_mib=counted_mib,
        util=min(busy.gpu_util_percent.median / 100, 1.0),
        sm_active=min(busy.sm_active_ratio.median, 1.0),
    )


_STATE = {
    Optimizer.SGD: 0.0,
    Optimizer.SGD_MOMENTUM: 1.0,
    Optimizer.ADAM: 2.0,
    Optimizer.ADAMW: 2.0,
    Optimizer.ADAGRAD: 1.0,
    Optimizer.RMSPROP: 1.0,
}
"""Bytes of optimizer state for each byte of trainable parameters."""


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Parts of the peak, in MiB."""

    weights_mib: float
    """Parameters and buffers."""
    gradients_mib: float
    """Those alive at the peak: before the backward pass there are none."""
    optimizer_mib: float
    """Optimizer state."""
    activations_mib: float
    """Inputs, activations and temporaries."""
    workspace_mib: float
    """What libraries take for themselves, and what the allocator cannot use."""
    context_mib: float
    """CUDA context with PyTorch's kernels."""


def parts_of(job: Job, product: GpuProduct, memory: MemoryPrediction) -> MemoryParts:
    """Split a predicted median.

    Weights and optimizer state are always there; whatever else was alive at the traced peak and is no activation are
    gradients. What the prediction adds to the traced peak is context as far as it reaches, and workspace.
    """
    features, cost = job.features, job.cost
    weights = min(float(features.parameter_bytes), cost.peak_bytes)
    trainable = weights * features.trainable_parameters / max(features.parameters, 1)
    optimizer = min(_STATE[features.optimizer] * trainable, cost.peak_bytes - weights)
    rest = cost.peak_bytes - weights - optimizer
    gradients = min(max(rest - cost.activation_bytes, 0.0), trainable)
    added = memory.median_mib - cost.peak_bytes / MIB
    context = min(context_mib(product), added)
    return MemoryParts(
        weights_mib=weights / MIB,
        gradients_mib=gradients / MIB,
        optimizer_mib=optimizer / MIB,
        activations_mib=(rest - gradients) / MIB,
        workspace_mib=added - context,
        context_mib=context,
    )


RESERVED_MIB = 722
"""What the driver keeps of a GPU, at most: NVML says 224 MiB (V100) to 722 (A100 80GB)."""
MIG_SHARE = 0.91
"""What a MIG instance offers of its eighths of the GPU's memory, at least: `nvidia-smi mig -lgip` lists 91% (1g.18gb of
an H200) to 99%."""


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch that fits."""

    batch_size: int | None
    """0 where not even a single sample fits; None where only a batch could that the features are not trusted for."""
    limited_by_trace: bool = False
    """Whether another one may fit that the features are not trusted for: a larger one, or, where none is known to fit,
    one of fewer samples than `fewer_than`."""
    fewer_than: int | None = None
    """Smallest batch that the features are trusted for, where it does not fit."""

    def __str__(self) -> str:
        if self.batch_size is None:
            return f"fewer than {self.fewer_than:,}"
        return f"{self.batch_size:,}{' or more' if self.limited_by_trace else ''}" if self.batch_size else "none"


def usable_mib(product: GpuProduct) -> float:
    """Return what jobs can have of a whole GPU."""
    return product.memory_mib - RESERVED_MIB


def usable_of_profile_mib(product: GpuProduct, profile: str) -> float:
    """Return what jobs can have of a MIG instance, such as `3g.20gb`; memory comes in eighths of the GPU's."""
    nominal_mib = 1024 * int(profile.partition(".")[2].removesuffix("gb"))
    eighths = round(8 * nominal_mib / product.memory_mib)
    return MIG_SHARE * product.memory_mib * eighths / 8


class BatchFinder:
    """Finds the largest batch of one job for any product; batch sizes that were tried are remembered."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tried: dict[int, Job | Abstention] = {}
        steps = job.features.steps
        self._smallest = -(-steps[0].batch_size // MAX_EXTRAPOLATION)
        self._largest = steps[-1].batch_size * MAX_EXTRAPOLATION

    def within(self, product: GpuProduct, memory_mib: float) -> LargestBatch:
        """Return the largest batch b such that b fits and b + 1 does not, among those that can be predicted."""
        low, high = self._smallest - 1, self._largest + 1
        if self._fits(self._largest, product, memory_mib):
            return LargestBatch(self._largest, limited_by_trace=True)
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(middle, product, memory_mib):
                low = middle
            else:
                high = middle
        if low >= self._smallest:
            return LargestBatch(low)
        if self._smallest == 1 or self._without_samples_mib(product) > memory_mib:
            return LargestBatch(0)
        return LargestBatch(None, limited_by_trace=True, fewer_than=self._smallest)

    def _without_samples_mib(self, product: GpuProduct) -> float:
        parts = parts_of(self._job, product, self._job.memory_on(product))
        return parts.weights_mib + parts.optimizer_mib

    def _fits(self, batch_size: int, product: GpuProduct, memory_mib: float) -> bool:
        if batch_size not in self._tried:
            training = msgspec.structs.replace(self._job.training, batch_size=batch_size)
            self._tried[batch_size] = prepare(self._job.features, training, self._job.model)
        job = self._tried[batch_size]
        return isinstance(job, Job) and job.memory_on(product).upper_mib <= memory_mib
