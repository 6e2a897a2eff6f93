"""Attempts: which is the present one, how one begins and ends, when the next is due.

An attempt goes Creating → Running → (Complete | a reason). *Creating* is written before the first of its pods is
created, *Running* once all of them were seen. So a pod that is missing while Creating has to be created (again: its
name makes that harmless), and a pod that is missing while Running was deleted by somebody.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile

import msgspec
from carpool_core.clock import parse_rfc3339, rfc3339
from carpool_core.kube.pods import Pod
from carpool_core.resources.job import Attempt, JobSpec, JobStatus, RunPolicy
from carpool_core.values import PodUid

from carpool_operator.outcomes import TAKEN_AWAY, Outcome

CREATING = "Creating"
RUNNING = "Running"
COMPLETE = "Complete"
SUSPENDED = "Suspended"
SPEC_CHANGED = "SpecChanged"

_AT_THE_USERS_WISH = {SUSPENDED, SPEC_CHANGED}
"""Outcomes after which nothing is waited for."""

_KEPT = 10
"""Attempts that a status remembers."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds between attempts: `first_s * 2^(n-1)` after the n-th failure, at most `most_s` (as in batch/v1 Job)."""

    first_s: float = 10.0
    most_s: float = 360.0

    def after(self, failures: int) -> float:
        """Seconds to wait after so many failures; 0 before the first."""
        if failures <= 0:
            return 0.0
        return float(min(self.first_s * 2.0 ** min(failures - 1, 30), self.most_s))


def present(status: JobStatus) -> Attempt | None:
    """Return the latest attempt; None before the first. Attempts are written before their pods are created."""
    return status.attempts[-1] if status.attempts else None


def with_pods(attempt: Attempt, pods: Iterable[Pod]) -> Attempt:
    """Record which pods are the attempt's own, once all of them exist."""
    uids = sorted(PodUid(pod.metadata.uid) for pod in pods)
    return msgspec.structs.replace(attempt, outcome=RUNNING, pod_uids=uids)


def measured(attempt: Attempt, peak_mib: int) -> Attempt:
    """Record the largest memory that was seen of an attempt; it never falls."""
    return msgspec.structs.replace(attempt, peak_memory_mib=max(attempt.peak_memory_mib, peak_mib))


def with_attempt(status: JobStatus, attempt: Attempt) -> JobStatus:
    """Put an attempt in its place among the attempts, of which the latest ten are kept, and pods of the latest only."""
    others = [
        msgspec.structs.replace(known, pod_uids=[]) for known in status.attempts if known.number != attempt.number
    ]
    kept = sorted([*others, attempt], key=lambda known: known.number)[-_KEPT:]
    return msgspec.structs.replace(status, attempts=kept)


def begun(last: Attempt | None, spec: JobSpec, now: datetime) -> Attempt:
    """Begin the attempt after `last`."""
    number = 1 if last is None else last.number + 1
    return Attempt(number=number, started_at=rfc3339(now), outcome=CREATING, spec_digest=spec_digest(spec))


def spec_digest(spec: JobSpec) -> str:
    """Digest of what pods and their places are decided by.

    That is the spec but for `runPolicy`, which applies at any time, and but for the steps, by which waiting pods are
    sorted: who corrects their number does not want to wait anew, much less that a job ends which has just begun.
    """
    decisive = msgspec.structs.replace(spec, run_policy=RunPolicy())
    if spec.training.steps is not None:
        decisive = msgspec.structs.replace(decisive, training=msgspec.structs.replace(spec.training, steps=None))
    return "sha256:" + hashlib.sha256(msgspec.json.encode(decisive, order="sorted")).hexdigest()


def ended(attempt: Attempt, outcome: str, message: str, now: datetime) -> Attempt:
    """End an attempt."""
    return msgspec.structs.replace(attempt, outcome=outcome, message=message[:4096], ended_at=rfc3339(now))


def charge(status: JobStatus, outcome: Outcome, backoff_limit: int) -> JobStatus | None:
    """Count a restart after a failure; None where the limit leaves none."""
    if not outcome.charged:
        return status
    if status.restarts >= backoff_limit:
        return None
    return msgspec.structs.replace(status, restarts=status.restarts + 1)


def _moment(text: str | None) -> datetime | None:
    return parse_rfc3339(text) if text else None


def due(status: JobStatus, backoff: Backoff) -> datetime | None:
    """When the next attempt may begin after the last has ended; None: at once.

    The first time that pods are taken away nothing is waited for; failures, and being taken away again and again, back
    off each by itself.
    """
    if not status.attempts:
        return None
    last = status.attempts[-1]
    ended_at = _moment(last.ended_at)
    if ended_at is None or last.outcome in _AT_THE_USERS_WISH:
        return None
    if last.outcome in TAKEN_AWAY:
        streak = takewhile(lambda attempt: attempt.outcome in TAKEN_AWAY, reversed(status.attempts))
        wait_s = backoff.after(sum(1 for _ in streak) - 1)
    else:
        wait_s = backoff.after(sum(a.outcome not in TAKEN_AWAY | _AT_THE_USERS_WISH for a in status.attempts))
    return ended_at + timedelta(seconds=wait_s) if wait_s else None
