"""Admission of pending jobs: queue order, whole gangs, EASY backfill.

The first job in queue order that does not fit gets a reservation in time: tenants are released on paper in the order of
their predicted ends until the job fits. The GPUs that it gets then are its shadow set. A later job passes if it fits
outside the shadow set, or ends before the reserved time (Lifka, The ANL/IBM SP Scheduling System, JSSPP 1995).

The module has no clock and no I/O. Production, the simulator and `explain` call it with their own clusters.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from carpool_core.durations import ASSUMED_DURATION_S, duration_bucket
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import Bools, Snapshot
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.diagnosis import PREFIX, summary
from carpool_extender.framework.evaluation_cache import CachedEvaluation, EvaluationCache
from carpool_extender.framework.filters import pluralize
from carpool_extender.framework.gang import infeasible_when_empty, max_workers, max_workers_when_empty, place_workers
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.framework.selection import Placement, best_place, reservation_of
from carpool_extender.queue.order import QueueCursor, QueueEnd, QueueKey, QueueOrder

EndOf: TypeAlias = Callable[[Reservation], float | None]
"""Predicted end of a reservation, in seconds of the caller's clock; None if it is unknown."""

Gpu: TypeAlias = tuple[str, GpuUuid]
"""A GPU by the name of its node and its UUID."""

_ON_PAPER = datetime.fromtimestamp(0, UTC)
"""Times of reservations that are not written."""


class PodRef(NamedTuple):
    """A worker's pod."""

    uid: PodUid
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class QueuedJobInfo:
    """A pending job."""

    job: JobUid
    name: str
    """`namespace/name`."""
    priority: int
    arrived_s: float
    """When the job became admissible, in seconds of the caller's clock."""
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

    def key(self) -> QueueKey:
        """Return the sort key."""
        return QueueKey(-self.priority, self.arrived_s, duration_bucket(self.duration_s), self.number)

    @property
    def shape(self) -> tuple[bytes, int]:
        """Jobs of equal shape fit the same clusters."""
        return self.request.shape, len(self.pods)


class Claim(NamedTuple):
    """GPUs of one worker on paper, counted in the cluster cache until the reservation is written."""

    node: str
    reservation: Reservation


class WaitReason(StrEnum):
    """Why a job was not admitted."""

    DOES_NOT_FIT = "DoesNotFit"
    """No GPUs hold it at present."""
    WOULD_DELAY = "WouldDelay"
    """It fits only on GPUs that are reserved in time for a job ahead, and would end too late."""
    BACKOFF = "Backoff"
    """It was admitted before and did not start; it is tried again later."""
    TOO_MANY_PODS = "TooManyPods"
    """Other pods of the job hold GPUs of all its workers."""


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """A job that starts now."""

    info: QueuedJobInfo
    claims: tuple[Claim, ...]
    """One for each pod, in their order."""
    end_s: float
    """Predicted end."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A job that stays pending."""

    info: QueuedJobInfo
    reason: WaitReason
    position: int
    """Place in line, from 1."""
    start_s: float | None = None
    """Expected start; known for the job with the reservation in time only."""
    behind: str = ""
    """`namespace/name` of the job with the reservation in time that this one would delay."""


