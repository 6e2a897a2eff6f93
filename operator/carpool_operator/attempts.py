"""Attempts of a job: how one begins and ends, and when the next is due. Pure.

    Creating → Running → Complete | reason of the failure

*Creating* is written before the attempt's first pod is created, the pods' UIDs right after, *Running* once all of its
pods were seen. A pod that is missing while Creating has to be created; its name makes a second creation harmless. A
placed pod that is missing while Running was deleted. One that was never placed is created again.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile
from zlib import crc32

import msgspec
from carpool_core.clock import parse_rfc3339, rfc3339
from carpool_core.resources.job import Attempt, JobSpec, JobStatus, RunPolicy
from carpool_core.values import PodUid

from carpool_operator.outcomes import DISRUPTED, GANG_TIMEOUT, Outcome

CREATING = "Creating"
RUNNING = "Running"
COMPLETE = "Complete"
SUSPENDED = "Suspended"
SPEC_CHANGED = "SpecChanged"

_BY_USER = {SUSPENDED, SPEC_CHANGED}
"""Outcomes that the user caused; the next attempt begins without backoff."""

_MAX_ATTEMPTS = 10
"""Attempts that a status keeps."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff between attempts, as in batch/v1 Job: `first_s * 2^(n-1)` after failure n, at most `most_s`.

    Both are in seconds.
    """

    first_s: float = 10.0
    most_s: float = 360.0

    def after(self, failures: int) -> float:
        """Return the seconds to wait after a number of failures; 0 before the first."""
        if failures <= 0:
            return 0.0
        return float(min(self.first_s * 2.0 ** min(failures - 1, 30), self.most_s))


def latest(status: JobStatus) -> Attempt | None:
    """Return the latest attempt, active or ended; None before the first."""
    return status.attempts[-1] if status.attempts else None


def latest_ended(status: JobStatus) -> Attempt | None:
    """Return the latest attempt that has ended; None without one."""
    return next((attempt for attempt in reversed(status.attempts) if attempt.ended_at is not None), None)


def latest_before(status: JobStatus) -> Attempt | None:
    """Return the attempt before the latest one; None without one."""
    return status.attempts[-2] if len(status.attempts) > 1 else None


def with_pods(attempt: Attempt, uids: Iterable[str], *, is_complete: bool) -> Attempt:
    """Record the UIDs of the attempt's pods. It runs once all of them were seen."""
    recorded = sorted({PodUid(uid) for uid in uids})
    return msgspec.structs.replace(attempt, outcome=RUNNING if is_complete else CREATING, pod_uids=recorded)


def with_only_pod(status: JobStatus, uid: str) -> JobStatus:
    """Record the UID of the latest attempt's only pod."""
    return with_attempt(status, with_pods(status.attempts[-1], [uid], is_complete=True))


def with_peak(attempt: Attempt, peak_mib: int) -> Attempt:
    """Record the largest memory that was measured in an attempt, in MiB; it never falls."""
    return msgspec.structs.replace(attempt, peak_memory_mib=max(attempt.peak_memory_mib, peak_mib))


def with_attempt(status: JobStatus, attempt: Attempt) -> JobStatus:
    """Insert or replace an attempt. The status keeps the latest ten, and pod UIDs of the latest only."""
    others = [
        msgspec.structs.replace(known, pod_uids=[]) for known in status.attempts if known.number != attempt.number
    ]
    kept = sorted([*others, attempt], key=lambda known: known.number)[-_MAX_ATTEMPTS:]
    return msgspec.structs.replace(status, attempts=kept)


def begun(last: Attempt | None, spec: JobSpec, now: datetime) -> Attempt:
    """Begin the attempt after `last`."""
    number = 1 if last is None else last.number + 1
    return Attempt(number=number, started_at=rfc3339(now), outcome=CREATING, spec_digest=spec_digest(spec))


def ended(attempt: Attempt, outcome: str, message: str, now: datetime) -> Attempt:
    """End an attempt."""
    return msgspec.structs.replace(attempt, outcome=outcome, message=message[:4096], ended_at=rfc3339(now))


def spec_digest(spec: JobSpec) -> str:
    """Return the digest of the part of a spec that decides pods and placement.

    It leaves out `runPolicy`, which applies at any time, and the number of steps, which only orders waiting pods.
    """
    training = msgspec.structs.replace(spec.training, steps=None)
    decisive = msgspec.structs.replace(spec, run_policy=RunPolicy(), training=training)
    return "sha256:" + hashlib.sha256(msgspec.json.encode(decisive, order="sorted")).hexdigest()


def charge(status: JobStatus, outcome: Outcome, backoff_limit: int) -> JobStatus | None:
    """Count a restart after a failure; return None if the limit leaves none."""
    if not outcome.charged:
        return status
    if status.restarts >= backoff_limit:
        return None
    return msgspec.structs.replace(status, restarts=status.restarts + 1)


def _jitter(attempt: Attempt) -> float:
    """Return a number from 0 to 1 that differs between attempts, so that two gangs do not block each other again."""
    return crc32(",".join(attempt.pod_uids).encode()) / 2**32


def due(status: JobStatus, backoff: Backoff) -> datetime | None:
    """Return when the next attempt may begin; None if at once.

    The first disruption causes no wait. Failures, repeated disruptions and gang timeouts back off separately.
    """
    last = latest(status)
    if last is None or not last.ended_at or last.outcome in _BY_USER:
        return None
    if last.outcome == GANG_TIMEOUT:
        timeouts = sum(1 for _ in takewhile(lambda attempt: attempt.outcome == GANG_TIMEOUT, reversed(status.attempts)))
        wait_s = backoff.after(timeouts) * (1 + _jitter(last))
    elif last.outcome in DISRUPTED:
        streak = takewhile(lambda attempt: attempt.outcome in DISRUPTED, reversed(status.attempts))
        wait_s = backoff.after(sum(1 for _ in streak) - 1)
    else:
        wait_s = backoff.after(sum(a.outcome not in DISRUPTED | _BY_USER | {GANG_TIMEOUT} for a in status.attempts))
    return parse_rfc3339(last.ended_at) + timedelta(seconds=wait_s) if wait_s else None
