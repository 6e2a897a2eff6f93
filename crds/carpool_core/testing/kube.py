"""An API server in memory, with the real one's semantics as far as Carpool depends on them."""

import asyncio
import itertools
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from jsonpatch import JsonPatchException, apply_patch
from jsonpointer import JsonPointerException

from carpool_core.clock import Clock
from carpool_core.kube.api import PODS, EventType, KubeApi, Page, ResourceKind, Selector, WatchEvent
from carpool_core.kube.client import describe_call
from carpool_core.kube.errors import PATCH_DOES_NOT_APPLY, Conflict, Gone, Invalid, KubeError, NotFound
from carpool_core.testing.clock import FakeClock

T = TypeVar("T")
Object = dict[str, Any]

_WITH_STATUS = ("pods", "nodes", "gputrainingjobs", "gpunodes")
"""Kinds whose status is a subresource."""

_SET_BY_SERVER = ("resourceVersion", "uid", "creationTimestamp", "generation", "deletionTimestamp")

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
    """An error that the next such call raises."""

    verb: Verb
    plural: str
    error: KubeError
    after: bool
    subresource: str | None


@dataclass
class _Change:
    """One write: an object before (None if created) and after (None if deleted)."""

    version: int
    plural: str
    old: Object | None
    new: Object | None

    @cached_property
    def encoded(self) -> msgspec.Raw:
        """The object as watches send it."""
        return _encoded(self.new or self.old or {})


@dataclass(eq=False)
class _Watch:
    """An open watch."""

    plural: str
    selector: Selector
    queue: "asyncio.Queue[WatchEvent | KubeError | None]" = field(default_factory=asyncio.Queue)

    def send(self, change: _Change) -> None:
        """Queue the event of a change: ADDED if the object enters the selection, DELETED if it leaves it."""
        if self.plural != change.plural:
            return
        was = change.old is not None and _selects(self.selector, change.old)
        is_ = change.new is not None and _selects(self.selector, change.new)
        if was or is_:
            type_: EventType = "DELETED" if not is_ else "MODIFIED" if was else "ADDED"
            self.queue.put_nowait(WatchEvent(type_, change.encoded))


