"""Activity of real networks, to judge only: S-Lab's Lucid measured three convolutional ones alone on an RTX 3090.

Hu et al., "Lucid: A Non-intrusive, Scalable and Interpretable Scheduler for Deep Learning Training Jobs", ASPLOS '23;
its licence keeps what is shipped from learning of it. GPU utilization alone, in FP32 and with automatic mixed
precision (`amp`, FP16), data loading included. Imports PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from carpool_core.products import find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer, Precision
from torch import nn
from torchvision import models  # type: ignore[import-untyped]

from carpool_predictor.catalog.recipes import Recipe
from carpool_predictor.evaluation.tables import amount, number, read_table
from carpool_predictor.features import cost_at
from carpool_predictor.models import roofline
from carpool_predictor.models.activity import activity_on
from carpool_predictor.tracing.models import trace_recipe

PRODUCT = "NVIDIA GeForce RTX 3090"
FILE = Path("lucid", "solo_rtx3090.csv")
COLUMNS = ("model", "batchsize", "amp", "gpu_util")
_TRACED_BATCH = 64


class _Job(NamedTuple):
    model: str
    batch_size: int
    precision: Precision
    gpu_util_percent: float


@dataclass(frozen=True, slots=True)
class RealRow:
    """One measured job, and what is said of it; percent."""

    model: str
    batch_size: int
    precision: Precision
    measured: float
    predicted: float
    lower: float
    upper: float
    inside: bool
    roofline: float


def _resnet18() -> nn.Module:
    """Return the usual ResNet-18 for images of 32 × 32: its stem keeps their size."""
    model: nn.Module = models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


def _mobilenet() -> nn.Module:
    """Return MobileNetV2 for images of 32 × 32: two of its strides are 1."""
    stages = [[1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 2], [6, 320, 1, 1]]
    model: nn.Module = models.mobilenet_v2(num_classes=10, inverted_residual_setting=stages)
    model.features[0][0].stride = (1, 1)  # type: ignore[index, method-assign]
    return model


_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MobileNetV2": (_mobilenet, (3, 32, 32)),
    "ResNet18": (_resnet18, (3, 32, 32)),
    "ResNet50": (models.resnet50, (3, 224, 224)),
}
"""Networks whose shapes are known; the others of Lucid's are not convolutional, or stand nowhere in full."""


def judge(data: Path) -> list[RealRow]:
    """Predict every measured job.

    Raises:
        DataError: The file or a column is missing, or a row cannot be read.
    """
    known: dict[tuple[str, Precision], ModelFeatures] = {}
    found = []
    for job in read_table(data / FILE, COLUMNS, _job):
        if job.model in _MODELS:
            key = job.model, job.precision
            if key not in known:
                known[key] = _traced(*key)
            found.append(_judged(job, known[key]))
    return found


def _job(row: dict[str, str]) -> _Job:
    precision = Precision.FP16_MIXED if row["amp"] == "1" else Precision.FP32
    return _Job(row["model"], amount(row, "batchsize"), precision, number(row, "gpu_util"))


def _traced(model: str, precision: Precision) -> ModelFeatures:
    build, shape = _MODELS[model]
    training = Training(batch_size=_TRACED_BATCH, optimizer=Optimizer.SGD_MOMENTUM, precision=precision)
    return trace_recipe(Recipe(model, build, shape), training)


def _judged(job: _Job, features: ModelFeatures) -> RealRow:
    product, cost = find_product(PRODUCT), cost_at(features, job.batch_size)
    training = Training(batch_size=job.batch_size, optimizer=features.optimizer, precision=features.precision)
    answer = activity_on(features, cost, training, product)
    util = answer.activity.gpu_util_percent
    plain = roofline.activity_on(cost, product, features.precision, convolutional=True)
    return RealRow(
        model=job.model,
        batch_size=job.batch_size,
        precision=job.precision,
        measured=job.gpu_util_percent,
        predicted=util.median,
        lower=util.lower,
        upper=util.upper,
        inside=answer.inside,
        roofline=100 * plain.gpu_util,
    )
