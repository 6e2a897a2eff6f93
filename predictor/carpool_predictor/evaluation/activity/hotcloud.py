"""The utilization predictor of HotCloud '20 in its own protocol: its features, its four regressors, its grid search.

Yeung et al., "Towards GPU Utilization Prediction for Cloud Deep Learning", HotCloud '20: 80/20 random split, 5-fold
grid search, root mean squared logarithmic error (RMSLE). Needs the extra `train`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np
import xgboost
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, KFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from carpool_predictor.evaluation.activity.rows import ActivityRow
from carpool_predictor.evaluation.suites import Tell, counted, silent

Matrix = NDArray[np.float64]

PAPER: Mapping[str, float] = {"linear": 0.291, "LightGBM": 0.255, "XGBoost": 0.197, "random forest": 0.154}
"""RMSLE that the paper reports, on its own data."""


@dataclass(frozen=True)
class Regressor:
    """A regressor and what the grid search tries."""

    make: Callable[[int], Any]
    """Makes it from a seed."""
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
"""In the order of the tables. All are fitted to log(1 + utilization), which is what RMSLE judges."""


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


def fitted_prediction(model: Any, x: Matrix, y: Matrix, asked: Matrix) -> Matrix:
    """Fit to log(1 + y), predict utilization in %."""
    predicted: Matrix = np.expm1(clone(model).fit(x, np.log1p(y)).predict(asked))
    return np.clip(predicted, 0.0, 100.0)


@dataclass(frozen=True)
class Score:
    """How one regressor did."""

    rmsle: float
    error_points: float
    """Mean absolute error, in points of GPU utilization."""


def random_split(rows: Sequence[ActivityRow], seed: int, what: str = "", tell: Tell = silent) -> dict[str, Score]:
    """Follow the paper's protocol: grid search on 80% of the rows, judged on the others; `tell` hears how far it is."""
    x, y = features(rows), targets(rows)
    known, asked = train_test_split(np.arange(len(y)), test_size=0.2, random_state=seed)
    return {
        name: _score(fitted_prediction(tuned(name, x[known], y[known], seed), x[known], y[known], x[asked]), y[asked])
        for name in counted(list(REGRESSORS), what, tell)
    }


def architectures_held_out(
    rows: Sequence[ActivityRow], seed: int, what: str = "", tell: Tell = silent
) -> dict[str, Score]:
    """Judge each architecture by regressors that saw only the others; tuned on all, which favours the baselines."""
    x, y = features(rows), targets(rows)
    groups = np.array([row.group for row in rows])
    scores = {}
    for name in counted(list(REGRESSORS), what, tell):
        model = tuned(name, x, y, seed)
        predicted = np.zeros(len(y))
        for group in sorted(set(groups)):
            held = groups == group
            predicted[held] = fitted_prediction(model, x[~held], y[~held], x[held])
        scores[name] = _score(predicted, y)
    return scores


def across(
    known: Sequence[ActivityRow], asked: Sequence[ActivityRow], seed: int, what: str = "", tell: Tell = silent
) -> dict[str, Score]:
    """Train on one kind of model, judge on another."""
    x, y = features(known), targets(known)
    return {
        name: _score(fitted_prediction(tuned(name, x, y, seed), x, y, features(asked)), targets(asked))
        for name in counted(list(REGRESSORS), what, tell)
    }


def _score(predicted: Matrix, measured: Matrix) -> Score:
    return Score(rmsle(predicted, measured), mean_absolute_error(predicted, measured))
