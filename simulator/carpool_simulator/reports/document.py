"""Writes docs/experiments.md out of the results of runs, and of nothing else."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from carpool_extender.framework.diagnosis import pluralize
from carpool_predictor.calibration.run_history import FIRST_RUN_FACTOR, FIRST_RUN_FACTOR_UNENFORCED

from carpool_simulator.reports import (
    energies,
    goals,
    idleness,
    losses,
    ordering,
    otherwise,
    paired,
    results,
    tables,
    workdone,
)
from carpool_simulator.reports.doubts import doubts
from carpool_simulator.reports.goals import named
from carpool_simulator.reports.results import (
    ATTRIBUTED,
    FAILING,
    ORDER,
    OTHERWISE,
    POLICED,
    SUFFIXES,
    VARIED,
    WRONG,
    Results,
)
from carpool_simulator.sweep import DEFAULT, EVERYTHING, EXPERIMENTS, FAILS_EVERY_H, ORACLE, Line
from carpool_simulator.truth import WorkloadError

PHILLY_MUST_S = 120.0
UNLIKE = (
    "The results of this table are of another version than the experiment's own, or of versions that were not noted, "
    "so that nothing is told of them seed by seed, neither here nor above."
)


def write(out: Path, path: Path) -> None:
    """Write the document.

    Args:
        out: Folder of results.
        path: The document.

    Raises:
        WorkloadError: There are no results, or of another version, or what is compared is not of the same seeds.
    """
    found = {name: one for name in EXPERIMENTS if (one := results.read(out, name)) is not None}
    if not found:
        raise WorkloadError(f"expected results in {out}, found none; run `carpool simulate --workload all` first")
    policies = {name: one for name, of in found.items() if (one := _policies(out, name, of)) is not None}
    like = {name: one.lines for name, one in policies.items() if one.about.made.is_like(found[name].about.made)}
    hanging = _hanging(out, found)
    others = _otherwise(out, found)
    parts = [*_head(), *goals.section(found, _everything(out, found), hanging, others)]
    parts += ordering.section({name: of.lines for name, of in found.items()}, hanging)
    parts += otherwise.section(others)
    parts += losses.section(found, like)
    for name, (about, known) in found.items():
        title, *rest = tables.section(about.title, about.assumptions, known, about.shown)
        parts += [title, "", f"Results of {about.made}.", *rest, *idleness.told(known)]
        parts += _policed(found[name], policies.get(name))
        parts += _more(out, name, found[name])
        parts += energies.table(known) if name == "radrm-60" else []
        parts += [*workdone.of_hotcloud(known), *energies.of_hotcloud(known)] if name == "hotcloud" else []
    parts += [*_times(found), *_versions(out, found), *doubts()]
    path.write_text("\n".join(parts), encoding="utf-8")


def _policies(out: Path, name: str, of: Results) -> Results | None:
    """Read what every policy came to, none of them called as a line of the experiment."""
    found = _beside(out, name, POLICED, of)
    return None if found is None else Results(found.about, paired.apart(of.lines, found.lines))


def _everything(out: Path, found: Mapping[str, Results]) -> dict[str, Line]:
    """Read by experiment the line that knows all there is, where it may be compared seed by seed."""
    known = {name: _beside(out, name, ATTRIBUTED, of) for name, of in found.items()}
    alike = {name: one for name, one in known.items() if one and one.about.made.is_like(found[name].about.made)}
    lines = {name: goals.named(one.lines, EVERYTHING) for name, one in alike.items()}
    return {name: line for name, line in lines.items() if line is not None}


def _hanging(out: Path, found: Mapping[str, Results]) -> dict[str, Sequence[Line] | None]:
    """Read what the order hangs on by experiment; None where it may not be compared seed by seed."""
    known = {name: _beside(out, name, ORDER, of) for name, of in found.items()}
    return {
        name: one.lines if one.about.made.is_like(found[name].about.made) else None
        for name, one in known.items()
        if one is not None
    }


def _otherwise(out: Path, found: Mapping[str, Results]) -> dict[str, Sequence[Line]]:
    """Read by experiment what comes of it where what is assumed is otherwise; not of another version."""
    known = {name: _beside(out, name, OTHERWISE, of) for name, of in found.items()}
    return {name: one.lines for name, one in known.items() if one and one.about.made.is_like(found[name].about.made)}


def _beside(out: Path, name: str, suffix: str, of: Results) -> Results | None:
    """Read results that stand beside an experiment's own, of which they must have the seeds."""
    found = results.read(out, name + suffix)
    if found is not None and found.about.seeds != of.about.seeds:
        raise WorkloadError(
            f"{out / name}{suffix}.csv: expected {pluralize(of.about.seeds, 'seed')}, as {name}.csv has, found "
            f"{found.about.seeds}; run the workload again"
        )
    return found


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
        f"counts with {FIRST_RUN_FACTOR:g} times the bound, by a rule that looks at the memory model's evaluation, "
        "each family "
        "held out ([decisions.md](decisions.md#the-first-run-of-a-job-has-more-room)); for an earlier model the rule "
        "gave 1.14, after 1.1, 1.15 and 1.2 had been tried on these seeds. By turns, where nothing enforces a bound, "
        f"it counts with {FIRST_RUN_FACTOR_UNENFORCED:g} times, by the same rule with more families to be held: that "
        "there should "
        "be more was decided after deaths on HotCloud's draws (one on these ten seeds, nine on ninety). That first "
        "runs need more room at all was seen here (one model of RAD-RM died each time it was new), and so was that "
        "activity must be learned for "
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


