"""The decisions: which nodes fit, how good they are, and exactly which GPUs of one node a pod gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import compress

import numpy as np
from carpool_core.clock import rfc3339
from carpool_core.resources.node import MAX_REASON_LENGTH, Reservation, TenantProfile
from carpool_core.values import GpuUuid, PodUid, SharingMode
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import MODES, Bools, Rows, Snapshot
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.diagnosis import (
    GpuAnswer,
    Offer,
    all_failures,
    expected_slowdown,
    explain_gpu,
    pluralize,
    summary,
)
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.filters import PASSED, Check, Evaluation
from carpool_extender.framework.scores import MAX_SCORE, Policy, SchedulerConfig, best_of, scores, select, ties, top_k
from carpool_extender.framework.sharing_mode import counting, memory_limit_mib, thread_limit, unbounded, why

MOST_CANDIDATES = 100
"""Nodes that `filter_nodes` returns where nobody says how many; kube-scheduler itself looks for no more in large
clusters."""
SPARE = 100
"""So many more of the best nodes are looked at, in case that kube-scheduler does not offer all of them."""
FEW = 100
"""Offered nodes of which each is looked up, and told why it does not fit though others do. Of more nothing is told:
kube-scheduler would drop it."""
_BY_TENANTS = frozenset((PASSED, Check.MEMORY, Check.CONDITION, Check.SLOWDOWN))
"""What comes of checks that count with what tenants take and do."""
MOST_NEIGHBOURS = 5
"""Jobs on the chosen GPUs that a reservation's reason names; of more it says how many."""


@dataclass(frozen=True, slots=True, eq=False)
class FilteredNodes:
    """Which of the offered nodes are the best that fit, and why others do not."""

    fits: list[str]
    refused: dict[str, str]
    """Sentence for each node that could fit once others have left."""
    unsuitable: dict[str, str]
    """Sentence for each node that could not hold the job even if it were empty."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Exactly what a pod gets."""

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
    cached_evaluation: CachedEvaluation, names: Sequence[str], most: int = MOST_CANDIDATES
) -> FilteredNodes:
    """Decide which of the offered nodes have room, and return the best of them; all others get the same sentence.

    One sentence for all, because kube-scheduler lists each different sentence in the pod's condition. The best only,
    because it takes the best, and each name costs both sides time.

    Args:
        cached_evaluation: Of the newcomer.
        names: The offered nodes.
        most: How many nodes are returned at most.
    """
    if len(names) > FEW and (usual := _best_of_all(cached_evaluation, names, most)):
        return FilteredNodes(usual, {}, {})
    ids = cached_evaluation.evaluation.snapshot.ids(names)
    fitting = cached_evaluation.best.fits[ids] & (ids >= 0) if len(cached_evaluation.best.fits) else ids >= 0
    able = np.flatnonzero(fitting)
    best = able[top_k(cached_evaluation.best.of(ids[able]), cached_evaluation.policy, most)]
    fits = [names[place_on_node] for place_on_node in best.tolist()]
    if able.size == len(names) or (fits and len(names) > FEW):
        return FilteredNodes(fits, {}, {})
    evaluation, out = cached_evaluation.evaluation, list(compress(names, (~fitting).tolist()))
    rows, ids = _rows_of(evaluation.snapshot, ids[~fitting]), ids[~fitting]
    with_gpus, hopeful = _counts(evaluation.snapshot, rows) > 0, _could_ever(evaluation, rows)
    sentence = summary(evaluation, Offer(rows, int((~with_gpus[ids] | (ids < 0)).sum())))
    hope = (hopeful[ids] & (ids >= 0)).tolist()
    return FilteredNodes(
        fits=fits,
        refused=dict.fromkeys(compress(out, hope), sentence),
        unsuitable={name: sentence for name, hoping in zip(out, hope, strict=True) if not hoping},
    )


def _best_of_all(cached_evaluation: CachedEvaluation, names: Sequence[str], most: int) -> list[str]:
    """Return the best nodes of the cluster if enough of them are offered, as they mostly are; none otherwise.

    To find a few names among the offered ones takes a fraction of the time that it takes to find all of these.
    """
    known, policy = cached_evaluation.evaluation.snapshot.node_names, cached_evaluation.policy
    if most == 1:
        node = cached_evaluation.best.top_k(policy)
        if node is None:
            return []
        if known[node] in names:  # to hash all that are offered takes longer
            return [known[node]]
    able = np.flatnonzero(cached_evaluation.best.fits)
    best = able[top_k(cached_evaluation.best.of(able), policy, most + SPARE)]
    first = [known[place_on_node] for place_on_node in best.tolist()]
    offered = set(first).intersection(names)
    found = [name for name in first if name in offered][:most]
    return found if len(found) == most or best.size == able.size else []