class FakeKube(KubeApi):
    """Objects in memory. Every call gives way to other tasks once and then acts atomically, as a real server does.

    A stored object never changes: a write stores a new one, which shares its unchanged parts.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or FakeClock()
        self._objects: defaultdict[str, dict[tuple[str, str], Object]] = defaultdict(dict)
        """Objects by plural, and by namespace and name."""
        self._changes: list[_Change] = []
        self._watches: list[_Watch] = []
        self._version = self._compacted = 0
        self._pages: dict[str, list[Object]] = {}
        self._tokens = itertools.count(1)
        self._failures: list[_Failure] = []
        self.calls: list[Call] = []
        """Every call so far, in order."""
        self.written_logs: dict[str, list[str]] = {}
        """Lines of each pod's log, by the pod's name."""

    # For tests

    def seed(self, kind: ResourceKind, item: Mapping[str, Any] | msgspec.Struct) -> Object:
        """Store an object with its status, as if it had been created and reported on before."""
        body: Object = msgspec.to_builtins(item)
        metadata = body.setdefault("metadata", {})
        if kind.namespaced:
            metadata.setdefault("namespace", "default")
        old = self._objects[kind.plural].get(_key(kind, metadata.get("namespace", ""), metadata["name"]))
        return _copied(self._put(kind, old, self._completed(kind, body)))

    def dump(self, kind: ResourceKind, name: str, namespace: str = "") -> Object:
        """Return a copy of a stored object. Raises `NotFound`."""
        return _copied(self._find(kind, namespace, name))

    def dump_all(self, kind: ResourceKind) -> list[Object]:
        """Return copies of all objects of a kind, by namespace and name."""
        return [_copied(item) for item in self._all(kind)]

    def fail_next(
        self, verb: Verb, kind: ResourceKind, error: KubeError, *, after: bool = False, subresource: str | None = None
    ) -> None:
        """Make the next such call raise `error`; with `after`, once the write has happened: its answer is lost."""
        self._failures.append(_Failure(verb, kind.plural, error, after, subresource))

    def lose(self, kind: ResourceKind, name: str, namespace: str = "") -> None:
        """Remove an object without an event, as if its deletion had been compacted before anyone watched."""
        del self._objects[kind.plural][_key(kind, namespace, name)]

    def compact(self) -> None:
        """Drop all history: open watches, continue tokens and older resourceVersions answer `Gone`."""
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
        for watch in self._watches:
            item = {"metadata": {"resourceVersion": str(self._version)}}
            watch.queue.put_nowait(WatchEvent("BOOKMARK", _encoded(item)))

    @property
    def open_watches(self) -> int:
        """Number of open watches."""
        return len(self._watches)

    # The calls of `KubeApi`

    @property
    def namespace(self) -> str:
        """Namespace of the context."""
        return "default"

    @property
    def server_ahead_s(self) -> float:
        """Return 0: the server has the clock of the test."""
        return 0.0

    async def get(self, kind: ResourceKind, name: str, type_: type[T], *, namespace: str = "") -> T:
        """Return one object."""
        await self._begin("get", kind, name)
        try:
            return msgspec.json.decode(_encoded(self._find(kind, namespace, name)), type=type_)
        except msgspec.ValidationError as error:
            raise Invalid(f"{describe_call('GET', kind, namespace, name)}: unexpected object: {error}") from error

    async def list_page(
        self, kind: ResourceKind, selector: Selector, *, limit: int = 500, continue_token: str = ""
    ) -> Page:
        """Return one page; a token continues the snapshot that its list began with."""
        await self._begin("list", kind, "")
        version, rest = str(self._version), [item for item in self._all(kind) if _selects(selector, item)]
        if continue_token:
            if continue_token not in self._pages:
                raise Gone("The provided continue parameter is too old", status=410, reason="Expired")
            version, rest = continue_token.partition("/")[0], self._pages.pop(continue_token)
        token = ""
        if rest[limit:]:
            token = f"{version}/{next(self._tokens)}"
            self._pages[token] = rest[limit:]
        return Page([_encoded(item) for item in rest[:limit]], version, token)

    async def watch(self, kind: ResourceKind, selector: Selector, resource_version: str) -> AsyncIterator[WatchEvent]:
        """Yield the changes after `resource_version`, then new ones."""
        await self._begin("watch", kind, "")
        since = int(resource_version or self._version)
        if since < self._compacted:
            raise Gone(f"too old resource version: {since} ({self._compacted})", status=410, reason="Expired")
        watch = _Watch(kind.plural, selector)
        for change in self._changes:
            if change.version > since:
                watch.send(change)
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
        is_dry_run: bool = False,
        wants_object: bool = True,
    ) -> Object:
        """Create an object, or bind a pod."""
        failure = await self._begin("check" if is_dry_run else "create", kind, name, subresource)
        content: Object = msgspec.to_builtins(body)
        if not subresource:
            result = self._create(kind, namespace, content, is_dry_run=is_dry_run)
        elif subresource == "binding":
            result = self._bind(kind, name, namespace, content)
        else:
            raise _no_endpoint(kind, subresource)
        return _answer(result, failure, wants_object=wants_object)

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
        if subresource not in ("", "status") or (subresource and kind.plural not in _WITH_STATUS):
            raise _no_endpoint(kind, subresource)
        old = self._find(kind, namespace, name)
        wire = msgspec.to_builtins(patch)
        try:
            is_json_patch = isinstance(wire, list)
            new: Object = apply_patch(_copied(old), wire, in_place=True) if is_json_patch else _merged(old, wire)
        except (JsonPatchException, JsonPointerException) as error:
            raise Invalid(f"{PATCH_DOES_NOT_APPLY}: {error}", status=422, reason="Invalid") from error
        _check_preconditions(kind, old, new)
        if kind.plural in _WITH_STATUS:
            # The status changes through its subresource only, and nothing else does.
            base, other = (old, new) if subresource else (new, old)
            status = {"status": other["status"]} if "status" in other else {}
            new = {key: value for key, value in base.items() if key != "status"} | status
        return _answer(self._update(kind, old, new), failure, wants_object=wants_object)

    async def replace_status(
        self, kind: ResourceKind, name: str, status: Mapping[str, Any], *, namespace: str = "", resource_version: str
    ) -> Object:
        """Replace an object's status."""
        failure = await self._begin("replace", kind, name, "status")
        old = self._find(kind, namespace, name)
        new = _with_metadata(old, resourceVersion=resource_version) | {"status": msgspec.to_builtins(status)}
        _check_preconditions(kind, old, new)
        return _answer(self._update(kind, old, new), failure, wants_object=False)

    async def logs(
        self, pod: str, *, namespace: str, container: str, is_followed: bool = False, tail_lines: int | None = None
    ) -> AsyncIterator[str]:
        """Yield the lines in `written_logs`. Raises `Invalid` for a container without a log."""
        self._find(PODS, namespace, pod)
        await asyncio.sleep(0)
        if pod not in self.written_logs:
            message = f'container "{container}" in pod "{pod}" is waiting to start: ContainerCreating'
            raise Invalid(message, status=400, reason="BadRequest")
        lines = self.written_logs[pod]
        for line in lines if tail_lines is None else lines[max(0, len(lines) - tail_lines) :]:
            yield line

    async def delete(
        self, kind: ResourceKind, name: str, *, namespace: str = "", uid: str = "", resource_version: str = ""
    ) -> None:
        """Delete an object and, unless finalizers hold it, its dependents."""
        failure = await self._begin("delete", kind, name)
        item = self._find(kind, namespace, name)
        for key, expected in (("uid", uid), ("resourceVersion", resource_version)):
            if expected and (found := item["metadata"][key]) != expected:
                raise _conflict(kind, name, f"{key} in precondition: {expected}, {key} in object meta: {found}")
        self._delete(kind, item)
        _answer({}, failure)

    async def _begin(self, verb: Verb, kind: ResourceKind, name: str, subresource: str = "") -> _Failure | None:
        """Record a call; raise the failure that a test set, or return one that comes after the write."""
        await asyncio.sleep(0)
        self.calls.append(Call(verb, kind.plural, name, subresource))
        for failure in self._failures:
            if (failure.verb, failure.plural) == (verb, kind.plural) and failure.subresource in (None, subresource):
                self._failures.remove(failure)
                if failure.after:
                    return failure
                raise failure.error
        return None

    # Storage

    def _find(self, kind: ResourceKind, namespace: str, name: str) -> Object:
        """Return an object itself, not a copy. Raises `NotFound`."""
        found = self._objects[kind.plural].get(_key(kind, namespace, name))
        if found is None:
            raise NotFound(f'{_dotted(kind)} "{name}" not found', status=404, reason="NotFound")
        return found

    def _all(self, kind: ResourceKind) -> list[Object]:
        """Return the objects of a kind, not copies, by namespace and name."""
        return [item for _, item in sorted(self._objects[kind.plural].items())]

    def _completed(self, kind: ResourceKind, body: Object) -> Object:
        """Fill in the fields that the server sets."""
        metadata = body["metadata"]
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", self._timestamp())
        metadata.setdefault("generation", 1)
        return {"apiVersion": kind.api_version, "kind": kind.kind} | body

    def _timestamp(self) -> str:
        return self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")

    def _create(self, kind: ResourceKind, namespace: str, body: Object, *, is_dry_run: bool) -> Object:
        metadata = body.setdefault("metadata", {})
        if metadata.get("resourceVersion"):
            raise Invalid("resourceVersion should not be set on objects to be created", status=400)
        if not metadata.get("name"):
            raise Invalid(f"{kind.kind}: metadata.name: name is required", status=422, reason="Invalid")
        if kind.namespaced:
            metadata["namespace"] = namespace or metadata.get("namespace") or "default"
        for given in _SET_BY_SERVER:
            metadata.pop(given, None)
        if kind.plural in _WITH_STATUS and kind.plural != "nodes":
            body.pop("status", None)
        if kind.plural == "pods":
            gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
            is_gated = body.get("spec", {}).get("schedulingGates")
            body["status"] = {"phase": "Pending", **({"conditions": [gated]} if is_gated else {})}
        body = self._completed(kind, body)
        if _key(kind, metadata.get("namespace", ""), metadata["name"]) in self._objects[kind.plural]:
            raise Conflict(f'{kind.plural} "{metadata["name"]}" already exists', status=409, reason="AlreadyExists")
        return body if is_dry_run else self._put(kind, None, body)

    def _update(self, kind: ResourceKind, old: Object, new: Object) -> Object:
        """Replace an object unless nothing changes; one that is being deleted goes with its last finalizer."""
        if new == old:
            return old
        if _desired(new) != _desired(old):
            new = _with_metadata(new, generation=old["metadata"].get("generation", 0) + 1)
        stored = self._put(kind, old, new)
        if new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers"):
            self._remove(kind, stored)
        return stored

    def _put(self, kind: ResourceKind, old: Object | None, new: Object) -> Object:
        """Store an object under a new resourceVersion, and send the change to the watches."""
        self._version += 1
        new = _with_metadata(new, resourceVersion=str(self._version))
        self._objects[kind.plural][_key(kind, new["metadata"].get("namespace", ""), new["metadata"]["name"])] = new
        self._announce(_Change(self._version, kind.plural, old, new))
        return new

    def _announce(self, change: _Change) -> None:
        self._changes.append(change)
        for watch in self._watches:
            watch.send(change)

    def _delete(self, kind: ResourceKind, item: Object) -> None:
        """Delete an object, or mark it as being deleted while finalizers hold it."""
        if item["metadata"].get("finalizers"):
            since = item["metadata"].get("deletionTimestamp", self._timestamp())
            self._update(kind, item, _with_metadata(item, deletionTimestamp=since))
        else:
            self._remove(kind, item)

    def _remove(self, kind: ResourceKind, item: Object) -> None:
        """Remove an object, and delete those that only it owns."""
        metadata = item["metadata"]
        del self._objects[kind.plural][_key(kind, metadata.get("namespace", ""), metadata["name"])]
        self._version += 1
        last = _with_metadata(item, resourceVersion=str(self._version))
        self._announce(_Change(self._version, kind.plural, last, None))
        everything = [(plural, *one) for plural, objects in self._objects.items() for one in objects.items()]
        for plural, key, other in everything:
            owners = other["metadata"].get("ownerReferences") or []
            if owners and all(owner.get("uid") == metadata["uid"] for owner in owners) and key in self._objects[plural]:
                group, _, version = other["apiVersion"].rpartition("/")
                self._delete(ResourceKind(group, version, plural, other["kind"], namespaced=bool(key[0])), other)

    def _bind(self, kind: ResourceKind, name: str, namespace: str, binding: Object) -> Object:
        """Bind a pod to a node, unless it is bound or a precondition fails."""
        old = self._find(kind, namespace, name)
        metadata, wanted = old["metadata"], binding.get("metadata") or {}
        if wanted.get("name") != name:
            raise Invalid("name in URL does not match name in Binding object", status=400, reason="BadRequest")
        if wanted.get("uid") and wanted["uid"] != metadata["uid"]:
            raise _conflict(kind, name, f"UID in precondition: {wanted['uid']}, UID in object meta: {metadata['uid']}")
        if metadata.get("deletionTimestamp"):
            raise _conflict(kind, name, f"pod {name} is being deleted, cannot be assigned to a host")
        if bound := (old.get("spec") or {}).get("nodeName"):
            raise _conflict(kind, name, f'pod {name} is already assigned to node "{bound}"')
        new = _copied(old)
        new.setdefault("spec", {})["nodeName"] = binding["target"]["name"]
        for key in ("annotations", "labels"):
            if wanted.get(key):
                new["metadata"][key] = {**(metadata.get(key) or {}), **wanted[key]}
        status = new.setdefault("status", {})
        others = [c for c in status.get("conditions", []) if c["type"] != "PodScheduled"]
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": self._timestamp()}
        status["conditions"] = [*others, scheduled]
        self._update(kind, old, new)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}


