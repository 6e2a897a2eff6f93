"""Says who does better than Carpool's default: of several seeds beyond noise, of one seed as it came."""

from collections.abc import Mapping, Sequence

from carpool_extender.framework.diagnosis import pluralize

from carpool_simulator.reports import tables
from carpool_simulator.reports.paired import HANGING, Difference, by_chance, difference
from carpool_simulator.reports.results import Results
from carpool_simulator.sweep import DEFAULT, DEFAULT_POLICY, Line

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
        "Who does better than the default without an oracle's knowledge, by how much. Of several seeds it is the mean "
        "difference on the same seed ± its standard error, where that is beyond two standard errors. A cell is empty "
        "where a line does no better, or better by less than that; what it loses there stands in the tables of "
        "differences below, of several seeds. Lines that came to the same on each seed share a row.",
        "",
    ]
    for name, (about, known) in found.items():
        ours = next((line for line in known if line.strategy.name == DEFAULT), None)
        if ours is not None:
            tried = [one for one in policies.get(name, ()) if one.strategy.name != DEFAULT_POLICY]
            parts += _of_one(name, ours, _alike(ours, [*known, *tried]), about.shown or tables.SHOWN)
    return parts


def _alike(ours: Line, others: Sequence[Line]) -> list[tuple[list[str], Line]]:
    """Put lines together that came to the same, under all their names; an oracle's and the default's own not."""
    together: list[tuple[list[str], Line]] = []
    for line in others:
        if line is ours or "oracle" in line.strategy.name:
            continue
        same = next((names for names, other in together if other.runs == line.runs), None)
        if same is None:
            together.append(([line.strategy.name], line))
        else:
            same.append(line.strategy.name)
    return together


def _of_one(name: str, ours: Line, others: Sequence[tuple[list[str], Line]], figures: Sequence[str]) -> list[str]:
    better = [("; ".join(names), _better(line, ours, figures)) for names, line in others]
    rows = [(names, gains) for names, gains in better if gains]
    seeds = len(ours.runs)
    if not rows:
        return [f"**{name}**, {pluralize(seeds, 'seed')}: nobody.", ""]
    columns = [figure for figure in figures if any(figure in gains for _, gains in rows)]
    return [
        f"**{name}**, {pluralize(seeds, 'seed')}: {_noise(seeds)}.",
        "",
        f"| | {' | '.join(tables.HEADS[figure] for figure in columns)} |",
        f"|---|{'---|' * len(columns)}",
        f"| the default | {' | '.join(f'{ours.mean(figure):,.1f}' for figure in columns)} |",
        *(f"| {names} | {' | '.join(str(gains.get(figure, '')) for figure in columns)} |" for names, gains in rows),
        "",
    ]


def _better(line: Line, ours: Line, figures: Sequence[str]) -> dict[str, Difference]:
    """Return by how much a line is better, of the figures of which it is."""
    every = {figure: difference(line, ours, figure) for figure in figures}
    return {figure: told for figure, told in every.items() if _is_better(told, ours, figure)}


def _noise(seeds: int) -> str:
    """Say what of a table may be nothing."""
    if seeds == 1:
        return f"nobody knows what is noise; what differs by less than {LEAST_CHANGE:.1%} is left out"
    return (
        f"where nothing differs, one cell in {2 / by_chance(seeds):.0f} would be filled, too, {HANGING} filled together"
    )


def _is_better(told: Difference, ours: Line, figure: str) -> bool:
    gain = told.mean if figure in MORE_IS_BETTER else -told.mean
    if told.error is None:
        return gain > 0 and gain >= LEAST_CHANGE * abs(ours.mean(figure))
    return gain > 0 and told.is_beyond
