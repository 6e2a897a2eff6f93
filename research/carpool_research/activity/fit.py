"""Fits the activity model to GPUMemNet's measurements."""

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm
import msgspec
import numpy as np
from carpool_core.products import find_product
from carpool_core.resources.features import LayerCounts
from carpool_core.values import Precision
from carpool_predictor.features import StepWork
from carpool_predictor.models.activity import FORMAT, NAMES, ActivityModel, Bins, Target, features_of
from carpool_predictor.models.trees import Forest
from numpy.typing import NDArray

from carpool_research.activity.layer_lists import work_of
from carpool_research.report import Progress, counted, silent
from carpool_research.tables import KINDS, amount, ended_well, file_of, number, read_table

PRODUCT = "NVIDIA A100-SXM4-40GB"
COLUMNS = ("Filename", "Activations-Params", "Batch Size", "Avg GPUTL", "Avg SMACT", "Avg SMOCC")
_NOTHING = StepWork(1, 0.0, 0.0, 0.0, 1.0, LayerCounts())


@dataclass(frozen=True, slots=True)
class ActivityRow:
    """One measured training run, alone on an A100."""

    kind: str
    """`mlp` or `cnn`."""
    architecture: str
    """Architecture such as `pyramid`; held out together with the kind."""
    work: StepWork
    gpu_util_percent: float
    """Mean over the run; below 0 if it was not recorded."""
    sm_active_ratio: float
    sm_occupancy_ratio: float
    succeeded: bool
    """Whether the run did not end out of memory."""
    listed: bool
    """Whether its layers were recorded; a run that died at once has none."""

    @property
    def group(self) -> str:
        """Name of the group that is held out together."""
        return f"{self.kind}/{self.architecture}"

    @property
    def measured(self) -> bool:
        """Whether activity was recorded."""
        return self.gpu_util_percent >= 0


def read_rows(data: Path, kind: str) -> list[ActivityRow]:
    """Read the MLPs or the CNNs.

    Args:
        data: Folder that holds `gpumemnet/`.
        kind: `mlp` or `cnn`.

    Raises:
        DataError: The file or a column is missing, or a row cannot be read.
    """
    return read_table(data / file_of(kind), COLUMNS, lambda row: _read(kind, row))


def _read(kind: str, row: dict[str, str]) -> ActivityRow:
    name = row["Filename"]
    layers = ast.literal_eval(row["Activations-Params"])
    batch_size = amount(row, "Batch Size")
    return ActivityRow(
        kind=kind,
        architecture=_word(name, "arch"),
        work=work_of(layers, batch_size, _shape(kind, name)) if layers else _NOTHING,
        gpu_util_percent=number(row, "Avg GPUTL"),
        sm_active_ratio=number(row, "Avg SMACT"),
        sm_occupancy_ratio=number(row, "Avg SMOCC"),
        succeeded=ended_well(row),
        listed=bool(layers),
    )


def _shape(kind: str, name: str) -> tuple[int, ...]:
    if kind == "mlp":
        return (int(_word(name, "input")),)
    size = int(_word(name, "input_size"))
    return (int(_word(name, "input_channels")), size, size)


def _word(name: str, key: str) -> str:
    found = re.search(rf"(?:^|_){key}:([a-z]+|\d+)", name)
    if found is None:
        raise ValueError(f"the name {name!r} lacks {key}:")
    return found.group(1)


def clean(rows: Iterable[ActivityRow]) -> list[ActivityRow]:
    """Return the runs that were measured, did not run out of memory, and have layers."""
    return [row for row in rows if row.measured and row.succeeded and row.listed]


TARGETS: dict[str, Callable[[ActivityRow], float]] = {
    "gpu_util_percent": lambda row: row.gpu_util_percent,
    "sm_active_ratio": lambda row: row.sm_active_ratio,
    "sm_occupancy_ratio": lambda row: row.sm_occupancy_ratio,
}
BINS = 5
QUANTILES = (0.05, 0.95)
_PARAMETERS = {
    "objective": "huber", "alpha": 15.0, "min_data_in_leaf": 8,
    "lambda_l2": 1.0, "feature_fraction": 0.7, "bagging_fraction": 0.8, "bagging_freq": 1, "num_threads": 1,
    "deterministic": True, "force_row_wise": True, "verbosity": -1,
}  # fmt: skip
_PERCENT = {"gpu_util_percent": 1.0, "sm_active_ratio": 100.0, "sm_occupancy_ratio": 100.0}
"""Factor to percent, in which targets are fitted; Huber's loss is quadratic up to 15 points."""

