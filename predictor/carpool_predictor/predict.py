"""Predicts memory, activity and step time of a job from its features. Pure; needs neither PyTorch nor NumPy."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
from carpool_core.products import GpuProduct, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import Interval, MemoryPrediction, Prediction, ProductPrediction
from carpool_core.values import MIB

from carpool_predictor.calibration import run_history
from carpool_predictor.calibration.document import Calibration, RunPrediction, is_plain, model_for
from carpool_predictor.calibration.scales import ActivityScale, activity_scale, scale_activity
from carpool_predictor.features import MAX_EXTRAPOLATION, Abstention, StepCost, cost_at, reason_to_abstain
from carpool_predictor.models import activity, step_time
from carpool_predictor.models.memory import (
    Correction,
    MemoryModel,
    context_mib,
    correction_of,
    is_calibrated,
    predict_memory,
    shipped,
)
from carpool_predictor.optimizers import TABLE
from carpool_predictor.parallel import shares_of

COMPILED_FACTOR = 1.1
"""Further factor to the bound of a compiled model, whose fusion is estimated. Assumed."""
COMPILED_TIME_FACTOR = 1.25
"""The same for both ends of its step time. Assumed."""
WHAT_HAPPENS = "it gets such a GPU alone, and is refused that product once it ran out of memory there"
"""Clause that says how placement treats a job on a GPU that it may not fit."""
_MAX_PEAK_BYTES = 2.0**50
"""1 PiB: beyond any training step on one GPU."""


@dataclass(frozen=True, slots=True)
class ProductAnswer:
    """The prediction for one GPU product, and which parts of it rest on measurements."""

    product: GpuProduct
    prediction: ProductPrediction
    memory_calibrated: bool
    """Whether memory was measured on this product in this precision, for such trainings."""
    activity_inside: bool
    """Whether the step lies inside the training data of the activity model."""
    activity_measured: bool
    """Whether such steps were measured on this product in this precision."""
    step_time_inside: bool
    """Whether steps without tensor cores were measured."""
    is_first: bool = False
    """Whether the bound has extra room because no run of the job was observed there."""


@dataclass(frozen=True, slots=True)
class PredictionContext:
    """A job's features, its step and the memory model; everything that a prediction needs besides the GPU product."""

    features: ModelFeatures
    training: Training
    cost: StepCost
    """The step at the job's batch size."""
    model: MemoryModel
    correction: Correction
    jobs: int = 0
    """Jobs that calibrated the stack; 0 for the shipped model."""
    history: run_history.RunHistory | None = None
    """Earlier runs of the same job on that stack."""
    activity_scale: ActivityScale | None = None
    """Measured over predicted activity on that stack; None for the shipped model."""

    @property
    def reserved_mib(self) -> float:
        """Memory that the simulated allocator holds."""
        return max(self.cost.reserved_bytes / MIB, 1.0)

    def calibrated(
        self, calibration: Calibration | None, product: GpuProduct, name: str = "", *, retry_before: float = -1.0
    ) -> "PredictionContext":
        """Return the context calibrated for the stack of a product, or itself where the stack has no observations.

        `name` is the key of the model, under which its runs were observed; `retry_before` is that of
        `run_history.find_history`.
        """
        precision = self.training.precision
        calibration = None if calibration is None else calibration.for_training(self.training)
        state = None if calibration is None else calibration.best(product.name, precision)
        if calibration is None or state is None:
            return self
        model, correction = model_for(calibration, product, precision, self.model), self.correction
        if model is not self.model:
            # The stack has its own line and bound; trees, hull and strata stay those of the shipped model.
            ratio = model.factors[correction.stratum] / self.model.factors[correction.stratum]
            if correction.elsewhere_factor > correction.bound_factor:
                ratio *= model.doubt
            correction = replace(correction, bound_factor=correction.bound_factor * ratio)
        history = run_history.find_history(
            calibration, product.name, precision, name, self.reserved_mib, retry_before=retry_before
        )
        return replace(
            self,
            model=model,
            correction=correction,
            jobs=state.learned_from,
            history=history if name else None,
            activity_scale=activity_scale(calibration, product.name, precision, name),
        )

    def memory_on(self, product: GpuProduct) -> MemoryPrediction:
        """Predict memory on a product; measured peaks of earlier runs replace the model's prediction."""
        history, line_factor = self.history, self.correction.line_factor
        correction = self.correction
        if self.training.compile:
            correction = replace(
                correction,
                bound_factor=correction.bound_factor * COMPILED_FACTOR,
                elsewhere_factor=correction.elsewhere_factor * COMPILED_FACTOR,
            )
        memory = predict_memory(
            self.cost,
            self.features.layers,
            self.model,
            correction,
            calibrated=self._is_calibrated(product),
            context_difference_mib=_context_difference_mib(product, self.model),
            is_derived=product.is_derived,
        )
        memory = msgspec.structs.replace(memory, learned_jobs=self.jobs, learned_gist=run_history.fingerprint(history))
        if history is not None:
            memory = run_history.apply_peak(memory, history, line_factor)
        if history is not None and run_history.exceeded_whole_gpu(history, product, line_factor):
            # Trusted, so that placement refuses such a GPU instead of giving the job one of its own again.
            return msgspec.structs.replace(memory, learned_runs=history.observed, trusted=True)
        alone = run_history.runs_alone(memory, product, history)
        if history is None or (alone and not history.peak_mib and not history.deaths):
            # Runs that were too short to show a peak teach nothing about it: the next run counts as a first one.
            return msgspec.structs.replace(memory, trusted=not alone)
        return msgspec.structs.replace(memory, learned_runs=history.observed, trusted=not (history.is_lost or alone))

    def on(self, product: GpuProduct, *, is_strict: bool = False, before: ProductAnswer | None = None) -> ProductAnswer:
        """Predict memory, activity and step time on a product.

        Args:
            product: The GPU product.
            is_strict: Trust memory only on a stack where jobs were measured; give first runs there extra room.
            before: The shipped model's answer for this product, if computed; activity and step time are taken from it.
        """
        answer = self._uncalibrated(product) if before is None else before
        memory, busy = self.memory_on(product), answer.prediction.activity
        if self.activity_scale is not None:
            busy = scale_activity(busy, self.activity_scale)
        if self.history is not None:
            busy = run_history.apply_activity(busy, self.history)
        measured = self._is_calibrated(product) or (self.history is not None and self.history.runs > 0)
        is_refused = run_history.is_refused(memory, product) or run_history.exceeds_despite_error(memory, product)
        if is_strict and not measured and not is_refused:
            memory = msgspec.structs.replace(memory, trusted=False)
        upper_mib = memory.upper_mib
        if is_strict and measured and not memory.learned_runs:
            memory = run_history.first_run_bound(memory, product)
        prediction = ProductPrediction(
            product=product.name, memory=memory, activity=busy, step_time_seconds=answer.prediction.step_time_seconds
        )
        return replace(answer, prediction=prediction, memory_calibrated=measured, is_first=memory.upper_mib > upper_mib)

    def _is_calibrated(self, product: GpuProduct) -> bool:
        """Whether the memory model was fitted on such trainings on this product."""
        return is_plain(self.training) and is_calibrated(self.model, product, self.training.precision)

    def _uncalibrated(self, product: GpuProduct) -> ProductAnswer:
        layers, precision = self.features.layers, self.training.precision
        busy = activity.activity_on(self.features, self.cost, self.training, product)
        time = step_time.step_time_on(self.cost, product, precision, convolutional=layers.convolution > layers.linear)
        seconds = time.seconds
        if self.training.compile:
            seconds = Interval(
                median=seconds.median,
                lower=seconds.lower / COMPILED_TIME_FACTOR,
                upper=seconds.upper * COMPILED_TIME_FACTOR,
            )
        prediction = ProductPrediction(
            product=product.name, memory=self.memory_on(product), activity=busy.activity, step_time_seconds=seconds
        )
        return ProductAnswer(product, prediction, self._is_calibrated(product), busy.inside, busy.measured, time.inside)


