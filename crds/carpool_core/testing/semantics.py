"""What the API server checks and keeps when an object is written: pure functions of the old and the new object."""

from copy import deepcopy
from typing import Any

from carpool_core.kube.api import ResourceKind
from carpool_core.kube.errors import Conflict, Invalid

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
    if after.get("managedFields") == [{}]:
        del after["managedFields"]  # so whoever writes asks that nobody keeps track
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
