"""Tables of a contest, as Markdown."""

from collections.abc import Sequence

from carpool_extender.queue.order import QueueOrder

from carpool_simulator.strategy import Knowledge
from carpool_simulator.sweep import SLOWED, Line

HEADS = {
    "makespan_min": "makespan min",
    "utilization_percent": "utilization %",
    "completion_min": "completion min",
    "running_s": "running s",
    "slowed_percent": f"slowed beyond {SLOWED:g} times, % of jobs",
    "oom": "out of memory",
    "energy_mj": "energy MJ",
    "waiting_min": "waiting min",
    "gpus_in_use": "GPUs in use",
    "unused_percent": "unused on these %",
    "memory_percent": "memory in use %",
    "killed": "killed by failures",
    "unplaced": "never placed",
}
"""What each figure is called at the head of its column."""
SLOWED_MEANS = (
    f" `{HEADS['slowed_percent']}`: of the jobs that ended, how many took more than {SLOWED:g} times as long as they "
    "would have alone, from the start that succeeded to the end."
)
_SHOWN = 0.05
"""What is less would be 0.0 with one digit."""
SHOWN = ("makespan_min", "utilization_percent", "completion_min", "running_s", "slowed_percent", "oom", "energy_mj")
COMPARED = {
    "makespan_min",
    "utilization_percent",
    "completion_min",
    "energy_mj",
    "waiting_min",
    "gpus_in_use",
    "memory_percent",
}
"""Figures of which the change against the first line is told, too."""

POLICED = (
    "Every policy of the extender's table with all that Carpool knows and learns, accepting a slowdown of 1.5. What "
    "must hold (memory, slowdowns, modes) is checked before a policy chooses, so that it holds under each of them; "
    "`first-fit-decreasing` sorts the queue, too."
)
WRONG = (
    'Carpool (slowdown ≤ 1.5) when predictions are off, against the first line. Under "the default" jobs are learned '
    "as ever, so that a job that ran is known however wrong its prediction was; on the other lines nothing is learned, "
    'and own peaks count where that is said. "off by 0%" is as predicted, with the errors that predictions have; the '
    "others have factors on top, drawn for each job's memory and activity, whose logarithms have that standard "
    "deviation."
)
ATTRIBUTED = (
    "What not knowing costs: Carpool (slowdown ≤ 1.5) where single pieces of its knowledge are replaced by the truth. "
    "With all of them it knows slowdowns and durations, too, which the oracle does not."
)
VARIED = (
    "Carpool (slowdown ≤ 1.5) where what is assumed is otherwise; above, a change of a mode takes no time. Neither "
    "kind of line can show much harm: every true peak is complete after a minute, so that going by a peak sooner "
    "risks nothing here, as it may where real jobs grow; and a GPU keeps its mode when it falls idle, so that few "
    "changes are paid for. The time of a change is added to the job's own, so that the GPU counts as busy meanwhile "
    "and draws its power: of these lines utilization and energy are told too high, makespans are not."
)

UNLEARNED = (
    "Nothing is learned here of the jobs that ran, as it would be on a cluster: with --learn fewer are slowed, as a "
    "rule, and the run takes longer."
)
"""Said of jobs of an own trace that were slowed."""


def markdown(lines: Sequence[Line], shown: Sequence[str] = ()) -> list[str]:
    """Write a table: mean and, of several seeds, ± standard deviation; and the change against the first line.

    Args:
        lines: One for each strategy.
        shown: Names of the figures; the usual ones where there are none.
    """
    names = list(shown or SHOWN)
    names += [one for one in ("killed", "unplaced") if one not in names and any(line.mean(one) for line in lines)]
    head = ["strategy"]
    for name in names:
        head += [HEADS[name], "change"] if name in COMPARED else [HEADS[name]]
    return [_row(head), _row(["---"] * len(head)), *(_row(_cells(line, lines[0], names)) for line in lines)]


def change(line: Line, first: Line, name: str) -> float:
    """Return the change of a figure against the first line, in percent."""
    return 100 * (line.mean(name) / max(1e-9, first.mean(name)) - 1)


def share(percent: float) -> str:
    """Write a share that may be none, or too small for a digit."""
    if not percent:
        return "none"
    return f"{percent:.1f}%" if percent >= _SHOWN else "less than 0.1%"


def deaths(mean: float) -> str:
    """Write deaths in the mean of a run, of which not even one is rounded away."""
    return f"{mean:,.1f}" if not mean or mean >= _SHOWN else f"{mean:.1g}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(line: Line, name: str) -> str:
    return f"{line.mean(name):.1f} ± {line.spread(name):.1f}" if len(line.runs) > 1 else f"{line.mean(name):.1f}"


def _cells(line: Line, first: Line, names: Sequence[str]) -> list[str]:
    cells = [line.strategy.name]
    for name in names:
        cells.append(_spread(line, name))
        if name in COMPARED:
            is_comparable = line is not first and first.mean(name) > 0
            cells.append(f"{change(line, first, name):+z.1f}%" if is_comparable else "")
    return cells


def _order(lines: Sequence[Line]) -> str:
    """Say how queues are sorted, and whose waits for its first job, where others' does not."""
    return _turns(lines) + _strictly(lines)


def _turns(lines: Sequence[Line]) -> str:
    """Say in which order waiting jobs are tried, by default where lines differ."""
    orders = {line.strategy.order for line in lines}
    silent = (
        " Who does not say how many steps there are counts as an hour: where nobody does it is the order of arrival "
        "exactly."
    )
    if QueueOrder.ALTERNATE in orders:
        return (
            " On Carpool's lines jobs come in order of arrival, if nothing else is said; of those that came within the "
            "same ten minutes the longest and the shortest take turns (`settings.queueOrder: Alternate`, the default)."
            + silent
        )
    if QueueOrder.LONGEST_FIRST in orders:
        return (
            " On Carpool's lines whoever takes longest comes first, whenever it came (`settings.queueOrder: "
            "LongestFirst`)." + silent
        )
    own = [
        one.strategy for one in lines if one.strategy.knowledge is Knowledge.PREDICTED and not one.strategy.published
    ]
    return " On Carpool's lines jobs come in order of arrival (`settings.queueOrder: Arrival`)." if own else ""


def _strictly(lines: Sequence[Line]) -> str:
    waits = [line.strategy.name for line in lines if line.strategy.in_order]
    if not waits or len(waits) == len(lines):
        return ""
    return (
        " Strictly in order of arrival, so that all wait for whoever finds no place: "
        f"{', '.join(waits)}; the others let those pass who fit, which alone shortens completion."
    )


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
        here += f" ({change(line, first, 'makespan_min'):+z.1f}%)"
    return _row([line.strategy.name, line.strategy.published, f"{here}, {line.mean('energy_mj'):.2f} MJ"])


def section(title: str, assumptions: Sequence[str], lines: Sequence[Line], shown: Sequence[str] = ()) -> list[str]:
    """Write one experiment; `shown` as in `markdown`."""
    seeds = len(lines[0].runs)
    what = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One run, so that no spread is known"
    slowed = SLOWED_MEANS if "slowed_percent" in (shown or SHOWN) else ""
    return [
        f"## {title}",
        "",
        f"{what}; changes are against the first line.{slowed}{_order(lines)}",
        "",
        *markdown(lines, shown),
        "",
        *([*told, ""] if (told := published(lines)) else []),
        "Assumed where the text is silent:",
        "",
        *(f"- {one}" for one in assumptions),
        "",
    ]
