"""Expectations: what this process did a moment ago and its caches may not show yet.

Losing them costs some calls or some waiting, never a wrong decision. They are kept by the job's UID, so that a job that
is created again with the same name inherits nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from carpool_core.kube.pods import Pod

from carpool_operator.attempts import Backoff
from carpool_operator.pods import controller_of
from carpool_operator.reconcile import EXPECTATION_TIMEOUT_S
from carpool_operator.snapshot import PodWarning, Refusal

REFUSAL_BACKOFF = Backoff(first_s=15.0, most_s=240.0)
"""Pauses after which a creation is tried again that was refused for a reason outside of the job."""


@dataclass(slots=True)
class _JobMemory:
    """Memory of one job. Times are monotonic seconds."""

    created: dict[str, str] = field(default_factory=dict)
    """UID of each created pod that is not known to be deleted, by name."""
    unseen_since: dict[str, float] = field(default_factory=dict)
    """Time of the creation of each pod that the cache has not shown yet, by name."""
    checked_generation: int = -1
    """Generation of the job whose template is valid."""
    refusal: Refusal | None = None
    refused_at: float = 0.0
    refusals: int = 0
    """Refused creations in a row."""
    warnings: dict[str, PodWarning | None] = field(default_factory=dict)
    """Newest warning about each pod for which it was read, by pod UID."""
    unreserved_since: dict[str, float] = field(default_factory=dict)
    """Time since which each bound pod has had no reservation, by pod UID."""
    unchanged: dict[str, tuple[object, float]] = field(default_factory=dict)
    """Values that are followed, each with the time since which it has not changed, by name."""


class Expectations:
    """Created pods, refusals and durations, by job UID. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._jobs: dict[str, _JobMemory] = {}

    def _of(self, job_uid: str) -> _JobMemory:
        return self._jobs.setdefault(job_uid, _JobMemory())

    def pod_created(self, job_uid: str, name: str, uid: str, now: float) -> None:
        """Record that a pod was created."""
        job = self._of(job_uid)
        job.created[name], job.unseen_since[name] = uid, now
        job.refusal, job.refusals = None, 0

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """Handle a reflector's event: the cache shows the pod now, or it is deleted."""
        pod = new if new is not None else old
        job = None if pod is None else self._jobs.get(controller_of(pod.metadata) or "")
        if pod is None or job is None or job.created.get(pod.metadata.name) != pod.metadata.uid:
            return
        job.unseen_since.pop(pod.metadata.name, None)
        if new is None:
            job.warnings.pop(pod.metadata.uid, None)
            del job.created[pod.metadata.name]

    def created(self, job_uid: str) -> Mapping[str, str]:
        """Return the UIDs of the pods that were created for a job and not deleted since, by name."""
        return dict(self._of(job_uid).created)

    def expected(self, job_uid: str, now: float) -> frozenset[str]:
        """Return the names of the job's pods that were created a moment ago and not seen since."""
        job = self._of(job_uid)
        job.unseen_since = {name: at for name, at in job.unseen_since.items() if now - at < EXPECTATION_TIMEOUT_S}
        return frozenset(job.unseen_since)

    def is_checked(self, job_uid: str, generation: int) -> bool:
        """Return whether the API server has validated the template of this generation of the job."""
        return self._of(job_uid).checked_generation == generation

    def template_checked(self, job_uid: str, generation: int) -> None:
        """Record that a template is valid."""
        self._of(job_uid).checked_generation = generation

    def pod_refused(self, job_uid: str, refusal: Refusal, now: float) -> None:
        """Record that a creation was refused."""
        job = self._of(job_uid)
        job.refusal, job.refused_at, job.refusals = refusal, now, job.refusals + 1

    def retry_creation(self, job_uid: str) -> None:
        """Have a refused creation tried again now, because its cause may be gone."""
        self._of(job_uid).refusal = None

    def refusal(self, job_uid: str, now: float) -> Refusal | None:
        """Return why the job's last creation was refused, and when to try again; None if it may be tried now."""
        job = self._of(job_uid)
        retry_in_s = job.refused_at + REFUSAL_BACKOFF.after(job.refusals) - now
        if job.refusal is not None and retry_in_s <= 0 and not job.refusal.is_final:
            job.refusal = None
        return None if job.refusal is None else replace(job.refusal, retry_in_s=retry_in_s)

    def warning_read(self, job_uid: str, pod_uid: str, warning: PodWarning | None) -> None:
        """Record the newest warning about a pod's volumes; None if there is none."""
        self._of(job_uid).warnings[pod_uid] = warning

    def warnings(self, job_uid: str) -> Mapping[str, PodWarning | None]:
        """Return the warnings that were read, by pod UID."""
        return dict(self._of(job_uid).warnings)

    def unreserved_s(self, job_uid: str, pod_uids: Iterable[str], now: float) -> dict[str, float]:
        """Record which pods are bound without a reservation; return for how many seconds each has been so."""
        job = self._of(job_uid)
        job.unreserved_since = {uid: job.unreserved_since.get(uid, now) for uid in pod_uids}
        return {uid: now - at for uid, at in job.unreserved_since.items()}

    def unchanged_s(self, job_uid: str, name: str, value: object, now: float) -> float:
        """Record a value of a job, such as the peak of its memory; return for how many seconds it has not changed."""
        values = self._of(job_uid).unchanged
        if name not in values or values[name][0] != value:
            values[name] = value, now
        return now - values[name][1]

    def forget(self, job_uid: str) -> None:
        """Forget a deleted job."""
        self._jobs.pop(job_uid, None)
