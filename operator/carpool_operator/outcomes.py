"""How a worker's pod ended, in one CamelCase word and a sentence, and whether the job is to blame."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from carpool_core.clock import parse_rfc3339
from carpool_core.keys import OUTCOME_GPU_OUT_OF_MEMORY
from carpool_core.kube.pods import ContainerTerminated, Pod, PodCondition
from carpool_core.resources.job import JobStatus, WorkerPlacement
from carpool_core.resources.node import Device, GpuNode, Reservation
from carpool_core.values import GpuUuid, PodUid, SharingMode

_GPU_OOM_WORDS = ("CUDA out of memory", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
"""What PyTorch writes when a GPU's memory is used up; newest name of the exception first."""

_DISRUPTIONS = frozenset(
    {"PreemptionByScheduler", "DeletionByTaintManager", "EvictionByEvictionAPI", "DeletionByPodGC"}
)
"""Reasons of the condition DisruptionTarget that come from outside. TerminationByKubelet is not one of them: there the
pod itself used up what the node had."""

GPU_OUT_OF_MEMORY = OUTCOME_GPU_OUT_OF_MEMORY

POD_DELETED = "PodDeleted"

NO_RESERVATION = "NoReservation"

CONTAINER_FAILED = "ContainerFailed"

MPS_CLIENTS_ENDED = "MpsClientsEnded"

GPU_MEMORY_TAKEN = "GpuMemoryTaken"

TAKEN_AWAY = _DISRUPTIONS | {POD_DELETED, NO_RESERVATION, MPS_CLIENTS_ENDED, GPU_MEMORY_TAKEN}
"""Outcomes of attempts that did well until somebody took their pods, or the pods' GPUs, away."""

_MESSAGE_CHARS = 600
"""How much of a termination message is carried into the status: the end, where the exception stands."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why an attempt failed."""

    reason: str
    message: str
    charged: bool
    """Whether it counts against `backoffLimit`: only where the job's own container ran and failed."""


