"""Moves: whether a job leaves its GPU because a job there is slowed beyond its limit. Pure.

The operator and the simulator share the decision. A job that came last loses little in its first minutes, and it
changed the others' speed: where its owner allows that, its first minutes beside others are a trial. Later only a slowed
job itself moves, right after a checkpoint. One job leaves a GPU at a time: the last to come of those that could.
"""

from collections.abc import Sequence
from typing import NamedTuple

from carpool_core.values import WhenSlowed

TRIAL_S = 600.0
"""Age in seconds up to which the job that came last may end without a checkpoint."""
FRESH_S = 120.0
"""Age in seconds up to which a checkpoint is fresh: a job that moves loses no more work."""
SETTLED_S = 90.0
"""Time after a change of co-tenants from which measurements count, in seconds: before, means hold others' steps."""
MAX_MOVES = 5
"""Moves of a job; then it stays."""


class Member(NamedTuple):
    """A job on a GPU."""

    slowdown: float | None
    """Measured slowdown; None while its step time alone or beside its present co-tenants is unknown."""
    limit: float
    """Largest slowdown that it accepts."""
    age_s: float
    """Time since its GPU was reserved, in seconds."""
    name: str
    """Unique name, which orders jobs that came at the same time."""

    @property
    def is_slowed(self) -> bool:
        """Whether it is slowed beyond its limit."""
        return self.slowdown is not None and self.slowdown > self.limit

    @property
    def order(self) -> tuple[float, str]:
        """Sort key; the job that came last is the first."""
        return self.age_s, self.name


def must_move(when: WhenSlowed, own: Member, others: Sequence[Member], checkpoint_age_s: float | None) -> bool:
    """Return whether a job leaves its GPU now.

    Args:
        when: What its owner allows.
        own: The job.
        others: Its co-tenants.
        checkpoint_age_s: Time since its last complete checkpoint, in seconds; None without one.
    """
    slowed = [one for one in (own, *others) if one.is_slowed]
    if when is WhenSlowed.STAY or not others or not slowed:
        return False
    last = min((own, *others), key=lambda one: one.order)
    if last.age_s < TRIAL_S:
        return last is own and when is WhenSlowed.MOVE
    is_fresh = checkpoint_age_s is not None and checkpoint_age_s <= FRESH_S
    return is_fresh and own is min(slowed, key=lambda one: one.order)
