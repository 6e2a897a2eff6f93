"""What the catalog sweep writes for each model; the feature store and the memory model are made of it. No PyTorch."""

from collections.abc import Mapping

import msgspec
from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
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
