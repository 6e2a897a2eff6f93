"""What the order hangs on: how much of its gain is the order alone, and what is left where less is known."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from carpool_core.durations import ASSUMED_DURATION_S, format_duration
from carpool_extender.framework.diagnosis import pluralize

from carpool_simulator.reports import paired, tables
from carpool_simulator.strategy import Knowledge, Strategy
from carpool_simulator.sweep import ARRIVAL, DEFAULT, ERRORS, LONGEST_FIRST, Experiment, Line, ours

TITLE = "What the order hangs on"
SILENT = 0.5
"""Share of the jobs that do not say their steps, where that is tried."""
STEPS_ERROR = 0.7
"""Standard deviation of the logarithm of the factor by which said steps are off, where that is tried."""
_SHIPPED = "the default"
SILENCED = f"{_SHIPPED}, {SILENT:.0%} of the jobs say no steps"
MISSAID = f"{_SHIPPED}, steps off by a factor of about {math.exp(STEPS_ERROR):.0f}"
MEANS = (
    "By default jobs come in order of arrival; of those that came within the same ten minutes the longest and the "
    "shortest take turns, by their predicted lengths (`settings.queueOrder: Alternate`). The control is the "
    "experiment's first line with its queue sorted so: whole GPUs, so that what it gains is the order alone. Beside it "
    "stands Carpool by default, strictly in order of arrival (`Arrival`), and the longest first whenever it came "
    "(`LongestFirst`). Then comes the default where each job is silent about its steps with a "
    f"chance of {SILENT:.0%} (it counts as {format_duration(ASSUMED_DURATION_S)}, as on a cluster); "
    "where the steps that jobs say are off "
    f"by factors whose logarithms have a standard deviation of {STEPS_ERROR:g}; and where predictions are off likewise "
    "by that much in memory, activity and time of a step, until a job is learned. Factors and who is silent are drawn "
    "for each job and seed."
)
UNLIKE = "these results are of another version than the experiment's own, or of one that was not noted"
_CHANGED = ("makespan_min", "utilization_percent", "completion_min")
_BEYOND_ORDER = ("makespan_min", "utilization_percent")


def control_name(first: str) -> str:
    """Return what an experiment's first line is called in the default's order."""
    return f"{first}, in the default's order"


def hanging(experiment: Experiment) -> list[Strategy]:
    """Return an experiment's first line in the default's order, and the default where what that goes by is wrong."""
    first = experiment.published[0]
    # Whole GPUs are handed out alike whatever is predicted: only the lengths are taken from it.
    base = ours(experiment.mode)[0]
    control = replace(
        first, name=control_name(first.name), knowledge=Knowledge.PREDICTED, order=base.order, published=""
    )
    off = [replace(base, name=f"{_SHIPPED}, predictions off by {round(100 * e)}%", error=e) for e in ERRORS]
    return [
        control,
        replace(base, name=SILENCED, silent_share=SILENT),
        replace(base, name=MISSAID, steps_error=STEPS_ERROR),
        *off,
    ]


def control_of(known: Sequence[Line], found: Sequence[Line]) -> Line | None:
    """Return the line of whole GPUs in the default's order, beside the lines of an experiment."""
    name = control_name(known[0].strategy.name)
    return next((line for line in found if line.strategy.name == name), None)


def section(known: Mapping[str, Sequence[Line]], found: Mapping[str, Sequence[Line] | None]) -> list[str]:
    """Write the section; nothing where no experiment has such results.

    Args:
        known: The lines of each experiment.
        found: The lines of `hanging` by experiment; None where they may not be compared seed by seed.
    """
    if not found:
        return []
    parts = [f"## {TITLE}", "", MEANS, ""]
    for name, lines in found.items():
        parts += [f"**{name}**: {UNLIKE}.", ""] if lines is None else _of_one(name, known[name], lines)
    return parts


def _of_one(name: str, known: Sequence[Line], found: Sequence[Line]) -> list[str]:
    control = control_of(known, found)
    beside = [line for line in known if line.strategy.name in (DEFAULT, ARRIVAL, LONGEST_FIRST)]
    others = [line for line in found if line is not control]
    rows = [*([control] if control is not None else []), *beside, *others]
    error = "" if len(known[0].runs) == 1 else " ± standard error"
    heads = [_head(one) for one in _CHANGED]
    heads += [f"{_head(one)} to the control's" for one in _BEYOND_ORDER]
    heads += [tables.HEADS[one] for one in ("slowed_percent", "oom")]
    return [
        f"**{name}**, {pluralize(len(known[0].runs), 'seed')}: changes against "
        f'"{known[0].strategy.name}"{error}, and against the control, "{control_name(known[0].strategy.name)}".',
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---|' * len(heads)}",
        *(f"| {line.strategy.name} | {' | '.join(_cells(line, known[0], control))} |" for line in rows),
        "",
    ]


def _head(figure: str) -> str:
    """Return the name of a figure without its unit, as a change of it has another."""
    return tables.HEADS[figure].rsplit(" ", 1)[0]


def _cells(line: Line, first: Line, control: Line | None) -> list[str]:
    cells = [paired.percent(paired.change(line, first, one)) for one in _CHANGED]
    for one in _BEYOND_ORDER:
        is_compared = control is not None and line is not control
        cells.append(paired.percent(paired.change(line, control, one)) if control and is_compared else "")
    return [*cells, f"{line.mean('slowed_percent'):.1f}", tables.deaths(line.mean("oom"))]
