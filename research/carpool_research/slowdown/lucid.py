"""Lucid's measured pairs, for evaluation only, and baselines of the shipped slowdown model."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from carpool_core.values import SharingMode
from carpool_predictor.models.slowdown import MeanValueAnalysis, slowdowns, upper_end
from numpy.typing import NDArray

from carpool_research.tables import number, read_table

SOLO, PAIRED = Path("lucid", "solo_rtx3090.csv"), Path("lucid", "colocate_rtx3090.csv")
_KEY = ("model", "batchsize", "amp")
SOLO_COLUMNS = (*_KEY, "gpu_util", "gmem_util", "gmem", "label")
PAIRED_COLUMNS = tuple(f"{column}{which}" for which in "12" for column in (*_KEY, "speed"))
FOUND = 1.15
"""Slowdowns above this should be predicted as such."""
BARD_ITERATIONS = 24
SEED = 0
TREES, FOLDS = 50, 5
DRAWS = 2000
"""Bootstrap samples of the jobs."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Every pair in both directions: the slowdown is that of the first."""

    busy: Numbers
    """(n, 2) GPU utilization alone, 0..1."""
    memory: Numbers
    """(n, 2) Utilization of the memory bus alone, 0..1."""
    mib: Numbers
    """(n, 2) GPU memory in use alone, MiB."""
    scores: Numbers
    """(n, 2) Lucid's own sharing scores, 0 to 2; higher scores disturb others more."""
    slowdown: Numbers
    """(n,) Measured slowdown, at least 1."""
    raw: Numbers
    """(n,) Measured slowdown; below 1 if a job ran faster than alone, which is noise."""
    models: Sequence[tuple[str, str]]
    """(n,) Architectures."""
    jobs: Sequence[tuple[str, str]]
    """(n,) Architecture, batch size and precision."""


@dataclass(frozen=True, slots=True)
class Score:
    """Errors of one model on the pairs."""

    error: float
    """Mean absolute error of the slowdown."""
    speed_error: float
    """Mean absolute error of the speed relative to solo, not clipped."""
    found_percent: float
    """Recall of slowdowns above 15%."""
    right_percent: float
    """Precision of slowdowns above 15%."""


def read(data: Path) -> Pairs:
    """Read the pairs and the solo profiles.

    Args:
        data: Folder of measurements.

    Raises:
        DataError: A file or a column is missing, or a row cannot be read.
    """
    solo = dict(read_table(data / SOLO, SOLO_COLUMNS, _solo))
    profiles, raw, models, jobs = [], [], [], []

    def read_pair(row: dict[str, str]) -> None:
        keys = {which: _key(row, which) for which in "12"}
        if unknown := [" ".join(key) for key in keys.values() if key not in solo]:
            raise ValueError(f"expected a job of {SOLO}, found {unknown[0]}")
        for one, other in ("12", "21"):
            mine, its = solo[keys[one]], solo[keys[other]]
            if (speed := number(row, f"speed{one}")) <= 0:
                raise ValueError(f"expected a speed above 0 in speed{one}, found {speed:g}")
            profiles.append((mine, its))
            raw.append(1 / speed)
            models.append((keys[one][0], keys[other][0]))
            jobs.append((" ".join(keys[one]), " ".join(keys[other])))

    read_table(data / PAIRED, PAIRED_COLUMNS, read_pair)
    found = np.array(raw)
    busy, memory, mib, scores = np.moveaxis(np.array(profiles), 2, 0)
    return Pairs(busy, memory, mib, scores, np.maximum(1.0, found), found, models, jobs)


def score(predicted: Numbers, pairs: Pairs) -> Score:
    """Score predictions against the measurements."""
    large, predicted_large = pairs.slowdown > FOUND, predicted > FOUND
    both = (large & predicted_large).sum()
    return Score(
        error=float(np.abs(predicted - pairs.slowdown).mean()),
        speed_error=float(np.abs(1 / predicted - 1 / pairs.raw).mean()),
        found_percent=100 * float(both / max(1, large.sum())),
        right_percent=100 * float(both / max(1, predicted_large.sum())),
    )


class Deviation(NamedTuple):
    """Standard errors of a score."""

    error: float
    speed_error: float
    found_percent: float


def missed(predicted: Numbers, pairs: Pairs) -> Counter[str]:
    """Count missed slowdowns above 15% by the slowed job's architecture."""
    rows = np.flatnonzero((pairs.slowdown > FOUND) & (predicted <= FOUND)).tolist()
    return Counter(pairs.models[row][0] for row in rows)


