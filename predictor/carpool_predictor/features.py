"""A training step in numbers: traced records, the cost at any batch size, and reasons not to trust them. No PyTorch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import msgspec
from carpool_core.resources.features import ALL_LINEAR, Adapter, LayerCounts, ModelFeatures, Parallelism, TracedStep
from carpool_core.resources.job import Training
from carpool_core.values import Precision

from carpool_predictor.optimizers import TABLE


class Sample(msgspec.Struct, frozen=True):
    """One input of a model, for one sample."""

    shape: tuple[int, ...]
    tokens: bool = False
    """Whether it is whole numbers, such as the ids of tokens."""


class Abstention(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why there is no prediction. The tracing process writes it; the job's condition shows it unchanged."""

    reason: str
    """One CamelCase word for programs, such as `TraceTimedOut`."""
    message: str
    """Expected value, found value and advice."""


class TraceError(Exception):
    """The model cannot be traced. The tracing process returns it as an `Abstention`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def as_abstention(self) -> Abstention:
        """Return reason and message as a value."""
        return Abstention(reason=self.reason, message=str(self))


MAX_EXTRAPOLATION = 8
"""Largest ratio between a batch size and the nearest traced one at which the interpolation is trusted."""


def reason_to_abstain(features: ModelFeatures, training: Training) -> Abstention | None:
    """Return why features cannot be used for a training, or None."""
    return _mismatch(features, training) or _implausible(features) or _out_of_range(features, training.batch_size)


def _mismatch(features: ModelFeatures, training: Training) -> Abstention | None:
    pairs = (
        ("optimizer", features.optimizer.value, training.optimizer.value),
        ("precision", features.precision.value, training.precision.value),
        ("activationCheckpointing", features.activation_checkpointing, training.activation_checkpointing),
        ("gradientAccumulation", features.gradient_accumulation, training.gradient_accumulation),
        ("adapter", _shown(features.adapter), _shown(training.adapter)),
        ("quantization", features.quantization or "none", training.quantization or "none"),
        ("crossEntropy", features.cross_entropy.value, training.cross_entropy.value),
        ("compile", features.compile, training.compile),
        ("activationOffloading", features.activation_offloading, training.activation_offloading),
        ("varyingLengths", features.varying_lengths, training.varying_lengths),
        ("parallelism", _division(features.parallelism), _division(training.parallelism)),
    )
    wrong = [f"{name} {traced} where spec.training has {wanted}" for name, traced, wanted in pairs if traced != wanted]
    if not wrong:
        return None
    return Abstention(
        reason="FeaturesMismatch",
        message=f"the features were traced with {'; '.join(wrong)}; run `carpool graph` with the job's own values",
    )


def _shown(adapter: Adapter | None) -> str:
    if adapter is None:
        return "none"
    dropout = f" and dropout {adapter.dropout:g}" if adapter.dropout else ""
    return f"{adapter.kind} of rank {adapter.rank} at {', '.join(adapter.targets) or ALL_LINEAR}{dropout}"


def _division(parallelism: Parallelism | None) -> str:
    return "none" if parallelism is None else msgspec.json.encode(parallelism).decode()


def _implausible(features: ModelFeatures) -> Abstention | None:
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


class StepCost(NamedTuple):
    """The simulated cost of one training step."""

    peak_bytes: float
    """Peak of live tensors."""
    reserved_bytes: float
    """Bytes that the caching allocator holds; estimated from the peak if the features lack it."""
    flops: float
    bytes_moved: float
    kernels: float
    activation_bytes: float = 0.0
    """Inputs, activations and temporaries among the peak."""
    unfolded_bytes: float = 0.0
    """Largest matrix that a convolution would unfold its input into."""
    largest_bytes: float = 0.0
    """Largest single tensor; a typical share of the peak if the features lack it."""


RESERVED_PER_LIVE = 1.09
"""Reserved bytes per live byte at the peak, the median over the traced catalog."""
LARGEST_SHARE = 0.06
"""Share of the largest tensor in the peak, the median over the traced catalog."""


def cost_at(features: ModelFeatures, batch_size: int) -> StepCost:
    """Return the cost at a batch size, linear between the nearest traced steps; no number falls as the batch grows.

    With a single traced step, activations, FLOPs and bytes are proportional to the batch; other memory is constant.
    Below the smallest traced step the peak is at least that of the update, which no batch makes smaller.
    """
    cost = _between(features.steps, batch_size)
    if batch_size >= features.steps[0].batch_size:
        return cost
    peak = max(cost.peak_bytes, min(_update_bytes(features), features.steps[0].peak_bytes))
    return cost._replace(peak_bytes=peak, reserved_bytes=max(cost.reserved_bytes, peak))


def _update_bytes(features: ModelFeatures) -> float:
    """Return the bytes of weights, gradients, optimizer state and temporaries during the update; 0 if divided."""
    if features.parallelism is not None:
        return 0.0
    itemsize = 2 if features.precision is Precision.BF16 else 4
    per_parameter = itemsize + TABLE[features.optimizer].update_per_parameter(itemsize)
    return features.parameter_bytes + features.trainable_parameters * per_parameter


def _between(steps: Sequence[TracedStep], batch_size: int) -> StepCost:
    if len(steps) == 1:
        return _scaled(steps[0], batch_size / steps[0].batch_size)
    costs = list(accumulate(map(_scaled, steps), lambda one, other: StepCost(*map(max, one, other))))
    upper = max(next((i for i, step in enumerate(steps) if step.batch_size >= batch_size), len(steps) - 1), 1)
    low, high = steps[upper - 1].batch_size, steps[upper].batch_size
    along = (batch_size - low) / (high - low)
    pairs = zip(costs[upper - 1], costs[upper], strict=True)
    cost = StepCost(*(max(start + (end - start) * along, 0.0) for start, end in pairs))
    return cost._replace(
        reserved_bytes=max(cost.reserved_bytes, cost.peak_bytes),
        kernels=max(cost.kernels, 1.0),
        activation_bytes=min(cost.activation_bytes, cost.peak_bytes),
    )


def _scaled(step: TracedStep, ratio: float = 1.0) -> StepCost:
    constant = step.peak_bytes - step.activation_bytes
    reserved = max(step.reserved_bytes or step.peak_bytes * RESERVED_PER_LIVE, step.peak_bytes)
    return StepCost(
        peak_bytes=constant + step.activation_bytes * ratio,
        reserved_bytes=constant + (reserved - constant) * ratio,
        flops=step.flops * ratio,
        bytes_moved=step.bytes_moved * ratio,
        kernels=step.kernels,
        activation_bytes=step.activation_bytes * ratio,
        unfolded_bytes=step.unfolded_bytes * ratio,
        largest_bytes=(step.largest_bytes or step.peak_bytes * LARGEST_SHARE) * ratio,
    )


class MalformedError(ValueError):
    """An artifact is invalid; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one training step (forward, backward, optimizer), and the model's layers."""

    batch_size: int
    parameter_bytes: float
    flops: float
    bytes_moved: float
    kernels: float
    layers: LayerCounts
