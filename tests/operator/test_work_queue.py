"""Each key once, never twice at a time, delayed keys at their earliest time."""

import asyncio

from carpool_core.testing.clock import FakeClock
from carpool_operator.work_queue import LEISURE_EVERY, WorkQueue


def test_key_that_waits_is_not_added_again() -> None:
    queue = WorkQueue(FakeClock())
    queue.add("a")
    queue.add("a")
    assert queue.take_now() == "a"
    assert queue.take_now() is None


def test_key_added_while_busy_waits_until_done() -> None:
    queue = WorkQueue(FakeClock())
    queue.add("a")
    assert queue.take_now() == "a"
    queue.add("a")
    assert queue.take_now() is None
    queue.done("a")
    assert queue.take_now() == "a"
    queue.done("a")
    assert queue.is_idle


def test_delayed_key_keeps_its_earliest_time() -> None:
    clock = FakeClock()
    queue = WorkQueue(clock)
    queue.add_after("a", 10)
    queue.add_after("a", 5)
    queue.add_after("a", 20)
    assert queue.release_due() == 5
    assert queue.take_now() is None
    clock.advance(5)
    assert queue.take_now() == "a"
    assert queue.release_due() is None


def test_what_has_time_comes_after_what_was_added_later_but_comes() -> None:
    clock = FakeClock()
    queue = WorkQueue(clock)
    queue.add_after("calm", 1, at_leisure=True)
    clock.advance(1)
    taken = []
    for number in range(LEISURE_EVERY):
        queue.add(f"urgent-{number}")
        queue.add(f"and-{number}")
        key = queue.take_now()
        assert key is not None
        taken.append(key)
        queue.done(key)
    assert taken[0] == "urgent-0"
    assert taken.count("calm") == 1


def test_key_that_has_time_is_taken_once_where_it_becomes_urgent() -> None:
    clock = FakeClock()
    queue = WorkQueue(clock)
    queue.add_after("a", 1, at_leisure=True)
    assert queue.due("a") == clock.monotonic() + 1
    clock.advance(1)
    queue.release_due()
    queue.add("a")
    assert queue.take_now() == "a"
    assert queue.take_now() is None
    queue.add_after("a", 0, at_leisure=True)
    queue.release_due()
    queue.done("a")
    assert queue.take_now() == "a", "news that came while it was looked at"


async def test_take_waits_for_a_key() -> None:
    queue = WorkQueue(FakeClock())
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    queue.add("a")
    assert await taking == "a"
