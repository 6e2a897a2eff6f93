"""What an API server keeps in memory: objects, their history, and who follows it."""

import asyncio
import uuid
from copy import deepcopy
from dataclasses import dataclass, field

import msgspec

from carpool_core.clock import Clock
from carpool_core.kube.api import EventType, ResourceKind, Selector, WatchEvent
from carpool_core.kube.errors import Conflict, Invalid, KubeError, NotFound
from carpool_core.testing.selectors import selects
from carpool_core.testing.semantics import WITH_STATUS, Object, conflict, desired


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
