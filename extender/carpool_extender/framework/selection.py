"""Selection: the nodes that fit, their scores, and the GPUs that a pod gets, from cached evaluations.

The evaluation of a request shape is kept in an LRU cache, and updated incrementally when GPUs change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import compress

import numpy as np
from cachetools import LRUCache
from carpool_core.clock import rfc3339
from carpool_core.resources.node import Reservation, TenantProfile
from carpool_core.values import GpuUuid, PodUid, SharingMode
from numpy.typing import NDArray

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import Bools, Rows, Snapshot
from carpool_extender.cache.pod_request import PodRequest, memory_limit_mib, tenant_profile, thread_limit
from carpool_extender.framework.diagnosis import PREFIX, mode_on, placement_reason, summary
from carpool_extender.framework.filters import Evaluation, FilterResults, empty_results, run_filters
from carpool_extender.framework.scores import (
    MAX_SCORE,
    BestPerNode,
    Policy,
    SchedulerConfig,
    best_of,
    scores,
    select,
    ties,
    top_k,
)

MAX_CANDIDATES = 100
"""Default number of nodes that `filter_nodes` returns; kube-scheduler looks for no more in large clusters."""
SPARE = 100
"""Additional best nodes that are considered, in case kube-scheduler does not offer some of the best."""
FEW = 100
"""Up to this many offered nodes, rejected nodes get a message even if others fit. Above, kube-scheduler drops it."""


OTHER_WORKERS = f"{PREFIX}each GPU that would do has another worker of the job"
MAX_ENTRIES = 24
"""Request shapes that are cached: 1.3 MiB each with 40,000 GPUs."""
MAX_INCREMENTAL = 0.25
"""Share of changed rows above which all rows are evaluated again."""


FilterRunner = Callable[[Evaluation, Rows | None], FilterResults]
"""Runs all checks on some GPUs; on all if None."""


def filter_rows(evaluation: Evaluation, rows: Rows | None) -> FilterResults:
    """Run all checks on some GPUs of the evaluation's snapshot; on all if None."""
    gpus = evaluation.snapshot.gpus
    return run_filters(evaluation, gpus if rows is None else gpus.take(rows))


class CachedEvaluation:
    """Results of one request shape: the checks of every GPU, and the best GPUs of every node."""

    def __init__(
        self,
        pod_request: PodRequest,
        config: SchedulerConfig,
        snapshot: Snapshot,
        filter_runner: FilterRunner = filter_rows,
    ) -> None:
        self._run, self.config = filter_runner, config
        self.policy = config.policy_for(pod_request)
        limits = config.limits_for(pod_request)
        self.evaluation = Evaluation(snapshot, pod_request, config.slots, limits, empty_results(0))
        self.best = BestPerNode(pod_request.demand.gpus)
        self._node_of: NDArray[np.int32] = snapshot.gpus.node[:0]
        self.update(snapshot, None)

    def update(self, snapshot: Snapshot, changed: Rows | None) -> None:
        """Move on to a newer snapshot.

        `changed` are the rows that have changed since, in rising order; all if None.
        """
        evaluation, gpus = self.evaluation, len(snapshot.gpus.alive)
        evaluation.snapshot = snapshot
        self.best.resize(len(snapshot.node_names))
        if changed is None or changed.size > MAX_INCREMENTAL * gpus:
            evaluation.results = self._run(evaluation, None)
            self._node_of = snapshot.gpus.node.copy()
            self.best.put_all(select(evaluation, self.policy))
        elif changed.size:
            self._update_rows(changed, gpus)

    def _update_rows(self, changed: Rows, gpus: int) -> None:
        evaluation, snapshot = self.evaluation, self.evaluation.snapshot
        if len(self._node_of) < gpus:
            evaluation.results, self._node_of = evaluation.results.resized(gpus), np.resize(self._node_of, gpus)
        evaluation.results.put(changed, self._run(evaluation, changed))
        nodes = np.zeros(len(snapshot.node_names), np.bool_)
        nodes[self._node_of[changed]] = True  # a row may have moved to another node
        nodes[snapshot.gpus.node[changed]] = True
        self._node_of[changed] = snapshot.gpus.node[changed]
        if self.policy.is_local:
            self.best.put(nodes, select(evaluation, self.policy, snapshot.grid.only(nodes)))
        else:
            self.best.put_all(select(evaluation, self.policy))


