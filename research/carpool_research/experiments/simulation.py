"""Simulation of published strategies: monitors that need time, first runs alone, other estimators; and failing GPUs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

from carpool_core.resources.prediction import ActivityPrediction, Prediction
from carpool_core.values import GpuUuid, SharingMode
from carpool_extender.cache.cluster import GpuBackoff
from carpool_extender.cache.gpu_table import UnavailableReason
from carpool_extender.framework.selection import FilterRunner, filter_rows
from carpool_extender.queue.scheduling_queue import Admitted
from carpool_simulator.cluster_model import Physics
from carpool_simulator.engine import Gpu, Running, Simulation
from carpool_simulator.information import InformationModel, Stage
from carpool_simulator.strategy import Knowledge, Strategy
from carpool_simulator.truth import Pool, SimJob, Workload

_T = TypeVar("_T")


@dataclass(frozen=True)
class PublishedStrategy(Strategy):
    """A strategy with what only published ones need."""

    settle_s: float = 0.0
    """Time after a placement in which a GPU takes no other job, in seconds: its monitor must measure the new job."""
    profile_s: float = 0.0
    """Time that each job first runs alone to be measured, in seconds."""
    by_utilization: bool = False
    """Whether GPU utilization replaces SM activity."""
    estimator: str = ""
    """Name of the estimator that counts instead of the shipped prediction, or of none; empty if there is no other."""
    published: str = ""
    """Published results of the strategy."""
    mode_change_s: float = 0.0
    """Time that a change of the sharing mode takes, in seconds."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of a job by one estimator; None where it estimates nothing."""

    memory_mib: int | None = None
    """Memory that counts for it; of a class its upper end."""
    util: float | None = None
    """Share of time in which some kernel runs, 0..1."""


@dataclass(frozen=True, slots=True)
class EstimatedJob(SimJob):
    """A job with the estimates of other estimators than the shipped predictor, by name."""

    estimates: Mapping[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a GPU; all jobs on it die."""

    gpu: GpuUuid
    at_s: float
    lasts_s: float
    """Time until it takes jobs again."""


@dataclass(frozen=True, slots=True)
class PublishedWorkload(Workload):
    """A published workload, and what may be different on its cluster."""

    failures: Sequence[Failure] = ()
    behind_mps: Pool | None = None
    """Measured pairs for MPS, by SM activity; those measured with time slicing if None."""


def extended(value: Any, kind: type[_T], **more: object) -> _T:
    """Return a value of a base class as one of a class with more fields."""
    return kind(**({one.name: getattr(value, one.name) for one in fields(value)} | more))


@dataclass(frozen=True, slots=True)
class ProfilingStage(Stage):
    """A job runs alone for a short time to be measured."""


class PublishedInformation(InformationModel):
    """Information model of a published strategy."""

    def __init__(self, strategy: PublishedStrategy, usable_mib: int, *, is_decreasing: bool = False) -> None:
        super().__init__(strategy, usable_mib, is_decreasing=is_decreasing)
        self._published = strategy

    def _duration_s(self, job: SimJob, stage: Stage) -> float | None:
        return self._published.profile_s if isinstance(stage, ProfilingStage) else super()._duration_s(job, stage)

    def _is_alone(self, stage: Stage) -> bool:
        return isinstance(stage, ProfilingStage) or super()._is_alone(stage)

    def _estimate(self, job: SimJob) -> Estimate:
        estimates = job.estimates if isinstance(job, EstimatedJob) else {}
        return estimates.get(self._published.estimator, Estimate())

    def _estimated_mib(self, job: SimJob) -> int:
        return min(self._usable_mib, self._estimate(job).memory_mib or 0)

    def _uncorrected(self, job: SimJob) -> Prediction | None:
        if self._published.by_utilization and self._published.knowledge is Knowledge.TRUTH:
            job = replace(job, truth=replace(job.truth, sm=job.truth.util))
        return super()._uncorrected(job)

    def _activity(self, job: SimJob, predicted: ActivityPrediction) -> tuple[float, float]:
        util, sm = super()._activity(job, predicted)
        estimate = self._estimate(job)
        util = util if estimate.util is None else estimate.util
        return util, util if self._published.by_utilization else sm


class ClosedGpus(GpuBackoff):
    """GPUs that take no job at present: they failed, or their monitor has not seen the newest tenant."""

    def __init__(self) -> None:
        self.reasons = Counter[tuple[str, GpuUuid]]()
        """Number of reasons by node and UUID."""

    def in_backoff(self) -> dict[tuple[str, GpuUuid], UnavailableReason]:
        """Return the GPUs, with a reason."""
        closed = (key for key, reasons in self.reasons.items() if reasons)
        return dict.fromkeys(closed, UnavailableReason(0, "takes no job at present"))


class PublishedSimulation(Simulation):
    """One run of a strategy on a published workload."""

    def __init__(
        self,
        workload: Workload,
        strategy: Strategy,
        physics: Physics,
        information: Callable[..., InformationModel] = PublishedInformation,
        filter_runner: FilterRunner = filter_rows,
    ) -> None:
        self._published = strategy if isinstance(strategy, PublishedStrategy) else extended(strategy, PublishedStrategy)
        self._closed = ClosedGpus()
        self._profiled: set[str] = set()
        """Names of the jobs that need no run alone, or no other one."""
        self.killed = 0
        """Times that a job died with its GPU."""
        super().__init__(workload, self._published, physics, information, filter_runner, self._closed)
        for failure in workload.failures if isinstance(workload, PublishedWorkload) else ():
            self._at(failure.at_s, partial(self._fail, failure))

    def _close(self, gpu: Gpu, for_s: float) -> None:
        """Let a GPU take no job for some seconds from now."""
        key = gpu.node, gpu.device.uuid
        self._closed.reasons[key] += 1
        self._at(self._now_s + for_s, lambda: self._closed.reasons.subtract([key]))

    def _fail(self, failure: Failure) -> None:
        gpu = self._gpus[failure.gpu]
        self._close(gpu, failure.lasts_s)
        for running in list(gpu.tenants):
            self.killed += 1
            self._leave(running)
            self._enqueue(running.job, replace(running.stage, restarts=running.stage.restarts + 1))

    def _enqueue(self, job: SimJob, stage: Stage) -> None:
        if self._published.profile_s and job.name not in self._profiled:
            stage = ProfilingStage(stage.attempt, stage.restarts)
        super()._enqueue(job, stage)

    def _begin(self, one: Admitted) -> None:
        super()._begin(one)
        if self._published.settle_s:
            for _, held in one.claims:
                for uuid in held.gpu_uuids:
                    self._close(self._gpus[uuid], self._published.settle_s)

    def _work_s(self, job: SimJob, stage: Stage, mode: SharingMode, gpus: Sequence[Gpu]) -> float:
        is_profiled = isinstance(stage, ProfilingStage)
        work_s = self._published.profile_s if is_profiled else super()._work_s(job, stage, mode, gpus)
        # GPUs in use have the mode already.
        return work_s + (self._published.mode_change_s if any(gpu.mode is not mode for gpu in gpus) else 0.0)

    def _finish(self, running: Running) -> None:
        if not isinstance(running.stage, ProfilingStage):
            super()._finish(running)
            return
        running.left_s = 0.0
        self._leave(running)
        self._profiled.add(running.job.name)
        self._enqueue(running.job, Stage())
