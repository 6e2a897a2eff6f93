"""The utilization predictor of HotCloud '20 in its own protocol: features, four regressors and grid search.

Yeung et al., "Towards GPU Utilization Prediction for Cloud Deep Learning", HotCloud '20: 80/20 random split, 5-fold
grid search, root mean squared logarithmic error (RMSLE). Needs the extra `train`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightgbm
import numpy as np
import xgboost
from carpool_core.products import find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer, Precision
from carpool_predictor.catalog.recipes import Recipe
from carpool_predictor.features import cost_at
from carpool_predictor.models import roofline
from carpool_predictor.models.activity import activity_on
from carpool_predictor.tracing.models import trace_recipe
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, KFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torchvision import models  # type: ignore[import-untyped]

from carpool_research.activity.fit import ActivityRow
from carpool_research.report import Progress, counted, silent
from carpool_research.tables import amount, number, read_table

Matrix = NDArray[np.float64]

PAPER: Mapping[str, float] = {"linear": 0.291, "LightGBM": 0.255, "XGBoost": 0.197, "random forest": 0.154}
"""RMSLE in the paper, on its own data."""


@dataclass(frozen=True)
class Regressor:
    """A regressor and its grid."""

    make: Callable[[int], Any]
    """Returns it for a seed."""
    grid: Mapping[str, Sequence[Any]]


REGRESSORS: Mapping[str, Regressor] = {
    "constant": Regressor(lambda seed: DummyRegressor(), {}),
    "linear": Regressor(lambda seed: make_pipeline(StandardScaler(), Ridge()), {"ridge__alpha": (0.01, 1.0, 100.0)}),
    "LightGBM": Regressor(
        lambda seed: lightgbm.LGBMRegressor(
            n_estimators=200, random_state=seed, n_jobs=1, deterministic=True, force_row_wise=True, verbosity=-1
        ),
        {"num_leaves": (15, 31), "learning_rate": (0.05, 0.1)},
    ),
    "XGBoost": Regressor(
        lambda seed: xgboost.XGBRegressor(n_estimators=200, random_state=seed, n_jobs=1, tree_method="hist"),
        {"max_depth": (4, 6), "learning_rate": (0.05, 0.1)},
    ),
    "random forest": Regressor(
        lambda seed: RandomForestRegressor(n_estimators=100, random_state=seed, n_jobs=1),
        {"max_features": (0.4, 1.0), "min_samples_leaf": (1, 2)},
    ),
}
"""Regressors in the order of the tables; all are fitted to log(1 + utilization), as RMSLE requires."""


def features(rows: Sequence[ActivityRow]) -> Matrix:
    """Return the paper's features, shape (rows, 7).

    Convolution, linear, activation and other layers; model size (MB); GFLOPs of a forward pass; batch size.
    """
    return np.array(
        [
            (
                row.work.layers.convolution,
                row.work.layers.linear,
                row.work.layers.activation,
                row.work.layers.normalization + row.work.layers.other,
                row.work.parameter_bytes / 1e6,
                row.work.flops / 3 / 1e9,
                row.work.batch_size,
            )
            for row in rows
        ],
        dtype=float,
    )


def targets(rows: Sequence[ActivityRow]) -> Matrix:
    """Return measured GPU utilization, %."""
    return np.array([row.gpu_util_percent for row in rows])


def rmsle(predicted: Matrix, measured: Matrix) -> float:
    """Return the root mean squared error of log(1 + utilization in %)."""
    return float(np.sqrt(np.mean((np.log1p(np.maximum(predicted, 0.0)) - np.log1p(measured)) ** 2)))


def mean_absolute_error(predicted: Matrix, measured: Matrix) -> float:
    """Return the mean absolute error, in points."""
    return float(np.abs(predicted - measured).mean())


def tuned(name: str, x: Matrix, y: Matrix, seed: int) -> Any:
    """Grid-search one regressor by 5-fold cross-validation; return it unfitted, with the best parameters."""
    regressor = REGRESSORS[name]
    model = regressor.make(seed)
    if not regressor.grid:
        return model
    search = GridSearchCV(
        model,
        {key: list(values) for key, values in regressor.grid.items()},
        cv=KFold(5, shuffle=True, random_state=seed),
        scoring="neg_root_mean_squared_error",
        n_jobs=1,
        refit=False,
    )
    search.fit(x, np.log1p(y))
    return clone(model).set_params(**search.best_params_)


def fitted_prediction(model: Any, x: Matrix, y: Matrix, test: Matrix) -> Matrix:
    """Fit to log(1 + y), predict utilization in %."""
    predicted: Matrix = np.expm1(clone(model).fit(x, np.log1p(y)).predict(test))
    return np.clip(predicted, 0.0, 100.0)


@dataclass(frozen=True)
class Score:
    """Errors of one regressor."""

    rmsle: float
    error_points: float
    """Mean absolute error, in points of GPU utilization."""


def random_split(
    rows: Sequence[ActivityRow], seed: int, what: str = "", progress: Progress = silent
) -> dict[str, Score]:
    """Follow the paper's protocol: grid search on 80% of the rows, evaluated on the others."""
    x, y = features(rows), targets(rows)
    train, test = train_test_split(np.arange(len(y)), test_size=0.2, random_state=seed)
    return {
        name: _score(fitted_prediction(tuned(name, x[train], y[train], seed), x[train], y[train], x[test]), y[test])
        for name in counted(list(REGRESSORS), what, progress)
    }


