"""Says of Carpool's default what was asked for, what it hangs on, and whom it slows beyond what they accept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carpool_simulator.reports import ordering, otherwise, paired, unpublished
from carpool_simulator.reports.doubts import FAR_MORE, OWN_TRACES
from carpool_simulator.reports.paired import BEYOND
from carpool_simulator.reports.results import Results
from carpool_simulator.reports.tables import deaths, share
from carpool_simulator.sweep import ARRIVAL, DEFAULT, LONGEST_FIRST, ORACLE, SLOWED, Line

UNLEARNED, EAGER = "Carpool, nothing learned", "Carpool, sharing before anything was measured"
"""Lines without the one or the other of what keeps jobs from dying."""
PROACTIVE = "proactive"
"""The strategy of which HotCloud '20 reports the utilization and makespan that were made goals."""
YES = {True: "yes", False: "**no**"}
NOISE = "within noise"
LEARNED, ALONE = "what is learned", "jobs that run alone where nothing was measured yet"
"""What the lines above are without."""


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
    """Whether it is the figure as it is, of which no noise excuses anything."""


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


def section(
    found: Mapping[str, Results],
    everything: Mapping[str, Line] | None = None,
    hanging: Mapping[str, Sequence[Line] | None] | None = None,
    others: Mapping[str, Sequence[Line]] | None = None,
) -> list[str]:
    """Write the section.

    Args:
        found: Results by experiment.
        everything: By experiment the line that knows durations and slowdowns, too, on the same seeds.
        hanging: By experiment the lines of what the order hangs on; None where they are of another version.
        others: By experiment the lines of where what is not published is otherwise.
    """
    rows = []
    for goal in GOALS:
        known = found[goal.experiment].lines if goal.experiment in found else []
        if (ours := named(known, DEFAULT)) is None:
            continue
        form = "{:g}" if goal.absolute else "{:+.1f}%"
        asked = f"{form.format(goal.must)} | {form.format(goal.aim)}"
        by_arrival = named(known, ARRIVAL)
        rows.append(f"| {goal.name} | {asked} | {_met(goal, known[0], ours)} | {_met(goal, known[0], by_arrival)} |")
    return [
        "## Goals",
        "",
        f"{DEFAULT}, against the first line of each table below on the same seeds; means over the seeds, and of "
        "changes of a mean ± their standard error where there are several seeds. Waiting jobs "
        "come in order of arrival; of those that came within the same ten minutes the longest and the shortest take "
        "turns (`settings.queueOrder: Alternate`, the default), for which jobs say how many steps they have. Beside it "
        "the same strictly in order of arrival (`settings.queueOrder: Arrival`). A goal is met or missed "
        f'"{NOISE}" where what must be is less than {BEYOND:g} standard errors from what came out: with other seeds it '
        "might have come out otherwise. Not so deaths: every single one counts.",
        "",
        "| what | must | aim | here | met | in order of arrival | met |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        *_published(found, (hanging or {}).get("hotcloud") or ()),
        *unpublished.section(others or {}, _must),
        *_deaths(found),
        *_slowed(found, others or {}),
        *_oracle(found, everything or {}),
    ]


def named(lines: Sequence[Line], name: str) -> Line | None:
    """Return the line of a strategy."""
    return next((line for line in lines if line.strategy.name == name), None)


def _met(goal: Goal, first: Line, line: Line | None) -> str:
    """Two cells: what a line comes to, and whether that is what was asked for."""
    if line is None:
        return " | "
    if goal.absolute:
        value = line.mean(goal.figure)
        return f"{deaths(value)} | {YES[value <= goal.must]}"
    found = paired.change(line, first, goal.figure)
    is_met = found.mean >= goal.must if goal.more else found.mean <= goal.must
    is_noise = found.error is not None and abs(found.mean - goal.must) <= BEYOND * found.error
    return f"{paired.percent(found)} | {YES[is_met]}{f', {NOISE}' if is_noise else ''}"


def _published(found: Mapping[str, Results], hanging: Sequence[Line]) -> list[str]:
    """Say what the strategy comes to here whose published figures are the goals."""
    known = found["hotcloud"].lines if "hotcloud" in found else []
    if (line := named(known, PROACTIVE)) is None:
        return []
    changes, oracle, control = (
        [paired.change(one, known[0], figure) for figure in ("utilization_percent", "makespan_min")] if one else []
        for one in (line, named(known, ORACLE), ordering.control_of(known, hanging))
    )
    as_oracle = [
        "In the default's order an oracle of memory, activity and speed comes to "
        f"{' and '.join(map(paired.percent, oracle))}."
    ]
    return [
        f"HotCloud's goals for utilization and makespan are what its authors report of their own strategy, "
        f'"{PROACTIVE}". On the jobs that are drawn here it comes to {" and ".join(map(paired.percent, changes))}, '
        f"with {deaths(line.mean('oom'))} deaths of memory in a run: where the published jobs differ from these is not "
        "known. Its queue is sorted by predicted utilization, which asks nothing of users; the default asks them "
        "how many steps their jobs have.",
        *(as_oracle if oracle else []),
        *([_batch(known[0].strategy.name, control)] if control else []),
        "",
    ]


