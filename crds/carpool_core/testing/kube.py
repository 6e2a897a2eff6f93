"""An API server in memory, with the real one's semantics as far as Carpool depends on them."""

import asyncio
import itertools
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from carpool_core.clock import Clock
from carpool_core.kube.api import EventType, KubeApi, Page, ResourceKind, Selector, WatchEvent
from carpool_core.kube.client import describe_call
from carpool_core.kube.errors import Conflict, Gone, Invalid, KubeError, NotFound
from carpool_core.testing.clock import FakeClock


class PatchError(ValueError):
    """A JSON patch does not apply; the API server answers 422."""


def merge(target: Any, patch: Any) -> Any:
    """Apply a merge patch: null removes a key, objects merge, all else replaces."""
    if not isinstance(patch, Mapping):
        return deepcopy(patch)
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def apply(target: Any, operations: list[Mapping[str, Any]]) -> Any:
    """Apply a JSON patch; all of it or nothing.

    Raises:
        PatchError: A path does not exist, or a test does not hold.
    """
    root = {"": deepcopy(target)}
    for operation in operations:
        _apply_one(root, operation)
    return root[""]


def _apply_one(root: dict[str, Any], operation: Mapping[str, Any]) -> None:
    kind, path = operation["op"], str(operation["path"])
    if kind == "test":
        if _get(root, path) != operation.get("value"):
            raise PatchError(f"testing value {path} failed")
    elif kind == "add":
        _set(root, path, deepcopy(operation["value"]), insert=True)
    elif kind == "replace":
        _get(root, path)
        _set(root, path, deepcopy(operation["value"]), insert=False)
    elif kind == "remove":
        _pop(root, path)
    elif kind == "copy":
        _set(root, path, deepcopy(_get(root, str(operation["from"]))), insert=True)
    elif kind == "move":
        _set(root, path, _pop(root, str(operation["from"])), insert=True)
    else:
        raise PatchError(f"unexpected kind of operation: {kind}")


def _parts(path: str) -> list[str]:
    if path and not path.startswith("/"):
        raise PatchError(f"a JSON pointer begins with a slash: {path!r}")
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]


def _parent(root: dict[str, Any], path: str) -> tuple[Any, str]:
    *parents, last = _parts(path)
    here: Any = root
    for part in parents:
        here = _child(here, part, path)
    if not isinstance(here, dict | list):
        raise PatchError(f"doc is missing path: {path}: missing value")
    return here, last


def _index(items: list[Any], part: str, path: str, limit: int) -> int:
    if not part.isdigit() or int(part) >= limit:
        raise PatchError(f"index {part!r} of {path} is out of bounds of {len(items)} items")
    return int(part)


def _child(here: Any, part: str, path: str) -> Any:
    if isinstance(here, list):
        return here[_index(here, part, path, len(here))]
    if isinstance(here, dict) and part in here:
        return here[part]
    raise PatchError(f"doc is missing path: {path}: missing value")


def _get(root: dict[str, Any], path: str) -> Any:
    parent, last = _parent(root, path)
    return _child(parent, last, path)


def _set(root: dict[str, Any], path: str, value: Any, *, insert: bool) -> None:
    parent, last = _parent(root, path)
    if isinstance(parent, dict):
        parent[last] = value
    elif not insert:
        parent[_index(parent, last, path, len(parent))] = value
    elif last == "-":
        parent.append(value)
    else:
        parent.insert(_index(parent, last, path, len(parent) + 1), value)


def _pop(root: dict[str, Any], path: str) -> Any:
    value = _get(root, path)
    parent, last = _parent(root, path)
    if isinstance(parent, dict):
        del parent[last]
    else:
        del parent[int(last)]
    return value


Object = dict[str, Any]

WITH_STATUS = ("pods", "nodes", "gputrainingjobs", "gpunodes")
"""Kinds whose status is a subresource."""


def desired(item: Object) -> Object:
    """Return what `metadata.generation` counts the changes of."""
    return {key: value for key, value in item.items() if key not in ("metadata", "status")}


