"""Selection of the slowdown prior: candidates, splits and score of decision 55. Needs the extra `research`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from carpool_core.values import SharingMode
from carpool_predictor.models.slowdown import MeanValueAnalysis, fair_share, shipped, slowdowns, upper_end
from numpy.typing import NDArray

from carpool_research.slowdown.gavel import Gavel, busy_shares
from carpool_research.slowdown.lucid import Pairs

MODES = (SharingMode.TIME_SLICING, SharingMode.MPS)
SEEDS = range(5)
FOLDS = 5
HIDING = 1.5
"""p of Gavel's steps; see `gavel.most_cautious`."""
GAUSSIAN_ROWS = 500
"""Rows that the Gaussian process is fitted to; its cost grows with their third power."""

Numbers = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Runs of equally many jobs, pairs mostly; the speed is that of the first."""

    busy: Numbers
    """(n, jobs) Busy shares alone, 0..1."""
    sm: Numbers
    """(n, jobs) SM activity alone, 0..1."""
    dram: Numbers
    """(n, jobs) DRAM activity alone, 0..1."""
    is_mps: Bools
    """(n,) Whether the pair ran behind MPS."""
    speed: Numbers
    """(n,) Speed relative to solo."""
    models: Sequence[tuple[str, ...]]
    """(n,) Architectures of the jobs, the first one's first."""

    def where(self, chosen: Bools) -> "Speeds":
        """Return the chosen rows."""
        kept = [models for models, is_chosen in zip(self.models, chosen, strict=True) if is_chosen]
        busy, sm, dram = self.busy[chosen], self.sm[chosen], self.dram[chosen]
        return Speeds(busy, sm, dram, self.is_mps[chosen], self.speed[chosen], kept)

    def __add__(self, other: "Speeds") -> "Speeds":
        """Return the rows of both."""
        return Speeds(
            np.concatenate([self.busy, other.busy]),
            np.concatenate([self.sm, other.sm]),
            np.concatenate([self.dram, other.dram]),
            np.concatenate([self.is_mps, other.is_mps]),
            np.concatenate([self.speed, other.speed]),
            [*self.models, *other.models],
        )


Predict = Callable[[Speeds], Numbers]
Fit = Callable[[Speeds, int], Predict]
"""Fits rows with a seed, and returns a function that predicts speeds."""


def from_lucid(pairs: Pairs) -> Speeds:
    """Return Lucid's pairs, which ran under time-slicing."""
    is_mps = np.zeros(len(pairs.raw), np.bool_)
    return Speeds(pairs.busy, estimated_sm(pairs.busy), pairs.memory, is_mps, 1 / pairs.raw, pairs.models)


def estimated_sm(busy: Numbers) -> Numbers:
    """Return SM activity from busy shares."""
    found: Numbers = busy ** shipped().holding
    return found


def from_gavel(gavel: Gavel) -> Speeds:
    """Return Gavel's pairs, which ran behind MPS, with busy shares from solo steps."""
    busy = busy_shares(gavel, HIDING)
    rows, speeds, models = [], [], []
    for pair in gavel.pairs:
        if pair.one in busy and pair.other in busy:
            rows += [(busy[pair.one], busy[pair.other]), (busy[pair.other], busy[pair.one])]
            speeds += [1 / slowdown for slowdown in pair.slowdowns]
            models += [(pair.one[1], pair.other[1]), (pair.other[1], pair.one[1])]
    shares, is_mps = np.array(rows).reshape(-1, 2), np.ones(len(rows), np.bool_)
    return Speeds(shares, estimated_sm(shares), np.zeros(shares.shape), is_mps, np.array(speeds), models)


def _fixed(slowdown: Callable[[Numbers], Numbers]) -> Fit:
    """Return a candidate that is not fitted: a function from busy shares, (n, jobs), to slowdowns of the first."""
    return lambda _, seed: lambda rows: 1 / np.maximum(1.0, slowdown(rows.busy))


def _mean_value_analysis(holding: float) -> Fit:
    """Return the candidate with k."""
    return _fixed(lambda busy: MeanValueAnalysis(busy, holding).slowdowns()[:, 0])


def hidden_host(busy: Numbers, k: float, p: float) -> tuple[Numbers, Numbers]:
    """Return x and the slowdown by mean-value analysis of steps (1 - u^p + (u x)^p)^(1/p), each shape (n, jobs)."""
    x = np.ones(busy.shape)
    for one in range(busy.shape[1]):
        others = np.delete(busy, one, axis=1)
        without, slowdown = hidden_host(others, k, p)
        x[:, one] += ((others**k + others * (without - 1.0)) / slowdown).sum(axis=1)
    return x, np.maximum(1.0, (1.0 - busy**p + (busy * x) ** p) ** (1 / p))


def shipped_median(rows: Speeds) -> Numbers:
    """Return the slowdowns of the first jobs by the shipped model."""
    turns, mps = (slowdowns(mode, rows.busy, rows.sm, rows.dram)[:, 0] for mode in MODES)
    found: Numbers = np.where(rows.is_mps, mps, turns)
    return found


