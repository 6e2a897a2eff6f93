"""When a pending job is expected to start: the scheduling queue of the extender, run on a copy of the cluster."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec
from carpool_core.clock import Clock
from carpool_core.durations import ASSUMED_DURATION_S, format_duration
from carpool_core.keys import GATE_ADMISSION, SCHEDULER_NAME
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS, KubeApi, ResourceKind, Selector, list_all
from carpool_core.kube.errors import Forbidden, KubeError
from carpool_core.kube.pods import Pod, container_uid, job_owner_reference, parse_worker_name
from carpool_core.resources.node import Reservation
from carpool_core.values import JobUid, PodUid

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.diagnosis import PREFIX
from carpool_extender.framework.filters import pluralize
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.framework.selection import EvaluationCache
from carpool_extender.informers import JobRow, workers_with_reservation
from carpool_extender.queue.entries import (
    Gang,
    backoff_of,
    claims_of_admitted,
    entry_of,
    gang_of,
    predicted_end_of,
)
from carpool_extender.queue.order import QueueOrder, duration_in
from carpool_extender.queue.scheduling_queue import (
    Admitted,
    PodRef,
    QueuedJobInfo,
    SchedulingQueue,
    Waiting,
    WaitReason,
    refusal_message,
)
from carpool_extender.workloads import AS_SHIPPED, JobOptions, NotOurs, check_worker, pod_request_of

T = TypeVar("T")
MAX_NAMED_AHEAD = 3
"""Jobs ahead that are named."""
MAX_FORECAST = 200
"""Places in the queue for which a start is forecast: each end of a running job is a pass of the queue."""
_NOT_FAILED = Selector(fields=f"spec.schedulerName={SCHEDULER_NAME},status.phase!=Failed")
ADMITTED = "the queue has admitted it, and kube-scheduler has not bound its pods yet"


@dataclass(frozen=True)
class Options:
    """How a question is answered."""

    clock: Clock
    job_options: JobOptions = AS_SHIPPED
    """The site's settings for jobs."""
    order: QueueOrder = QueueOrder.ALTERNATE
    """The site's queue order."""
    default_duration_s: float = ASSUMED_DURATION_S
    """Length that the site assumes for jobs whose length is unknown, in seconds."""
    each_gpu: bool = False
    """Whether every GPU gets a line of its own."""
    unchecked: Sequence[str] = ()
    """Sentences on parts of the job that could not be checked."""


@dataclass(frozen=True, slots=True)
class PendingJobs:
    """The jobs of all namespaces and their pods."""

    jobs: Mapping[JobUid, JobRow] = field(default_factory=dict)
    pods: Mapping[JobUid, Sequence[Pod]] = field(default_factory=dict)
    """Pods of Carpool's scheduler that have not failed, by the job that they name as controller."""
    unread: str = ""
    """Why they are unknown; empty if they were read."""


class QueuePlace(NamedTuple):
    """A job's place in the queue."""

    lines: Sequence[str] = ()
    """The place, the jobs ahead and the expected start, in one sentence; none if the job has no pending pod."""
    waits: str | None = None
    """Why the queue would not admit the job now; None if it would, or if the place is unknown."""
    is_admitted: bool = False
    """Whether the queue has admitted the job, and kube-scheduler has not found a node yet."""


