"""What comes of an experiment where what its text leaves open is otherwise than assumed.

Each case is compared with its own first line, and the same with what is assumed stands above it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from carpool_extender.framework.diagnosis import counted
from carpool_research.experiments import hotcloud, radrm

from carpool_simulator.power import Power
from carpool_simulator.reports import energies, paired, tables
from carpool_simulator.strategy import Strategy
from carpool_simulator.sweep import ARRIVAL, DEFAULT, LONGEST_FIRST, Experiment, Line, ours
from carpool_simulator.truth import Draw, in_pieces

TITLE = "Where what is not published is otherwise"
ASSUMED = "as assumed"
IN_PIECES = (0.05, 0.1)
"""Shares of a shared GPU's memory that are lost in pieces, where that is tried."""
CASES: Mapping[str, tuple[Mapping[str, Draw], Sequence[str]]] = {
    "hotcloud": (hotcloud.OTHERWISE, ("proactive",)),
    **{f"radrm-{tasks}": (radrm.otherwise(tasks), radrm.BESIDE) for tasks in radrm.MIXES},
}
"""By experiment how it is drawn otherwise, and which published strategies are tried on it beside the first."""
_CHANGED = ("makespan_min", "utilization_percent", "completion_min")


def cases(name: str, experiment: Experiment) -> list[Experiment]:
    """Return an experiment as assumed and otherwise, for its first line, some others and some of Carpool's."""
    if name not in CASES:
        return []
    draws, beside = CASES[name]
    pieces = {f"{share:.0%} of shared memory lost in pieces": in_pieces(experiment.draw, share) for share in IN_PIECES}
    own = [one for one in ours(experiment.mode) if one.name in (DEFAULT, ARRIVAL, LONGEST_FIRST)]
    first, *others = experiment.published
    lines = [first, *(one for one in others if one.name in beside), *own]
    return [
        replace(experiment, draw=draw, published=[replace(one, name=_called(one.name, case)) for one in lines])
        for case, draw in {ASSUMED: experiment.draw, **draws, **pieces}.items()
    ]


def strategies(name: str, experiment: Experiment) -> list[Strategy]:
    """Return the lines of all cases."""
    return [one for case in cases(name, experiment) for one in case.published]


def section(found: Mapping[str, Sequence[Line]]) -> list[str]:
    """Write the section; nothing where no experiment has such results.

    Args:
        found: The lines of `strategies` by experiment.
    """
    if not found:
        return []
    parts = [
        f"## {TITLE}",
        "",
        "The works that are answered do not say all that a simulator has to know. What is assumed stands with each "
        "experiment below; here it is otherwise, one assumption at a time; that allocators of several tenants lose no "
        "memory in pieces, which no decision knows of, is one of them. Changes are against the first line of the "
        "same case. Beside Carpool stand strategies with published figures, by which to see which assumption comes "
        "nearest to what was run.",
        "",
        *([radrm.OPEN, ""] if any(name.startswith("radrm") for name in found) else []),
    ]
    known = fits(found)
    return parts + [part for name, lines in found.items() for part in _of_one(name, lines, known)]


def by_case(lines: Sequence[Line]) -> dict[str, dict[str, Line]]:
    """Return the lines of each case by strategy, the first one ahead."""
    found: dict[str, dict[str, Line]] = {}
    for line in lines:
        strategy, _, case = line.strategy.name.removesuffix(")").rpartition(" (")
        found.setdefault(case, {})[strategy] = line
    return found


def place() -> str:
    """Return where the section stands in a document."""
    return "#" + TITLE.lower().replace(" ", "-")


def _called(name: str, case: str) -> str:
    return f"{name} ({case})"


def fits(found: Mapping[str, Sequence[Line]]) -> dict[str, Power]:
    """Return what RAD-RM's GPUs draw in each case, by the energies that were published of its 60 tasks.

    A case is left out in which they would draw less the busier they are: there those energies tell nothing of power.
    """
    cases = by_case(found.get(energies.PUBLISHED_OF, ()))
    powers = {case: energies.refitted(known) for case, known in cases.items()}
    return {case: power for case, power in powers.items() if power.full_w > power.awake_w}


def _of_one(name: str, lines: Sequence[Line], powers: Mapping[str, Power]) -> list[str]:
    error = "" if len(lines[0].runs) == 1 else ", ± standard error"
    heads = [tables.HEADS[one].rsplit(" ", 1)[0] for one in _CHANGED]
    heads += ["energy", *(tables.HEADS[one] for one in ("slowed_percent", "oom"))]
    of_radrm = powers if name.startswith("radrm") else {}
    cases = by_case(lines)
    about = [f"**{name}**, {counted(len(lines[0].runs), 'seed')}{error}.", *_energies(name, of_radrm, len(cases))]
    return [
        " ".join(about),
        "",
        f"| | strategy | published | {' | '.join(heads)} |",
        f"|---|---|---|{'---|' * len(heads)}",
        *(row for case, known in cases.items() for row in _rows(case, known, of_radrm.get(case))),
        "",
    ]


def _energies(name: str, powers: Mapping[str, Power], cases: int) -> list[str]:
    if not powers:
        return []
    if name != energies.PUBLISHED_OF:
        return [
            f"Energies are by the same constants as those of {energies.PUBLISHED_OF} in the same case; where none are "
            "named there, by what is assumed."
        ]
    left_out = (
        " Of a case that is not named here the fit says that GPUs draw less the busier they are, which speaks against "
        "it; its energies are by what is assumed."
    )
    return [
        "Energies are by constants that are fitted anew in each case to those that were published of three other "
        f"policies: {', '.join(f'{power} ({case})' for case, power in powers.items())}. An A100 draws about 50 W idle "
        f"and 400 W at most.{left_out if cases > len(powers) else ''}"
    ]


def _rows(case: str, known: Mapping[str, Line], power: Power | None) -> list[str]:
    if power is not None:
        known = {name: energies.drawing(line, power) for name, line in known.items()}
    first, *others = known.values()
    return [
        f"| {case} | {strategy} | {line.strategy.published} | {' | '.join(_cells(line, first))} | "
        f"{line.mean('slowed_percent'):.1f} | {tables.deaths(line.mean('oom'))} |"
        for strategy, line in zip(list(known)[1:], others, strict=True)
    ]


def _cells(line: Line, first: Line) -> list[str]:
    return [paired.percent(paired.change(line, first, one)) for one in (*_CHANGED, "energy_mj")]
