"""The decisions: which nodes fit, how good they are, and exactly which GPUs of one node a pod gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import compress

import numpy as np
from carpool_core.clock import rfc3339
from carpool_core.resources.node import LONGEST_REASON, Reservation, TenantProfile
from carpool_core.values import GpuUuid, PodUid, SharingMode
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import MODES, Bools, Rows, View
from carpool_extender.cache.pod_request import Applicant
from carpool_extender.framework.candidates import MAX_SCORE, best_of, foremost, scores, select, ties
from carpool_extender.framework.diagnosis import (
    GpuAnswer,
    Offer,
    counted,
    expected_slowdown,
    explanation,
    in_full,
    summary,
)
from carpool_extender.framework.evaluation_cache import Assessment
from carpool_extender.framework.filters import PASSED, Check, Verdict
from carpool_extender.framework.scheduler_config import Rules
from carpool_extender.framework.scores import Policy
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
class Filtered:
    """Which of the offered nodes are the best that fit, and why others do not."""

    fits: list[str]
    refused: dict[str, str]
    """Sentence for each node that could fit once others have left."""
    unsuitable: dict[str, str]
    """Sentence for each node that could not hold the job even if it were empty."""


@dataclass(frozen=True, slots=True)
class Place:
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


def filter_nodes(assessment: Assessment, names: Sequence[str], most: int = MOST_CANDIDATES) -> Filtered:
    """Decide which of the offered nodes have room, and return the best of them; all others get the same sentence.

    One sentence for all, because kube-scheduler lists each different sentence in the pod's condition. The best only,
    because it takes the best, and each name costs both sides time.

    Args:
        assessment: Of the newcomer.
        names: The offered nodes.
        most: How many nodes are returned at most.
    """
    if len(names) > FEW and (usual := _best_of_all(assessment, names, most)):
        return Filtered(usual, {}, {})
    ids = assessment.verdict.view.ids(names)
    fitting = assessment.best.fits[ids] & (ids >= 0) if len(assessment.best.fits) else ids >= 0
    able = np.flatnonzero(fitting)
    best = able[foremost(assessment.best.of(ids[able]), assessment.policy, most)]
    fits = [names[place] for place in best.tolist()]
    if able.size == len(names) or (fits and len(names) > FEW):
        return Filtered(fits, {}, {})
    verdict, out = assessment.verdict, list(compress(names, (~fitting).tolist()))
    rows, ids = _rows_of(verdict.view, ids[~fitting]), ids[~fitting]
    with_gpus, hopeful = _counts(verdict.view, rows) > 0, _could_ever(verdict, rows)
    sentence = summary(verdict, Offer(rows, int((~with_gpus[ids] | (ids < 0)).sum())))
    hope = (hopeful[ids] & (ids >= 0)).tolist()
    return Filtered(
        fits=fits,
        refused=dict.fromkeys(compress(out, hope), sentence),
        unsuitable={name: sentence for name, hoping in zip(out, hope, strict=True) if not hoping},
    )


def _best_of_all(assessment: Assessment, names: Sequence[str], most: int) -> list[str]:
    """Return the best nodes of the cluster if enough of them are offered, as they mostly are; none otherwise.

    To find a few names among the offered ones takes a fraction of the time that it takes to find all of these.
    """
    known, policy = assessment.verdict.view.node_names, assessment.policy
    if most == 1:
        node = assessment.best.foremost(policy)
        if node is None:
            return []
        if known[node] in names:  # to hash all that are offered takes longer
            return [known[node]]
    able = np.flatnonzero(assessment.best.fits)
    best = able[foremost(assessment.best.of(able), policy, most + SPARE)]
    first = [known[place] for place in best.tolist()]
    offered = set(first).intersection(names)
    found = [name for name in first if name in offered][:most]
    return found if len(found) == most or best.size == able.size else []


def score_nodes(assessment: Assessment, names: Sequence[str]) -> NDArray[np.int64]:
    """Score the offered nodes, as in `filter_nodes`, from 0 to 10; 0 where nothing fits any more."""
    ids = assessment.verdict.view.ids(names)
    found = np.zeros(len(ids), np.int64)
    if len(ids) == 1:  # as mostly, and a node alone is the best one
        found[0] = MAX_SCORE if ids[0] >= 0 and assessment.best.fits[ids[0]] else 0
        return found
    known = np.flatnonzero(ids >= 0)
    fitting = known[assessment.best.fits[ids[known]]]
    found[fitting] = scores(assessment.best.of(ids[fitting]), assessment.policy)
    return found


def place(assessment: Assessment, name: str, *, tells: bool = True) -> Place | str:
    """Choose the GPUs of one node for a pod, or say why none fits; `tells` as in `best_place`."""
    verdict = assessment.verdict
    ids = verdict.view.ids([name])
    if ids[0] >= 0 and assessment.best.fits[ids[0]]:
        rows = assessment.best.of(ids).rows[0].tolist()
        told = _why(verdict, rows, assessment.policy) if tells else ""
        return _place_on(verdict, rows, assessment.policy, told)
    rows = _rows_of(verdict.view, ids)
    return summary(verdict, Offer(rows, int(not rows.size)))


def best_place(assessment: Assessment, among: Bools | None = None, *, tells: bool = True) -> tuple[str, Place] | None:
    """Choose the node that scores best and its GPUs, as kube-scheduler would after filter and prioritize.

    Args:
        assessment: Of the newcomer.
        among: GPUs in question, shape (gpus,); all when None.
        tells: Whether the place says why it is the best; to find the words takes longer than to find the place.

    Returns:
        The node's name and the place, or None where nothing fits.
    """
    verdict, policy = assessment.verdict, assessment.policy
    if among is None:
        choices = assessment.best.of(np.flatnonzero(assessment.best.fits))
    else:
        choices = select(verdict, policy, among=among)
    if not len(choices.node):
        return None
    best = best_of(choices, np.flatnonzero(ties(choices, policy)))
    rows = choices.rows[best].tolist()
    told = _why(verdict, rows, policy) if tells else ""
    return verdict.view.node_names[int(choices.node[best])], _place_on(verdict, rows, policy, told)


def explain(view: View, applicant: Applicant, names: Sequence[str], rules: Rules) -> list[GpuAnswer]:
    """Say of each GPU of some nodes whether the job fits there, and if not, which checks failed by how much."""
    verdict, columns = Assessment(applicant, rules, view).verdict, view.columns
    return [
        GpuAnswer(
            node=view.node_names[int(columns.node[row])],
            index=int(columns.gpu_index[row]),
            uuid=columns.uuid[row],
            product=view.product(row),
            fits=bool(verdict.ok[row]),
            said=in_full(verdict, row),
            counts_tenants=int(verdict.found.failed[row]) in _BY_TENANTS,
        )
        for row in _rows_of(view, view.ids(names)).tolist()
    ]


def reservation(
    chosen: Place, applicant: Applicant, pod_uid: PodUid, pod_name: str, *, now: datetime, deadline: datetime
) -> Reservation:
    """Write a place down as the reservation that the node's agent acts on."""
    demand = applicant.demand
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
        run_as_user=applicant.user,
        reserved_at=rfc3339(now),
        deadline=rfc3339(deadline),
        tenant=chosen.tenant,
        expected_slowdown=chosen.expected_slowdown,
        policy=chosen.policy,
        reason=chosen.reason,
    )


