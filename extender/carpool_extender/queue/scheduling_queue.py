"""Pending jobs, and the decision which of them start: queue order, whole gangs, EASY backfill.

```
          add                  fits, delays no reservation in time
 job ───────────▶ Pending ───────────────────────────────────────────▶ Admitted: it leaves the queue, its claims count
                  │  ▲  ▲                                              in the cluster
   refused       │  │  └── Backoff, until `retry_at_s`
                  ▼  │
                Refused  GPUs that may hold more became available, or the reservation in time changed
```

The first job in queue order that does not fit gets a reservation in time. GPUs become idle on paper when the predicted
ends of their tenants have passed; the job starts at the latest when enough of them are idle. These GPUs are its shadow
set until it starts or the reserved time has passed. A later job passes if it fits outside the shadow set, or ends
before the reserved time (Lifka, The ANL/IBM SP Scheduling System, JSSPP 1995).

The module has no clock and no I/O. Production, the simulator and `explain` call it with their own clusters.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import repeat
from typing import NamedTuple, TypeAlias

import numpy as np
from carpool_core.clock import parse_rfc3339
from carpool_core.durations import ASSUMED_DURATION_S, duration_bucket
from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid
from numpy.typing import NDArray

from carpool_extender.cache.cluster import ClusterCache, without_pods
from carpool_extender.cache.gpu_table import Bools, Snapshot
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.diagnosis import summary
from carpool_extender.framework.filters import Evaluation
from carpool_extender.framework.gang import (
    WorkerPlace,
    gang_refusal,
    infeasible_when_empty,
    place_gang,
)
from carpool_extender.framework.selection import EvaluationCache, reservation_of
from carpool_extender.queue.order import QueueEnd, QueueKey, QueueOrder, queue_order, sort_key

EndOf: TypeAlias = Callable[[Reservation], float | None]
"""Predicted end of a reservation, in seconds of the caller's clock; None if it is unknown."""

Gpu: TypeAlias = tuple[str, GpuUuid]
"""A GPU by the name of its node and its UUID."""


class PodRef(NamedTuple):
    """A worker's pod."""

    uid: PodUid
    name: str


@dataclass(frozen=True, slots=True)
class QueuedJobInfo:
    """A pending job."""

    job: JobUid
    name: str
    """`namespace/name`."""
    priority: int
    arrived_s: float
    """Time at which the job became admissible, in seconds of the caller's clock."""
    number: int
    """Unique among pending jobs; breaks ties."""
    request: PodRequest
    """Request of each worker."""
    pods: tuple[PodRef, ...]
    """Workers that have no GPU yet: all of them start together."""
    duration_s: float | None = None
    """Predicted length alone, in seconds; None if unknown."""
    retry_at_s: float = 0.0
    """The job is not admitted before this time: it backs off."""

    def key(self, default_duration_s: float = ASSUMED_DURATION_S) -> QueueKey:
        """Return the sort key; `default_duration_s` is the length of jobs whose length is unknown."""
        length_s = default_duration_s if self.duration_s is None else self.duration_s
        return QueueKey(-self.priority, self.arrived_s, duration_bucket(length_s), self.number)

    @property
    def shape(self) -> tuple[bytes, int]:
        """Jobs of equal shape fit the same clusters."""
        return self.request.shape, len(self.pods)


class Claim(NamedTuple):
    """GPUs of one worker on paper, counted in the cluster cache until the reservation is written."""

    node: str
    reservation: Reservation


class WaitReason(StrEnum):
    """Why a job was not admitted: the same word in the job's condition Placed, in the queue and in the metrics."""

    NO_GPU_FITS = "NoGpuFits"
    """No GPUs hold it at present."""
    WOULD_DELAY = "WouldDelay"
    """It fits only on GPUs that are reserved in time for a job ahead, and would end too late."""
    BACKOFF = "Backoff"
    """It was admitted before and did not start; it is tried again later."""
    TOO_MANY_WORKERS = "TooManyWorkers"
    """Other pods of the job hold GPUs of all its workers."""


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """A job that starts now."""

    info: QueuedJobInfo
    claims: tuple[Claim, ...]
    """One for each pod, in their order."""
    end_s: float
    """Predicted end."""
    waited: WaitReason | None
    """Why the last pass did not admit it; None if no pass considered it before."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A job that stays pending."""

    info: QueuedJobInfo
    reason: WaitReason
    behind: str = ""
    """`namespace/name` of the job with the reservation in time that this one would delay."""


