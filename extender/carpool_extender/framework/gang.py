"""Whether all workers of a job would find places: asked before its first one gets one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

import msgspec
import numpy as np
from carpool_core.values import GpuUuid, JobUid, PodUid
from numpy.typing import NDArray

from carpool_extender.cache import ledger
from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import (
    MODES,
    NO_MODE,
    NO_TENANT,
    Bools,
    Rows,
    Snapshot,
    grid_of,
    update_aggregates,
)
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.diagnosis import PREFIX, pluralize
from carpool_extender.framework.evaluation_cache import CachedEvaluation, EvaluationCache
from carpool_extender.framework.filters import Evaluation, run_filters
from carpool_extender.framework.scores import Policy, SchedulerConfig, select
from carpool_extender.framework.selection import Placement, best_place, reservation_of
from carpool_extender.framework.sharing_mode import EXCLUSIVE, MIG


def max_workers(cached_evaluation: CachedEvaluation, rows: Rows, wanted: int) -> int:
    """Say how many workers would find a place at once, at most as many as are wanted.

    Args:
        cached_evaluation: Of one of the workers.
        rows: GPUs that would take one, in rising order.
        wanted: How many there are.
    """
    apart = _sets_apart(cached_evaluation.evaluation, rows)
    return wanted if apart >= wanted else len(places_for(cached_evaluation, rows, wanted))


def places_for(cached_evaluation: CachedEvaluation, rows: Rows, wanted: int) -> Rows:
    """Find places for as many workers at once as there are, or there is room for.

    Workers meet on GPUs, and those of several GPUs on nodes. So each GPU, or each node, takes one more of them on paper
    at the same time, until none does: as many rounds as one of them takes workers, where workers that are placed one
    after the other are many more. Neighbours count with what they were measured to do before anybody joined.

    Args:
        cached_evaluation: Of one of the workers.
        rows: GPUs that would take one, in rising order.
        wanted: How many there are.

    Returns:
        GPUs of each worker by their rows, shape (workers, GPUs of each), in each round the best first.
    """
    paper, wanted_gpus = (
        _on_paper(cached_evaluation.evaluation, rows),
        cached_evaluation.evaluation.pod_request.demand.gpus,
    )
    found, rounds = 0, [np.zeros((0, wanted_gpus), np.intp)]
    while found < wanted:
        taken = _taken(paper, cached_evaluation.policy)
        if not taken.size:
            break
        found += len(taken)
        rounds.append(rows[taken])
        if found < wanted:
            _join(paper, taken.ravel())
            paper.results = run_filters(paper, paper.snapshot.gpus)
    return np.concatenate(rounds)[:wanted]


def _sets_apart(evaluation: Evaluation, rows: Rows) -> int:
    """How many workers find GPUs that no other of them uses."""
    gpus = evaluation.pod_request.demand.gpus
    if gpus == 1:
        return int(rows.size)
    team = evaluation.snapshot.gpus.node[rows].astype(np.int64) * len(MODES) + evaluation.results.mode[rows]
    return int((np.unique(team, return_counts=True)[1] // gpus).sum())


def _on_paper(evaluation: Evaluation, rows: Rows) -> Evaluation:
    """Copy some GPUs, with what was found of them."""
    columns = evaluation.snapshot.gpus.take(rows)
    snapshot = replace(evaluation.snapshot, gpus=columns, grid=grid_of(columns.alive, columns.node))
    return replace(evaluation, snapshot=snapshot, results=evaluation.results.of(rows))


def _taken(paper: Evaluation, policy: Policy) -> Rows:
    """Return the GPUs of one more worker on each GPU that takes one, or each node, shape (workers, GPUs of each)."""
    if paper.pod_request.demand.gpus > 1:
        choices = select(paper, policy)
        return choices.rows[np.argsort(choices.cost, kind="stable")]
    able = np.flatnonzero(paper.ok)
    return able[np.argsort(policy.cost(paper, able), kind="stable")][:, None]


def _join(paper: Evaluation, rows: Rows) -> None:
    """Write a worker beside the tenants of some GPUs, as far as the next one of the same job looks at it."""
    columns, (facts, _, _, need_mib), demand = paper.snapshot.gpus, paper.openings, paper.pod_request.demand
    of, mode, place = columns.device_class[rows], paper.results.mode[rows], columns.count[rows]
    columns.memory_mib[rows, place] = need_mib.take(columns.kind[rows])
    columns.util[rows, place] = facts.util[of]
    columns.sm[rows, place] = facts.sm[of]
    columns.dram[rows, place] = facts.dram[of]
    columns.max_slowdown[rows, place] = demand.max_slowdown
    columns.namespace[rows, place] = paper.snapshot.namespaces.get(demand.namespace, NO_TENANT)
    instances = mode == MIG
    columns.mig_gb[rows[instances]] += facts.mig[of[instances], 0]
    columns.mig_slices[rows[instances]] += facts.mig[of[instances], 1]
    columns.mode[rows] = mode
    columns.count[rows] += 1
    update_aggregates(columns, rows)


def infeasible_when_empty(evaluation: Evaluation, slots: int, workers: int) -> str | None:
    """Say why so many workers could not even run on empty GPUs; None where nothing known forbids it.

    Args:
        evaluation: Of one of them.
        slots: Most tenants of one GPU.
        workers: How many there are.
    """
    gpus, columns = evaluation.pod_request.demand.gpus, evaluation.snapshot.gpus
    able = np.flatnonzero(evaluation.could_ever())
    able = able[_of_classes(evaluation, slots).take(columns.device_class.take(able)) > 0]
    most = int(np.bincount(columns.node[able], minlength=1).max())
    if most and most < gpus:
        return f"needs {gpus} suitable GPUs on one node, the best node has {most}"
    if not most:
        return "no node has GPUs that would do, even if they were empty"
    if (most := max_workers_when_empty(evaluation, slots)) < workers:
        return f"needs places for {pluralize(workers, 'worker')} at once, and empty GPUs would have {most:,} at most"
    return None


def max_workers_when_empty(evaluation: Evaluation, slots: int) -> int:
    """Say for how many workers there would be room at most: how they get along is left out, and health."""
    columns, gpus = evaluation.snapshot.gpus, evaluation.pod_request.demand.gpus
    able = np.flatnonzero(evaluation.could_ever())
    each = _of_classes(evaluation, slots).take(columns.device_class.take(able))
    if gpus == 1:
        return int(each.sum())
    nodes, has_room = columns.node.take(able), each > 0
    on_node = np.where(np.bincount(nodes, has_room) >= gpus, np.bincount(nodes, each) // gpus, 0)
    return int(on_node.sum())


def _of_classes(evaluation: Evaluation, slots: int) -> NDArray[np.int64]:
    """Say how many workers a GPU of each class takes at most, in whichever mode takes most, shape (classes,)."""
    openings, max_jobs = evaluation.openings, evaluation.limits.max_jobs
    usable = np.array([kind.usable_mib for kind in evaluation.snapshot.classes], np.int64)[:, None]
    held = usable // np.maximum(openings.need_mib, 1)
    of_mig = openings.facts.mig.astype(np.int64)
    instances = (of_mig[:, 2:] // np.maximum(of_mig[:, :2], 1)).min(axis=1)[:, None]
    most = np.where(openings.mode == MIG, instances, held)
    most = np.clip(most, 1, slots if max_jobs is None else min(slots, max_jobs))  # one: they are suitable
    most = np.where(openings.mode == EXCLUSIVE, 1, most)
    result: NDArray[np.int64] = np.where(openings.mode == NO_MODE, 0, most).max(axis=1, initial=0)
    return result


class Seen(Protocol):
    """What has to be known of the cluster."""

    @property
    def cluster(self) -> ClusterCache:
        """The GPUs."""
        ...

    def succeeded(self, job_uid: JobUid, pod_uid: PodUid) -> int:
        """How many pods of a job have done their work in the attempt that one of them is of."""
        ...


class Gangs:
    """Keeps a job from getting some of its places while there is no room for the others.

    Args:
        seen: What is known of the cluster.
        evaluation_cache: What is known of demands.
        rules: What the site has chosen.
    """

    def __init__(self, seen: Seen, evaluation_cache: EvaluationCache, rules: SchedulerConfig) -> None:
        self._seen, self._evaluation_cache, self._rules = seen, evaluation_cache, rules

    def refusal(self, pod_request: PodRequest, pod_uid: PodUid, offered: Sequence[str] | None = None) -> str | None:
        """Say why a pod has to wait until all of its job's workers fit; None where it need not.

        Args:
            pod_request: What each worker demands.
            pod_uid: The pod that asks.
            offered: The nodes in question; all when None.
        """
        demand = pod_request.demand
        wanted, found = self._asked(pod_request, pod_uid, offered)
        if found >= wanted:
            return None
        most = max_workers_when_empty(self._evaluation_cache.of(pod_request).evaluation, self._rules.slots)
        ever = f", and for {most:,} at most if all GPUs were empty" if most < wanted else ""
        return (
            f"{PREFIX}job {demand.namespace}/{demand.job_name} needs places for {pluralize(wanted, 'worker')} of "
            f"{pluralize(demand.gpus, 'GPU')} at once, there is room for {found:,}{ever}; none starts before all can"
        )

    def waits(self, pod_request: PodRequest, pod_uid: PodUid, offered: Sequence[str] | None = None) -> bool:
        """Whether a pod has to wait, as `refusal` would say."""
        wanted, found = self._asked(pod_request, pod_uid, offered)
        return found < wanted

    def wanted(self, pod_request: PodRequest, pod_uid: PodUid) -> int:
        """How many workers of the job that a pod is of have not done their work."""
        return pod_request.workers - self._seen.succeeded(pod_request.demand.job_uid, pod_uid)

    def _asked(self, pod_request: PodRequest, pod_uid: PodUid, offered: Sequence[str] | None) -> tuple[int, int]:
        """Return how many workers have to find places at once, and for how many there is room.

        Once a worker has its place the others take what there is: the job's gang is then the operator's to look after.
        """
        if pod_request.workers == 1 or self._seen.cluster.pods_of_job(pod_request.demand.job_uid) - {pod_uid}:
            return 0, 0
        wanted = self.wanted(pod_request, pod_uid)
        return wanted, self.room_for(pod_request, wanted, offered)

    def room_for(self, pod_request: PodRequest, wanted: int, offered: Sequence[str] | None) -> int:
        """Say how many of some workers find a place, at most as many as are wanted; on all nodes if none are named."""
        cached_evaluation = self._evaluation_cache.of(pod_request)
        return max_workers(cached_evaluation, _fitting(cached_evaluation, offered), wanted)

    def gpus_for(self, pod_request: PodRequest, wanted: int, offered: Sequence[str] | None) -> set[tuple[str, GpuUuid]]:
        """Return GPUs, each with its node's name, on which some workers would find places, or as many of them as do."""
        cached_evaluation = self._evaluation_cache.of(pod_request)
        snapshot = cached_evaluation.evaluation.snapshot
        rows = np.unique(places_for(cached_evaluation, _fitting(cached_evaluation, offered), wanted))
        nodes = [snapshot.node_names[number] for number in snapshot.gpus.node[rows].tolist()]
        return set(zip(nodes, snapshot.gpus.uuid[rows].tolist(), strict=True))