def _context_difference_mib(product: GpuProduct, model: MemoryModel) -> float:
    """Return the CUDA context on a product less that in a model's line, which may be of that product."""
    return 0.0 if product.name == model.product else context_mib(product) - context_mib(find_product(model.product))


def model_version(model: MemoryModel | None = None) -> str:
    """Return the versions of the memory, activity and step-time models."""
    memory = (model or shipped()).version
    return f"memory/{memory} activity/{activity.shipped().version} step-time/{step_time.shipped().version}"


def prepare(
    features: ModelFeatures | Abstention, training: Training, model: MemoryModel | None = None
) -> PredictionContext | Abstention:
    """Compute everything that does not depend on the GPU product, or return the reason for no prediction.

    Features must have been traced with the optimizer, precision and checkpointing of the training. The default is the
    shipped memory model.
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
    return PredictionContext(features, training, cost, model, correction_of(model, features, cost, training.batch_size))


def predict(
    features: ModelFeatures | Abstention,
    training: Training,
    gpus: Sequence[GpuProduct],
    calibration: Calibration | None = None,
    name: str = "",
    *,
    is_strict: bool = False,
    now: float | None = None,
) -> Prediction:
    """Predict a job on each GPU product, or abstain.

    Args:
        features: Traced features, or the reason why there are none.
        training: The job's training. Features must have been traced with its optimizer, precision and checkpointing.
        gpus: GPU products; the answer keeps their order.
        calibration: Observations of finished jobs.
        name: Key of the model, under which its runs were observed.
        is_strict: Trust memory only on a stack where jobs were measured; give first runs there extra room.
        now: Seconds since 1970, by which old deaths are doubted; None: never.

    Returns:
        The prediction, without `input_digest`.
    """
    context = prepare(features, training)
    if isinstance(context, Abstention):
        return abstain(context)
    contexts = [
        context.calibrated(calibration, gpu, name, retry_before=run_history.retry_before(gpu, gpus, now))
        for gpu in gpus
    ]
    answers = [one.on(gpu, is_strict=is_strict) for one, gpu in zip(contexts, gpus, strict=True)]
    return summarize(context, answers, list(map(BatchFinder, contexts)))


def summarize(
    context: PredictionContext, answers: Sequence[ProductAnswer], finders: Sequence["BatchFinder"] = ()
) -> Prediction:
    """Return the prediction for all products, with a message: where it may not fit, its sources, its limits.

    With a finder for each answer it has the largest batch that fits a product, if the job's own fits none by its bound.
    """
    products = [answer.prediction for answer in answers]
    fits_somewhere = any(a.prediction.memory.upper_mib <= usable_mib(a.product) for a in answers)
    fitting, largest = (None, "") if fits_somewhere or not finders else _fitting_batch(answers, finders)
    warning = may_not_fit(products, [answer.product for answer in answers])
    return Prediction(
        outcome="Predicted",
        reason=calibration_reason(context, answers),
        message="; ".join(filter(None, [warning, largest, *_clauses(context, answers)])),
        model_version=model_version(context.model),
        products=products,
        fitting_batch=fitting,
    )


def is_tried_beyond(memory: MemoryPrediction, gpu: GpuProduct) -> bool:
    """Whether a job gets a GPU alone although its bound exceeds what jobs can use of it: it may not fit."""
    return not memory.trusted and not memory.is_refuted and memory.upper_mib > usable_mib(gpu)


def may_not_fit(products: Iterable[ProductPrediction], gpus: Iterable[GpuProduct]) -> str:
    """Return a clause on the GPUs that a job may not fit although it is tried there; empty if there are none."""
    known = {gpu.name: gpu for gpu in gpus}
    found = [
        f"{one.product} (median {one.memory.median_mib:,}, at most {one.memory.upper_mib:,} of {gpu.memory_mib:,} MiB)"
        for one in products
        if (gpu := known.get(one.product)) is not None and is_tried_beyond(one.memory, gpu)
    ]
    return f"may not fit {', '.join(found)}: {WHAT_HAPPENS}" if found else ""


def _fitting_batch(answers: Sequence[ProductAnswer], finders: Sequence["BatchFinder"]) -> tuple[int, str]:
    """Return the largest batch that fits a product by its bound, 0 for none, and a clause on it."""
    gpus = [answer.product for answer in answers]
    found = [finder.within(gpu, usable_mib(gpu)).batch_size or 0 for finder, gpu in zip(finders, gpus, strict=True)]
    best = max(range(len(gpus)), key=found.__getitem__)
    where = f"does not fit {gpus[0].name}" if len(gpus) == 1 else "fits none of these GPU products"
    most = (
        f"at most {found[best]:,} fits {gpus[best].name}" if found[best] else "no smaller batch alone is known to fit"
    )
    return found[best], f"by its bound, batch {finders[0].batch_size:,} {where}, {most}"


def calibration_reason(context: PredictionContext, answers: Sequence[ProductAnswer]) -> str:
    """Return the basis of the memory bound: Calibrated, DerivedProduct, Uncalibrated or OutsideTraining."""
    if any(answer.product.is_derived and not answer.memory_calibrated for answer in answers):
        return "DerivedProduct"
    if not all(answer.memory_calibrated for answer in answers):
        return "Uncalibrated"
    return "Calibrated" if context.correction.inside else "OutsideTraining"


def abstain(abstention: Abstention) -> Prediction:
    """Return the prediction of a job that cannot be predicted."""
    return Prediction(
        outcome="Abstained", reason=abstention.reason, message=abstention.message, model_version=model_version()
    )


def _clauses(context: PredictionContext, answers: Sequence[ProductAnswer]) -> list[str]:
    """Return the sources of a prediction and its limits, one clause each."""
    batches = ", ".join(str(step.batch_size) for step in context.features.steps)
    products = [answer.prediction for answer in answers]
    clauses = [f"from training steps traced at batch sizes {batches}"]
    clauses += filter(None, map(run_history.calibration_source, products))
    refused = [
        answer.product.name
        for answer, p in zip(answers, products, strict=True)
        if p.memory.learned_runs and run_history.is_refused(p.memory, answer.product)
    ]
    if refused:
        clauses.append(
            f"does not fit {', '.join(refused)}, where a run of this model (maybe another job's) died of memory with "
            "all that such a GPU has; a day after that it may try the largest GPU again, alone"
        )
    untrusted = [answer for answer in answers if not answer.prediction.memory.trusted]
    if lost := [answer.product.name for answer in untrusted if answer.prediction.memory.is_refuted]:
        clauses.append(
            f"runs alone on {', '.join(lost)}, because earlier runs of this model (other jobs' too) died of memory "
            "there, or took nearly all"
        )
    unproven = [answer for answer in untrusted if not answer.prediction.memory.is_refuted]
    large = [a for a in unproven if run_history.exceeds_gpu(a.prediction.memory, a.product)]
    if alone := [answer.product.name for answer in unproven if answer not in large]:
        clauses.append(f"runs alone on {', '.join(alone)} until enough jobs like it were measured there")
    if fitting := [a.product.name for a in large if not is_tried_beyond(a.prediction.memory, a.product)]:
        clauses.append(f"runs alone on {', '.join(fitting)} until a run has shown its peak")
    if first := [answer.prediction.product for answer in answers if answer.is_first]:
        clauses.append(
            f"its first run on {', '.join(first)} counts with {run_history.FIRST_RUN_FACTOR:g} times the bound, and "
            f"with {run_history.FIRST_RUN_FACTOR_UNENFORCED:g} times under time-slicing, where nothing limits memory"
        )
    if not context.correction.inside:
        clauses.append("the model is unlike those that were measured, so the bound on memory is wider")
    if not all(answer.memory_calibrated for answer in answers):
        clauses.append(
            f"memory is calibrated on {context.model.product} in {context.model.precision} only, so the bound is wider "
            "on other GPU products and precisions"
            if is_plain(context.training)
            else "memory with division among GPUs, torch.compile, offloading, varying lengths, or a chunked or fused "
            "loss was checked only against published cases, so the bound is wider until such a run of this model was "
            "measured"
        )
    if derived := [a.product.name for a in answers if a.product.is_derived and not a.memory_calibrated]:
        clauses.append(f"{', '.join(derived)} is described from what NVML reports, so the bound there is wider still")
    if outside := [a.prediction.product for a in answers if not a.activity_inside]:
        where = "" if len(outside) == len(answers) else f" on {', '.join(outside)}"
        clauses.append(f"activity{where} is a roofline estimate, because no step like this was measured")
    if any(answer.activity_inside and not answer.activity_measured for answer in answers):
        measured = activity.shipped()
        clauses.append(
            f"activity was measured on {measured.product} in {measured.precision} only, so its interval elsewhere is "
            "assumed, and holds less often than its 90%"
        )
    if not all(answer.step_time_inside for answer in answers):
        clauses.append(
            "no step was measured that tensor cores or the processor limit, so the interval of its time is wider"
        )
    if context.training.compile:
        clauses.append("what torch.compile fuses is estimated, so intervals of memory and time are wider")
    if context.features.layers.embedding and not context.training.varying_lengths:
        clauses.append(
            "the bound on memory assumes batches of one length; if each is padded to its own longest sample, set "
            "training.varyingLengths to true"
        )
    if context.training.parallelism is not None:
        clauses.append(
            "memory is that of each GPU without NCCL's buffers, and step times leave communication and the host out"
        )
    return clauses


def run_prediction_of(context: PredictionContext, name: str, counted_mib: float, product: GpuProduct) -> RunPrediction:
    """Return the part of a prediction that calibration compares with the measured run.

    The context is not calibrated, and `name` is the key of its model. `counted_mib` is the bound that placement used; 0
    if placement did not rely on it.
    """
    busy = activity.activity_on(context.features, context.cost, context.training, product).activity
    return RunPrediction(
        model=name,
        reserved_mib=context.reserved_mib,
        live_mib=context.cost.peak_bytes / MIB,
        context_difference_mib=_context_difference_mib(product, context.model),
        correction=context.correction.line_factor,
        stratum=context.correction.stratum,
        upper_mib=counted_mib,
        util=min(busy.gpu_util_percent.median / 100, 1.0),
        sm_active=min(busy.sm_active_ratio.median, 1.0),
    )


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Parts of the predicted median peak, in whole MiB; they add up to it."""

    weights_mib: int
    """Parameters and buffers."""
    gradients_mib: int
    """Gradients alive at the peak; before the backward pass there are none."""
    optimizer_mib: int
    """Optimizer state."""
    activations_mib: int
    """Inputs, activations and temporaries."""
    workspace_mib: int
    """Workspaces of libraries, and fragments that the allocator cannot use."""
    context_mib: int
    """CUDA context with PyTorch's kernels."""
    other_mib: int
    """Memory that the measured jobs took besides, by the calibration; no part of the step explains it."""


