"""How a worker or an attempt ended: a reason in one CamelCase word, a sentence, and whether it counts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple

from carpool_core.clock import parse_rfc3339
from carpool_core.keys import OUTCOME_GPU_OUT_OF_MEMORY, OUTCOME_MOVED
from carpool_core.kube.pods import ContainerTerminated, Pod
from carpool_core.moves import Member
from carpool_core.resources.job import (
    GpuTrainingJob,
    JobStatus,
    OnExitCodes,
    OnPodCondition,
    PodFailurePolicy,
    WorkerPlacement,
)
from carpool_core.resources.node import Device, GpuNode, Reservation
from carpool_core.values import GpuUuid, PodUid, SharingMode, without_nulls

from carpool_operator.oom import names_no_cause, reports_gpu_out_of_memory

_DISRUPTIONS = frozenset(
    {"PreemptionByScheduler", "DeletionByTaintManager", "EvictionByEvictionAPI", "DeletionByPodGC"}
)
"""External reasons of the condition DisruptionTarget. TerminationByKubelet is missing: there the pod itself exhausted
the node's resources."""

GPU_OUT_OF_MEMORY = OUTCOME_GPU_OUT_OF_MEMORY
POD_DELETED = "PodDeleted"
NODE_LOST = "NodeLost"
GANG_TIMEOUT = "GangTimeout"
NO_RESERVATION = "NoReservation"
CONTAINER_FAILED = "ContainerFailed"
MPS_CLIENTS_ENDED = "MpsClientsEnded"
GPU_MEMORY_TAKEN = "GpuMemoryTaken"

MOVED = OUTCOME_MOVED

DISRUPTED = _DISRUPTIONS | {MOVED, POD_DELETED, NODE_LOST, NO_RESERVATION, MPS_CLIENTS_ENDED, GPU_MEMORY_TAKEN}
"""Outcomes of attempts that ended because their pods, or the pods' GPUs, were taken away."""

_MAX_MESSAGE_CHARS = 600
"""Length of the termination message in the status: its end, which names the exception."""

_MAX_UNCHARGED = 3
"""Attempts of a job that do not count because of MPS failures; the same number for grown co-tenants."""

MPS_REPORT_TIMEOUT_S = 20.0
"""Seconds after a worker's end within which its node's agent may report others that ended with it. Agents look every
10 s, and write at most every 10 s."""
AGENT_POLL_S = 2.0
"""Seconds between reconciliations of a job that waits for the agent's report."""

_REPORTED_CHANGE = 1.01
"""Agents do not report rises of a tenant's memory below this factor."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why an attempt failed."""

    reason: str
    message: str
    charged: bool
    """Whether it counts against `backoffLimit`: only if the job's own container ran and failed."""
    is_unreported: bool = False
    """Whether only the measured memory shows that GPU memory ran out, and no message of the program does."""

    @property
    def is_of_others(self) -> bool:
        """Whether a container failed, but Carpool or a co-tenant is the cause."""
        return not self.charged and self.reason in {GPU_OUT_OF_MEMORY, GPU_MEMORY_TAKEN, MPS_CLIENTS_ENDED}


# One pod


