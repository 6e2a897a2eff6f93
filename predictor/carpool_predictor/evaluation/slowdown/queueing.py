"""Learns from Gavel's pairs how much neighbours cost, and how far beyond the median slowdowns lie: needs `train`.

Behind MPS kernels queue in the order of their launch, so that a job of short kernels loses to one of long kernels. Each
job has a weight r for that, as many times as long as its kernels last. Of the jobs i and j::

    s_i = 1 + c * u_i * u_j^k * r_j / r_i

The weights say nothing about tenants that take equal turns and are not shipped. What is left when they are known is c,
how much of the time that a neighbour is in the way lengthens a step, and how wide an upper quantile has to be where
turns are taken. Busy shares are those of solo steps: if the pairs may correct them, too, any c and k will do. How wide
the quantile has to be behind MPS is said by what is foretold of these pairs without weights, SM activity taken to be
what follows from busy shares, and no contention for DRAM, of which nothing is known there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from carpool_core.values import SharingMode
from numpy.typing import NDArray
from scipy.optimize import least_squares

from carpool_predictor.cost_models.slowdown import slowdowns
from carpool_predictor.evaluation.slowdown.gavel import Gavel, Pair
from carpool_predictor.evaluation.slowdown.steps import busy_shares

FITS = 100
"""Tries of a fit to pairs; fewer leave it short of its end."""
FOLDS = 4
SEED = 0
PRIOR = 0.05
"""Pull of the weights towards each other, in logarithms of a slowdown."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Queueing:
    """What the pairs say, and how those were foretold that had no part in what was fitted; arrays are (pairs, 2)."""

    contention: float
    """c, of all pairs."""
    measured: Numbers
    """Slowdowns."""
    weighted: Numbers
    """Slowdowns with c and the weight of each job known from other pairs."""
    side_by_side: Numbers
    """Slowdowns as they are foretold under MPS, SM activity from busy shares."""
    beside: Numbers
    """Busy shares of the other one, from solo throughputs."""


def queueing(gavel: Gavel, exponent: float, holding: float) -> Queueing:
    """Learn from the pairs of jobs whose busy shares are known, and foretell each from the other folds.

    Args:
        gavel: What was measured.
        exponent: p, by which busy shares are worked out from solo steps.
        holding: k, by which a neighbour's busy share says how much it is in the way.
    """
    pairs = Weighted.of(gavel, exponent, holding)
    measured = pairs.measured
    fold = np.random.default_rng(SEED).integers(0, FOLDS, len(measured))
    weighted = np.ones(measured.shape)
    for out in range(FOLDS):
        test = fold == out
        weighted[test] = pairs.only(test).foretell(pairs.only(~test).fit())
    own = pairs.busy
    side_by_side = slowdowns(SharingMode.MPS, own, own**holding, np.zeros(own.shape))
    return Queueing(pairs.contention(), measured, weighted, side_by_side, own[:, ::-1])


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
        """Take the pairs of jobs that were measured at several batch sizes; arguments as of `queueing`."""
        busy = busy_shares(gavel, exponent)
        pairs = [pair for pair in gavel.pairs if pair.one in busy and pair.other in busy]
        place = {job: number for number, job in enumerate(sorted(busy))}
        index = np.array([(place[pair.one], place[pair.other]) for pair in pairs])
        return cls(pairs, np.clip([busy[job] for job in place], 0.01, 0.99), index, holding)

    @property
    def measured(self) -> Numbers:
        """Slowdowns, (pairs, 2)."""
        return np.array([pair.slowdowns for pair in self.pairs])

    @property
    def busy(self) -> Numbers:
        """Busy shares alone, (pairs, 2)."""
        shares: Numbers = self.shares[self.index]
        return shares

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

    def contention(self) -> float:
        """Fit c, and each job's weight."""
        return float(np.exp(self.fit()[-1]))

    def fit(self) -> Numbers:
        """Fit the logarithms of the jobs' weights and, last, of c; shape (jobs + 1,)."""
        measured = self.measured

        def off(numbers: Numbers) -> Numbers:
            missed = np.log(self.foretell(numbers) / measured).ravel()
            return np.concatenate([missed, PRIOR * numbers[:-1]])

        begin = np.zeros(len(self.shares) + 1)
        fitted: Numbers = least_squares(off, begin, loss="soft_l1", f_scale=0.05, max_nfev=FITS).x
        return fitted

    def foretell(self, numbers: Numbers) -> Numbers:
        """Return slowdowns, shape (pairs, 2), from what `fit` returns."""
        one, other = self.index.T
        longer = np.exp(numbers[other] - numbers[one])
        one_holds, other_holds = (self.busy**self.holding).T
        beside = np.stack([longer * other_holds, one_holds / longer], axis=1)
        found: Numbers = 1 + np.exp(numbers[-1]) * self.busy * beside
        return found


def factors(held_out: Queueing, level: float) -> tuple[float, float]:
    """Return how much of a neighbour's busy share to add, so that this share of slowdowns stays below.

    Returns:
        Of tenants that take turns, and of tenants under MPS.
    """
    return _factor(held_out.weighted, held_out, level), _factor(held_out.side_by_side, held_out, level)


def _factor(foretold: Numbers, held_out: Queueing, level: float) -> float:
    return round(max(0.0, float(np.quantile((held_out.measured - foretold) / held_out.beside, level))), 3)
