"""Fits the memory model on measured runs. Needs NumPy and scikit-learn: the extra `carpool[train]`.

Families (timm modules) are dealt into folds, and line and trees are fitted without one fold and judged on it, and so is
the score that divides rows into strata. What is then taken over the rows of all families at once (the edges of the
strata, their factors, the class) are quantiles of those ratios of measured to predicted. Nothing here is judged on the
rows that are passed: whoever judges (`evaluation`) holds other families back from all of it.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from carpool_core.resources.features import ModelFeatures
from carpool_core.values import MIB, Precision
from numpy.typing import NDArray

from carpool_predictor.catalog import store
from carpool_predictor.evaluation.memory.bound import Bound, fit_bound, short
from carpool_predictor.evaluation.memory.measurements import PRODUCT, Row
from carpool_predictor.features import StepCost, cost_at
from carpool_predictor.models.memory import (
    COLUMNS,
    FORMAT,
    MAX_CORRECTION,
    MemoryModel,
    Pair,
    class_width_mib,
    fit_line,
    row_of,
)
from carpool_predictor.models.trees import Forest

COVERAGE = 0.95
TOO_SMALL = 0.014
"""Share of rows, families held out, whose class may be too small: a little less than the 1.5% asked for."""
FOLDS = 5
SETTINGS: Mapping[str, object] = {
    "n_estimators": 120,
    "max_depth": 3,
    "learning_rate": 0.06,
    "subsample": 0.5,
    "min_samples_leaf": 15,
    "max_features": 0.5,
    "loss": "huber",
    "alpha": 0.8,
}
"""Of scikit-learn's GradientBoostingRegressor; small trees, little trust in outliers."""
_MARGIN = 0.1
"""The hull reaches this share of a column's range beyond it."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured run with its simulation."""

    model: str
    family: str
    batch_size: int
    measured_mib: float
    fake_tensor_mib: float
    features: ModelFeatures
    cost: StepCost

    @property
    def reserved_mib(self) -> float:
        """What the allocator was simulated to hold."""
        return self.cost.reserved_bytes / MIB


def samples_of(rows: Iterable[Row], traced: Mapping[str, ModelFeatures]) -> list[Sample]:
    """Pair measured runs with the simulation of their models; rows of models that were not traced are left out."""
    return [
        Sample(
            row.model,
            row.family,
            row.batch_size,
            row.peak_mib,
            row.fake_tensor_mib,
            found,
            cost_at(found, row.batch_size),
        )
        for row in rows
        if (found := traced.get(row.model)) is not None
    ]


def traced_models(names: Iterable[str]) -> dict[str, ModelFeatures]:
    """Look measured timm models up as the measured release built them; models that were not traced are left out."""
    found = {n: store.measured().record(f"timm/{n}") or store.shipped().record(f"timm/{n}") for n in names}
    return {name: record.features() for name, record in found.items() if record is not None}


def deal(names: Iterable[str], parts: int, seed: int) -> list[frozenset[str]]:
    """Deal names into parts of nearly equal size, at random."""
    ordered = sorted(set(names))
    random.Random(seed).shuffle(ordered)  # noqa: S311  (a reproducible split, no secret)
    return [frozenset(ordered[i::parts]) for i in range(parts)]


@dataclass(frozen=True, slots=True)
class _Fit:
    slope: float
    intercept: float
    forest: Forest

    def log_medians(self, samples: Sequence[Sample]) -> Floats:
        lines = np.array([self.slope * s.reserved_mib + self.intercept for s in samples])
        answers = [self.forest.predict(row_of(s.features, s.cost, s.batch_size)) for s in samples]
        corrected: Floats = np.log(lines) + np.clip(answers, -MAX_CORRECTION, MAX_CORRECTION)
        return corrected


def _fit(samples: Sequence[Sample], seed: int) -> _Fit:
    from sklearn.ensemble import GradientBoostingRegressor

    slope, intercept = fit_line([Pair(s.reserved_mib, s.measured_mib) for s in samples])
    rows = np.array([row_of(s.features, s.cost, s.batch_size) for s in samples])
    lines = np.array([slope * s.reserved_mib + intercept for s in samples])
    ratios = np.clip(np.log([s.measured_mib for s in samples]) - np.log(lines), -MAX_CORRECTION, MAX_CORRECTION)
    boosted = GradientBoostingRegressor(random_state=seed, **SETTINGS).fit(rows, ratios)
    return _Fit(slope, intercept, export(boosted))


