"""What `spec.runPolicy` asks for at any time: no pods for now, and an end."""

from datetime import datetime, timedelta

from carpool_core import keys
from carpool_core.clock import parse_rfc3339
from carpool_core.resources.job import Attempt

from carpool_operator.decisions.draft import Draft
from carpool_operator.state import attempts, conditions


def suspend(draft: Draft, active: Attempt | None) -> None:
    """Take the job's pods away until it is resumed."""
    message = "runPolicy.suspend is true: the job has no pods until it is false"
    if active is not None:
        draft.status = attempts.with_attempt(
            draft.status, attempts.ended(active, attempts.SUSPENDED, "runPolicy.suspend is true", draft.snapshot.now)
        )
        draft.say("Normal", "Suspended", f"attempt {active.number} was ended by runPolicy.suspend")
    draft.set(start_time=None, placement=[])
    draft.condition(keys.CONDITION_SUSPENDED, "True", "SuspendRequested", message)
    draft.condition(keys.CONDITION_PLACED, "False", "Suspended", message)
    draft.unset_running("Suspended", message)
    draft.end_pods()


def resume(draft: Draft) -> None:
    """Say that the job is no longer suspended, where it was."""
    if conditions.holds(draft.status, keys.CONDITION_SUSPENDED):
        draft.condition(keys.CONDITION_SUSPENDED, "False", "Resumed", "runPolicy.suspend is false")


def deadline(draft: Draft) -> datetime | None:
    """When the job must be complete; None where it has no deadline or has not started."""
    limit_s = draft.job.spec.run_policy.active_deadline_seconds
    if limit_s is None or draft.status.start_time is None:
        return None
    return parse_rfc3339(draft.status.start_time) + timedelta(seconds=limit_s)


def is_over_deadline(draft: Draft) -> bool:
    """Whether the deadline has passed; where it has not, the job is looked at again when it does."""
    until = deadline(draft)
    if until is None:
        return False
    draft.requeue_at(until)
    return until <= draft.snapshot.now
