"""Who waits for a place, in the order in which they are to be served."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

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
    is_passed: bool = False
    """Whether a place was kept for it in vain; others go ahead of it until it is asked about again."""
    is_served: bool = False
    """Whether it has been told a place, or is being bound."""
    without: set[str] = field(default_factory=set)
    """Nodes on which a place was kept for it that it could not have: somebody else than the extender is against it."""

    @property
    def job(self) -> JobUid:
        """UID of its job."""
        return self.applicant.demand.job_uid

    @property
    def kind(self) -> object:
        """What is alike of those for whom the same is found."""
        of = self.applicant
        return (of.shape, of.workers, self.job if of.workers > 1 else "", frozenset(self.without))


class Line:
    """Sorts those that wait.

    Args:
        order: How.
        cluster: Tells of which products a job may have a GPU, which its length depends on.
        clock: Tells when somebody came of whose job that is not known.
    """

    def __init__(self, order: QueueOrder, cluster: Cluster, clock: Clock) -> None:
        self._order, self._cluster, self._clock = order, cluster, clock
        self._waiting: dict[PodUid, Waiting] = {}
        self._sorted: dict[End, list[tuple[tuple[float, ...], Waiting]]] = {End.LONGEST: []}
        if order is QueueOrder.ALTERNATE:
            self._sorted[End.SHORTEST] = []
        self._end = End.LONGEST
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, uid: PodUid) -> Waiting | None:
        """Return a pod that waits."""
        return self._waiting.get(uid)

    def join(self, pod: Pod, applicant: Applicant) -> Waiting:
        """Let a pod wait, or go on waiting: what is known of its job may be more than before."""
        uid = PodUid(pod.metadata.uid)
        known = self._waiting.get(uid)
        if known is not None and known.applicant is applicant:
            return known
        ticket = self.ticket(pod, applicant)
        if known is not None:
            self.leave(uid)
            known.applicant, known.ticket = applicant, ticket._replace(number=known.ticket.number)
        else:
            known = Waiting(uid, pod.metadata.name, applicant, ticket)
            self._number += 1
        self._waiting[uid] = known
        for end, line in self._sorted.items():
            insort(line, (turn(known.ticket, self._order, end), known), key=_key)
        return known

    def leave(self, uid: PodUid) -> None:
        """Let a pod wait no more."""
        known = self._waiting.pop(uid, None)
        if known is not None:
            for end, line in self._sorted.items():
                del line[bisect_left(line, turn(known.ticket, self._order, end), key=_key)]

    def before(self, ticket: Ticket) -> Iterator[Waiting]:
        """Return those that come before somebody at present, the first first."""
        line = self._sorted[self._end]
        return (one for _, one in line[: bisect_left(line, turn(ticket, self._order, self._end), key=_key)])

    def advance(self) -> None:
        """Have the next one be taken from the other end, where they take turns."""
        if self._order is QueueOrder.ALTERNATE:
            self._end = self._end.other

    def ticket(self, pod: Pod, applicant: Applicant) -> Ticket:
        """Return what a pod is sorted by; who does not wait yet stands behind all others that are alike."""
        known = self._waiting.get(PodUid(pod.metadata.uid))
        if known is not None and known.applicant is applicant:
            return known.ticket
        return Ticket(-pod.spec.priority, self._came_s(applicant), self._rung(applicant), self._number)

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


def _key(entry: tuple[tuple[float, ...], Waiting]) -> tuple[float, ...]:
    return entry[0]
