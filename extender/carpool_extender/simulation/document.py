"""Writes docs/experiments.md out of the results of runs, and of nothing else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool_predictor.recalling import FIRST

from carpool_extender.simulation import energies, report, results, workdone
from carpool_extender.simulation.contest import (
    DEFAULT,
    EXPERIMENTS,
    FAILS_EVERY_H,
    LONGEST_FIRST,
    ORACLE,
    UNCOUNTED,
    Line,
)
from carpool_extender.simulation.doubts import doubts
from carpool_extender.simulation.results import ATTRIBUTED, FAILING, POLICED, SUFFIXES, VARIED, WRONG
from carpool_extender.simulation.workload import WorkloadError

PHILLY_MUST_S = 120.0
YES = {True: "yes", False: "**no**"}
MORE_IS_BETTER = frozenset({"utilization_percent", "memory_percent"})


@dataclass(frozen=True, slots=True)
class Goal:
    """One number that was asked for."""

    experiment: str
    figure: str
    """A change in percent where `most` or `least` says so, out-of-memory as it is."""
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


def write(out: Path, path: Path) -> None:
    """Write the document.

    Args:
        out: Folder of results.
        path: The document.

    Raises:
        WorkloadError: There are no results, or of another version.
    """
    found = {name: one for name in EXPERIMENTS if (one := results.read(out, name)) is not None}
    if not found:
        raise WorkloadError(f"expected results in {out}, found none; run `carpool simulate --workload all` first")
    lines = {name: _of_now(about, known) for name, (about, known) in found.items()}
    parts = [*_head(), *_goals(lines), *_oracle(lines), *_own_peaks(lines), *_losses(found, lines)]
    for name, (about, known) in found.items():
        title, *rest = report.section(about.title, about.assumptions, known, about.shown)
        parts += [title, "", f"Results of {about.made}.{_older(about)}", *rest]
        parts += _more(out, name, known)
        parts += energies.table(lines[name]) if name == "radrm-60" else []
        parts += [*workdone.of_hotcloud(lines[name]), *energies.of_hotcloud(lines[name])] if name == "hotcloud" else []
    parts += [*_times(found), *_versions(out, found), *doubts()]
    path.write_text("\n".join(parts), encoding="utf-8")


def _head() -> list[str]:
    return [
        "# Experiments",
        "",
        "Written by `carpool simulate --document docs/experiments.md` from the results of runs; do not edit. The "
        "simulator runs the scheduler's own decisions (checks, policies, ledger) on a virtual clock. What is true in "
        "it (memory, solo speed, slowdown, power) never comes from the models that decide; predictions are the shipped "
        "predictor's, on features that were traced without a GPU, with whatever errors it makes, and Carpool learns "
        "from what ran by the operator's own functions: nothing is revealed of a job before it ran for a minute and a "
        "half, or died. How good the slowdown model is stands in [its card](model-cards/slowdown.md).",
        "",
        "Most constants of what is learned were not chosen by these tables: the margin to a measured peak (a tenth) "
        "and the number of jobs that calibrate a stack (three) stood in the predictor before, a death raises the "
        "bound by the half that the simulator's recovery had, a minute and a half is the age from which the "
        "scheduler goes by what it measures, and ten minutes are an assumption that is varied below. A first run "
        f"counts with {FIRST:g} times the bound, by a rule that looks at the memory model's evaluation, each family "
        "held out ([decisions.md](decisions.md#the-first-run-of-a-job-has-more-room)); for an earlier model the rule "
        "gave 1.14, after 1.1, 1.15 and 1.2 had been tried on these seeds. That first runs need more room at all was "
        "seen here (one model of RAD-RM died each time it was new), and so was that activity must be learned for "
        "models at other sizes; that jobs run alone where nothing was measured was decided with these tables in sight, "
        'too: the line "sharing before anything was measured" is the other choice, without more room for first runs.',
        "",
        "A job that never ran counts with its own peak once that has stood still: one and a half times as much after a "
        "minute and a half, 1.1 times after ten minutes. These numbers stood elsewhere before, but that there are two "
        "steps was decided with seeds of HotCloud in sight. Against whole GPUs its makespan was, with the memory model "
        "of before: without it 24.8% shorter (ten seeds); in one step after ten minutes 26.3% (ten seeds; 31.0% on the "
        "first four); in two steps 33.7% (the first four, 192.7 minutes); in one step of a tenth after a minute and a "
        "half, which learned as early as well, 29.9% (ten seeds); and where a job counted from then on with what would "
        "be predicted of a newcomer of its kind 34.4% (the first four), which would need the operator for it. Each let "
        "nobody die; nothing else was tried.",
        "",
    ]


def _goals(lines: dict[str, list[Line]]) -> list[str]:
    rows = []
    for goal in GOALS:
        known = lines.get(goal.experiment, [])
        sorting = _named(known, LONGEST_FIRST)
        if (ours := _named(known, DEFAULT)) is None:
            continue
        form = "{:g}" if goal.absolute else "{:+.1f}%"
        asked = f"{form.format(goal.must)} | {form.format(goal.aim)}"
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
    ]


def _met(goal: Goal, first: Line, line: Line | None) -> str:
    """Two cells: what a line comes to, and whether that is what was asked for."""
    if line is None:
        return " | "
    value = line.mean(goal.figure) if goal.absolute else report.change(line, first, goal.figure)
    is_met = value >= goal.must if goal.more else value <= goal.must
    return f"{value:.1f} | {YES[is_met]}" if goal.absolute else f"{value:+.1f}% | {YES[is_met]}"


def _oracle(lines: dict[str, list[Line]]) -> list[str]:
    rows = []
    for name, known in lines.items():
        ours, best = _named(known, DEFAULT), _named(known, ORACLE)
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


def _own_peaks(lines: dict[str, list[Line]]) -> list[str]:
    """Say what it is worth that running jobs count with their own peaks, seed by seed."""
    rows = []
    for name, known in lines.items():
        ours, without = _named(known, DEFAULT), _named(known, UNCOUNTED)
        if ours is not None and without is not None and len(ours.runs) > 1:
            cells = [report.difference(ours, without, one) for one in ("makespan_min", "completion_min", "energy_mj")]
            rows.append(f"| {name} | {' | '.join(cells)} |")
    told = f'{DEFAULT}, less "{UNCOUNTED}" on the same seed; mean ± standard error:'
    head = ["| | makespan min | completion min | energy MJ |", "|---|---|---|---|"]
    return [f"What counting running jobs with their own peaks changes: {told}", "", *head, *rows, ""] if rows else []


def _older(about: results.About) -> str:
    """Say which lines of a table are not of the version that the others are of."""
    return f" Of an older version, and to be read with care: {', '.join(about.older)}." if about.older else ""


def _losses(found: dict[str, tuple[results.About, list[Line]]], lines: dict[str, list[Line]]) -> list[str]:
    told = []
    for name, (about, _) in found.items():
        known = lines[name]
        ours = _named(known, DEFAULT)
        if ours is None:
            continue
        for figure in about.shown or report.SHOWN:
            sign = -1 if figure in MORE_IS_BETTER else 1
            better = [
                f"{one.strategy.name} ({one.mean(figure):.1f})"
                for one in known
                if one is not ours
                and "oracle" not in one.strategy.name
                and sign * one.mean(figure) < sign * ours.mean(figure) - 1e-9
            ]
            if better:
                told.append(f"- {name}, {report.HEADS[figure]} ({ours.mean(figure):.1f}): {', '.join(better)}.")
    return [
        "## Where Carpool loses",
        "",
        "Whoever does better than the default without an oracle's knowledge, for each experiment and figure:",
        "",
        *told,
        "",
    ]


def _more(out: Path, name: str, known: Sequence[Line]) -> list[str]:
    parts: list[str] = []
    first, ours, best = known[0], _named(known, DEFAULT), _named(known, ORACLE)
    if (policed := results.read(out, name + POLICED)) is not None:
        parts += [f"{report.POLICED}{_older(policed[0])}", "", *report.markdown([first, *policed[1]]), ""]
    for suffix, told, closing in ((ATTRIBUTED, report.ATTRIBUTED, best), (VARIED, report.VARIED, None)):
        if (found := results.read(out, name + suffix)) is not None:
            lines = [first, *([ours] if ours else []), *found[1], *([closing] if closing else [])]
            parts += [f"{told}{_older(found[0])}", "", *report.markdown(lines), ""]
            parts += _worth(ours, _of_now(*found)) if ours and suffix == ATTRIBUTED else []
    if (wrong := results.read(out, name + WRONG)) is not None:
        parts += [
            "Carpool (slowdown ≤ 1.5) when predictions are off and nothing is learned, against the first line; own "
            f"peaks count where that is said.{_older(wrong[0])}",
            "",
        ]
        parts += [*report.markdown([first, *wrong[1]]), ""]
    if (failing := results.read(out, name + FAILING)) is not None:
        told = f"When each GPU fails every {FAILS_EVERY_H:g} hours, and its jobs begin again."
        parts += [f"{told}{_older(failing[0])}", ""]
        parts += [*report.markdown(failing[1]), ""]
    return parts


def _of_now(about: results.About, lines: Sequence[Line]) -> list[Line]:
    """Keep what may be compared: a line of an older version stands in its table, and is compared with nothing."""
    return [line for line in lines if line.strategy.name not in about.older]


def _worth(ours: Line, told: Sequence[Line]) -> list[str]:
    """Say which single piece of knowledge is worth the most."""
    single = [line for line in told if len(line.strategy.told) == 1]
    if not single:
        return []
    worth = sorted((report.change(line, ours, "makespan_min"), line.strategy.name) for line in single)
    each = ", ".join(f"{name.removeprefix('with ')} {change:+.1f}%" for change, name in worth)
    return [f"Makespan against Carpool's own, for single pieces: {each}.", ""]


def _times(found: dict[str, tuple[results.About, list[Line]]]) -> list[str]:
    rows = []
    for name, (about, _) in found.items():
        slowest = max(about.cpu_s.values())
        rows.append(f"| {name} | {about.jobs:,} | {slowest:g} |")
    return [
        "## Processor time",
        "",
        "Of one run of the slowest strategy, beside other work; asked for is Philly in "
        f"{PHILLY_MUST_S:g} s, which [benchmarks.md](benchmarks.md) measures by itself.",
        "",
        "| experiment | jobs | processor s |",
        "|---|---|---|",
        *rows,
        "",
    ]


def _named(lines: Sequence[Line], name: str) -> Line | None:
    return next((line for line in lines if line.strategy.name == name), None)


def _versions(out: Path, found: Iterable[str]) -> list[str]:
    """Say of every result when it was made, and by which version."""
    names = [name + suffix for name in found for suffix in ("", *SUFFIXES)]
    made = {name: one[0].made for name in names if (one := results.read(out, name)) is not None}
    versions = {one.version for one in made.values()}
    told = "All results are of one version."
    if len(versions) > 1 or "" in versions:
        told = (
            "The results are not all of one version, or it was not noted: figures of different versions do not differ "
            "by strategy alone, and only tables of one version can be read against each other."
        )
    rows = [
        f"| {name} | {one.when or 'time not noted'} | {one.version or 'version not noted'} |"
        for name, one in made.items()
    ]
    return ["## When and with what", "", told, "", "| results | UTC | version |", "|---|---|---|", *rows, ""]
