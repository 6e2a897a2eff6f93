"""When a pending job is expected to start: the scheduling queue of the extender, run on a copy of the cluster."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
from carpool_core.clock import Clock
from carpool_core.durations import ASSUMED_DURATION_S, format_duration
from carpool_core.keys import GATE_ADMISSION, SCHEDULER_NAME
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS, KubeApi, ResourceKind, Selector, list_all
from carpool_core.kube.errors import Forbidden, KubeError
from carpool_core.kube.pods import Pod, job_owner_reference, parse_worker_name, why_unscheduled
from carpool_core.resources.node import Reservation
from carpool_core.resources.schema import Resource
from carpool_core.resources.schema import field as described
from carpool_core.values import JobUid, PodUid, pluralize

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.diagnosis import PREFIX
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
NOT_FAILED = Selector(fields=f"spec.schedulerName={SCHEDULER_NAME},status.phase!=Failed")
"""Pods of Carpool's scheduler that have not failed."""
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


class QueuedJobView(Resource, frozen=True, kw_only=True):
    """One pending job, as `carpool queue` prints it."""

    position: Annotated[int | None, described("Place in the queue, from 1; absent if the job is outside of it.")] = None
    namespace: Annotated[str, described("Namespace of the job.")]
    name: Annotated[str, described("Name of the job.")]
    priority: Annotated[int, described("Highest priority of its pods.")] = 0
    workers: Annotated[int, described("Workers that wait.")] = 1
    expected_seconds: Annotated[float | None, described("Predicted duration, in seconds; absent if unknown.")] = None
    reason: Annotated[
        str,
        described(
            "NoGpuFits, WouldDelay, Backoff, TooManyWorkers or Admitted; empty if it can start now or is not queued."
        ),
    ] = ""
    message: Annotated[str, described("What it waits for.")] = ""
    starts_in_seconds: Annotated[
        float | None, described("Forecast of the time until its start, in seconds; absent if there is none.")
    ] = None
    start_is_assumed: Annotated[bool, described("Whether it assumes the length of a job that has to end before.")] = (
        False
    )


