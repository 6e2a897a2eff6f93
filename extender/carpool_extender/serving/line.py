"""Who waits for a place, in the order in which they are to be served."""

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from carpool_core.clock import Clock, parse_rfc3339
from carpool_core.kube.pods import Pod
from carpool_core.lengths import length_s, rung
from carpool_core.products import hardware_name
from carpool_core.values import JobUid, PodUid

from carpool_extender.placement.applicant import Applicant
from carpool_extender.placement.queueing import End, QueueOrder, Ticket, turn
from carpool_extender.state.cluster import Cluster


@dataclass(slots=True, eq=False)
class Waiting:
    """A pod that was refused a place."""

    uid: PodUid
    name: str
    applicant: Applicant
    ticket: Ticket
    is_kept: bool = False
    """Whether a place is kept for it."""
    is_passed: bool = False
    """Whether a place was kept for it in vain; others go ahead of it until it is asked about again."""
    is_served: bool = False
    """Whether it is being bound."""
    without: frozenset[str] = frozenset()
    """Nodes on which a place was kept for it that it could not have: somebody else than the extender is against it."""

    @property
    def job(self) -> JobUid:
        """UID of its job."""
        return self.applicant.demand.job_uid

    @property
    def is_due(self) -> bool:
        """Whether others have to look whether it would find a place."""
        return not (self.is_kept or self.is_passed or self.is_served)

    @property
    def kind(self) -> Hashable:
        """What is alike of those for whom the same is found."""
        of = self.applicant
        return (of.shape, of.workers, self.job if of.workers > 1 else "", self.without)


_Entry: TypeAlias = tuple[tuple[float, ...], Waiting]


class Line:
    """Sorts those that wait. Of thousands most are alike: whoever asks for the first ones has one of each kind told.

    Args:
        order: How.
        cluster: Tells of which products a job may have a GPU, which its length depends on.
        clock: Tells when somebody came of whose job that is not known.
    """

    def __init__(self, order: QueueOrder, cluster: Cluster, clock: Clock) -> None:
        self._order, self._cluster, self._clock = order, cluster, clock
        self._ends = tuple(End) if order is QueueOrder.ALTERNATE else (End.LONGEST,)
        self._end = self._ends[0]
        self._waiting: dict[PodUid, Waiting] = {}
        self._kinds: dict[Hashable, dict[End, list[_Entry]]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, uid: PodUid) -> Waiting | None:
        """Return a pod that waits."""
        return self._waiting.get(uid)

    def join(self, pod: Pod, applicant: Applicant) -> Waiting:
        """Let a pod wait, or go on waiting: what is known of its job may be more than before."""
        uid, ticket = PodUid(pod.metadata.uid), self.ticket(pod, applicant)
        known = self._waiting.get(uid)
        if known is None:
            known = self._waiting[uid] = Waiting(uid, pod.metadata.name, applicant, ticket)
            self._number += 1
            self._put(known)
        elif known.applicant is not applicant:
            self._take(known)
            known.applicant, known.ticket = applicant, ticket
            self._put(known)
        return known

    def leave(self, uid: PodUid) -> None:
        """Let a pod wait no more."""
        if (known := self._waiting.pop(uid, None)) is not None:
            self._take(known)

    def shun(self, one: Waiting, nodes: frozenset[str]) -> None:
        """Take note of the nodes on which nothing is to be kept for a pod."""
        if one.without != nodes:
            self._take(one)
            one.without = nodes
            self._put(one)

    def before(self, ticket: Ticket) -> list[Waiting]:
        """Return whom others have to look after of those that come before somebody: of each kind the first."""
        until = turn(ticket, self._order, self._end)
        heads = (_due(ends[self._end], until) for ends in self._kinds.values())
        return [one for _, one in sorted((head for head in heads if head is not None), key=_turn)]

    def advance(self) -> None:
        """Have the next one be taken from the other end, where they take turns."""
        if self._order is QueueOrder.ALTERNATE:
            self._end = self._end.other

    def ticket(self, pod: Pod, applicant: Applicant) -> Ticket:
        """Return what a pod is sorted by; who does not wait yet stands behind all others that are alike."""
        known = self._waiting.get(PodUid(pod.metadata.uid))
        if known is not None and known.applicant is applicant:
            return known.ticket
        number = self._number if known is None else known.ticket.number
        return Ticket(-pod.spec.priority, self._came_s(applicant), self._rung(applicant), number)

    def _put(self, one: Waiting) -> None:
        ends = self._kinds.setdefault(one.kind, {end: [] for end in self._ends})
        for end, entries in ends.items():
            insort(entries, (turn(one.ticket, self._order, end), one), key=_turn)

    def _take(self, one: Waiting) -> None:
        ends = self._kinds[one.kind]
        for end, entries in ends.items():
            del entries[bisect_left(entries, turn(one.ticket, self._order, end), key=_turn)]
        if not ends[self._end]:
            del self._kinds[one.kind]

    def _came_s(self, applicant: Applicant) -> float:
        try:
            return parse_rfc3339(applicant.came_at).timestamp()
        except ValueError:
            return self._clock.now().timestamp()

    def _rung(self, applicant: Applicant) -> int:
        if applicant.steps is None or self._order is QueueOrder.ARRIVAL:
            return rung(None)
        suitable = {
            hardware_name(kind.product) for kind in self._cluster.view().classes if applicant.facts(kind).reason is None
        }
        return rung(length_s(applicant.steps, applicant.demand.prediction, suitable.__contains__))


def _turn(entry: _Entry) -> tuple[float, ...]:
    return entry[0]


def _due(entries: list[_Entry], until: tuple[float, ...]) -> _Entry | None:
    """Return the first of some that is due, unless it comes later than somebody."""
    for entry in entries:
        if entry[0] >= until:
            return None
        if entry[1].is_due:
            return entry
    return None
