"""What tests ask of a decision."""

from dataclasses import replace
from typing import Any

import msgspec
from carpool_core.resources.job import GpuTrainingJob, JobStatus
from carpool_core.resources.meta import Condition
from carpool_operator.actions import CreatePod, Decision, DeletePod, RecordEvent, WriteStatus
from carpool_operator.conditions import find
from carpool_operator.reconcile import reconcile
from carpool_operator.snapshot import Snapshot
from operator_fixtures import job, made, prediction


def status_of(decision: Decision, of: GpuTrainingJob) -> JobStatus:
    """The status that stands after a decision."""
    return next((a.status for a in decision.actions if isinstance(a, WriteStatus)), of.status)


def condition(decision: Decision, of: GpuTrainingJob, type_: str) -> Condition:
    found = find(status_of(decision, of), type_)
    assert found is not None, f"no condition {type_}"
    return found


def created(decision: Decision) -> list[str]:
    return [action.name for action in decision.actions if isinstance(action, CreatePod)]


def deleted(decision: Decision) -> list[str]:
    return [action.name for action in decision.actions if isinstance(action, DeletePod)]


def events(decision: Decision) -> list[str]:
    return [action.reason for action in decision.actions if isinstance(action, RecordEvent)]


def predicted_job(attempts: list[dict[str, Any]] | None = None, status: dict[str, Any] | None = None, **spec: Any):
    """A job with a prediction and, by default, its first attempt under way."""
    if attempts is None:
        attempts = [{"number": 1, "startedAt": "2026-01-31T11:58:00Z", "outcome": "Running"}]
    of = job({"attempts": attempts, "prediction": msgspec.to_builtins(prediction()), **(status or {})}, **spec)
    return settled(of)


def settled(of: GpuTrainingJob) -> GpuTrainingJob:
    return msgspec.structs.replace(of, status=msgspec.structs.replace(of.status, observed_generation=2))


def again(before: Snapshot, decision: Decision, **changes: Any) -> Decision:
    """Reconcile once more with the written status."""
    of = msgspec.structs.replace(before.job, status=status_of(decision, before.job))
    return reconcile(replace(before, **{"created_uids": made(changes.get("pods", before.pods)), **changes, "job": of}))