def _fitting(cached_evaluation: CachedEvaluation, offered: Sequence[str] | None) -> Rows:
    """Rows of the GPUs that would take a worker."""
    rows = np.flatnonzero(cached_evaluation.evaluation.ok)
    if offered is None:
        return rows
    wanted = np.zeros(len(cached_evaluation.evaluation.snapshot.node_names) + 1, np.bool_)
    wanted[cached_evaluation.evaluation.snapshot.ids(offered)] = True
    wanted[-1] = False
    return rows[wanted[cached_evaluation.evaluation.snapshot.gpus.node[rows]]]


_NO_TIME = datetime.fromtimestamp(0, UTC)
"""Of reservations that exist on paper only."""


def place_workers(
    cluster: ClusterCache,
    pod_request: PodRequest,
    rules: SchedulerConfig,
    wanted: int,
    *,
    among: Callable[[Snapshot], Bools] | None = None,
    with_reason: bool = True,
) -> Iterator[tuple[str, Placement]]:
    """Place workers as they would be, until so many are or there is room for no more.

    Args:
        cluster: Each place is reserved there before the next one is looked for.
        pod_request: What each worker demands.
        rules: What the site has chosen.
        wanted: How many workers.
        among: Says before each which GPUs are in question, shape (gpus,); all when None.
        with_reason: Whether the places say why they are the best.

    Yields:
        The node's name and the place.
    """
    for number in range(wanted):
        snapshot = cluster.snapshot()
        found = best_place(
            CachedEvaluation(pod_request, rules, snapshot),
            None if among is None else among(snapshot),
            with_reason=with_reason,
        )
        if found is None:
            return
        node = cluster.nodes[found[0]]
        one = reservation_of(found[1], pod_request, PodUid(f"worker-{number}"), "", now=_NO_TIME, deadline=_NO_TIME)
        spec = ledger.reserve(node.spec, one, ledger.capacity_of(node, rules.slots))
        if isinstance(spec, ledger.Rejected):
            return
        cluster.apply(msgspec.structs.replace(node, spec=spec))
        yield found
