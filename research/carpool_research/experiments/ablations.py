"""Ablations: predictions with errors, without values, or replaced by the truth; and failing GPUs."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import msgspec
import numpy as np
from carpool_core.demand import Demand
from carpool_core.resources.node import Tenant
from carpool_core.resources.prediction import Prediction
from carpool_core.values import GpuUuid, PodUid
from carpool_extender.cache.gpu_table import MODES, Rows
from carpool_extender.framework.filters import PASSED, Evaluation, FilterResults, SlowdownCheck
from carpool_extender.framework.selection import filter_rows
from carpool_extender.queue.order import QueueOrder
from carpool_extender.queue.scheduling_queue import QueuedJobInfo
from carpool_simulator.cluster_model import Physics
from carpool_simulator.engine import Outcome
from carpool_simulator.information import InformationModel, Learner, Stage, exactly, learner_of
from carpool_simulator.strategy import ANY_SLOWDOWN, Strategy
from carpool_simulator.truth import SimJob, Truth, Workload

from carpool_research.experiments.simulation import (
    Failure,
    PublishedSimulation,
    PublishedStrategy,
    PublishedWorkload,
    extended,
)


class Piece(StrEnum):
    """One part of the truth that may replace a prediction."""

    MEMORY = "memory"
    ACTIVITY = "activity"
    SLOWDOWNS = "slowdowns"
    DURATIONS = "durations"
    """Length of each job alone: the longest pending job starts first."""


@dataclass(frozen=True)
class Ablation(PublishedStrategy):
    """A strategy with other information about jobs."""

    oracle: frozenset[Piece] = frozenset()
    """Parts of the truth that replace predictions."""
    error: float = 0.0
    """Additional error of predictions (standard deviation of the logarithm of a factor)."""
    abstain: bool = False
    """Whether the predictor abstains from every job."""
    silent_share: float = 0.0
    """Share of the jobs that declare no steps, 0..1."""
    steps_error: float = 0.0
    """Error of declared steps (standard deviation of the logarithm of a factor)."""
    earlier: int = 0
    """Workloads of the same kind that ran on the cluster before; what was measured then counts."""


def ablate(base: Strategy, **changes: object) -> Ablation:
    """Return an ablation of a strategy, with these fields changed."""
    return extended(base, Ablation, **changes)


def simulate(
    workload: Workload, strategy: Strategy, physics: Physics, seed: int = 0, earlier: Sequence[Workload] = ()
) -> Outcome:
    """Run a strategy on a workload.

    Args:
        workload: Jobs and GPUs.
        strategy: A strategy, or an ablation of one.
        physics: True slowdowns.
        seed: Draws the errors of an ablation.
        earlier: Workloads that ran before; an ablation that learns knows what was measured then.
    """
    if not isinstance(strategy, Ablation):
        return PublishedSimulation(workload, strategy, physics).run()
    workload = replace(workload, jobs=[replace(job, steps=steps_of(job, strategy, seed)) for job in workload.jobs])
    information = partial(AblatedInformation, seed=seed, learner=learner_of(strategy))
    for number, before in enumerate(earlier):
        jobs = [replace(job, name=f"earlier-{number}-{job.name}") for job in before.jobs]
        PublishedSimulation(replace(before, jobs=jobs), strategy, physics, information).run()
    if Piece.SLOWDOWNS not in strategy.oracle:
        return PublishedSimulation(workload, strategy, physics, information).run()
    truths = {job.name: job.truth for job in workload.jobs}
    checks = TrueSlowdowns(physics, truths, strategy.max_slowdown)
    return PublishedSimulation(workload, strategy, physics, information, checks).run()


def steps_of(job: SimJob, strategy: Ablation, seed: int) -> int | None:
    """Return the steps that a job declares; None or a wrong number if the ablation says so."""
    if job.steps is None or not (strategy.silent_share or strategy.steps_error):
        return job.steps
    draw = random.Random(f"{seed}/{job.name}/steps")  # noqa: S311  # a simulation, no secret
    if draw.random() < strategy.silent_share:
        return None
    return max(1, round(job.steps * math.exp(draw.gauss(0.0, strategy.steps_error))))


class AblatedInformation(InformationModel):
    """Information model of an ablation.

    Args:
        strategy: The ablation.
        usable_mib: Memory of the largest GPU.
        seed: Draws the errors.
        is_decreasing: Whether the policy starts the job with the largest predicted utilization first.
        learner: What earlier simulations taught.
    """

    def __init__(
        self,
        strategy: Ablation,
        usable_mib: int,
        *,
        seed: int = 0,
        is_decreasing: bool = False,
        learner: Learner | None = None,
    ) -> None:
        super().__init__(strategy, usable_mib, is_decreasing=is_decreasing, learner=learner)
        self._ablation, self._seed = strategy, seed
        self._kinds: dict[str, int] = {}

    @property
    def order(self) -> QueueOrder:
        """Order of the queue: true durations have their own order."""
        return QueueOrder.ARRIVAL if Piece.DURATIONS in self._ablation.oracle else super().order

    def queued(self, job: SimJob, stage: Stage, number: int) -> QueuedJobInfo:
        """Return a job's entry of the queue."""
        found = super().queued(job, stage, number)
        if Piece.DURATIONS not in self._ablation.oracle:
            return found
        return replace(found, arrived_s=-job.work_s, duration_s=job.work_s)

    def measured(
        self, truth: Truth, uid: PodUid, gpu: GpuUuid, slowdown: float, *, knows_solo: bool = False
    ) -> Tenant | None:
        """Return the node agent's report of a tenant; without activity where the truth replaces it."""
        found = super().measured(truth, uid, gpu, slowdown, knows_solo=knows_solo)
        if found is None or Piece.ACTIVITY not in self._ablation.oracle:
            return found
        return msgspec.structs.replace(found, gpu_util_percent=None, sm_active_ratio=None)

    def _kind(self, job: SimJob) -> str:
        return job.name if self._ablation.error else super()._kind(job)

    def _demand(self, job: SimJob, stage: Stage) -> Demand:
        """Return the demand of each worker.

        With true slowdowns it has no limit, but another value for each kind of job: evaluations are cached by request,
        and true slowdowns depend on the kind.
        """
        found = super()._demand(job, stage)
        if Piece.SLOWDOWNS not in self._ablation.oracle:
            return found
        number = self._kinds.setdefault(job.truth.kind, len(self._kinds))
        return replace(found, max_slowdown=ANY_SLOWDOWN + 1e-6 * number)

    def _prediction(self, job: SimJob) -> Prediction | None:
        found, oracle = super()._prediction(job), self._ablation.oracle
        if self._ablation.abstain:
            found = None
        if found is None and Piece.MEMORY in oracle:
            found = job.prediction
        if found is None or not oracle & {Piece.MEMORY, Piece.ACTIVITY}:
            return found
        one = found.products[0]
        true = exactly(job.truth, found).products[0]
        if Piece.MEMORY in oracle:
            one = msgspec.structs.replace(one, memory=true.memory)
        if Piece.ACTIVITY in oracle:
            one = msgspec.structs.replace(one, activity=true.activity)
        return msgspec.structs.replace(found, products=[one])

    def _errors(self, job: SimJob) -> tuple[float, float, float]:
        draw = random.Random(f"{self._seed}/{job.name}")  # noqa: S311  # a simulation, no secret
        memory, busy, pace = (math.exp(draw.gauss(0.0, self._ablation.error)) for _ in range(3))
        return memory, busy, pace


