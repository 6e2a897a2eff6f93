"""From traced steps to the step at any batch size: everything a step costs is nearly affine in its batch."""

from dataclasses import dataclass

from carpool_core.resources.features import ModelFeatures, TracedStep


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one training step costs, as simulated."""

    peak_bytes: float
    flops: float
    bytes_moved: float
    kernels: float


def cost_at(features: ModelFeatures, batch_size: int) -> StepCost:
    """Interpolate between the nearest traced steps, or extend the outermost line; slopes are never negative.

    With a single traced step, what is alive at the peak besides activations is taken as constant, and the rest, like
    FLOPs and bytes, as proportional to the batch.
    """
    low, high = _bracket(features.steps, batch_size)
    if low is high:
        return _scaled(low, batch_size / low.batch_size)
    along = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)

    def at(start: float, end: float) -> float:
        # Never under the traced value towards smaller batches than any traced: the line may have been bent by noise.
        return max(start + max(end - start, 0.0) * along, 0.0)

    return StepCost(
        peak_bytes=at(low.peak_bytes, high.peak_bytes),
        flops=at(low.flops, high.flops),
        bytes_moved=at(low.bytes_moved, high.bytes_moved),
        kernels=max(at(low.kernels, high.kernels), 1.0),
    )


def _bracket(steps: list[TracedStep], batch_size: int) -> tuple[TracedStep, TracedStep]:
    if len(steps) == 1:
        return steps[0], steps[0]
    upper = next((i for i, step in enumerate(steps) if step.batch_size >= batch_size), len(steps) - 1)
    upper = max(upper, 1)
    return steps[upper - 1], steps[upper]


def _scaled(step: TracedStep, ratio: float) -> StepCost:
    constant = step.peak_bytes - step.activation_bytes
    return StepCost(
        peak_bytes=constant + step.activation_bytes * ratio,
        flops=step.flops * ratio,
        bytes_moved=step.bytes_moved * ratio,
        kernels=step.kernels,
    )