def _batch(first: str, control: Sequence[paired.Difference]) -> str:
    """Say what of the default's order is the order alone, and what it asks."""
    return (
        "HotCloud's jobs are all there at the start, so that all of them take turns: "
        f'"{first}" itself, whole GPUs, comes to {" and ".join(map(paired.percent, control))} in that order. What the '
        "default gains by it hangs on jobs that say their steps "
        f"([{ordering.TITLE.lower()}](#{ordering.TITLE.lower().replace(' ', '-')})) and come within the same ten "
        f"minutes ([{otherwise.TITLE.lower()}]({otherwise.place()}))."
    )


def _must(name: str, figure: str) -> float:
    return next(goal.must for goal in GOALS if (goal.experiment, goal.figure) == (name, figure))


def _deaths(found: Mapping[str, Results]) -> list[str]:
    """Say how many would die of memory without what keeps them from it."""
    told: dict[str, tuple[float, ...]] = {}
    hanging: dict[tuple[str, str], list[str]] = {}
    for name, (about, known) in found.items():
        lines = [named(known, one) for one in (DEFAULT, UNLEARNED, EAGER)]
        if all(lines):
            ours, unlearned, eager = (line.mean("oom") for line in lines if line is not None)
            told[f"{name}, {about.jobs:,} jobs"] = (ours, unlearned, eager)
            how_few = "How few jobs die of memory" if ours else "That no job dies of memory"
            why = [what for what, without in ((LEARNED, unlearned), (ALONE, eager)) if without > ours]
            hanging.setdefault((how_few if why else "", ", and on ".join(why)), []).append(name)
    if not told:
        return []
    sentences = [_hanging(how_few, why, names) for (how_few, why), names in hanging.items()]
    return [
        f"{' '.join(sentences)} Deaths in the mean of a run, without the one or the other:",
        "",
        f'| | the default | "{UNLEARNED}" | "{EAGER}" |',
        "|---|---|---|---|",
        *(f"| {name} | {' | '.join(map(deaths, each))} |" for name, each in told.items()),
        "",
    ]


def _hanging(how_few: str, why: str, names: Sequence[str]) -> str:
    on = ", ".join(names)
    return f"{how_few} on {on} hangs on {why}." if why else f"On {on} no more die without either."


def _slowed(found: Mapping[str, Results], others: Mapping[str, Sequence[Line]]) -> list[str]:
    """Say where the default slows jobs beyond what they accept."""
    told, kept = [], []
    for name, (_, known) in found.items():
        ours = named(known, DEFAULT)
        if ours is None or not ours.mean("running_s"):  # none ended there
            continue
        if slowed := ours.mean("slowed_percent"):
            told.append(f"{share(slowed)} on {name}{_knowing(named(known, ORACLE))}")
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
    parts += unpublished.slowed(others)
    parts.append(
        f"Of {OWN_TRACES}, far more may be: {FAR_MORE} in one that was tried ([doubts](#what-the-tables-can-tell))."
    )
    if any("oracle" in one for one in told):
        parts.append(
            "No slowdowns are among what that oracle knows (memory, activity and speed alone): they are predicted for "
            "it, too."
        )
    return [" ".join(parts), ""] if told else []


def _knowing(oracle: Line | None) -> str:
    return f" ({share(oracle.mean('slowed_percent'))} with an oracle's knowledge)" if oracle is not None else ""


def _oracle(found: Mapping[str, Results], everything: Mapping[str, Line]) -> list[str]:
    rows = []
    for name, (_, known) in found.items():
        ours, sorting, all_knowing = named(known, DEFAULT), named(known, LONGEST_FIRST), everything.get(name)
        for which, line, other in (
            ("", ours, named(known, ORACLE)),
            (", everything", ours, all_knowing),
            (", everything, both the longest first", sorting, all_knowing),
        ):
            if line is not None and other is not None:
                figures = ("makespan_min", "completion_min", "energy_mj")
                cells = [paired.percent(paired.change(line, other, one)) for one in figures]
                rows.append(f"| {name}{which} | {' | '.join(cells)} |")
    return [
        "Distance to the same decisions with an oracle's knowledge of memory, activity and speed alone, on the same "
        "seeds (± standard error, where there are several). Who knows everything knows slowdowns, too, and how long "
        "each job takes, by which the longest comes first, whatever that does to completion. Aimed at is a makespan no "
        "more than 10% longer than who knows everything needs.",
        "",
        "| | makespan | completion | energy |",
        "|---|---|---|---|",
        *rows,
        "",
    ]
