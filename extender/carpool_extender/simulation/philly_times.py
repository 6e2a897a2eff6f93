"""Reads the Philly trace: when jobs came, how long they ran, on how many GPUs."""

import csv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from carpool_extender.simulation.workload import WorkloadError

COLUMNS = ("timestamp", "duration", "num_gpus")


@dataclass(frozen=True, slots=True)
class Submission:
    """One job of a trace."""

    at_s: float
    """Seconds after the first."""
    duration_s: float
    gpus: int


def read_trace(path: Path) -> list[Submission]:
    """Read a trace with the columns `timestamp` (ISO 8601, or seconds), `duration` (seconds) and `num_gpus`.

    Raises:
        WorkloadError: There is no such file, a column is missing, or a value makes no sense; the line is named.
    """
    if not path.is_file():
        raise WorkloadError(f"expected a trace at {path}, found no file; set CARPOOL_DATA, or name the trace")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            has = ", ".join(reader.fieldnames or ["none"])
            raise WorkloadError(
                f"{path}: expected the columns {', '.join(COLUMNS)}, found {has}; add {', '.join(missing)}"
            )
        found = [_submission(path, reader.line_num, row) for row in reader]
    if not found:
        raise WorkloadError(f"{path}: expected at least one job, found none")
    found.sort(key=lambda one: one.at_s)
    first = found[0].at_s
    return [Submission(one.at_s - first, one.duration_s, one.gpus) for one in found]


def _submission(path: Path, line: int, row: dict[str, str]) -> Submission:
    try:
        at = row["timestamp"]
        at_s = float(at) if at.replace(".", "", 1).isdigit() else datetime.fromisoformat(at).timestamp()
        duration_s, gpus = float(row["duration"]), int(row["num_gpus"])
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"{path}, line {line}: expected a time, seconds and a number of GPUs: {error}") from error
    if duration_s < 0 or gpus < 1:
        raise WorkloadError(
            f"{path}, line {line}: expected a duration of 0 s or more on 1 GPU or more, found {duration_s:g} s on "
            f"{gpus}"
        )
    return Submission(at_s, duration_s, gpus)
