"""When a GPU is well, and when it is well again."""

import pytest
from carpool_deviceplugin.nvml.health import XIDS, Health, Signals, XidClass, advance, describe_xid, xid_class
from hypothesis import given
from hypothesis import strategies as st

WELL = Health()


@pytest.mark.parametrize(
    ("xid", "kind"), [(13, "Application"), (31, "Application"), (94, "Recoverable"), (79, "Fatal")]
)
def test_classes(xid: int, kind: str) -> None:
    assert xid_class(xid) == kind


def test_word_of_a_recovery_is_no_reason_to_wait_for_a_reset() -> None:
    """XID 154 says that the recovery action has changed, to none as well; what takes a reset comes with its own XID."""
    assert not advance(advance(WELL, Signals(xids=[154]), 0), Signals(), 61).problem
    assert advance(advance(WELL, Signals(xids=[95, 154]), 0), Signals(), 61).problem


def test_unknown_xid_is_not_harmless() -> None:
    assert xid_class(4711) is XidClass.RECOVERABLE
    assert describe_xid(4711) == "XID 4711"
    assert set(XIDS.values()) == {XidClass.APPLICATION, XidClass.FATAL}


def test_recoverable_takes_a_minute_of_quiet() -> None:
    sick = advance(WELL, Signals(xids=[94]), 0)
    assert "XID 94 (contained ECC error): no new work until it has been quiet" in sick.problem
    assert advance(sick, Signals(), 59).problem
    again = advance(sick, Signals(xids=[94]), 30)
    assert advance(again, Signals(), 89).problem, "the quiet begins anew"
    assert not advance(again, Signals(), 151).problem


def test_flapping_is_damped() -> None:
    health, now, lasted = WELL, 0.0, []
    for _ in range(4):
        health = advance(health, Signals(xids=[94]), now)
        began = now
        while health.problem:
            now += 1
            health = advance(health, Signals(), now)
        lasted.append(now - began)
    assert lasted == [60, 120, 240, 480]
    health = advance(health, Signals(xids=[94]), now + 7200)
    assert health.until == now + 7200 + 60, "it is forgotten after an hour"


def test_fatal_takes_a_reset() -> None:
    sick = advance(WELL, Signals(xids=[79]), 0)
    assert advance(sick, Signals(), 1e6).problem
    assert advance(sick, Signals(xids=[94]), 10).problem == sick.problem, "what passes does not outdo it"
    reset = advance(sick, Signals(was_reset=True), 100)
    assert reset.problem
    assert not advance(reset, Signals(), 161).problem


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (Signals(lost="GPU x: gone"), "GPU x: gone"),
        (Signals(remap_failed=True), "replace the GPU"),
        (Signals(remap_pending=True), "reset it"),
    ],
)
def test_conditions(seen: Signals, says: str) -> None:
    assert says in advance(WELL, seen, 0).problem


def test_ecc_errors_count_when_they_rise() -> None:
    first = advance(WELL, Signals(ecc_uncorrectable=7), 0)
    assert not first.problem, "they happened before the agent came"
    assert "2 uncorrectable ECC errors" in advance(first, Signals(ecc_uncorrectable=9), 1).problem


def test_heat_counts_when_it_lasts() -> None:
    hot = advance(WELL, Signals(is_hot=True), 0)
    assert not hot.problem
    assert not advance(advance(hot, Signals(is_hot=False), 10), Signals(is_hot=True), 40).problem
    sick = advance(hot, Signals(is_hot=True), 31)
    assert "slowed down for heat for more than 30 s" in sick.problem
    assert not advance(sick, Signals(is_hot=False), 92).problem


def test_gpu_that_says_it_computes_and_draws_nothing_is_stuck() -> None:
    began = advance(WELL, Signals(is_motionless=True), 0)
    assert not began.problem
    assert not advance(advance(began, Signals(is_motionless=False), 300), Signals(is_motionless=True), 601).problem
    stuck = advance(began, Signals(is_motionless=True), 600)
    assert "it is stuck: it says that it computes" in stuck.problem
    assert not advance(advance(stuck, Signals(), 601), Signals(), 661).problem


def test_lost_gpu_that_answers_again_has_begun_anew() -> None:
    lost = advance(WELL, Signals(lost="fallen off the bus"), 0)
    assert advance(lost, Signals(lost="fallen off the bus"), 5000).problem
    back = advance(lost, Signals(), 5000)
    assert back.problem
    assert not advance(back, Signals(), 5060).problem


@given(st.lists(st.tuples(st.sampled_from([13, 31, 94, 92, 4711]), st.floats(0, 100)), max_size=30))
def test_what_passes_always_ends(history: list[tuple[int, float]]) -> None:
    health, now = WELL, 0.0
    for xid, later in history:
        now += later
        health = advance(health, Signals(xids=[xid]), now)
        assert not health.problem or health.until is not None
    assert not advance(health, Signals(), now + 3601).problem


@given(st.lists(st.sampled_from([13, 31, 43, 45]), max_size=30))
def test_applications_never_hurt_a_gpu(xids: list[int]) -> None:
    assert not advance(WELL, Signals(xids=xids), 5).problem
