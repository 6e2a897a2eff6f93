"""Learns how many of a GPU's SMs are held by who keeps it busy for a share of the time, on GPUMemNet's trainings.

They ran alone on an A100; utilization and SM activity were measured of each. The SMs held are u^k: nobody who is never
busy holds any, and who always is holds them all. k is where the mean absolute error of SM activity is least, MLPs and
CNNs counting alike, however many of each were run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.cost_models.slowdown import held
from carpool_predictor.evaluation.suites import DataError
from carpool_predictor.evaluation.tables import number, read_table

KINDS = ("mlp", "cnn")
COLUMNS = ("Avg GPUTL", "Avg SMACT")
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

    def error(self, exponent: float) -> float:
        """Mean absolute error of SM activity as it follows from utilization."""
        return float(np.abs(self.sm - held(self.busy, exponent)).mean())


def read(data: Path) -> dict[str, Runs]:
    """Read the trainings, by kind.

    Raises:
        DataError: A file or a column is missing, a row cannot be read, or none tells of both.
    """
    return {kind: _read_kind(data / file_of(kind)) for kind in KINDS}


def file_of(kind: str) -> Path:
    """Return the file of the MLPs or the CNNs, below the data folder."""
    return Path("gpumemnet", f"{kind}_a100_40gb.csv")


def _read_kind(path: Path) -> Runs:
    rows = [row for row in read_table(path, COLUMNS, _read) if row is not None]
    if not rows:
        raise DataError(f"expected trainings that ended well with {' and '.join(COLUMNS)} in {path}, found none")
    busy, sm = np.array(rows).T
    return Runs(busy, sm)


def _read(row: dict[str, str]) -> tuple[float, float] | None:
    busy, sm = number(row, "Avg GPUTL") / 100, number(row, "Avg SMACT")
    ended_well = row.get("Status", "SUCCESSFUL") == "SUCCESSFUL"
    return (busy, sm) if ended_well and 0 <= busy <= 1 and sm >= 0 else None  # below 0: not measured


def exponent(runs: Sequence[Runs]) -> float:
    """Return k, every kind counting alike."""
    return min(EXPONENTS, key=lambda one: sum(of.error(one) for of in runs))