INNER_FOLDS = 4

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Size:
    """Size of the model."""

    trees: int
    leaves: int
    learning_rate: float


SHIPPED = Size(trees=100, leaves=15, learning_rate=0.12)
SIZES = (SHIPPED, Size(100, 7, 0.12), Size(300, 15, 0.04), Size(50, 31, 0.12))


@dataclass(frozen=True)
class HeldOut:
    """Predictions for rows of held-out architectures."""

    measured: Matrix
    predicted: Matrix
    lower: Matrix
    upper: Matrix
    groups: tuple[str, ...]
    """Group of each row."""


def matrix(rows: Sequence[ActivityRow]) -> Matrix:
    """Return the features of rows, shape (rows, features)."""
    product = find_product(PRODUCT)
    return np.array([features_of(row.work, product, Precision.FP32) for row in rows])


def values(rows: Sequence[ActivityRow], target: str) -> Matrix:
    """Return the measured values of a target."""
    return np.array([TARGETS[target](row) for row in rows])


def weights_of(rows: Sequence[ActivityRow]) -> Matrix:
    """Return weights with equal sums for MLPs and CNNs."""
    kinds = np.array([row.kind for row in rows])
    weights = np.ones(len(rows))
    for kind in set(kinds):
        weights[kinds == kind] = len(rows) / (len(set(kinds)) * np.count_nonzero(kinds == kind))
    return weights


def fit_booster(x: Matrix, y: Matrix, weights: Matrix, seed: int, size: Size = SHIPPED) -> Any:
    """Fit trees to measured percentages by Huber's loss."""
    data = lightgbm.Dataset(x, y, weight=weights, params={"verbosity": -1})
    parameters = {**_PARAMETERS, "seed": seed, "num_leaves": size.leaves, "learning_rate": size.learning_rate}
    return lightgbm.train(parameters, data, num_boost_round=size.trees)


def out_of_fold(rows: Sequence[ActivityRow], target: str, seed: int, progress: Progress = silent) -> Matrix:
    """Predict each architecture from all others."""
    x, y = matrix(rows), _PERCENT[target] * values(rows, target)
    names = np.array([row.group for row in rows])
    predicted = np.zeros(len(y))
    weights = weights_of(rows)
    for group in counted(sorted(set(names)), f"{target}, architecture held out", progress):
        held = names == group
        predicted[held] = fit_booster(x[~held], y[~held], weights[~held], seed).predict(x[held])
    return predicted / _PERCENT[target]


def chosen_inside(
    rows: Sequence[ActivityRow], target: str, seed: int, progress: Progress = silent
) -> tuple[Matrix, list[Size]]:
    """Predict each architecture from all others, with the size of the model chosen without it.

    The shipped size was chosen on these figures. Here each fold chooses its own by the mean absolute error on inner
    folds.

    Returns:
        Predictions, and the size that each fold chose.
    """
    x, y = matrix(rows), _PERCENT[target] * values(rows, target)
    names, weights = np.array([row.group for row in rows]), weights_of(rows)
    predicted, sizes = np.zeros(len(y)), []
    for group in counted(sorted(set(names)), f"{target}, sizes chosen inside", progress):
        known = names != group
        folds = _inner_folds(sorted(set(names[known])))

        def error(size: Size, known: NDArray[np.bool_] = known, folds: list[list[str]] = folds) -> float:
            errors = []
            for fold in folds:
                judged = np.isin(names, fold)
                booster = fit_booster(x[known & ~judged], y[known & ~judged], weights[known & ~judged], seed, size)
                errors.append(weights[judged] * np.abs(booster.predict(x[judged]) - y[judged]))
            return float(np.concatenate(errors).mean())

        sizes.append(min(SIZES, key=error) if len(folds) > 1 else SHIPPED)
        booster = fit_booster(x[known], y[known], weights[known], seed, sizes[-1])
        predicted[~known] = booster.predict(x[~known])
    return predicted / _PERCENT[target], sizes


def _inner_folds(groups: Sequence[str]) -> list[list[str]]:
    return [fold for number in range(INNER_FOLDS) if (fold := list(groups[number::INNER_FOLDS]))]


def bins_of(predicted: Matrix, measured: Matrix) -> Bins:
    """Return error quantiles, binned by the prediction; the whole range without predictions."""
    if not len(predicted):
        return Bins(edges=[], lower=[-100.0], upper=[100.0])
    edges = np.unique([_short(e) for e in np.quantile(predicted, np.linspace(0, 1, BINS + 1)[1:-1])])
    index = np.searchsorted(edges, predicted, side="left")
    errors = [measured[index == i] - predicted[index == i] for i in range(len(edges) + 1)]
    lower, upper = ([_short(_conformal(error, q)) for error in errors] for q in QUANTILES)
    return Bins(edges=[float(e) for e in edges], lower=lower, upper=upper)