def shipped_upper(rows: Speeds) -> Numbers:
    """Return the upper ends of their intervals."""
    medians = (slowdowns(mode, rows.busy, rows.sm, rows.dram) for mode in MODES)
    turns, mps = (upper_end(mode, one, rows.busy)[:, 0] for mode, one in zip(MODES, medians, strict=True))
    found: Numbers = np.where(rows.is_mps, mps, turns)
    return found


def _learned(regressor: Callable[[int, int], Any], most: int | None = None) -> Fit:
    """Return a candidate that is fitted: a function from the number of features and a seed to a regressor."""

    def fit(train: Speeds, seed: int) -> Predict:
        has_modes = len(np.unique(train.is_mps)) > 1

        def features(rows: Speeds) -> Numbers:
            return np.column_stack([rows.busy, rows.is_mps]) if has_modes else rows.busy

        chosen = np.random.default_rng(seed).permutation(len(train.speed))[:most]
        fitted = regressor(2 + has_modes, seed).fit(features(train)[chosen], train.speed[chosen])
        return lambda rows: np.clip(fitted.predict(features(rows)), 0.05, 1.0)

    return fit


def _gaussian(features: int, seed: int) -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel(0.1) * RBF([0.5] * features, (0.05, 100)) + WhiteKernel(0.01)
    return GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)


def _monotone(features: int, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(monotonic_cst=[-1, -1, 0][:features], random_state=seed)


def _forest(features: int, seed: int) -> Any:
    from sklearn.ensemble import RandomForestRegressor

    return RandomForestRegressor(min_samples_leaf=5, random_state=seed, n_jobs=1)


CANDIDATES: Mapping[str, Fit] = {
    "no slowdown": _fixed(lambda busy: np.ones(len(busy))),
    "max(1, Σutil)": _fixed(lambda busy: busy.sum(axis=1)),
    "fair share": _fixed(lambda busy: fair_share(busy)[:, 0]),
    "mean-value analysis, k = 1": _mean_value_analysis(1.0),
    "mean-value analysis, k = 1.5": _mean_value_analysis(1.5),
    "the same with hidden host time": _fixed(lambda busy: hidden_host(busy, 1.5, HIDING)[1][:, 0]),
    "shipped": lambda _, seed: lambda rows: 1 / shipped_median(rows),
    "Gaussian process": _learned(_gaussian, GAUSSIAN_ROWS),
    "monotone boosting": _learned(_monotone),
    "random forest": _learned(_forest),
}
"""Candidates, the simplest first."""


@dataclass(frozen=True, slots=True)
class Split:
    """Rows to fit, rows to test, and the seed."""

    train: Speeds
    test: Speeds
    seed: int


def models_held_out(own: Speeds, other: Speeds) -> Iterator[Split]:
    """Yield splits with a fifth of the models held out, for each of `SEEDS`.

    Pairs with a held-out model are tested; the other pairs and the other source train.
    """
    names = sorted(frozenset().union(*own.models))
    for seed in SEEDS:
        for fold in np.array_split(np.random.default_rng(seed).permutation(names), FOLDS):
            tested = np.array([not set(models).isdisjoint(fold.tolist()) for models in own.models])
            if tested.any():
                yield Split(own.where(~tested) + other, own.where(tested), seed)


def splits(lucid: Speeds, gavel: Speeds) -> dict[str, list[Split]]:
    """Return the four kinds of splits by name."""
    return {
        "Lucid, models held out": list(models_held_out(lucid, gavel)),
        "Gavel, models held out": list(models_held_out(gavel, lucid)),
        "Gavel → Lucid": [Split(gavel, lucid, 0)],
        "Lucid → Gavel": [Split(lucid, gavel, 0)],
    }


@dataclass(frozen=True, slots=True)
class Result:
    """Errors of one candidate."""

    errors: Mapping[str, float]
    """Mean absolute speed error of each kind of split."""
    relative: Mapping[str, Sequence[float]]
    """Error of each fold over the error of *no slowdown* in all folds, by kind of split."""

    @property
    def score(self) -> float:
        """Mean over kinds of splits; the lowest wins."""
        return fmean(fmean(folds) for folds in self.relative.values())


def compare(kinds: Mapping[str, Sequence[Split]], chosen: Mapping[str, Fit] = CANDIDATES) -> dict[str, Result]:
    """Return the errors of each candidate."""
    none = {kind: fmean(float(np.abs(1 - s.test.speed).mean()) for s in of) for kind, of in kinds.items()}
    found = {}
    for name, fit in chosen.items():
        folds = {
            kind: [float(np.abs(fit(s.train, s.seed)(s.test) - s.test.speed).mean()) for s in of]
            for kind, of in kinds.items()
        }
        errors = {kind: fmean(of) for kind, of in folds.items()}
        found[name] = Result(errors, {kind: [error / none[kind] for error in of] for kind, of in folds.items()})
    return found


def winner(results: Mapping[str, Result]) -> str:
    """Return the simplest candidate within one standard error, over folds, of the best."""
    best = min(results.values(), key=lambda one: one.score)
    for name, one in results.items():
        more = [a - b for kind, of in one.relative.items() for a, b in zip(of, best.relative[kind], strict=True)]
        # Seeds divide the same rows again, so that only the folds of one seed count.
        if one.score - best.score <= stdev(more) / (len(more) / len(SEEDS)) ** 0.5:
            return name
    raise ValueError("expected at least one candidate, found none")
