"""Serves those that wait in their order."""

import asyncio
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from carpool_core.clock import Clock
from carpool_core.kube.pods import Pod, job_owner_reference
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import Bools, Snapshot
from carpool_extender.cache.health import GpuAvailability
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.evaluation_cache import EvaluationCache
from carpool_extender.framework.gang import Gangs
from carpool_extender.framework.selection import best_place, place_on_node, reservation_of
from carpool_extender.informers import Informers
from carpool_extender.metrics import ExtenderMetrics
from carpool_extender.queue.order import QueueEnd, QueueKey, QueueOrder, created_s, duration_bucket_in, sort_key
from carpool_extender.workloads import too_many


@dataclass(slots=True, eq=False)
class Waiting:
    """A pod that was refused a place."""

    uid: PodUid
    pod_request: PodRequest
    ticket: QueueKey
    offered: bytes = b""
    """The nodes that kube-scheduler offered it last, as `Line.offer` packs them; empty where these are all."""
    said: str = ""
    """Why it was refused when no place was kept for anybody."""
    is_passed: bool = False
    """Whether a place was kept for it in vain; others go ahead of it until it is asked about again."""
    is_served: bool = False
    """Whether it is being bound."""

    @property
    def job(self) -> JobUid:
        """UID of its job."""
        return self.pod_request.demand.job_uid

    @property
    def kind(self) -> Hashable:
        """What is alike of those for whom the same is found."""
        of = self.pod_request
        return (of.shape, of.workers, self.job if of.workers > 1 else "", self.offered)


_Entry: TypeAlias = tuple[tuple[float, ...], Waiting]


class Line:
    """Sorts those that wait. Of thousands most are alike: whoever asks for the first ones has one of each kind told.

    Args:
        order: How.
        cluster: Tells of which products a job may have a GPU, which its length depends on.
        clock: Tells when somebody came of whose job that is not known.
    """

    def __init__(self, order: QueueOrder, cluster: ClusterCache, clock: Clock) -> None:
        self._order, self._cluster, self._clock = order, cluster, clock
        self._ends = tuple(QueueEnd) if order is QueueOrder.ALTERNATE else (QueueEnd.LONGEST,)
        self._end = self._ends[0]
        self._waiting: dict[PodUid, Waiting] = {}
        self._of_job: dict[JobUid, dict[PodUid, Waiting]] = {}
        self._kinds: dict[Hashable, dict[QueueEnd, list[_Entry]]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, uid: PodUid) -> Waiting | None:
        """Return a pod that waits."""
        return self._waiting.get(uid)

    def of_job(self, job: JobUid) -> Iterable[Waiting]:
        """Return the pods of a job that wait."""
        return self._of_job.get(job, {}).values()

    def join(self, pod: Pod, pod_request: PodRequest, offered: bytes) -> Waiting:
        """Let a pod wait, or go on waiting: what is known of its job may be more than before."""
        uid, ticket = PodUid(pod.metadata.uid), self.ticket(pod, pod_request)
        known = self._waiting.get(uid)
        if known is None:
            known = Waiting(uid, pod_request, ticket, offered)
            self._number += 1
            self._put(known)
        elif (known.pod_request, known.ticket, known.offered) != (pod_request, ticket, offered):
            self._take(known)
            known.pod_request, known.ticket, known.offered = pod_request, ticket, offered
            self._put(known)
        return known

    def leave(self, uid: PodUid) -> Waiting | None:
        """Let a pod wait no more; return it if it did."""
        if (known := self._waiting.get(uid)) is not None:
            self._take(known)
        return known

    def before(self, ticket: QueueKey | None, is_due: Callable[[Waiting], bool]) -> list[Waiting]:
        """Return those that come before somebody, of each kind the first that is due.

        Args:
            ticket: Of whoever asks; None for everybody.
            is_due: Whether one of them counts.
        """
        until = None if ticket is None else sort_key(ticket, self._order, self._end)
        heads = (_first(ends[self._end], until, is_due) for ends in self._kinds.values())
        return [one for _, one in sorted((head for head in heads if head is not None), key=_turn)]

    def precedes(self, one: QueueKey, other: QueueKey) -> bool:
        """Whether somebody comes before another from whichever end the next one is taken."""
        return all(sort_key(one, self._order, end) < sort_key(other, self._order, end) for end in self._ends)

    def advance(self) -> None:
        """Have the next one be taken from the other end, where they take turns."""
        if len(self._ends) > 1:
            self._end = self._end.other

    def ticket(self, pod: Pod, pod_request: PodRequest) -> QueueKey:
        """Return what a pod is sorted by; who does not wait yet stands behind all others that are alike."""
        known = self._waiting.get(PodUid(pod.metadata.uid))
        number = self._number if known is None else known.ticket.number
        at_s = created_s(pod_request, self._clock.now().timestamp()) if known is None else known.ticket.arrived_s
        return QueueKey(
            -pod.spec.priority, at_s, duration_bucket_in(pod_request, self._cluster.snapshot(), self._order), number
        )

    def _put(self, one: Waiting) -> None:
        self._waiting[one.uid] = one
        self._of_job.setdefault(one.job, {})[one.uid] = one
        ends = self._kinds.setdefault(one.kind, {end: [] for end in self._ends})
        for end, entries in ends.items():
            insort(entries, (sort_key(one.ticket, self._order, end), one), key=_turn)

    def _take(self, one: Waiting) -> None:
        del self._waiting[one.uid]
        del self._of_job[one.job][one.uid]
        if not self._of_job[one.job]:
            del self._of_job[one.job]
        ends = self._kinds[one.kind]
        for end, entries in ends.items():
            del entries[bisect_left(entries, sort_key(one.ticket, self._order, end), key=_turn)]
        if not ends[self._end]:
            del self._kinds[one.kind]