def _tail(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MESSAGE_CHARS else f"…{text[-_MESSAGE_CHARS:]}"


def _ended_badly(pod: Pod) -> tuple[str, ContainerTerminated] | None:
    """The first container of a pod that ended with an error, and how."""
    for status in pod.status.container_statuses:
        ended = status.state.terminated
        if ended is not None and (ended.exit_code != 0 or ended.reason == "OOMKilled"):
            return status.name, ended
    return None


def _disruption(pod: Pod) -> PodCondition | None:
    return next((c for c in pod.status.conditions if c.type == "DisruptionTarget" and c.status == "True"), None)


def _disrupted(pod: Pod) -> Outcome | None:
    found = _disruption(pod)
    if found is None or found.reason not in _DISRUPTIONS:
        return None
    return Outcome(found.reason, f"pod {pod.metadata.name} was taken away: {found.message}", charged=False)


def _deleted(pod: Pod) -> Outcome | None:
    return pod_deleted(pod.metadata.name) if pod.metadata.deletion_timestamp is not None else None


def _evicted(pod: Pod) -> Outcome | None:
    if pod.status.reason != "Evicted":
        return None
    return Outcome("Evicted", f"pod {pod.metadata.name} was evicted by its node: {pod.status.message}", charged=True)


def _container_failed(pod: Pod) -> Outcome | None:
    found = _ended_badly(pod)
    if found is None:
        return None
    name, ended = found
    where = f"container {name} of pod {pod.metadata.name}"
    said = f": {_tail(ended.message)}" if ended.message.strip() else ""
    if any(words in ended.message for words in _GPU_OOM_WORDS):
        return Outcome(GPU_OUT_OF_MEMORY, f"{where} ran out of GPU memory (exit code {ended.exit_code}){said}", True)
    if ended.reason == "OOMKilled":
        sentence = (
            f"{where} was killed for exceeding its limit of the host's memory, not the GPU's; raise limits.memory"
        )
        return Outcome("HostOutOfMemory", sentence, charged=True)
    return Outcome(CONTAINER_FAILED, f"{where} ended with exit code {ended.exit_code}{said}", charged=True)


def _refused_by_node(pod: Pod) -> Outcome | None:
    if not pod.status.reason:
        return None
    message = f"node {pod.spec.node_name} refused pod {pod.metadata.name}: {pod.status.message}"
    return Outcome(pod.status.reason, message, charged=False)


_RULES: tuple[Callable[[Pod], Outcome | None], ...] = (
    _disrupted,
    _deleted,
    _evicted,
    _container_failed,
    _refused_by_node,
)


def outcome_of(pod: Pod) -> Outcome:
    """Say why a pod in phase Failed failed; the first rule that applies wins."""
    for rule in _RULES:
        outcome = rule(pod)
        if outcome is not None:
            return outcome
    return Outcome("PodFailed", f"pod {pod.metadata.name} failed: {pod.status.message or 'no reason given'}", True)


def pod_deleted(name: str) -> Outcome:
    """Outcome of an attempt one of whose pods somebody deleted."""
    return Outcome(POD_DELETED, f"pod {name} was deleted while its attempt ran", charged=False)


def unreserved(pod: Pod, after_s: float) -> Outcome:
    """Outcome of an attempt one of whose pods is bound where no GPU is reserved for it."""
    message = (
        f"pod {pod.metadata.name} is bound to node {pod.spec.node_name}, but for {after_s:.0f} s its GpuNode held no "
        "reservation for it, without which the node never starts it"
    )
    return Outcome(NO_RESERVATION, message, charged=False)


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


WORD_WITHIN_S = 20.0
"""How long after a worker's end its node's agent may say that others ended with it: it looks each ten seconds."""
_LOOKED_WITHIN_S = 12.0
"""How long after a worker's end whatever its agent writes says all that it will: with those ten seconds, the end's
fraction of a second, which Kubernetes leaves out, and the time that a look takes."""
LOOK_AGAIN_S = 2.0
_MOST_MPS_FAILURES = 3
"""Attempts of a job that are not counted for it."""


def attempt_outcome(
    failed: Sequence[Pod], status: JobStatus, nodes: Sequence[GpuNode], now: datetime
) -> Outcome | None:
    """Say how an attempt ended; None while the agent of a node may still say that the job is not to blame.

    Args:
        failed: Its pods that have failed, at least one.
        status: Of the job, with its places.
        nodes: The GpuNodes on which they were.
        now: The time.
    """
    first = _first(failed)
    outcome = outcome_of(first)
    if outcome.reason == GPU_OUT_OF_MEMORY:
        found = judged(first, outcome, status, nodes)
        may_be_told = found is outcome and may_have_grown(first, status, nodes)
        return None if may_be_told and _is_silent(first, status, nodes, now) else found
    if outcome.reason != CONTAINER_FAILED:
        return outcome  # the container itself said what was wrong
    told = {struck.pod_uid: struck.message for node in nodes for struck in node.status.struck}
    for pod in failed:
        if (why := told.get(PodUid(pod.metadata.uid))) is not None:
            return _not_to_blame(pod, why, sum(a.outcome == MPS_CLIENTS_ENDED for a in status.attempts))
    return None if _is_awaited(first, status, nodes, now) else outcome


def told_meanwhile(failed: Sequence[Pod]) -> str:
    """Say what happened to an attempt's failed pods, and what is waited for, while `attempt_outcome` is None."""
    what = outcome_of(_first(failed)).message
    return f"{what}; waits for the node agent's word on whether others ended with it"


def _not_to_blame(pod: Pod, why: str, earlier: int) -> Outcome:
    if earlier < _MOST_MPS_FAILURES:
        return Outcome(MPS_CLIENTS_ENDED, f"pod {pod.metadata.name}: {why}", charged=False)
    often = f"this counts, as {earlier} attempts have ended so already; sharing.mode: Exclusive shows whose fault it is"
    return Outcome(MPS_CLIENTS_ENDED, f"pod {pod.metadata.name}: {why}; {often}", charged=True)


def _is_awaited(pod: Pod, status: JobStatus, nodes: Sequence[GpuNode], now: datetime) -> bool:
    """Whether an agent may still say something of a worker: it was behind an MPS daemon, and ended just now."""
    place = next((p for p in status.placement if p.pod_uid == pod.metadata.uid), None)
    if place is None or place.mode is not SharingMode.MPS:
        return False
    node = next((node for node in nodes if node.metadata.name == place.node), None)
    if node is None or node.status.simulated:
        return False  # simulated GPUs have no such faults
    return _is_silent(pod, status, nodes, now)


def _is_silent(pod: Pod, status: JobStatus, nodes: Sequence[GpuNode], now: datetime) -> bool:
    """Whether the agent of a worker's node has not looked yet since that ended, and may still."""
    place = next((p for p in status.placement if p.pod_uid == pod.metadata.uid), None)
    node = next((node for node in nodes if place is not None and node.metadata.name == place.node), None)
    if node is None:
        return False
    ended_at = _ended_at(pod)
    if not ended_at:
        return False
    ended, wrote = parse_rfc3339(ended_at), node.status.heartbeat_time
    if wrote is not None and (parse_rfc3339(wrote) - ended).total_seconds() >= _LOOKED_WITHIN_S:
        return False
    return abs((now - ended).total_seconds()) < WORD_WITHIN_S


def _first(failed: Sequence[Pod]) -> Pod:
    """The first to end is the cause, what follows are consequences."""
    return min(failed, key=_ended_at)


def _ended_at(pod: Pod) -> str:
    """When a pod's container ended; empty where nobody says."""
    states = [s.state.terminated for s in pod.status.container_statuses]
    return min((end.finished_at for end in states if end is not None and end.finished_at), default="")
