"""Fits the memory model to GPUMemNet's measured peaks of timm models."""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from carpool_core.resources.features import ModelFeatures
from carpool_core.values import MIB, Precision
from carpool_predictor.calibration.run_history import FIRST_RUN_FACTOR, FIRST_RUN_FACTOR_UNENFORCED
from carpool_predictor.catalog import store
from carpool_predictor.features import StepCost, cost_at
from carpool_predictor.models.memory import (
    COLUMNS,
    FORMAT,
    MAX_CORRECTION,
    MemoryModel,
    Pair,
    Risk,
    class_width_mib,
    fit_line,
    row_of,
)
from carpool_predictor.models.trees import Forest
from numpy.typing import NDArray

from carpool_research.tables import read_table

FILE = Path("gpumemnet", "timm_a100_40gb.csv")
"""GPUMemNet's timm measurements, below the data folder."""
MEASURED = ("timm_model", "timm_module", "batch_size", "max_gpu_memory_mib", "faketensor_mib")
PRODUCT = "NVIDIA A100-SXM4-40GB"
CAPACITY_MIB = 40960
CENSORED_SHARE = 0.94
"""A peak above this share of the GPU's memory is censored."""
MIN_GROWTH = 1.02
"""Least growth of a peak when the batch doubles."""
MIN_PACE = 0.5
"""Least share of the previous increase that a doubled batch adds; less means that the run had no memory left.

Memory is nearly affine in the batch, so that each doubling adds twice the previous increase."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run."""

    model: str
    family: str
    batch_size: int
    peak_mib: float
    fake_tensor_mib: float = 0.0
    """Published estimate of PyTorch's FakeTensor mode."""


def read_rows(path: Path) -> list[Row]:
    """Read GPUMemNet's timm measurements.

    Raises:
        DataError: The file or a column is missing, or a row cannot be read.
    """
    return read_table(path, MEASURED, _row)


def _row(record: dict[str, str]) -> Row:
    model, family, batch_size, peak, fake = (record[column] for column in MEASURED)
    row = Row(model, family, int(batch_size), float(peak), float(fake or 0))
    if row.batch_size < 1 or not 0 < row.peak_mib < math.inf:
        raise ValueError(f"expected a batch size and a peak above 0, found {batch_size} and {peak}")
    return row


