"""How far above the median the bound lies: for steps that are likely to exceed it further than for others.

Peaks far above the median are rare, and mostly of large convolutional models. A linear score of a step's columns says
how likely it exceeds its median by a tenth; steps are divided by that score into strata, and each stratum has a factor
of its own (Mondrian conformal prediction). Which quantile it is taken at is decided for families, not for rows: the
next job is of a family that nobody measured. So a family's rows count together as one (Dunn, Wasserman and Ramdas,
JASA 2022, who pool the groups' distributions and give the next group the weight of one that exceeds everything).

Needs NumPy and scikit-learn: the extra `carpool[train]`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.models.memory import Risk

EXCEEDS = math.log(1.1)
"""What the score foretells: that a peak exceeds its median by a tenth."""
SHARES = (0.6, 0.9)
"""Shares of the rows below which the strata end, by ascending score."""
_PENALTY = 0.1
"""Of the logistic regression (scikit-learn's C): some columns say nearly the same."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bound:
    """What the bound is made of, and where the rows lie that it was made from."""

    risk: Risk
    factors: tuple[float, ...]
    """Bound over median of each stratum."""
    level: float
    """Quantile of each stratum's scores that its factor is."""
    strata: NDArray[np.intp]
    """Stratum of each row: its score is fitted without its family; edges are quantiles over all rows."""


def fit_bound(
    rows: Floats, scores: Floats, families: Sequence[str], folds: Sequence[frozenset[str]], coverage: float
) -> Bound:
    """Divide steps into strata, and take a factor for each.

    Args:
        rows: Columns of each step, as `memory_row.row_of` has them.
        scores: Logarithm of measured over median of each, its family held out.
        families: Family of each.
        folds: Families that are held out together.
        coverage: Share of a new family's rows that the bound is to hold, on average over families.
    """
    names = np.array(families)
    exceeds = scores > EXCEEDS
    odds = np.zeros(len(scores))
    for fold in folds:
        held = np.isin(names, sorted(fold))
        weights, intercept = _logistic(rows[~held], exceeds[~held])
        odds[held] = rows[held] @ weights + intercept
    edges = np.quantile(odds, SHARES)
    strata = np.searchsorted(edges, odds, side="right")
    level = family_level(ranks_in_strata(scores, strata, names), names, coverage)
    weights, intercept = _logistic(rows, exceeds)
    risk = Risk(weights=[short(w) for w in weights], intercept=short(intercept), edges=[short(e) for e in edges])
    return Bound(risk, _factors(scores, strata, level), level, strata)


def _logistic(rows: Floats, exceeds: NDArray[np.bool_]) -> tuple[Floats, float]:
    """Fit the logarithm of the odds that a step exceeds its median by much, linear in its columns."""
    if exceeds.all() or not exceeds.any():
        return np.zeros(rows.shape[1]), 0.0
    from sklearn.linear_model import LogisticRegression

    mean, spread = rows.mean(axis=0), rows.std(axis=0) + 1e-9
    fitted = LogisticRegression(C=_PENALTY, max_iter=1000).fit((rows - mean) / spread, exceeds)
    weights: Floats = fitted.coef_[0] / spread
    return weights, float(fitted.intercept_[0] - weights @ mean)


def ranks_in_strata(scores: Floats, strata: NDArray[np.intp], families: NDArray[np.str_]) -> Floats:
    """Return the share of each row's stratum that lies below it, not counting rows of its own family."""
    ranks = np.zeros(len(scores))
    for stratum in np.unique(strata):
        inside = np.flatnonzero(strata == stratum)
        for family in np.unique(families[inside]):
            own = inside[families[inside] == family]
            others = np.sort(scores[inside[families[inside] != family]])
            ranks[own] = np.searchsorted(others, scores[own], side="left") / (len(others) + 1)
    return ranks


def family_level(ranks: Floats, families: NDArray[np.str_], coverage: float) -> float:
    """Return the rank below which lies a share of rows, each family counting as one, and the next one as above all."""
    names, counts = np.unique(families, return_counts=True)
    weights = 1 / counts[np.searchsorted(names, families)] / len(names)
    order = np.argsort(ranks, kind="stable")
    held = np.cumsum(weights[order])
    first = int(np.searchsorted(held, coverage * (1 + 1 / len(names)) - 1e-9))
    return float(ranks[order[min(first, len(order) - 1)]])


def _factors(scores: Floats, strata: NDArray[np.intp], level: float) -> tuple[float, ...]:
    found = [conformal_quantile(scores[strata == stratum].tolist(), level) for stratum in range(len(SHARES) + 1)]
    # A likelier step never has a smaller factor, and no bound lies below the median.
    return tuple(round(math.exp(max(0.0, *found[: i + 1])), 4) for i in range(len(found)))


def conformal_quantile(scores: Sequence[float], level: float) -> float:
    """Return the conformal quantile: that of n + 1 scores, the unseen one among them; 0 of none.

    Args:
        scores: Those that were seen.
        level: Share that is to lie below, 0..1; at 0 it is the smallest of them.
    """
    if not 0 <= level <= 1:
        raise ValueError(f"expected a level between 0 and 1, found {level}")
    ordered = sorted(scores)
    rank = math.ceil((len(ordered) + 1) * level)
    return ordered[min(max(rank, 1), len(ordered)) - 1] if ordered else 0.0


def short(number: float) -> float:
    """Return a number as artifacts write it: with seven digits, which more do not improve."""
    return float(f"{number:.7g}")