def _rows_of(view: View, ids: NDArray[np.intp]) -> Rows:
    """Rows of the GPUs of some nodes; none for an index of -1."""
    wanted = np.zeros(len(view.node_names) + 1, np.bool_)
    wanted[ids] = True
    wanted[-1] = False
    return np.flatnonzero(view.columns.alive & wanted[view.columns.node])


def _counts(view: View, rows: Rows) -> NDArray[np.intp]:
    """How many of some GPUs each node has; one more entry, for nodes that are not known."""
    return np.bincount(view.columns.node[rows], minlength=len(view.node_names) + 1)


def _could_ever(verdict: Verdict, rows: Rows) -> Bools:
    """Which nodes would have enough GPUs if they were empty and healthy; one more entry, as in `_counts`."""
    enough: Bools = _counts(verdict.view, rows[verdict.could_ever()[rows]]) >= verdict.applicant.demand.gpus
    return enough


def _place_on(verdict: Verdict, rows: list[int], policy: Policy, reason: str) -> Place:
    view, first, mode = verdict.view, rows[0], _mode_on(verdict, rows)
    facts = verdict.applicant.facts(view.classes[int(view.columns.device_class[first])])
    slowdown = round(float(verdict.found.newcomer[rows].max()), 4)
    return Place(
        gpu_uuids=[view.columns.uuid[row] for row in rows],
        mode=mode,
        memory_limit_mib=memory_limit_mib(mode, facts),
        thread_percentage=thread_limit(mode, facts, is_first=not view.columns.count[rows].any()),
        mig_profile=facts.mig.name if mode is SharingMode.MIG and facts.mig else None,
        tenant=counting(facts, mode),
        expected_slowdown=slowdown,
        policy=policy.name,
        reason=reason,
    )


