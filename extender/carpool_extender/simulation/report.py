"""Tables of a contest: Markdown for people, CSV for programs."""

import csv
from collections.abc import Sequence
from pathlib import Path

from carpool_extender.simulation.contest import FIGURES, Line
from carpool_extender.simulation.workload import Workload

_HEAD = (
    "strategy",
    "makespan min",
    "",
    "utilization %",
    "",
    "completion min",
    "",
    "running s",
    "out of memory",
    "energy MJ",
    "",
)
_SHOWN = ("makespan_min", "utilization_percent", "completion_min", "running_s", "oom", "energy_mj")
_COMPARED = {"makespan_min", "utilization_percent", "completion_min", "energy_mj"}


def markdown(lines: Sequence[Line]) -> list[str]:
    """Write a table: mean ± standard deviation over the seeds, and the change against the first line."""
    return [_row(_HEAD), _row(["---"] * len(_HEAD)), *(_row(_cells(line, lines[0])) for line in lines)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(line: Line, first: Line) -> list[str]:
    cells = [line.strategy.name]
    for name in _SHOWN:
        mean = line.mean(name)
        cells.append(f"{mean:.1f} ± {line.spread(name):.1f}")
        if name in _COMPARED:
            cells.append("" if line is first else f"{100 * (mean / max(1e-9, first.mean(name)) - 1):+.1f}%")
    return cells


def published(lines: Sequence[Line]) -> list[str]:
    """Write down what the source says of its own lines, beside what came out here."""
    told = [line for line in lines if line.strategy.published]
    if not told:
        return []
    return [
        "| strategy | published | here: out of memory, makespan, energy |",
        "|---|---|---|",
        *(_beside(line, lines[0]) for line in told),
    ]


def _beside(line: Line, first: Line) -> str:
    cells = _cells(line, first)
    here = f"{line.mean('oom'):.1f}, {cells[1]} min {cells[2]}, {line.mean('energy_mj'):.2f} MJ"
    return _row([line.strategy.name, line.strategy.published, here])


def section(workload: Workload, lines: Sequence[Line], seeds: int) -> list[str]:
    """Write one experiment."""
    return [
        f"## {workload.title}",
        "",
        f"Mean ± standard deviation over {seeds} seeds; changes are against the first line.",
        "",
        *markdown(lines),
        "",
        *published(lines),
        "",
        "Assumed where the text is silent:",
        "",
        *(f"- {one}" for one in workload.assumptions),
        "",
    ]


def write_csv(path: Path, lines: Sequence[Line]) -> None:
    """Write every run of every strategy."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", "seed", *FIGURES])
        for line in lines:
            for seed, run in enumerate(line.runs):
                writer.writerow([line.strategy.name, seed, *(f"{getattr(run, name):.6g}" for name in FIGURES)])
