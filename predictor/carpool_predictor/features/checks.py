"""When the estimator must not answer."""

import math
from collections.abc import Iterator

from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training

from carpool_predictor.features.abstention import Abstention

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