def _key(kind: ResourceKind, namespace: str, name: str) -> tuple[str, str]:
    return (namespace or "default") if kind.namespaced else "", name


def _dotted(kind: ResourceKind) -> str:
    return f"{kind.plural}.{kind.group}".rstrip(".")


def _encoded(item: Object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(item))


def _copied(item: Object) -> Object:
    """Return a deep copy; much faster than `copy.deepcopy`."""
    copy: Object = msgspec.to_builtins(item)
    return copy


def _with_metadata(item: Object, **fields: Any) -> Object:
    """Return an object with other metadata; the object itself stays as it is."""
    return {**item, "metadata": {**item["metadata"], **fields}}


def _desired(item: Object) -> Object:
    """Return the part whose changes `metadata.generation` counts."""
    return {key: value for key, value in item.items() if key not in ("metadata", "status")}


def _answer(result: Object, failure: _Failure | None, *, wants_object: bool = True) -> Object:
    """Return a copy of an answer, or raise the failure that loses it."""
    if failure is not None:
        raise failure.error
    if wants_object:
        return _copied(result)
    metadata = _copied(result.get("metadata", {}))
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}


def _merged(target: Any, patch: Any) -> Any:
    """Apply a merge patch: null removes a key, objects merge, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _check_preconditions(kind: ResourceKind, old: Object, new: Object) -> None:
    """Refuse a write to another version or identity; restore in `new` the fields that only the server sets."""
    before, after = old["metadata"], new.setdefault("metadata", {})
    name = before["name"]
    if after.get("resourceVersion", before["resourceVersion"]) != before["resourceVersion"]:
        raise _conflict(
            kind, name, "the object has been modified; please apply your changes to the latest version and try again"
        )
    if after.get("uid", before["uid"]) != before["uid"]:
        raise _conflict(kind, name, f"UID in precondition: {after['uid']}, UID in object meta: {before['uid']}")
    for fixed in ("name", "namespace"):
        if after.get(fixed) != before.get(fixed):
            raise Invalid(f"the {fixed} of the object does not match the {fixed} on the URL", status=400)
    fixed_fields = {given: before[given] for given in _SET_BY_SERVER if given in before}
    new["metadata"] = {key: value for key, value in after.items() if key not in _SET_BY_SERVER} | fixed_fields


def _conflict(kind: ResourceKind, name: str, why: str) -> Conflict:
    message = f'Operation cannot be fulfilled on {_dotted(kind)} "{name}": {why}'
    return Conflict(message, status=409, reason="Conflict")


def _no_endpoint(kind: ResourceKind, subresource: str) -> NotFound:
    return NotFound(f"the server could not find the requested resource {kind.plural}/{subresource}", status=404)


def _selects(selector: Selector, item: Mapping[str, Any]) -> bool:
    """Return whether a selector selects an object. Its terms are `key`, `key=value` or `key!=value`."""
    metadata = item.get("metadata", {})
    if selector.namespace and metadata.get("namespace", "") != selector.namespace:
        return False
    labels = metadata.get("labels") or {}
    return _holds(selector.labels, labels.get) and _holds(selector.fields, lambda path: str(_field(item, path)))


def _holds(terms: str, value_of: Callable[[str], str | None]) -> bool:
    for term in filter(None, terms.split(",")):
        key, operator, wanted = term.partition("!=") if "!=" in term else term.partition("=")
        found = value_of(key)
        if found is None if not operator else (found == wanted) is (operator == "!="):
            return False
    return True


def _field(item: Mapping[str, Any], path: str) -> Any:
    here: Any = item
    for part in path.split("."):
        here = here.get(part, "") if isinstance(here, Mapping) else ""
    return here
