"""Fits the interval of slowdowns to Gavel's measurements (K80, P100, V100). Needs the extra `train`.

Gavel measured throughputs alone, at several batch sizes, and of pairs behind MPS, but no utilization. A step of batch b
takes (a^p + (c + d b)^p)^(1/p): host time a, GPU time c + d b, and an exponent p for their overlap; p = 1 is none. All
jobs share one p. It is chosen by the errors of left-out batch sizes with a variant of the rule of one standard error
(Breiman et al., Classification and Regression Trees, 1984, section 3.4.3). The smallest p, which overlaps least, is
taken among those within one standard error of the best, over jobs. Busy shares follow: u = (c + d b) / step.

The pairs show the width of the interval behind MPS, where kernels queue in the order of their launch, so that a job of
short kernels loses to one of long kernels. SM activity comes from busy shares, and contention for DRAM is left out,
because Gavel measured neither.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from carpool_core.values import SharingMode
from carpool_predictor.models.slowdown import slowdowns
from numpy.typing import NDArray
from scipy.optimize import least_squares

from carpool_research.tables import number, read_table

FILE = "gavel/gavel_throughputs_flat.csv"
_RATES = ("iso_tput_a_steps_s", "coloc_tput_a", "coloc_tput_b")
COLUMNS = ("file", "gpu", "job_a", "bs_a", "ngpu_a", "job_b", "bs_b", "ngpu_b", *_RATES)
TABLE = "oracle_throughputs.json"
"""Gavel's only table in which all pairs are measured."""
EXPONENTS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0)
LEAST_BATCHES = 4

