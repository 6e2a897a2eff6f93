"""Which job leaves a GPU on which a job is slowed beyond its limit."""

import pytest
from carpool_core.moves import FRESH_S, TRIAL_S, Member, must_move
from carpool_core.values import WhenSlowed

STAY, AT_CHECKPOINT, MOVE = WhenSlowed.STAY, WhenSlowed.MOVE_AT_CHECKPOINT, WhenSlowed.MOVE
NEW, OLD = 100.0, TRIAL_S + 1


def member(slowdown: float | None, age_s: float, name: str = "") -> Member:
    return Member(slowdown, 1.5, age_s, name)


@pytest.mark.parametrize(
    ("when", "own", "others", "checkpoint_age_s", "moves"),
    [
        (MOVE, member(1.0, NEW), [member(1.6, OLD)], None, True),
        (MOVE, member(1.6, NEW), [member(1.0, OLD)], None, True),
        (MOVE, member(1.0, NEW), [member(1.5, OLD)], None, False),
        (MOVE, member(None, NEW), [member(None, OLD)], None, False),
        (MOVE, member(1.6, NEW), [], None, False),
        (MOVE, member(1.6, OLD), [member(1.0, NEW)], 1.0, False),
        (MOVE, member(1.6, OLD), [member(1.0, OLD)], None, False),
        (MOVE, member(1.6, OLD), [member(1.0, OLD)], FRESH_S, True),
        (MOVE, member(1.6, OLD), [member(1.0, OLD)], FRESH_S + 1, False),
        (MOVE, member(1.0, OLD), [member(1.6, OLD)], 1.0, False),
        (AT_CHECKPOINT, member(1.6, NEW), [member(1.0, OLD)], 1.0, False),
        (AT_CHECKPOINT, member(1.6, OLD), [member(1.0, OLD)], 1.0, True),
        (STAY, member(1.6, NEW), [member(1.6, OLD)], 1.0, False),
    ],
    ids=[
        "the last to come slows another", "the last to come is slowed", "the limit is met", "nothing was measured",
        "alone", "another came last", "no checkpoint", "right after a checkpoint", "an old checkpoint",
        "the others are slowed", "in its first minutes", "later", "its owner forbids it",
    ],
)  # fmt: skip
def test_job_moves(when, own, others, checkpoint_age_s, moves) -> None:
    assert must_move(when, own, others, checkpoint_age_s) == moves


@pytest.mark.parametrize("ages", [(NEW, NEW - 50, OLD), (NEW, OLD, OLD), (OLD, OLD, OLD + 1), (NEW, NEW, NEW)])
def test_one_job_leaves_a_gpu_at_a_time(ages) -> None:
    """Each decision reads the same GPU: all are slowed and have fresh checkpoints, and may move."""
    members = [member(2.0, age_s, name) for age_s, name in zip(ages, "abc", strict=True)]
    leaving = [one for one in members if must_move(MOVE, one, [o for o in members if o is not one], 1.0)]
    assert [one.age_s for one in leaving] == [min(ages)]
