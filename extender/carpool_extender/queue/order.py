"""Sort order of pending jobs.

`Arrival` serves jobs in the order in which they became admissible. `Alternate` takes, from jobs that became admissible
within the same ten minutes, the longest and the shortest alternately: a long job that starts last runs nearly alone at
the end (Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17, 1969), and short jobs would wait
for all long ones if these always went first.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from carpool_core.clock import parse_rfc3339
from carpool_core.durations import duration_s
from carpool_core.products import hardware_name
from carpool_core.resources.node import Device, Reservation

from carpool_extender.cache.gpu_table import Snapshot
from carpool_extender.cache.pod_request import PodRequest

WINDOW_S = 600.0
"""Length of a window of `Alternate`, in seconds. Windows follow the clock: every process finds the same ones."""


class QueueOrder(StrEnum):
    """Order of pending jobs of one priority; a higher priority always comes first."""

    ALTERNATE = "Alternate"
    """By window of arrival; the longest and the shortest job of a window alternate."""
    ARRIVAL = "Arrival"
    LONGEST_FIRST = "LongestFirst"
    """By length alone."""


class QueueEnd(StrEnum):
    """End of a window from which `Alternate` takes the next job."""

    LONGEST = "longest"
    SHORTEST = "shortest"

    @property
    def other(self) -> "QueueEnd":
        """The opposite end."""
        return QueueEnd.SHORTEST if self is QueueEnd.LONGEST else QueueEnd.LONGEST


class QueueKey(NamedTuple):
    """Sort key of one pending job."""

    urgency: int
    """Negated priority of its pods; the smallest comes first."""
    arrived_s: float
    """Time at which the job became admissible, in seconds of one clock."""
    duration_bucket: int
    """Predicted length, as in `carpool_core.durations.duration_bucket`."""
    number: int
    """Unique; the smallest comes first among otherwise equal jobs."""


def sort_key(key: QueueKey, order: QueueOrder, end: QueueEnd = QueueEnd.LONGEST) -> tuple[float, ...]:
    """Return the tuple by which pending jobs are sorted in rising order.

    `Alternate` takes the next job from `end`.
    """
    urgency, arrived_s, bucket, number = key
    if order is QueueOrder.ARRIVAL:
        return (urgency, arrived_s, number)
    if order is QueueOrder.LONGEST_FIRST:
        return (urgency, -bucket, arrived_s, number)
    return (urgency, arrived_s // WINDOW_S, -bucket if end is QueueEnd.LONGEST else bucket, arrived_s, number)


def queue_order(keys: Iterable[QueueKey], order: QueueOrder, end: QueueEnd = QueueEnd.LONGEST) -> list[QueueKey]:
    """Return pending jobs in the order in which they start, if each fits when it is its turn.

    The keys have unique numbers. `Alternate` takes the first job from `end`.
    """
    pending = [*keys]
    if order is not QueueOrder.ALTERNATE:
        return sorted(pending, key=lambda key: sort_key(key, order))
    ends = (end, end.other)
    left = [iter(sorted(pending, key=lambda key: sort_key(key, order, of))) for of in ends]
    found = dict[QueueKey, None]()
    while len(found) < len(pending):
        found[next(key for key in left[len(found) % 2] if key not in found)] = None
    return [*found]


def duration_in(pod_request: PodRequest, snapshot: Snapshot) -> float | None:
    """Return the predicted length of a job alone, in seconds: the mean over the suitable products of a cluster.

    None if its steps or their time are unknown.
    """
    if pod_request.steps is None:
        return None
    suitable = {
        hardware_name(kind.product)
        for kind in snapshot.present_classes
        if pod_request.requirements(kind).reason is None
    }
    return duration_s(pod_request.steps, pod_request.demand.prediction, suitable.__contains__)


def reservation_end_s(
    held: Reservation, steps: int | None, step_times_s: Mapping[str, float], devices: Iterable[Device]
) -> float | None:
    """Return the predicted end of a reservation, in seconds since 1970; None if it is unknown.

    Args:
        held: The reservation.
        steps: Steps of the job's training.
        step_times_s: Predicted step time by GPU product, in seconds.
        devices: GPUs of its node. The slowest product counts, because the others wait for it.
    """
    products = {hardware_name(device.product) for device in devices if device.uuid in held.gpu_uuids}
    step_s = max((step_times_s[product] for product in products if product in step_times_s), default=None)
    if step_s is None or steps is None or not held.reserved_at:
        return None
    return parse_rfc3339(held.reserved_at).timestamp() + steps * step_s * max(1.0, held.expected_slowdown)
