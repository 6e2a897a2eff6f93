"""What a job's memory consists of, reckoned from its features; the parts add up to the predicted median."""

from dataclasses import dataclass

from carpool_core.products import GpuProduct
from carpool_core.resources.prediction import MemoryPrediction
from carpool_core.values import MIB, Optimizer

from carpool_predictor.cost_models.memory import context_mib
from carpool_predictor.prediction.estimator import Job

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