@dataclass(frozen=True, slots=True, eq=False)
class TimeReservation:
    """GPUs that are reserved for the first job that does not fit."""

    info: QueuedJobInfo
    start_s: float
    gpus: frozenset[Gpu]


@dataclass(slots=True, eq=False)
class _Group:
    """Pending jobs of equal request, number of workers and length: one decision holds for all of them."""

    infos: list[QueuedJobInfo] = field(default_factory=list)
    """In queue order, which is the same from both ends because their lengths are equal."""
    reason: WaitReason | None = None
    """Why they wait; None if they were not considered yet."""
    generation: int = -1
    """Generation of the cluster at the last refusal."""
    behind: TimeReservation | None = None
    """Reservation in time that they would have delayed at the last refusal."""

    def is_refused(self, freed_at: int, reserved: TimeReservation | None) -> bool:
        """Whether the last refusal still holds."""
        if self.reason is None or self.generation < freed_at:
            return False
        return self.reason is WaitReason.NO_GPU_FITS or self.behind is reserved


def predicted_end(started_s: float, duration_s: float, now_s: float) -> float:
    """Return when a running job ends, in seconds of the caller's clock.

    A job that runs longer than predicted is expected to exceed the prediction by twice as much (a correction as in
    Tsafrir et al., Backfilling Using System-Generated Predictions, IEEE TPDS 18, 2007).
    """
    end_s = started_s + duration_s
    return end_s if end_s > now_s else now_s + max(1.0, now_s - end_s)


_Entry: TypeAlias = tuple[tuple[float, ...], int, _Group]
"""Sort key and number of a group's first job, and the group."""


@dataclass(slots=True, eq=False)
class _Pass:
    """State of one pass over the groups."""

    end_of: EndOf
    now_s: float
    ends: dict[JobUid, float] = field(default_factory=dict)
    """Predicted ends of the jobs that this pass admitted."""
    line: list[_Entry] = field(default_factory=list)
    """Groups to consider, a heap."""
    refused: list[_Entry] = field(default_factory=list)
    """Groups that do not fit and may get the reservation in time, a heap."""
    reserved: TimeReservation | None = None
    """Reservation in time of a job ahead of those that are left."""


