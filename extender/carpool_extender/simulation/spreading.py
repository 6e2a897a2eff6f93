"""What is left where the jobs of an experiment, which are all there at the start, come one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from carpool_core.lengths import told

from carpool_extender.placement.refusal import counted
from carpool_extender.simulation import paired, report
from carpool_extender.simulation.contest import DEFAULT, LONGEST_FIRST, Experiment, Line, ours
from carpool_extender.simulation.longest import UNLIKE
from carpool_extender.simulation.strategy import Strategy
from carpool_extender.simulation.workload import Workload

TITLE = "When jobs come one after the other"
COMPARED = (DEFAULT, LONGEST_FIRST)
OVER_S = (60.0, 600.0, 3600.0)
"""Over how long jobs come that are all there at the start otherwise, in seconds."""
_CHANGED = ("makespan_min", "utilization_percent", "completion_min")


def spread(experiment: Experiment, over_s: float) -> Experiment:
    """Return an experiment whose jobs come evenly over so many seconds, for its first line and some of Carpool's.

    Args:
        experiment: One whose jobs are all there at the start.
        over_s: When the last one comes.
    """

    def draw(data: Path, seed: int) -> Workload:
        workload = experiment.draw(data, seed)
        every_s = over_s / max(1, len(workload.jobs) - 1)
        jobs = [replace(job, arrival_s=number * every_s) for number, job in enumerate(workload.jobs)]
        return replace(workload, jobs=jobs)

    compared = [one for one in ours(experiment.mode) if one.name in COMPARED]
    lines = [_named(one, over_s) for one in (experiment.published[0], *compared)]
    return replace(experiment, draw=draw, published=lines, whole=True)


def strategies(experiment: Experiment) -> list[Strategy]:
    """Return the lines of all that is tried."""
    return [one for over_s in OVER_S for one in spread(experiment, over_s).published]


def section(known: Mapping[str, Sequence[Line]], found: Mapping[str, Sequence[Line] | None]) -> list[str]:
    """Write the section; nothing where no experiment has such results.

    Args:
        known: The lines of each experiment.
        found: The lines of `strategies` by experiment; None where they may not be compared seed by seed.
    """
    if not found:
        return []
    parts = [
        f"## {TITLE}",
        "",
        "Its authors do not say how nearly all jobs are there at the start. Here the same jobs come evenly over some "
        "time, and are compared with whole GPUs to which they come alike.",
        "",
    ]
    for name, lines in found.items():
        parts += [f"**{name}**: {UNLIKE}.", ""] if lines is None else _of_one(name, known[name], lines)
    return parts


def _named(strategy: Strategy, over_s: float) -> Strategy:
    return replace(strategy, name=_over(strategy.name, over_s))


def _over(name: str, over_s: float) -> str:
    return f"{name}, over {told(over_s)}"


def _of_one(name: str, known: Sequence[Line], found: Sequence[Line]) -> list[str]:
    by_name = {line.strategy.name: line for line in [*known, *found]}
    first = known[0].strategy
    pairs = [(by_name.get(one), known[0]) for one in COMPARED]
    for over_s in OVER_S:
        base, *others = (by_name.get(_over(one, over_s)) for one in (first.name, *COMPARED))
        pairs += [(one, base) for one in others if base is not None]
    error = "" if len(known[0].runs) == 1 else " ± standard error"
    heads = [report.HEADS[one].rsplit(" ", 1)[0] for one in _CHANGED]
    heads += [report.HEADS[one] for one in ("slowed_percent", "oom")]
    return [
        f'**{name}**, {counted(len(known[0].runs), "seed")}: changes against "{first.name}"{error}; all jobs are there '
        "at the start, where nothing else is said.",
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---|' * len(heads)}",
        *(f"| {line.strategy.name} | {' | '.join(_cells(line, base))} |" for line, base in pairs if line is not None),
        "",
    ]


def _cells(line: Line, first: Line) -> list[str]:
    changes = [paired.percent(paired.change(line, first, one)) for one in _CHANGED]
    return [*changes, f"{line.mean('slowed_percent'):.1f}", report.deaths(line.mean("oom"))]
