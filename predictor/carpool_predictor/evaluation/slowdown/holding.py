"""Learns how many of a GPU's SMs are held by who keeps it busy for a share of the time, on GPUMemNet's trainings.

They ran alone on an A100; utilization and SM activity were measured of each. The SMs held are u^k: nobody who is never
busy holds any, and who always is holds them all. k is where the mean absolute error of SM activity is least, MLPs and
CNNs counting alike, however many of each were run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.evaluation.gpumemnet import KINDS, ended_well, file_of
from carpool_predictor.evaluation.suites import DataError
from carpool_predictor.evaluation.tables import number, read_table

COLUMNS = ("Avg GPUTL", "Avg SMACT", "Avg GRACT")
EXPONENTS = tuple((100 + step) / 100 for step in range(201))
"""1 to 3, in hundredths."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Trainings of one kind that ended well and whose activity was measured."""

    busy: Numbers
    """(n,) GPU utilization, 0..1."""
    sm: Numbers
    """(n,) SM activity, 0..1."""
    engine: Numbers
    """(n,) Share of time in which the engine was active, 0..1: all of the time that others could not have."""


Pick = Callable[[Runs], Numbers]


def sm_active(runs: Runs) -> Numbers:
    """Return what k is learned from."""
    return runs.sm


def engine_active(runs: Runs) -> Numbers:
    """Return what it could be learned from instead."""
    return runs.engine


def read(data: Path) -> dict[str, Runs]:
    """Read the trainings, by kind.

    Raises:
        DataError: A file or a column is missing, a row cannot be read, or none tells of all that is needed.
    """
    return {kind: _read_kind(data / file_of(kind)) for kind in KINDS}


def _read_kind(path: Path) -> Runs:
    rows = [row for row in read_table(path, COLUMNS, _read) if row is not None]
    if not rows:
        raise DataError(f"expected trainings that ended well with {', '.join(COLUMNS)} in {path}, found none")
    busy, sm, engine = np.array(rows).T
    return Runs(busy, sm, engine)


def _read(row: dict[str, str]) -> tuple[float, float, float] | None:
    busy, sm, engine = number(row, "Avg GPUTL") / 100, number(row, "Avg SMACT"), number(row, "Avg GRACT")
    is_measured = 0 <= busy <= 1 and sm >= 0 and engine >= 0  # -1: it was not
    return (busy, sm, engine) if ended_well(row) and is_measured else None


def error(runs: Sequence[Runs], exponent: float, pick: Pick = sm_active) -> float:
    """Return the mean absolute error of what follows from utilization, every kind counting alike."""
    return float(np.mean([np.abs(pick(of) - of.busy**exponent).mean() for of in runs]))


def best_exponent(runs: Sequence[Runs], pick: Pick = sm_active) -> float:
    """Return k, every kind counting alike."""
    return min(EXPONENTS, key=lambda exponent: error(runs, exponent, pick))
