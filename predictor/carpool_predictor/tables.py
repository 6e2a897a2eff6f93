"""Reads published tables: which file, which columns, and what is said of one that cannot be read."""

import csv
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from carpool_predictor.suites import DataError

T = TypeVar("T")


def read_table(path: Path, columns: Iterable[str], read: Callable[[dict[str, str]], T]) -> list[T]:
    """Read a file of comma-separated values, row by row.

    Args:
        path: The file; its first line names the columns.
        columns: What it must have.
        read: Makes something of a row; raises ValueError, TypeError or SyntaxError where it cannot.

    Raises:
        DataError: The file or a column is missing, or a row cannot be read; the message says which.
    """
    if not path.is_file():
        raise DataError(f"expected measurements at {path}, found no such file; pass the data folder with --data")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            missing = sorted(set(columns) - set(reader.fieldnames or ()))
            if not missing:
                return [read(row) for row in reader]
        except (ValueError, TypeError, SyntaxError, csv.Error) as e:
            raise DataError(f"{path}:{reader.line_num}: cannot read the row: {e}") from e
    raise DataError(f"{path} lacks the columns {', '.join(missing)}")


def number(row: Mapping[str, str], column: str) -> float:
    """Read a measured number.

    Raises:
        ValueError: It is none, or not finite.
    """
    found = float(row[column])
    if not math.isfinite(found):
        raise ValueError(f"expected a finite number in {column}, found {row[column]!r}")
    return found


def amount(row: Mapping[str, str], column: str) -> int:
    """Read a number of samples, tokens or the like.

    Raises:
        ValueError: It is no whole number, or less than 1.
    """
    found = number(row, column)
    if found < 1 or found != int(found):
        raise ValueError(f"expected a whole number of at least 1 in {column}, found {row[column]!r}")
    return int(found)
