"""Fits the utilizations of `step_time` to measured steps, and evaluates them on held-out GPUs.

Utilizations are fitted on the other GPUs only. The form (`sum` or `larger`, with or without time for every kernel) is
chosen by holding each of those out too. Needs the extra `train`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lightgbm
import msgspec
import numpy as np
import scipy
from carpool_predictor.features import StepCost
from carpool_predictor.models.step_time import FORMAT, Form, StepTimeModel, Utilization
from numpy.typing import NDArray
from scipy.optimize import least_squares

from carpool_research.report import Progress, counted, silent
from carpool_research.step_time.data import GPUS, INFERRED, TRAINING_GPUS, EpochRow, ModelRow, read_models

VERSION = "1"
SEED = 0
"""Nothing is random: the fit starts at `_START`, and folds are GPUs."""
QUANTILES = (0.05, 0.95)
_START = (0.8, 0.8, 5e-6)
_TREES = {
    "objective": "l1", "learning_rate": 0.1, "num_leaves": 7, "min_data_in_leaf": 3, "num_threads": 1,
    "deterministic": True, "force_row_wise": True, "verbosity": -1,
}  # fmt: skip

Matrix = NDArray[np.float64]


class Choice(NamedTuple):
    """A form of the model."""

    form: Form
    kernels: bool
    """Whether every kernel has a fixed time."""

    def __str__(self) -> str:
        return f"{self.form}, {'with' if self.kernels else 'without'} time for each kernel"


CHOICES = (Choice("sum", True), Choice("sum", False), Choice("larger", True), Choice("larger", False))


def seconds(model: Utilization, gpu_name: str, cost: StepCost) -> float:
    """Predict a step on one of NeuSight's GPUs."""
    gpu = GPUS[gpu_name]
    return model.seconds(cost, gpu.fp32_tflops * 1e12 * model.matrix, gpu.memory_bandwidth_gb_s * 1e9)


@cache
def fit_as(rows: tuple[ModelRow, ...], choice: Choice) -> Utilization:
    """Fit measured steps by robust least squares of logarithms.

    The evaluation fits the same rows several times: for a table, for a choice of the form and for the model.
    """

    def model(logs: Matrix) -> Utilization:
        found = [min(float(value), 2.0) for value in np.exp(logs)]
        kernel_s = min(found[2], 1e-3) if choice.kernels else 0.0
        return Utilization(form=choice.form, matrix=found[0], bandwidth=found[1], kernel_s=kernel_s)

    costs = [row.cost for row in rows]

    def errors(logs: Matrix) -> list[float]:
        tried = model(logs)
        return [math.log(seconds(tried, row.gpu, cost) / row.time_s) for row, cost in zip(rows, costs, strict=True)]

    start = _START if choice.kernels else _START[:2]
    return model(least_squares(errors, np.log(start), loss="soft_l1", f_scale=0.1).x)


def choose(rows: Sequence[ModelRow], statistic: Callable[[Matrix], Any] = np.mean) -> Choice:
    """Return the form with the smallest error in logarithms, each GPU of these rows held out.

    Args:
        rows: Measured steps.
        statistic: Statistic of the errors; the median is noisy on few rows, as the model card shows.
    """
    if len({row.gpu for row in rows}) < 2:
        return CHOICES[0]

    def error(choice: Choice) -> float:
        predicted = gpus_held_out(rows, by_form(choice))
        return float(statistic(np.abs(np.log(predicted / _times(rows)))))

    return min(CHOICES, key=error)


def fit(rows: Sequence[ModelRow]) -> Utilization:
    """Choose a form, and fit its utilizations."""
    return fit_as(tuple(rows), choose(rows))


def _predicted(model: Utilization, rows: Sequence[ModelRow]) -> Matrix:
    return np.array([seconds(model, row.gpu, row.cost) for row in rows])


def _times(rows: Sequence[ModelRow]) -> Matrix:
    return np.array([row.time_s for row in rows])


Predictor = Callable[[Sequence[ModelRow], Sequence[ModelRow]], Matrix]
"""Fits the first rows, and predicts the times of the second, in seconds."""


def by_form(choice: Choice) -> Predictor:
    """Return a predictor by utilization in a given form."""
    return lambda train, test: _predicted(fit_as(tuple(train), choice), test)


def by_noisy_choice(train: Sequence[ModelRow], test: Sequence[ModelRow]) -> Matrix:
    """Predict by utilization in the form with the smallest median error on the training rows."""
    return _predicted(fit_as(tuple(train), choose(train, np.median)), test)


def by_utilization(train: Sequence[ModelRow], test: Sequence[ModelRow]) -> Matrix:
    """Predict by fitted utilizations."""
    return _predicted(fit(train), test)


def by_roofline(train: Sequence[ModelRow], test: Sequence[ModelRow]) -> Matrix:
    """Predict by the plain roofline, each kernel at one of the peaks, without fitting."""
    return np.array([roofline_s(row) for row in test])