class QueueView(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """Answer of `carpool queue`."""

    kind: Annotated[Literal["QueueForecast"], described("Kind of the document.")] = "QueueForecast"
    order: Annotated[QueueOrder, described("Order of the queue.")]
    items: Annotated[list[QueuedJobView], described("Pending jobs in the order of the queue.")]


async def read_pending_jobs(api: KubeApi) -> PendingJobs:
    """Read the jobs of all namespaces and their pods with the caller's rights."""
    what = "pods"
    try:
        pods = await _list_valid(api, PODS, Pod, NOT_FAILED)
        what = "jobs"
        jobs = await _list_valid(api, GPU_TRAINING_JOBS, JobRow)
    except Forbidden:
        return PendingJobs(unread=f"you may not list {what} of all namespaces")
    except KubeError as error:
        return PendingJobs(unread=f"{what} of all namespaces cannot be listed: {error}")
    return pending_jobs(jobs, pods)


def pending_jobs(jobs: Iterable[JobRow], pods: Iterable[Pod]) -> PendingJobs:
    """Return all jobs with their pods; `pods` are those that `NOT_FAILED` selects."""
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
    # 1. The entries of the queue.
    mine, now_s, replay = (
        request.demand.job_uid,
        options.clock.now().timestamp(),
        _Replay(pending, cluster, config, options),
    )
    infos, outside, backoff = list[QueuedJobInfo](), "", ""
    for one in replay.gangs():
        if one.info is not None:
            infos.append(one.info)
        if one.job == mine:
            backoff, outside = one.backoff, "" if one.info is not None else _why_outside(one.gang, one.workers)
    if outside:
        return QueuePlace([outside], is_admitted=outside is ADMITTED)
    unknown = pending.unread
    if is_new and (has_class or any(info.priority for info in infos)):
        unknown = unknown or "its priority is known once its pods exist"
    if unknown:
        return QueuePlace([f"place in the queue unknown: {unknown}"])
    if is_new:
        infos.append(unqueued_job(request, request.workers, now_s, cluster))
    in_order = replay.queue_of(infos).in_order()
    position = next((number for number, info in enumerate(in_order, start=1) if info.job == mine), 0)
    if not position:
        return QueuePlace()
    place = _describe_place(in_order[:position], len(in_order), options)
    # 2. The decision now.
    considered = in_order[: max(position, MAX_FORECAST)]
    queue = replay.queue_of(considered)
    admitted = list[Admitted]()
    for start in queue.admit(replay.end_of, now_s):
        admitted.append(start)
        if queue.waiting(mine) is not None:  # this one comes later, and is no reason
            _forget(cluster, start)
            break
    if (waiting := queue.waiting(mine)) is None:
        return QueuePlace([f"{place}; it can start now"] if len(in_order) > 1 else [])
    waits = replay.why(waiting, backoff)
    # 3. The forecast, from the cluster without the claims of this decision.
    if position > MAX_FORECAST:
        expected = f"its start is not forecast, because {MAX_FORECAST} jobs or more are ahead"
        return QueuePlace([f"{place}; {expected}"], waits)
    for start in admitted:
        _forget(cluster, start)
    forecast = next((one for one in replay.starts(considered, now_s) if one.job == mine), None)
    expected = "it would not fit even after all running jobs have ended"
    if forecast is not None:
        expected = f"expected start in about {format_duration(forecast.at_s - now_s)}"
        if forecast.assumed:
            unknown = f"{pluralize(forecast.assumed, 'job')} of unknown length"
            expected = f"its start is unknown because of {unknown}; the queue assumes {expected.partition(' in ')[2]}"
    return QueuePlace([f"{place}; {expected}"], waits)


def forecast_queue(
    pending: PendingJobs, cluster: ClusterCache, config: SchedulerConfig, options: Options
) -> list[QueuedJobView]:
    """Return the pending jobs in the order of the queue, and those that are outside of it last.

    The forecast changes the cluster.
    """
    now_s, replay = options.clock.now().timestamp(), _Replay(pending, cluster, config, options)
    gangs = {one.job: one for one in replay.gangs()}
    in_order = replay.queue_of(one.info for one in gangs.values() if one.info is not None).in_order()
    considered = in_order[:MAX_FORECAST]
    queue = replay.queue_of(considered)
    admitted = list(queue.admit(replay.end_of, now_s))
    waits = {info.job: queue.waiting(info.job) for info in considered}
    reasons = {
        job: (one.reason.value, replay.why(one, gangs[job].backoff)) if one else ("", "it can start now")
        for job, one in waits.items()
    }
    for start in admitted:
        _forget(cluster, start)
    starts = {one.job: one for one in replay.starts(considered, now_s)}
    found = []
    for position, info in enumerate(in_order, start=1):
        namespace, _, name = info.name.partition("/")
        reason, message = reasons.get(info.job, ("", ""))
        forecast = starts.get(info.job)
        found.append(
            QueuedJobView(
                position=position,
                namespace=namespace,
                name=name,
                priority=info.priority,
                workers=len(info.pods),
                expected_seconds=info.duration_s,
                reason=reason,
                message=message,
                starts_in_seconds=None if forecast is None else forecast.at_s - now_s,
                start_is_assumed=forecast is not None and forecast.assumed > 0,
            )
        )
    for one in gangs.values():
        if one.info is None and (one.gang.gated or one.gang.admitted):
            reason, message = "", _why_outside(one.gang, one.workers)
            if message is ADMITTED:
                reason, message = (
                    "Admitted",
                    why_unscheduled(one.gang.admitted) or "waits for kube-scheduler to bind it",
                )
            found.append(
                QueuedJobView(
                    namespace=one.namespace, name=one.name, workers=one.workers, reason=reason, message=message
                )
            )
    return found


class _PendingGang(NamedTuple):
    """A job with pods that have not failed."""

    job: JobUid
    namespace: str
    name: str
    workers: int
    gang: Gang
    info: QueuedJobInfo | None
    """Its entry in the queue; None if it is outside."""
    backoff: str
    """Why it backs off; empty if it does not."""


class _Start(NamedTuple):
    """Forecast start of a pending job."""

    job: JobUid
    at_s: float
    """Its time, in seconds since 1970."""
    assumed: int
    """Jobs of unknown length that have ended before, by the length that the queue assumes."""


class _Replay:
    """The queue as a new leader of the extender builds it, on a copy of the cluster."""

    def __init__(self, pending: PendingJobs, cluster: ClusterCache, config: SchedulerConfig, options: Options) -> None:
        self._pending, self._cluster, self._options = pending, cluster, options
        self._evaluations = EvaluationCache(cluster, config)

    def gangs(self) -> Iterator[_PendingGang]:
        """Yield the jobs with pods, and count the claims of those that the queue has admitted in the cluster."""
        cluster, now_s = self._cluster, self._options.clock.now().timestamp()
        for uid, pods in self._pending.pods.items():
            job, gang = self._pending.jobs.get(uid), gang_of(self._pending.jobs.get(uid), pods)
            if job is None or gang is None:
                continue
            first = (gang.gated or gang.admitted)[0]
            try:
                check_worker(first, job)
                wanted = pod_request_of(job, first.spec, self._options.job_options)
            except NotOurs:  # the extender refuses it
                continue
            unclaimed = [pod for pod in gang.admitted if not cluster.nodes_holding(PodUid(pod.metadata.uid))]
            if unclaimed:
                for claim in claims_of_admitted(unclaimed, wanted, cluster, self._evaluations, now_s):
                    cluster.assume(claim.node, claim.reservation)
            retry_at_s, reason = backoff_of(gang.gated)
            info = entry_of(gang, wanted, cluster.snapshot(), retry_at_s)
            meta = job.metadata
            yield _PendingGang(uid, meta.namespace, meta.name, wanted.workers, gang, info, reason)

    def queue_of(self, entries: Iterable[QueuedJobInfo]) -> SchedulingQueue:
        """Return a queue with these entries."""
        queue = SchedulingQueue(
            self._cluster,
            self._evaluations,
            order=self._options.order,
            default_duration_s=self._options.default_duration_s,
            holders=lambda uid: workers_with_reservation(self._cluster, uid, self._pending.pods.get(uid, ())),
        )
        for entry in entries:
            queue.add(entry)
        return queue

    def end_of(self, held: Reservation, *, is_latest: bool = True) -> float | None:
        """Return the predicted end of a reservation; None if it is unknown."""
        return predicted_end_of(held, self._pending.jobs.get(held.job_uid), self._cluster, is_latest=is_latest)

    def starts(self, considered: Sequence[QueuedJobInfo], now_s: float) -> Iterator[_Start]:
        """Yield the forecast starts in their order; each changes the cluster."""
        end_of = partial(self.end_of, is_latest=False)
        unknown_if_started = {info.job for info in considered if info.duration_s is None}
        held = (one for node in self._cluster.nodes.values() for one in node.spec.reservations)
        unknown = {one.job_uid for one in held if end_of(one) is None}
        for job, start_s in self.queue_of(considered).forecast(end_of, now_s):
            yield _Start(job, start_s, sum(not self._cluster.pods_of_job(one) for one in unknown))
            unknown |= {job} & unknown_if_started

    def why(self, waiting: Waiting, backoff: str) -> str:
        """Return why a job waits, as the queue writes it."""
        if waiting.reason is WaitReason.BACKOFF:
            return backoff
        return refusal_message(waiting, self._evaluations).removeprefix(f"{waiting.reason}: ")


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
    waiting = Waiting(unqueued_job(request, workers), WaitReason.NO_GPU_FITS)
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
