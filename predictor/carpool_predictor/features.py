"""What the catalog sweep writes for each model; the feature store and the memory model are made of it. No PyTorch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer, Precision


class UpdateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a step comes to under another optimizer; sizes in bytes."""

    peak_bytes: int
    activation_bytes: int
    reserved_bytes: int
    bytes_moved: float
    kernels: int


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One traced step; sizes in bytes."""

    batch_size: int
    peak_bytes: int
    activation_bytes: int
    flops: float
    bytes_moved: float
    kernels: int
    unfolded_max: int
    """Largest matrix that a convolution by unfolding (im2col) would need."""
    largest_bytes: int
    """Largest single storage, or the tensors of one convolution together."""
    reserved_bytes: int
    """What the caching allocator holds after the step."""
    updates: Mapping[Optimizer, UpdateRecord] = {}
    """The step under other optimizers."""

    def traced(self, optimizer: Optimizer | None = None) -> TracedStep:
        """Return what `spec.model.features` holds of the step, under one of `updates` or its own optimizer."""
        own = self if optimizer is None else self.updates[optimizer]
        return TracedStep(
            batch_size=self.batch_size,
            peak_bytes=own.peak_bytes,
            activation_bytes=own.activation_bytes,
            reserved_bytes=own.reserved_bytes,
            unfolded_bytes=self.unfolded_max,
            largest_bytes=self.largest_bytes,
            flops=self.flops,
            bytes_moved=own.bytes_moved,
            kernels=own.kernels,
        )


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the catalog, or why there is nothing of it."""

    name: str
    family: str = ""
    """Python module that defines it."""
    input_shape: tuple[int, ...] = ()
    optimizer: Optimizer = Optimizer.SGD_MOMENTUM
    precision: Precision = Precision.FP32
    activation_checkpointing: bool = False
    parameters: int = 0
    trainable_parameters: int = 0
    parameter_bytes: int = 0
    layers: LayerCounts = LayerCounts()
    steps: tuple[StepRecord, ...] = ()
    failure: str = ""
    """Reason and sentence where the model could not be traced."""

    def features(self, optimizer: Optimizer | None = None) -> ModelFeatures:
        """Return what `spec.model.features` holds of the model, under its own optimizer or another that it knows."""
        other = None if optimizer is self.optimizer else optimizer
        return ModelFeatures(
            name=self.name,
            parameters=self.parameters,
            trainable_parameters=self.trainable_parameters,
            parameter_bytes=self.parameter_bytes,
            layers=self.layers,
            optimizer=other or self.optimizer,
            precision=self.precision,
            activation_checkpointing=self.activation_checkpointing,
            steps=[step.traced(other) for step in self.steps],
        )


class Abstention(msgspec.Struct, frozen=True, kw_only=True):
    """No prediction, and why. It travels from the tracing subprocess to the job's condition unchanged."""

    reason: str
    """One CamelCase word for programs, such as `TraceTimedOut`."""
    message: str
    """A sentence for people: what was expected, what was found, what to do."""


class TraceError(Exception):
    """The model cannot be traced; becomes an `Abstention` at the subprocess's border."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def as_abstention(self) -> Abstention:
        """Return the same reason and sentence as a value."""
        return Abstention(reason=self.reason, message=str(self))


MAX_EXTRAPOLATION = 8
"""How many times beyond the traced batch sizes a line is trusted."""


def reason_to_abstain(features: ModelFeatures, training: Training) -> Abstention | None:
    """Say why features cannot answer for this training; None where they can."""
    return _mismatch(features, training) or _absurd(features) or _out_of_range(features, training.batch_size)


def _mismatch(features: ModelFeatures, training: Training) -> Abstention | None:
    pairs = (
        ("optimizer", features.optimizer.value, training.optimizer.value),
        ("precision", features.precision.value, training.precision.value),
        ("activationCheckpointing", features.activation_checkpointing, training.activation_checkpointing),
    )
    wrong = [f"{name} {traced} where spec.training has {wanted}" for name, traced, wanted in pairs if traced != wanted]
    if not wrong:
        return None
    return Abstention(
        reason="FeaturesMismatch",
        message=f"the features were traced with {'; '.join(wrong)}; run `carpool graph` with the job's own values",
    )


def _absurd(features: ModelFeatures) -> Abstention | None:
    found = next(_faults(features), None)
    if found is None:
        return None
    return Abstention(
        reason="FeaturesAbsurd",
        message=f"the features cannot be right: {found}; take the block from `carpool graph` unchanged",
    )


def _faults(features: ModelFeatures) -> Iterator[str]:
    if not features.steps:
        yield "there is no traced step"
    sizes = [step.batch_size for step in features.steps]
    if sizes != sorted(set(sizes)):
        yield f"batch sizes must ascend, found {sizes}"
    for step in features.steps:
        where = f"at batch size {step.batch_size}"
        numbers = (step.peak_bytes, step.activation_bytes, step.flops, step.bytes_moved, step.kernels)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or step.batch_size < 1:
            yield f"{where} a number is negative or not finite"
        elif step.activation_bytes > step.peak_bytes:
            yield f"{where} activationBytes {step.activation_bytes:,} exceed peakBytes {step.peak_bytes:,}"
        elif step.peak_bytes < features.parameter_bytes:
            yield (
                f"{where} peakBytes {step.peak_bytes:,} are less than parameterBytes {features.parameter_bytes:,}, "
                "which are always alive"
            )


def _out_of_range(features: ModelFeatures, batch_size: int) -> Abstention | None:
    smallest, largest = features.steps[0].batch_size, features.steps[-1].batch_size
    if smallest <= batch_size * MAX_EXTRAPOLATION and batch_size <= largest * MAX_EXTRAPOLATION:
        return None
    return Abstention(
        reason="BatchOutOfRange",
        message=f"batch size {batch_size:,} is more than {MAX_EXTRAPOLATION} times beyond the traced {smallest:,} to "
        f"{largest:,}; trace it with `carpool graph … --batch-size {batch_size}`",
    )


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one training step costs, as simulated."""

    peak_bytes: float
    """Peak of live tensors."""
    reserved_bytes: float
    """What the caching allocator holds; taken from the peak where the features do not say."""
    flops: float
    bytes_moved: float
    kernels: float
    activation_bytes: float = 0.0
    """Inputs, activations and temporaries among the peak."""
    unfolded_bytes: float = 0.0
    """Largest matrix that a convolution would unfold its input into."""
    largest_bytes: float = 0.0
    """Largest single tensor; a typical share of the peak where the features do not say."""

    def numbers(self) -> tuple[float, float, float, float, float, float, float, float]:
        """Return all fields, in order; `dataclasses.astuple` copies deeply, which takes thirty times as long."""
        return (
            self.peak_bytes, self.reserved_bytes, self.flops, self.bytes_moved, self.kernels, self.activation_bytes,
            self.unfolded_bytes, self.largest_bytes,
        )  # fmt: skip


