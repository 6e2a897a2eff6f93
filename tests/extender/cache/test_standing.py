"""Silence and failures, as time goes by."""

from carpool_core.testing.clock import FakeClock
from carpool_extender.cache.cluster import LONGEST_BACKOFF_S, GpuAvailability


def test_the_same_heartbeat_again_is_silence_and_a_new_one_ends_it():
    clock = FakeClock()
    availability = GpuAvailability(clock)
    availability.record_heartbeat("a", "1")
    clock.advance(30)
    availability.record_heartbeat("a", "1")
    availability.record_heartbeat("b", "1")
    clock.advance(31)
    told = availability.silent()
    assert {node: why.reason for node, why in told.items()} == {"a": "its agent has not reported for more than 60 s"}
    clock.advance(1)
    assert availability.silent()["a"] == told["a"]  # a sentence that ticks is written into every waiting pod again
    availability.record_heartbeat("a", "2")
    availability.record_heartbeat("b", "2")
    assert availability.silent() == {}
    clock.advance(61)
    assert availability.silent().keys() == {"a", "b"}
    availability.forget("a")
    assert availability.silent().keys() == {"b"}


def test_an_agent_that_never_sent_a_heartbeat_is_silent_since_the_first_word_of_its_node():
    """Regression: it was not waited for, and its GPUs were given out for ever."""
    clock = FakeClock()
    availability = GpuAvailability(clock)
    availability.record_heartbeat("never", None)
    clock.advance(40)
    availability.record_heartbeat("never", None)
    assert availability.silent() == {}
    clock.advance(21)
    assert availability.silent().keys() == {"never"}
    availability.record_heartbeat("never", "1")
    assert availability.silent() == {}
    clock.advance(40)
    availability.record_heartbeat("never", None)  # somebody took it away, which is no sign of life
    clock.advance(21)
    assert availability.silent().keys() == {"never"}


def test_failures_in_a_row_double_the_rest_and_success_ends_it():
    clock = FakeClock()
    availability = GpuAvailability(clock)
    availability.record_failure("a", ["g0", "g1"])
    availability.record_failure("a", ["g0"])  # prepared together with the others: the same failure
    assert (
        availability.in_backoff()["a", "g0"].reason == "could not be prepared, is tried again at 2026-01-31T12:00:30Z"
    )
    clock.advance(30)
    assert availability.in_backoff() == {}
    availability.record_failure("a", ["g0"])
    assert availability.in_backoff()["a", "g0"].reason.endswith("12:01:30Z")
    availability.record_success("a", ["g0"])
    assert availability.in_backoff() == {}
    availability.record_failure("a", ["g0"])
    assert availability.in_backoff()["a", "g0"].reason.endswith("12:01:00Z")
    for _ in range(9):
        clock.advance(LONGEST_BACKOFF_S)
        availability.record_failure("a", ["g0"])
    clock.advance(LONGEST_BACKOFF_S - 1)
    assert availability.in_backoff().keys() == {("a", "g0")}
    clock.advance(1)
    assert availability.in_backoff() == {}
    availability.forget("a")
    assert availability.in_backoff() == {}