def roofline_s(row: ModelRow) -> float:
    """Return the seconds of a step's kernels at the peaks."""
    rate, bandwidth = GPUS[row.gpu].fp32_tflops * 1e12, GPUS[row.gpu].memory_bandwidth_gb_s * 1e9
    products = sum(p.times * max(p.flops / rate, p.bytes / bandwidth) for p in row.products)
    return products + sum(p.times * p.bytes / bandwidth for p in row.passes)


def by_latency(train: Sequence[ModelRow], test: Sequence[ModelRow]) -> Matrix:
    """Predict raw latency by boosted trees on FLOPs, bytes and the GPU's specification, similar to Habitat."""
    booster = lightgbm.train(
        _TREES, lightgbm.Dataset(_raw(train), np.log(_times(train)), params={"verbosity": -1}), num_boost_round=200
    )
    predicted: Matrix = np.exp(booster.predict(_raw(test)))
    return predicted


def by_constant(train: Sequence[ModelRow], test: Sequence[ModelRow]) -> Matrix:
    """Predict the median of the training rows."""
    return np.full(len(test), float(np.median(_times(train))))


OURS = "utilization (ours)"
PREDICTORS: dict[str, Predictor] = {
    OURS: by_utilization,
    "plain roofline": by_roofline,
    "raw latency, boosted trees": by_latency,
    "constant": by_constant,
}


def _raw(rows: Sequence[ModelRow]) -> Matrix:
    return np.array(
        [
            (
                math.log(row.cost.flops),
                math.log(row.cost.bytes_moved),
                float(row.training),
                GPUS[row.gpu].fp32_tflops,
                GPUS[row.gpu].memory_bandwidth_gb_s,
            )
            for row in rows
        ]
    )


def gpus_held_out(rows: Sequence[ModelRow], predictor: Predictor) -> Matrix:
    """Predict each GPU's steps from those of all other GPUs, in seconds."""
    predicted = np.zeros(len(rows))
    for gpu in sorted({row.gpu for row in rows}):
        held = [i for i, row in enumerate(rows) if row.gpu == gpu]
        predicted[held] = predictor([row for row in rows if row.gpu != gpu], [rows[i] for i in held])
    return predicted


@dataclass(frozen=True)
class Judged:
    """Rows with the predictions of each predictor: each GPU held out, and by NeuSight's split."""

    rows: Sequence[ModelRow]
    each: Mapping[str, Matrix]
    unseen: Sequence[ModelRow]
    split: Mapping[str, Matrix]


def judge(rows: Sequence[ModelRow], what: str = "", progress: Progress = silent) -> Judged:
    """Predict rows on held-out GPUs; `progress` receives the current predictor."""
    train = [row for row in rows if row.gpu in TRAINING_GPUS]
    unseen = [row for row in rows if row.gpu not in TRAINING_GPUS]
    return Judged(
        rows,
        {name: gpus_held_out(rows, PREDICTORS[name]) for name in counted(list(PREDICTORS), what, progress)},
        unseen,
        {name: predictor(train, unseen) for name, predictor in PREDICTORS.items()},
    )


def errors(predicted: Matrix, rows: Sequence[ModelRow | EpochRow]) -> Matrix:
    """Return relative errors."""
    measured = np.array([row.time_s for row in rows])
    found: Matrix = np.abs(predicted / measured - 1)
    return found


def certain(rows: Sequence[ModelRow]) -> list[ModelRow]:
    """Return the rows without the model whose size was inferred from the times."""
    return [row for row in rows if row.model != INFERRED]


def ends(ratios: Matrix) -> tuple[float, float]:
    """Return the conformal quantiles of measured over predicted, around 1."""
    ordered = np.sort(ratios)
    rank = min(math.ceil((len(ordered) + 1) * QUANTILES[1]), len(ordered)) - 1
    return min(float(ordered[len(ordered) - 1 - rank]), 1.0), max(float(ordered[rank]), 1.0)


def model_of(rows: Sequence[ModelRow]) -> StepTimeModel:
    """Fit the shipped model on all certain rows; the same rows give the same bytes."""
    used = certain(rows)
    ratios = _times(used) / gpus_held_out(used, by_utilization)
    lower, upper = ends(ratios)
    learned = fit(used)
    short = {
        name: _short(value)
        for name in ("matrix", "bandwidth", "kernel_s")
        if isinstance(value := getattr(learned, name), float)
    }
    return StepTimeModel(
        format=FORMAT,
        version=VERSION,
        learned=Utilization(form=learned.form, **short),
        lower=_short(lower),
        upper=_short(upper),
        provenance={
            "data": "sitar-lab/NeuSight, e2e_labels: transformers, forward or forward and backward, FP32, eager",
            "rows": len(used),
            "gpus": len({row.gpu for row in used}),
            "gpus_held_out_median_error": _short(float(np.median(np.abs(1 / ratios - 1)))),
            "seed": SEED,
            "scipy": scipy.__version__,
        },
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def train_step_time(data: Path, out: Path) -> Path:
    """Write `step_time.json` below `out`; the same data give the same bytes.

    Raises:
        DataError: A file or a column is missing.
    """
    rows, _ = read_models(data)
    path = out / "step_time.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(model_of(rows)) + b"\n")
    return path
