"""Entries of the queue, built from jobs and their pods. Pure: the admission controller and `explain` use it."""

from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from carpool_core.clock import parse_rfc3339, rfc3339
from carpool_core.keys import CONDITION_ADMITTED, GATE_ADMISSION
from carpool_core.kube.pods import Pod, parse_worker_name
from carpool_core.resources.node import Reservation
from carpool_core.values import PodUid

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import Snapshot
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.gang import place_gang
from carpool_extender.framework.selection import EvaluationCache
from carpool_extender.informers import AttemptRow, JobRow
from carpool_extender.queue.order import duration_in, reservation_end_s
from carpool_extender.queue.scheduling_queue import Claim, PodRef, QueuedJobInfo, claims_of

_RETRY = "; admitted again after "
"""Text before the time in the message of a job that backs off."""


@dataclass(slots=True)
class Gang:
    """Unfinished pods of a job's latest attempt."""

    gated: list[Pod] = field(default_factory=list)
    admitted: list[Pod] = field(default_factory=list)
    """Ungated, not bound."""
    bound: int = 0
    """Bound, or finished successfully."""

    @property
    def size(self) -> int:
        """Number of workers that exist."""
        return len(self.gated) + len(self.admitted) + self.bound


def pods_of_latest_attempt(job: JobRow | None, pods: Iterable[Pod]) -> list[Pod]:
    """Return the pods of a job's latest attempt that have not failed.

    Users can create pods that name the job as controller. The job's status, which they cannot write, has the number
    of the attempt and the UIDs of its pods. The queue considers a pod once the status contains its UID.

    Args:
        job: The job; None if it was not read.
        pods: Pods that name it as their controller.
    """
    attempt = AttemptRow() if job is None else job.status.latest_attempt
    if job is not None:
        own = job.metadata.namespace
        pods = [pod for pod in pods if pod.metadata.namespace == own and pod.metadata.uid in attempt.pod_uids]
    named = [(pod, name) for pod in pods if (name := parse_worker_name(pod.metadata.name))]
    latest = attempt.number or max((name.attempt for _, name in named), default=0)
    return [pod for pod, name in named if name.attempt == latest and pod.status.phase != "Failed"]


def gang_of(job: JobRow | None, pods: Iterable[Pod], ungating: Container[PodUid] = ()) -> Gang | None:
    """Return the pods of a job's latest attempt; None if none of them waits.

    The gates of pods in `ungating` are being removed, so that these count as ungated.
    """
    gang = Gang()
    for pod in pods_of_latest_attempt(job, pods):
        if pod.spec.node_name or pod.is_finished:
            gang.bound += 1
        elif pod.metadata.deletion_timestamp is not None:
            continue
        elif pod.is_gated and PodUid(pod.metadata.uid) not in ungating:
            gang.gated.append(pod)
        else:
            gang.admitted.append(pod)
    return gang if gang.gated or gang.admitted else None


def entry_of(gang: Gang, request: PodRequest, snapshot: Snapshot, retry_at_s: float = 0.0) -> QueuedJobInfo | None:
    """Return a job's entry of the queue; None if it is not admissible: a worker is missing, or has another gate.

    The job backs off until `retry_at_s`, in seconds since 1970.
    """
    has_other_gate = any(gate.name != GATE_ADMISSION for pod in gang.gated for gate in pod.spec.scheduling_gates)
    if not gang.gated or gang.size < request.workers or has_other_gate:
        return None
    pods = sorted(gang.gated, key=lambda pod: pod.metadata.name)
    is_begun = bool(gang.admitted or gang.bound)  # the rest of a gang comes first
    name = f"{request.demand.namespace}/{request.demand.job_name}"
    return QueuedJobInfo(
        job=request.demand.job_uid,
        name=name,
        priority=max(pod.spec.priority for pod in pods),
        arrived_s=0.0 if is_begun else min(_created_s(pod) for pod in pods),
        # API timestamps are whole seconds. Jobs of one second follow by name, so that every process sorts alike.
        number=int.from_bytes(name.encode()),
        request=request,
        pods=pod_refs(pods),
        duration_s=duration_in(request, snapshot),
        retry_at_s=retry_at_s,
    )


def pod_refs(pods: Iterable[Pod]) -> tuple[PodRef, ...]:
    """Return UID and name of each pod."""
    return tuple(PodRef(PodUid(pod.metadata.uid), pod.metadata.name) for pod in pods)


def claims_of_admitted(
    pods: Sequence[Pod], request: PodRequest, cluster: ClusterCache, evaluations: EvaluationCache, now_s: float
) -> tuple[Claim, ...]:
    """Return claims for ungated pods that have none: after a change of leader, or a bind that failed.

    Returns:
        No claims if the pods do not fit at present.
    """
    refs = pod_refs(pods)
    among = cluster.without_workers(request.demand.job_uid, [ref.uid for ref in refs])
    if (found := place_gang(evaluations.of(request), len(refs), among)) is None:
        return ()
    return claims_of(QueuedJobInfo(request.demand.job_uid, "", 0, 0.0, 0, request, refs), found, now_s)


def predicted_end_of(
    held: Reservation, job: JobRow | None, cluster: ClusterCache, *, is_latest: bool = True
) -> float | None:
    """Return the expected end of a reservation, in seconds since 1970.

    It follows from the job's measured step time, or before twenty steps from its start and the predicted one.

    Args:
        held: The reservation.
        job: Its job; None if it is unknown.
        cluster: The cluster that has the reservation, written or assumed.
        is_latest: Whether the upper end of the measured step time counts, as for reservations in time.

    Returns:
        None if the length is unknown.
    """
    if job is None:
        return None
    seen = job.status.observed
    if seen is not None and seen.expected_end is not None:
        return parse_rfc3339((is_latest and seen.latest_end) or seen.expected_end).timestamp()
    names = cluster.nodes_holding(held.pod_uid) or cluster.nodes_assuming(held.pod_uid)
    devices = (device for name in names for device in cluster.nodes[name].status.devices)
    return reservation_end_s(held, job.spec.training.steps, job.status.predicted_step_times_s, devices)


def backoff_message(reason: str, retry_at_s: float) -> str:
    """Return the message of a job that backs off.

    `reason` is kube-scheduler's message about the last failure, or empty. The job is admitted again at `retry_at_s`, in
    seconds since 1970.
    """
    reason = reason or "kube-scheduler found no node for its pods in time"
    return f"{reason}{_RETRY}{rfc3339(datetime.fromtimestamp(retry_at_s, UTC))}"


def backoff_of(pods: Iterable[Pod]) -> tuple[float, str]:
    """Return until when a job backs off, in seconds since 1970, and the message that the leader wrote about it.

    Returns:
        0 and an empty message if the leader wrote no such message.
    """
    for message in (one.message for pod in pods for one in pod.status.conditions if one.type == CONDITION_ADMITTED):
        with suppress(ValueError):
            if retry_at := message.partition(_RETRY)[2]:
                return parse_rfc3339(retry_at).timestamp(), message
    return 0.0, ""


def _created_s(pod: Pod) -> float:
    created = pod.metadata.creation_timestamp
    return parse_rfc3339(created).timestamp() if created else 0.0