class EvaluationCache:
    """Returns evaluations that are up to date with the cluster."""

    def __init__(
        self,
        cluster: ClusterCache,
        config: SchedulerConfig,
        max_entries: int = MAX_ENTRIES,
        filter_runner: FilterRunner = filter_rows,
    ) -> None:
        self._cluster, self._config, self._run = cluster, config, filter_runner
        self._entries: LRUCache[bytes, tuple[int, CachedEvaluation]] = LRUCache(max_entries)

    def of(self, pod_request: PodRequest) -> CachedEvaluation:
        """Return the evaluation of a request on the cluster as it is now; it is valid until the next `await`."""
        snapshot = self._cluster.snapshot()
        generation, cached = self._entries.get(pod_request.shape, (0, None))
        if cached is None:
            cached = CachedEvaluation(pod_request, self._config, snapshot, self._run)
        else:
            cached.update(snapshot, self._cluster.changed_since(generation))
        self._entries[pod_request.shape] = (self._cluster.generation, cached)
        return cached


@dataclass(frozen=True, slots=True, eq=False)
class FilteredNodes:
    """Result of the filters for the offered nodes."""

    fits: list[str]
    """The best nodes that fit."""
    refused: dict[str, str]
    """Message for each node that could fit after others have left."""
    unsuitable: dict[str, str]
    """Message for each node that would not fit even if it were empty."""


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs of a pod, and how it shares them."""

    gpu_uuids: list[GpuUuid]
    mode: SharingMode
    memory_limit_mib: int | None
    thread_percentage: int | None
    mig_profile: str | None
    tenant: TenantProfile
    expected_slowdown: float
    policy: str
    reason: str


def filter_nodes(
    cached: CachedEvaluation, names: Sequence[str], most: int = MAX_CANDIDATES, among: Bools | None = None
) -> FilteredNodes:
    """Return the best nodes that fit, and one message for all others.

    There is one message because kube-scheduler lists each distinct one in the pod's condition. `among` are the GPUs
    that no other worker of the job has, shape (gpus,); None if it has no other worker.
    """
    if among is not None and cached.best.fits.any():
        found, offered = select(cached.evaluation, cached.policy, among=among), set(names)
        node_names = [cached.evaluation.snapshot.node_names[node] for node in found.node.tolist()]
        found = found.only(np.flatnonzero([name in offered for name in node_names]))
        best = found.node[top_k(found, cached.policy, most)].tolist()
        fits = [cached.evaluation.snapshot.node_names[node] for node in best]
        return FilteredNodes(fits, {} if fits else dict.fromkeys(names, OTHER_WORKERS), {})
    if len(names) > FEW and (usual := _best_of_all(cached, names, most)):
        return FilteredNodes(usual, {}, {})
    evaluation, snapshot = cached.evaluation, cached.evaluation.snapshot
    ids = snapshot.ids(names)
    fitting = cached.best.fits[ids] & (ids >= 0) if len(cached.best.fits) else ids >= 0
    able = np.flatnonzero(fitting)
    best = able[top_k(cached.best.of(ids[able]), cached.policy, most)]
    fits = [names[place] for place in best.tolist()]
    if able.size == len(names) or (fits and len(names) > FEW):
        return FilteredNodes(fits, {}, {})
    rejected, ids = list(compress(names, (~fitting).tolist())), ids[~fitting]
    rows = snapshot.rows_of(ids)
    gpus_of_node = _count_by_node(snapshot, rows)
    suitable = _count_by_node(snapshot, rows[evaluation.could_ever()[rows]]) >= evaluation.pod_request.demand.gpus
    message = summary(evaluation, rows, int(((gpus_of_node[ids] == 0) | (ids < 0)).sum()))
    hopeful = (suitable[ids] & (ids >= 0)).tolist()
    return FilteredNodes(
        fits=fits,
        refused=dict.fromkeys(compress(rejected, hopeful), message),
        unsuitable={name: message for name, is_hopeful in zip(rejected, hopeful, strict=True) if not is_hopeful},
    )


def _count_by_node(snapshot: Snapshot, rows: Rows) -> NDArray[np.intp]:
    """Return how many of some GPUs each node has; the entry at -1, for unknown nodes, is 0."""
    return np.bincount(snapshot.gpus.node[rows], minlength=len(snapshot.node_names) + 1)


def _best_of_all(cached: CachedEvaluation, names: Sequence[str], most: int) -> list[str]:
    """Return the best nodes of the cluster if enough of them are offered; none otherwise.

    Looking up a few names is much faster than looking up all offered ones.
    """
    node_names, policy = cached.evaluation.snapshot.node_names, cached.policy
    if most == 1:
        node = cached.best.first(policy)
        if node is None:
            return []
        if node_names[node] in names:
            return [node_names[node]]
    able = np.flatnonzero(cached.best.fits)
    best = able[top_k(cached.best.of(able), policy, most + SPARE)]
    first = [node_names[place] for place in best.tolist()]
    offered = set(first).intersection(names)
    found = [name for name in first if name in offered][:most]
    return found if len(found) == most or best.size == able.size else []


def score_nodes(cached: CachedEvaluation, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the scores of the offered nodes, from 0 to 10; 0 where the pod does not fit."""
    ids = cached.evaluation.snapshot.ids(names)
    result = np.zeros(len(ids), np.int64)
    if len(ids) == 1:
        result[0] = MAX_SCORE if ids[0] >= 0 and cached.best.fits[ids[0]] else 0
        return result
    known = np.flatnonzero(ids >= 0)
    fitting = known[cached.best.fits[ids[known]]]
    result[fitting] = scores(cached.best.of(ids[fitting]), cached.policy)
    return result