def deviation(predicted: Numbers, pairs: Pairs) -> Deviation:
    """Return standard errors over jobs by a pigeonhole bootstrap (Owen, Annals of Applied Statistics 2007).

    Pairs with a common job are dependent. Jobs are therefore drawn with replacement, and a pair counts as often as both
    of its jobs were drawn.
    """
    every = {job: i for i, job in enumerate(sorted({job for both in pairs.jobs for job in both}))}
    one, other = np.array([[every[job] for job in both] for both in pairs.jobs]).T
    large = pairs.slowdown > FOUND
    found, wrong = large & (predicted > FOUND), np.abs(predicted - pairs.slowdown)
    wrong_speed = np.abs(1 / predicted - 1 / pairs.raw)
    drawn = np.random.default_rng(SEED).multinomial(len(every), np.full(len(every), 1 / len(every)), DRAWS)
    scores = []
    for times in drawn:
        weight = np.where(one == other, times[one], times[one] * times[other]).astype(float)
        if weight @ large:
            wholes = (weight @ wrong / weight.sum(), weight @ wrong_speed / weight.sum())
            scores.append((*wholes, 100 * (weight @ found) / (weight @ large)))
    return Deviation(*np.std(scores, axis=0).tolist())


def shipped_median(pairs: Pairs) -> Numbers:
    """Predict as the scheduler does."""
    every = np.ones(pairs.busy.shape, np.bool_)
    return slowdowns(SharingMode.TIME_SLICING, pairs.busy, pairs.busy, pairs.memory, every)[:, 0]


def shipped_upper(pairs: Pairs) -> Numbers:
    """Predict the upper quantile."""
    return upper_end(SharingMode.TIME_SLICING, shipped_median(pairs)[:, None], pairs.busy)[:, 0]


def bard(pairs: Pairs) -> Numbers:
    """Predict by Bard's approximate mean-value analysis, in which arrivals see the mean queue of all tenants."""
    busy = pairs.busy
    at_gpu, stay = busy.copy(), busy
    for _ in range(BARD_ITERATIONS):
        stay = busy * (1.0 + at_gpu[:, ::-1])
        at_gpu = stay / (1.0 - busy + stay)
    result: Numbers = (1.0 - busy + stay)[:, 0]
    return result


EXACT = "exact mean-value analysis, nothing fitted (k = 1)"
BASELINES: Mapping[str, Callable[[Pairs], Numbers]] = {
    "no slowdown": lambda pairs: np.ones(len(pairs.slowdown)),
    "min(1, 100/Σutil)": lambda pairs: np.maximum(1.0, pairs.busy.sum(axis=1)),
    "Bard's mean-value analysis, nothing fitted": bard,
    EXACT: lambda pairs: MeanValueAnalysis(pairs.busy, 1.0).slowdowns()[:, 0],
}


def forest(pairs: Pairs) -> Numbers:
    """Predict with a random forest that is fitted to Lucid's other pairs of jobs, as a reference for these features."""
    from sklearn.ensemble import RandomForestRegressor

    features = np.hstack([pairs.busy, pairs.memory, pairs.busy.sum(axis=1, keepdims=True)])
    groups = [frozenset(both) for both in pairs.jobs]
    every = sorted(set(groups), key=sorted)
    number = np.array([every.index(group) for group in groups])
    folds = np.random.default_rng(SEED).integers(0, FOLDS, len(every))
    predicted = np.ones(len(groups))
    for fold in np.unique(folds).tolist():
        test = folds[number] == fold
        trees = RandomForestRegressor(TREES, min_samples_leaf=5, random_state=SEED, n_jobs=1)
        predicted[test] = trees.fit(features[~test], pairs.slowdown[~test]).predict(features[test])
    return np.maximum(1.0, predicted)


def repeated_difference(pairs: Pairs) -> float:
    """Return the mean difference of the slowdowns of two equal jobs on one GPU: the noise of a pair."""
    twins = np.flatnonzero([one == other for one, other in pairs.jobs])
    first, second = pairs.raw[twins[::2]], pairs.raw[twins[1::2]]
    return float(np.abs(first - second).mean())


def _key(row: Mapping[str, str], which: str) -> tuple[str, str, str]:
    return row["model" + which], row["batchsize" + which], row["amp" + which]


def _solo(row: dict[str, str]) -> tuple[tuple[str, str, str], tuple[float, float, float, float]]:
    busy, memory, mib, score = (number(row, column) for column in SOLO_COLUMNS[len(_KEY) :])
    return _key(row, ""), (busy / 100, memory / 100, mib, score)
