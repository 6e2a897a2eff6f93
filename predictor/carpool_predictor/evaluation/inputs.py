"""Which files and columns a suite reads, so that a missing one is told before anything is fitted."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from carpool_predictor.evaluation.tables import check_header

Table = tuple[Path, tuple[str, ...]]
"""A file below the data folder, and its columns."""


def check_inputs(data: Path, suites: Iterable[str], *, is_whole: bool) -> None:
    """Look at the headers of all files that suites read.

    Args:
        data: The data folder.
        suites: Names of suites.
        is_whole: Whether they evaluate everything, also on what nothing is learned from.

    Raises:
        DataError: A file or a column is missing; the message says which.
    """
    for suite in suites:
        for path, columns in _TABLES[suite](is_whole=is_whole):
            check_header(data / path, columns)


# What reads a table is imported when asked for: the modules of the suites take seconds to import.


def _memory(*, is_whole: bool) -> Iterator[Table]:
    from carpool_predictor.evaluation.memory import measurements

    yield measurements.FILE, measurements.COLUMNS


def _activity(*, is_whole: bool) -> Iterator[Table]:
    from carpool_predictor.evaluation import gpumemnet
    from carpool_predictor.evaluation.activity import rows

    for kind in gpumemnet.KINDS:
        yield gpumemnet.file_of(kind), rows.COLUMNS
    if is_whole:
        from carpool_predictor.evaluation.activity import real

        yield real.FILE, real.COLUMNS


def _step_time(*, is_whole: bool) -> Iterator[Table]:
    from carpool_predictor.evaluation.step_time import neusight, zeus

    yield neusight.FILE, neusight.COLUMNS
    if is_whole:
        yield from ((zeus.file_of(gpu), zeus.COLUMNS) for gpu in zeus.GPUS)


def _slowdown(*, is_whole: bool) -> Iterator[Table]:
    from carpool_predictor.evaluation import gpumemnet
    from carpool_predictor.evaluation.slowdown import gavel, holding, lucid

    for kind in gpumemnet.KINDS:
        yield gpumemnet.file_of(kind), holding.COLUMNS
    yield Path(gavel.FILE), gavel.COLUMNS
    if is_whole:
        yield lucid.ALONE, lucid.ALONE_COLUMNS
        yield lucid.BESIDE, lucid.BESIDE_COLUMNS


_TABLES = {"memory": _memory, "activity": _activity, "step-time": _step_time, "slowdown": _slowdown}
