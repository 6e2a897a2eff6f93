"""A job on a T4, runs of it, and predictions from them."""

from typing import Any

import msgspec
from carpool_core.products import find_product
from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import ProductPrediction
from carpool_core.values import MIB, Precision
from carpool_predictor.calibration.document import Calibration, RunMeasurement, Stack
from carpool_predictor.calibration.observe import observe
from carpool_predictor.models.memory import shipped
from carpool_predictor.predict import PredictionContext, predict, prepare, run_prediction_of

T4 = find_product("Tesla T4")
STACK = Stack(product=T4.name, precision=Precision.FP32)
NAME = "model"


def features() -> ModelFeatures:
    steps = [
        TracedStep(batch_size=b, peak_bytes=MIB * (400 + 50 * b), activation_bytes=MIB * 50 * b, flops=2e10 * b,
                   bytes_moved=1e9 * b, kernels=500)
        for b in (32, 64)
    ]  # fmt: skip
    return ModelFeatures(
        parameters=10**7, trainable_parameters=10**7, parameter_bytes=4 * 10**7,
        layers=LayerCounts(convolution=53, linear=1), steps=steps,
    )  # fmt: skip


def asked(batch: int = 64) -> PredictionContext:
    found = prepare(features(), Training(batch_size=batch))
    assert isinstance(found, PredictionContext)
    return found


def runs(
    *peaks: float, batch: int = 64, name: str = NAME, before: Calibration | None = None, **more: Any
) -> Calibration:
    found = before or Calibration()
    for peak in peaks:
        measured = msgspec.structs.replace(RunMeasurement(peak_mib=peak, capacity_mib=T4.memory_mib), **more)
        found = observe(found, STACK, run_prediction_of(asked(batch), name, T4.memory_mib, T4), measured, shipped())
    return found


def predict_on_t4(calibration: Calibration, batch: int = 64, **how: bool) -> ProductPrediction:
    return predict(features(), Training(batch_size=batch), [T4], calibration, NAME, **how).products[0]