def _mode_on(verdict: Verdict, rows: list[int]) -> SharingMode:
    """Return the mode in which a worker would have some GPUs: the same on all of them."""
    mode = MODES[int(verdict.found.mode[rows[0]])]
    if mode is None:
        raise AssertionError(f"{verdict.view.place(rows[0])} was chosen although no mode is possible there")
    return mode


def _why(verdict: Verdict, rows: list[int], policy: Policy) -> str:
    """Say why this place, with the numbers that the decision counted with."""
    view, demand, mode = verdict.view, verdict.applicant.demand, _mode_on(verdict, rows)
    gpus = ", ".join(str(int(view.columns.gpu_index[row])) for row in rows)
    node = view.node_names[int(view.columns.node[rows[0]])]
    neighbours = sorted({str(tenant) for row in rows for tenant in view.columns.tenants[row]})
    more = [f"and {len(neighbours) - MOST_NEIGHBOURS} more"] if len(neighbours) > MOST_NEIGHBOURS else []
    beside = f"beside {', '.join([*neighbours[:MOST_NEIGHBOURS], *more])}" if neighbours else "alone"
    left = int(verdict.left_mib(np.array(rows)).min())
    parts = [
        f"{policy.name}: {mode} on GPU {gpus} of {node} {beside}",
        f"{left:,} of {int(view.columns.usable_mib[rows[0]]):,} MiB left",
        expected_slowdown(verdict, rows, demand.max_slowdown),
    ]
    facts = verdict.applicant.facts(view.classes[int(view.columns.device_class[rows[0]])])
    profile, boundless = counting(facts, mode), None
    if profile.memory_mib is None:
        boundless = unbounded(demand, view.product(rows[0]), settles=profile.provisional)
    because = why(mode, demand, is_first=not neighbours, alone=verdict.conditions.alone, boundless=boundless)
    parts.append(f"{mode} {because}")
    if boundless and boundless not in because:
        parts.append(boundless)
    if mode is SharingMode.TIME_SLICING and facts.is_wider_by_turns:
        parts.append(f"its first run counts with {profile.memory_mib:,} MiB, because nothing limits it by turns")
    parts += _passed_over(verdict)
    told = "; ".join(parts)
    return told if len(told) <= LONGEST_REASON else f"{told[: LONGEST_REASON - 1]}…"


def _passed_over(verdict: Verdict) -> list[str]:
    """Name the GPU that came closest among those that had the memory and were refused for the slowdown."""
    refused = np.flatnonzero(verdict.found.failed == Check.SLOWDOWN)
    if not refused.size:
        return []
    closest = int(refused[np.argmax(verdict.found.margin[refused])])
    which = "" if refused.size == 1 else "the closest was "
    return [f"passed over {counted(refused.size, 'GPU')} that had the memory: {which}{explanation(verdict, closest)}"]