def _turn(entry: _Entry) -> tuple[float, ...]:
    return entry[0]


def _first(entries: list[_Entry], until: tuple[float, ...] | None, is_due: Callable[[Waiting], bool]) -> _Entry | None:
    """Return the first of some that is due, unless it comes later than somebody."""
    for entry in entries:
        if until is not None and entry[0] >= until:
            return None
        if is_due(entry[1]):
            return entry
    return None


PATIENCE_S = 3.0
"""How long GPUs are kept: kube-scheduler sits out a backoff of 2 s at most before it asks about a pod again."""
REMINDED_S = 1.0
"""After this time kube-scheduler is reminded: what made room may have gone unheard."""
EACH_S = 0.01
"""Both are so much longer for each pod that waits: it asks about one after the other."""
LOOK_S = 0.5
"""How often that is looked at."""
MOST_IN_VAIN = 1024
"""Jobs that are remembered for which GPUs were kept in vain."""

Gpu = tuple[str, GpuUuid]
"""A GPU by its node's name and its UUID."""


@dataclass(slots=True, eq=False)
class Kept:
    """GPUs that take nobody but the pods of one job."""

    job: JobUid
    ticket: QueueKey
    since_s: float
    gpus: set[Gpu] = field(default_factory=set)
    told: dict[PodUid, set[Gpu]] = field(default_factory=dict)
    """Those of pods that were told a place already."""
    counted: dict[PodUid, tuple[str, Reservation]] = field(default_factory=dict)
    """What pods of several count with on which node, as if they had what they were told: others are told the rest."""
    served: set[PodUid] = field(default_factory=set)
    """Pods that had a reservation since."""
    to_come: int = 0
    """Workers of the job that were not told a place yet, since others were."""
    is_reminded: bool = False
    has_refused: bool = False
    """Whether anybody was refused meanwhile, who has to hear of it when they are kept no longer."""

    @property
    def nodes(self) -> set[str]:
        """Names of their nodes."""
        return {node for node, _ in self.gpus}