Job = tuple[str, str, str]
"""GPU, job, batch size."""
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two jobs on one GPU."""

    one: Job
    other: Job
    slowdowns: tuple[float, float]
    """Measured slowdowns of both jobs, at least 1."""


@dataclass(frozen=True, slots=True)
class Gavel:
    """Measured jobs and pairs."""

    step_s: Mapping[Job, float]
    """Step time alone."""
    pairs: Sequence[Pair]


@dataclass(frozen=True, slots=True)
class BehindMps:
    """Pairs behind MPS, each of shape (pairs, 2)."""

    measured: Numbers
    """Slowdowns."""
    predicted: Numbers
    """Slowdowns by the shipped form, with SM activity from busy shares."""
    neighbour_busy: Numbers
    """Busy shares of the other job, from solo throughputs."""
    models: NDArray[np.str_]
    """Models of the slowed jobs."""

    @property
    def log_errors(self) -> Numbers:
        """Errors that give the factors behind MPS."""
        found: Numbers = np.log(self.measured / self.predicted) / self.neighbour_busy
        return found


def read(data: Path) -> Gavel:
    """Read the single-GPU jobs.

    Raises:
        DataError: The file or a column is missing, or a row cannot be read.
    """
    rows = [row for row in read_table(data / FILE, COLUMNS, _checked) if row["file"] == TABLE and row["ngpu_a"] == "1"]
    step_s = {_job(r, "a"): 1 / v for r in rows if (v := _rate(r, "iso_tput_a_steps_s")) > 0}
    pairs = [pair for row in rows if row["ngpu_b"] == "1" and (pair := _pair(row, step_s)) is not None]
    # The table has each pair in both orders, with the same numbers.
    return Gavel(step_s, list({frozenset((pair.one, pair.other)): pair for pair in pairs}.values()))


def _checked(row: dict[str, str]) -> dict[str, str]:
    for column in _RATES:
        _rate(row, column)
    return row


def _job(row: Mapping[str, str], which: str) -> Job:
    return row["gpu"], row[f"job_{which}"], row[f"bs_{which}"]


def _rate(row: Mapping[str, str], column: str) -> float:
    """Return a throughput; 0 if it is missing."""
    return number(row, column) if row[column] else 0.0


def _pair(row: Mapping[str, str], step_s: Mapping[Job, float]) -> Pair | None:
    """Return a measured pair; a throughput of 0 means out of memory or not run."""
    one, other = _job(row, "a"), _job(row, "b")
    a, b = _rate(row, "coloc_tput_a"), _rate(row, "coloc_tput_b")
    if a <= 0 or b <= 0 or one not in step_s or other not in step_s:
        return None
    return Pair(one, other, (max(1.0, 1 / (step_s[one] * a)), max(1.0, 1 / (step_s[other] * b))))


def families(gavel: Gavel) -> dict[tuple[str, str], tuple[Numbers, Numbers]]:
    """Return batch sizes and step times of each job and GPU with several batch sizes.

    Jobs whose steps become shorter as batches grow (Recommendation) are omitted.
    """
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (gpu, job, batch), step_s in sorted(gavel.step_s.items()):
        if batch:
            found.setdefault((gpu, job), []).append((float(batch), step_s))
    columns = {key: np.array(sorted(points)).T for key, points in found.items() if len(points) >= LEAST_BATCHES}
    return {key: (batch, step) for key, (batch, step) in columns.items() if np.all(np.diff(step) > 0)}


def fit_step(batch: Numbers, step: Numbers, exponent: float) -> Callable[[Numbers], tuple[Numbers, Numbers]]:
    """Fit host and GPU time of one job; return the function from batch sizes to steps and busy shares."""

    def curve(logs: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
        host, fixed, each = np.exp(logs)
        gpu = fixed + each * sizes
        whole: Numbers = (host**exponent + gpu**exponent) ** (1 / exponent)
        return whole, gpu / whole

    def off(logs: Numbers) -> Numbers:
        missed: Numbers = np.log(curve(logs, batch)[0] / step)
        return missed

    begins = [np.log([step.min() * f, step.min() * (1 - f), step.max() / batch.max() * 0.8]) for f in (0.3, 0.9)]
    tries = [
        least_squares(off, begin, loss="soft_l1", f_scale=0.03, max_nfev=300, bounds=(-40, 20)) for begin in begins
    ]
    best = min(tries, key=lambda one: float(one.cost))
    return lambda sizes: curve(best.x, sizes)


@dataclass(frozen=True, slots=True)
class LeftOutErrors:
    """Errors of steps at left-out batch sizes, for one exponent."""

    of_jobs: Mapping[str, float]
    """Mean absolute logarithmic error of each job over all GPUs."""

    @property
    def error(self) -> float:
        """Mean over jobs."""
        return fmean(self.of_jobs.values())

    def beyond(self, best: "LeftOutErrors") -> tuple[float, float]:
        """Return the mean difference to another exponent and its standard error over jobs."""
        more = [error - best.of_jobs[job] for job, error in self.of_jobs.items()]
        return fmean(more), stdev(more) / len(more) ** 0.5


def errors_by_exponent(gavel: Gavel) -> dict[float, LeftOutErrors]:
    """Predict the step at each batch size from the others of its job and GPU, for each exponent."""
    curves = families(gavel)
    jobs = sorted({job for _, job in curves})
    found = {}
    for exponent in EXPONENTS:
        errors = {key: _left_out(batch, step, exponent) for key, (batch, step) in curves.items()}
        found[exponent] = LeftOutErrors({job: fmean(e for (_, one), e in errors.items() if one == job) for job in jobs})
    return found


def _left_out(batch: Numbers, step: Numbers, exponent: float) -> float:
    errors = []
    for out in range(len(batch)):
        keep = np.arange(len(batch)) != out
        predicted, _ = fit_step(batch[keep], step[keep], exponent)(batch[out : out + 1])
        errors.append(abs(float(np.log(predicted[0] / step[out]))))
    return fmean(errors)


def best(errors: Mapping[float, LeftOutErrors]) -> LeftOutErrors:
    """Return the errors of the best exponent."""
    return min(errors.values(), key=lambda one: one.error)


def most_cautious(errors: Mapping[float, LeftOutErrors]) -> float:
    """Return the smallest exponent within one standard error of the best."""
    least = best(errors)
    return min(exponent for exponent, one in errors.items() if operator.le(*one.beyond(least)))


def busy_shares(gavel: Gavel, exponent: float) -> dict[Job, float]:
    """Return the busy share of each job alone, 0..1, for jobs with several batch sizes."""
    found: dict[Job, float] = {}
    for (gpu, job), (batch, step) in families(gavel).items():
        _, busy = fit_step(batch, step, exponent)(batch)
        found |= {(gpu, job, f"{size:.0f}"): float(u) for size, u in zip(batch, busy, strict=True)}
    return found


def behind_mps(gavel: Gavel, exponent: float, holding: float) -> BehindMps:
    """Predict each pair.

    Args:
        gavel: Measured jobs and pairs.
        exponent: p, for busy shares from solo steps.
        holding: k, the exponent between SM activity and busy share.
    """
    busy = busy_shares(gavel, exponent)
    pairs = [pair for pair in gavel.pairs if pair.one in busy and pair.other in busy]
    own = np.array([(busy[pair.one], busy[pair.other]) for pair in pairs])
    predicted = slowdowns(SharingMode.MPS, own, own**holding, np.zeros(own.shape))
    models = np.array([(pair.one[1], pair.other[1]) for pair in pairs])
    return BehindMps(np.array([pair.slowdowns for pair in pairs]), predicted, own[:, ::-1], models)


def factor(log_errors: Numbers, models: NDArray[np.str_], level: float) -> float:
    """Return the factor of the interval's upper end: conformal, with the slowed model as the unit.

    Each model gives a quantile of its errors, and the largest counts. It holds for n of n + 1 models.

    Args:
        log_errors: Logarithm of measured over predicted slowdown, over the other job's busy share.
        models: Models of the slowed jobs.
        level: Share of a model's slowdowns below the upper end.
    """
    quantiles = [np.quantile(log_errors[models == one], level, method="higher") for one in np.unique(models)]
    return round(max(0.0, *map(float, quantiles)), 3)
