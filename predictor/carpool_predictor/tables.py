"""Reads published tables: which file, which columns, and what is said of one that cannot be read."""

import csv
from collections.abc import Callable, Iterable
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