class KeptGpus:
    """What is kept, by job; and how long.

    Args:
        line: Those that wait.
        informers: Tell of nodes that go, and count what pods were told.
        standing: Has GPUs take nobody.
        clock: The time.
        sleep: Waits.
        telemetry: Counts what becomes of it.
        remind: Has kube-scheduler try those that wait, because of a node.
        is_anybody_next: Whether anybody of those that wait would find a place now.
    """

    def __init__(
        self,
        line: Line,
        informers: Informers,
        standing: GpuAvailability,
        *,
        clock: Clock,
        sleep: Callable[[float], Awaitable[Any]],
        telemetry: ExtenderMetrics,
        remind: Callable[[str], None],
        is_anybody_next: Callable[[], bool],
    ) -> None:
        self._line, self._availability, self._clock, self._sleep = line, standing, clock, sleep
        self._cluster = informers.cluster
        self._telemetry, self._remind, self._is_anybody_next = telemetry, remind, is_anybody_next
        self._kept: dict[JobUid, Kept] = {}
        self._in_vain: OrderedDict[JobUid, None] = OrderedDict()
        self._held_up = 0
        self._stirred = asyncio.Event()
        informers.on_node(self._node_changed)

    def __len__(self) -> int:
        return sum(len(kept.gpus) for kept in self._kept.values())

    def __iter__(self) -> Iterator[Kept]:
        return iter(list(self._kept.values()))

    def __contains__(self, job: JobUid) -> bool:
        return job in self._kept

    def of(self, job: JobUid) -> Kept | None:
        """Return what is kept for a job."""
        return self._kept.get(job)

    async def run(self) -> None:
        """Look after what is kept for long, for ever."""
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            while self._kept:
                await self._sleep(LOOK_S)
                self._look()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Let nobody's patience end meanwhile: kube-scheduler waits for an answer, and asks about nobody else."""
        self._held_up += 1
        try:
            yield
        finally:
            self._held_up -= 1

    def add(self, job: JobUid, ticket: QueueKey, gpus: set[Gpu]) -> Kept:
        """Keep GPUs for a job, whose pods are sorted by some ticket; nothing more for those to whom some were open."""
        kept = self._kept.setdefault(job, Kept(job, ticket, self._clock.monotonic()))
        for other in self:
            if other is not kept and other.gpus & gpus:
                kept.has_refused |= other.has_refused
                self.drop(other, "overtaken")
        kept.gpus |= gpus
        self._availability.keep(gpus)
        self._stirred.set()
        return kept

    def count(self, kept: Kept, node: str, told: Reservation) -> None:
        """Have a pod count as if it had what it was told."""
        self.count_no_more(kept, told.pod_uid)
        kept.counted[told.pod_uid] = (node, told)
        self._cluster.assume(node, told)

    def count_no_more(self, kept: Kept, uid: PodUid) -> tuple[str, Reservation] | None:
        """Let a pod count by its reservation only, if it has one; return what it counted with, and on which node."""
        if (counted := kept.counted.pop(uid, None)) is not None:
            self._cluster.forget(counted[0], uid)
        return counted

    def retract(self, kept: Kept, uid: PodUid) -> None:
        """Forget what a pod was told: it is asked about once more, or gone."""
        self.count_no_more(kept, uid)
        kept.told.pop(uid, None)

    def holders(self, job: JobUid) -> set[PodUid]:
        """UIDs of the pods of a job that have reservations, written or about to be: more than being told a place."""
        kept = self._kept.get(job)
        return self._cluster.pods_of_job(job).difference(() if kept is None else kept.counted)

    def has_begun(self, kept: Kept) -> bool:
        """Whether all workers of a job were found places, which are kept, or one of them has its own of these."""
        is_told = kept.told and not self.is_in_vain(kept.job)
        return bool(is_told or kept.served & self._cluster.pods_of_job(kept.job))

    def is_in_vain(self, job: JobUid) -> bool:
        """Whether what was kept for a job went to others, and none of its pods was bound since."""
        return job in self._in_vain

    def bound(self, job: JobUid) -> None:
        """Take note that a pod of a job is bound."""
        self._in_vain.pop(job, None)

    def change(self, kept: Kept, gpus: set[Gpu]) -> None:
        """Keep other GPUs for a job than before."""
        self.release(kept, kept.gpus - gpus)
        self.add(kept.job, kept.ticket, gpus)

    def serve(self, kept: Kept, uid: PodUid) -> None:
        """Be as patient as if it were kept from now on, once for each pod: it has its reservation."""
        if uid not in kept.served:
            kept.served.add(uid)
            kept.since_s = self._clock.monotonic()

    def open(self, kept: Kept) -> None:
        """Let GPUs take others while it is decided."""
        self._availability.keep_no_more(kept.gpus)

    def close(self, kept: Kept) -> None:
        """QueueEnd that, if they are kept still."""
        if self._kept.get(kept.job) is kept:
            self._availability.keep(kept.gpus)

    def release(self, kept: Kept, gpus: set[Gpu]) -> None:
        """Keep some of a job's GPUs no more."""
        kept.gpus -= gpus
        self._availability.keep_no_more(gpus)

    def drop(self, kept: Kept, outcome: str) -> None:
        """Keep nothing more for a job, and have those tried again who were refused for it."""
        del self._kept[kept.job]
        for uid in [*kept.counted]:
            self.count_no_more(kept, uid)
        self._availability.keep_no_more(kept.gpus)
        self._telemetry.no_more_kept(outcome)
        is_free = outcome != "overtaken" and (outcome != "taken" or self._is_anybody_next())
        if kept.has_refused and is_free:
            self._remind_of(kept)

    def _look(self) -> None:
        now, more_s = self._clock.monotonic(), EACH_S * len(self._line)
        for kept in self:
            waiting = [*self._line.of_job(kept.job)]
            if self._held_up or any(one.is_served for one in waiting):
                kept.since_s += LOOK_S
            elif now - kept.since_s >= PATIENCE_S + more_s:
                for one in waiting:
                    one.is_passed = True
                self._in_vain[kept.job] = None
                while len(self._in_vain) > MOST_IN_VAIN:
                    self._in_vain.popitem(last=False)
                self.drop(kept, "passed")
            elif now - kept.since_s >= REMINDED_S + more_s and not kept.is_reminded:
                kept.is_reminded = True
                self._remind_of(kept)

    def _remind_of(self, kept: Kept) -> None:
        for node in sorted(kept.nodes):
            self._remind(node)

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if old is not None and new is None:
            for kept in self:
                if old.metadata.name in kept.nodes:
                    self.drop(kept, "gone")


