"""What is left where the jobs of an experiment do not come together: the default sorts only those that do."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from carpool_core.batches import BATCH_S
from carpool_core.lengths import told

from carpool_extender.placement.refusal import counted
from carpool_extender.simulation import paired, report
from carpool_extender.simulation.contest import ARRIVAL, DEFAULT, Experiment, Line, shipped
from carpool_extender.simulation.longest import UNLIKE
from carpool_extender.simulation.strategy import Strategy
from carpool_extender.simulation.workload import Workload

TITLE = "What it hangs on that jobs come together"
OVER_S = (60.0, 600.0, 3600.0)
"""Over how long jobs come that are all there at the start otherwise, in seconds."""
_CHANGED = ("makespan_min", "utilization_percent", "completion_min")


def spread(experiment: Experiment, over_s: float) -> Experiment:
    """Return an experiment whose jobs come evenly over so many seconds, for its first line and the default.

    Args:
        experiment: One whose jobs are all there at the start.
        over_s: When the last one comes.
    """

    def draw(data: Path, seed: int) -> Workload:
        workload = experiment.draw(data, seed)
        every_s = over_s / max(1, len(workload.jobs) - 1)
        jobs = [replace(job, arrival_s=number * every_s) for number, job in enumerate(workload.jobs)]
        return replace(workload, jobs=jobs)

    both = [_named(one, over_s) for one in (experiment.published[0], shipped(experiment))]
    return replace(experiment, draw=draw, published=both, whole=True)


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
        f"By default jobs are taken in order of arrival, but of those that come within {BATCH_S:g} s of the first of "
        "them the longest first (`settings.queueOrder: Batches`). Whether a user's jobs come so is up to whoever "
        "submits them: one `kubectl apply` does it. Here the same jobs come one after the other, evenly over some "
        "time, and are compared with whole GPUs to which they come alike.",
        "",
    ]
    for name, lines in found.items():
        parts += [f"**{name}**: {UNLIKE}.", ""] if lines is None else _of_one(name, known[name], lines)
    return parts


def _named(strategy: Strategy, over_s: float) -> Strategy:
    return replace(strategy, name=f"{strategy.name}, over {told(over_s)}")


def _of_one(name: str, known: Sequence[Line], found: Sequence[Line]) -> list[str]:
    by_name = {line.strategy.name: line for line in [*known, *found]}
    first = known[0].strategy
    pairs = [(by_name.get(one), known[0]) for one in (DEFAULT, ARRIVAL)]
    for over_s in OVER_S:
        others = [by_name.get(f"{one}, over {told(over_s)}") for one in (DEFAULT, first.name)]
        pairs += [(others[0], others[1])] if others[1] is not None else []
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