async def read_pending_jobs(api: KubeApi) -> PendingJobs:
    """Read the jobs of all namespaces and their pods with the caller's rights."""
    what = "pods"
    try:
        pods = await _list_valid(api, PODS, Pod, _NOT_FAILED)
        what = "jobs"
        jobs = await _list_valid(api, GPU_TRAINING_JOBS, JobRow)
    except Forbidden:
        return PendingJobs(unread=f"you may not list {what} of all namespaces")
    except KubeError as error:
        return PendingJobs(unread=f"{what} of all namespaces cannot be listed: {error}")
    of_job = dict[JobUid, list[Pod]]()
    for pod in pods:
        if (owner := job_owner_reference(pod.metadata)) is not None:
            of_job.setdefault(JobUid(owner.uid), []).append(pod)
    return PendingJobs({JobUid(job.metadata.uid): job for job in jobs}, of_job)


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

    The cluster has the reservations of the job, and the forecast changes it. `is_new` is whether the job does not exist
    yet, and `has_class` whether its template has a PriorityClass. The end from which the order `Alternate` goes on is
    in the leader's memory only.
    """
    # 1. The entries of the queue, and the claims of jobs that it has admitted, as a new leader builds them.
    mine, now_s = request.demand.job_uid, options.clock.now().timestamp()
    evaluations, infos, outside, backoff = EvaluationCache(cluster, config), list[QueuedJobInfo](), "", ""
    for uid, pods in pending.pods.items():
        job, gang = pending.jobs.get(uid), gang_of(pending.jobs.get(uid), pods)
        if job is None or gang is None:
            continue
        first = (gang.gated or gang.admitted)[0]
        try:
            check_worker(first, job)
            wanted = pod_request_of(job, container_uid(first.spec), options.job_options)
        except NotOurs:  # the extender refuses it
            continue
        unclaimed = [pod for pod in gang.admitted if not cluster.nodes_holding(PodUid(pod.metadata.uid))]
        for claim in claims_of_admitted(unclaimed, wanted, cluster, evaluations, now_s) if unclaimed else ():
            cluster.assume(claim.node, claim.reservation)
        retry_at_s, words = backoff_of(gang.gated)
        entry = entry_of(gang, wanted, cluster.snapshot(), retry_at_s)
        if entry is not None:
            infos.append(entry)
        if uid == mine:
            backoff, outside = words, "" if entry is not None else _why_outside(gang, wanted.workers)
    if outside:
        return QueuePlace([outside], is_admitted=outside is ADMITTED)
    unknown = pending.unread
    if is_new and (has_class or any(info.priority for info in infos)):
        unknown = unknown or "its priority is known once its pods exist"
    if unknown:
        return QueuePlace([f"place in the queue unknown: {unknown}"])
    if is_new:
        infos.append(unqueued_job(request, request.workers, now_s, cluster))

    def queue_of(entries: Iterable[QueuedJobInfo]) -> SchedulingQueue:
        queue = SchedulingQueue(
            cluster,
            evaluations,
            order=options.order,
            default_duration_s=options.default_duration_s,
            holders=lambda uid: workers_with_reservation(cluster, uid, pending.pods.get(uid, ())),
        )
        for entry in entries:
            queue.add(entry)
        return queue

    def end_of(held: Reservation) -> float | None:
        return predicted_end_of(held, pending.jobs.get(held.job_uid), cluster)

    in_order = queue_of(infos).in_order()
    position = next((number for number, info in enumerate(in_order, start=1) if info.job == mine), 0)
    if not position:
        return QueuePlace()
    place = _describe_place(in_order[:position], len(in_order), options)
    # 2. The decision now.
    considered = in_order[: max(position, MAX_FORECAST)]
    queue = queue_of(considered)
    admitted = list[Admitted]()
    for one in queue.admit(end_of, now_s):
        admitted.append(one)
        if queue.waiting(mine) is not None:  # this one comes later, and is no reason
            _forget(cluster, one)
            break
    if (waiting := queue.waiting(mine)) is None:
        return QueuePlace([f"{place}; it can start now"] if len(in_order) > 1 else [])
    is_backoff = waiting.reason is WaitReason.BACKOFF
    waits = backoff if is_backoff else refusal_message(waiting, evaluations).removeprefix(PREFIX)
    # 3. The forecast, from the cluster without the claims of this decision.
    if position > MAX_FORECAST:
        start = f"its start is not forecast, because {MAX_FORECAST} jobs or more are ahead"
        return QueuePlace([f"{place}; {start}"], waits)
    for one in admitted:
        _forget(cluster, one)
    start_s = queue_of(considered).forecast(end_of, now_s, until=mine)
    start = "it would not fit even after all running jobs have ended"
    if start_s is not None:
        start = f"expected start in about {format_duration(start_s - now_s)}"
    return QueuePlace([f"{place}; {start}"], waits)


def _forget(cluster: ClusterCache, one: Admitted) -> None:
    for claim in one.claims:
        cluster.forget(claim.node, claim.reservation.pod_uid)


def _why_outside(gang: Gang, workers: int) -> str:
    """Return why a job with pending pods is not in the queue."""
    if not gang.gated:
        return ADMITTED
    if gang.size < workers:
        return f"it is not in the queue yet: {gang.size} of its {pluralize(workers, 'worker')} exist"
    others = sorted({gate.name for pod in gang.gated for gate in pod.spec.scheduling_gates} - {GATE_ADMISSION})
    return f"it is not in the queue: its pods have the scheduling gate {', '.join(others)}"


def _describe_place(considered: Sequence[QueuedJobInfo], pending: int, options: Options) -> str:
    """Return the place of the last considered job, and the jobs ahead."""
    *ahead, own = considered
    length = _length(own, options.default_duration_s)
    counts = "" if options.order is QueueOrder.ARRIVAL else f" (it counts as {length})"
    names = [info.name for info in ahead[:MAX_NAMED_AHEAD]]
    names += [f"{len(ahead) - len(names):,} more"] if len(ahead) > len(names) else []
    behind = f", behind {', '.join(names)}" if names else ""
    place = f"{_ordinal(len(considered))} of {pluralize(pending, 'pending job')} by the order {options.order}"
    return f"place in the queue: {place}{counts}{behind}"


def unqueued_job(
    request: PodRequest, workers: int, now_s: float = 0.0, cluster: ClusterCache | None = None
) -> QueuedJobInfo:
    """Return a queue entry for workers that have no pods."""
    return QueuedJobInfo(
        job=request.demand.job_uid,
        name=f"{request.demand.namespace}/{request.demand.job_name}",
        priority=0,
        arrived_s=now_s,
        number=0,
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


def _length(info: QueuedJobInfo, default_duration_s: float) -> str:
    if info.duration_s is not None:
        return f"{format_duration(info.duration_s)} long"
    unknown = "it has no spec.training.steps" if info.request.steps is None else "its step time is not predicted"
    return f"{format_duration(default_duration_s)} long, because {unknown}"


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{suffix}"


async def _list_valid(api: KubeApi, kind: ResourceKind, type_: type[T], selector: Selector | None = None) -> list[T]:
    """Read all objects of a kind without the invalid ones, for which the extender decides nothing either."""
    found = []
    for raw in await list_all(api, kind, msgspec.Raw, selector):
        with suppress(msgspec.ValidationError):
            found.append(msgspec.json.decode(raw, type=type_))
    return found