SLACK = 1e-6
"""Tolerance for rounding where a slowdown meets its limit."""


class TrueSlowdowns:
    """Runs the checks, and replaces predicted slowdowns by the truth. Requests must not set a limit themselves.

    Args:
        physics: The truth.
        truths: Every job by its name.
        limit: Slowdown that every job accepts.
    """

    def __init__(self, physics: Physics, truths: Mapping[str, Truth], limit: float) -> None:
        self._physics, self._truths, self._limit = physics, truths, limit

    def __call__(self, evaluation: Evaluation, rows: Rows | None) -> FilterResults:
        """Return the results for some GPUs; for all if None."""
        found, tenants = filter_rows(evaluation, rows), evaluation.snapshot.gpus.tenants
        incoming = self._truths[evaluation.pod_request.demand.job_name]
        for place in np.flatnonzero(found.failed == PASSED).tolist():
            mode = MODES[int(found.mode[place])]
            present = [self._truths[one.job] for one in tenants[place if rows is None else rows[place]] or ()]
            if mode is None:
                continue
            after = self._physics.slowdowns(mode, [incoming, *present])
            before = self._physics.slowdowns(mode, present) if present else []
            found.slowdown[place], found.added_slowdown[place] = after[0], sum(after) - sum(before) - 1.0
            if max(after) > self._limit + SLACK:
                found.failed[place] = SlowdownCheck.number
        return found


REPAIR_S = 3600.0
"""Mean time until a GPU that failed takes jobs again, in seconds; an assumption: a reset, or another node."""


def with_failures(workload: Workload, mean_hours: float, seed: int) -> Workload:
    """Let the GPUs of a workload fail.

    Args:
        workload: The workload.
        mean_hours: Mean time between two failures of one GPU, in hours; exponentially distributed.
        seed: Draws the failures.
    """
    draw = random.Random(f"failures/{seed}")  # noqa: S311  # a simulation, no secret
    span_s = _span_s(workload)
    failures = []
    for device in [device.uuid for devices in workload.nodes.values() for device in devices]:
        at_s = draw.expovariate(1 / (3600 * mean_hours))
        while at_s < span_s:
            lasts_s = draw.expovariate(1 / REPAIR_S)
            failures.append(Failure(device, at_s, lasts_s))
            at_s += lasts_s + draw.expovariate(1 / (3600 * mean_hours))
    text = f"Each GPU fails every {mean_hours:g} hours on average and recovers after one; its jobs start again."
    return extended(
        workload,
        PublishedWorkload,
        failures=sorted(failures, key=lambda one: one.at_s),
        assumptions=(*workload.assumptions, text),
    )


def _span_s(workload: Workload) -> float:
    """Return a time, in seconds, by which all jobs have ended, even one after another on half of the GPUs."""
    work_s = sum(job.work_s * job.gpus * job.workers for job in workload.jobs)
    gpus = sum(len(devices) for devices in workload.nodes.values())
    return max(job.arrival_s for job in workload.jobs) + 4 * work_s / gpus