def export(boosted: Any) -> Forest:
    """Return the trees of a fitted GradientBoostingRegressor as plain lists."""
    lists: dict[str, list[Any]] = {key: [] for key in ("roots", "feature", "threshold", "left", "right", "value")}
    for stage in boosted.estimators_:
        tree, first = stage[0].tree_, len(lists["feature"])
        inner = (tree.children_left > 0).tolist()
        lists["roots"].append(first)
        lists["feature"] += [int(f) if i else -1 for f, i in zip(tree.feature, inner, strict=True)]
        lists["threshold"] += [short(t) if i else 0.0 for t, i in zip(tree.threshold, inner, strict=True)]
        lists["left"] += [first + int(child) if i else 0 for child, i in zip(tree.children_left, inner, strict=True)]
        lists["right"] += [first + int(child) if i else 0 for child, i in zip(tree.children_right, inner, strict=True)]
        values = np.ravel(tree.value) * boosted.learning_rate
        lists["value"] += [0.0 if i else short(v) for v, i in zip(values, inner, strict=True)]
    return Forest(base=float(np.ravel(boosted.init_.constant_)[0]), **lists)


def fit(samples: Sequence[Sample], *, seed: int, version: str = "") -> MemoryModel:
    """Fit line, trees, hull and bound.

    Args:
        samples: Measured runs, all of the stack that the model is for.
        seed: Seed of folds and trees; the same seed gives the same bytes.
        version: Version of the numbers.
    """
    whole = _fit(samples, seed)
    scores = out_of_fold(samples, lambda s: _fit(s, seed).log_medians, seed)
    rows = np.array([row_of(s.features, s.cost, s.batch_size) for s in samples])
    families = [s.family for s in samples]
    bound = fit_bound(rows, scores, families, deal(families, FOLDS, seed), COVERAGE)
    low, high = rows.min(axis=0), rows.max(axis=0)
    margin = _MARGIN * (high - low) + 1e-4  # rounding must not push a constant column outside
    return MemoryModel(
        format=FORMAT,
        version=version,
        product=PRODUCT,
        precision=Precision.FP32,
        slope=round(whole.slope, 4),
        intercept_mib=round(whole.intercept, 1),
        columns=list(COLUMNS),
        residual=whole.forest,
        hull=[(short(a), short(b)) for a, b in zip(low - margin, high + margin, strict=True)],
        risk=bound.risk,
        factors=list(bound.factors),
        class_share=_class_share(samples, scores, bound),
        coverage=COVERAGE,
        provenance={"bound_level": round(bound.level, 4)},
    )


Judge = Callable[[Sequence[Sample]], Floats]


def out_of_fold(samples: Sequence[Sample], fitted: Callable[[Sequence[Sample]], Judge], seed: int) -> Floats:
    """Return log(measured / median) of each sample, its family held out.

    Args:
        samples: Measured runs.
        fitted: Fits on samples and returns a function to the logarithm of the median.
        seed: Seed of the folds.
    """
    scores = np.zeros(len(samples))
    for fold in deal((s.family for s in samples), FOLDS, seed):
        judge = fitted([s for s in samples if s.family not in fold])
        held = [i for i, s in enumerate(samples) if s.family in fold]
        if held:
            chosen = [samples[i] for i in held]
            scores[held] = np.log([s.measured_mib for s in chosen]) - judge(chosen)
    return scores


def _class_share(samples: Sequence[Sample], scores: Floats, bound: Bound) -> float:
    """Return the smallest share of the way from median to bound whose class is rarely too small.

    Too small a class ends a job, too large a one wastes a slice: two errors of different cost, so that the class has a
    level of its own. The loss never rises along the way, which is what conformal risk control asks for (Angelopoulos
    et al., ICLR '24): with n rows, `(n · loss + 1) / (n + 1)` is held to `TOO_SMALL`.
    """
    measured = np.array([s.measured_mib for s in samples])
    widths = np.array([class_width_mib(s.features.layers) for s in samples])
    steps = np.log(bound.factors)[bound.strata]
    medians, classes = measured / np.exp(scores), np.ceil(measured / widths)
    for percent in range(100):
        small = np.sum(np.ceil(medians * np.exp(steps * percent / 100) / widths) < classes)
        if small + 1 <= TOO_SMALL * (len(samples) + 1):
            return percent / 100
    return 1.0
