"""Predicts memory, activity and step time from features. Pure, without PyTorch or NumPy; microseconds a product."""

from collections.abc import Sequence

from carpool_core.products import GpuProduct, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import Prediction, ProductPrediction

from carpool_predictor.abstention import Abstention
from carpool_predictor.checks import reason_to_abstain
from carpool_predictor.interpolation import StepCost, cost_at
from carpool_predictor.memory import (
    Corrected,
    MemoryModel,
    context_mib,
    correct,
    is_calibrated,
    predict_memory,
    shipped,
)
from carpool_predictor.roofline import activity_on, intervals

__all__ = ["Abstention", "model_version", "predict"]

_MAX_PEAK_BYTES = 2.0**50
"""1 PiB: beyond any single-GPU training step."""


def model_version(model: MemoryModel | None = None) -> str:
    """Return the version of what predicts."""
    return f"replay-affine-trees/{(model or shipped()).version}"


def predict(features: ModelFeatures | Abstention, training: Training, gpus: Sequence[GpuProduct]) -> Prediction:
    """Predict a job on each GPU product, or abstain.

    Args:
        features: Traced features, or why there are none.
        training: The job's training; features must have been traced with its optimizer, precision and checkpointing.
        gpus: Products to predict for; the answer keeps their order.

    Returns:
        A prediction whose `input_digest` is left to the caller, who knows the model's source.
    """
    if isinstance(features, Abstention):
        return _abstained(features)
    refusal = reason_to_abstain(features, training)
    if refusal is not None:
        return _abstained(refusal)
    cost = cost_at(features, training.batch_size)
    if cost.peak_bytes > _MAX_PEAK_BYTES:
        return _abstained(
            Abstention(
                reason="FeaturesAbsurd",
                message=f"batch size {training.batch_size:,} needs {cost.peak_bytes:.3g} bytes; check the features",
            )
        )
    model = shipped()
    corrected = correct(model, features, cost, training.batch_size)
    products = [_on(product, cost, features, model, corrected) for product in gpus]
    elsewhere = [p.name for p in gpus if not is_calibrated(model, p, training.precision)]
    known = "Calibrated" if corrected.inside else "OutsideTraining"
    return Prediction(
        outcome="Predicted",
        reason="Uncalibrated" if elsewhere else known,
        message=_message(features, model, elsewhere, inside=corrected.inside),
        model_version=model_version(model),
        products=products,
    )


def _on(
    product: GpuProduct, cost: StepCost, features: ModelFeatures, model: MemoryModel, corrected: Corrected
) -> ProductPrediction:
    convolutional = features.layers.convolution > features.layers.linear
    activity, step_time = intervals(activity_on(cost, product, features.precision, convolutional=convolutional))
    memory = predict_memory(
        cost,
        features.layers,
        model,
        corrected,
        calibrated=is_calibrated(model, product, features.precision),
        context_difference_mib=context_mib(product) - context_mib(find_product(model.product)),
    )
    return ProductPrediction(product=product.name, memory=memory, activity=activity, step_time_seconds=step_time)


def _message(features: ModelFeatures, model: MemoryModel, elsewhere: Sequence[str], *, inside: bool) -> str:
    batches = ", ".join(str(step.batch_size) for step in features.steps)
    told = f"from training steps traced at batch sizes {batches}; activity and step time are roofline estimates"
    if not inside:
        told += "; the model is unlike those that were measured, so the bound on memory is wider"
    if not elsewhere:
        return told
    return (
        f"{told}; memory is calibrated on {model.product} in {model.precision} only, so the bound is wider on "
        "other GPU products and precisions"
    )


def _abstained(abstention: Abstention) -> Prediction:
    return Prediction(
        outcome="Abstained", reason=abstention.reason, message=abstention.message, model_version=model_version()
    )
