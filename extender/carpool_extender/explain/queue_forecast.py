"""When a pending job is expected to start: the scheduling queue of the extender, run on a copy of the cluster."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import msgspec
from carpool_core.clock import Clock, parse_rfc3339
from carpool_core.durations import ASSUMED_DURATION_S, format_duration
from carpool_core.keys import GATE_ADMISSION, SCHEDULER_NAME
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS, KubeApi, ResourceKind, Selector
from carpool_core.kube.errors import Forbidden, KubeError
from carpool_core.kube.pods import Pod, container_uid, job_owner_reference, parse_worker_name
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import JobUid, PodUid

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.diagnosis import PREFIX
from carpool_extender.framework.filters import pluralize
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.framework.selection import EvaluationCache
from carpool_extender.informers import JobRow
from carpool_extender.queue.order import QueueOrder, duration_in, queue_order, reservation_end_s
from carpool_extender.queue.scheduling_queue import (
    PodRef,
    QueuedJobInfo,
    SchedulingQueue,
    Waiting,
    WaitReason,
    refusal_message,
)
from carpool_extender.workloads import AS_SHIPPED, JobOptions, NotOurs, pod_request_of

T = TypeVar("T")
MAX_NAMED_AHEAD = 3
"""Jobs ahead that are named."""
MAX_FORECAST = 200
"""Places in the queue for which a start is forecast: each end of a running job is a pass of the queue."""
_EVERYTHING = Selector()
_PENDING = Selector(fields=f"spec.schedulerName={SCHEDULER_NAME},status.phase=Pending")


@dataclass(frozen=True)
class Options:
    """How a question is answered."""

    clock: Clock
    job_options: JobOptions = AS_SHIPPED
    """What the site allows jobs."""
    order: QueueOrder = QueueOrder.ALTERNATE
    """The site's queue order."""
    each_gpu: bool = False
    """Whether every GPU gets a line of its own."""
    unchecked: Sequence[str] = ()
    """Sentences on parts of the job that could not be checked."""


@dataclass(frozen=True, slots=True)
class PendingJobs:
    """The jobs of all namespaces, and those of their pods that have no GPU yet."""

    jobs: Mapping[JobUid, JobRow] = field(default_factory=dict)
    pods: Mapping[JobUid, Sequence[Pod]] = field(default_factory=dict)
    """Pods of the last attempt without node and reservation, by job."""
    unread: str = ""
    """Why they are unknown; empty if they were read."""


class QueuePlace(NamedTuple):
    """A job's place in the queue."""

    lines: Sequence[str] = ()
    """The place, the jobs ahead and the expected start, in one sentence; none if the job is not in the queue."""
    waits: str | None = None
    """Why the queue would not admit the job now; None if it would, or if the place is unknown."""


async def read_pending_jobs(api: KubeApi, nodes: Iterable[GpuNode]) -> PendingJobs:
    """Read the pending jobs of all namespaces with the caller's rights; `nodes` are all GpuNodes."""
    reserved = {held.pod_uid for node in nodes for held in node.spec.reservations}
    what = "pods"
    try:
        pods = await _list_valid(api, PODS, Pod, _PENDING)
        what = "jobs"
        jobs = await _list_valid(api, GPU_TRAINING_JOBS, JobRow, _EVERYTHING)
    except Forbidden:
        return PendingJobs(unread=f"you may not list {what} of all namespaces")
    except KubeError as error:
        return PendingJobs(unread=f"{what} of all namespaces cannot be listed: {error}")
    return PendingJobs(
        {JobUid(job.metadata.uid): job for job in jobs},
        {
            job: waiting
            for job, attempt in pods_of_last_attempts(pods).items()
            if (waiting := [pod for pod in attempt if _is_waiting(pod) and pod.metadata.uid not in reserved])
        },
    )