CUBLAS_MIB = 8
"""Workspace of cuBLAS, two of 4 MiB (PyTorch's notes on reproducibility, CUBLAS_WORKSPACE_CONFIG)."""


def parts_of(context: PredictionContext, product: GpuProduct, memory: MemoryPrediction) -> MemoryParts:
    """Split a predicted median.

    Weights and optimizer state are always alive. The rest of the traced peak, less activations, are gradients. The
    prediction adds the CUDA context to the traced peak. The rest is workspace as far as the step has fragments and
    convolutions that explain it.
    """
    features, cost = context.features, context.cost
    weights = min(float(features.parameter_bytes), cost.peak_bytes)
    share = features.trainable_parameters / max(features.parameters, 1)
    trainable = float(features.trainable_bytes) or weights * share
    itemsize = round(trainable / max(features.trainable_parameters, 1)) or 4
    state = TABLE[features.optimizer].state_per_parameter(itemsize) * features.trainable_parameters
    shares = shares_of(context.training)
    state = state * shares.optimizer + shares.copy_bytes * features.trainable_parameters
    optimizer = min(state, cost.peak_bytes - weights)
    rest = cost.peak_bytes - weights - optimizer
    gradients = min(max(rest - cost.activation_bytes, 0.0), trainable)
    added = memory.median_mib - cost.peak_bytes / MIB
    cuda_context = min(context_mib(product), added)
    rest_mib = added - cuda_context
    workspace = min((cost.reserved_bytes - cost.peak_bytes + cost.unfolded_bytes) / MIB + CUBLAS_MIB, rest_mib)
    tensors = [size / MIB for size in (weights, gradients, optimizer, rest - gradients)]
    return MemoryParts(*_rounded([*tensors, workspace, cuda_context, rest_mib - workspace], memory.median_mib))


