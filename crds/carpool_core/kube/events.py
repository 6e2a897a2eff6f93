"""Kubernetes Events: what happened to an object, for people."""

import hashlib
from collections import OrderedDict
from typing import Any, Literal

import msgspec
import structlog

from carpool_core.clock import Clock
from carpool_core.kube.api import EVENTS, KubeApi, ResourceKind
from carpool_core.kube.errors import Conflict, KubeError, NotFound

EVENTS_PER_SECOND, BURST = 2.0, 100.0
"""Normal events that a process may write: so many a second in the long run, so many at once. The kubelet limits its own
likewise. They tell what conditions tell as well, and a thousand jobs that start together would make three thousand."""
_REMEMBERED = 4096
_LONGEST_MESSAGE = 1024


class _Counted(msgspec.Struct, frozen=True):
    count: int = 1


class EventRecorder:
    """Records events. Those of one object with one reason are one Event with a count, also across restarts.

    Normal events beyond `A_SECOND` and `BURST` are left out, and the log tells when that begins and how many they were;
    warnings never are.
    """

    def __init__(self, api: KubeApi, clock: Clock, component: str) -> None:
        self._api, self._clock, self._component = api, clock, component
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._budget, self._filled_at = BURST, clock.monotonic()
        self._left_out = 0
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
        """Record that something happened to an object. A failure to record is logged, never raised.

        Args:
            kind: Kind of the object.
            namespace: Its namespace; empty for cluster-scoped objects, whose events stand in `default`.
            name: Its name.
            uid: Its UID.
            type: Warning where somebody should act.
            reason: One CamelCase word.
            message: A sentence that ends in numbers; cut at 1,024 characters.
        """
        if type == "Normal" and not self._is_affordable():
            return
        now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        fields = {"type": type, "message": _cut(message), "lastTimestamp": now}
        about = {
            "apiVersion": f"{kind.group}/{kind.version}".lstrip("/"), "kind": kind.kind, "name": name, "uid": uid,
        } | ({"namespace": namespace} if namespace else {})  # fmt: skip
        body = fields | {
            "metadata": {"name": self._name_of(name, uid, reason)},
            "involvedObject": about,
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

    def _is_affordable(self) -> bool:
        """Take one event out of the budget, where there is one left; tell of a flood's begin and end."""
        now = self._clock.monotonic()
        self._budget = min(BURST, self._budget + EVENTS_PER_SECOND * (now - self._filled_at))
        self._filled_at = now
        if self._budget < 1:
            if not self._left_out:
                self._log.info("events are being left out", most_a_second=EVENTS_PER_SECOND, most_at_once=BURST)
            self._left_out += 1
            return False
        # While a flood lasts, one event in a while is affordable; it is over when the budget has recovered.
        if self._left_out and self._budget >= BURST / 2:
            self._log.info("events left out", number=self._left_out, most_a_second=EVENTS_PER_SECOND)
            self._left_out = 0
        self._budget -= 1
        return True

    async def _write(self, namespace: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        key = (namespace, name)
        if key not in self._counts:
            self._remember(key, 1)
            try:
                await self._api.create(EVENTS, body, namespace=namespace)
                return
            except Conflict:
                known = await self._api.get(EVENTS, name, _Counted, namespace=namespace)
                self._remember(key, max(self._counts.get(key, 1), known.count))
            except KubeError:
                self._counts.pop(key, None)
                raise
        self._remember(key, self._counts.get(key, 1) + 1)
        try:
            await self._api.patch(EVENTS, name, fields | {"count": self._counts[key]}, namespace=namespace)
        except NotFound:
            # The API server drops events after an hour; what happens now starts a new one.
            self._remember(key, 1)
            await self._api.create(EVENTS, body, namespace=namespace)

    def _remember(self, key: tuple[str, str], count: int) -> None:
        self._counts[key] = count
        self._counts.move_to_end(key)
        while len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)

    def _name_of(self, name: str, uid: str, reason: str) -> str:
        digest = hashlib.sha256(f"{uid}/{reason}/{self._component}".encode()).hexdigest()[:16]
        return f"{name[:230].rstrip('.-')}.{digest}"


def _cut(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[: _LONGEST_MESSAGE - 1]}…"
