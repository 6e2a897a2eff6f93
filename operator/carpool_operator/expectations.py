"""Expectations: what this process did a moment ago and its caches may not show yet.

Losing them costs some calls or some waiting, never a wrong decision.
"""

from collections.abc import Iterable

from carpool_core.kube.pods import Pod

from carpool_operator.pods import key_of_pod
from carpool_operator.reconcile import EXPECTATION_TIMEOUT_S, REFUSAL_TIMEOUT_S
from carpool_operator.snapshot import Refusal


class Expectations:
    """Created pods, refusals and durations, by job key. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._created_at: dict[str, dict[str, float]] = {}
        self._created_uids: dict[str, set[str]] = {}
        self._checked: dict[str, str] = {}
        self._refused: dict[str, tuple[Refusal, float]] = {}
        self._unreserved_since: dict[str, dict[str, float]] = {}
        self._peaks: dict[str, tuple[object, float]] = {}

    def pod_created(self, key: str, name: str, uid: str, now: float) -> None:
        """Record that a pod was created or adopted."""
        self._created_at.setdefault(key, {})[name] = now
        self._created_uids.setdefault(key, set()).add(uid)
        self._refused.pop(key, None)

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """Handle a reflector's event: the cache shows the pod now; a deleted pod may have caused the refusal."""
        pod = new if new is not None else old
        key = None if pod is None else key_of_pod(pod)
        if pod is None or key is None:
            return
        self._created_at.get(key, {}).pop(pod.metadata.name, None)
        if new is None:
            self._created_uids.get(key, set()).discard(pod.metadata.uid)
            self._refused.pop(key, None)

    def expected(self, key: str, now: float) -> frozenset[str]:
        """Return the names of the job's pods that were created a moment ago and not seen since."""
        known = self._created_at.get(key, {})
        fresh = {name: at for name, at in known.items() if now - at < EXPECTATION_TIMEOUT_S}
        if fresh:
            self._created_at[key] = fresh
        else:
            self._created_at.pop(key, None)
        return frozenset(fresh)

    def created_uids(self, key: str, recorded: Iterable[str]) -> frozenset[str]:
        """Return the UIDs of created pods that the status does not hold yet."""
        known = self._created_uids.get(key, set())
        known.difference_update(recorded)
        return frozenset(known)

    def is_checked(self, key: str, generation: str) -> bool:
        """Return whether the API server has validated the template of this generation of the job."""
        return self._checked.get(key) == generation

    def template_checked(self, key: str, generation: str) -> None:
        """Record that a template is valid."""
        self._checked[key] = generation

    def pod_refused(self, key: str, refusal: Refusal, now: float) -> None:
        """Record that a creation was refused."""
        self._refused[key] = (refusal, now)

    def refusal(self, key: str, now: float) -> Refusal | None:
        """Return why the job's last creation was refused; None if it may be tried (again)."""
        refusal, at = self._refused.get(key, (None, 0.0))
        if refusal is not None and now - at >= REFUSAL_TIMEOUT_S and not refusal.is_final:
            del self._refused[key]
            return None
        return refusal

    def unreserved_s(self, key: str, uids: Iterable[str], now: float) -> dict[str, float]:
        """Record which pods are bound without a reservation; return for how many seconds each has been so."""
        before = self._unreserved_since.get(key, {})
        since = {uid: before.get(uid, now) for uid in uids}
        if since:
            self._unreserved_since[key] = since
        else:
            self._unreserved_since.pop(key, None)
        return {uid: now - at for uid, at in since.items()}

    def peak_stable_s(self, key: str, peak: object, now: float) -> float:
        """Record the peak memory of a job's attempt; return for how many seconds it has not changed."""
        known, since = self._peaks.get(key, (None, now))
        if known != peak:
            since = now
        self._peaks[key] = (peak, since)
        return now - since

    def forget(self, key: str) -> None:
        """Forget a deleted job."""
        for known in (
            self._created_at,
            self._created_uids,
            self._checked,
            self._refused,
            self._unreserved_since,
            self._peaks,
        ):
            known.pop(key, None)
