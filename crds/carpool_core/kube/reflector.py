"""Local copy of all objects of a kind, kept up to date by list and watch."""

import asyncio
import random
from collections.abc import Awaitable, Callable, ValuesView
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog

from carpool_core.clock import Clock
from carpool_core.kube.api import KubeApi, ResourceKind, Selector, WatchEvent
from carpool_core.kube.errors import Gone, KubeError, Retryable, Unreachable

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 30.0
_SHORT_WATCH_S = 1.0
"""A watch that ends sooner than this without an event counts as a failure."""


class Named(Protocol):
    """`metadata` of an object, as the reflector reads it."""

    @property
    def name(self) -> str:
        """Name of the object."""
        ...

    @property
    def namespace(self) -> str:
        """Namespace; empty for cluster-scoped objects."""
        ...

    @property
    def uid(self) -> str:
        """UID, which differs for an object that is created again."""
        ...


class HasMetadata(Protocol):
    """A msgspec Struct with `metadata`."""

    @property
    def metadata(self) -> Named:
        """Metadata of the object."""
        ...


T = TypeVar("T", bound=HasMetadata)
G = TypeVar("G")
K = TypeVar("K")
V = TypeVar("V")


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class _MetaOnly(msgspec.Struct, frozen=True):
    """Metadata of any object, also of one that does not fit its type."""

    metadata: _Meta = _Meta()


def key_of(metadata: Named) -> str:
    """Return `namespace/name`, or `name` for cluster-scoped objects."""
    return f"{metadata.namespace}/{metadata.name}" if metadata.namespace else metadata.name


class Store(Generic[T]):
    """The local copy, which only its reflector writes."""

    def __init__(self) -> None:
        self.items: dict[str, T] = {}
        """Objects by `namespace/name`, or by `name` for cluster-scoped kinds."""
        self.synced = False
        """Whether the first list is complete."""
        self.contact_at: float | None = None
        """Monotonic time of the server's last answer or event."""

    def get(self, key: str) -> T | None:
        """Return the object `namespace/name` (or `name`); None if it does not exist."""
        return self.items.get(key)

    def values(self) -> ValuesView[T]:
        """Return all objects."""
        return self.items.values()

    def age(self, now_monotonic: float) -> float:
        """Return seconds since the server's last answer or event; infinite before the first."""
        return float("inf") if self.contact_at is None else now_monotonic - self.contact_at


