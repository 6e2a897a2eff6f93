"""An API server in memory, with the real one's semantics as far as Carpool depends on them."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from carpool_core.clock import Clock
from carpool_core.kube.api import (
    EventType,
    KubeApi,
    Page,
    ResourceKind,
    Selector,
    WatchEvent,
)
from carpool_core.kube.errors import Conflict, Gone, Invalid, KubeError, NotFound
from carpool_core.testing import patches
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.selectors import selects
from carpool_core.testing.semantics import WITH_STATUS, Object, check_preconditions, conflict, desired, limited

T = TypeVar("T")
Verb = Literal["get", "list", "watch", "create", "patch", "delete"]


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


@dataclass
class _Change:
    version: int
    plural: str
    old: Object | None
    new: Object | None


@dataclass(eq=False)
class _Watch:
    plural: str
    selector: Selector
    queue: "asyncio.Queue[WatchEvent | KubeError | None]" = field(default_factory=asyncio.Queue)


class FakeKube(KubeApi):
    """Objects in memory. Every call gives way to other tasks once and then acts atomically, as a real server does."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or FakeClock()
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._changes: list[_Change] = []
        self._watches: list[_Watch] = []
        self._pages: dict[str, list[Object]] = {}
        self._failures: list[_Failure] = []
        self._compacted = 0
        self._version = 0
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
        old = self._objects.get(self._key(kind, metadata.get("namespace", ""), metadata["name"]))
        return deepcopy(self._store(kind, old, self._completed(kind, body)))

    def dump(self, kind: ResourceKind, name: str, namespace: str = "") -> Object:
        """Return a copy of an object as it is stored. Raises `NotFound`."""
        return deepcopy(self._find(kind, namespace, name))

    def dump_all(self, kind: ResourceKind) -> list[Object]:
        """Return copies of all objects of a kind, by namespace and name."""
        return [deepcopy(item) for key, item in sorted(self._objects.items()) if key[0] == kind.plural]

    def fail_next(
        self, verb: Verb, kind: ResourceKind, error: KubeError, *, after: bool = False, subresource: str | None = None
    ) -> None:
        """Make the next such call raise `error`; with `after`, once the write has happened: an answer that got lost."""
        self._failures.append(_Failure(verb, kind.plural, error, after, subresource))

    def compact(self) -> None:
        """Forget all history: open watches, continue tokens and older resourceVersions answer `Gone`."""
        self._compacted = self._version = self._version + 1
        self._changes.clear()
        self._pages.clear()
        self.end_watches(Gone("too old resource version", status=410, reason="Expired"))

    def end_watches(self, error: KubeError | None = None) -> None:
        """End every open watch, as the server does after its timeout, or with an error."""
        for watch in self._watches:
            watch.queue.put_nowait(error)

    def bookmark(self) -> None:
        """Send every open watch a bookmark with the latest resourceVersion."""
        raw = msgspec.Raw(msgspec.json.encode({"metadata": {"resourceVersion": str(self._version)}}))
        for watch in self._watches:
            watch.queue.put_nowait(WatchEvent("BOOKMARK", raw))

    @property
    def open_watches(self) -> int:
        """Number of watches that are being followed."""
        return len(self._watches)

    # What clients do

    async def get(self, kind: ResourceKind, name: str, type_: type[T], *, namespace: str = "") -> T:
        """Read one object."""
        await self._begin("get", kind, name)
        return msgspec.json.decode(msgspec.json.encode(self._find(kind, namespace, name)), type=type_)

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
            version = str(self._version)
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
        since = int(resource_version or self._version)
        if since < self._compacted:
            raise Gone(f"too old resource version: {since} ({self._compacted})", status=410, reason="Expired")
        watch = _Watch(kind.plural, selector)
        for change in self._changes:
            if change.version > since:
                _tell(watch, change)
        self._watches.append(watch)
        try:
            while (event := await watch.queue.get()) is not None:
                if isinstance(event, KubeError):
                    raise event
                yield event
        finally:
            self._watches.remove(watch)

    async def create(
        self,
        kind: ResourceKind,
        body: Mapping[str, Any] | msgspec.Struct,
        *,
        namespace: str = "",
        name: str = "",
        subresource: str = "",
    ) -> Object:
        """Create an object, or bind a pod."""
        failure = await self._begin("create", kind, name, subresource)
        content: Object = deepcopy(msgspec.to_builtins(body))
        if subresource == "binding":
            result = self._bind(kind, name, namespace, content)
        elif subresource:
            raise NotFound(f"the server could not find the requested resource {kind.plural}/{subresource}", status=404)
        else:
            result = self._create(kind, namespace, content)
        return self._end(result, failure)

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        patch: Mapping[str, Any] | list[Mapping[str, Any]],
        *,
        namespace: str = "",
        subresource: str = "",
    ) -> Object:
        """Patch an object, or its status alone."""
        failure = await self._begin("patch", kind, name, subresource)
        if subresource not in ("", "status") or (subresource and kind.plural not in WITH_STATUS):
            raise NotFound(f"the server could not find the requested resource {kind.plural}/{subresource}", status=404)
        old = self._find(kind, namespace, name)
        try:
            wire = msgspec.to_builtins(patch)
            new: Object = patches.apply(old, wire) if isinstance(wire, list) else patches.merge(old, wire)
        except patches.PatchError as error:
            raise Invalid(f"the server rejected our request: {error}", status=422, reason="Invalid") from error
        check_preconditions(kind, old, new)
        return self._end(self._update(kind, old, limited(kind, old, new, subresource)), failure)

    async def delete(self, kind: ResourceKind, name: str, *, namespace: str = "", uid: str = "") -> None:
        """Delete an object and, unless finalizers hold it, what it owns."""
        failure = await self._begin("delete", kind, name)
        item = self._find(kind, namespace, name)
        if uid and item["metadata"]["uid"] != uid:
            raise conflict(kind, name, f"UID in precondition: {uid}, UID in object meta: {item['metadata']['uid']}")
        self._delete(kind, item)
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

    def _key(self, kind: ResourceKind, namespace: str, name: str) -> tuple[str, str, str]:
        return kind.plural, (namespace or "default") if kind.namespaced else "", name

    def _find(self, kind: ResourceKind, namespace: str, name: str) -> Object:
        found = self._objects.get(self._key(kind, namespace, name))
        if found is None:
            dotted = f"{kind.plural}.{kind.group}".rstrip(".")
            raise NotFound(f'{dotted} "{name}" not found', status=404, reason="NotFound")
        return found

    def _completed(self, kind: ResourceKind, body: Object) -> Object:
        """Fill in what the server fills in."""
        group_version = f"{kind.group}/{kind.version}".lstrip("/")
        metadata = body["metadata"]
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        if not metadata.get("name"):
            raise Invalid(f"{kind.kind}: metadata.name: name or generateName is required", status=422, reason="Invalid")
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"))
        metadata.setdefault("generation", 1)
        return {"apiVersion": group_version, "kind": kind.kind} | body

    def _create(self, kind: ResourceKind, namespace: str, body: Object) -> Object:
        metadata = body.setdefault("metadata", {})
        if metadata.get("resourceVersion"):
            raise Invalid("resourceVersion should not be set on objects to be created", status=400)
        if kind.namespaced:
            metadata["namespace"] = namespace or metadata.get("namespace") or "default"
        for given_by_server in ("uid", "creationTimestamp", "generation", "deletionTimestamp"):
            metadata.pop(given_by_server, None)
        if kind.plural in WITH_STATUS and kind.plural != "nodes":
            body.pop("status", None)
        if kind.plural == "pods":
            body["status"] = {"phase": "Pending"}
        body = self._completed(kind, body)
        if self._key(kind, namespace or metadata.get("namespace", ""), metadata["name"]) in self._objects:
            raise Conflict(f'{kind.plural} "{metadata["name"]}" already exists', status=409, reason="AlreadyExists")
        return self._store(kind, None, body)

    def _update(self, kind: ResourceKind, old: Object, new: Object) -> Object:
        if new == old:
            return old
        if desired(new) != desired(old):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        stored = self._store(kind, old, new)
        if new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers"):
            self._remove(kind, stored)
        return stored

    def _store(self, kind: ResourceKind, old: Object | None, new: Object) -> Object:
        self._version += 1
        new["metadata"]["resourceVersion"] = str(self._version)
        self._objects[self._key(kind, new["metadata"].get("namespace", ""), new["metadata"]["name"])] = new
        self._announce(_Change(self._version, kind.plural, old, deepcopy(new)))
        return new

    def _announce(self, change: _Change) -> None:
        self._changes.append(change)
        for watch in self._watches:
            _tell(watch, change)

    def _delete(self, kind: ResourceKind, item: Object) -> None:
        if item["metadata"].get("finalizers"):
            marked = deepcopy(item)
            marked["metadata"].setdefault("deletionTimestamp", self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"))
            self._update(kind, item, marked)
        else:
            self._remove(kind, item)

    def _remove(self, kind: ResourceKind, item: Object) -> None:
        metadata = item["metadata"]
        del self._objects[self._key(kind, metadata.get("namespace", ""), metadata["name"])]
        self._version += 1
        last = deepcopy(item)
        last["metadata"]["resourceVersion"] = str(self._version)
        self._announce(_Change(self._version, kind.plural, last, None))
        self._collect_garbage(metadata["uid"])

    def _collect_garbage(self, owner_uid: str) -> None:
        for key, item in list(self._objects.items()):
            owners = item["metadata"].get("ownerReferences") or []
            if owners and all(owner.get("uid") == owner_uid for owner in owners) and key in self._objects:
                group, _, version = item["apiVersion"].rpartition("/")
                self._delete(ResourceKind(group, version, key[0], item["kind"], namespaced=bool(key[1])), item)

    def _bind(self, kind: ResourceKind, name: str, namespace: str, binding: Object) -> Object:
        old = self._find(kind, namespace, name)
        metadata, wanted = old["metadata"], binding.get("metadata") or {}
        if wanted.get("name") != name:
            raise Invalid("name in URL does not match name in Binding object", status=400, reason="BadRequest")
        if wanted.get("uid") and wanted["uid"] != metadata["uid"]:
            raise conflict(kind, name, f"UID in precondition: {wanted['uid']}, UID in object meta: {metadata['uid']}")
        if metadata.get("deletionTimestamp"):
            raise conflict(kind, name, f"pod {name} is being deleted, cannot be assigned to a host")
        if bound := (old.get("spec") or {}).get("nodeName"):
            raise conflict(kind, name, f'pod {name} is already assigned to node "{bound}"')
        new = deepcopy(old)
        new.setdefault("spec", {})["nodeName"] = binding["target"]["name"]
        for key in ("annotations", "labels"):
            if wanted.get(key):
                new["metadata"][key] = {**(metadata.get(key) or {}), **wanted[key]}
        status = new.setdefault("status", {})
        others = [c for c in status.get("conditions", []) if c["type"] != "PodScheduled"]
        status["conditions"] = [*others, {"type": "PodScheduled", "status": "True"}]
        self._update(kind, old, new)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}


def _tell(watch: _Watch, change: _Change) -> None:
    """Queue what the watch sees of a change: entering its selection is ADDED, leaving it DELETED."""
    if watch.plural != change.plural:
        return
    was = change.old is not None and selects(watch.selector, change.old)
    is_ = change.new is not None and selects(watch.selector, change.new)
    kinds: dict[tuple[bool, bool], EventType] = {
        (False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED",
    }  # fmt: skip
    if (was, is_) in kinds:
        item = deepcopy(change.new or change.old or {})
        if not is_:
            item["metadata"]["resourceVersion"] = str(change.version)
        watch.queue.put_nowait(WatchEvent(kinds[was, is_], msgspec.Raw(msgspec.json.encode(item))))