def place_in_queue(
    pending: PendingJobs,
    request: PodRequest,
    cluster: ClusterCache,
    config: SchedulerConfig,
    options: Options,
    *,
    is_new: bool = False,
    has_class: bool = False,
) -> QueuePlace:
    """Return the place of a job in the queue and its expected start.

    The backoffs of jobs, and the end from which the order `Alternate` goes on, are in the leader's memory only.

    Args:
        pending: The pending jobs.
        request: Request of each worker of the job.
        cluster: The cluster, with the reservations of the job. The forecast changes it.
        config: Policy and limits of the site.
        options: Clock, queue order, and what the site allows jobs.
        is_new: Whether the job does not exist yet.
        has_class: Whether its template has a PriorityClass.
    """
    # 1. The entries of the queue.
    mine, order, now_s = request.demand.job_uid, options.order, options.clock.now().timestamp()
    if not is_new and not pending.unread and mine not in pending.pods:
        return QueuePlace()
    reserved = [held for node in cluster.nodes.values() for held in node.spec.reservations]
    earlier = {held.pod_uid for held in reserved if is_of_earlier_attempt(held, pending.jobs.get(held.job_uid))}

    def holders(job: JobUid) -> set[PodUid]:
        return cluster.pods_of_job(job) - earlier

    infos = _queued_jobs(pending, cluster, holders, options.job_options, now_s)
    unknown = pending.unread
    if is_new and (has_class or any(info.priority for info in infos.values())):
        unknown = unknown or "its priority is known once its pods exist"
    if unknown:
        return QueuePlace([f"place in the queue unknown: {unknown}"])
    if is_new:
        infos[mine] = unqueued_job(request, request.workers, now_s, len(infos), cluster)
    if mine not in infos:
        return QueuePlace()

    def end_of(held: Reservation) -> float | None:
        job = pending.jobs.get(held.job_uid)
        if job is None or job.status.prediction is None:
            return None
        times = {p.product: p.step_time_seconds.median for p in job.status.prediction.products}
        devices = (d for name in cluster.nodes_holding(held.pod_uid) for d in cluster.nodes[name].status.devices)
        return reservation_end_s(held, job.spec.training.steps, times, devices)

    # 2. The decision now. Jobs behind it change nothing.
    by_number = {info.number: info for info in infos.values()}
    in_order = [by_number[key.number] for key in queue_order((info.key() for info in infos.values()), order)]
    considered = in_order[: in_order.index(infos[mine]) + 1]
    evaluations = EvaluationCache(cluster, config, len(considered))
    queue = SchedulingQueue(cluster, evaluations, config, order=order, holders=holders)
    for info in considered:
        queue.add(info)
    admitted = [*queue.admit(end_of, now_s)]
    waiting = queue.waiting(mine)
    if waiting is None:
        line = _describe(considered, len(infos), order, "it can start now")
        return QueuePlace([line] if len(infos) > 1 else [])
    waits = refusal_message(waiting, evaluations).removeprefix(PREFIX)
    # 3. The forecast, from the cluster without the claims of this decision.
    if len(considered) > MAX_FORECAST:
        start = f"its start is not forecast, because {MAX_FORECAST} jobs or more are ahead"
        return QueuePlace([_describe(considered, len(infos), order, start)], waits)
    for claim in (claim for one in admitted for claim in one.claims):
        cluster.forget(claim.node, claim.reservation.pod_uid)
    queue = SchedulingQueue(cluster, evaluations, config, order=order, holders=holders)
    start_s = queue.forecast(considered, end_of, now_s, until=mine)[mine].start_s
    start = "it would not fit even after all running jobs have ended"
    if start_s is not None:
        start = f"expected start in about {format_duration(start_s - now_s)}"
    return QueuePlace([_describe(considered, len(infos), order, start)], waits)


def _describe(considered: Sequence[QueuedJobInfo], pending: int, order: QueueOrder, start: str) -> str:
    """Return the place of the last considered job in one sentence."""
    *ahead, own = considered
    counts = "" if order is QueueOrder.ARRIVAL else f" (it counts as {_length(own)})"
    names = [info.name for info in ahead[:MAX_NAMED_AHEAD]]
    names += [f"{len(ahead) - len(names):,} more"] if len(ahead) > len(names) else []
    behind = f", behind {', '.join(names)}" if names else ""
    place = f"{_ordinal(len(considered))} of {pluralize(pending, 'pending job')} by the order {order}"
    return f"place in the queue: {place}{counts}{behind}; {start}"


def unqueued_job(
    request: PodRequest, workers: int, now_s: float = 0.0, number: int = 0, cluster: ClusterCache | None = None
) -> QueuedJobInfo:
    """Return a queue entry for workers that have no pods."""
    return QueuedJobInfo(
        job=request.demand.job_uid,
        name=f"{request.demand.namespace}/{request.demand.job_name}",
        priority=0,
        arrived_s=now_s,
        number=number,
        request=request,
        pods=tuple(PodRef(PodUid(f"worker-{index}"), f"worker-{index}") for index in range(workers)),
        duration_s=None if cluster is None else duration_in(request, cluster.snapshot()),
    )


