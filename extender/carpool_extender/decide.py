"""The decisions: which nodes fit, how good they are, and exactly which GPUs of one node a pod gets."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from carpool_core.clock import rfc3339
from carpool_core.resources.node import Reservation, TenantProfile
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_extender.applicant import Applicant
from carpool_extender.checks import NO_CONDITIONS, Check, Verdict, examine
from carpool_extender.conditions import Conditions
from carpool_extender.modes import memory_limit_mib, thread_limit
from carpool_extender.policies import Policy, find_policy, scores, select
from carpool_extender.refusal import PREFIX, Offer, counted, explanation, summary
from carpool_extender.view import MODES, Bools, View


@dataclass(frozen=True, slots=True)
class Rules:
    """What the site has chosen."""

    policy: Policy
    slots: int
    """Most tenants of one GPU."""
    conditions: Conditions = NO_CONDITIONS
    """What a GPU must be like before the policy looks at it."""

    def policy_for(self, applicant: Applicant) -> Policy:
        """Return the job's own policy, or the site's where it has none."""
        return self.policy if applicant.policy is None else find_policy(applicant.policy)

    def examine(self, view: View, applicant: Applicant) -> Verdict:
        """Run all checks under these rules."""
        alone = self.policy_for(applicant).alone
        conditions = self.conditions.in_exclusive_use() if alone else self.conditions
        return examine(view, applicant, self.slots, conditions)


@dataclass(frozen=True, slots=True)
class Filtered:
    """Which of the offered nodes fit, and why the others do not."""

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
    tenant: TenantProfile
    expected_slowdown: float
    policy: str
    reason: str


def filter_nodes(view: View, applicant: Applicant, names: Sequence[str], rules: Rules) -> Filtered:
    """Decide which of the offered nodes have room; those that have not all get the same sentence.

    One sentence for all, because kube-scheduler lists each different sentence in the pod's condition.
    """
    verdict = rules.examine(view, applicant)
    offered = _rows_of(view, names)
    fitting = {view.node_names[int(i)] for i in select(verdict, rules.policy_for(applicant), offered).node}
    if len(fitting) == len(names):
        return Filtered(list(names), {}, {})
    with_gpus = {view.node_names[int(i)] for i in np.unique(view.columns.node[offered & view.columns.alive])}
    hopeful = _could_ever(verdict, offered)
    missing = sum(name not in with_gpus for name in names)
    sentence = summary(verdict, Offer(offered & ~_rows_of(view, fitting), missing))
    out = [name for name in names if name not in fitting]
    return Filtered(
        fits=[name for name in names if name in fitting],
        refused={name: sentence for name in out if name in hopeful},
        unsuitable={name: sentence for name in out if name not in hopeful},
    )


def score_nodes(view: View, applicant: Applicant, names: Sequence[str], rules: Rules) -> dict[str, int]:
    """Score the offered nodes from 0 to 10; 0 where nothing fits any more."""
    choices = select(rules.examine(view, applicant), rules.policy_for(applicant), _rows_of(view, names))
    found = dict.fromkeys(names, 0)
    for node, score in zip(choices.node, scores(choices, rules.policy_for(applicant)), strict=True):
        found[view.node_names[node]] = int(score)
    return found


def place(view: View, applicant: Applicant, name: str, rules: Rules) -> Place | str:
    """Choose the GPUs of one node for a pod, or say why none fits."""
    verdict = rules.examine(view, applicant)
    here = _rows_of(view, [name])
    choices = select(verdict, rules.policy_for(applicant), here)
    if not len(choices.node):
        return summary(verdict, Offer(here, int(not here.any())))
    return _place_on(verdict, choices.rows[0].tolist(), rules.policy_for(applicant))


def best_place(view: View, applicant: Applicant, rules: Rules, among: Bools | None = None) -> tuple[str, Place] | None:
    """Choose the node that scores best and its GPUs, as kube-scheduler would after filter and prioritize.

    Args:
        view: The cluster.
        applicant: Who asks.
        rules: What the site has chosen.
        among: GPUs in question, shape (gpus,); all that are alive when None.

    Returns:
        The node's name and the place, or None where nothing fits.
    """
    verdict, policy = rules.examine(view, applicant), rules.policy_for(applicant)
    if not verdict.ok.any():
        return None
    choices = select(verdict, policy, view.columns.alive if among is None else among & view.columns.alive)
    if not len(choices.node):
        return None
    best = int(np.argmax(scores(choices, policy)))
    return view.node_names[int(choices.node[best])], _place_on(verdict, choices.rows[best].tolist(), policy)


def explain(view: View, applicant: Applicant, names: Sequence[str], rules: Rules) -> list[str]:
    """Say of each GPU of some nodes whether the job fits there, and if not, which check failed by how much."""
    verdict = rules.examine(view, applicant)
    return [explanation(verdict, int(row)) for row in np.flatnonzero(_rows_of(view, names))]


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
        reserved_at=rfc3339(now),
        deadline=rfc3339(deadline),
        tenant=chosen.tenant,
        expected_slowdown=chosen.expected_slowdown,
        policy=chosen.policy,
        reason=chosen.reason,
    )


def held_elsewhere(node: str, deadline: str) -> str:
    """Say why a pod with a reservation can go nowhere else for now."""
    return f"{PREFIX}this pod has a reservation on node {node}, which lapses at {deadline} unless it is bound there"


def _rows_of(view: View, names: Iterable[str]) -> Bools:
    """Mask of the living GPUs of some nodes, shape (gpus,)."""
    wanted = np.zeros(len(view.node_names), np.bool_)
    wanted[[view.node_ids[name] for name in names if name in view.node_ids]] = True
    return view.columns.alive & wanted[view.columns.node] if len(wanted) else view.columns.alive


def _could_ever(verdict: Verdict, rows: Bools) -> set[str]:
    """Names of the nodes that would have enough GPUs if they were empty and healthy."""
    view = verdict.view
    suitable = np.flatnonzero(rows & verdict.outcomes[Check.SUITABLE].ok)
    counts = np.bincount(view.columns.node[suitable], minlength=len(view.node_names))
    return {view.node_names[int(i)] for i in np.flatnonzero(counts >= verdict.applicant.demand.gpus)}


def _place_on(verdict: Verdict, rows: list[int], policy: Policy) -> Place:
    view, first = verdict.view, rows[0]
    mode = MODES[int(verdict.mode[first])]
    if mode is None:
        raise AssertionError(f"{view.place(first)} was chosen although no mode is possible there")
    facts = verdict.applicant.facts(view.classes[int(view.columns.device_class[first])])
    slowdown = round(float(verdict.interference.newcomer[rows].max()), 4)
    return Place(
        gpu_uuids=[view.columns.uuid[row] for row in rows],
        mode=mode,
        memory_limit_mib=memory_limit_mib(mode, facts),
        thread_percentage=thread_limit(mode, facts, is_first=not view.columns.count[rows].any()),
        tenant=facts.profile,
        expected_slowdown=slowdown,
        policy=policy.name,
        reason=_why(verdict, rows, mode, policy, slowdown),
    )


def _why(verdict: Verdict, rows: list[int], mode: SharingMode, policy: Policy, slowdown: float) -> str:
    """Say why this place, with the numbers that the decision counted with."""
    view, demand = verdict.view, verdict.applicant.demand
    gpus = ", ".join(str(int(view.columns.gpu_index[row])) for row in rows)
    node = view.node_names[int(view.columns.node[rows[0]])]
    neighbours = sorted({str(tenant) for row in rows for tenant in view.columns.tenants[row]})
    beside = f"beside {', '.join(neighbours)}" if neighbours else "alone"
    left = int((verdict.free_mib - verdict.need_mib)[rows].min())
    parts = [
        f"{policy.name}: {mode} on GPU {gpus} of {node} {beside}",
        f"{left:,} of {int(view.columns.usable_mib[rows[0]]):,} MiB left",
        f"expected slowdown {slowdown:.2f} of {demand.max_slowdown:.2f}",
    ]
    if demand.is_unknown:
        parts.append("nothing is known of its memory, so it counts with the whole GPU")
    parts += _passed_over(verdict)
    return "; ".join(parts)


def _passed_over(verdict: Verdict) -> list[str]:
    """Name the GPU that came closest among those that had the memory and were refused for the slowdown."""
    refused = np.flatnonzero((verdict.failed == Check.SLOWDOWN) & verdict.view.columns.alive)
    if not refused.size:
        return []
    closest = int(refused[np.argmax(verdict.interference.margin[refused])])
    return [f"passed over {counted(refused.size, 'GPU')} that had the memory: {explanation(verdict, closest)}"]
