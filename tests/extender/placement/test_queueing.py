"""Who of those that wait is served first."""

import pytest
from carpool_extender.queue.order import WINDOW_S, End, QueueOrder, Ticket, served, turn

EARLY_SHORT = Ticket(0, 0.0, 3, 0)
EARLY_LONG = Ticket(0, WINDOW_S - 1, 9, 1)
LATE_LONG = Ticket(0, WINDOW_S, 9, 2)
LATE_SHORT = Ticket(0, WINDOW_S + 1, 1, 3)
EVERYBODY = (LATE_LONG, EARLY_LONG, LATE_SHORT, EARLY_SHORT)


@pytest.mark.parametrize(
    ("order", "end", "expected"),
    [
        (QueueOrder.ARRIVAL, End.LONGEST, [EARLY_SHORT, EARLY_LONG, LATE_LONG, LATE_SHORT]),
        (QueueOrder.LONGEST_FIRST, End.LONGEST, [EARLY_LONG, LATE_LONG, EARLY_SHORT, LATE_SHORT]),
        (QueueOrder.ALTERNATE, End.LONGEST, [EARLY_LONG, EARLY_SHORT, LATE_LONG, LATE_SHORT]),
        (QueueOrder.ALTERNATE, End.SHORTEST, [EARLY_SHORT, EARLY_LONG, LATE_SHORT, LATE_LONG]),
    ],
)
def test_order(order: QueueOrder, end: End, expected: list[Ticket]) -> None:
    assert sorted(EVERYBODY, key=lambda one: turn(one, order, end)) == expected


@pytest.mark.parametrize("order", list(QueueOrder))
@pytest.mark.parametrize("end", list(End))
def test_priority_comes_before_everything(order: QueueOrder, end: End) -> None:
    urgent = LATE_SHORT._replace(urgency=-1)
    assert min((*EVERYBODY, urgent), key=lambda one: turn(one, order, end)) == urgent


@pytest.mark.parametrize("order", list(QueueOrder))
@pytest.mark.parametrize("end", list(End))
def test_of_alike_ones_whoever_came_first_is_first(order: QueueOrder, end: End) -> None:
    first, second, third = Ticket(0, 1.0, 5, 7), Ticket(0, 2.0, 5, 1), Ticket(0, 2.0, 5, 2)
    assert sorted((third, second, first), key=lambda one: turn(one, order, end)) == [first, second, third]


def test_ends_take_turns() -> None:
    assert End.LONGEST.other is End.SHORTEST
    assert End.SHORTEST.other is End.LONGEST


TWO_MORE = (Ticket(0, 5.0, 7, 4), Ticket(0, 6.0, 4, 5))


@pytest.mark.parametrize(
    ("order", "end", "expected"),
    [
        (QueueOrder.ARRIVAL, End.LONGEST, [0, 4, 5, 1, 2, 3]),
        (QueueOrder.LONGEST_FIRST, End.LONGEST, [1, 2, 4, 5, 0, 3]),
        (QueueOrder.ALTERNATE, End.LONGEST, [1, 0, 4, 5, 2, 3]),
        (QueueOrder.ALTERNATE, End.SHORTEST, [0, 1, 5, 4, 3, 2]),
    ],
)
def test_who_is_served_when(order: QueueOrder, end: End, expected: list[int]) -> None:
    assert [one.number for one in served((*EVERYBODY, *TWO_MORE), order, end)] == expected


def test_where_nobody_waits_nobody_is_served() -> None:
    assert served((), QueueOrder.ALTERNATE) == []
