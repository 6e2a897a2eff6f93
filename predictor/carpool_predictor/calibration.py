"""Fits the shipped calibration from measured peaks; pure. `carpool_predictor.recalibrate` is the command around it.

Line and bound by cross-conformal prediction over families (timm modules): families are split in two, a line fitted on
either half is judged on the other, and the bound is the quantile of all those ratios; the shipped line is fitted on
all. The whole procedure is then repeated with a fifth of the families held out each time, and those figures are the
ones reported: no family's rows are judged by numbers that they helped to choose.
"""

import csv
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from carpool_core.resources.features import ModelFeatures
from carpool_core.values import MIB, Precision

from carpool_predictor.interpolation import cost_at
from carpool_predictor.memory import Calibration

COLUMNS = ("timm_model", "timm_module", "batch_size", "max_gpu_memory_mib")
PRODUCT = "NVIDIA A100-SXM4-40GB"
CAPACITY_MIB = 40960
CENSORED_SHARE = 0.94
"""A peak above this share of the GPU's memory is out of memory waiting to happen: censored, not a label."""
MIN_GROWTH = 1.02
"""Doubling the batch raises even the smallest model's peak by more than this."""
COVERAGE = 0.95
FOLDS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run."""

    model: str
    family: str
    batch_size: int
    peak_mib: float


class Pair(NamedTuple):
    """Simulated and measured peak of one run, in MiB."""

    simulated_mib: float
    measured_mib: float


class DataError(ValueError):
    """The measurements cannot be read."""


def read_rows(path: Path) -> list[Row]:
    """Read GPUMemNet's timm measurements.

    Raises:
        DataError: The file or a column is missing.
    """
    if not path.is_file():
        raise DataError(f"expected measurements at {path}, found no such file; pass the data folder with --data")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = sorted(set(COLUMNS) - set(reader.fieldnames or ()))
        if missing:
            raise DataError(f"{path} lacks the columns {', '.join(missing)}")
        return [Row(r[COLUMNS[0]], r[COLUMNS[1]], int(r[COLUMNS[2]]), float(r[COLUMNS[3]])) for r in reader]


def clean(rows: Iterable[Row]) -> list[Row]:
    """Drop runs that died: memory grows with the batch, so a model's rows count until they first fail to grow.

    A model with no growing pair is dropped whole (its first run may be the dead one), and so are peaks at the GPU's
    capacity, which are censored. The simulation plays no part in this.
    """
    kept: list[Row] = []
    by_model: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_model[row.model].append(row)
    for runs in by_model.values():
        runs.sort(key=lambda row: row.batch_size)
        alive = runs[:1]
        for run in runs[1:]:
            grown = run.peak_mib > MIN_GROWTH * alive[-1].peak_mib
            if not grown or run.peak_mib > CENSORED_SHARE * CAPACITY_MIB:
                break
            alive.append(run)
        kept += alive if len(alive) > 1 else []
    return kept


def split_families(families: Iterable[str], parts: int, seed: int) -> list[frozenset[str]]:
    """Split families at random into parts of nearly equal size."""
    names = sorted(set(families))
    random.Random(seed).shuffle(names)  # noqa: S311  (a reproducible split, no secret)
    return [frozenset(names[i::parts]) for i in range(parts)]


def fit_line(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Fit `measured ≈ slope · simulated + intercept` by least absolute relative error.

    Iteratively reweighted least squares; outliers (failed runs that cleaning missed) pull with bounded weight.

    Returns:
        Slope, and intercept in MiB (at least 0).
    """
    weights = [1 / p.measured_mib**2 for p in pairs]
    slope, intercept = 1.0, 0.0
    for _ in range(200):
        total = sum(weights)
        x = sum(w * p.simulated_mib for w, p in zip(weights, pairs, strict=True)) / total
        y = sum(w * p.measured_mib for w, p in zip(weights, pairs, strict=True)) / total
        spread = sum(w * (p.simulated_mib - x) ** 2 for w, p in zip(weights, pairs, strict=True))
        joint = sum(w * (p.simulated_mib - x) * (p.measured_mib - y) for w, p in zip(weights, pairs, strict=True))
        slope = joint / spread if spread else 1.0
        intercept = max(y - slope * x, 0.0)
        errors = (abs(slope * p.simulated_mib + intercept - p.measured_mib) / p.measured_mib for p in pairs)
        weights = [1 / (p.measured_mib**2 * max(e, 1e-4)) for p, e in zip(pairs, errors, strict=True)]
    return slope, intercept


