"""An API server in memory, with the real one's semantics as far as Carpool depends on them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from carpool_core.clock import Clock
from carpool_core.kube.api import KubeApi, Page, ResourceKind, Selector, WatchEvent
from carpool_core.kube.errors import Gone, Invalid, KubeError, NotFound
from carpool_core.kube.wire import call_name
from carpool_core.testing import patches
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.selectors import selects
from carpool_core.testing.semantics import WITH_STATUS, Object, check_preconditions, conflict, limited, metadata_of
from carpool_core.testing.store import Store, Watch, tell

T = TypeVar("T")
Verb = Literal["get", "list", "watch", "create", "check", "patch", "replace", "delete"]
"""`check` is a `create` that is a dry run."""


class Call(NamedTuple):
    """One call that was made, for tests that count writes."""

    verb: Verb
    plural: str
    name: str
    subresource: str


@dataclass
class _Failure:
    verb: Verb
    plural: str
    error: KubeError
    after: bool
    subresource: str | None


class FakeKube(KubeApi):
    """Objects in memory. Every call gives way to other tasks once and then acts atomically, as a real server does."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._store = Store(clock or FakeClock())
        self._pages: dict[str, list[Object]] = {}
        self._failures: list[_Failure] = []
        self._compacted = 0
        self._tokens = itertools.count(1)
        self.calls: list[Call] = []
        """Every call so far, in order."""

    # What tests do to the server

    def seed(self, kind: ResourceKind, item: Mapping[str, Any] | msgspec.Struct) -> Object:
        """Put an object there, status included, as if it had been created and reported on before."""
        body: Object = deepcopy(msgspec.to_builtins(item))
        metadata = body.setdefault("metadata", {})
        if kind.namespaced:
            metadata.setdefault("namespace", "default")
        old = self._store.objects.get(self._store.key(kind, metadata.get("namespace", ""), metadata["name"]))
        return deepcopy(self._store.put(kind, old, self._store.completed(kind, body)))

    def dump(self, kind: ResourceKind, name: str, namespace: str = "") -> Object:
        """Return a copy of an object as it is stored. Raises `NotFound`."""
        return deepcopy(self._store.find(kind, namespace, name))

    def dump_all(self, kind: ResourceKind) -> list[Object]:
        """Return copies of all objects of a kind, by namespace and name."""
        return [deepcopy(item) for key, item in sorted(self._store.objects.items()) if key[0] == kind.plural]

    def fail_next(
        self, verb: Verb, kind: ResourceKind, error: KubeError, *, after: bool = False, subresource: str | None = None
    ) -> None:
        """Make the next such call raise `error`; with `after`, once the write has happened: an answer that got lost."""
        self._failures.append(_Failure(verb, kind.plural, error, after, subresource))

    def lose(self, kind: ResourceKind, name: str, namespace: str = "") -> None:
        """Remove an object without telling anybody, as if its deletion had been forgotten before anybody watched."""
        del self._store.objects[self._store.key(kind, namespace, name)]

    def compact(self) -> None:
        """Forget all history: open watches, continue tokens and older resourceVersions answer `Gone`."""
        self._compacted = self._store.version = self._store.version + 1
        self._store.changes.clear()
        self._pages.clear()
        self.end_watches(Gone("too old resource version", status=410, reason="Expired"))

    def end_watches(self, error: KubeError | None = None) -> None:
        """End every open watch, as the server does after its timeout, or with an error."""
        for watch in self._store.watches:
            watch.queue.put_nowait(error)

    def bookmark(self) -> None:
        """Send every open watch a bookmark with the latest resourceVersion."""
        raw = msgspec.Raw(msgspec.json.encode({"metadata": {"resourceVersion": str(self._store.version)}}))
        for watch in self._store.watches:
            watch.queue.put_nowait(WatchEvent("BOOKMARK", raw))

    @property
    def open_watches(self) -> int:
        """Number of watches that are being followed."""
        return len(self._store.watches)

    # What clients do

    async def get(self, kind: ResourceKind, name: str, type_: type[T], *, namespace: str = "") -> T:
        """Read one object."""
        await self._begin("get", kind, name)
        body = msgspec.json.encode(self._store.find(kind, namespace, name))
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.ValidationError as error:
            raise Invalid(f"{call_name('GET', kind, namespace, name)}: unexpected object: {error}") from error

    async def list_page(
        self, kind: ResourceKind, selector: Selector, *, limit: int = 500, continue_token: str = ""
    ) -> Page:
        """Read one page; a token stands for the rest of the snapshot that its list began with."""
        await self._begin("list", kind, "")
        if continue_token:
            if continue_token not in self._pages:
                raise Gone("The provided continue parameter is too old", status=410, reason="Expired")
            version, rest = continue_token.partition("/")[0], self._pages.pop(continue_token)
        else:
            version = str(self._store.version)
            rest = [item for item in self.dump_all(kind) if selects(selector, item)]
        items = [msgspec.Raw(msgspec.json.encode(item)) for item in rest[:limit]]
        token = ""
        if rest[limit:]:
            token = f"{version}/{next(self._tokens)}"
            self._pages[token] = rest[limit:]
        return Page(items, version, token)

    async def watch(self, kind: ResourceKind, selector: Selector, resource_version: str) -> AsyncIterator[WatchEvent]:
        """Replay what happened after `resource_version`, then follow."""
        await self._begin("watch", kind, "")
        since = int(resource_version or self._store.version)
        if since < self._compacted:
            raise Gone(f"too old resource version: {since} ({self._compacted})", status=410, reason="Expired")
        watch = Watch(kind.plural, selector)
        for change in self._store.changes:
            if change.version > since:
                tell(watch, change)
        self._store.watches.append(watch)
        try:
            while (event := await watch.queue.get()) is not None:
                if isinstance(event, KubeError):
                    raise event
                yield event
        finally:
            self._store.watches.remove(watch)

    async def create(
        self,
        kind: ResourceKind,
        body: Mapping[str, Any] | msgspec.Struct,
        *,
        namespace: str = "",
        name: str = "",
        subresource: str = "",
        is_dry_run: bool = False,
        wants_object: bool = True,
    ) -> Object:
        """Create an object, or bind a pod."""
        failure = await self._begin("check" if is_dry_run else "create", kind, name, subresource)
        content: Object = deepcopy(msgspec.to_builtins(body))
        if subresource == "binding":
            result = self._store.bind(kind, name, namespace, content)
        elif subresource:
            raise NotFound(f"the server could not find the requested resource {kind.plural}/{subresource}", status=404)
        else:
            result = self._store.create(kind, namespace, content, is_dry_run=is_dry_run)
        return self._end(result if wants_object else metadata_of(result), failure)

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        patch: Mapping[str, Any] | list[Mapping[str, Any]],
        *,
        namespace: str = "",
        subresource: str = "",
        wants_object: bool = True,
    ) -> Object:
        """Patch an object, or its status alone."""
        failure = await self._begin("patch", kind, name, subresource)
        if subresource not in ("", "status") or (subresource and kind.plural not in WITH_STATUS):
            raise NotFound(f"the server could not find the requested resource {kind.plural}/{subresource}", status=404)
        old = self._store.find(kind, namespace, name)
        try:
            wire = msgspec.to_builtins(patch)
            new: Object = patches.apply(old, wire) if isinstance(wire, list) else patches.merge(old, wire)
        except patches.PatchError as error:
            raise Invalid(f"the server rejected our request: {error}", status=422, reason="Invalid") from error
        check_preconditions(kind, old, new)
        result = self._store.update(kind, old, limited(kind, old, new, subresource))
        return self._end(result if wants_object else metadata_of(result), failure)

    async def replace_status(
        self, kind: ResourceKind, name: str, status: Mapping[str, Any], *, namespace: str = "", resource_version: str
    ) -> Object:
        """Replace an object's status."""
        failure = await self._begin("replace", kind, name, "status")
        old = self._store.find(kind, namespace, name)
        new = deepcopy({**old, "status": msgspec.to_builtins(status)})
        new["metadata"]["resourceVersion"] = resource_version
        check_preconditions(kind, old, new)
        return self._end(metadata_of(self._store.update(kind, old, new)), failure)

    async def delete(self, kind: ResourceKind, name: str, *, namespace: str = "", uid: str = "") -> None:
        """Delete an object and, unless finalizers hold it, what it owns."""
        failure = await self._begin("delete", kind, name)
        item = self._store.find(kind, namespace, name)
        if uid and item["metadata"]["uid"] != uid:
            raise conflict(kind, name, f"UID in precondition: {uid}, UID in object meta: {item['metadata']['uid']}")
        self._store.delete(kind, item)
        self._end({}, failure)

    # How the server works

    async def _begin(self, verb: Verb, kind: ResourceKind, name: str, subresource: str = "") -> _Failure | None:
        await asyncio.sleep(0)
        self.calls.append(Call(verb, kind.plural, name, subresource))
        for failure in self._failures:
            if (failure.verb, failure.plural) == (verb, kind.plural) and failure.subresource in (None, subresource):
                self._failures.remove(failure)
                if failure.after:
                    return failure
                raise failure.error
        return None

    def _end(self, result: Object, failure: _Failure | None) -> Object:
        if failure is not None:
            raise failure.error
        return deepcopy(result)
