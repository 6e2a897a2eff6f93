"""Results of an evaluation suite: metrics with targets, Markdown tables, SVG figures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from string import Template
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


def write_card(package: str, path: Path, texts: Mapping[str, str]) -> Path:
    """Fill `card.md.template` of a suite's package, and write the model card."""
    template = resources.files(package).joinpath("card.md.template").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Template(template).substitute(texts), encoding="utf-8")
    return path
