"""Evaluates the memory model with families held out and by a random split, and baselines on the same rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

import numpy as np
from carpool_predictor.catalog import store
from carpool_predictor.models.memory import (
    ELSEWHERE_FACTOR,
    OUTSIDE_FACTOR,
    MemoryModel,
    Pair,
    correction_of,
    fit_line,
    predict_memory,
    shipped,
)
from matplotlib.figure import Figure
from numpy.typing import NDArray

from carpool_research.memory.baselines import BASELINES
from carpool_research.memory.fit import (
    COVERAGE,
    EXCEEDS,
    FILE,
    FIRST_RUN_FACTORS,
    MEASURED,
    SHARES,
    TOO_SMALL,
    Row,
    Sample,
    clean,
    divide,
    factor,
    families_of,
    fit,
    held,
    rank,
    read_rows,
    samples_of,
    traced_models,
)
from carpool_research.report import Metric, Progress, Report, counted, markdown, save, silent, write_card
from carpool_research.tables import DataError

SPIKE = 1.3
"""Measured over median from which a row counts as a spike."""
EVENLY = "coverage, each family counting as one"
_ERRORS = ("median error", "p95 error", "right class", "class too small")
_SPLITS = (
    "rows", "median error", "p95 error", "under by more than 10%", "right class", "class too small",
    "right class by the median", "class too small by the median", "right class by the bound",
    "class too small by the bound", "coverage", EVENLY, "bound over actual", "its mean", "worst family", "outside",
)  # fmt: skip


SEED = 20260101
OUTER_FOLDS = 5
FOLD_SEEDS = range(5)
"""Seeds of other divisions into folds."""
FAMILY_ROWS = 90
"""Share of a family's rows, in percent, that the bound should cover."""
CLASS_MIB = 8192
FEWEST_ROWS = 10
"""Rows from which a family can count as the worst one."""

