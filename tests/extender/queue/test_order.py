"""Sort order of pending jobs."""

import msgspec
import pytest
from carpool_core.resources.prediction import Interval
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.queue.order import WINDOW_S, QueueEnd, QueueKey, QueueOrder, duration_in, queue_order, sort_key
from carpool_extender.testing import A100, T4, cluster, demand, device, gpu_node, prediction

EARLY_SHORT = QueueKey(0, 0.0, 3, 0)
EARLY_LONG = QueueKey(0, WINDOW_S - 1, 9, 1)
LATE_LONG = QueueKey(0, WINDOW_S, 9, 2)
LATE_SHORT = QueueKey(0, WINDOW_S + 1, 1, 3)
ALL = (LATE_LONG, EARLY_LONG, LATE_SHORT, EARLY_SHORT)


@pytest.mark.parametrize("order", list(QueueOrder))
@pytest.mark.parametrize("end", list(QueueEnd))
def test_priority_comes_before_everything(order: QueueOrder, end: QueueEnd) -> None:
    urgent = LATE_SHORT._replace(urgency=-1)
    assert min((*ALL, urgent), key=lambda one: sort_key(one, order, end)) == urgent


@pytest.mark.parametrize("order", list(QueueOrder))
@pytest.mark.parametrize("end", list(QueueEnd))
def test_equal_jobs_keep_their_order_of_arrival(order: QueueOrder, end: QueueEnd) -> None:
    first, second, third = QueueKey(0, 1.0, 5, 7), QueueKey(0, 2.0, 5, 1), QueueKey(0, 2.0, 5, 2)
    assert sorted((third, second, first), key=lambda one: sort_key(one, order, end)) == [first, second, third]


TWO_MORE = (QueueKey(0, 5.0, 7, 4), QueueKey(0, 6.0, 4, 5))


@pytest.mark.parametrize(
    ("order", "end", "expected"),
    [
        (QueueOrder.ARRIVAL, QueueEnd.LONGEST, [0, 4, 5, 1, 2, 3]),
        (QueueOrder.LONGEST_FIRST, QueueEnd.LONGEST, [1, 2, 4, 5, 0, 3]),
        (QueueOrder.ALTERNATE, QueueEnd.LONGEST, [1, 0, 4, 5, 2, 3]),
        (QueueOrder.ALTERNATE, QueueEnd.SHORTEST, [0, 1, 5, 4, 3, 2]),
    ],
)
def test_queue_order(order: QueueOrder, end: QueueEnd, expected: list[int]) -> None:
    assert [one.number for one in queue_order((*ALL, *TWO_MORE), order, end)] == expected


def lasting(**step_s):
    """Return a prediction with these step times in seconds by product."""
    known = prediction(products=tuple(step_s))
    products = [
        msgspec.structs.replace(of, step_time_seconds=Interval(median=step_s[of.product], lower=0, upper=9))
        for of in known.products
    ]
    return msgspec.structs.replace(known, products=products)


def test_the_length_of_a_job_depends_on_present_gpu_products_only():
    """Regression: removed products counted until a restart, so explain reported another place in the queue."""
    slow = gpu_node("slow", [device(0, "slow", product=T4)])
    both = cluster(gpu_node("fast", 1), slow)
    job = PodRequest(demand("new", prediction=lasting(**{A100: 0.1, T4: 1.0})), steps=36_000)
    at_first = duration_in(job, both.snapshot())
    both.remove("fast")
    assert duration_in(job, both.snapshot()) == duration_in(job, cluster(slow).snapshot()) == pytest.approx(36_000)
    assert at_first < 36_000
