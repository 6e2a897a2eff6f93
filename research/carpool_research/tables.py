"""Reads published tables, and checks files, columns and numbers."""

import csv
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class DataError(ValueError):
    """The measurements cannot be read; the message names the missing folder, file or column."""


def read_table(path: Path, columns: Iterable[str], read: Callable[[dict[str, str]], T]) -> list[T]:
    """Read a file of comma-separated values, row by row.

    Args:
        path: The file; its first line names the columns.
        columns: Required columns.
        read: Converts a row; raises ValueError, TypeError or SyntaxError for an invalid one.

    Raises:
        DataError: The file or a column is missing, or a row cannot be read; the message names it.
    """
    check_header(path, columns)
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            return [read(row) for row in reader]
        except (ValueError, TypeError, SyntaxError, csv.Error) as e:
            raise DataError(f"{path}:{reader.line_num}: cannot read the row: {e}") from e


def check_header(path: Path, columns: Iterable[str]) -> None:
    """Check a file and its columns before a long fit.

    Args:
        path: The file; its first line names the columns.
        columns: Required columns.

    Raises:
        DataError: The file or a column is missing; the message names it.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            found = csv.DictReader(file).fieldnames or ()
    except FileNotFoundError as e:
        raise DataError(f"expected measurements at {path}, found no such file; pass the data folder with --data") from e
    except (OSError, ValueError, csv.Error) as e:
        raise DataError(f"expected comma-separated values in {path}, found that it cannot be read: {e}") from e
    if missing := sorted(set(columns) - set(found)):
        raise DataError(
            f"{path} lacks the columns {', '.join(missing)}; found {', '.join(found) or 'an empty file'}; name them so "
            "in its first line, or pass another data folder with --data"
        )


def number(row: Mapping[str, str], column: str) -> float:
    """Read a measured number.

    Raises:
        ValueError: It is not a finite number.
    """
    found = float(row[column])
    if not math.isfinite(found):
        raise ValueError(f"expected a finite number in {column}, found {row[column]!r}")
    return found


def amount(row: Mapping[str, str], column: str) -> int:
    """Read a number of samples, tokens or the like.

    Raises:
        ValueError: It is not a whole number of at least 1.
    """
    found = number(row, column)
    if found < 1 or found != int(found):
        raise ValueError(f"expected a whole number of at least 1 in {column}, found {row[column]!r}")
    return int(found)


KINDS = ("mlp", "cnn")


def file_of(kind: str) -> Path:
    """Return the file of the MLPs or the CNNs, below the data folder."""
    return Path("gpumemnet", f"{kind}_a100_40gb.csv")


def ended_well(row: Mapping[str, str]) -> bool:
    """Whether a run did not run out of memory; the published MLPs have no status and did not."""
    return row.get("Status", "SUCCESSFUL") == "SUCCESSFUL"
