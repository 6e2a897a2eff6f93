"""A job without a place, looked at again with one thing changed on paper."""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from carpool_core.demand import Demand
from carpool_core.values import GpuUuid

from carpool_extender.cache.gpu_table import MODES, Bools, Floats, GpuTable, Rows, Snapshot
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.explain.paperroom import PaperRoom
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.filters import Check, Evaluation, run_filters
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.framework.selection import Placement, best_place


class Change(NamedTuple):
    """One thing that was changed on paper."""

    what: str
    """What was tried, in a word or two."""
    how: str | None
    """How there would be a place, to stand behind `it would have a place`; None where there still would be none."""


@dataclass(frozen=True, eq=False)
class Case:
    """A job without a place, and where it looks for one."""

    pod_request: PodRequest
    rules: SchedulerConfig
    snapshot: Snapshot
    offered: Bools
    """GPUs on nodes that kube-scheduler would offer, shape (gpus,)."""
    refused: Mapping[str, str]
    """Why it would not offer the others, by name."""
    wanted: int = 1
    """Workers that have to find places at once."""
    room: Callable[[PodRequest, SchedulerConfig, int], int] | None = None
    """For how many of so many workers there would be room at once; None where one is enough."""
    paper: Callable[[Set[GpuUuid]], PaperRoom] | None = None
    """Copies some GPUs, on which they would be placed; None where one is enough."""

    @cached_property
    def cached_evaluation(self) -> CachedEvaluation:
        """What is found as it is."""
        return CachedEvaluation(self.pod_request, self.rules, self.snapshot)

    @property
    def now(self) -> Evaluation:
        """What the checks find as it is."""
        return self.cached_evaluation.evaluation

    @property
    def demand(self) -> Demand:
        """What a worker asks for."""
        return self.pod_request.demand

    def asking(self, **changes: Any) -> PodRequest:
        """Return the applicant with something else in its demand; it has to work out everything again."""
        of = self.pod_request
        return PodRequest(replace(of.demand, **changes), of.policy, of.workers, of.user, of.may_use_measured_peak)

    def find(self, pod_request: PodRequest, rules: SchedulerConfig | None = None) -> tuple[str, Placement] | None:
        """Return the first worker's place where all would find one."""
        rules = rules or self.rules
        if self.room is not None and self.room(pod_request, rules, self.wanted) < self.wanted:
            return None
        return best_place(CachedEvaluation(pod_request, rules, self.snapshot), self.offered, with_reason=False)


def looked_at(case: Case, columns: GpuTable) -> Evaluation:
    """Run all checks on GPUs as they are not."""
    evaluation = case.now
    return replace(evaluation, results=run_filters(evaluation, columns))


def fails(case: Case, check: Check) -> Rows:
    """Return the GPUs that kube-scheduler would offer and this check keeps the job from."""
    return np.flatnonzero((case.now.results.failed == check) & case.offered)


def team_of(evaluation: Evaluation, rows: Rows) -> Rows:
    """Return a number that GPUs share which one worker could have together: node and mode."""
    team: Rows = evaluation.snapshot.gpus.node[rows].astype(np.intp) * len(MODES) + evaluation.results.mode[rows]
    return team


def complete_sets(case: Case, evaluation: Evaluation, rows: Rows, lacks: Floats) -> tuple[Rows, int]:
    """Return what is the worst of each set of GPUs that is needed, in the order of how much is lacking there.

    Args:
        case: The job.
        evaluation: Where these GPUs would do.
        rows: The GPUs.
        lacks: How much of something is lacking on each.

    Returns:
        Places in `rows` of one GPU for each worker, as many as there are, and how many workers each stands for.
    """
    gpus = case.demand.gpus
    team = team_of(evaluation, rows)
    order = np.lexsort((lacks, team))
    number = np.arange(order.size) - np.searchsorted(team[order], team[order])
    last = order[number % gpus == gpus - 1]
    needed = last[np.argsort(lacks[last], kind="stable")][: case.wanted]
    return needed, math.ceil(case.wanted / max(1, needed.size))
