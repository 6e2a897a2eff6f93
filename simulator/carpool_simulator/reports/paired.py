"""How lines differ seed by seed, which takes out what seeds have in common, and which differences are no noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import atan, cos, floor, log10, pi, sin, sqrt
from statistics import fmean, stdev

from carpool_simulator.reports import tables
from carpool_simulator.sweep import DEFAULT_POLICY, Line

BEYOND = 2.0
"""Standard errors beyond which a difference is marked."""
WRITTEN = 1e-5
"""Share of a figure that its six digits in a file may leave out: what differs by less is the same."""
HANGING = "of separate lines and figures: those that hang together are"
"""Of what a rate of marks by chance tells, as words before how such are marked."""


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
            return f"{self.mean:+,.{max(2, _digits(self.mean))}f}" if self.mean else "="
        digits = _digits(self.error)
        return f"{self.mean:+z,.{digits}f} ± {self.error:,.{digits}f}"


def _digits(number: float) -> int:
    """Return how many decimals show two digits of a number."""
    return max(0, 1 - floor(log10(abs(number))))


def difference(line: Line, other: Line, name: str) -> Difference:
    """Compare a figure of two lines that were run on the same seeds.

    Args:
        line: The one of which it is told.
        other: What is taken off.
        name: The figure's.
    """
    pairs = _pairs(line, other, name)
    of_each = [0.0 if abs(a - b) < WRITTEN * max(abs(a), abs(b)) else a - b for a, b in pairs]
    return Difference(fmean(of_each), _error(of_each, fmean(max(abs(a), abs(b)) for a, b in pairs)))


def change(line: Line, other: Line, name: str) -> Difference:
    """Compare the means of a figure over the same seeds, in percent of the other's.

    The error is that of a ratio of means, which takes out what seeds have in common (Cochran, Sampling Techniques,
    1977, chapter 6).

    Args:
        line: The one of which it is told.
        other: What it is a change against.
        name: The figure's.
    """
    pairs = _pairs(line, other, name)
    mean = tables.change(line, other, name)
    size = max(1e-9, other.mean(name))
    error = _error([a - (1 + mean / 100) * b for a, b in pairs], size)
    return Difference(mean, None if error is None else 100 * error / size)


def percent(found: Difference) -> str:
    """Write a change in percent; without its error where there is none, or where nobody knows it."""
    return f"{found}%" if found.error else f"{found.mean:+z.1f}%"


def _pairs(line: Line, other: Line, name: str) -> list[tuple[float, float]]:
    return [(getattr(a, name), getattr(b, name)) for a, b in zip(line.runs, other.runs, strict=True)]


def _error(of_each: Sequence[float], size: float) -> float | None:
    """Return the standard error of a mean; 0 where it is no more than digits leave out, None of one seed."""
    if len(of_each) == 1:
        return None
    error = stdev(of_each) / sqrt(len(of_each))
    return 0.0 if error < WRITTEN * abs(size) else error


def apart(known: Sequence[Line], policies: Sequence[Line]) -> list[Line]:
    """Return lines of policies, those that are called as another line under a name of their own.

    Args:
        known: The lines of an experiment, of which a published one may have a policy's name.
        policies: The lines of single policies.
    """
    names = {line.strategy.name for line in known}
    return [
        replace(line, strategy=replace(line.strategy, name=f"policy {line.strategy.name}"))
        if line.strategy.name in names
        else line
        for line in policies
    ]


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


def table(ours: Line, others: Sequence[Line], figures: Sequence[str]) -> list[str]:
    """Write how each line differs from the default on the same seed; nothing of one seed.

    Args:
        ours: The default.
        others: All that it is compared with; the default's own policy, and itself, are left out.
        figures: Names of those that are compared.
    """
    seeds = len(ours.runs)
    shown = [line for line in others if line.strategy.name not in (ours.strategy.name, DEFAULT_POLICY)]
    if seeds == 1 or not shown:
        return []
    return [
        f'Against "{ours.strategy.name}" on the same seed: mean difference ± standard error over {seeds} '
        f"seeds; `=` is the same on each. Bold is beyond {BEYOND:g} standard errors; where nothing differs, one in "
        f"{1 / by_chance(seeds):.0f} would be, too, {HANGING} bold together.",
        "",
        f"| less the default's | {' | '.join(tables.HEADS[name] for name in figures)} |",
        f"|---|{'---|' * len(figures)}",
        *(f"| {line.strategy.name} | {' | '.join(_marked(line, ours, name) for name in figures)} |" for line in shown),
        "",
    ]


def _marked(line: Line, ours: Line, name: str) -> str:
    found = difference(line, ours, name)
    return f"**{found}**" if found.is_beyond else str(found)
