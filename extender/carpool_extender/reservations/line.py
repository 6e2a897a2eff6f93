"""Who waits for a place, in the order in which they are to be served."""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from carpool_core.clock import Clock
from carpool_core.kube.pods import Pod
from carpool_core.values import JobUid, PodUid

from carpool_extender.placement.applicant import Applicant
from carpool_extender.placement.queueing import End, QueueOrder, Ticket, turn
from carpool_extender.placement.tickets import came_s, rung_in
from carpool_extender.state.cluster import Cluster


@dataclass(slots=True, eq=False)
class Waiting:
    """A pod that was refused a place."""

    uid: PodUid
    applicant: Applicant
    ticket: Ticket
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
        return self.applicant.demand.job_uid

    @property
    def kind(self) -> Hashable:
        """What is alike of those for whom the same is found."""
        of = self.applicant
        return (of.shape, of.workers, self.job if of.workers > 1 else "", self.offered)


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
        self._of_job: dict[JobUid, dict[PodUid, Waiting]] = {}
        self._kinds: dict[Hashable, dict[End, list[_Entry]]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, uid: PodUid) -> Waiting | None:
        """Return a pod that waits."""
        return self._waiting.get(uid)

    def of_job(self, job: JobUid) -> Iterable[Waiting]:
        """Return the pods of a job that wait."""
        return self._of_job.get(job, {}).values()

    def join(self, pod: Pod, applicant: Applicant, offered: bytes) -> Waiting:
        """Let a pod wait, or go on waiting: what is known of its job may be more than before."""
        uid, ticket = PodUid(pod.metadata.uid), self.ticket(pod, applicant)
        known = self._waiting.get(uid)
        if known is None:
            known = Waiting(uid, applicant, ticket, offered)
            self._number += 1
            self._put(known)
        elif (known.applicant, known.ticket, known.offered) != (applicant, ticket, offered):
            self._take(known)
            known.applicant, known.ticket, known.offered = applicant, ticket, offered
            self._put(known)
        return known

    def leave(self, uid: PodUid) -> Waiting | None:
        """Let a pod wait no more; return it if it did."""
        if (known := self._waiting.get(uid)) is not None:
            self._take(known)
        return known

    def before(self, ticket: Ticket | None, is_due: Callable[[Waiting], bool]) -> list[Waiting]:
        """Return those that come before somebody, of each kind the first that is due.

        Args:
            ticket: Of whoever asks; None for everybody.
            is_due: Whether one of them counts.
        """
        until = None if ticket is None else turn(ticket, self._order, self._end)
        heads = (_first(ends[self._end], until, is_due) for ends in self._kinds.values())
        return [one for _, one in sorted((head for head in heads if head is not None), key=_turn)]

    def precedes(self, one: Ticket, other: Ticket) -> bool:
        """Whether somebody comes before another from whichever end the next one is taken."""
        return all(turn(one, self._order, end) < turn(other, self._order, end) for end in self._ends)

    def advance(self) -> None:
        """Have the next one be taken from the other end, where they take turns."""
        if len(self._ends) > 1:
            self._end = self._end.other

    def ticket(self, pod: Pod, applicant: Applicant) -> Ticket:
        """Return what a pod is sorted by; who does not wait yet stands behind all others that are alike."""
        known = self._waiting.get(PodUid(pod.metadata.uid))
        number = self._number if known is None else known.ticket.number
        at_s = came_s(applicant, self._clock.now().timestamp()) if known is None else known.ticket.came_s
        return Ticket(-pod.spec.priority, at_s, rung_in(applicant, self._cluster.view(), self._order), number)

    def _put(self, one: Waiting) -> None:
        self._waiting[one.uid] = one
        self._of_job.setdefault(one.job, {})[one.uid] = one
        ends = self._kinds.setdefault(one.kind, {end: [] for end in self._ends})
        for end, entries in ends.items():
            insort(entries, (turn(one.ticket, self._order, end), one), key=_turn)

    def _take(self, one: Waiting) -> None:
        del self._waiting[one.uid]
        del self._of_job[one.job][one.uid]
        if not self._of_job[one.job]:
            del self._of_job[one.job]
        ends = self._kinds[one.kind]
        for end, entries in ends.items():
            del entries[bisect_left(entries, turn(one.ticket, self._order, end), key=_turn)]
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
