"""Each key once, never twice at a time, delayed keys at their earliest time."""

import asyncio

from carpool_core.testing.clock import FakeClock
from carpool_operator.work_queue import DEBOUNCE_S, LOW_PRIORITY_EVERY, RATE_LIMIT_PER_S, DelayQueue, WorkQueue
from hypothesis import given
from hypothesis import strategies as st


class CountingClock(FakeClock):
    """Counts how often it is asked, which the queue does at each look at what is due."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def monotonic(self) -> float:
        self.asked += 1
        return super().monotonic()


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
    queue.add_debounced("calm")
    clock.advance(DEBOUNCE_S)
    taken = []
    for number in range(LOW_PRIORITY_EVERY):
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
    queue.add_debounced("a")
    clock.advance(DEBOUNCE_S)
    queue.release_due()
    queue.add("a")
    assert queue.take_now() == "a"
    assert queue.take_now() is None
    queue.add_debounced("a")
    clock.advance(DEBOUNCE_S)
    queue.release_due()
    queue.done("a")
    assert queue.take_now() == "a", "news that came while it was looked at"


def test_key_that_was_looked_at_loses_its_turn_and_others_come_sooner() -> None:
    """Regression: the turns of jobs that were deleted, or told all in the meantime, kept their time for ever."""
    clock = FakeClock()
    queue = WorkQueue(clock)
    for number in range(1000):
        queue.add_rate_limited(f"job-{number}")
    queue.add("job-0")
    assert queue.take_now() == "job-0"
    for number in range(1, 1000):
        queue.forget(f"job-{number}")
    queue.add_rate_limited("quiet")
    queue.done("job-0")
    assert queue.release_due() == DEBOUNCE_S
    clock.advance(DEBOUNCE_S)
    assert queue.take_now() == "quiet"
    assert queue.take_now() is None


def test_turns_keep_their_distance_and_their_order() -> None:
    clock = FakeClock()
    queue = WorkQueue(clock)
    for _ in range(2):
        for key in "abc":
            queue.add_rate_limited(key)
    clock.advance(DEBOUNCE_S)
    taken = []
    for _ in range(3):
        taken.append(queue.take_now())
        assert queue.take_now() is None
        clock.advance(1 / RATE_LIMIT_PER_S + 1e-6)
    assert taken == ["a", "b", "c"]
    assert queue.release_due() is None


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 9)),
            st.tuples(st.just("drop"), st.sampled_from("abc"), st.just(0)),
            st.tuples(st.just("take"), st.just(""), st.integers(0, 9)),
        )
    )
)
def test_delays_hold_the_earliest_time_of_each_key(steps: list[tuple[str, str, int]]) -> None:
    delays, model = DelayQueue(), dict[str, float]()
    for what, key, at in steps:
        if what == "put":
            delays.put(key, at)
            model[key] = min(at, model.get(key, at))
        elif what == "drop":
            delays.drop(key)
            model.pop(key, None)
        else:
            expected = min(((due, key) for key, due in model.items() if due <= at), default=(0, None))[1]
            assert delays.take(at) == expected
            model.pop(expected or "", None)
        assert delays.next_at() == min(model.values(), default=None)


async def test_delayed_key_wakes_one_of_many_workers() -> None:
    """Regression: each key, and each passing of a delay, woke all of them, and each went through all delayed keys."""
    clock = CountingClock()
    queue = WorkQueue(clock)
    queue.add_after("far", 3600)
    workers = [asyncio.create_task(queue.take()) for _ in range(16)]
    for _ in range(5):
        await asyncio.sleep(0)
    before = clock.asked
    queue.add_rate_limited("later")
    for _ in range(5):
        await asyncio.sleep(0)
    assert clock.asked - before < 16
    queue.add("a")
    queue.add("b")
    done, waiting = await asyncio.wait(workers, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    while len(done) < 2:
        more, waiting = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert more
        done |= more
    assert {task.result() for task in done} == {"a", "b"}
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_worker_that_is_cancelled_while_it_waits_leaves_the_next_key_to_others() -> None:
    queue = WorkQueue(FakeClock())
    first, second = (asyncio.create_task(queue.take()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    queue.add("a")
    assert await asyncio.wait_for(second, 5) == "a"


async def test_take_waits_for_a_key() -> None:
    queue = WorkQueue(FakeClock())
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    queue.add("a")
    assert await taking == "a"