def _conformal(errors: Matrix, quantile: float) -> float:
    """Return the quantile with the conformal correction for finite samples."""
    if not len(errors):
        return 0.0
    ordered = np.sort(errors)
    share = min((len(ordered) + 1) / len(ordered) * max(quantile, 1 - quantile), 1.0)
    rank = min(int(np.ceil(share * len(ordered))), len(ordered)) - 1
    return float(ordered[rank] if quantile > 0.5 else ordered[len(ordered) - 1 - rank])


def held_out(rows: Sequence[ActivityRow], target: str, seed: int, progress: Progress = silent) -> HeldOut:
    """Evaluate on held-out architectures; trees and interval of a row are fitted without its architecture."""
    y = values(rows, target)
    predicted = out_of_fold(rows, target, seed, progress)
    lower, upper = np.zeros(len(y)), np.zeros(len(y))
    names, kinds = np.array([row.group for row in rows]), np.array([row.kind for row in rows])
    for group in sorted(set(names)):
        held = names == group
        others = (kinds == group.partition("/")[0]) & ~held
        bins = bins_of(predicted[others], y[others])
        ends = np.array([bins.around(value) for value in predicted[held]])
        lower[held], upper[held] = ends[:, 0], ends[:, 1]
    return HeldOut(y, predicted, lower, upper, tuple(names))


def fit(rows: Sequence[ActivityRow], seed: int) -> ActivityModel:
    """Fit the shipped model; the same rows, seed and versions give the same model."""
    x = matrix(rows)
    cnn = np.array([row.kind == "cnn" for row in rows])
    targets: dict[str, Target] = {}
    errors: dict[str, str | int | float] = {}
    for name in TARGETS:
        y = values(rows, name)
        predicted = out_of_fold(rows, name, seed)
        booster = fit_booster(x, y * _PERCENT[name], weights_of(rows), seed)
        targets[name] = Target(
            forest=forest_of(booster, _PERCENT[name]),
            convolutional=bins_of(predicted[cnn], y[cnn]),
            plain=bins_of(predicted[~cnn], y[~cnn]),
        )
        for kind, chosen in (("cnn", cnn), ("mlp", ~cnn)):
            if chosen.any():
                error = float(np.abs(predicted - y)[chosen].mean())
                errors[f"held_out_mean_absolute_error_{name}_{kind}"] = _short(error)
    return ActivityModel(
        format=FORMAT,
        version="2",
        product=PRODUCT,
        precision=Precision.FP32,
        features=list(NAMES),
        low=[_short(v) for v in x.min(axis=0)],
        high=[_short(v) for v in x.max(axis=0)],
        **targets,
        provenance={
            "data": "itu-rad/GPUMemNet, Datasets: synthetic MLPs and CNNs, A100-SXM4-40GB, FP32, TF32 convolutions",
            "rows": len(rows),
            "architectures": len({row.group for row in rows}),
            "seed": seed,
            "lightgbm": lightgbm.__version__,
            **errors,
        },
    )


def forest_of(booster: Any, unit: float) -> Forest:
    """Return a booster as plain lists, with leaves divided by `unit`."""
    lists: dict[str, list[Any]] = {key: [] for key in ("roots", "feature", "threshold", "left", "right", "value")}

    def add(node: dict[str, Any]) -> int:
        index = len(lists["feature"])
        split = "split_feature" in node
        lists["feature"].append(int(node["split_feature"]) if split else -1)
        lists["threshold"].append(float(f"{node['threshold']:.9g}") if split else 0.0)
        lists["value"].append(0.0 if split else _short(node["leaf_value"] / unit))
        lists["left"].append(0)
        lists["right"].append(0)
        if split:
            lists["left"][index] = add(node["left_child"])
            lists["right"][index] = add(node["right_child"])
        return index

    for tree in booster.dump_model()["tree_info"]:
        lists["roots"].append(add(tree["tree_structure"]))
    return Forest(base=0.0, **lists)


def _short(value: float) -> float:
    return float(f"{float(value):.6g}")


SEED = 0


def train_activity(data: Path, out: Path) -> Path:
    """Write `activity.json` below `out`; the same data and seed give the same bytes.

    Raises:
        DataError: A file or a column is missing.
    """
    rows = [row for kind in KINDS for row in clean(read_rows(data, kind))]
    path = out / "activity.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(fit(rows, SEED)) + b"\n")
    return path
