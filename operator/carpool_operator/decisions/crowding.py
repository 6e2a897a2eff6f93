"""Who ran out of GPU memory although it took no more than it was promised. Pure.

A job that never ran counts with what it was measured to take (`TenantProfile.measured_mib`), which may be less than it
was promised, and others join it. Should it grow after all, whoever allocates next runs out of memory: it, or one of
them. Neither is to blame; what grew was a guess of ours, and it is not made of that job again. Nor is who shares by
turns, where no limit is enforced, to blame for what others take beyond their promises. But who had all that it was
promised, and died of its own limit, is.
"""

from collections.abc import Sequence

from carpool_core.kube.pods import Pod
from carpool_core.resources.job import JobStatus, WorkerPlacement
from carpool_core.resources.node import Device, GpuNode, Reservation
from carpool_core.values import GpuUuid, PodUid

from carpool_operator.workers.outcomes import GPU_MEMORY_TAKEN, GPU_OUT_OF_MEMORY, Outcome

_MOST = 3
"""Attempts of a job that are not counted for it because a neighbour grew."""
_UNTOLD = 1.01
"""How many times what an agent told a tenant may take: of smaller rises it says nothing."""


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
    takers = _takers(place, status, nodes)
    if not takers:
        return outcome
    whom = ", ".join(dict.fromkeys(f"{one.pod_namespace}/{one.job_name}" for one in takers))
    told = f"{outcome.message}; beside {whom}, which took more than before"
    if sum(attempt.outcome == GPU_MEMORY_TAKEN for attempt in status.attempts) < _MOST:
        return Outcome(GPU_MEMORY_TAKEN, told, charged=False)
    often = f"this counts, as {_MOST} attempts have ended so already"
    return Outcome(GPU_OUT_OF_MEMORY, f"{told}; {often}", charged=True)


def may_have_grown(pod: Pod, status: JobStatus, nodes: Sequence[GpuNode]) -> bool:
    """Whether a worker had neighbours that may take more than they count with: an agent may tell of it."""
    place = _place(pod, status)
    return place is not None and any(
        one.tenant.measured_mib is not None or one.memory_limit_mib is None
        for node in nodes
        for gpu in place.gpu_uuids
        for one in _beside(place, node, gpu)
    )


def _place(pod: Pod, status: JobStatus) -> WorkerPlacement | None:
    return next((place for place in status.placement if place.pod_uid == pod.metadata.uid), None)


def _takers(place: WorkerPlacement, status: JobStatus, nodes: Sequence[GpuNode]) -> list[Reservation]:
    """Return the neighbours on the first GPU where they left a worker less than it was promised; none elsewhere."""
    for node in nodes:
        for device in node.status.devices:
            if node.metadata.name == place.node and device.uuid in place.gpu_uuids:
                others = _beside(place, node, device.uuid)
                if others and _is_crowded(place, status, node, device, others):
                    grown = [one for one in others if _peak_mib(node, one.pod_uid, device.uuid) > _counted_mib(one)]
                    return grown or others
    return []


def _is_crowded(
    place: WorkerPlacement, status: JobStatus, node: GpuNode, device: Device, others: Sequence[Reservation]
) -> bool:
    usable_mib = device.memory_mib - device.reserved_mib
    share_mib = place.memory_limit_mib or usable_mib - sum(_counted_mib(one) for one in others)
    left_mib = usable_mib - _UNTOLD * sum(_peak_mib(node, one.pod_uid, device.uuid) for one in others)
    seen_mib = _peak_mib(node, place.pod_uid, device.uuid)
    own_mib = seen_mib or (status.attempts[-1].peak_memory_mib if status.attempts else 0)
    return left_mib < share_mib and own_mib * _UNTOLD < share_mib


def _beside(place: WorkerPlacement, node: GpuNode, gpu: GpuUuid) -> list[Reservation]:
    held = node.spec.reservations if node.metadata.name == place.node else []
    return [one for one in held if gpu in one.gpu_uuids and one.pod_uid != place.pod_uid]


def _counted_mib(one: Reservation) -> int:
    """What a tenant was let in with; 0 where that was the whole GPU, which nobody was to share."""
    return one.tenant.measured_mib or one.tenant.memory_mib or 0


def _peak_mib(node: GpuNode, pod: PodUid, gpu: GpuUuid) -> int:
    told = [tenant for tenant in node.status.tenants if tenant.pod_uid == pod and tenant.gpu_uuid == gpu]
    return max((max(tenant.memory_mib, tenant.peak_memory_mib) for tenant in told), default=0)
