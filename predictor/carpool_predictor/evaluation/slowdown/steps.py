"""Works out how busy Gavel's jobs keep their GPUs, from how steps grow with their batches: needs the extra `train`.

A step of batch b takes (a^p + (f + d b)^p)^(1/p): host a, GPU f + d b, and an exponent p that says how well one hides
behind the other, 1 not at all. It is shared by all, and the one by which a batch size that was left out is foretold
best. The busy share of a job follows: u = (f + d b) / step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from carpool_predictor.evaluation.slowdown.gavel import Gavel, Job

EXPONENTS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0)
LEAST_BATCHES = 4

Numbers = NDArray[np.float64]


def families(gavel: Gavel) -> dict[tuple[str, str], tuple[Numbers, Numbers]]:
    """Return batch sizes and step times of each job on each GPU that was measured at several.

    Left out are jobs whose steps get shorter as batches grow (Recommendation): they are no steps of one batch.
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
class Missed:
    """How far off the steps at batch sizes were that had been left out, for one exponent."""

    of_jobs: Mapping[str, float]
    """Mean absolute logarithmic error of each job, on all GPUs."""

    @property
    def error(self) -> float:
        """Their mean."""
        return fmean(self.of_jobs.values())

    def beyond(self, best: "Missed") -> tuple[float, float]:
        """Return by how much it is worse than another, and the standard error of that, by jobs."""
        more = [error - best.of_jobs[job] for job, error in self.of_jobs.items()]
        return fmean(more), stdev(more) / len(more) ** 0.5


def errors_by_exponent(gavel: Gavel) -> dict[float, Missed]:
    """Foretell the step at each batch size from the others of its job and GPU, for each exponent."""
    known = families(gavel)
    jobs = sorted({job for _, job in known})
    found = {}
    for exponent in EXPONENTS:
        errors = {key: _left_out(batch, step, exponent) for key, (batch, step) in known.items()}
        found[exponent] = Missed({job: fmean(e for (_, one), e in errors.items() if one == job) for job in jobs})
    return found


def _left_out(batch: Numbers, step: Numbers, exponent: float) -> float:
    errors = []
    for out in range(len(batch)):
        keep = np.arange(len(batch)) != out
        foretold, _ = fit_step(batch[keep], step[keep], exponent)(batch[out : out + 1])
        errors.append(abs(float(np.log(foretold[0] / step[out]))))
    return fmean(errors)


def best_exponent(errors: Mapping[float, Missed]) -> float:
    """Return the exponent by which steps are foretold best."""
    return min(errors, key=lambda exponent: errors[exponent].error)


def busy_shares(gavel: Gavel, exponent: float) -> dict[Job, float]:
    """Work out how busy each job keeps its GPU alone, 0..1, where it was measured at several batch sizes."""
    found: dict[Job, float] = {}
    for (gpu, job), (batch, step) in families(gavel).items():
        _, busy = fit_step(batch, step, exponent)(batch)
        found |= {(gpu, job, f"{size:.0f}"): float(u) for size, u in zip(batch, busy, strict=True)}
    return found
