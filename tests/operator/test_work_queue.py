"""Each key once, never twice at a time, delayed keys at their earliest time."""

import asyncio

from carpool_core.testing.clock import FakeClock
from carpool_operator.work_queue import WorkQueue


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


async def test_take_waits_for_a_key() -> None:
    queue = WorkQueue(FakeClock())
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    queue.add("a")
    assert await taking == "a"