EVERYWHERE = b""


def packed(snapshot: Snapshot, offered: Sequence[str]) -> bytes:
    """Pack the nodes that were offered into bits, in the order of their numbers; EVERYWHERE where these are all."""
    ids = snapshot.ids(offered)
    found = np.zeros(len(snapshot.node_names), np.bool_)
    found[ids[ids >= 0]] = True
    return EVERYWHERE if int(found.sum()) == len(snapshot.node_ids) else np.packbits(found).tobytes()


def names(snapshot: Snapshot, offered: bytes) -> list[str] | None:
    """Return the names of the nodes that were offered; None where these are all."""
    if offered == EVERYWHERE:
        return None
    among_nodes = _unpacked(snapshot, offered)
    return [name for name, number in snapshot.node_ids.items() if among_nodes[number]]


def among(snapshot: Snapshot, offered: bytes) -> Bools | None:
    """Return which GPUs are on nodes that were offered, shape (gpus,); None where all are.

    Nodes that came since were not offered. One that came in the place of one that went counts as that one.
    """
    if offered == EVERYWHERE:
        return None
    found: Bools = _unpacked(snapshot, offered)[snapshot.gpus.node]
    return found


def _unpacked(snapshot: Snapshot, offered: bytes) -> Bools:
    nodes = np.zeros(len(snapshot.node_names), np.bool_)
    known = np.unpackbits(np.frombuffer(offered, np.uint8)).astype(np.bool_)[: len(nodes)]
    nodes[: len(known)] = known
    return nodes


