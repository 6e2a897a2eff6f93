"""How a job stands, told to people: the condition that says most of it, and what to do about it."""

from collections.abc import Sequence

from carpool_core.keys import (
    CONDITION_COMPLETE,
    CONDITION_FAILED,
    CONDITION_PLACED,
    CONDITION_PREDICTED,
    CONDITION_RUNNING,
    CONDITION_SUSPENDED,
    REASONS_PODS_REFUSED,
)
from carpool_core.resources.meta import Condition


def standing(state: str, conditions: Sequence[Condition]) -> list[str]:
    """Say how a job stands: the condition that says most of it, and what to do about it."""
    known = {condition.type: condition for condition in conditions}
    ended = [known[t] for t in (CONDITION_FAILED, CONDITION_COMPLETE, CONDITION_SUSPENDED) if t in known]
    telling = next((c for c in ended if c.status == "True"), None)
    placed, running = known.get(CONDITION_PLACED), known.get(CONDITION_RUNNING)
    if telling is None:
        telling = running if placed is None or (placed.status == "True" and running is not None) else placed
    telling = telling or known.get(CONDITION_PREDICTED)
    if telling is None:
        return []
    told = [f"{state or 'its state'}: {telling.type} is {telling.status} ({telling.reason}) {telling.message}".rstrip()]
    if telling.reason == "SchedulerError" or "SchedulerError" in telling.message:
        told.append(
            "kube-scheduler got no answer from Carpool's extender: the job waits until that runs again; have an "
            "administrator look at the pods of the scheduler and at their logs"
        )
    if telling.reason in REASONS_PODS_REFUSED:
        told.append("not all of its pods can be created: what follows is for once that is mended")
    return told
