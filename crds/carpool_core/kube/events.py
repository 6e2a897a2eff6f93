"""Kubernetes Events."""

import hashlib
from typing import Any, Literal

import msgspec
import structlog
from cachetools import LRUCache

from carpool_core.clock import Clock
from carpool_core.kube.api import EVENTS, KubeApi, ResourceKind
from carpool_core.kube.errors import Conflict, KubeError, NotFound

EVENTS_PER_SECOND, BURST = 2.0, 100.0
"""Token bucket of a process's Normal events, as in the kubelet. A thousand jobs that start at once would otherwise
write three thousand events, which repeat the conditions."""
_CACHED_COUNTS = 4096
_MAX_MESSAGE_LENGTH = 1024


class _Counted(msgspec.Struct, frozen=True):
    count: int = 1


class EventRecorder:
    """Records events. Events of one object with one reason are one Event with a count, also across restarts.

    Normal events beyond `EVENTS_PER_SECOND` and `BURST` are dropped, and the log counts them. Warnings never are.
    """

    def __init__(self, api: KubeApi, clock: Clock, component: str) -> None:
        self._api, self._clock, self._component = api, clock, component
        self._counts: LRUCache[tuple[str, str], int] = LRUCache(_CACHED_COUNTS)
        self._tokens, self._filled_at = BURST, clock.monotonic()
        self._dropped = 0
        self._log = structlog.get_logger()

    async def record(
        self,
        *,
        kind: ResourceKind,
        namespace: str,
        name: str,
        uid: str,
        type: Literal["Normal", "Warning"],  # noqa: A002  # Kubernetes' own word
        reason: str,
        message: str,
    ) -> None:
        """Record an event of an object. A failure to record is logged, never raised.

        The message is cut at 1,024 characters. Events of cluster-scoped objects, which have no namespace, go to
        `default`.
        """
        if type == "Normal" and not self._take_token():
            return
        now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        text = message if len(message) <= _MAX_MESSAGE_LENGTH else f"{message[: _MAX_MESSAGE_LENGTH - 1]}…"
        fields = {"type": type, "message": text, "lastTimestamp": now}
        involved = {"apiVersion": kind.api_version, "kind": kind.kind, "name": name, "uid": uid}
        body = fields | {
            "metadata": {"name": self._event_name(name, uid, reason)},
            "involvedObject": involved | ({"namespace": namespace} if namespace else {}),
            "reason": reason,
            "firstTimestamp": now,
            "count": 1,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._component,
        }
        try:
            await self._write(namespace or "default", body, fields)
        except KubeError as error:
            self._log.warning("event not recorded", reason=reason, object=f"{namespace}/{name}", error=str(error))

    def _take_token(self) -> bool:
        """Take a token from the bucket, if it has one. Log the start and the end of a flood."""
        now = self._clock.monotonic()
        self._tokens = min(BURST, self._tokens + EVENTS_PER_SECOND * (now - self._filled_at))
        self._filled_at = now
        if self._tokens < 1:
            if not self._dropped:
                self._log.info("dropping events", events_per_second=EVENTS_PER_SECOND, burst=BURST)
            self._dropped += 1
            return False
        # During a flood single tokens come back; the flood is over once the bucket is half full.
        if self._dropped and self._tokens >= BURST / 2:
            self._log.info("events dropped", number=self._dropped, events_per_second=EVENTS_PER_SECOND)
            self._dropped = 0
        self._tokens -= 1
        return True

    async def _write(self, namespace: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        key = (namespace, name)
        if key not in self._counts:
            self._counts[key] = 1
            try:
                await self._api.create(EVENTS, body, namespace=namespace)
                return
            except Conflict:
                known = await self._api.get(EVENTS, name, _Counted, namespace=namespace)
                self._counts[key] = max(self._counts.get(key, 1), known.count)
            except KubeError:
                self._counts.pop(key, None)
                raise
        self._counts[key] = count = self._counts.get(key, 1) + 1
        try:
            await self._api.patch(EVENTS, name, fields | {"count": count}, namespace=namespace)
        except NotFound:
            # The API server deletes events after an hour.
            self._counts[key] = 1
            await self._api.create(EVENTS, body, namespace=namespace)

    def _event_name(self, name: str, uid: str, reason: str) -> str:
        digest = hashlib.sha256(f"{uid}/{reason}/{self._component}".encode()).hexdigest()[:16]
        return f"{name[:230].rstrip('.-')}.{digest}"