MOST_KINDS = 8
"""Demands that are tried before somebody goes ahead of them: each takes a while."""
MOST_KEPT = 32
"""GPUs that are kept at a time. Where there is room for so many, it hardly matters who comes first."""


class Ahead:
    """Keeps GPUs for those that come first.

    Args:
        line: Those that wait.
        cluster: The GPUs.
        kept: What is kept.
        evaluation_cache: Where places are found.
        gangs: Where all workers of a job would find one.
    """

    def __init__(
        self, line: Line, cluster: ClusterCache, kept: KeptGpus, evaluation_cache: EvaluationCache, gangs: Gangs
    ) -> None:
        self._line, self._cluster, self._kept = line, cluster, kept
        self._evaluation_cache, self._gangs = evaluation_cache, gangs

    def _is_due(self, one: Waiting) -> bool:
        """Whether others look after it: not if it is served already, or could not have a place if there were one."""
        if one.is_passed or one.is_served or one.job in self._kept:
            return False
        return too_many(one.pod_request, one.uid, self._kept.holders(one.job)) is None

    def keep_for_next(self, ticket: QueueKey, job: JobUid, out: set[Hashable]) -> bool:
        """Keep GPUs for the first before somebody that would find a place, and say whether there was one.

        Args:
            ticket: Of whoever asks.
            job: Its job, whose other pods are not in its way.
            out: Kinds that find none.
        """
        if sum(len(kept.gpus) for kept in self._kept if not self._kept.has_begun(kept)) >= MOST_KEPT:
            return False
        for one in self._line.before(ticket, lambda other: other.job != job and self._is_due(other)):
            if one.kind in out:
                continue
            if len(out) == MOST_KINDS:
                return False
            if self._keep_for(one):
                return True
            out.add(one.kind)
        return False

    def _keep_for(self, one: Waiting) -> bool:
        """Keep GPUs for the pods of a job that wait, if all would find a place."""
        offered = names(self._cluster.snapshot(), one.offered)
        if self._gangs.waits(one.pod_request, one.uid, offered):
            return False
        mates = [mate for mate in self._line.of_job(one.job) if not (mate.is_passed or mate.is_served)]
        gpus = self._gangs.gpus_for(one.pod_request, len(mates), offered) if len(mates) > 1 else self._best_for(one)
        if gpus:
            self._kept.add(one.job, one.ticket, gpus)
        return bool(gpus)

    def _best_for(self, one: Waiting) -> set[Gpu]:
        cached_evaluation = self._evaluation_cache.of(one.pod_request)
        if not cached_evaluation.best.fits.any():
            return set()
        chosen = best_place(
            cached_evaluation, among(cached_evaluation.evaluation.snapshot, one.offered), with_reason=False
        )
        return set() if chosen is None else {(chosen[0], gpu) for gpu in chosen[1].gpu_uuids}

    def is_anybody_next(self) -> bool:
        """Whether anybody of those that wait would find a place now, as far as a few of them tell."""
        heads = self._line.before(None, self._is_due)[:MOST_KINDS]
        return any(self._evaluation_cache.of(one.pod_request).best.fits.any() for one in heads)