def score_nodes(cached_evaluation: CachedEvaluation, names: Sequence[str]) -> NDArray[np.int64]:
    """Score the offered nodes, as in `filter_nodes`, from 0 to 10; 0 where nothing fits any more."""
    ids = cached_evaluation.evaluation.snapshot.ids(names)
    found = np.zeros(len(ids), np.int64)
    if len(ids) == 1:  # as mostly, and a node alone is the best one
        found[0] = MAX_SCORE if ids[0] >= 0 and cached_evaluation.best.fits[ids[0]] else 0
        return found
    known = np.flatnonzero(ids >= 0)
    fitting = known[cached_evaluation.best.fits[ids[known]]]
    found[fitting] = scores(cached_evaluation.best.of(ids[fitting]), cached_evaluation.policy)
    return found


def place_on_node(cached_evaluation: CachedEvaluation, name: str, *, with_reason: bool = True) -> Placement | str:
    """Choose the GPUs of one node for a pod, or say why none fits; `with_reason` as in `best_place`."""
    evaluation = cached_evaluation.evaluation
    ids = evaluation.snapshot.ids([name])
    if ids[0] >= 0 and cached_evaluation.best.fits[ids[0]]:
        rows = cached_evaluation.best.of(ids).rows[0].tolist()
        told = _why(evaluation, rows, cached_evaluation.policy) if with_reason else ""
        return placement_on(evaluation, rows, cached_evaluation.policy, told)
    rows = _rows_of(evaluation.snapshot, ids)
    return summary(evaluation, Offer(rows, int(not rows.size)))


def best_place(
    cached_evaluation: CachedEvaluation, among: Bools | None = None, *, with_reason: bool = True
) -> tuple[str, Placement] | None:
    """Choose the node that scores best and its GPUs, as kube-scheduler would after filter and prioritize.

    Args:
        cached_evaluation: Of the newcomer.
        among: GPUs in question, shape (gpus,); all when None.
        with_reason: Whether the place says why it is the best; to find the words takes longer than to find the place.

    Returns:
        The node's name and the place, or None where nothing fits.
    """
    evaluation, policy = cached_evaluation.evaluation, cached_evaluation.policy
    if among is None:
        choices = cached_evaluation.best.of(np.flatnonzero(cached_evaluation.best.fits))
    else:
        choices = select(evaluation, policy, among=among)
    if not len(choices.node):
        return None
    best = best_of(choices, np.flatnonzero(ties(choices, policy)))
    rows = choices.rows[best].tolist()
    told = _why(evaluation, rows, policy) if with_reason else ""
    return evaluation.snapshot.node_names[int(choices.node[best])], placement_on(evaluation, rows, policy, told)


def explain_gpus(
    snapshot: Snapshot, pod_request: PodRequest, names: Sequence[str], rules: SchedulerConfig
) -> list[GpuAnswer]:
    """Say of each GPU of some nodes whether the job fits there, and if not, which checks failed by how much."""
    evaluation, columns = CachedEvaluation(pod_request, rules, snapshot).evaluation, snapshot.gpus
    return [
        GpuAnswer(
            node=snapshot.node_names[int(columns.node[row])],
            index=int(columns.gpu_index[row]),
            uuid=columns.uuid[row],
            product=snapshot.product(row),
            fits=bool(evaluation.ok[row]),
            said=all_failures(evaluation, row),
            counts_tenants=int(evaluation.results.failed[row]) in _BY_TENANTS,
        )
        for row in _rows_of(snapshot, snapshot.ids(names)).tolist()
    ]


def reservation_of(
    chosen: Placement, pod_request: PodRequest, pod_uid: PodUid, pod_name: str, *, now: datetime, deadline: datetime
) -> Reservation:
    """Write a place down as the reservation that the node's agent acts on."""
    demand = pod_request.demand
    return Reservation(
        pod_uid=pod_uid,
        pod_namespace=demand.namespace,
        pod_name=pod_name,
        job_uid=demand.job_uid,
        job_name=demand.job_name,
        gpu_uuids=chosen.gpu_uuids,
        mode=chosen.mode,
        memory_limit_mib=chosen.memory_limit_mib,
        thread_percentage=chosen.thread_percentage,
        mig_profile=chosen.mig_profile,
        run_as_user=pod_request.user,
        reserved_at=rfc3339(now),
        deadline=rfc3339(deadline),
        tenant=chosen.tenant,
        expected_slowdown=chosen.expected_slowdown,
        policy=chosen.policy,
        reason=chosen.reason,
    )


def _rows_of(snapshot: Snapshot, ids: NDArray[np.intp]) -> Rows:
    """Rows of the GPUs of some nodes; none for an index of -1."""
    wanted = np.zeros(len(snapshot.node_names) + 1, np.bool_)
    wanted[ids] = True
    wanted[-1] = False
    return np.flatnonzero(snapshot.gpus.alive & wanted[snapshot.gpus.node])


