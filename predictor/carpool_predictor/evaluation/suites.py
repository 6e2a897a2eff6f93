"""What a suite is, and which there are.

A suite is a function `run(data: Path, out: Path, tell: Tell) -> Report` in a module of its own, imported only when
asked for. It reads the measurements below `data`, writes its model card `out/<name>.md` and its figures
`out/figures/<name>-*.svg`, and returns what it found. The same data and seed give the same bytes: no times, no paths.
Beside it may stand `frozen(data: Path) -> Report`, which judges what is shipped on those measurements and fits nothing.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")

Tell = Callable[[str], None]
"""Takes word of what a suite is at, for people who wait."""


def silent(_: str) -> None:
    """Tell nobody."""


def counted(items: Sequence[T], what: str, tell: Tell) -> Iterator[T]:
    """Yield items, and say before each which it is: "families held out, fold 2 of 5", "split: XGBoost (3 of 5)"."""
    for number, item in enumerate(items, start=1):
        place = f"{number} of {len(items)}"
        tell(f"{what}: {item} ({place})" if isinstance(item, str) else f"{what} {place}")
        yield item


class DataError(ValueError):
    """The measurements cannot be read: a folder, file or column is missing. The message says which."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that is held against a target."""

    name: str
    """What it is, with its unit, such as `median error, %`."""
    value: float
    target: str = ""
    """What was asked for, such as `≤ 4.0`; empty where nothing was."""
    met: bool | None = None
    """Whether the target is met; None without one."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a suite found."""

    suite: str
    figures: tuple[Figure, ...]
    files: tuple[Path, ...] = field(default=())
    """What it wrote."""


class Suite(Protocol):
    """Evaluates one kind of prediction."""

    def __call__(self, data: Path, out: Path, tell: Tell = silent) -> Report:
        """Read measurements below `data`, write the card below `out`; `tell` hears what is being fitted.

        Raises:
            DataError: A file or a column is missing.
        """
        ...


SUITES: Mapping[str, str] = {
    "memory": "carpool_predictor.evaluation.memory.suite:run",
    "activity": "carpool_predictor.evaluation.activity.suite:run",
    "step-time": "carpool_predictor.evaluation.step_time.suite:run",
    "slowdown": "carpool_predictor.evaluation.slowdown.suite:run",
}
"""Suites by name, in the order of `--suite all`; each value is `module:function`."""


class Frozen(Protocol):
    """Judges the shipped model on rows that it never saw."""

    def __call__(self, data: Path) -> Report:
        """Read measurements below `data`, fit nothing and write nothing.

        Raises:
            DataError: A file or a column is missing.
        """
        ...


def load(name: str) -> Suite:
    """Import a suite."""
    module, _, function = SUITES[name].partition(":")
    suite: Suite = getattr(importlib.import_module(module), function)
    return suite


def load_frozen(name: str) -> Frozen | None:
    """Import what judges a suite's shipped model, the function `frozen` beside the suite; None where there is none."""
    frozen: Frozen | None = getattr(importlib.import_module(SUITES[name].partition(":")[0]), "frozen", None)
    return frozen
