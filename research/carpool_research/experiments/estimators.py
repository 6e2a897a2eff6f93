"""Estimators of memory and utilization, published ones and Carpool's, behind one contract; a strategy chooses one.

Left out, because neither text nor data suffice to build them again: DNNMem itself (only its sum of tensors is tried),
FakeTensor's published estimates (they cover timm's models only; simulated steps of fake tensors take their place) and
GPUMemNet's classifier for transformers (its data set is not published; the one for CNNs judges all).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
from carpool_predictor.models.activity import work_of_features
from carpool_predictor.predict import PredictionContext
from carpool_simulator.truth import Draw, SimJob, Workload

from carpool_research.experiments.simulation import Estimate, EstimatedJob, extended


class Estimator(Protocol):
    """Estimates jobs before they run."""

    def __call__(self, job: SimJob) -> Estimate | None:
        """Return an estimate; None where it abstains."""
        ...


SHIPPED = "shipped, upper bound"
MEMORY: Mapping[str, str] = {
    "Horus": "Horus' formula",
    "FakeTensor": "raw simulation",
    "DNNMem-like sum": "DNNMem-like sum",
    "SchedTune-like boosting": "SchedTune-like boosting",
    "GPUMemNet": "GPUMemNet's MLP ensemble",
}
"""Name here, and in `memory.baselines`, which fits them to GPUMemNet's measurements of timm's models."""
FOREST = "random forest"
"""HotCloud '20's; it estimates utilization, fitted to GPUMemNet's MLPs and CNNs."""


def _shipped(field: str) -> Estimator:
    def estimate(job: SimJob) -> Estimate | None:
        return None if job.prediction is None else Estimate(getattr(job.prediction.products[0].memory, field))

    return estimate


@cache
def estimators(data: Path) -> Mapping[str, Estimator]:
    """Return every estimator by name, fitted to the published measurements in a folder."""
    from carpool_research.memory import baselines, fit

    rows = fit.clean(fit.read_rows(data / fit.FILE))
    samples = fit.samples_of(rows, fit.traced_models({row.model for row in rows}))

    def of_memory(name: str) -> Estimator:
        estimate = baselines.ESTIMATORS[name](samples, 0)
        # The classifier returns the middle of a class; what counts is its upper end.
        more_mib = baselines.CLASS_MIB / 2 if isinstance(estimate, baselines.Classifier) else 0.0

        def of_context(asked: PredictionContext) -> Estimate:
            sample = fit.Sample("", "", asked.training.batch_size, 0.0, 0.0, asked.features, asked.cost)
            return Estimate(round(float(estimate([sample])[0]) + more_mib))

        return _of_kinds(of_context)

    found: dict[str, Estimator] = {SHIPPED: _shipped("upper_mib"), "shipped, median": _shipped("median_mib")}
    found |= {name: of_memory(baseline) for name, baseline in MEMORY.items()}
    return found | {"true memory": lambda job: Estimate(job.truth.memory_mib), FOREST: _forest(data)}


def _of_kinds(estimate: Callable[[PredictionContext], Estimate]) -> Estimator:
    """Return an estimator that estimates each kind of job once."""
    known: dict[str, Estimate] = {}

    def remembered(job: SimJob) -> Estimate | None:
        if job.asked is not None and job.truth.kind not in known:
            known[job.truth.kind] = estimate(job.asked)
        return known.get(job.truth.kind)

    return remembered


def _forest(data: Path) -> Estimator:
    from carpool_research.activity import baselines, fit

    rows = [row for kind in ("mlp", "cnn") for row in fit.clean(fit.read_rows(data, kind))]
    model = baselines.REGRESSORS[FOREST].make(0)
    model.fit(baselines.features(rows), np.log1p(baselines.targets(rows)))

    def of_context(asked: PredictionContext) -> Estimate:
        work = work_of_features(asked.features, asked.cost, asked.training.batch_size)
        percent = np.expm1(model.predict(baselines.features([replace(rows[0], work=work)]))[0])
        return Estimate(util=min(1.0, float(percent) / 100))

    return _of_kinds(of_context)


def estimated(draw: Draw) -> Draw:
    """Return a draw whose jobs have the estimates of all estimators."""

    def drawn(data: Path, seed: int) -> Workload:
        workload, every = draw(data, seed), estimators(data)
        jobs = []
        for job in workload.jobs:
            each = {name: estimate(job) for name, estimate in every.items()}
            known = {name: one for name, one in each.items() if one is not None}
            jobs.append(extended(job, EstimatedJob, estimates=known))
        return replace(workload, jobs=jobs)

    return drawn
