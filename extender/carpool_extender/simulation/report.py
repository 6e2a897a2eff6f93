"""Tables of a contest, as Markdown."""

from collections.abc import Sequence

from carpool_extender.simulation.contest import Line

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
    fails = any(line.mean("killed") for line in lines)
    waits = any(line.mean("unplaced") for line in lines)
    head = [*_HEAD, *(["killed by failures"] if fails else []), *(["never placed"] if waits else [])]
    rows = []
    for line in lines:
        extra = [_spread(line, "killed")] * fails + [_spread(line, "unplaced")] * waits
        rows.append(_row([*_cells(line, lines[0]), *extra]))
    return [_row(head), _row(["---"] * len(head)), *rows]


def change(line: Line, first: Line, name: str) -> float:
    """Return the change of a figure against the first line, in percent."""
    return 100 * (line.mean(name) / max(1e-9, first.mean(name)) - 1)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(line: Line, name: str) -> str:
    return f"{line.mean(name):.1f} ± {line.spread(name):.1f}"


def _cells(line: Line, first: Line) -> list[str]:
    cells = [line.strategy.name]
    for name in _SHOWN:
        cells.append(_spread(line, name))
        if name in _COMPARED:
            cells.append("" if line is first else f"{change(line, first, name):+.1f}%")
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
    here = f"{line.mean('oom'):.1f}, {_spread(line, 'makespan_min')} min"
    if line is not first:
        here += f" ({change(line, first, 'makespan_min'):+.1f}%)"
    return _row([line.strategy.name, line.strategy.published, f"{here}, {line.mean('energy_mj'):.2f} MJ"])


def section(title: str, assumptions: Sequence[str], lines: Sequence[Line]) -> list[str]:
    """Write one experiment."""
    seeds = len(lines[0].runs)
    return [
        f"## {title}",
        "",
        f"Mean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}; changes are against the first line.",
        "",
        *markdown(lines),
        "",
        *([*told, ""] if (told := published(lines)) else []),
        "Assumed where the text is silent:",
        "",
        *(f"- {one}" for one in assumptions),
        "",
    ]
