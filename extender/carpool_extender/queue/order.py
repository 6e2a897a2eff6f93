"""Who of those that wait is served first.

Jobs are served in order of arrival, so that nobody waits for ever. Of those that came within the same ten minutes
nobody came much earlier than the others; of these the longest and the shortest take turns. A long job that begins last
runs on nearly alone while the rest of the cluster has nothing left to do (Graham, Bounds on Multiprocessing Timing
Anomalies, SIAM J. Appl. Math. 17, 1969); short ones would wait for all the long ones if these went first.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from carpool_core.clock import parse_rfc3339
from carpool_core.durations import duration_bucket, duration_s
from carpool_core.products import hardware_name

from carpool_extender.cache.gpu_table import Snapshot
from carpool_extender.cache.pod_request import PodRequest

WINDOW_S = 600.0
"""Jobs that came within the same so many seconds count as having come together. They follow one another by the clock,
not by who came first, so that whoever looks finds the same ones."""


class QueueOrder(StrEnum):
    """How waiting jobs are sorted. Those of a higher priority always come first."""

    ALTERNATE = "Alternate"
    """By arrival; of those that came together the longest and the shortest take turns."""
    ARRIVAL = "Arrival"
    LONGEST_FIRST = "LongestFirst"
    """Whoever takes longest, whenever it came."""


class End(StrEnum):
    """From which end of those that came together the next one is taken."""

    LONGEST = "longest"
    SHORTEST = "shortest"

    @property
    def other(self) -> "End":
        """The end from which the one after it is taken."""
        return End.SHORTEST if self is End.LONGEST else End.LONGEST


class Ticket(NamedTuple):
    """What a waiting job is sorted by."""

    urgency: int
    """The least comes first: a pod's priority, negated."""
    came_s: float
    """When it came, in seconds of any one clock."""
    duration_bucket: int
    """Its length, as in `carpool_core.durations.rung`."""
    number: int
    """Nobody else's; the least comes first of those that are alike in everything else."""


def turn(ticket: Ticket, order: QueueOrder, end: End = End.LONGEST) -> tuple[float, ...]:
    """Return what the queue is sorted by, the least first.

    Args:
        ticket: Of one that waits.
        order: How the queue is sorted.
        end: From which end the next one is taken; counts only where they take turns.
    """
    urgency, came_s, duration_bucket, number = ticket
    if order is QueueOrder.ARRIVAL:
        return (urgency, came_s, number)
    if order is QueueOrder.LONGEST_FIRST:
        return (urgency, -duration_bucket, came_s, number)
    return (urgency, came_s // WINDOW_S, -duration_bucket if end is End.LONGEST else duration_bucket, came_s, number)


def served(tickets: Iterable[Ticket], order: QueueOrder, end: End = End.LONGEST) -> list[Ticket]:
    """Return those that wait in the order in which they are served where each finds a place in its turn.

    Args:
        tickets: Of all that wait, each with a number of its own.
        order: How the queue is sorted.
        end: From which end the first of them is taken; counts only where they take turns.
    """
    waiting = [*tickets]
    if order is not QueueOrder.ALTERNATE:
        return sorted(waiting, key=lambda one: turn(one, order))
    ends = {of: sorted(((turn(one, order, of), one) for one in waiting), reverse=True) for of in End}
    found, numbers = list[Ticket](), set[int]()
    while len(found) < len(waiting):
        _, one = ends[end].pop()
        if one.number in numbers:
            continue  # taken from the other end
        found.append(one)
        numbers.add(one.number)
        end = end.other
    return found


def came_s(pod_request: PodRequest, now_s: float) -> float:
    """Return when a job came, in seconds since 1970; now where that is not known."""
    try:
        return parse_rfc3339(pod_request.came_at).timestamp()
    except ValueError:
        return now_s


def length_in(pod_request: PodRequest, snapshot: Snapshot) -> float | None:
    """Return how long a job takes alone on the GPUs of a cluster that it may have, in seconds; None where unknown."""
    if pod_request.steps is None:
        return None
    suitable = {hardware_name(kind.product) for kind in snapshot.class_ids if pod_request.facts(kind).reason is None}
    return duration_s(pod_request.steps, pod_request.demand.prediction, suitable.__contains__)


def rung_in(pod_request: PodRequest, snapshot: Snapshot, order: QueueOrder) -> int:
    """Return the rung of that length, by which a queue is sorted; `Arrival` goes by no lengths."""
    return duration_bucket(None if order is QueueOrder.ARRIVAL else length_in(pod_request, snapshot))
