"""Profiles of the jobs of simulated workloads: traced features, their predictions, Lucid's measurements."""

from functools import cache
from importlib import resources
from pathlib import Path

import msgspec
from carpool_core.products import find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import Prediction
from carpool_predictor.calibration.run_history import exceeds_gpu
from carpool_predictor.predict import PredictionContext, prepare, summarize

from carpool_simulator.truth import Truth, lucid_kind, read_lucid

PRODUCT = "NVIDIA GeForce RTX 3090"
"""GPU that Lucid measured."""
MODELS = ("ResNet18", "MobileNetV2", "EfficientNet")
"""Models that HotCloud '20 and Lucid have in common."""


@cache
def _traced() -> dict[str, ModelFeatures]:
    text = resources.files(__package__).joinpath("features.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, ModelFeatures])


@cache
def job_of(kind: str) -> PredictionContext | None:
    """Return the prediction context of a kind of job (`radrm/resnet50/ImageNet/64`); None if the predictor abstains."""
    features = _traced().get(kind)
    if features is None:
        return None
    training = Training(
        batch_size=features.steps[-1].batch_size, optimizer=features.optimizer, precision=features.precision
    )
    found = prepare(features, training)
    return found if isinstance(found, PredictionContext) else None


@cache
def prediction_of(kind: str, product: str) -> Prediction | None:
    """Return the shipped prediction for a kind of job; None if the predictor abstains."""
    job = job_of(kind)
    return None if job is None else summarize(job, [job.on(find_product(product))])


def predicted_profiles(product: str) -> dict[Truth, float]:
    """Return the predicted profile and step time, in seconds, of each traced kind of job that fits a product."""
    found = {}
    for kind in _traced():
        prediction = prediction_of(kind, product)
        if prediction is not None and not exceeds_gpu(prediction.products[0].memory, find_product(product)):
            one = prediction.products[0]
            profile = Truth(
                kind=kind,
                memory_mib=one.memory.median_mib,
                util=one.activity.gpu_util_percent.median / 100,
                sm=one.activity.sm_active_ratio.median,
                dram=one.activity.dram_active_ratio.median,
                product=product,
                model=kind.rpartition("/")[0],
            )
            found[profile] = one.step_time_seconds.median
    return found


def measured_profiles(data: Path) -> list[Truth]:
    """Return Lucid's solo profiles of `MODELS`: 18 combinations of model, batch size and AMP."""
    return [
        Truth(
            kind=lucid_kind(row),
            memory_mib=round(float(row["gmem"])),
            util=float(row["gpu_util"]) / 100,
            sm=float(row["gpu_util"]) / 100,
            dram=float(row["gmem_util"]) / 100,
            product=PRODUCT,
            model=f"lucid/{row['model']}",
        )
        for row in read_lucid(data / "lucid" / "solo_rtx3090.csv")
        if row["model"] in MODELS
    ]


def step_times(data: Path) -> dict[str, float]:
    """Return the measured solo step time of each kind of job in seconds, loading of its input included."""
    rows = read_lucid(data / "lucid" / "solo_rtx3090.csv")
    return {lucid_kind(row): float(row["batchsize"]) / float(row["speed"]) for row in rows}