def place_on_node(cached: CachedEvaluation, name: str, among: Bools | None = None) -> Placement | str:
    """Return the GPUs that a pod gets on one node, or why none fits; other arguments as in `best_place`."""
    evaluation, ids = cached.evaluation, cached.evaluation.snapshot.ids([name])
    if ids[0] < 0 or not cached.best.fits[ids[0]]:
        rows = evaluation.snapshot.rows_of(ids)
        return summary(evaluation, rows, int(not rows.size))
    if among is None:
        chosen = cached.best.of(ids).rows
    else:
        node = np.zeros(len(evaluation.snapshot.node_names), np.bool_)
        node[ids] = True
        chosen = select(evaluation, cached.policy, evaluation.snapshot.grid.only(node), among).rows
    if not len(chosen):
        return OTHER_WORKERS
    rows = chosen[0].tolist()
    return placement_on(evaluation, rows, cached.policy, placement_reason(evaluation, rows, cached.policy))


def best_place(
    cached: CachedEvaluation, among: Bools | None = None, *, with_reason: bool = True
) -> tuple[str, Placement] | None:
    """Return the node with the best score and the GPUs there, as after filter and prioritize.

    Args:
        cached: Evaluation of the pod.
        among: Permitted GPUs, shape (gpus,); all if None.
        with_reason: Whether the placement carries its reason, which takes longer than the placement.

    Returns:
        The node's name and the placement; None if nothing fits.
    """
    evaluation, policy = cached.evaluation, cached.policy
    if among is None:
        candidates = cached.best.of(np.flatnonzero(cached.best.fits))
    else:
        candidates = select(evaluation, policy, among=among)
    if not len(candidates.node):
        return None
    best = best_of(candidates, np.flatnonzero(ties(candidates, policy)))
    rows = candidates.rows[best].tolist()
    reason = placement_reason(evaluation, rows, policy) if with_reason else ""
    return evaluation.snapshot.node_names[int(candidates.node[best])], placement_on(evaluation, rows, policy, reason)


def placement_on(evaluation: Evaluation, rows: list[int], policy: Policy, reason: str) -> Placement:
    """Return the placement of a pod on some GPUs of one node."""
    gpus, mode = evaluation.snapshot.gpus, mode_on(evaluation, rows)
    # A reservation has one number for all of its GPUs: at most what the smallest of them has.
    required = min(map(evaluation.requirements, rows), key=lambda one: one.unenforced_mib or 0)
    return Placement(
        gpu_uuids=[gpus.uuid[row] for row in rows],
        mode=mode,
        memory_limit_mib=memory_limit_mib(mode, required),
        thread_percentage=thread_limit(mode, required, is_first=not gpus.count[rows].any()),
        mig_profile=required.mig.name if mode is SharingMode.MIG and required.mig else None,
        tenant=tenant_profile(required, mode),
        expected_slowdown=round(float(evaluation.results.slowdown[rows].max()), 4),
        policy=policy.name,
        reason=reason,
    )


def reservation_of(
    placement: Placement, pod_request: PodRequest, pod_uid: PodUid, pod_name: str, *, now: datetime, deadline: datetime
) -> Reservation:
    """Return the reservation that the node's agent acts on."""
    demand = pod_request.demand
    return Reservation(
        pod_uid=pod_uid,
        pod_namespace=demand.namespace,
        tenancy_group=demand.tenancy_group,
        pod_name=pod_name,
        job_uid=demand.job_uid,
        job_name=demand.job_name,
        gpu_uuids=placement.gpu_uuids,
        mode=placement.mode,
        memory_limit_mib=placement.memory_limit_mib,
        thread_percentage=placement.thread_percentage,
        mig_profile=placement.mig_profile,
        run_as_user=pod_request.user,
        reserved_at=rfc3339(now),
        deadline=rfc3339(deadline),
        tenant=placement.tenant,
        expected_slowdown=placement.expected_slowdown,
        policy=placement.policy,
        reason=placement.reason,
    )
