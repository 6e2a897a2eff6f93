"""How much more room the first run of a job needs than its bound: families of models differ more than models do.

Of the n measured rows of each family, held out, the ⌈p (n + 1)⌉-th of measured over bound is taken, the largest where
there are too few for that; of the answers of m families the ⌈q (m + 1)⌉-th. Both ranks are those of split conformal
prediction (Vovk et al., Algorithmic Learning in a Random World, 2005), which speak of the next row of the next family.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.calibration.run_history import FIRST, FIRST_UNENFORCED

ROWS = 0.95
"""Share of a family's rows that are to be held."""
FEWEST_ROWS = 10
"""Families of fewer rows say too little of theirs."""


class Room(NamedTuple):
    """What first runs count with in one situation."""

    where: str
    families: float
    """Share of families of which so many rows are to be held."""
    shipped: float
    """Factor to the bound."""


ROOMS = (
    Room("a limit enforces the bound (MPS, MIG)", 0.9, FIRST),
    Room("nothing does (time slicing)", 0.95, FIRST_UNENFORCED),
)


class Family(NamedTuple):
    """One family's rows."""

    name: str
    ratios: NDArray[np.float64]
    """Measured over bound, ascending."""


def families_of(names: Sequence[str], ratios: NDArray[np.float64]) -> list[Family]:
    """Collect the families that have enough rows.

    Args:
        names: Family of each row.
        ratios: Measured over bound of each row, shape (rows,).
    """
    of = np.array(names)
    found = [Family(str(name), np.sort(ratios[of == name])) for name in np.unique(of)]
    return [family for family in found if len(family.ratios) >= FEWEST_ROWS]


def factor(families: Sequence[Family], share: float) -> float:
    """Return the factor to the bound that holds `ROWS` of the rows of a share of the families.

    Raises:
        ValueError: There is no family.
    """
    if not families:
        raise ValueError(f"expected at least one family of {FEWEST_ROWS} rows or more, found none")
    return _ranked(np.sort([_ranked(family.ratios, ROWS) for family in families]), share)


def held(families: Sequence[Family], by: float) -> int:
    """Count the families of which a factor to the bound holds `ROWS` of the rows."""
    return sum(float(np.mean(family.ratios <= by)) >= ROWS for family in families)


def rank(n: int, share: float) -> int:
    """Return the rank among n that the next one lies below with such a share; the largest where there are too few."""
    return min(math.ceil(share * (n + 1)), n)


def _ranked(ascending: NDArray[np.float64], share: float) -> float:
    return float(ascending[rank(len(ascending), share) - 1])
