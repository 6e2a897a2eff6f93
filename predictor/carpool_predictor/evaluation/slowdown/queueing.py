"""Learns from Gavel's pairs how much of the GPU jobs need, and how far beyond the median slowdowns lie: needs `train`.

Behind MPS kernels queue in the order of their launch, so that a job of short kernels loses to one of long kernels. Each
job has a weight r for that. Of jobs i and j that keep the GPU busy for u of the time when alone::

    s_i = 1 + (b * u_i) * (b * u_j)^k * r_j / r_i

The weights say nothing about tenants that take equal turns and are not shipped. What is left when they are known is b,
and how wide an upper quantile has to be where turns are taken. How wide it has to be behind MPS is said by what is
foretold of these pairs without weights, SM activity taken to be what follows from busy shares, and no contention for
DRAM, of which nothing is known there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from carpool_core.values import SharingMode
from numpy.typing import NDArray
from scipy.optimize import least_squares

from carpool_predictor.cost_models.slowdown import shipped, slowdowns
from carpool_predictor.evaluation.slowdown.gavel import Gavel, Pair
from carpool_predictor.evaluation.slowdown.steps import busy_shares

FITS = 100
"""Tries of a fit to pairs; fewer leave it short of its end."""
FOLDS = 4
SEED = 0
PRIOR = 0.05
"""Pull of weights and corrections towards nothing, in logarithms of a slowdown."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Foretold:
    """How pairs were foretold that had no part in what was fitted, shape (pairs, 2) each."""

    measured: Numbers
    """Slowdowns."""
    weighted: Numbers
    """Slowdowns with b and the weight of each job known from other pairs."""
    side_by_side: Numbers
    """Slowdowns as they are foretold under MPS, SM activity from busy shares."""
    beside: Numbers
    """Busy shares of the other one, from solo throughputs."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """What pairs say."""

    demand: float
    """b."""
    weights: Numbers
    """(jobs,) Logarithm of r."""
    shares: Numbers
    """(jobs,) Busy shares: as they were given, or as they were corrected."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """Pairs whose kernels queue in the order of their launch."""

    pairs: Sequence[Pair]
    shares: Numbers
    """(jobs,) Busy shares alone."""
    index: NDArray[np.intp]
    """(pairs, 2) Jobs of each pair."""
    holding: float
    """k."""

    @classmethod
    def of(cls, gavel: Gavel, exponent: float, holding: float) -> "Weighted":
        """Take the pairs of jobs that were measured at several batch sizes.

        Args:
            gavel: What was measured.
            exponent: p, by which busy shares are worked out from solo steps.
            holding: k, by which a neighbour's busy share says how much it is in the way.
        """
        busy = busy_shares(gavel, exponent)
        pairs = [pair for pair in gavel.pairs if pair.one in busy and pair.other in busy]
        place = {job: number for number, job in enumerate(sorted(busy))}
        index = np.array([(place[pair.one], place[pair.other]) for pair in pairs])
        return cls(pairs, np.clip([busy[job] for job in place], 0.01, 0.99), index, holding)

    @property
    def measured(self) -> Numbers:
        """Slowdowns, (pairs, 2)."""
        return np.array([pair.slowdowns for pair in self.pairs])

    def busy(self, shares: Numbers | None = None) -> Numbers:
        """Return busy shares alone, (pairs, 2); of other shares of the jobs, (jobs,), if these are given."""
        found: Numbers = (self.shares if shares is None else shares)[self.index]
        return found

    def only(self, chosen: NDArray[np.bool_]) -> "Weighted":
        """Return some of the pairs, (pairs,) chosen; jobs keep their places."""
        rows = np.flatnonzero(chosen).tolist()
        return Weighted([self.pairs[row] for row in rows], self.shares, self.index[rows], self.holding)

    def on(self, gpu: str) -> "Weighted":
        """Return the pairs that ran on one kind of GPU."""
        return self.only(np.array([pair.one[0] == gpu for pair in self.pairs]))

    def without(self, jobs: Collection[str]) -> "Weighted":
        """Return the pairs in which none of these jobs is."""
        return self.only(np.array([pair.one[1] not in jobs and pair.other[1] not in jobs for pair in self.pairs]))

    def fit(self, *, corrects: bool = False) -> Fitted:
        """Fit b and each job's weight.

        Args:
            corrects: Whether each job's busy share may be corrected by its pairs, too; no tenant has such pairs.
        """
        measured, jobs = self.measured, len(self.shares)
        logit = np.log(self.shares / (1 - self.shares))

        def read(numbers: Numbers) -> Fitted:
            shares = 1 / (1 + np.exp(-logit - numbers[jobs + 1 :])) if corrects else self.shares
            return Fitted(float(np.exp(numbers[0])), numbers[1 : jobs + 1], shares)

        def off(numbers: Numbers) -> Numbers:
            missed = np.log(self.foretell(read(numbers)) / measured).ravel()
            return np.concatenate([missed, PRIOR * numbers[1:]])

        begin = np.zeros(1 + jobs * (2 if corrects else 1))
        return read(least_squares(off, begin, loss="soft_l1", f_scale=0.05, max_nfev=FITS).x)

    def foretell(self, by: Fitted) -> Numbers:
        """Return slowdowns, shape (pairs, 2)."""
        one, other = self.index.T
        longer = np.exp(by.weights[other] - by.weights[one])
        needed = by.demand * self.busy(by.shares)
        one_holds, other_holds = (needed**self.holding).T
        found: Numbers = 1 + needed * np.stack([longer * other_holds, one_holds / longer], axis=1)
        return found

    def foretell_held_out(self) -> Foretold:
        """Foretell each pair by the other folds."""
        fold = np.random.default_rng(SEED).integers(0, FOLDS, len(self.pairs))
        weighted = np.ones(self.index.shape)
        for out in range(FOLDS):
            test = fold == out
            weighted[test] = self.only(test).foretell(self.only(~test).fit())
        return Foretold(self.measured, weighted, self.side_by_side(), self.busy()[:, ::-1])

    def side_by_side(self) -> Numbers:
        """Return slowdowns as they are foretold under MPS, (pairs, 2)."""
        own = self.busy()
        return slowdowns(SharingMode.MPS, own, own**self.holding, np.zeros(own.shape))


def factors(held_out: Foretold, level: float) -> tuple[float, float]:
    """Return how much of a neighbour's busy share to add, so that this share of slowdowns stays below.

    Returns:
        Of tenants that take turns, and of tenants under MPS.
    """
    return _factor(held_out.weighted, held_out, level), _factor(held_out.side_by_side, held_out, level)


def _factor(foretold: Numbers, held_out: Foretold, level: float) -> float:
    return round(max(0.0, float(np.quantile((held_out.measured - foretold) / held_out.beside, level))), 3)


def upper_by_mps(side_by_side: Numbers, beside: Numbers) -> Numbers:
    """Return the upper quantile that ships for MPS, (pairs, 2), from the median and neighbours' busy shares."""
    upper: Numbers = side_by_side + shipped().side_by_side_factor * beside
    return upper