class Promises:
    """Keeps GPUs for those that were told a place there, and for the other workers of their job.

    Most pods are the only one of their job, and neither waited for their place nor took it from others: for such a pod
    nothing is kept. Should another reserve its GPUs first, it is served again as quickly.

    Args:
        line: Those that wait.
        cluster: Counts what workers were told.
        kept: What is kept.
        evaluation_cache: Where places are found.
        gangs: Where all workers of a job would find one.
        clock: The time.
    """

    def __init__(
        self,
        line: Line,
        cluster: ClusterCache,
        kept: KeptGpus,
        *,
        evaluation_cache: EvaluationCache,
        gangs: Gangs,
        clock: Clock,
    ) -> None:
        self._line, self._cluster, self._kept = line, cluster, kept
        self._evaluation_cache, self._gangs, self._clock = evaluation_cache, gangs, clock

    def give(
        self, pod: Pod, pod_request: PodRequest, node: str, *, later: Sequence[Kept], offered: Sequence[str]
    ) -> None:
        """Keep what a pod was told.

        Args:
            pod: The pod.
            pod_request: What it demands.
            node: Where it was told to go.
            later: What is kept for those that come after it.
            offered: The nodes in question.
        """
        uid, job = PodUid(pod.metadata.uid), pod_request.demand.job_uid
        is_gang = pod_request.workers > 1 and not self._kept.is_in_vain(job)
        is_due = is_gang or self._line.get(uid) is not None
        if not is_due and not later:
            return
        chosen = place_on_node(self._evaluation_cache.of(pod_request), node, with_reason=False)
        if isinstance(chosen, str):
            return
        gpus = {(node, gpu) for gpu in chosen.gpu_uuids}
        if not is_due and not any(kept.gpus & gpus for kept in later):
            return
        known = self._kept.of(job)
        is_foreseen = known is not None and known.to_come > 0
        kept = self._kept.add(job, self._line.ticket(pod, pod_request), gpus)
        kept.told[uid] = gpus
        if is_gang:
            now = self._clock.now()
            told = reservation_of(chosen, pod_request, uid, pod.metadata.name, now=now, deadline=now)
            self._kept.count(kept, node, told)
            kept.to_come = self._gangs.wanted(pod_request, uid) - len(self._cluster.pods_of_job(job))
            if kept.to_come <= 0 or not is_foreseen:
                self._keep_for_others(kept, pod_request, offered)

    def _keep_for_others(self, kept: Kept, pod_request: PodRequest, offered: Sequence[str]) -> None:
        """Keep GPUs for the workers of a job that were not told a place yet, now that one was."""
        self._kept.open(kept)
        others = self._gangs.gpus_for(pod_request, kept.to_come, offered) if kept.to_come > 0 else set[Gpu]()
        self._kept.change(kept, others.union(*kept.told.values()))


MANY = 50
"""Pods that wait, from which on what is kept for a moment is not told to each of them."""


