"""Reads the Philly trace: when jobs came, how long they ran, on how many GPUs."""

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

from carpool_extender.simulation.truth.workload import WorkloadError

COLUMNS = ("timestamp", "duration", "num_gpus")
_SEPARATORS = {";": "semicolons", "\t": "tabs"}
"""What programs put between columns in the place of commas."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One job of a trace."""

    at_s: float
    """Seconds after the first."""
    duration_s: float
    gpus: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file says."""

    jobs: Sequence[Submission]
    """Ascending by time."""
    unsorted: int
    """How many lines came after a line of a later time."""


def read_trace(path: Path) -> Trace:
    """Read a trace with the columns `timestamp`, `duration` and `num_gpus`.

    Times are ISO 8601, UTC where they say nothing else, or seconds; durations are seconds.

    Raises:
        WorkloadError: There is no such file, a column is missing or there twice, or a value makes no sense; the line is
            named.
    """
    if not path.is_file():
        found_instead = "a folder" if path.is_dir() else "what is no regular file" if path.exists() else "no file"
        raise WorkloadError(
            f"expected a trace at {path}, found {found_instead}; look at the path that --trace names, or, for a "
            "published workload, --data (CARPOOL_DATA)"
        )
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            found = _submissions(path, csv.DictReader(file))
    except OSError as error:
        raise WorkloadError(f"expected to read the trace {path}: {error.strerror}; look at its permissions") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: expected CSV in UTF-8, found {error}; save it as that") from error
    if not found:
        raise WorkloadError(f"{path}: expected at least one job, found none")
    latest_s = accumulate((one.at_s for one in found), max)
    unsorted = sum(one.at_s < before_s for one, before_s in zip(found, latest_s, strict=True))
    found.sort(key=lambda one: one.at_s)
    first = found[0].at_s
    return Trace([Submission(one.at_s - first, one.duration_s, one.gpus) for one in found], unsorted)


def _submissions(path: Path, reader: "csv.DictReader[str]") -> list[Submission]:
    given = Counter(reader.fieldnames or ())
    has = ", ".join(reader.fieldnames or ["none"])
    if missing := [column for column in COLUMNS if not given[column]]:
        raise WorkloadError(
            f"{path}: expected the columns {', '.join(COLUMNS)}, found {has}; {_remedy(tuple(given), missing)}"
        )
    if repeated := [column for column in COLUMNS if given[column] > 1]:
        raise WorkloadError(
            f"{path}: expected each of the columns {', '.join(COLUMNS)} once, found {has}; keep one {repeated[0]}, and "
            "rename or remove the others"
        )
    found, first_line = list[Submission](), 0
    in_seconds = False
    for row in reader:
        found.append(_submission(path, reader.line_num, row))
        timestamp = row[COLUMNS[0]] or ""
        is_number = _is_number(timestamp)
        if not first_line:
            first_line, in_seconds = reader.line_num, is_number
        if is_number is not in_seconds:
            kind = "seconds" if in_seconds else "a time in ISO 8601"
            raise WorkloadError(
                f"{path}, line {reader.line_num}: expected {kind} as on line {first_line}, found {timestamp}; write "
                "all times alike"
            )
    return found


def _remedy(given: Sequence[str], missing: Sequence[str]) -> str:
    """Say what to do about columns that are missing: they may stand there in other letters, or not apart."""
    for separator, name in _SEPARATORS.items():
        if any(separator in one and _plain(part) in missing for one in given for part in one.split(separator)):
            return f"separate by commas what {name} separate"
    like = {_plain(one): one for one in given}
    renamed = [f'"{like[column]}" to {column}' for column in missing if column in like]
    told = [f"rename {', '.join(renamed)}"] if renamed else []
    if added := [column for column in missing if column not in like]:
        told.append(f"add {', '.join(added)}")
    return ", and ".join(told)


def _plain(name: str) -> str:
    """Write a column's name as ours are written."""
    return "_".join(re.findall(r"[a-z0-9]+", name.lower()))


LONGEST_S = 1e9
"""Longest job, thirty years: the clock of a simulation is a calendar, which ends."""


def _submission(path: Path, line: int, row: Mapping[str, str | None]) -> Submission:
    timestamp, duration, num_gpus = (row[column] or "" for column in COLUMNS)
    try:
        at_s, duration_s, gpus = _seconds(timestamp), float(duration), int(num_gpus)
    except (ValueError, OverflowError) as error:
        found = ", ".join(f"{column} {row[column] or 'nothing'}" for column in COLUMNS)
        raise WorkloadError(
            f"{path}, line {line}: expected a time (ISO 8601, or seconds), a duration in seconds and a whole number of "
            f"GPUs, found {found}"
        ) from error
    if not 0 <= duration_s <= LONGEST_S or gpus < 1:
        raise WorkloadError(
            f"{path}, line {line}: expected a duration from 0 to {LONGEST_S:.0e} s on 1 GPU or more, found "
            f"{duration_s:g} s on {gpus}"
        )
    return Submission(at_s, duration_s, gpus)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _seconds(text: str) -> float:
    """Read a moment as seconds since some beginning."""
    if _is_number(text):
        found = float(text)
    else:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(found):
        raise ValueError(f"{text} is no time")
    return found
