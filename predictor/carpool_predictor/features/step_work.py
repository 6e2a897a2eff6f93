"""A training step in numbers, however they were found: by tracing it, or by arithmetic over a list of layers."""

from dataclasses import dataclass

from carpool_core.resources.features import LayerCounts


@dataclass(frozen=True, slots=True)
class StepWork:
    """One training step (forward, backward, Adam) in numbers, and the model's layers."""

    batch_size: int
    parameter_bytes: float
    flops: float
    bytes_moved: float
    kernels: float
    layers: LayerCounts