@dataclass(frozen=True, slots=True, eq=False)
class TimeReservation:
    """GPUs that are reserved for the first job that does not fit."""

    info: QueuedJobInfo
    start_s: float
    gpus: frozenset[Gpu]


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """Outcome of one pass over the pending jobs."""

    admitted: Sequence[Admitted]
    waiting: Sequence[Waiting]
    """In queue order."""
    reserved: TimeReservation | None
    """Reservation in time of the first job that does not fit; None if every job fits or no job ever could."""


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Expected start of a pending job."""

    position: int
    """Place in line, from 1."""
    start_s: float | None
    """None if the job does not fit even after every running job has ended."""


class SchedulingQueue:
    """Decides which pending jobs start.

    Admitted jobs are counted in the cluster as assumed reservations; the caller forgets them if it does not start them.

    Args:
        cluster: GPUs, reservations, and claims of admitted jobs.
        evaluations: Evaluations on this cluster.
        config: Policy and limits of the site.
        order: How pending jobs are sorted.
        default_duration_s: Length of jobs whose length is unknown, in seconds.
    """

    def __init__(
        self,
        cluster: ClusterCache,
        evaluations: EvaluationCache,
        config: SchedulerConfig,
        *,
        order: QueueOrder,
        default_duration_s: float = ASSUMED_DURATION_S,
    ) -> None:
        self._cluster, self._evaluations, self._config = cluster, evaluations, config
        self._order, self._default_duration_s = order, default_duration_s
        self._end = QueueEnd.LONGEST

    def schedule(self, pending: Iterable[QueuedJobInfo], end_of: EndOf, now_s: float) -> PassResult:
        """Go once through the pending jobs, and admit those that fit and delay no reservation in time.

        Args:
            pending: All pending jobs.
            end_of: Predicts the end of a reservation, in seconds of the caller's clock; None if it is unknown.
            now_s: The time.
        """
        one_pass = _Pass(self._cluster, self._evaluations, self._config, self._default_duration_s, end_of, now_s)
        infos = {info.number: info for info in pending}
        cursor = QueueCursor((info.key() for info in infos.values()), self._order, self._end)
        while (key := cursor.next()) is not None:
            if one_pass.consider(infos[key.number]) and one_pass.reserved is None:
                cursor.started()  # a backfilled job takes nobody's turn
        self._end = cursor.end
        return PassResult(one_pass.admitted, one_pass.waiting, one_pass.reserved)

    def forecast(
        self,
        pending: Iterable[QueuedJobInfo],
        end_of: EndOf,
        now_s: float,
        until: JobUid | None = None,
    ) -> dict[JobUid, Forecast]:
        """Replay passes over predicted ends. This changes the cluster and the queue: call it on copies.

        Args:
            pending: All pending jobs.
            end_of: Predicts the end of a reservation; None if it is unknown.
            now_s: The time.
            until: Stop when this job has started; None replays until all jobs have started or none can.

        Returns:
            Place in line and expected start of each pending job; the start is None after a stop as well.
        """
        left, claims = {info.job: info for info in pending}, dict[JobUid, tuple[Claim, ...]]()
        until_s = dict[JobUid, float]()
        for held in (one for node in self._cluster.nodes.values() for one in node.spec.reservations):
            end_s = end_of(held)
            until_s[held.job_uid] = now_s + self._default_duration_s if end_s is None else end_s
        in_order = enumerate(self._in_order(left.values()), start=1)
        found = {info.job: Forecast(position, None) for position, info in in_order}
        while left:
            for one in self.schedule(left.values(), lambda held: until_s.get(held.job_uid), now_s).admitted:
                job = one.info.job
                found[job] = Forecast(found[job].position, now_s)
                until_s[job], claims[job] = one.end_s, one.claims
                del left[job]
            retries = [info.retry_at_s for info in left.values() if info.retry_at_s > now_s]
            times = [*until_s.values(), *retries]
            if not times or (until is not None and until not in left):
                break
            now_s = max(now_s, min(times))
            for job in [job for job, end_s in until_s.items() if end_s <= now_s]:
                del until_s[job]
                release_job(self._cluster, job)
                for node, claimed in claims.pop(job, ()):
                    self._cluster.forget(node, claimed.pod_uid)
        return found

    def _in_order(self, pending: Iterable[QueuedJobInfo]) -> list[QueuedJobInfo]:
        infos = {info.number: info for info in pending}
        cursor, found = QueueCursor((info.key() for info in infos.values()), self._order, self._end), []
        while (key := cursor.next()) is not None:
            found.append(infos[key.number])
            cursor.started()
        return found


class _Pass:
    """State of one pass."""

    def __init__(
        self,
        cluster: ClusterCache,
        evaluations: EvaluationCache,
        config: SchedulerConfig,
        default_duration_s: float,
        end_of: EndOf,
        now_s: float,
    ) -> None:
        self._cluster, self._evaluations, self._config = cluster, evaluations, config
        self._default_duration_s, self._predicted_end, self._now_s = default_duration_s, end_of, now_s
        self._ends = dict[JobUid, float]()
        """Predicted ends of the jobs that this pass admitted."""
        self._full = set[tuple[bytes, int]]()
        """Shapes that fit nowhere."""
        self._full_outside = set[tuple[bytes, int]]()
        """Shapes that fit nowhere outside the shadow set."""
        self._never = set[tuple[bytes, int]]()
        """Shapes that fit at no predicted end."""
        self._considered = 0
        self.admitted: list[Admitted] = []
        self.waiting: list[Waiting] = []
        self.reserved: TimeReservation | None = None

    def consider(self, info: QueuedJobInfo) -> bool:
        """Decide about the next job in queue order; return whether it starts."""
        self._considered += 1
        reason, behind = self._try(info)
        if reason is None:
            return True
        reserved = self.reserved
        start_s = reserved.start_s if reserved is not None and reserved.info is info else None
        self.waiting.append(Waiting(info, reason, self._considered, start_s, behind))
        return False

    def _try(self, info: QueuedJobInfo) -> tuple[WaitReason | None, str]:
        if info.retry_at_s > self._now_s:
            return WaitReason.BACKOFF, ""
        own = {pod.uid for pod in info.pods}
        if len(self._cluster.pods_of_job(info.job) - own) + len(own) > info.request.workers:
            return WaitReason.TOO_MANY_PODS, ""
        if info.shape in self._full:
            self._reserve_in_time(info)
            return WaitReason.DOES_NOT_FIT, ""
        if self.reserved is not None:
            return self._backfill(info, self.reserved)
        if (found := self._fit(info)) is None:
            self._full.add(info.shape)
            self._reserve_in_time(info)
            return WaitReason.DOES_NOT_FIT, ""
        self._admit(info, found)
        return None, ""

    def _backfill(self, info: QueuedJobInfo, reserved: TimeReservation) -> tuple[WaitReason | None, str]:
        if self._now_s + self._duration_s(info) <= reserved.start_s:
            found = self._fit(info)
            if found is None:
                self._full.add(info.shape)
                return WaitReason.DOES_NOT_FIT, ""
            if self._end_s(info, found) <= reserved.start_s:
                self._admit(info, found)
                return None, ""
        if info.shape not in self._full_outside:
            outside = _outside(self._cluster.snapshot(), reserved.gpus)
            if (found := self._fit(info, outside)) is not None:
                self._admit(info, found)
                return None, ""
            self._full_outside.add(info.shape)
        if self._has_room(info):
            return WaitReason.WOULD_DELAY, reserved.info.name
        self._full.add(info.shape)
        return WaitReason.DOES_NOT_FIT, ""

    def _has_room(self, info: QueuedJobInfo) -> bool:
        return has_room(self._evaluations.of(info.request), len(info.pods))

    def _fit(self, info: QueuedJobInfo, among: Bools | None = None) -> list[tuple[str, Placement]] | None:
        return place_gang(self._evaluations.of(info.request), len(info.pods), among)

    def _duration_s(self, info: QueuedJobInfo) -> float:
        return self._default_duration_s if info.duration_s is None else info.duration_s

    def _end_s(self, info: QueuedJobInfo, found: Sequence[tuple[str, Placement]]) -> float:
        return self._now_s + self._duration_s(info) * max(place.expected_slowdown for _, place in found)

    def _admit(self, info: QueuedJobInfo, found: Sequence[tuple[str, Placement]]) -> None:
        claims = claims_of(info, found)
        for node, claimed in claims:
            self._cluster.assume(node, claimed)
        end_s = self._ends[info.job] = self._end_s(info, found)
        self.admitted.append(Admitted(info, claims, end_s))

    def _reserve_in_time(self, info: QueuedJobInfo) -> None:
        """Reserve GPUs in time for a job that does not fit, if no job ahead has such a reservation."""
        if self.reserved is None and info.shape not in self._never:
            self.reserved = self._earliest(info)
            if self.reserved is None:
                self._never.add(info.shape)

    def _earliest(self, info: QueuedJobInfo) -> TimeReservation | None:
        """Release tenants on paper in the order of their predicted ends; return when and where the job first fits."""
        evaluation, workers = self._evaluations.of(info.request).evaluation, len(info.pods)
        if infeasible_when_empty(evaluation, self._config.slots, workers) is not None:
            return None
        snapshot, columns = evaluation.snapshot, evaluation.snapshot.gpus
        able, able_now = evaluation.could_ever() & ~columns.unavailable, np.flatnonzero(evaluation.ok)
        names = [snapshot.node_names[node] for node in np.unique(columns.node[able]).tolist()]
        paper = _Paper(self._cluster, names, self._end_of, self._config)
        paper.show({snapshot.node_names[node] for node in np.unique(columns.node[able_now]).tolist()})
        found = paper.first_fit(info.request, workers)
        if found is None:
            return None
        end_s, places = found
        gpus = frozenset((node, gpu) for node, place in places for gpu in place.gpu_uuids)
        return TimeReservation(info, max(end_s, self._now_s), gpus)

    def _end_of(self, held: Reservation) -> float:
        if (end_s := self._ends.get(held.job_uid)) is None:
            end_s = self._predicted_end(held)
        return self._now_s + self._default_duration_s if end_s is None else end_s


class _Paper:
    """A partial copy of a cluster, on which tenants are released in the order of their predicted ends."""

    def __init__(
        self,
        cluster: ClusterCache,
        names: Iterable[str],
        end_of: Callable[[Reservation], float],
        config: SchedulerConfig,
    ) -> None:
        self._config = config
        self._nodes: dict[str, GpuNode] = {
            name: node for name in names if (node := cluster.with_assumed(name)) is not None
        }
        held = [
            (end_of(one), one.pod_uid, name) for name, node in self._nodes.items() for one in node.spec.reservations
        ]
        self._releases = sorted(held)
        self._order: dict[str, dict[PodUid, int]] = defaultdict(dict)
        for number, (_, uid, name) in enumerate(self._releases):
            self._order[name][uid] = number
        self._cluster = ClusterCache(config.slots)
        self._evaluations = EvaluationCache(self._cluster, config)
        self._released = 0

    def show(self, names: Iterable[str]) -> None:
        """Take nodes into the copy before any of their tenants is released."""
        for name in names:
            if name in self._nodes:
                self._write(name)

    def first_fit(self, request: PodRequest, workers: int) -> tuple[float, list[tuple[str, Placement]]] | None:
        """Return when a gang first fits, and where; None if it never does."""
        low, high, step = 0, 0, 1
        while not self._fits(request, workers, high):
            if high == len(self._releases):
                return None
            low, high, step = high, min(high + step, len(self._releases)), 2 * step
        while high - low > 1:  # it does not fit after `low` releases, and fits after `high`
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(request, workers, middle) else (middle, high)
        self._release(high)
        places = place_gang(self._evaluations.of(request), workers)
        if places is None:
            raise AssertionError(f"a gang of {workers} that fitted fits no more")
        return (self._releases[high - 1][0] if high else 0.0), places

    def _fits(self, request: PodRequest, workers: int, releases: int) -> bool:
        self._release(releases)
        return has_room(self._evaluations.of(request), workers)

    def _release(self, number: int) -> None:
        """Show the cluster after so many releases."""
        first, last = sorted((self._released, number))
        self._released = number
        for name in {name for _, _, name in self._releases[first:last]}:
            self._write(name)

    def _write(self, name: str) -> None:
        node, order = self._nodes[name], self._order[name]
        left = [one for one in node.spec.reservations if order[one.pod_uid] >= self._released]
        self._cluster.apply(msgspec.structs.replace(node, spec=msgspec.structs.replace(node.spec, reservations=left)))


def has_room(cached: CachedEvaluation, workers: int) -> bool:
    """Return whether a whole gang fits."""
    if workers == 1:
        return bool(cached.best.fits.any())
    return max_workers(cached, workers) >= workers


def place_gang(
    cached: CachedEvaluation, workers: int, among: Bools | None = None
) -> list[tuple[str, Placement]] | None:
    """Return the node and the GPUs of each worker; None if not all of them fit.

    Args:
        cached: Evaluation of one worker.
        workers: How many there are.
        among: Permitted GPUs, shape (gpus,); all if None.
    """
    if workers == 1:
        if not cached.best.fits.any():
            return None
        best = best_place(cached, among, with_reason=False)
        return None if best is None else [best]
    places = place_workers(cached, workers, among)
    return list(places) if len(places) == workers else None


def claims_of(info: QueuedJobInfo, found: Sequence[tuple[str, Placement]]) -> tuple[Claim, ...]:
    """Return the claims of a gang's workers on their places."""
    return tuple(
        Claim(node, reservation_of(place, info.request, pod.uid, pod.name, now=_ON_PAPER, deadline=_ON_PAPER))
        for pod, (node, place) in zip(info.pods, found, strict=True)
    )


