"""Reads Gavel's measurements (K80, P100, V100; MIT): throughputs alone, at several batch sizes, and in pairs (MPS).

Of no job a utilization was measured: `evaluation.slowdown.steps` works it out, `evaluation.slowdown.queueing` learns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool_predictor.evaluation.tables import number, read_table

FILE = "gavel/gavel_throughputs_flat.csv"
_RATES = ("iso_tput_a_steps_s", "coloc_tput_a", "coloc_tput_b")
COLUMNS = ("file", "gpu", "job_a", "bs_a", "ngpu_a", "job_b", "bs_b", "ngpu_b", *_RATES)
TABLE = "oracle_throughputs.json"
"""The one of Gavel's tables whose pairs are all measured."""

Job = tuple[str, str, str]
"""GPU, job, batch size."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two jobs on one GPU."""

    one: Job
    other: Job
    slowdowns: tuple[float, float]
    """Of the one and of the other, as measured, at least 1."""


@dataclass(frozen=True, slots=True)
class Gavel:
    """What was measured."""

    step_s: Mapping[Job, float]
    """Step time alone."""
    pairs: Sequence[Pair]


def read(data: Path) -> Gavel:
    """Read the single-GPU jobs.

    Raises:
        DataError: The file or a column is missing, or a row cannot be read.
    """
    rows = [row for row in read_table(data / FILE, COLUMNS, _checked) if row["file"] == TABLE and row["ngpu_a"] == "1"]
    step_s = {_job(r, "a"): 1 / v for r in rows if (v := _rate(r, "iso_tput_a_steps_s")) > 0}
    pairs = [pair for row in rows if row["ngpu_b"] == "1" and (pair := _pair(row, step_s)) is not None]
    # Each pair stands there twice, once in either order, with the same numbers.
    return Gavel(step_s, list({frozenset((pair.one, pair.other)): pair for pair in pairs}.values()))


def _checked(row: dict[str, str]) -> dict[str, str]:
    for column in _RATES:
        _rate(row, column)
    return row


def _job(row: Mapping[str, str], which: str) -> Job:
    return row["gpu"], row[f"job_{which}"], row[f"bs_{which}"]


def _rate(row: Mapping[str, str], column: str) -> float:
    """Return a throughput; 0 where there is none."""
    return number(row, column) if row[column] else 0.0


def _pair(row: Mapping[str, str], step_s: Mapping[Job, float]) -> Pair | None:
    """Return a measured pair; 0 stands for out of memory as well as for what was never run."""
    one, other = _job(row, "a"), _job(row, "b")
    a, b = _rate(row, "coloc_tput_a"), _rate(row, "coloc_tput_b")
    if a <= 0 or b <= 0 or one not in step_s or other not in step_s:
        return None
    return Pair(one, other, (max(1.0, 1 / (step_s[one] * a)), max(1.0, 1 / (step_s[other] * b))))