class Keeper:
    """Serves those that wait in their order, which kube-scheduler does not.

    Its queue goes by the time of the last try, so that each refusal puts a pod behind all others of its priority. When
    something becomes free, it tries them all, in that order. So before somebody gets a place, it is looked who comes
    before it and would find one, too. For these GPUs are kept until they are asked about, and whoever finds no other
    is refused for the moment. Nobody is waited for: what fits none of those before it goes to whom it fits.

    A GPU that is kept takes nobody else, though there may be room for two: what a pod gets beside others must not hang
    on somebody who is not there. It is no matter to who comes before its owner, unless that was told it already.

    As soon as one of several workers of a job is told its place, GPUs are kept on which the others find theirs, and it
    counts as if it had its own, so that they are told what is left.

    A pod may be held up by what the extender does not know, such as a taint, or too little memory of the node. Nothing
    is kept for it where it was not offered; and where it is not asked about at all, it is passed after a moment.

    Args:
        line: Those that wait.
        informers: Tell of pods that are bound or gone.
        standing: Has GPUs take nobody.
        evaluation_cache: Where places are found.
        gangs: Whether all workers of a job would find one.
        clock: The time.
        sleep: Waits.
        telemetry: Counts what becomes of GPUs that were kept.
        remind: Has kube-scheduler try those that wait, because of a node.
    """

    def __init__(
        self,
        line: Line,
        informers: Informers,
        standing: GpuAvailability,
        *,
        evaluation_cache: EvaluationCache,
        gangs: Gangs,
        clock: Clock,
        sleep: Callable[[float], Awaitable[Any]],
        telemetry: ExtenderMetrics,
        remind: Callable[[str], None],
    ) -> None:
        self._line, self._informers, self._evaluation_cache = line, informers, evaluation_cache
        self._kept = KeptGpus(
            line,
            informers,
            standing,
            clock=clock,
            sleep=sleep,
            telemetry=telemetry,
            remind=remind,
            is_anybody_next=lambda: self._ahead.is_anybody_next(),
        )
        self._ahead = Ahead(line, informers.cluster, self._kept, evaluation_cache, gangs)
        self._promises = Promises(
            line, informers.cluster, self._kept, evaluation_cache=evaluation_cache, gangs=gangs, clock=clock
        )
        self._opened: list[Kept] = []
        informers.on_pod(self._pod_changed)

    async def run(self) -> None:
        """Look after what is kept for long, for ever."""
        await self._kept.run()

    def held_up(self) -> AbstractContextManager[None]:
        """Let nobody's patience end meanwhile: kube-scheduler waits for an answer, and asks about nobody else."""
        return self._kept.held_up()

    def asked(self, pod: Pod, pod_request: PodRequest) -> None:
        """Open what is kept for a pod, and for those that come after it: it is decided about it until `answered`."""
        uid = PodUid(pod.metadata.uid)
        if (known := self._line.get(uid)) is not None:
            known.is_passed = known.is_served = False
        ticket = self._line.ticket(pod, pod_request) if len(self._kept) else None
        for kept in self._kept:
            if kept.job == pod_request.demand.job_uid:
                self._kept.retract(kept, uid)
                self._kept.open(kept)
            elif ticket is not None and not self._kept.has_begun(kept) and self._line.precedes(ticket, kept.ticket):
                self._kept.open(kept)
            else:
                continue
            self._opened.append(kept)

    def has_begun(self, pod_request: PodRequest) -> bool:
        """Whether a job has begun to find its places: whether all of its workers fit was asked then."""
        kept = self._kept.of(pod_request.demand.job_uid)
        return kept is not None and self._kept.has_begun(kept)

    def holders(self, job: JobUid) -> set[PodUid]:
        """UIDs of the pods of a job that have reservations, written or about to be: more than being told a place."""
        return self._kept.holders(job)

    @contextmanager
    def comparing(self, uid: PodUid, pod_request: PodRequest) -> Iterator[None]:
        """Have everything as it was when a pod was told its place, while it is compared with others."""
        if (kept := self._kept.of(pod_request.demand.job_uid)) is None:
            yield
            return
        counted = self._kept.count_no_more(kept, uid)
        self._kept.open(kept)
        try:
            yield
        finally:
            self._kept.close(kept)
            if counted is not None:
                self._kept.count(kept, *counted)

    def first(self, pod: Pod, pod_request: PodRequest, node: str) -> bool:
        """Keep GPUs for those that come before a pod and would find a place; say whether there are such.

        Args:
            pod: That fits.
            pod_request: What it demands.
            node: Where it would go.
        """
        job = pod_request.demand.job_uid
        if not len(self._line) or self.has_begun(pod_request) or self._informers.cluster.pods_of_job(job):
            return False  # its turn has come already
        own = self._kept.of(job)
        if own is not None and self._gpus(pod_request, node) <= own.gpus:
            return False  # so it has, for these
        if own is not None:
            self._kept.close(own)
        ticket, out, found = self._line.ticket(pod, pod_request), set[Hashable](), False
        while self._ahead.keep_for_next(ticket, job, out):
            self._line.advance()
            found = True
        if own is not None:
            self._kept.open(own)
        return found

    def answered(
        self, pod: Pod, pod_request: PodRequest, offered: Sequence[str], nodes: Sequence[str], said: str
    ) -> str:
        """Take note of what a pod was told.

        Args:
            pod: That was asked about.
            pod_request: What it demands.
            offered: The nodes in question.
            nodes: Where it fits, the best first; none where it was refused.
            said: Why it was refused.

        Returns:
            Why it is refused. Where many wait in the words of before, while something is kept: these will be true
            again in a moment, and each new sentence is a write for every pod that waits.
        """
        job, uid = pod_request.demand.job_uid, PodUid(pod.metadata.uid)
        there = self._informers.pod(uid)
        opened, self._opened = self._opened, []
        own = self._kept.of(job)
        if there is not None and there.spec.node_name:
            pass  # it has its place
        elif nodes:
            if own is None and not self._informers.cluster.pods_of_job(job):
                self._line.advance()
            later = [kept for kept in opened if kept is not own]
            self._promises.give(pod, pod_request, nodes[0], later=later, offered=offered)
        elif there is not None:  # otherwise it is gone, or will be asked about once more
            known = self._line.join(pod, pod_request, packed(self._informers.cluster.snapshot(), offered))
            known.is_passed = own is not None  # something is against it that is not known here
            said = self._refused(known, said)
        if not nodes and own is not None and not self._kept.has_begun(own):
            self._kept.drop(own, "refused")
        for kept in opened:
            self._kept.close(kept)
        return said

    @contextmanager
    def deciding(self, pod_request: PodRequest) -> Iterator[None]:
        """Open what is kept for a pod while it is decided what is reserved for it."""
        if (kept := self._kept.of(pod_request.demand.job_uid)) is None:
            yield
            return
        self._kept.open(kept)
        try:
            yield
        finally:
            self._kept.close(kept)

    def binding(self, uid: PodUid) -> None:
        """Take note that a pod is being bound."""
        if (known := self._line.get(uid)) is not None:
            known.is_served = True

    def reserving(self, uid: PodUid, job: JobUid) -> None:
        """Count a pod no more as if it had what it was told: it is decided what is reserved for it."""
        if (kept := self._kept.of(job)) is not None:
            self._kept.count_no_more(kept, uid)

    def reserved(self, uid: PodUid, job: JobUid, gpus: set[Gpu]) -> None:
        """Keep the GPUs of a pod no more: its reservation counts from now on."""
        if (kept := self._kept.of(job)) is None:
            return
        kept.told.pop(uid, None)
        if not kept.told and kept.to_come <= 0 and all(one.is_served for one in self._line.of_job(job)):
            self._kept.drop(kept, "taken")
            return
        self._kept.serve(kept, uid)
        if kept.to_come <= 0:
            self._kept.release(kept, gpus.difference(*kept.told.values()))

    def unbound(self, uid: PodUid) -> None:
        """Take note that a pod could not be bound."""
        if (known := self._line.get(uid)) is not None:
            known.is_served = False

    def _gpus(self, pod_request: PodRequest, node: str) -> set[Gpu]:
        """Return which GPUs of a node somebody would have."""
        chosen = place_on_node(self._evaluation_cache.of(pod_request), node, with_reason=False)
        return set() if isinstance(chosen, str) else {(node, gpu) for gpu in chosen.gpu_uuids}

    def _refused(self, known: Waiting, said: str) -> str:
        for kept in self._kept:
            kept.has_refused = True
        if not len(self._kept) or len(self._line) < MANY:
            known.said = said
        return known.said or said

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        if pod is None or (new is not None and not new.is_finished and not new.spec.node_name):
            return
        uid, owner = PodUid(pod.metadata.uid), job_owner_reference(pod.metadata)
        waited, job = self._line.leave(uid) is not None, JobUid("" if owner is None else owner.uid)
        kept, is_bound = self._kept.of(job), new is not None and not new.is_finished
        if is_bound:
            self._kept.bound(job)
        if kept is None or not (waited or uid in kept.told or not pod.spec.node_name):
            return
        self._kept.retract(kept, uid)
        if not (kept.told or (is_bound and kept.to_come > 0) or any(True for _ in self._line.of_job(kept.job))):
            self._kept.drop(kept, "gone")
