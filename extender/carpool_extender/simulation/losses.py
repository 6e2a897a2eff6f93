"""Says who does better than Carpool's default: of several seeds beyond noise, of one seed as it came."""

from collections.abc import Mapping, Sequence

from carpool_extender.refusal import counted
from carpool_extender.simulation import report
from carpool_extender.simulation.contest import DEFAULT, DEFAULT_POLICY, Line
from carpool_extender.simulation.paired import Difference, by_chance, difference
from carpool_extender.simulation.results import Results

MORE_IS_BETTER = frozenset({"utilization_percent", "memory_percent"})
LEAST_CHANGE = 0.001
"""Of one seed a figure must differ by this share of the default's to be told of."""


def section(found: Mapping[str, Results], policies: Mapping[str, Sequence[Line]]) -> list[str]:
    """Write the section.

    Args:
        found: Results by experiment.
        policies: The lines of single policies, where an experiment has some.
    """
    parts = [
        "## Where Carpool loses",
        "",
        "Who does better than the default without an oracle's knowledge, by how much; an empty cell is no loss, or "
        "none that is known. Of several seeds it is the mean difference on the same seed ± its standard error, where "
        "that is beyond two standard errors; what such a line loses on other figures stands in the tables of "
        "differences below. Lines that came to the same on each seed share a row.",
        "",
    ]
    for name, (about, known) in found.items():
        ours = next((line for line in known if line.strategy.name == DEFAULT), None)
        if ours is not None:
            others = [one for one in (*known, *policies.get(name, ())) if one.strategy.name != DEFAULT_POLICY]
            parts += _of_one(name, ours, _alike(ours, others), about.shown or report.SHOWN)
    return parts


def _alike(ours: Line, others: Sequence[Line]) -> dict[str, Line]:
    """Put lines together that came to the same, under all their names; an oracle's and the default's own not."""
    together: dict[str, Line] = {}
    for line in others:
        if line is ours or "oracle" in line.strategy.name:
            continue
        same = next((names for names, other in together.items() if other.runs == line.runs), None)
        if same is None:
            together[line.strategy.name] = line
        else:
            together = {f"{n}; {line.strategy.name}" if n == same else n: one for n, one in together.items()}
    return together


def _of_one(name: str, ours: Line, others: Mapping[str, Line], figures: Sequence[str]) -> list[str]:
    better = {
        (names, figure): told
        for names, line in others.items()
        for figure in figures
        if (told := difference(line, ours, figure)) and _is_better(told, ours, figure)
    }
    seeds = len(ours.runs)
    if not better:
        return [f"**{name}**, {counted(seeds, 'seed')}: nobody.", ""]
    columns = [figure for figure in figures if any(one == figure for _, one in better)]
    rows = [names for names in others if any(one == names for one, _ in better)]
    return [
        f"**{name}**, {counted(seeds, 'seed')}: {_noise(seeds)}.",
        "",
        f"| | {' | '.join(report.HEADS[figure] for figure in columns)} |",
        f"|---|{'---|' * len(columns)}",
        f"| the default | {' | '.join(f'{ours.mean(figure):,.1f}' for figure in columns)} |",
        *(f"| {names} | {' | '.join(str(better.get((names, figure), '')) for figure in columns)} |" for names in rows),
        "",
    ]


def _noise(seeds: int) -> str:
    """Say what of a table may be nothing."""
    if seeds == 1:
        return f"nobody knows what is noise; what differs by less than {LEAST_CHANGE:.1%} is left out"
    return f"where nothing differs, one cell in {2 / by_chance(seeds):.0f} would be filled, too"


def _is_better(told: Difference, ours: Line, figure: str) -> bool:
    gain = told.mean if figure in MORE_IS_BETTER else -told.mean
    if told.error is None:
        return gain > 0 and gain >= LEAST_CHANGE * abs(ours.mean(figure))
    return gain > 0 and told.is_beyond
