"""What comes of limits on slowdowns, and of published rules in their place: which pairs share, and who is slowed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.evaluation.slowdown.lucid import Pairs

LIMITS = (1.1, 1.2, 1.5)
"""Of jobs, for the tables of what is held against them; 1.5 is the default."""
HEAD = (
    "| limit | held against | pairs that share | of these beyond the limit | pairs within it that do not share |",
    "|---|---|---|---|---|",
)

Numbers = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Admitted:
    """What came of putting some pairs together, both jobs of which accept the same slowdown."""

    admitted_percent: float
    """Share of the pairs that would have shared."""
    beyond_percent: float
    """Share of these of which one was slowed beyond the limit."""
    missed_percent: float
    """Share of the pairs within the limit that would not have shared."""


def within(slowdowns: Numbers, limit: float) -> Bools:
    """Say of which pairs both jobs stay within a limit.

    Args:
        slowdowns: Of each job of each pair, one after the other, shape (2 * pairs,).
        limit: Slowdown that everybody accepts.
    """
    found: Bools = slowdowns.reshape(-1, 2).max(axis=1) <= limit
    return found


def admitted(would: Bools, measured: Numbers, limit: float) -> Admitted:
    """Say what would have come of letting pairs share.

    Args:
        would: Which would have, shape (pairs,).
        measured: Slowdown of each job of each pair, one after the other, shape (2 * pairs,).
        limit: Slowdown that everybody accepts.
    """
    fine = within(measured, limit)
    return Admitted(
        admitted_percent=100 * float(would.mean()),
        beyond_percent=100 * float((would & ~fine).sum() / max(1, would.sum())),
        missed_percent=100 * float((fine & ~would).sum() / max(1, fine.sum())),
    )


def _joint(most: float) -> Callable[[Pairs], Bools]:
    def rule(pairs: Pairs) -> Bools:
        found: Bools = pairs.busy[::2].sum(axis=1) <= most
        return found

    return rule


def _scored(pairs: Pairs) -> Bools:
    found: Bools = pairs.scores[::2].sum(axis=1) <= MOST_SCORED
    return found


MOST_SCORED = 2
"""Sharing scores of both jobs together that Lucid puts on one GPU (Hu et al., ASPLOS '23)."""
RULES: Mapping[str, Callable[[Pairs], Bools]] = {
    "joint utilization ≤ 100% (HotCloud '20)": _joint(1.0),
    "joint utilization ≤ 80% (RAD-RM, of SM activity)": _joint(0.8),
    "sharing scores ≤ 2 (Lucid)": _scored,
}
"""Published rules by which two jobs share; they know of no limit that jobs accept."""


def rows(measured: Numbers, predicted: Mapping[str, Numbers], rules: Mapping[str, Bools]) -> Iterator[str]:
    """Write the rows below `HEAD`.

    Args:
        measured: Slowdown of each job of each pair, one after the other, shape (2 * pairs,).
        predicted: The same as predicted, by name.
        rules: Which pairs share whatever they accept, by name, shape (pairs,) each.
    """
    for limit in LIMITS:
        would = {name: within(one, limit) for name, one in predicted.items()} | dict(rules)
        for name, those in would.items():
            found = admitted(those, measured, limit)
            cells = (found.admitted_percent, found.beyond_percent, found.missed_percent)
            yield f"| {limit:g} | {name} | {' | '.join(f'{cell:.1f}%' for cell in cells)} |"