def architectures_held_out(
    rows: Sequence[ActivityRow], seed: int, what: str = "", progress: Progress = silent
) -> dict[str, Score]:
    """Predict each architecture from the others; the grid search uses all rows, which favours the baselines."""
    x, y = features(rows), targets(rows)
    groups = np.array([row.group for row in rows])
    scores = {}
    for name in counted(list(REGRESSORS), what, progress):
        model = tuned(name, x, y, seed)
        predicted = np.zeros(len(y))
        for group in sorted(set(groups)):
            held = groups == group
            predicted[held] = fitted_prediction(model, x[~held], y[~held], x[held])
        scores[name] = _score(predicted, y)
    return scores


def across(
    train: Sequence[ActivityRow], test: Sequence[ActivityRow], seed: int, what: str = "", progress: Progress = silent
) -> dict[str, Score]:
    """Train on one kind of model, and evaluate on another."""
    x, y = features(train), targets(train)
    return {
        name: _score(fitted_prediction(tuned(name, x, y, seed), x, y, features(test)), targets(test))
        for name in counted(list(REGRESSORS), what, progress)
    }


def _score(predicted: Matrix, measured: Matrix) -> Score:
    return Score(rmsle(predicted, measured), mean_absolute_error(predicted, measured))


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
    """One measured job and its prediction; percent."""

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
    """Return the usual ResNet-18 for images of 32 × 32, whose stem keeps the size."""
    model: nn.Module = models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


def _mobilenet() -> nn.Module:
    """Return MobileNetV2 for images of 32 × 32, with two strides of 1."""
    stages = [[1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 2], [6, 320, 1, 1]]
    model: nn.Module = models.mobilenet_v2(num_classes=10, inverted_residual_setting=stages)
    model.features[0][0].stride = (1, 1)  # type: ignore[index, method-assign]
    return model


_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MobileNetV2": (_mobilenet, (3, 32, 32)),
    "ResNet18": (_resnet18, (3, 32, 32)),
    "ResNet50": (models.resnet50, (3, 224, 224)),
}
"""Networks with published shapes; Lucid's others are not convolutional or not fully published."""


def judge(data: Path) -> list[RealRow]:
    """Predict every measured job.

    Raises:
        DataError: The file or a column is missing, or a row cannot be read.
    """
    traced: dict[tuple[str, Precision], ModelFeatures] = {}
    found = []
    for job in read_table(data / FILE, COLUMNS, _job):
        if job.model in _MODELS:
            key = job.model, job.precision
            if key not in traced:
                traced[key] = _traced(*key)
            found.append(_judged(job, traced[key]))
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
