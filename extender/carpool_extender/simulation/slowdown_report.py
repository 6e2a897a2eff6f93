"""Holds the shipped slowdown model, and others, against Lucid's measured pairs."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from carpool_core.values import SharingMode
from carpool_predictor.slowdown import slowdowns
from numpy.typing import NDArray

from carpool_extender.simulation.gavel import exponent_of_gavel, softened
from carpool_extender.simulation.workload import WorkloadError

FOUND = 1.15
"""A slowdown that counts as one that should have been foreseen."""
Columns = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Score:
    """How well one model foretold the pairs."""

    name: str
    error: float
    """Mean absolute error of the slowdown."""
    speed_error: float
    """Mean absolute error of the speed relative to solo."""
    found_percent: float
    """Share of the slowdowns above 15% that were foretold as such."""
    right_percent: float
    """Share of those foretold as such that were."""


def scores(data: Path) -> list[Score]:
    """Score every model on all measured pairs; only the one that says so was chosen with them in view."""
    util, true = measured(data)
    exponent = exponent_of_gavel(data)
    models: Mapping[str, Callable[[Columns], Columns]] = {
        "no slowdown": lambda u: np.ones(len(u)),
        "min(1, 100/Σutil)": lambda u: np.maximum(1.0, u.sum(axis=1)),
        f"softened maximum, exponent learned on Gavel ({exponent:.2f})": lambda u: softened(u, exponent),
        "softened maximum, exponent 6, chosen with these pairs in view": lambda u: softened(u, 6.0),
        "shipped: Bard's mean-value analysis, nothing fitted": _shipped,
    }
    return [_score(name, model(util), true) for name, model in models.items()]


def measured(data: Path) -> tuple[Columns, Columns]:
    """Read utilization alone of both, shape (n, 2), and the first one's slowdown (at least 1), shape (n,)."""
    folder = data / "lucid"
    solo = {_key(row, ""): float(row["gpu_util"]) / 100 for row in _read(folder / "solo_rtx3090.csv")}
    util, slowdown = [], []
    for row in _read(folder / "colocate_rtx3090.csv"):
        one, two = solo[_key(row, "1")], solo[_key(row, "2")]
        util += [(one, two), (two, one)]
        slowdown += [1 / float(row["speed1"]), 1 / float(row["speed2"])]
    return np.array(util), np.maximum(1.0, np.array(slowdown))


def _shipped(util: Columns) -> Columns:
    found = slowdowns(SharingMode.TIME_SLICING, util, util, util, np.ones(util.shape, np.bool_))
    return found[:, 0].astype(np.float64)


def _score(name: str, predicted: Columns, true: Columns) -> Score:
    bad, told = true > FOUND, predicted > FOUND
    return Score(
        name=name,
        error=float(np.abs(predicted - true).mean()),
        speed_error=float(np.abs(1 / predicted - 1 / true).mean()),
        found_percent=100 * float((bad & told).sum() / max(1, bad.sum())),
        right_percent=100 * float((bad & told).sum() / max(1, told.sum())),
    )


def table(found: Sequence[Score]) -> list[str]:
    """Write the scores as Markdown."""
    head = "| model | error of slowdown | error of speed | slowdowns > 15% found | right when told |"
    return [
        head,
        "|---|---|---|---|---|",
        *(
            f"| {s.name} | {s.error:.3f} | {s.speed_error:.3f} | {s.found_percent:.0f}% | {s.right_percent:.0f}% |"
            for s in found
        ),
    ]


def _key(row: dict[str, str], which: str) -> tuple[str, str, str]:
    return row["model" + which], row["batchsize" + which], row["amp" + which]


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise WorkloadError(f"expected Lucid's measurements at {path}, found no file; set CARPOOL_DATA")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
