"""What limits on slowdowns come to that predictions are held against, as the scheduler holds them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LIMITS = (1.1, 1.2, 1.5)
"""That jobs set; 1.5 is the default."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Admitted:
    """What came of a limit on slowdowns that predictions were held against, for pairs that both accept the same."""

    admitted_percent: float
    """Share of the pairs that would have shared."""
    beyond_percent: float
    """Share of these of which one was slowed beyond the limit."""
    missed_percent: float
    """Share of the pairs within the limit that would not have shared."""


def admitted(predicted: Numbers, measured: Numbers, limit: float) -> Admitted:
    """Say what would have come of a limit.

    Args:
        predicted: Slowdown of each job of each pair, one after the other, shape (2 * pairs,).
        measured: The same as measured.
        limit: Slowdown that everybody accepts.
    """
    would = (predicted.reshape(-1, 2) <= limit).all(axis=1)
    within = (measured.reshape(-1, 2) <= limit).all(axis=1)
    return Admitted(
        admitted_percent=100 * float(would.mean()),
        beyond_percent=100 * float((would & ~within).sum() / max(1, would.sum())),
        missed_percent=100 * float((within & ~would).sum() / max(1, within.sum())),
    )


def table(median: Numbers, upper: Numbers, measured: Numbers) -> list[str]:
    """Hold limits against the median and the upper quantile; slowdowns as `admitted` takes them."""
    return [
        "| limit | held against | pairs that share | of these beyond the limit | pairs within it that do not share |",
        "|---|---|---|---|---|",
        *(
            _row(limit, name, admitted(predicted, measured, limit))
            for limit in LIMITS
            for name, predicted in (("median", median), ("upper", upper))
        ),
    ]


def _row(limit: float, name: str, found: Admitted) -> str:
    cells = (found.admitted_percent, found.beyond_percent, found.missed_percent)
    return f"| {limit:g} | {name} | {' | '.join(f'{cell:.1f}%' for cell in cells)} |"
