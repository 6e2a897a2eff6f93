"""Profiles of the jobs of simulated workloads: features traced beforehand, and their predictions."""

from functools import cache
from importlib import resources

import msgspec
from carpool_core.products import find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import Prediction
from carpool_predictor.predict import PredictionContext, prepare, summarize


@cache
def _traced() -> dict[str, ModelFeatures]:
    text = resources.files(__package__).joinpath("features.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, ModelFeatures])


@cache
def job_of(kind: str) -> PredictionContext | None:
    """Return what the predictor is asked of a kind of job (`radrm/resnet50/ImageNet/64`); None: it abstains."""
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
    """Return what the shipped predictor says of a kind of job; None: it abstains."""
    job = job_of(kind)
    return None if job is None else summarize(job, [job.on(find_product(product))])
