"""Who ran out of GPU memory although it took no more than it was promised. Pure.

A job that never ran counts with what it was measured to take (`TenantProfile.measured_mib`), which may be less than it
was promised, and others join it. Should it grow after all, whoever allocates next runs out of memory: it, or one of
them. Neither is to blame; what grew was a guess of ours, and it is not made of that job again.
"""

from collections.abc import Sequence

from carpool_core.kube.pods import Pod
from carpool_core.resources.job import JobStatus, WorkerPlacement
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import PodUid

from carpool_operator.outcomes import GPU_MEMORY_TAKEN, Outcome

_MOST = 3
"""Attempts of a job that are not counted for it because a neighbour grew."""


def judged(pod: Pod, outcome: Outcome, status: JobStatus, nodes: Sequence[GpuNode]) -> Outcome:
    """Say how an attempt ended that ran out of GPU memory.

    Args:
        pod: The worker that did.
        outcome: What it says itself.
        status: Of the job, with its places.
        nodes: What is known of them.
    """
    place = _place(pod, status)
    if place is None or not place.neighbours:
        return outcome
    if place.measured_mib is not None:
        why = (
            f"it was promised more than the {place.measured_mib:,} MiB that it counted with once these were measured, "
            "and others had joined it: nobody will again"
        )
        return Outcome(outcome.reason, f"{outcome.message}; {why}", charged=False)
    grown = [one for one in _beside(place, nodes) if _peak_mib(one, nodes) > (one.tenant.measured_mib or 0)]
    if not grown:
        return outcome
    whom = ", ".join(f"{one.pod_namespace}/{one.job_name}" for one in grown)
    is_charged = sum(attempt.outcome == GPU_MEMORY_TAKEN for attempt in status.attempts) >= _MOST
    return Outcome(GPU_MEMORY_TAKEN, f"{outcome.message}; beside {whom}, which took more than before", is_charged)


def may_have_grown(pod: Pod, status: JobStatus, nodes: Sequence[GpuNode]) -> bool:
    """Whether a worker had neighbours that count with what they were measured to take: an agent may tell of more."""
    place = _place(pod, status)
    return place is not None and bool(_beside(place, nodes))


def _place(pod: Pod, status: JobStatus) -> WorkerPlacement | None:
    return next((place for place in status.placement if place.pod_uid == pod.metadata.uid), None)


def _beside(place: WorkerPlacement, nodes: Sequence[GpuNode]) -> list[Reservation]:
    return [
        one
        for node in nodes
        if node.metadata.name == place.node
        for one in node.spec.reservations
        if one.tenant.measured_mib is not None and one.pod_uid != place.pod_uid
        if set(one.gpu_uuids) & set(place.gpu_uuids)
    ]


def _peak_mib(of: Reservation, nodes: Sequence[GpuNode]) -> int:
    uid: PodUid = of.pod_uid
    tenants = [tenant for node in nodes for tenant in node.status.tenants if tenant.pod_uid == uid]
    return max((max(tenant.memory_mib, tenant.peak_memory_mib) for tenant in tenants), default=0)