def clean(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of runs that did not die.

    Memory grows with the batch, so that a model's rows count until the first that grows too little. A model without two
    growing rows is dropped, because its first run may have died. Censored peaks are dropped too. The simulation is not
    used.
    """
    kept: list[Row] = []
    by_model: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_model[row.model].append(row)
    for runs in by_model.values():
        runs.sort(key=lambda row: row.batch_size)
        alive, pace = runs[:1], 0.0
        for run in runs[1:]:
            before, added = alive[-1], run.peak_mib - alive[-1].peak_mib
            grown = run.peak_mib > MIN_GROWTH * before.peak_mib and added > MIN_PACE * pace
            if not grown or run.peak_mib > CENSORED_SHARE * CAPACITY_MIB:
                break
            pace = added
            alive.append(run)
        kept += alive if len(alive) > 1 else []
    return kept


EXCEEDS = math.log(1.1)
"""Logarithm of measured over median from which a step counts as risky."""
SHARES = (0.6, 0.9)
"""Upper ends of the strata, as shares of the rows by ascending score."""
_PENALTY = 0.1
"""scikit-learn's C of the logistic regression; some columns are nearly collinear."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bound:
    """Strata and factors of the bound, and the stratum of each row."""

    risk: Risk
    factors: tuple[float, ...]
    """Bound over median of each stratum."""
    level: float
    """Quantile of a stratum's scores that gives its factor."""
    strata: NDArray[np.intp]
    """Stratum of each row, from a score that was fitted without its family."""


def fit_bound(
    rows: Floats, scores: Floats, families: Sequence[str], folds: Sequence[frozenset[str]], coverage: float
) -> Bound:
    """Divide steps into strata, and fit a factor for each.

    Args:
        rows: Columns of each step, from `row_of`.
        scores: Logarithm of measured over median of each step, its family held out.
        families: Family of each step.
        folds: Families that are held out together.
        coverage: Required share of a new family's rows below the bound, on average over families.
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
    """Return each row's rank in its stratum, 0..1, among rows of other families."""
    ranks = np.zeros(len(scores))
    for stratum in np.unique(strata):
        inside = np.flatnonzero(strata == stratum)
        for family in np.unique(families[inside]):
            own = inside[families[inside] == family]
            others = np.sort(scores[inside[families[inside] != family]])
            ranks[own] = np.searchsorted(others, scores[own], side="left") / (len(others) + 1)
    return ranks


def family_level(ranks: Floats, families: NDArray[np.str_], coverage: float) -> float:
    """Return the rank that covers a share of rows, with equal weights of families and a correction for a new one."""
    names, counts = np.unique(families, return_counts=True)
    weights = 1 / counts[np.searchsorted(names, families)] / len(names)
    order = np.argsort(ranks, kind="stable")
    held = np.cumsum(weights[order])
    first = int(np.searchsorted(held, coverage * (1 + 1 / len(names)) - 1e-9))
    return float(ranks[order[min(first, len(order) - 1)]])


def _factors(scores: Floats, strata: NDArray[np.intp], level: float) -> tuple[float, ...]:
    found = [conformal_quantile(scores[strata == stratum].tolist(), level) for stratum in range(len(SHARES) + 1)]
    # Factors ascend with the risk, and no bound lies below the median.
    return tuple(round(math.exp(max(0.0, *found[: i + 1])), 4) for i in range(len(found)))


def conformal_quantile(scores: Sequence[float], level: float) -> float:
    """Return the conformal quantile of n + 1 scores, with the unseen one; 0 without scores.

    Args:
        scores: Scores of measured rows.
        level: Share of scores below, 0..1; 0 gives the smallest.
    """
    if not 0 <= level <= 1:
        raise ValueError(f"expected a level between 0 and 1, found {level}")
    ordered = sorted(scores)
    rank = math.ceil((len(ordered) + 1) * level)
    return ordered[min(max(rank, 1), len(ordered)) - 1] if ordered else 0.0


def short(number: float) -> float:
    """Return a number with seven digits, as artifacts store it."""
    return float(f"{number:.7g}")


ROWS = 0.95
"""Share of a family's rows below the bound from which the family counts as held."""
FEWEST_ROWS = 10
"""Families with fewer rows are omitted."""


class FirstRunFactor(NamedTuple):
    """Factor to the bound of first runs in one situation."""

    where: str
    families: float
    """Required share of held families."""
    shipped: float
    """Factor to the bound."""


FIRST_RUN_FACTORS = (
    FirstRunFactor("a limit enforces the bound (MPS, MIG)", 0.9, FIRST_RUN_FACTOR),
    FirstRunFactor("nothing does (time slicing)", 0.95, FIRST_RUN_FACTOR_UNENFORCED),
)


class Family(NamedTuple):
    """One family's rows."""

    name: str
    ratios: NDArray[np.float64]
    """Measured over bound, ascending."""


def families_of(names: Sequence[str], ratios: NDArray[np.float64]) -> list[Family]:
    """Return the families with enough rows.

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
    """Count the families with at least `ROWS` of their rows below the bound times a factor."""
    return sum(float(np.mean(family.ratios <= by)) >= ROWS for family in families)


def rank(n: int, share: float) -> int:
    """Return the conformal rank among n for a share; n if there are too few."""
    return min(math.ceil(share * (n + 1)), n)


def _ranked(ascending: NDArray[np.float64], share: float) -> float:
    return float(ascending[rank(len(ascending), share) - 1])


COVERAGE = 0.95
TOO_SMALL = 0.014
"""Share of rows whose class may be too small, families held out; slightly less than the goal of 1.5%."""
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
"""Parameters of scikit-learn's GradientBoostingRegressor."""
_MARGIN = 0.1
"""The hull reaches this share of a column's range beyond it."""


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
        """Memory that the simulated allocator holds."""
        return self.cost.reserved_bytes / MIB


def samples_of(rows: Iterable[Row], traced: Mapping[str, ModelFeatures]) -> list[Sample]:
    """Return measured runs with the simulation of their models, without models that were not traced."""
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
    """Return features of timm models as the measured release built them, without models that were not traced."""
    found = {n: store.measured().traced(f"timm/{n}") or store.shipped().traced(f"timm/{n}") for n in names}
    return {name: features for name, features in found.items() if features is not None}


def divide(names: Iterable[str], parts: int, seed: int) -> list[frozenset[str]]:
    """Divide names at random into parts of nearly equal size."""
    ordered = sorted(set(names))
    random.Random(seed).shuffle(ordered)  # noqa: S311  # folds, no secret
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
    bound = fit_bound(rows, scores, families, divide(families, FOLDS, seed), COVERAGE)
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


Estimate = Callable[[Sequence[Sample]], Floats]


def out_of_fold(samples: Sequence[Sample], fitted: Callable[[Sequence[Sample]], Estimate], seed: int) -> Floats:
    """Return log(measured / median) of each sample, its family held out.

    Args:
        samples: Measured runs.
        fitted: Fits on samples and returns a function to the logarithm of the median.
        seed: Seed of the folds.
    """
    scores = np.zeros(len(samples))
    for fold in divide((s.family for s in samples), FOLDS, seed):
        estimate = fitted([s for s in samples if s.family not in fold])
        held = [i for i, s in enumerate(samples) if s.family in fold]
        if held:
            chosen = [samples[i] for i in held]
            scores[held] = np.log([s.measured_mib for s in chosen]) - estimate(chosen)
    return scores


def _class_share(samples: Sequence[Sample], scores: Floats, bound: Bound) -> float:
    """Return the smallest share of the way from median to bound whose class is rarely too small.

    A class that is too small ends a job, and one that is too large wastes memory, so that the class has its own level.
    The loss falls along the way, as conformal risk control requires (Angelopoulos et al., ICLR '24): with n rows,
    `(n · loss + 1) / (n + 1)` is at most `TOO_SMALL`.
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


SEED = 20260101
VERSION = "2026.11.4"
"""Version of the numbers; a change makes waiting jobs predicted again."""


def memory_model(data: Path) -> MemoryModel:
    """Fit the memory model that is shipped.

    Raises:
        DataError: The measurements cannot be read.
    """
    import sklearn

    rows = read_rows(data / FILE)
    traced = traced_models({row.model for row in rows})
    good = clean(rows)
    samples = samples_of(good, traced)
    model = fit(samples, seed=SEED, version=VERSION)
    provenance: dict[str, str | float | int] = {
        "data": "itu-rad/GPUMemNet, Related_works/FakeTensor (timm models, A100-SXM4-40GB, FP32)",
        "rows": len(rows),
        "rows_after_cleaning": len(good),
        "rows_fitted": len(samples),
        "models_traced": len({s.model for s in samples}),
        "families": len({s.family for s in samples}),
        "seed": SEED,
        "scikit_learn": sklearn.__version__,
        **store.shipped().document.versions,
        **model.provenance,
    }
    return msgspec.structs.replace(model, provenance=provenance)


def train_memory(data: Path, out: Path) -> Path:
    """Write `memory.json` below `out`; the same data and seed give the same bytes."""
    path = out / "memory.json"
    content = msgspec.json.encode(memory_model(data)) + b"\n"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