_BY = ("", " by the median", " by the bound")
"""Suffixes of the class metrics: the predicted class, and the classes of median and bound."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Judged:
    """Predictions for held-out samples; arrays have one number per sample."""

    samples: Sequence[Sample]
    median: Floats
    upper: Floats
    classes: Floats
    """Upper edges of the predicted classes, in MiB."""
    inside: NDArray[np.bool_]

    @property
    def measured(self) -> Floats:
        """Measured peaks, in MiB."""
        return np.array([s.measured_mib for s in self.samples])

    @property
    def errors(self) -> Floats:
        """Absolute relative errors of the median."""
        relative: Floats = np.abs(self.median / self.measured - 1)
        return relative

    def where(self, chosen: NDArray[np.bool_]) -> "Judged":
        """Return the chosen samples."""
        kept = [s for s, c in zip(self.samples, chosen, strict=True) if c]
        return Judged(kept, self.median[chosen], self.upper[chosen], self.classes[chosen], self.inside[chosen])

    def figures(self) -> dict[str, float]:
        """Return every figure of the tables; shares in percent."""
        measured, covered = self.measured, self.upper >= self.measured
        right, *named = (np.ceil(v / CLASS_MIB) for v in (measured, self.classes, self.median, self.upper))
        return {
            "rows": len(self.samples),
            "median error": 100 * float(np.median(self.errors)),
            "p95 error": 100 * float(np.quantile(self.errors, 0.95)),
            "under by more than 10%": 100 * float(np.mean(self.median < 0.9 * measured)),
            **{f"right class{by}": 100 * float(np.mean(n == right)) for by, n in zip(_BY, named, strict=True)},
            **{f"class too small{by}": 100 * float(np.mean(n < right)) for by, n in zip(_BY, named, strict=True)},
            "coverage": 100 * float(np.mean(covered)),
            EVENLY: float(np.mean([share for _, _, share in self.families()])),
            "bound over actual": float(np.median(self.upper / measured)),
            "its mean": float(np.mean(self.upper / measured)),
            "worst family": min((share for _, rows, share in self.families() if rows >= FEWEST_ROWS), default=nan),
            "outside": 100 * float(np.mean(~self.inside)),
        }

    def families(self) -> list[tuple[str, int, float]]:
        """Return (family, rows, coverage in percent), the least covered first."""
        names = np.array([s.family for s in self.samples])
        covered = self.upper >= self.measured
        found = [(str(n), int(sum(names == n)), 100 * float(covered[names == n].mean())) for n in np.unique(names)]
        return sorted(found, key=lambda entry: (entry[2], entry[0]))


def apply(model: MemoryModel, samples: Sequence[Sample]) -> Judged:
    """Predict with the shipped code."""
    answers = []
    for sample in samples:
        corrected = correction_of(model, sample.features, sample.cost, sample.batch_size)
        memory = predict_memory(
            sample.cost, sample.features.layers, model, corrected, calibrated=True, context_difference_mib=0
        )
        answers.append((memory.median_mib, memory.upper_mib, memory.class_upper_mib, corrected.inside))
    median, upper, classes, inside = (np.array(column) for column in zip(*answers, strict=True))
    return Judged(samples, median.astype(float), upper.astype(float), classes.astype(float), inside)


Fold = tuple[frozenset[str], MemoryModel]


def fit_folds(
    samples: Sequence[Sample], key: Callable[[Sample], str], what: str, progress: Progress = silent, seed: int = SEED
) -> list[Fold]:
    """Fit without each part of the data.

    Args:
        samples: Samples to fit.
        key: Group that is held out as a whole: the family or the model of a sample.
        what: Name of the groups.
        progress: Receives the current fold.
        seed: Seed of the folds.
    """
    folds = divide(map(key, samples), OUTER_FOLDS, seed)
    return [
        (fold, fit([s for s in samples if key(s) not in fold], seed=seed))
        for fold in counted(folds, f"{what} held out, fold", progress)
    ]


def judge(folds: Sequence[Fold], samples: Sequence[Sample], key: Callable[[Sample], str]) -> Judged:
    """Evaluate each model on its held-out samples."""
    parts = [apply(model, [s for s in samples if key(s) in fold]) for fold, model in folds]
    return Judged(
        [s for part in parts for s in part.samples],
        np.concatenate([part.median for part in parts]),
        np.concatenate([part.upper for part in parts]),
        np.concatenate([part.classes for part in parts]),
        np.concatenate([part.inside for part in parts]),
    )


def baselines(samples: Sequence[Sample], progress: Progress = silent, seed: int = SEED) -> dict[str, dict[str, float]]:
    """Return median and p95 error (%), right class and class too small (%) of each baseline, families held out."""
    table = {}
    for name, estimator in BASELINES.items():
        estimates: list[Floats] = []
        measured: list[float] = []
        for fold in counted(divide((s.family for s in samples), OUTER_FOLDS, seed), f"baseline {name}, fold", progress):
            judged = [s for s in samples if s.family in fold]
            judge = estimator([s for s in samples if s.family not in fold], seed)
            estimates.append(judge(judged))
            measured += [s.measured_mib for s in judged]
        table[name] = _errors(np.concatenate(estimates), np.array(measured))
    return table


def _errors(median: Floats, measured: Floats) -> dict[str, float]:
    errors = np.abs(median / measured - 1)
    classes = np.ceil(median / CLASS_MIB) - np.ceil(measured / CLASS_MIB)
    return {
        "median error": 100 * float(np.median(errors)),
        "p95 error": 100 * float(np.quantile(errors, 0.95)),
        "right class": 100 * float(np.mean(classes == 0)),
        "class too small": 100 * float(np.mean(classes < 0)),
    }


def measured_samples(data: Path) -> tuple[list[Row], list[Sample], list[Sample]]:
    """Return the published rows, and the samples of traced models after and before cleaning."""
    rows = read_rows(data / FILE)
    traced = traced_models({row.model for row in rows})
    return rows, samples_of(clean(rows), traced), samples_of(rows, traced)


def targets(figures: Mapping[str, float], few: float) -> tuple[Metric, ...]:
    """Compare figures with the goals."""
    wanted = (
        ("median error", "≤ 4.0", figures["median error"] <= 4.0),
        ("right class", "≥ 92", figures["right class"] >= 92),
        ("class too small", "≤ 1.5", figures["class too small"] <= 1.5),
        ("coverage", "≥ 95", figures["coverage"] >= 95),
        ("bound over actual", "≤ 1.15", figures["bound over actual"] <= 1.15),
        ("worst family", "≥ 85", figures["worst family"] >= 85),
        ("outside", "≤ 5", figures["outside"] <= 5),
    )
    held = tuple(Metric(name, figures[name], target, met) for name, target, met in wanted)
    return (*held, Metric("median error from 20 jobs of another stack", few, "≤ 5", few <= 5))


def few_jobs(samples: Sequence[Sample], jobs: int, seed: int = SEED) -> float:
    """Return the median error (%) of a line from a few jobs, evaluated on other families.

    It simulates an unseen stack: neither line nor trees of the full fit are used.
    """
    errors: list[float] = []
    rng = np.random.default_rng(seed)
    for fold in divide((s.family for s in samples), OUTER_FOLDS, seed):
        others = [s for s in samples if s.family not in fold]
        for _ in range(10):
            chosen = [others[i] for i in rng.choice(len(others), jobs, replace=False)]
            slope, intercept = fit_line([Pair(s.reserved_mib, s.measured_mib) for s in chosen])
            errors += [
                abs(slope * s.reserved_mib + intercept - s.measured_mib) / s.measured_mib
                for s in samples
                if s.family in fold
            ]
    return 100 * float(np.median(errors))


def _family(sample: Sample) -> str:
    return sample.family


def _model(sample: Sample) -> str:
    return sample.model


def _write(
    out: Path,
    rows: Sequence[Row],
    splits: Mapping[str, Judged],
    others: Mapping[str, Mapping[str, float]],
    few: Mapping[int, float],
    seeds: Mapping[int, Judged],
) -> tuple[Path, ...]:
    """Write `memory.md` and its figures; return their paths."""
    model, by_family = shipped(), next(iter(splits.values()))
    figures = {name: judged.figures() for name, judged in splits.items()}
    names = {row.model for row in rows}
    versions, measured = sorted(store.shipped().document.versions.items()), store.measured().document
    facts = {
        "data": "GPUMemNet's timm measurements (`itu-rad/GPUMemNet`): A100-SXM4-40GB, FP32, batch 8 to 128",
        "rows, before and after cleaning": f"{len(rows):,} and {len(clean(rows)):,}",
        "measured models in the feature store": f"{len(traced_models(names))} of {len(names)}",
        "traced with": ", ".join(f"{name} {version}" for name, version in versions),
        "assumed, because not published": f"timm {measured.versions['timm']}, SGD with momentum, default input",
        "line": "least absolute relative error",
        "trees": "gradient boosting, depth 3, Huber loss, on the logarithm of measured over line",
        "strata": f"by a logistic regression of exceeding the median by {100 * (math.exp(EXCEEDS) - 1):g}%: the lowest "
        f"{100 * SHARES[0]:g}% of rows, the next, the highest {100 * (1 - SHARES[-1]):g}%",
        "bound": f"per stratum the {model.provenance['bound_level']} quantile of measured over median; the level "
        f"covers {100 * COVERAGE:g}% of a new family's rows on average (pooled distributions of groups: Dunn, "
        "Wasserman and Ramdas, JASA 2022)",
        "class": f"smallest share of the way from median to bound at which at most {100 * TOO_SMALL:g}% of rows get "
        "too small a class of 8 GiB (conformal risk control)",
    }
    ours = {"ours": figures["families held out"], **others}
    lowest, reached = next((name, share) for name, count, share in by_family.families() if count >= FEWEST_ROWS)
    of_seeds = [share for judged in seeds.values() for name, _, share in judged.families() if name == lowest]
    texts = {
        "version": model.version,
        "slope": str(model.slope),
        "intercept": str(model.intercept_mib),
        "factors": ", ".join(map(str, model.factors)),
        "share": str(model.class_share),
        "trees": str(len(model.residual.roots)),
        "spikes": str(int(np.sum(by_family.measured > SPIKE * by_family.median))),
        "release": measured.versions["timm"],
        "otherwise": str(len(measured.entries)),
        "lowest": lowest,
        "reached": f"{reached:.2f}%",
        "least": f"{min(of_seeds):.2f}%",
        "most": f"{max(of_seeds):.2f}%",
        "outside": str(OUTSIDE_FACTOR),
        "elsewhere": str(ELSEWHERE_FACTOR),
        "facts": markdown([{"fact": name, "value": value} for name, value in facts.items()]),
        "splits": markdown(
            [{"figure": row} | {name: _cell(row, found[row]) for name, found in figures.items()} for row in _SPLITS]
        ),
        "worst": markdown(
            [
                {"family": name, "rows": str(count), "under the bound": f"{share:.0f}%"}
                for name, count, share in by_family.families()[:12]
            ]
        ),
        "baselines": markdown(
            [{"estimator": name} | {e: _cell(e, found[e]) for e in _ERRORS} for name, found in ours.items()]
        ),
        "few": markdown([{"calibration jobs": str(n), "median error": f"{error:.2f}%"} for n, error in few.items()]),
        "first": markdown(_first_runs(by_family)),
        "seeds": markdown([_by_seed(seed, judged) for seed, judged in seeds.items()]),
    }
    return (write_card(__package__, out / "memory.md", texts), *_draw(by_family, out / "figures"))


def _by_seed(seed: int, judged: Judged) -> dict[str, str]:
    """Return the figures of one division of the families into folds."""
    figures, shares = judged.figures(), [share for _, rows, share in judged.families() if rows >= FEWEST_ROWS]
    names = (EVENLY, "worst family", "bound over actual", "its mean", "right class", "class too small")
    covered = f"{sum(share >= FAMILY_ROWS for share in shares)} of {len(shares)}"
    return {
        "fold seed": str(seed),
        f"families with {FAMILY_ROWS}% of their rows under the bound": covered,
        **{name: _cell(name, figures[name]) for name in names},
    }


def _first_runs(judged: Judged) -> list[dict[str, str]]:
    families = families_of([s.family for s in judged.samples], judged.measured / judged.upper)
    return [
        {
            "where": room.where,
            "families to hold": f"{100 * room.families:g}%",
            "rank among families": f"{rank(len(families), room.families)} of {len(families)}",
            "needs": f"{factor(families, room.families):.3f}",
            "shipped": f"{room.shipped:g}",
            "families held": f"{held(families, room.shipped)} of {len(families)}",
        }
        for room in FIRST_RUN_FACTORS
    ]


def _cell(name: str, value: float) -> str:
    if name == "rows":
        return f"{value:,.0f}"
    return f"{value:.4f}" if name in ("bound over actual", "its mean") else f"{value:.2f}%"


def _draw(judged: Judged, out: Path) -> tuple[Path, ...]:
    """Draw memory: measured over predicted, calibration of the bound, error by family."""
    out.mkdir(parents=True, exist_ok=True)
    return (
        save(_predicted(judged), out / "memory-predicted.svg"),
        save(_calibration(judged), out / "memory-calibration.svg"),
        save(_by_family(judged), out / "memory-families.svg"),
    )


def _predicted(judged: Judged) -> Figure:
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(judged.median / 1024, judged.measured / 1024, s=4, rasterized=True)
    axes.plot([1.5, 45], [1.5, 45], color="grey", linewidth=0.8)
    axes.set(xlabel="predicted (median), GiB", ylabel="measured, GiB", xscale="log", yscale="log")
    return figure


def _calibration(judged: Judged) -> Figure:
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.add_subplot()
    ratios = np.sort(judged.measured / judged.upper)
    axes.plot(ratios, np.linspace(0, 100, len(ratios)))
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.axhline(95, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="measured over bound", ylabel="share of rows, %", xlim=(0.7, 1.3))
    return figure


def _by_family(judged: Judged) -> Figure:
    names = np.array([s.family for s in judged.samples])
    order = sorted(np.unique(names), key=lambda name: float(np.median(judged.errors[names == name])))
    figure = Figure(figsize=(6, 0.16 * len(order) + 1), layout="constrained")
    axes = figure.add_subplot()
    axes.boxplot([100 * judged.errors[names == n] for n in order], orientation="horizontal", sym=".", widths=0.6)
    axes.set_yticks(range(1, len(order) + 1), [str(n) for n in order], fontsize=6)
    axes.set(xlabel="error of the median, %", xscale="symlog")
    return figure


def inputs(*, is_whole: bool) -> dict[Path, tuple[str, ...]]:
    """Return the columns of each file that the suite reads, below the data folder."""
    return {FILE: MEASURED}


def run(data: Path, out: Path, progress: Progress = silent) -> Report:
    """Evaluate, and write `memory.md` and its figures."""
    rows, samples, uncleaned = measured_samples(data)
    folds = fit_folds(samples, _family, "families", progress)
    by_family = judge(folds, samples, _family)
    splits = {
        "families held out": by_family,
        "the same, inside the training data": by_family.where(by_family.inside),
        "models held out at random": judge(fit_folds(samples, _model, "models", progress), samples, _model),
        "families held out, rows before cleaning": judge(folds, uncleaned, _family),
    }
    few = {jobs: few_jobs(samples, jobs) for jobs in (3, 10, 20, 50)}
    seeds = {
        seed: judge(fit_folds(samples, _family, f"families, seed {seed},", progress, seed), samples, _family)
        for seed in FOLD_SEEDS
    }
    files = _write(out, rows, splits, baselines(samples, progress), few, seeds)
    return Report("memory", targets(by_family.figures(), few[20]), files)


def frozen(data: Path) -> Report:
    """Evaluate the shipped model on other rows without fitting.

    Rows of models that the feature store lacks count as abstentions; all other figures omit them.

    Raises:
        DataError: The file or a column is missing, or the feature store has none of its models.
    """
    rows, samples, _ = measured_samples(data)
    if not samples:
        raise DataError(f"expected rows of models in the feature store in {data / FILE}, found none")
    found = apply(shipped(), samples).figures()
    abstained = 100 * (1 - len(samples) / len(clean(rows)))
    goals = {figure.name: figure for figure in targets(found, few=0.0)}
    figures = tuple(goals.get(name, Metric(name, value)) for name, value in found.items())
    return Report("memory", (*figures, Metric("abstained, not in the store", abstained, "≤ 5", abstained <= 5)))