def release_job(cluster: ClusterCache, job: JobUid) -> None:
    """Delete the written reservations of a job from a copy of a cluster."""
    for name in {name for uid in cluster.pods_of_job(job) for name in cluster.nodes_holding(uid)}:
        node = cluster.nodes[name]
        left = [one for one in node.spec.reservations if one.job_uid != job]
        cluster.apply(msgspec.structs.replace(node, spec=msgspec.structs.replace(node.spec, reservations=left)))


def refusal_message(waiting: Waiting, evaluations: EvaluationCache, slots: int) -> str:
    """Return why a job waits, as one sentence with numbers.

    Args:
        waiting: Decision about the job.
        evaluations: Evaluations on the present cluster.
        slots: Most tenants of one GPU.
    """
    info, demand = waiting.info, waiting.info.request.demand
    if waiting.reason is WaitReason.TOO_MANY_PODS:
        return (
            f"TooManyWorkers: job {info.name} has spec.workers {info.request.workers}, and other pods of it still hold "
            "GPUs; it starts after they have ended"
        )
    cached, workers = evaluations.of(info.request), len(info.pods)
    if waiting.reason is WaitReason.WOULD_DELAY:
        return f"{PREFIX}free GPUs are reserved for job {waiting.behind}, which comes first and would start later"
    evaluation = cached.evaluation
    fitting = np.flatnonzero(evaluation.ok)
    if workers > 1 and fitting.size:
        found, most = max_workers(cached, workers), max_workers_when_empty(evaluation, slots)
        ever = f", and for {most:,} at most if all GPUs were empty" if most < workers else ""
        return (
            f"{PREFIX}job {info.name} needs places for {pluralize(workers, 'worker')} of "
            f"{pluralize(demand.gpus, 'GPU')} at once, there is room for {found:,}{ever}; none starts before all can"
        )
    return summary(evaluation, np.flatnonzero(evaluation.snapshot.gpus.alive))


def _outside(snapshot: Snapshot, gpus: frozenset[Gpu]) -> Bools:
    """Return the mask of all GPUs but some, shape (gpus,)."""
    columns = snapshot.gpus
    outside = np.ones(len(columns.alive), np.bool_)
    for node, uuid in gpus:
        rows = np.flatnonzero(columns.node == snapshot.node_ids.get(node, -1))
        outside[[row for row in rows.tolist() if columns.uuid[row] == uuid]] = False
    return outside
