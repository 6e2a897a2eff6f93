"""Says of Carpool's default what was asked for, what it hangs on, and whom it slows beyond what they accept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carpool_extender.simulation import report
from carpool_extender.simulation.contest import DEFAULT, LONGEST_FIRST, ORACLE, SLOWED, Line
from carpool_extender.simulation.results import Results

UNLEARNED, EAGER = "Carpool, nothing learned", "Carpool, sharing before anything was measured"
"""Lines without the one or the other of what keeps jobs from dying."""
PROACTIVE = "proactive"
"""The strategy of which HotCloud '20 reports the utilization and makespan that were made goals."""
YES = {True: "yes", False: "**no**"}
_SHOWN_PERCENT = 0.05
"""Shares below this are written as less than a tenth of a percent."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One number that was asked for."""

    experiment: str
    figure: str
    """A change in percent against the first line, or the figure as it is."""
    must: float
    aim: float
    name: str
    more: bool = False
    """Whether more is better."""
    absolute: bool = False


GOALS = (
    Goal("hotcloud", "utilization_percent", 61.5, 75.0, "HotCloud, mean utilization", more=True),
    Goal("hotcloud", "makespan_min", -33.6, -40.0, "HotCloud, makespan"),
    Goal("hotcloud", "oom", 0.0, 0.0, "HotCloud, out of memory", absolute=True),
    Goal("radrm-90", "makespan_min", -30.0, -35.0, "RAD-RM 90, trace time"),
    Goal("radrm-90", "oom", 0.0, 0.0, "RAD-RM 90, out of memory", absolute=True),
    Goal("radrm-60", "makespan_min", -20.0, -25.0, "RAD-RM 60, trace time"),
    Goal("radrm-60", "energy_mj", -13.3, -18.0, "RAD-RM 60, energy"),
    Goal("radrm-60", "oom", 0.0, 0.0, "RAD-RM 60, out of memory", absolute=True),
)


def section(found: Mapping[str, Results]) -> list[str]:
    """Write the section, out of results by experiment."""
    rows = []
    for goal in GOALS:
        known = found[goal.experiment].lines if goal.experiment in found else []
        if (ours := named(known, DEFAULT)) is None:
            continue
        form = "{:g}" if goal.absolute else "{:+.1f}%"
        asked = f"{form.format(goal.must)} | {form.format(goal.aim)}"
        sorting = named(known, LONGEST_FIRST)
        rows.append(f"| {goal.name} | {asked} | {_met(goal, known[0], ours)} | {_met(goal, known[0], sorting)} |")
    return [
        "## Goals",
        "",
        f"{DEFAULT}, against the first line of each table below; means over the seeds. Beside it the same with "
        "`settings.queueOrder: LongestFirst`, where jobs say how many steps they have and their predicted lengths sort "
        "the queue.",
        "",
        "| what | must | aim | here | met | longest first | met |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        *_published(found),
        *_deaths(found),
        *_slowed(found),
        *_oracle(found),
    ]


def named(lines: Sequence[Line], name: str) -> Line | None:
    """Return the line of a strategy."""
    return next((line for line in lines if line.strategy.name == name), None)


def _met(goal: Goal, first: Line, line: Line | None) -> str:
    """Two cells: what a line comes to, and whether that is what was asked for."""
    if line is None:
        return " | "
    value = line.mean(goal.figure) if goal.absolute else report.change(line, first, goal.figure)
    is_met = value >= goal.must if goal.more else value <= goal.must
    return f"{value:.1f} | {YES[is_met]}" if goal.absolute else f"{value:+.1f}% | {YES[is_met]}"


def _published(found: Mapping[str, Results]) -> list[str]:
    """Say what the strategy comes to here whose published figures are the goals."""
    known = found["hotcloud"].lines if "hotcloud" in found else []
    if (line := named(known, PROACTIVE)) is None:
        return []
    utilization, makespan = (report.change(line, known[0], one) for one in ("utilization_percent", "makespan_min"))
    return [
        f"HotCloud's goals for utilization and makespan are what its authors report of their own strategy, "
        f'"{PROACTIVE}". On the jobs that are drawn here it comes to {utilization:+.1f}% and {makespan:+.1f}%, with '
        f"{line.mean('oom'):.1f} deaths of memory in a run: where the published jobs differ from these is not known.",
        "",
    ]


def _deaths(found: Mapping[str, Results]) -> list[str]:
    """Say how many would die of memory without what keeps them from it."""
    told: dict[str, list[float]] = {}
    for name, (about, known) in found.items():
        lines = [named(known, one) for one in (DEFAULT, UNLEARNED, EAGER)]
        if all(lines):
            told[f"{name}, {about.jobs:,} jobs"] = [line.mean("oom") for line in lines if line is not None]
    if not told:
        return []
    names = {name: name.partition(",")[0] for name in told}
    hangs = [names[name] for name, (ours, *others) in told.items() if max(others) > ours]
    alike = [one for one in names.values() if one not in hangs]
    how_few = "How few jobs die of memory" if any(ours for ours, *_ in told.values()) else "That no job dies of memory"
    why = "hangs on what is learned, and on jobs that run alone where nothing was measured yet"
    sentences = [f"{how_few} on {', '.join(hangs)} {why}."] if hangs else []
    sentences += [f"On {', '.join(alike)} no more die without either."] if alike else []
    return [
        f"{' '.join(sentences)} Deaths in the mean of a run, without the one or the other:",
        "",
        f'| | the default | "{UNLEARNED}" | "{EAGER}" |',
        "|---|---|---|---|",
        *(f"| {name} | {' | '.join(f'{deaths:.1f}' for deaths in each)} |" for name, each in told.items()),
        "",
    ]


def _slowed(found: Mapping[str, Results]) -> list[str]:
    """Say where the default slows jobs beyond what they accept."""
    told, kept = [], []
    for name, (_, known) in found.items():
        ours = named(known, DEFAULT)
        if ours is None or not ours.mean("running_s"):  # none ended there
            continue
        if share := ours.mean("slowed_percent"):
            told.append(f"{_percent(share)} on {name}{_knowing(named(known, ORACLE))}")
        else:
            kept.append(name)
    parts = []
    if told:
        parts.append(
            f"Each job accepts to take {SLOWED:g} times as long as alone, which is held against predictions, and those "
            f"err: of the jobs that ended the default slowed more than that {'; '.join(told)}."
        )
    if kept:
        parts.append(f"It slowed none beyond that on {', '.join(kept)}.")
    return [" ".join(parts), ""] if told else []


def _percent(share: float) -> str:
    return f"{share:.1f}%" if share >= _SHOWN_PERCENT else "less than 0.1%"


def _knowing(oracle: Line | None) -> str:
    return f" ({_percent(oracle.mean('slowed_percent'))} with an oracle's knowledge)" if oracle is not None else ""


def _oracle(found: Mapping[str, Results]) -> list[str]:
    rows = []
    for name, (_, known) in found.items():
        ours, best = named(known, DEFAULT), named(known, ORACLE)
        if ours is not None and best is not None:
            cells = [
                f"{report.change(ours, best, one):+.1f}%" for one in ("makespan_min", "completion_min", "energy_mj")
            ]
            rows.append(f"| {name} | {' | '.join(cells)} |")
    return [
        "Distance to the same decisions with an oracle's knowledge of memory, activity and speed alone:",
        "",
        "| | makespan | completion | energy |",
        "|---|---|---|---|",
        *rows,
        "",
    ]
