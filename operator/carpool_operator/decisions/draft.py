"""The decision while it is being made: a status and the actions that follow its writing."""

from datetime import datetime
from typing import Any, Literal

import msgspec
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.kube.pods import Pod
from carpool_core.resources.job import Attempt, JobStatus
from carpool_core.resources.meta import Condition
from carpool_core.resources.prediction import Prediction

from carpool_operator.decisions.actions import (
    Action,
    CreatePod,
    CreateService,
    Decision,
    DeletePod,
    HoldStatus,
    RecordEvent,
    WriteStatus,
)
from carpool_operator.decisions.unseen import end_unseen
from carpool_operator.state import attempts, conditions
from carpool_operator.state.conditions import Truth
from carpool_operator.state.snapshot import Snapshot
from carpool_operator.state.summary import summarize

_MESSAGE_CHARS = 4096


class Draft:
    """Collects what a reconciliation decides. Lives as long as one call of `reconcile`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.job = snapshot.job
        self.status: JobStatus = snapshot.job.status
        self.told: JobStatus = snapshot.job.status if snapshot.told is None else snapshot.told
        """The status that others see."""
        self._has_time = False
        self._first: list[Action] = []
        self._pod_actions: list[Action] = []
        self._after: list[Action] = []
        self._requeue_after_s: float | None = None

    def set(self, **fields: Any) -> None:
        """Change fields of the status."""
        self.status = msgspec.structs.replace(self.status, **fields)

    def condition(self, type_: str, status: Truth, reason: str, message: str = "") -> None:
        """Set a condition."""
        condition = Condition(
            type=type_,
            status=status,
            reason=reason,
            message=message[:_MESSAGE_CHARS],
            observed_generation=self.job.metadata.generation,
        )
        self.status = conditions.with_condition(self.status, condition, self.snapshot.now)

    def unset_running(self, reason: str, message: str) -> None:
        """Set Running to False, where it was ever set."""
        if conditions.find(self.status, keys.CONDITION_RUNNING) is not None:
            self.condition(keys.CONDITION_RUNNING, "False", reason, message)

    def say(self, type_: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Record an event once the status is written."""
        self._after.append(RecordEvent(type_, reason, message))

    @property
    def carried(self) -> Prediction | None:
        """What pods tell the scheduler of their job, because its status does not yet."""
        return self.status.prediction if self.snapshot.seals and self.told.prediction is None else None

    def leave_time(self) -> None:
        """Let the status be written by a later look, which will have more to tell, if the scheduler can go without."""
        self._has_time = self.snapshot.seals and self.told.prediction in (None, self.status.prediction)

    def first(self, action: Action) -> None:
        """Do something before anything else; where it fails, nothing else happens."""
        self._first.append(action)

    def then(self, action: Action) -> None:
        """Do something after the status is written."""
        self._after.append(action)

    def create(self, action: CreatePod | CreateService) -> None:
        """Create a pod, or what it needs, once the status is written."""
        self._pod_actions.append(action)

    def delete_pod(self, pod: Pod) -> None:
        """Delete a pod once the status is written; nothing to do where it is being deleted already."""
        action = DeletePod(pod.metadata.name, pod.metadata.uid)
        if pod.metadata.deletion_timestamp is None and action not in self._pod_actions:
            self._pod_actions.append(action)

    def delete_unfinished(self) -> None:
        """Delete every pod of the job that has not finished; finished ones keep their logs."""
        for pod in self.snapshot.pods:
            if not pod.is_finished:
                self.delete_pod(pod)

    def end_pods(self) -> None:
        """Delete every pod of the job that has not finished, and what of the attempt the cache does not show."""
        self.delete_unfinished()
        unseen = end_unseen(self.job, attempts.present(self.status), self.snapshot.pods, is_awaited=False)
        if unseen is not None:
            self._pod_actions.append(unseen)

    def requeue_after(self, seconds: float) -> None:
        """Look again after so many seconds at the latest."""
        known = self._requeue_after_s
        self._requeue_after_s = seconds if known is None else min(known, seconds)

    def requeue_at(self, moment: datetime) -> None:
        """Look again at that time at the latest."""
        self.requeue_after(max(0.0, (moment - self.snapshot.now).total_seconds()))

    def finish(self, type_: str, reason: str, message: str, attempt: Attempt | None) -> None:
        """Bring the job to its end, Complete or Failed."""
        now = self.snapshot.now
        if attempt is not None and attempt.ended_at is None:
            self.status = attempts.with_attempt(self.status, attempts.ended(attempt, reason, message, now))
        self.condition(type_, "True", reason, message)
        self.unset_running(reason, message)
        if conditions.find(self.status, keys.CONDITION_PLACED) and not conditions.holds(
            self.status, keys.CONDITION_PLACED
        ):
            self.condition(keys.CONDITION_PLACED, "False", reason, "the job ended without every worker being placed")
        self.set(completion_time=rfc3339(now))
        self.end_pods()
        self.say("Normal" if type_ == keys.CONDITION_COMPLETE else "Warning", type_, message)

    def fail(self, reason: str, message: str, attempt: Attempt | None = None) -> None:
        """Bring the job to its end without success."""
        self.finish(keys.CONDITION_FAILED, reason, message, attempt)

    def decision(self, *, is_current: bool = True) -> Decision:
        """Return what was decided; nothing is written where nothing changed.

        Args:
            is_current: Whether the status speaks of the present generation; not while its prediction is computed, which
                for most jobs takes a millisecond that is not worth a write.
        """
        if is_current:
            self.set(observed_generation=self.job.metadata.generation)
        self.set(summary=summarize(self.status))
        status = conditions.with_state(self.status)
        write: list[Action] = []
        if status != self.told:
            write = [HoldStatus(status) if self._has_time else WriteStatus(status)]
        return Decision((*self._first, *write, *self._pod_actions, *self._after), self._requeue_after_s, self._has_time)