class Reflector(Generic[T]):
    """Lists, watches, and lists again when the server no longer has the watch's resourceVersion.

    Args:
        on_change: Called with (old, new) for each change, also for those that a list shows. Old None means added, new
            None deleted; an object that was created again between two lists is deleted and added. An exception from it
            ends `run()`.
        on_unreadable: Called with (key, reason) for an object that does not fit `type_`, whose last good state stays in
            the store. Called with (key, None) when it fits again or is deleted.
        share: Returns the state to store, equal to `new`, with parts of `old` to save memory.
        jitter: Random number from 0 to 1 that spreads the tries.
    """

    def __init__(
        self,
        api: KubeApi,
        kind: ResourceKind,
        type_: type[T],
        *,
        selector: Selector | None = None,
        clock: Clock,
        on_change: Callable[[T | None, T | None], None] | None = None,
        on_unreadable: Callable[[str, str | None], None] | None = None,
        share: Callable[[T, T], T] | None = None,
        store: Store[T] | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.kind = kind
        self._api, self._selector, self._clock = api, selector or Selector(), clock
        self._decoder = msgspec.json.Decoder(type_)
        self._on_change, self._on_unreadable, self._share = on_change, on_unreadable, share
        self._unreadable: set[str] = set()
        self._sleep, self._jitter = sleep, jitter
        self._version = ""
        self._failures, self._expiries = 0, 0
        self._listed = asyncio.Event()
        self._log = structlog.get_logger().bind(kind=kind.kind)
        self.store: Store[T] = store if store is not None else Store()

    async def wait_synced(self) -> None:
        """Wait until the first list is complete."""
        await self._listed.wait()

    async def run(self) -> None:
        """Keep the store up to date. Raises what `on_change` raises, and errors other than `KubeError`."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except Gone:
                # 410: changes were lost; a new list shows the present state of each object.
                self._version = ""
                self._expiries += 1
                self._log.info("watch expired, listing again")
                if self._expiries > 1:
                    # A server that always answers 410 must not be listed in a tight loop.
                    await self._sleep(self._delay(self._expiries))
            except KubeError as error:
                await self._back_off(error)

    async def _list(self) -> None:
        seen: dict[str, T | None] = {}
        token = ""
        while True:
            page = await self._api.list_page(self.kind, self._selector, continue_token=token)
            self._note_contact()
            for raw in page.items:
                key, item, _ = self._decode(raw)
                if key:
                    seen[key] = item
            token = page.continue_token
            if not token:
                break
        for key in [key for key in (*self.store.items, *self._unreadable) if key not in seen]:
            self._remove(key)
        for key, item in seen.items():
            if item is not None:
                self._put(key, item)
        self._version = page.resource_version
        self.store.synced = True
        self._listed.set()

    async def _watch(self) -> None:
        started_at, is_silent = self._clock.monotonic(), True
        async for event in self._api.watch(self.kind, self._selector, self._version):
            self._failures, self._expiries, is_silent = 0, 0, False
            self._note_contact()
            self._apply(event)
        if is_silent and self._clock.monotonic() - started_at < _SHORT_WATCH_S:
            raise Unreachable("the API server ended the watch at once without an event")

    def _apply(self, event: WatchEvent) -> None:
        if event.type == "BOOKMARK":
            self._version = msgspec.json.decode(event.object, type=_MetaOnly).metadata.resource_version
            return
        key, item, version = self._decode(event.object)
        if event.type == "DELETED":
            self._remove(key)
        elif item is not None:
            self._put(key, item)
        self._version = version or self._version

    def _decode(self, raw: msgspec.Raw) -> tuple[str, T | None, str]:
        """Return key, object and resourceVersion; the object is None if it does not fit its type."""
        try:
            meta = msgspec.json.decode(raw, type=_MetaOnly).metadata
        except msgspec.DecodeError as error:
            self._log.error("unreadable object skipped", error=str(error))
            return "", None, ""
        key = key_of(meta)
        try:
            return key, self._decoder.decode(raw), meta.resource_version
        except msgspec.DecodeError as error:
            self._log.error("malformed object skipped", object=key, error=str(error))
            self._unreadable.add(key)
            if self._on_unreadable is not None:
                self._on_unreadable(key, str(error))
            return key, None, meta.resource_version

    def _note_readable(self, key: str) -> None:
        if key in self._unreadable:
            self._unreadable.discard(key)
            if self._on_unreadable is not None:
                self._on_unreadable(key, None)

    def _put(self, key: str, new: T) -> None:
        self._note_readable(key)
        old = self.store.items.get(key)
        if old is not None and old.metadata.uid != new.metadata.uid:
            self._remove(key)
            old = None
        if old is not None and self._share is not None:
            new = self._share(old, new)
        self.store.items[key] = new
        if self._on_change is not None and old != new:
            self._on_change(old, new)

    def _remove(self, key: str) -> None:
        self._note_readable(key)
        old = self.store.items.pop(key, None)
        if self._on_change is not None and old is not None:
            self._on_change(old, None)

    def _note_contact(self) -> None:
        self.store.contact_at = self._clock.monotonic()

    async def _back_off(self, error: KubeError) -> None:
        self._failures += 1
        delay = self._delay(self._failures)
        log = self._log.warning if isinstance(error, Retryable) else self._log.error
        log("watch failed", error=str(error), retry_in_s=round(delay, 2))
        await self._sleep(delay)

    def _delay(self, failures: int) -> float:
        """Return seconds until the next try: doubled with each failure, then spread over the upper half."""
        longest = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(failures - 1, 16))
        return longest * (0.5 + 0.5 * self._jitter())


def put_in_group(index: dict[G, dict[K, V]], group: G, key: K, value: V | None) -> None:
    """Set a value in a group of an index; remove it if it is None, and empty groups with it."""
    if value is not None:
        index.setdefault(group, {})[key] = value
    elif group in index:
        index[group].pop(key, None)
        if not index[group]:
            del index[group]
