"""What this process remembers for a short while. Losing it costs some calls or some patience, no wrong decision."""

from collections.abc import Iterable

from carpool_core.kube.pods import Pod

from carpool_operator.pods import key_of_pod
from carpool_operator.reconcile import CREATED_AGAIN_AFTER_S, REFUSED_AGAIN_AFTER_S
from carpool_operator.snapshot import Refusal


class Recollection:
    """Pods created and not heard of yet, and refusals, by job. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._created: dict[str, dict[str, float]] = {}
        self._checked: dict[str, str] = {}
        self._made: dict[str, set[str]] = {}
        self._refused: dict[str, tuple[Refusal, float]] = {}
        self._unreserved: dict[str, dict[str, float]] = {}
        self._peaks: dict[str, tuple[object, float]] = {}

    def steady_for(self, key: str, peak: object, now: float) -> float:
        """Remember the peak of a job's attempt; return for how many seconds it has not moved."""
        known, since = self._peaks.get(key, (None, now))
        if known != peak:
            since = now
        self._peaks[key] = (peak, since)
        return now - since

    def created(self, key: str, now: float) -> frozenset[str]:
        """Names of the job's pods that were created a moment ago."""
        known = self._created.get(key, {})
        fresh = {name: at for name, at in known.items() if now - at < CREATED_AGAIN_AFTER_S}
        if fresh:
            self._created[key] = fresh
        else:
            self._created.pop(key, None)
        return frozenset(fresh)

    def is_checked(self, key: str, version: str) -> bool:
        """Whether the API server has checked the template of this version of the job."""
        return self._checked.get(key) == version

    def template_checked(self, key: str, version: str) -> None:
        """Remember that a template was found right."""
        self._checked[key] = version

    def made(self, key: str, recorded: Iterable[str]) -> frozenset[str]:
        """UIDs of pods made for the job that the status does not hold yet."""
        known = self._made.get(key, set())
        known.difference_update(recorded)
        return frozenset(known)

    def refusal(self, key: str, now: float) -> Refusal | None:
        """Why the job's pods were refused a moment ago."""
        refusal, at = self._refused.get(key, (None, 0.0))
        if refusal is not None and now - at >= REFUSED_AGAIN_AFTER_S and not refusal.is_final:
            del self._refused[key]
            return None
        return refusal

    def unreserved(self, key: str, uids: Iterable[str], now: float) -> dict[str, float]:
        """Remember which of a job's pods are bound without a reservation; return for how many seconds that was so."""
        before = self._unreserved.get(key, {})
        since = {uid: before.get(uid, now) for uid in uids}
        if since:
            self._unreserved[key] = since
        else:
            self._unreserved.pop(key, None)
        return {uid: now - at for uid, at in since.items()}

    def pod_created(self, key: str, name: str, uid: str, now: float) -> None:
        """Remember that a pod exists."""
        self._created.setdefault(key, {})[name] = now
        self._made.setdefault(key, set()).add(uid)
        self._refused.pop(key, None)

    def pod_refused(self, key: str, refusal: Refusal, now: float) -> None:
        """Remember that a pod was refused."""
        self._refused[key] = (refusal, now)

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """From now on the cache of pods knows better; and a pod that went may have been what was in the way."""
        pod = new if new is not None else old
        key = None if pod is None else key_of_pod(pod)
        if pod is None or key is None:
            return
        self._created.get(key, {}).pop(pod.metadata.name, None)
        if new is None:
            self._made.get(key, set()).discard(pod.metadata.uid)
            self._refused.pop(key, None)

    def forget(self, key: str) -> None:
        """Forget a job that is gone."""
        held = (self._created, self._checked, self._made, self._refused, self._unreserved, self._peaks)
        for known in held:
            known.pop(key, None)