def limited(kind: ResourceKind, old: Object, new: Object, subresource: str) -> Object:
    """Keep what this endpoint may not change."""
    if kind.plural not in WITH_STATUS:
        return new
    base, other = (old, new) if subresource else (new, old)
    result = {key: value for key, value in base.items() if key != "status"}
    if "status" in other:
        result["status"] = other["status"]
    return deepcopy(result)


def metadata_of(item: Object) -> Object:
    """Return what is answered to somebody who wants to know no more."""
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": item.get("metadata", {})}


def check_preconditions(kind: ResourceKind, old: Object, new: Object) -> None:
    """Refuse a write to another version or identity; restore in `new` what only the server sets."""
    before, after = old["metadata"], new.setdefault("metadata", {})
    name = before["name"]
    if after.get("resourceVersion", before["resourceVersion"]) != before["resourceVersion"]:
        raise conflict(
            kind, name, "the object has been modified; please apply your changes to the latest version and try again"
        )
    if after.get("uid", before["uid"]) != before["uid"]:
        raise conflict(kind, name, f"UID in precondition: {after['uid']}, UID in object meta: {before['uid']}")
    for fixed in ("name", "namespace"):
        if after.get(fixed) != before.get(fixed):
            raise Invalid(f"the {fixed} of the object does not match the {fixed} on the URL", status=400)
    for given_by_server in ("resourceVersion", "uid", "creationTimestamp", "generation", "deletionTimestamp"):
        if given_by_server in before:
            after[given_by_server] = before[given_by_server]
        else:
            after.pop(given_by_server, None)


def conflict(kind: ResourceKind, name: str, why: str) -> Conflict:
    """Say in the API server's words why a write was refused."""
    dotted = f"{kind.plural}.{kind.group}".rstrip(".")
    return Conflict(f'Operation cannot be fulfilled on {dotted} "{name}": {why}', status=409, reason="Conflict")


_TERM = re.compile(
    r"\s*(?:(?P<absent>!\s*)(?P<gone>[^\s,=!()]+)|(?P<key>[^\s,=!()]+)\s*"
    r"(?:(?P<op>==|!=|=)\s*(?P<value>[^,\s]*)|(?P<set>notin|in)\s*\((?P<values>[^)]*)\))?)\s*(?:,|$)"
)


def selects(selector: Selector, item: Mapping[str, Any]) -> bool:
    """Whether the object is one of those that are selected.

    Raises:
        ValueError: The selector cannot be read.
    """
    metadata = item.get("metadata", {})
    if selector.namespace and metadata.get("namespace", "") != selector.namespace:
        return False
    labels = metadata.get("labels") or {}
    return all(_holds(term, labels.get(term["key"] or term["gone"])) for term in _terms(selector.labels)) and all(
        _holds(term, str(_field(item, term["key"]))) for term in _terms(selector.fields)
    )


def _terms(text: str) -> list[dict[str, str]]:
    found, position = [], 0
    while position < len(text):
        match = _TERM.match(text, position)
        if match is None or match.end() == position:
            raise ValueError(f"cannot read the selector {text!r} from {text[position:]!r}")
        found.append(match.groupdict())
        position = match.end()
    return found


def _holds(term: Mapping[str, str], value: str | None) -> bool:
    if term["absent"]:
        return value is None
    if term["op"] == "!=":
        return value != term["value"]
    if term["op"]:
        return value == term["value"]
    if term["set"]:
        is_in = value in [choice.strip() for choice in term["values"].split(",")]
        return is_in == (term["set"] == "in")
    return value is not None


def _field(item: Mapping[str, Any], path: str) -> Any:
    here: Any = item
    for part in path.split("."):
        here = here.get(part, "") if isinstance(here, Mapping) else ""
    return here


@dataclass
class Change:
    """One write: what an object was before (None where it was created), and after (None where it was deleted)."""

    version: int
    plural: str
    old: Object | None
    new: Object | None


@dataclass(eq=False)
class Watch:
    """Somebody who follows a kind."""

    plural: str
    selector: Selector
    queue: "asyncio.Queue[WatchEvent | KubeError | None]" = field(default_factory=asyncio.Queue)