def _policed(of: Results, policies: Results | None) -> list[str]:
    """Show every policy, and how it and every other line differs from the default on the same seed."""
    parts, compared = [], list(of.lines)
    if policies is not None:
        parts += [tables.POLICED, "", *tables.markdown([of.lines[0], *policies.lines]), ""]
        if policies.about.made.is_like(of.about.made):
            compared += policies.lines
        else:
            parts += [UNLIKE, ""]
    if (ours := named(of.lines, DEFAULT)) is not None:
        parts += paired.table(ours, compared, of.about.shown or tables.SHOWN)
    return parts


def _more(out: Path, name: str, of: Results) -> list[str]:
    parts: list[str] = []
    first, ours, best = of.lines[0], named(of.lines, DEFAULT), named(of.lines, ORACLE)
    for suffix, told, closing in ((ATTRIBUTED, tables.ATTRIBUTED, best), (VARIED, tables.VARIED, None)):
        if (found := _beside(out, name, suffix, of)) is not None:
            lines = [first, *([ours] if ours else []), *found.lines, *([closing] if closing else [])]
            parts += [told, "", *tables.markdown(lines), ""]
            if ours is not None and suffix == ATTRIBUTED:
                parts += _worth(ours, found.lines) if found.about.made.is_like(of.about.made) else [UNLIKE, ""]
    if (wrong := _beside(out, name, WRONG, of)) is not None:
        parts += [
            tables.WRONG + _in_vain(wrong.lines),
            "",
            *tables.markdown([first, *([ours] if ours else []), *wrong.lines]),
            "",
        ]
    if (failing := results.read(out, name + FAILING)) is not None:
        parts += [f"When each GPU fails every {FAILS_EVERY_H:g} hours, and its jobs begin again.", ""]
        parts += [*tables.markdown(failing.lines), ""]
    return parts


def _in_vain(lines: Sequence[Line]) -> str:
    """Say why the last line is the one before it, where it is."""
    if len(lines) < 2 or lines[-1].runs != lines[-2].runs:
        return ""
    return (
        " The last two lines are the same on each seed: a newcomer of which nothing is predicted has a GPU to itself, "
        "whatever is known of the jobs that it could join."
    )


def _worth(ours: Line, told: Sequence[Line]) -> list[str]:
    """Say which single piece of knowledge is worth the most."""
    single = [line for line in told if len(line.strategy.told) == 1]
    if not single:
        return []
    worth = sorted(
        ((paired.change(line, ours, "makespan_min"), line.strategy.name) for line in single),
        key=lambda one: one[0].mean,
    )
    each = ", ".join(f"{name.removeprefix('with ')} {paired.percent(change)}" for change, name in worth)
    error = " (± standard error)" if len(ours.runs) > 1 else ""
    return [f"Makespan against Carpool's own{error}, for a single piece on the same seed: {each}.", ""]


def _times(found: Mapping[str, Results]) -> list[str]:
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


def _versions(out: Path, found: Iterable[str]) -> list[str]:
    """Say of every result when it was made, and by which version."""
    names = [name + suffix for name in found for suffix in ("", *SUFFIXES)]
    made = {name: one.about.made for name in names if (one := results.read(out, name)) is not None}
    told = "All results are of one version."
    if len({one.version for one in made.values()}) > 1 or not all(one.is_noted for one in made.values()):
        told = (
            "The results are not all of one version, or it was not noted, or had changes that were not committed: "
            "figures of different versions do not differ by strategy alone, and only tables of one version can be read "
            "against each other."
        )
    rows = [
        f"| {name} | {one.when or 'time not noted'} | {one.version or 'version not noted'} |"
        for name, one in made.items()
    ]
    return ["## When and with what", "", told, "", "| results | UTC | version |", "|---|---|---|", *rows, ""]
