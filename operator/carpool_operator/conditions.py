"""Conditions of a job, and the state that is computed from them."""

from datetime import datetime
from typing import Literal

import msgspec
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.resources.job import JobStatus
from carpool_core.resources.meta import Condition
from carpool_core.values import JobState

ConditionStatus = Literal["True", "False", "Unknown"]

_STATE_BY_CONDITION = (
    (keys.CONDITION_COMPLETE, JobState.COMPLETE),
    (keys.CONDITION_FAILED, JobState.FAILED),
    (keys.CONDITION_SUSPENDED, JobState.SUSPENDED),
    (keys.CONDITION_RUNNING, JobState.RUNNING),
    (keys.CONDITION_PLACED, JobState.STARTING),
)
"""The first condition that is True decides, from the end of a job's life to its beginning."""

_STATE_BY_PLACED_REASON = {
    keys.REASON_EXCEEDS_EVERY_GPU: JobState.UNPLACEABLE,
    keys.REASON_NO_SUCH_GPU: JobState.UNPLACEABLE,
    keys.REASON_BACKING_OFF: JobState.BACKING_OFF,
}


def find(status: JobStatus, type_: str) -> Condition | None:
    """Return the condition of a type; None if it was never set."""
    return next((c for c in status.conditions if c.type == type_), None)


def is_true(status: JobStatus, type_: str) -> bool:
    """Return whether a condition is True."""
    found = find(status, type_)
    return found is not None and found.status == "True"


def is_finished(status: JobStatus) -> bool:
    """Return whether the job has reached Complete or Failed, which are final."""
    return is_true(status, keys.CONDITION_COMPLETE) or is_true(status, keys.CONDITION_FAILED)


def with_condition(status: JobStatus, condition: Condition, now: datetime) -> JobStatus:
    """Set a condition. `lastTransitionTime` changes only if the condition's `status` does."""
    old = find(status, condition.type)
    since = old.last_transition_time if old is not None and old.status == condition.status else rfc3339(now)
    new = msgspec.structs.replace(condition, last_transition_time=since)
    if old is None:
        return msgspec.structs.replace(status, conditions=[*status.conditions, new])
    return msgspec.structs.replace(
        status, conditions=[new if c.type == condition.type else c for c in status.conditions]
    )


def with_state(status: JobStatus) -> JobStatus:
    """Compute `state` from the conditions."""
    return msgspec.structs.replace(status, state=_state_of(status))


def _state_of(status: JobStatus) -> JobState:
    for type_, state in _STATE_BY_CONDITION:
        if is_true(status, type_):
            return state
    predicted = find(status, keys.CONDITION_PREDICTED)
    if predicted is None or predicted.status == "Unknown":
        return JobState.PREDICTING
    placed = find(status, keys.CONDITION_PLACED)
    return JobState.QUEUED if placed is None else _STATE_BY_PLACED_REASON.get(placed.reason, JobState.QUEUED)