def _rounded(values: Sequence[float], total: int) -> list[int]:
    """Round numbers to whole ones that add up to a total, those with the largest fractions up."""
    whole = [math.floor(value) for value in values]
    by_fraction = sorted(range(len(values)), key=lambda i: whole[i] - values[i])
    for index in by_fraction[: total - sum(whole)]:
        whole[index] += 1
    return whole


DRIVER_MIB = 722
"""Most memory that the driver keeps of a GPU; NVML reports 224 MiB (V100) to 722 (A100 80GB)."""
MIG_SHARE = 0.91
"""Least share of its eighths of the GPU's memory that a MIG instance offers.

`nvidia-smi mig -lgip` lists 91% (1g.18gb of an H200) to 99%."""


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch that fits."""

    batch_size: int | None
    """0 if a single sample does not fit; None if only untrusted batch sizes could fit."""
    limited_by_trace: bool = False
    """Whether a batch may fit that is too far from the traced ones: a larger one, or one below `fewer_than`."""
    fewer_than: int | None = None
    """Smallest trusted batch, if it does not fit."""

    def __str__(self) -> str:
        if self.batch_size is None:
            return f"fewer than {self.fewer_than:,}"
        return f"{self.batch_size:,}{' or more' if self.limited_by_trace else ''}" if self.batch_size else "none"


def usable_mib(product: GpuProduct) -> float:
    """Return the memory of a whole GPU that jobs can use."""
    return product.memory_mib - DRIVER_MIB


def usable_of_profile_mib(product: GpuProduct, profile: str) -> float:
    """Return the memory of a MIG instance, such as `3g.20gb`, that jobs can use; MIG divides memory into eighths."""
    nominal_mib = 1024 * int(profile.partition(".")[2].removesuffix("gb"))
    eighths = round(8 * nominal_mib / product.memory_mib)
    return MIG_SHARE * product.memory_mib * eighths / 8


class BatchFinder:
    """Finds the largest batch of one job that fits a product's memory, by bisection over trusted batch sizes."""

    def __init__(self, context: PredictionContext) -> None:
        self._context = context
        self.batch_size = context.training.batch_size
        self._contexts: dict[int, PredictionContext | Abstention] = {}
        steps = context.features.steps
        self._smallest = -(-steps[0].batch_size // MAX_EXTRAPOLATION)
        self._largest = steps[-1].batch_size * MAX_EXTRAPOLATION

    def within(self, product: GpuProduct, memory_mib: float) -> LargestBatch:
        """Return the largest batch b such that b fits and b + 1 does not, among the trusted sizes."""
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
        parts = parts_of(self._context, product, self._context.memory_on(product))
        if self._smallest == 1 or parts.weights_mib + parts.optimizer_mib > memory_mib:
            return LargestBatch(0)
        return LargestBatch(None, limited_by_trace=True, fewer_than=self._smallest)

    def _fits(self, batch_size: int, product: GpuProduct, memory_mib: float) -> bool:
        if batch_size not in self._contexts:
            training = msgspec.structs.replace(self._context.training, batch_size=batch_size)
            self._contexts[batch_size] = prepare(self._context.features, training, self._context.model)
        context = self._contexts[batch_size]
        return isinstance(context, PredictionContext) and context.memory_on(product).upper_mib <= memory_mib
