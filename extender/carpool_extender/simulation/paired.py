"""How lines differ seed by seed, which takes out what seeds have in common, and which differences are no noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import atan, cos, floor, log10, pi, sin, sqrt
from statistics import fmean, stdev

from carpool_extender.simulation.contest import DEFAULT_POLICY, Line
from carpool_extender.simulation.report import HEADS

BEYOND = 2.0
"""Standard errors beyond which a difference is marked."""
COMPARED = ("makespan_min", "utilization_percent", "completion_min", "slowed_percent", "energy_mj")
"""Figures that are compared seed by seed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How a figure of one line differs from another line's on the same seeds."""

    mean: float
    error: float | None
    """Standard error of the mean; None of one seed, of which nobody knows it."""

    @property
    def is_beyond(self) -> bool:
        """Whether it is beyond two standard errors."""
        return self.error is not None and abs(self.mean) > BEYOND * self.error

    def __str__(self) -> str:
        """Write the mean and its error, of which two digits count; `=` where all seeds agree."""
        if not self.error:
            return f"{self.mean:+.2f}" if self.mean else "="
        digits = max(0, 1 - floor(log10(self.error)))
        return f"{self.mean:+,.{digits}f} ± {self.error:,.{digits}f}"


def difference(line: Line, other: Line, name: str) -> Difference:
    """Compare a figure of two lines that were run on the same seeds.

    Args:
        line: The one of which it is told.
        other: What is taken off.
        name: The figure's.
    """
    of_each = [getattr(a, name) - getattr(b, name) for a, b in zip(line.runs, other.runs, strict=True)]
    return Difference(fmean(of_each), stdev(of_each) / sqrt(len(of_each)) if len(of_each) > 1 else None)


def by_chance(seeds: int) -> float:
    """Return which share of the differences that are none is beyond two standard errors all the same.

    Student's t on both sides, with one degree of freedom less than seeds (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    freedom = seeds - 1
    angle = atan(BEYOND / sqrt(freedom))
    odd = freedom % 2
    inside, term = 0.0, cos(angle) ** odd
    for power in range(odd, freedom - 1, 2):
        inside += term
        term *= (power + 1) / (power + 2) * cos(angle) ** 2
    inside *= sin(angle)
    return 1 - (2 / pi * (angle + inside) if odd else inside)


def table(ours: Line, others: Sequence[Line]) -> list[str]:
    """Write how each line differs from the default on the same seed; nothing of one seed.

    Args:
        ours: The default.
        others: All that it is compared with; the default's own policy, and itself, are left out.
    """
    seeds = len(ours.runs)
    shown = [line for line in others if line.strategy.name not in (ours.strategy.name, DEFAULT_POLICY)]
    if seeds == 1 or not shown:
        return []
    return [
        f'Against "{ours.strategy.name}" on the same seed: mean difference ± standard error over {seeds} '
        f"seeds; `=` is the same on each. Bold is beyond {BEYOND:g} standard errors; where nothing differs, one in "
        f"{1 / by_chance(seeds):.0f} would be, too.",
        "",
        f"| less the default's | {' | '.join(HEADS[name] for name in COMPARED)} |",
        f"|---|{'---|' * len(COMPARED)}",
        *(f"| {line.strategy.name} | {' | '.join(_marked(line, ours, name) for name in COMPARED)} |" for line in shown),
        "",
    ]


def _marked(line: Line, ours: Line, name: str) -> str:
    found = difference(line, ours, name)
    return f"**{found}**" if found.is_beyond else str(found)