def _tail(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"…{text[-_MAX_MESSAGE_CHARS:]}"


def _failed_container(pod: Pod) -> tuple[str, ContainerTerminated] | None:
    for status in pod.status.container_statuses:
        ended = status.state.terminated
        if ended is not None and (ended.exit_code != 0 or ended.reason == "OOMKilled"):
            return status.name, ended
    return None


def _container_failed(pod: str, name: str, ended: ContainerTerminated) -> Outcome:
    where = f"container {name} of pod {pod}"
    detail = f": {_tail(ended.message)}" if ended.message.strip() else ""
    if reports_gpu_out_of_memory(ended.message):
        return Outcome(GPU_OUT_OF_MEMORY, f"{where} ran out of GPU memory (exit code {ended.exit_code}){detail}", True)
    if ended.reason == "OOMKilled":
        message = f"{where} was killed: it exceeded its limit of host memory, not of GPU memory; raise limits.memory"
        return Outcome("HostOutOfMemory", message, charged=True)
    return Outcome(CONTAINER_FAILED, f"{where} ended with exit code {ended.exit_code}{detail}", charged=True)


def outcome_of(pod: Pod) -> Outcome:
    """Return why a pod in phase Failed failed; the first rule that applies wins."""
    name, status = pod.metadata.name, pod.status
    for one in status.conditions:
        if one.type == "DisruptionTarget" and one.status == "True" and one.reason in _DISRUPTIONS:
            return Outcome(one.reason, f"pod {name} was taken away: {one.message}", charged=False)
    if pod.metadata.deletion_timestamp is not None:
        return pod_deleted(name)
    if status.reason == "Evicted":
        return Outcome("Evicted", f"pod {name} was evicted by its node: {status.message}", charged=True)
    if (failed := _failed_container(pod)) is not None:
        return _container_failed(name, *failed)
    if status.reason:
        message = f"node {pod.spec.node_name} refused pod {name}: {status.message}"
        return Outcome(status.reason, message, charged=False)
    return Outcome("PodFailed", f"pod {name} failed: {status.message or 'no reason given'}", charged=True)


def pod_deleted(name: str) -> Outcome:
    """Return the outcome of an attempt that lost a pod by deletion."""
    return Outcome(POD_DELETED, f"pod {name} was deleted while its attempt ran", charged=False)


NODE_LOST_GRACE_S = 60.0
"""Seconds after the end of a deleted pod's grace period from which its node counts as lost."""


def lost_at(pod: Pod) -> datetime | None:
    """Return when a pod counts as lost, because its node does not confirm its deletion; None if it is not deleted."""
    # The API server sets this time to the end of the pod's grace period.
    ends_at = pod.metadata.deletion_timestamp
    if ends_at is None or pod.is_finished or not pod.spec.node_name:
        return None
    return parse_rfc3339(ends_at) + timedelta(seconds=NODE_LOST_GRACE_S)


def node_lost(pod: Pod) -> Outcome:
    """Return the outcome of an attempt with a lost pod."""
    message = (
        f"pod {pod.metadata.name} was deleted, and node {pod.spec.node_name} has not confirmed its end "
        f"{NODE_LOST_GRACE_S:.0f} s after its grace period: the node seems down, so the job continues elsewhere"
    )
    return Outcome(NODE_LOST, message, charged=False)


def without_reservation(pod: Pod, after_s: float) -> Outcome:
    """Return the outcome of an attempt with a pod that is bound to a node which reserves no GPU for it."""
    message = (
        f"pod {pod.metadata.name} is bound to node {pod.spec.node_name}, but its GpuNode held no reservation for it "
        f"for {after_s:.0f} s, and the node starts no pod without one"
    )
    return Outcome(NO_RESERVATION, message, charged=False)


def moved(slowed: str, found: Member, gpu: str) -> Outcome:
    """Return the outcome of an attempt that leaves a GPU on which a job is slowed beyond its limit."""
    message = (
        f"it left {gpu}, where {slowed} was measured to run {found.slowdown:.2f} times as long as alone, accepts "
        f"{found.limit:.2f} (sharing.whenSlowed)"
    )
    return Outcome(MOVED, message, charged=False)


def gang_timeout(bound: int, workers: int, limit_s: int, why: str) -> Outcome:
    """Return the outcome of an attempt of which not every worker was bound in time."""
    message = (
        f"{bound} of {workers} workers were bound within {limit_s:,} s (runPolicy.gangTimeoutSeconds), so all release "
        f"their GPUs: {why}"
    )
    return Outcome(GANG_TIMEOUT, message, charged=False)


# One attempt


def attempt_outcome(
    failed: Sequence[Pod], status: JobStatus, nodes: Sequence[GpuNode], now: datetime
) -> Outcome | None:
    """Return how an attempt ended; None while the node's agent may still report that the job is not the cause.

    `failed` are its failed pods, at least one; the first that ended is the cause.
    """
    first = first_to_end(failed)
    place = _placement(first, status)
    node = next((node for node in nodes if place is not None and node.metadata.name == place.node), None)
    outcome = outcome_of(first)
    if outcome.reason == GPU_OUT_OF_MEMORY:
        attributed = attribute_oom(outcome, place, status, nodes)
        may_change = attributed is outcome and place is not None and _may_have_grown(place, nodes)
        return None if may_change and _is_report_pending(first, node, now) else attributed
    if outcome.reason != CONTAINER_FAILED:
        return outcome
    reports = {struck.pod_uid: struck.message for node in nodes for struck in node.status.struck}
    for pod in failed:
        if (why := reports.get(PodUid(pod.metadata.uid))) is not None:
            return _mps_failure(pod, why, sum(a.outcome == MPS_CLIENTS_ENDED for a in status.attempts))
    is_behind_mps = place is not None and place.mode is SharingMode.MPS
    has_faults = node is not None and not node.status.simulated
    if is_behind_mps and has_faults and _is_report_pending(first, node, now):
        return None
    measured = _out_of_memory_by_measurement(outcome, first, place, status, node)
    return outcome if measured is None else attribute_oom(measured, place, status, nodes)


def pending_message(failed: Sequence[Pod]) -> str:
    """Return the message for failed pods while `attempt_outcome` returns None."""
    message = outcome_of(first_to_end(failed)).message
    return f"{message}; waits for the node agent's report on whether others ended with it"


def _mps_failure(pod: Pod, why: str, earlier: int) -> Outcome:
    """Return the outcome of a worker that ended with other clients of its MPS server.

    A fatal fault of one client ends all clients, and the cause is not known. A job does not pay for it a few times; a
    job that causes the fault itself must not restart without end.
    """
    message = f"pod {pod.metadata.name}: {why}"
    if earlier < _MAX_UNCHARGED:
        return Outcome(MPS_CLIENTS_ENDED, message, charged=False)
    often = f"this counts because {earlier} attempts ended so before; sharing.mode: Exclusive shows which job fails"
    return Outcome(MPS_CLIENTS_ENDED, f"{message}; {often}", charged=True)


def _is_report_pending(pod: Pod, node: GpuNode | None, now: datetime) -> bool:
    """Return whether the agent of a worker's node may still report the cause of the worker's end."""
    ended_at = _ended_at(pod)
    if node is None or not ended_at:
        return False
    return abs((now - parse_rfc3339(ended_at)).total_seconds()) < MPS_REPORT_TIMEOUT_S


def first_to_end(failed: Sequence[Pod]) -> Pod:
    """Return the failed pod of an attempt that ended first, which is the cause."""
    return min(failed, key=_ended_at)


def _ended_at(pod: Pod) -> str:
    """Return when the first container of a pod ended, RFC 3339; empty if that is unknown."""
    states = [s.state.terminated for s in pod.status.container_statuses]
    return min((end.finished_at for end in states if end is not None and end.finished_at), default="")


# GPU out of memory: which tenant exceeded its share
#
# A job that never ran counts with its measured peak (`TenantProfile.measured_mib`), which may be below its bound, and
# others join it. If it grows after all, the next tenant that allocates runs out of memory: the job or a co-tenant.
# Neither is charged, because Carpool's estimate was wrong. Under time-slicing no limit is enforced, so a worker is not
# charged for memory that others took beyond their share. A worker that had its whole share is charged.


_AT_LIMIT = 0.98
"""Share of a memory limit from which a worker that ended without a known cause counts as out of memory."""

_KILLED_EXIT_CODES = frozenset({137, 143})
"""Exit codes after SIGKILL and SIGTERM, which no program sends to itself when GPU memory is exhausted."""


def _out_of_memory_by_measurement(
    outcome: Outcome, pod: Pod, place: WorkerPlacement | None, status: JobStatus, node: GpuNode | None
) -> Outcome | None:
    """Return the outcome of a worker whose log names no cause and whose memory was at its limit; None for others."""
    found = _failed_container(pod)
    if found is None or place is None or node is None:
        return None
    ended = found[1]
    if ended.exit_code in _KILLED_EXIT_CODES or not names_no_cause(ended.message):
        return None
    # A job's peak is that of its largest worker, so only the peak of a single worker is the pod's own.
    known_mib = status.attempts[-1].peak_memory_mib if status.attempts and len(status.placement) == 1 else 0
    for device in node.status.devices:
        if device.uuid not in place.gpu_uuids:
            continue
        others_mib = sum(_peak_mib(node, one.pod_uid, device.uuid) for one in _co_tenants(place, node, device.uuid))
        limit_mib = place.memory_limit_mib or device.memory_mib - device.reserved_mib - others_mib
        peak_mib = max(_peak_mib(node, place.pod_uid, device.uuid), known_mib)
        # Peaks of co-tenants at different times may add up to more than the GPU has; then the limit is unknown.
        if limit_mib > 0 and peak_mib >= _AT_LIMIT * limit_mib:
            why = f"its log names no cause, and it had {peak_mib:,} of {limit_mib:,} MiB of GPU memory"
            return Outcome(GPU_OUT_OF_MEMORY, f"{outcome.message}; {why}", charged=True, is_unreported=True)
    return None


def attribute_oom(
    outcome: Outcome, place: WorkerPlacement | None, status: JobStatus, nodes: Sequence[GpuNode]
) -> Outcome:
    """Return the outcome of a worker that ran out of GPU memory: charged, or attributed to a co-tenant.

    `outcome` is that by the worker's own message.
    """
    if place is None or not place.neighbours:
        return outcome
    if place.measured_mib is not None:
        why = (
            f"it counted with its measured {place.measured_mib:,} MiB, less than its bound, and others had joined it; "
            "its next attempts count with the bound"
        )
        return replace(outcome, message=f"{outcome.message}; {why}", charged=False)
    takers = _takers(place, status, nodes)
    if not takers:
        return outcome
    names = ", ".join(dict.fromkeys(f"{one.pod_namespace}/{one.job_name}" for one in takers))
    message = f"{outcome.message}; beside {names}, which took more than before"
    if sum(attempt.outcome == GPU_MEMORY_TAKEN for attempt in status.attempts) < _MAX_UNCHARGED:
        return Outcome(GPU_MEMORY_TAKEN, message, charged=False)
    often = f"this counts because {_MAX_UNCHARGED} attempts ended so before"
    return replace(outcome, message=f"{message}; {often}", charged=True)


def _may_have_grown(place: WorkerPlacement, nodes: Sequence[GpuNode]) -> bool:
    """Return whether a co-tenant can take more memory than it counts with, which its agent may still report."""
    return any(
        one.tenant.measured_mib is not None or one.memory_limit_mib is None
        for node in nodes
        for gpu in place.gpu_uuids
        for one in _co_tenants(place, node, gpu)
    )


def _placement(pod: Pod, status: JobStatus) -> WorkerPlacement | None:
    return next((place for place in status.placement if place.pod_uid == pod.metadata.uid), None)


def _takers(place: WorkerPlacement, status: JobStatus, nodes: Sequence[GpuNode]) -> list[Reservation]:
    """Return the co-tenants that left a worker less than its share, on the first GPU where that is so."""
    for node in nodes:
        for device in node.status.devices:
            if node.metadata.name == place.node and device.uuid in place.gpu_uuids:
                others = _co_tenants(place, node, device.uuid)
                if others and _is_crowded(place, status, node, device, others):
                    grown = [one for one in others if _peak_mib(node, one.pod_uid, device.uuid) > _counted_mib(one)]
                    return grown or others
    return []


def _is_crowded(
    place: WorkerPlacement, status: JobStatus, node: GpuNode, device: Device, others: Sequence[Reservation]
) -> bool:
    """Return whether co-tenants left a worker less than its share, and it stayed below that share itself."""
    usable_mib = device.memory_mib - device.reserved_mib
    share_mib = place.memory_limit_mib or usable_mib - sum(_counted_mib(one) for one in others)
    left_mib = usable_mib - _REPORTED_CHANGE * sum(_peak_mib(node, one.pod_uid, device.uuid) for one in others)
    seen_mib = _peak_mib(node, place.pod_uid, device.uuid)
    own_mib = seen_mib or (status.attempts[-1].peak_memory_mib if status.attempts else 0)
    return left_mib < share_mib and own_mib * _REPORTED_CHANGE < share_mib


def _co_tenants(place: WorkerPlacement, node: GpuNode, gpu: GpuUuid) -> list[Reservation]:
    held = node.spec.reservations if node.metadata.name == place.node else []
    return [one for one in held if gpu in one.gpu_uuids and one.pod_uid != place.pod_uid]


def _counted_mib(one: Reservation) -> int:
    """Return the memory that admission counted for a tenant, in MiB; 0 if it was admitted to a whole GPU."""
    return one.tenant.measured_mib or one.tenant.memory_mib or 0


def _peak_mib(node: GpuNode, pod: PodUid, gpu: GpuUuid) -> int:
    tenants = [tenant for tenant in node.status.tenants if tenant.pod_uid == pod and tenant.gpu_uuid == gpu]
    return max((max(tenant.memory_mib, tenant.peak_memory_mib) for tenant in tenants), default=0)


# runPolicy.podFailurePolicy: rules of batch/v1 Jobs

FAIL_JOB = "FailJob"
COUNT = "Count"


class PolicyMatch(NamedTuple):
    """The rule that decides about a failed pod."""

    action: str
    message: str
    """Why it matches."""


def policy_match(policy: PodFailurePolicy | None, pod: Pod) -> PolicyMatch | None:
    """Return the first rule that matches a failed pod; None without one."""
    for index, rule in enumerate(() if policy is None else policy.in_order):
        found = (
            _matching_exit_code(rule.on_exit_codes, pod)
            if rule.on_exit_codes
            else _matching_condition(rule.on_pod_conditions, pod)
        )
        if found is not None:
            where = f"rule {index} of runPolicy.podFailurePolicy ({rule.action})"
            return PolicyMatch(rule.action, f"{found} matches {where}")
    return None


def _matching_exit_code(wanted: OnExitCodes, pod: Pod) -> str | None:
    for status in (*pod.status.container_statuses, *pod.status.init_container_statuses):
        ended = status.state.terminated
        if ended is None or not ended.exit_code or wanted.container_name not in (None, status.name):
            continue
        if (ended.exit_code in wanted.values) == (wanted.operator == "In"):
            return f"exit code {ended.exit_code} of container {status.name}"
    return None


def _matching_condition(wanted: list[OnPodCondition], pod: Pod) -> str | None:
    present = {(condition.type, condition.status) for condition in pod.status.conditions}
    return next((f"condition {one.type}={one.status}" for one in wanted if (one.type, one.status) in present), None)


def unknown_container(job: GpuTrainingJob) -> str | None:
    """Return which rule names a container that the template does not have; None if there is none."""
    policy, spec = job.spec.run_policy.pod_failure_policy, without_nulls(job.spec.template).get("spec", {})
    names = {c.get("name") for part in ("containers", "initContainers") for c in spec.get(part, [])}
    for index, rule in enumerate(() if policy is None else policy.in_order):
        name = None if rule.on_exit_codes is None else rule.on_exit_codes.container_name
        if name is not None and name not in names:
            field = f"spec.runPolicy.podFailurePolicy.rules[{index}].onExitCodes.containerName"
            return f"{field}: the template has no container {name}"
    return None