def no_room(request: PodRequest, workers: int, evaluations: EvaluationCache) -> str:
    """Return why some workers of a job do not fit at once."""
    waiting = Waiting(unqueued_job(request, workers), WaitReason.DOES_NOT_FIT)
    return refusal_message(waiting, evaluations).removeprefix(PREFIX)


def is_of_earlier_attempt(held: Reservation, job: JobRow | None) -> bool:
    """Return whether a reservation is of a pod of an earlier attempt: a dead node keeps it, because the pod may run."""
    named = parse_worker_name(held.pod_name)
    return job is not None and named is not None and named.attempt < job.status.latest_attempt.number


def _queued_jobs(
    pending: PendingJobs,
    cluster: ClusterCache,
    holders: Callable[[JobUid], set[PodUid]],
    job_options: JobOptions,
    now_s: float,
) -> dict[JobUid, QueuedJobInfo]:
    """Return the queue's entry for each pending job, as the leader builds it."""
    found, snapshot = list[QueuedJobInfo](), cluster.snapshot()
    for uid, pods in pending.pods.items():
        job = pending.jobs.get(uid)
        if job is None or any(gate.name != GATE_ADMISSION for pod in pods for gate in pod.spec.scheduling_gates):
            continue
        try:
            request = pod_request_of(job, container_uid(pods[0].spec), job_options)
        except NotOurs:  # the extender refuses it
            continue
        created = [pod.metadata.creation_timestamp or job.metadata.creation_timestamp for pod in pods]
        arrived_s = min((parse_rfc3339(at).timestamp() for at in created if at), default=now_s)
        if holders(uid) or not all(pod.is_gated for pod in pods):
            arrived_s = 0.0  # the rest of a gang, and a job that was admitted a moment ago, come first
        found.append(
            QueuedJobInfo(
                job=uid,
                name=f"{job.metadata.namespace}/{job.metadata.name}",
                priority=max(pod.spec.priority for pod in pods),
                arrived_s=arrived_s,
                number=0,
                request=request,
                pods=tuple(PodRef(PodUid(pod.metadata.uid), pod.metadata.name) for pod in pods),
                duration_s=duration_in(request, snapshot),
            )
        )
    found.sort(key=lambda info: (info.arrived_s, info.name))
    return {info.job: replace(info, number=number) for number, info in enumerate(found)}


def pods_of_last_attempts(pods: Iterable[Pod]) -> dict[JobUid, list[Pod]]:
    """Return the pods of the last attempt of each job."""
    attempts: dict[JobUid, dict[int, list[Pod]]] = {}
    for pod in pods:
        owner, named = job_owner_reference(pod.metadata), parse_worker_name(pod.metadata.name)
        if owner is not None and named is not None:
            attempts.setdefault(JobUid(owner.uid), {}).setdefault(named.attempt, []).append(pod)
    return {job: of_job[max(of_job)] for job, of_job in attempts.items()}


def _is_waiting(pod: Pod) -> bool:
    return not (pod.spec.node_name or pod.metadata.deletion_timestamp)


def _length(info: QueuedJobInfo) -> str:
    if info.duration_s is not None:
        return f"{format_duration(info.duration_s)} long"
    unknown = "it has no spec.training.steps" if info.request.steps is None else "its step time is not predicted"
    return f"{format_duration(ASSUMED_DURATION_S)} long, because {unknown}"


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{suffix}"


async def list_all(api: KubeApi, kind: ResourceKind, type_: type[T], selector: Selector = _EVERYTHING) -> list[T]:
    """Read all selected objects of a kind, page by page.

    Raises:
        KubeError: They could not be read.
    """
    found, token = [], ""
    while True:
        page = await api.list_page(kind, selector, continue_token=token)
        found += [msgspec.json.decode(item, type=type_) for item in page.items]
        token = page.continue_token
        if not token:
            return found


async def _list_valid(api: KubeApi, kind: ResourceKind, type_: type[T], selector: Selector) -> list[T]:
    """Read all objects of a kind without the invalid ones, for which the extender decides nothing either."""
    found = []
    for raw in await list_all(api, kind, msgspec.Raw, selector):
        with suppress(msgspec.ValidationError):
            found.append(msgspec.json.decode(raw, type=type_))
    return found