class SchedulingQueue:
    """Pending jobs, sorted incrementally, and the decision which of them start.

    A refusal holds until GPUs change that may hold more (`ClusterCache.freed_at`), so that the end of a job costs one
    evaluation for each distinct request, however many jobs wait.

    Args:
        backfill: Whether jobs pass the first one that does not fit. Otherwise all wait for it (first come, first
            served), as published strategies do.
        holders: Returns the pods of a job whose reservations count as its workers; by default all that have one.
    """

    def __init__(
        self,
        cluster: ClusterCache,
        evaluations: EvaluationCache,
        *,
        order: QueueOrder,
        default_duration_s: float = ASSUMED_DURATION_S,
        backfill: bool = True,
        holders: Callable[[JobUid], set[PodUid]] | None = None,
    ) -> None:
        self._holders = holders or cluster.pods_of_job
        self._cluster, self._evaluations = cluster, evaluations
        self._order, self._default_duration_s, self._backfill = order, default_duration_s, backfill
        self._end = QueueEnd.LONGEST
        self._jobs: dict[JobUid, QueuedJobInfo] = {}
        self._groups: dict[object, _Group] = {}
        self._aside: dict[JobUid, WaitReason] = {}
        """Jobs outside the groups: they back off, or their earlier pods still hold GPUs."""
        self._reserved: TimeReservation | None = None
        self._pass = _Pass(lambda _: None, 0.0)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobUid]:
        return iter(self._jobs)

    @property
    def reserved(self) -> TimeReservation | None:
        """The reservation in time, which is kept until its job starts or its time has passed; None if there is none."""
        return self._reserved

    def add(self, info: QueuedJobInfo) -> None:
        """Add a pending job, in place of an entry of the same job, whose reservation in time it takes over."""
        if self._jobs.get(info.job) == info:
            return
        reserved = self._reserved
        self.remove(info.job)
        self._jobs[info.job] = info
        if info.retry_at_s:
            self._aside[info.job] = WaitReason.BACKOFF
        else:
            self._insert(info)
        if reserved is not None and (reserved.info.job, reserved.info.shape) == (info.job, info.shape):
            self._reserved = replace(reserved, info=info)

    def remove(self, job: JobUid) -> None:
        """Remove a job, if it is pending."""
        info = self._jobs.pop(job, None)
        if info is not None and self._aside.pop(job, None) is None:
            self._take_out(info)

    def in_order(self) -> list[QueuedJobInfo]:
        """Return all pending jobs in queue order."""
        of_number = {info.number: info for info in self._jobs.values()}
        keys = (info.key(self._default_duration_s) for info in of_number.values())
        return [of_number[key.number] for key in queue_order(keys, self._order, self._end)]

    def waiting(self, job: JobUid) -> Waiting | None:
        """Return why a job waits since the last pass; None if it is not pending or was not considered."""
        info = self._jobs.get(job)
        if info is None:
            return None
        if (aside := self._aside.get(job)) is not None:
            return Waiting(info, aside)
        group = self._groups[_group_key(info)]
        behind = "" if group.behind is None else group.behind.info.name
        return None if group.reason is None else Waiting(info, group.reason, behind)

    def reasons(self) -> Iterator[WaitReason]:
        """Yield the reason of each pending job that was considered."""
        yield from self._aside.values()
        for group in self._groups.values():
            if group.reason is not None:
                yield from repeat(group.reason, len(group.infos))

    def admit(self, end_of: EndOf, now_s: float) -> Iterator[Admitted]:
        """Go once through the pending jobs, and yield those that start, each before the next one is considered.

        Admitted jobs are counted in the cluster as assumed reservations; the caller forgets them if it does not start
        them. Between two jobs it may change the cluster, as long as no GPU holds more afterwards.
        """
        if not self._jobs:
            return
        for job in [job for job in self._aside if self._jobs[job].retry_at_s <= now_s]:
            del self._aside[job]
            self._insert(self._jobs[job])
        self._cluster.snapshot()  # brings the availability of GPUs up to date
        if self._reserved is not None and self._reserved.start_s <= now_s:
            self._reserved = None  # predicted ends were too early
        self._pass = _Pass(end_of, now_s)
        self._sort()
        while self._pass.line:
            key, _, group = heapq.heappop(self._pass.line)
            if self._is_refused(group):  # without backfill all wait for the first
                return
            info = group.infos[0]
            found = self._try(key, info)
            if isinstance(found, WaitReason):
                self._refuse(key, group, found)
                if not self._backfill:
                    return
                continue
            yield self._admit(info, found, group.reason)
            if self._order is QueueOrder.ALTERNATE and self._pass.reserved is None:
                self._end = self._end.other  # a backfilled job does not count as a turn
                self._sort()
            elif group.infos:
                self._push(self._pass.line, group)

    def forecast(self, end_of: EndOf, now_s: float) -> Iterator[tuple[JobUid, float]]:
        """Yield each pending job with its expected start, in the order of the starts.

        It replays passes over predicted ends, and changes the cluster and the queue: call it on copies. Jobs that do
        not fit even after every running job has ended are left out.
        """
        until_s = dict[JobUid, float]()
        self._pass = _Pass(end_of, now_s)
        for node in map(self._cluster.with_assumed, self._cluster.nodes):
            for held in () if node is None else node.spec.reservations:
                until_s[held.job_uid] = max(until_s.get(held.job_uid, now_s), self._expected_end(held))
        while True:
            for one in self.admit(lambda held: until_s.get(held.job_uid), now_s):
                yield one.info.job, now_s
                until_s[one.info.job] = one.end_s
            retries = [info.retry_at_s for info in self._jobs.values() if info.retry_at_s > now_s]
            times = [*until_s.values(), *retries]
            if not times:
                return
            now_s = max(now_s, min(times))
            for job in [job for job, end_s in until_s.items() if end_s <= now_s]:
                del until_s[job]
                _release(self._cluster, job)

    def _sort(self) -> None:
        """Sort the groups by the present end of the queue."""
        self._pass.line, self._pass.refused = [], []
        for group in self._groups.values():
            if not self._backfill or not self._is_refused(group):
                self._push(self._pass.line, group)
            elif group.reason is WaitReason.NO_GPU_FITS:
                self._push(self._pass.refused, group)

    def _push(self, entries: list[_Entry], group: _Group) -> None:
        info = group.infos[0]
        heapq.heappush(entries, (self._sort_key(info), info.number, group))

    def _is_refused(self, group: _Group) -> bool:
        return group.is_refused(self._cluster.freed_at, self._reserved)

    def _try(self, key: tuple[float, ...], info: QueuedJobInfo) -> Sequence[WorkerPlace] | WaitReason:
        """Return the places of a job's workers, or why it waits."""
        cached, workers = self._evaluations.of(info.request), len(info.pods)
        own = {pod.uid for pod in info.pods}
        among = self._cluster.without_workers(info.job, own)
        if (found := place_gang(cached, workers, among)) is None:
            return WaitReason.NO_GPU_FITS
        if len(self._holders(info.job) - own) + workers > info.request.workers:
            return WaitReason.TOO_MANY_WORKERS
        reserved = self._ahead(key)
        if reserved is None or self._ends_at(info, found) <= reserved.start_s or not _gpus(found) & reserved.gpus:
            return found
        others = _outside(self._cluster.snapshot(), reserved.gpus)
        outside = place_gang(cached, workers, others if among is None else others & among)
        return WaitReason.WOULD_DELAY if outside is None else outside

    def _refuse(self, key: tuple[float, ...], group: _Group, reason: WaitReason) -> None:
        info = group.infos[0]
        if reason is WaitReason.TOO_MANY_WORKERS:
            self._take_out(info)
            self._aside[info.job] = reason
            if group.infos:
                self._push(self._pass.line, group)
            return
        group.reason, group.generation = reason, self._cluster.generation
        group.behind = self._pass.reserved if reason is WaitReason.WOULD_DELAY else None
        if reason is WaitReason.NO_GPU_FITS:
            heapq.heappush(self._pass.refused, (key, info.number, group))

    def _admit(self, info: QueuedJobInfo, found: Sequence[WorkerPlace], waited: WaitReason | None) -> Admitted:
        self.remove(info.job)
        claims = claims_of(info, found, self._pass.now_s)
        for node, claimed in claims:
            self._cluster.assume(node, claimed)
        end_s = self._pass.ends[info.job] = self._ends_at(info, found)
        return Admitted(info, claims, end_s, waited)

    def _ends_at(self, info: QueuedJobInfo, found: Sequence[WorkerPlace]) -> float:
        duration_s = self._default_duration_s if info.duration_s is None else info.duration_s
        return self._pass.now_s + duration_s * max(place.expected_slowdown for _, place in found)

    def _ahead(self, key: tuple[float, ...]) -> TimeReservation | None:
        """Return the reservation in time of the first job ahead that does not fit; None if there is no such job."""
        refused = self._pass.refused
        while self._pass.reserved is None and refused and refused[0][0] < key:
            info = heapq.heappop(refused)[2].infos[0]
            if self._reserved is None or self._reserved.info is not info:
                if (found := self._earliest(info)) is None:
                    continue  # no GPUs could ever hold it, so it delays no other job
                self._reserved = found
            self._pass.reserved = self._reserved
        return self._pass.reserved

    def _earliest(self, info: QueuedJobInfo) -> TimeReservation | None:
        """Return when enough GPUs are idle for a job, and which; None if it would not fit on idle GPUs either."""
        cached, workers, wanted = self._evaluations.of(info.request), len(info.pods), info.request.demand.gpus
        evaluation, now_s = cached.evaluation, self._pass.now_s
        if infeasible_when_empty(evaluation, workers) is not None:
            return None
        table, names, idle_s = evaluation.snapshot.gpus, evaluation.snapshot.node_names, self._idle_times(evaluation)
        able = evaluation.could_when_empty() & ((idle_s > now_s) | evaluation.ok)
        rows = np.flatnonzero(able)
        # Of each node and device class, sorted by time, every `wanted`-th GPU completes the place of a worker.
        group = table.node[rows].astype(np.intp) * (1 + len(evaluation.snapshot.classes)) + table.device_class[rows]
        order = np.lexsort((idle_s[rows], group))
        rows, group = rows[order], group[order]
        last = np.flatnonzero((np.arange(rows.size) - np.searchsorted(group, group)) % wanted == wanted - 1)
        first = last[np.argsort(idle_s[rows[last]], kind="stable")[:workers]]
        if first.size < workers:
            return None
        rows = rows[(first[:, None] - np.arange(wanted)).ravel()]
        start_s = max(now_s, float(idle_s[rows].max()))
        return TimeReservation(info, start_s, frozenset((names[int(table.node[row])], table.uuid[row]) for row in rows))

    def _idle_times(self, evaluation: Evaluation) -> NDArray[np.float64]:
        """Return when the last tenant of each GPU is predicted to end, shape (gpus,); now for idle GPUs."""
        idle_s = np.full(len(evaluation.snapshot.gpus.alive), self._pass.now_s)
        row_of = {uuid: row for row, uuid in enumerate(evaluation.snapshot.gpus.uuid.tolist())}
        for name in self._cluster.nodes:
            node = self._cluster.with_assumed(name)
            for held in () if node is None else node.spec.reservations:
                end_s = self._expected_end(held)
                for row in (row_of[uuid] for uuid in held.gpu_uuids if uuid in row_of):
                    idle_s[row] = max(idle_s[row], end_s)
        return idle_s

    def _expected_end(self, held: Reservation) -> float:
        """Return when a reservation ends: as predicted, unless the job runs longer or its length is unknown."""
        now_s, end_s = self._pass.now_s, self._pass.ends.get(held.job_uid)
        end_s = self._pass.end_of(held) if end_s is None else end_s
        if end_s is not None and end_s > now_s:
            return end_s
        started_s = parse_rfc3339(held.reserved_at).timestamp() if held.reserved_at else now_s
        length_s = self._default_duration_s if end_s is None else end_s - started_s
        return predicted_end(started_s, length_s, now_s)

    def _sort_key(self, info: QueuedJobInfo) -> tuple[float, ...]:
        return sort_key(info.key(self._default_duration_s), self._order, self._end)

    def _insert(self, info: QueuedJobInfo) -> None:
        group = self._groups.setdefault(_group_key(info), _Group())
        insort(group.infos, info, key=_rank)
        if self._reserved is not None and self._sort_key(info) < self._sort_key(self._reserved.info):
            self._reserved = None  # the new job may come before the one with the reservation in time

    def _take_out(self, info: QueuedJobInfo) -> None:
        key = _group_key(info)
        infos = self._groups[key].infos
        del infos[bisect_left(infos, _rank(info), key=_rank)]
        if not infos:
            del self._groups[key]
        if self._reserved is not None and self._reserved.info is info:
            self._reserved = None