def _counts(snapshot: Snapshot, rows: Rows) -> NDArray[np.intp]:
    """How many of some GPUs each node has; one more entry, for nodes that are not known."""
    return np.bincount(snapshot.gpus.node[rows], minlength=len(snapshot.node_names) + 1)


def _could_ever(evaluation: Evaluation, rows: Rows) -> Bools:
    """Which nodes would have enough GPUs if they were empty and healthy; one more entry, as in `_counts`."""
    enough: Bools = (
        _counts(evaluation.snapshot, rows[evaluation.could_ever()[rows]]) >= evaluation.pod_request.demand.gpus
    )
    return enough


def placement_on(evaluation: Evaluation, rows: list[int], policy: Policy, reason: str) -> Placement:
    """Return the placement of a worker on some GPUs of one node, with a reason for people."""
    snapshot, first, mode = evaluation.snapshot, rows[0], _mode_on(evaluation, rows)
    facts = evaluation.pod_request.requirements(snapshot.classes[int(snapshot.gpus.device_class[first])])
    slowdown = round(float(evaluation.results.slowdown[rows].max()), 4)
    return Placement(
        gpu_uuids=[snapshot.gpus.uuid[row] for row in rows],
        mode=mode,
        memory_limit_mib=memory_limit_mib(mode, facts),
        thread_percentage=thread_limit(mode, facts, is_first=not snapshot.gpus.count[rows].any()),
        mig_profile=facts.mig.name if mode is SharingMode.MIG and facts.mig else None,
        tenant=counting(facts, mode),
        expected_slowdown=slowdown,
        policy=policy.name,
        reason=reason,
    )


def _mode_on(evaluation: Evaluation, rows: list[int]) -> SharingMode:
    """Return the mode in which a worker would have some GPUs: the same on all of them."""
    mode = MODES[int(evaluation.results.mode[rows[0]])]
    if mode is None:
        raise AssertionError(f"{evaluation.snapshot.place(rows[0])} was chosen although no mode is possible there")
    return mode


def _why(evaluation: Evaluation, rows: list[int], policy: Policy) -> str:
    """Say why this place, with the numbers that the decision counted with."""
    snapshot, demand, mode = evaluation.snapshot, evaluation.pod_request.demand, _mode_on(evaluation, rows)
    gpus = ", ".join(str(int(snapshot.gpus.gpu_index[row])) for row in rows)
    node = snapshot.node_names[int(snapshot.gpus.node[rows[0]])]
    neighbours = sorted({str(tenant) for row in rows for tenant in snapshot.gpus.tenants[row]})
    more = [f"and {len(neighbours) - MOST_NEIGHBOURS} more"] if len(neighbours) > MOST_NEIGHBOURS else []
    beside = f"beside {', '.join([*neighbours[:MOST_NEIGHBOURS], *more])}" if neighbours else "alone"
    left = int(evaluation.left_mib(np.array(rows)).min())
    parts = [
        f"{policy.name}: {mode} on GPU {gpus} of {node} {beside}",
        f"{left:,} of {int(snapshot.gpus.usable_mib[rows[0]]):,} MiB left",
        expected_slowdown(evaluation, rows, demand.max_slowdown),
    ]
    facts = evaluation.pod_request.requirements(snapshot.classes[int(snapshot.gpus.device_class[rows[0]])])
    profile, boundless = counting(facts, mode), None
    if profile.memory_mib is None:
        boundless = unbounded(demand, snapshot.product(rows[0]), settles=profile.provisional)
    because = why(mode, demand, is_first=not neighbours, alone=evaluation.limits.alone, boundless=boundless)
    parts.append(f"{mode} {because}")
    if boundless and boundless not in because:
        parts.append(boundless)
    if mode is SharingMode.TIME_SLICING and facts.is_wider_by_turns:
        parts.append(f"its first run counts with {profile.memory_mib:,} MiB, because nothing limits it by turns")
    parts += _passed_over(evaluation)
    told = "; ".join(parts)
    return told if len(told) <= MAX_REASON_LENGTH else f"{told[: MAX_REASON_LENGTH - 1]}…"


def _passed_over(evaluation: Evaluation) -> list[str]:
    """Name the GPU that came closest among those that had the memory and were refused for the slowdown."""
    refused = np.flatnonzero(evaluation.results.failed == Check.SLOWDOWN)
    if not refused.size:
        return []
    closest = int(refused[np.argmax(evaluation.results.slowdown_margin[refused])])
    which = "" if refused.size == 1 else "the closest was "
    return [
        f"passed over {pluralize(refused.size, 'GPU')} that had the memory: {which}{explain_gpu(evaluation, closest)}"
    ]