TYPICAL_FRAGMENTS = 1.09
"""Bytes reserved for each byte alive at the peak: the median over the traced catalog."""
TYPICAL_LARGEST = 0.06
"""The largest tensor's share of the peak, likewise."""


def cost_at(features: ModelFeatures, batch_size: int) -> StepCost:
    """Interpolate between the nearest traced steps, or extend the outermost line; nothing falls as the batch grows.

    With a single traced step, what is alive at the peak besides activations is taken as constant, and the rest, like
    FLOPs and bytes, as proportional to the batch.
    """
    steps = features.steps
    if len(steps) == 1:
        return _scaled(steps[0], batch_size / steps[0].batch_size)
    costs = list(accumulate(map(_cost, steps), _larger))
    upper = _upper_neighbour(steps, batch_size)
    low, high = steps[upper - 1].batch_size, steps[upper].batch_size
    along = (batch_size - low) / (high - low)
    pairs = zip(costs[upper - 1].numbers(), costs[upper].numbers(), strict=True)
    peak, reserved, flops, moved, kernels, own, unfolded, largest = (
        max(start + (end - start) * along, 0.0) for start, end in pairs
    )
    return StepCost(peak, max(reserved, peak), flops, moved, max(kernels, 1.0), min(own, peak), unfolded, largest)


def _upper_neighbour(steps: Sequence[TracedStep], batch_size: int) -> int:
    found = next((i for i, step in enumerate(steps) if step.batch_size >= batch_size), len(steps) - 1)
    return max(found, 1)


def _cost(step: TracedStep) -> StepCost:
    return StepCost(
        step.peak_bytes,
        _reserved(step),
        step.flops,
        step.bytes_moved,
        step.kernels,
        step.activation_bytes,
        step.unfolded_bytes,
        _largest(step),
    )


def _largest(step: TracedStep) -> float:
    return step.largest_bytes or step.peak_bytes * TYPICAL_LARGEST


def _reserved(step: TracedStep) -> float:
    return max(step.reserved_bytes or step.peak_bytes * TYPICAL_FRAGMENTS, step.peak_bytes)


def _larger(one: StepCost, other: StepCost) -> StepCost:
    return StepCost(*map(max, one.numbers(), other.numbers()))


def _scaled(step: TracedStep, ratio: float) -> StepCost:
    constant = step.peak_bytes - step.activation_bytes
    return StepCost(
        peak_bytes=constant + step.activation_bytes * ratio,
        reserved_bytes=constant + (_reserved(step) - constant) * ratio,
        flops=step.flops * ratio,
        bytes_moved=step.bytes_moved * ratio,
        kernels=step.kernels,
        activation_bytes=step.activation_bytes * ratio,
        unfolded_bytes=step.unfolded_bytes * ratio,
        largest_bytes=_largest(step) * ratio,
    )


class MalformedError(ValueError):
    """An artifact does not hold what it should; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """One training step (forward, backward, Adam) in numbers, and the model's layers."""

    batch_size: int
    parameter_bytes: float
    flops: float
    bytes_moved: float
    kernels: float
    layers: LayerCounts
