"""Conditions of a job, and the one word that is computed from them."""

from datetime import datetime
from typing import Literal

import msgspec
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.resources.job import JobStatus
from carpool_core.resources.meta import Condition
from carpool_core.values import JobState

Truth = Literal["True", "False", "Unknown"]


def find(status: JobStatus, type_: str) -> Condition | None:
    """Return the condition of a type; None where it was never set."""
    return next((c for c in status.conditions if c.type == type_), None)


def holds(status: JobStatus, type_: str) -> bool:
    """Whether a condition is True."""
    found = find(status, type_)
    return found is not None and found.status == "True"


def is_finished(status: JobStatus) -> bool:
    """Whether the job has reached Complete or Failed, from which it never comes back."""
    return holds(status, keys.CONDITION_COMPLETE) or holds(status, keys.CONDITION_FAILED)


def with_condition(status: JobStatus, condition: Condition, now: datetime) -> JobStatus:
    """Set a condition; `lastTransitionTime` stays where `status` of the condition stays, and its place in the list."""
    old = find(status, condition.type)
    kept = old is not None and old.status == condition.status
    since = old.last_transition_time if kept and old is not None else rfc3339(now)
    new = msgspec.structs.replace(condition, last_transition_time=since)
    if old is None:
        return msgspec.structs.replace(status, conditions=[*status.conditions, new])
    return msgspec.structs.replace(
        status, conditions=[new if c.type == condition.type else c for c in status.conditions]
    )


def with_state(status: JobStatus) -> JobStatus:
    """Compute `state` from the conditions."""
    return msgspec.structs.replace(status, state=state_of(status))


def state_of(status: JobStatus) -> JobState:
    """The first that applies, from the end of a job's life to its beginning."""
    table = (
        (keys.CONDITION_COMPLETE, JobState.COMPLETE),
        (keys.CONDITION_FAILED, JobState.FAILED),
        (keys.CONDITION_SUSPENDED, JobState.SUSPENDED),
        (keys.CONDITION_RUNNING, JobState.RUNNING),
        (keys.CONDITION_PLACED, JobState.STARTING),
    )
    for type_, state in table:
        if holds(status, type_):
            return state
    predicted = find(status, keys.CONDITION_PREDICTED)
    if predicted is None or predicted.status == "Unknown":
        return JobState.PREDICTING
    placed = find(status, keys.CONDITION_PLACED)
    reasons = {
        keys.REASON_EXCEEDS_EVERY_GPU: JobState.UNPLACEABLE,
        keys.REASON_NO_SUCH_GPU: JobState.UNPLACEABLE,
        keys.REASON_BACKING_OFF: JobState.BACKING_OFF,
    }
    return JobState.QUEUED if placed is None else reasons.get(placed.reason, JobState.QUEUED)