def conformal_factor(ratios: Iterable[float], coverage: float) -> float:
    """Return the factor to the median that covers a share of measured/median ratios not used to fit the median."""
    ordered = sorted(ratios)
    rank = min(math.ceil((len(ordered) + 1) * coverage), len(ordered))
    return max(ordered[rank - 1], 1.0)


Line = tuple[float, float]


def _at(line: Line, pair: Pair) -> float:
    return line[0] * pair.simulated_mib + line[1]


def fit(pairs: Mapping[str, Sequence[Pair]], seed: int) -> tuple[Line, float]:
    """Fit line and bound on families.

    Args:
        pairs: Pairs by family.
        seed: Seed of the split in halves.
    """
    halves = [_of(pairs, half) for half in split_families(pairs, 2, seed)]
    ratios: list[float] = []
    for fitted, judged in (halves, halves[::-1]):
        line = fit_line(fitted)
        ratios += [pair.measured_mib / _at(line, pair) for pair in judged]
    return fit_line(_of(pairs, pairs)), conformal_factor(ratios, COVERAGE)


def _of(pairs: Mapping[str, Sequence[Pair]], families: Iterable[str]) -> list[Pair]:
    return [pair for family in sorted(families) for pair in pairs[family]]


def held_out_report(
    pairs: Mapping[str, Sequence[Pair]], judged: Mapping[str, Sequence[Pair]], seed: int
) -> dict[str, float]:
    """Repeat the fit with each fifth of the families held out, and return the figures on those.

    Args:
        pairs: What is fitted, by family.
        judged: What the held-out families are judged on: the same pairs, or those before cleaning.
        seed: Seed of the folds.
    """
    errors: list[float] = []
    bounds: list[float] = []
    worst: tuple[float, str] = (1.0, "")
    for fold in split_families(pairs, FOLDS, seed):
        line, factor = fit({family: rows for family, rows in pairs.items() if family not in fold}, seed)
        for family in sorted(fold):
            errors += [abs(_at(line, p) / p.measured_mib - 1) for p in judged[family]]
            over = [_at(line, p) * factor / p.measured_mib for p in judged[family]]
            worst = min(worst, (sum(o >= 1 for o in over) / len(over), family)) if over else worst
            bounds += over
    errors.sort()
    return {
        "held_out_rows": len(errors),
        "held_out_median_error": round(median(errors), 4),
        "held_out_p95_error": round(errors[int(0.95 * (len(errors) - 1))], 4),
        "held_out_coverage": round(sum(o >= 1 for o in bounds) / len(bounds), 4),
        "held_out_median_bound_over_actual": round(median(bounds), 4),
        "held_out_worst_family_coverage": round(worst[0], 4),
    }


def pairs_by_family(rows: Iterable[Row], traced: Mapping[str, ModelFeatures]) -> dict[str, list[Pair]]:
    """Pair each measured run of a traced model with its simulation."""
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for row in rows:
        if row.model in traced:
            simulated = cost_at(traced[row.model], row.batch_size).peak_bytes / MIB
            pairs[row.family].append(Pair(simulated, row.peak_mib))
    return dict(pairs)


def calibrate(rows: Sequence[Row], traced: Mapping[str, ModelFeatures], *, version: str, seed: int) -> Calibration:
    """Fit line and bound, with provenance and the figures on held-out families before and after cleaning."""
    good = clean(rows)
    pairs = pairs_by_family(good, traced)
    line, factor = fit(pairs, seed)
    uncleaned = held_out_report(pairs, pairs_by_family(rows, traced), seed)
    return Calibration(
        version=version,
        product=PRODUCT,
        precision=Precision.FP32,
        slope=round(line[0], 4),
        intercept_mib=round(line[1], 1),
        upper_factor=round(factor, 4),
        coverage=COVERAGE,
        provenance={
            "data": "itu-rad/GPUMemNet, Related_works/FakeTensor (timm models, A100-SXM4-40GB, FP32)",
            "rows": len(rows),
            "rows_after_cleaning": len(good),
            "models_traced": len(traced),
            "families": len(pairs),
            "seed": seed,
            **held_out_report(pairs, pairs, seed),
            "uncleaned_held_out_median_error": uncleaned["held_out_median_error"],
            "uncleaned_held_out_coverage": uncleaned["held_out_coverage"],
        },
    )