class Store:
    """Objects by kind, namespace and name, and every change of them since the last compaction."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.changes: list[Change] = []
        self.watches: list[Watch] = []
        self.version = 0

    def key(self, kind: ResourceKind, namespace: str, name: str) -> tuple[str, str, str]:
        """Where an object is kept."""
        return kind.plural, (namespace or "default") if kind.namespaced else "", name

    def find(self, kind: ResourceKind, namespace: str, name: str) -> Object:
        """Return an object itself, not a copy. Raises `NotFound`."""
        found = self.objects.get(self.key(kind, namespace, name))
        if found is None:
            dotted = f"{kind.plural}.{kind.group}".rstrip(".")
            raise NotFound(f'{dotted} "{name}" not found', status=404, reason="NotFound")
        return found

    def completed(self, kind: ResourceKind, body: Object) -> Object:
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

    def create(self, kind: ResourceKind, namespace: str, body: Object, *, is_dry_run: bool = False) -> Object:
        """Create an object, with what only the server sets; a dry run returns what would be kept."""
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
        body = self.completed(kind, body)
        if self.key(kind, namespace or metadata.get("namespace", ""), metadata["name"]) in self.objects:
            raise Conflict(f'{kind.plural} "{metadata["name"]}" already exists', status=409, reason="AlreadyExists")
        return body if is_dry_run else self.put(kind, None, body)

    def update(self, kind: ResourceKind, old: Object, new: Object) -> Object:
        """Replace an object, unless nothing changes; one that is being deleted goes with its last finalizer."""
        if new == old:
            return old
        if desired(new) != desired(old):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        stored = self.put(kind, old, new)
        if new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers"):
            self._remove(kind, stored)
        return stored

    def put(self, kind: ResourceKind, old: Object | None, new: Object) -> Object:
        """Keep an object under a new resourceVersion, and tell those who follow."""
        self.version += 1
        new["metadata"]["resourceVersion"] = str(self.version)
        self.objects[self.key(kind, new["metadata"].get("namespace", ""), new["metadata"]["name"])] = new
        self._announce(Change(self.version, kind.plural, old, deepcopy(new)))
        return new

    def _announce(self, change: Change) -> None:
        self.changes.append(change)
        for watch in self.watches:
            tell(watch, change)

    def delete(self, kind: ResourceKind, item: Object) -> None:
        """Delete an object, or mark it as being deleted while finalizers hold it."""
        if item["metadata"].get("finalizers"):
            marked = deepcopy(item)
            marked["metadata"].setdefault("deletionTimestamp", self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"))
            self.update(kind, item, marked)
        else:
            self._remove(kind, item)

    def _remove(self, kind: ResourceKind, item: Object) -> None:
        metadata = item["metadata"]
        del self.objects[self.key(kind, metadata.get("namespace", ""), metadata["name"])]
        self.version += 1
        last = deepcopy(item)
        last["metadata"]["resourceVersion"] = str(self.version)
        self._announce(Change(self.version, kind.plural, last, None))
        self._collect_garbage(metadata["uid"])

    def _collect_garbage(self, owner_uid: str) -> None:
        for key, item in list(self.objects.items()):
            owners = item["metadata"].get("ownerReferences") or []
            if owners and all(owner.get("uid") == owner_uid for owner in owners) and key in self.objects:
                group, _, version = item["apiVersion"].rpartition("/")
                self.delete(ResourceKind(group, version, key[0], item["kind"], namespaced=bool(key[1])), item)

    def bind(self, kind: ResourceKind, name: str, namespace: str, binding: Object) -> Object:
        """Put a pod on a node, unless that was done before or a precondition fails."""
        old = self.find(kind, namespace, name)
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
        self.update(kind, old, new)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}


def tell(watch: Watch, change: Change) -> None:
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

    @property
    def namespace(self) -> str:
        """Namespace of the context."""
        return "default"

    async def get(self, kind: ResourceKind, name: str, type_: type[T], *, namespace: str = "") -> T:
        """Read one object."""
        await self._begin("get", kind, name)
        body = msgspec.json.encode(self._store.find(kind, namespace, name))
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.ValidationError as error:
            raise Invalid(f"{describe_call('GET', kind, namespace, name)}: unexpected object: {error}") from error

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
            new: Object = apply(old, wire) if isinstance(wire, list) else merge(old, wire)
        except PatchError as error:
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
