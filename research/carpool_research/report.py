"""What a suite of evaluation returns and writes: metrics against targets, tables as Markdown, figures as SVG."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

T = TypeVar("T")

Progress = Callable[[str], None]
"""Receives the name of the step that a suite works at."""


def silent(_: str) -> None:
    """Drop reports of progress."""


def counted(items: Sequence[T], what: str, progress: Progress) -> Iterator[T]:
    """Yield items and report each: "families held out, fold 2 of 5", "split: XGBoost (3 of 5)"."""
    for number, item in enumerate(items, start=1):
        place = f"{number} of {len(items)}"
        progress(f"{what}: {item} ({place})" if isinstance(item, str) else f"{what} {place}")
        yield item


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, optionally with a target."""

    name: str
    """Name with its unit, such as `median error, %`."""
    value: float
    target: str = ""
    """Target such as `≤ 4.0`; empty without one."""
    met: bool | None = None
    """Whether the target is met; None without one."""


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a suite."""

    suite: str
    metrics: tuple[Metric, ...]
    files: tuple[Path, ...] = field(default=())
    """Files that the suite wrote."""


def save(figure: Figure, path: Path) -> Path:
    """Write a figure without date or random identifiers: the same numbers give the same bytes."""
    with mpl.rc_context({"svg.hashsalt": "carpool", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a Markdown table; the keys of the first row are its heads."""
    frame = pd.DataFrame(list(rows)).fillna("")
    lines = [list(frame.columns), ["---"] * len(frame.columns), *frame.to_numpy().tolist()]
    return "\n".join(f"|{'|'.join(map(str, line))}|" for line in lines)
