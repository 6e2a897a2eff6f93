"""From traced steps to the step at any batch size: everything a step costs is nearly affine in its batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from carpool_core.resources.features import ModelFeatures, TracedStep


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