def _group_key(info: QueuedJobInfo) -> object:
    rest_of = info.job if len(info.pods) < info.request.workers else None  # its other workers' GPUs are not for it
    return *info.shape, info.duration_s, rest_of


def _rank(info: QueuedJobInfo) -> tuple[float, ...]:
    return -info.priority, info.arrived_s, info.number


def claims_of(info: QueuedJobInfo, found: Sequence[WorkerPlace], now_s: float) -> tuple[Claim, ...]:
    """Return the claims of a gang's workers on their places, made at a time in seconds since 1970."""
    now = datetime.fromtimestamp(now_s, UTC)
    return tuple(
        Claim(node, reservation_of(place, info.request, pod.uid, pod.name, now=now, deadline=now))
        for pod, (node, place) in zip(info.pods, found, strict=True)
    )


def _release(cluster: ClusterCache, job: JobUid) -> None:
    """Delete the reservations of a job, written or assumed, and its measurements from a copy of a cluster."""
    pods = cluster.pods_of_job(job)
    for name in {name for uid in pods for name in cluster.nodes_holding(uid)}:
        cluster.apply(without_pods(cluster.nodes[name], pods))
    for uid in pods:
        for name in cluster.nodes_assuming(uid):
            cluster.forget(name, uid)


def refusal_message(waiting: Waiting, evaluations: EvaluationCache) -> str:
    """Return why a job waits, as one sentence with numbers; the evaluations are those of the present cluster."""
    info = waiting.info
    if waiting.reason is WaitReason.TOO_MANY_WORKERS:
        return (
            f"{waiting.reason}: job {info.name} has spec.workers {info.request.workers}, and other pods of it still "
            "hold GPUs; it starts after they have ended"
        )
    if waiting.reason is WaitReason.WOULD_DELAY:
        first = f"job {waiting.behind}, which comes first and would start later"
        return f"{waiting.reason}: free GPUs are reserved for {first}"
    cached, workers = evaluations.of(info.request), len(info.pods)
    evaluation = cached.evaluation
    if workers > 1 and evaluation.ok.any():
        return gang_refusal(cached, workers, info.name)
    return summary(evaluation, np.flatnonzero(evaluation.snapshot.gpus.alive))


def _gpus(found: Sequence[WorkerPlace]) -> frozenset[Gpu]:
    return frozenset((node, gpu) for node, place in found for gpu in place.gpu_uuids)


def _outside(snapshot: Snapshot, gpus: frozenset[Gpu]) -> Bools:
    """Return the mask of all GPUs but some, shape (gpus,)."""
    columns = snapshot.gpus
    outside = np.ones(len(columns.alive), np.bool_)
    for node, uuid in gpus:
        rows = np.flatnonzero(columns.node == snapshot.node_ids.get(node, -1))
        outside[[row for row in rows.tolist() if columns.uuid[row] == uuid]] = False
    return outside
