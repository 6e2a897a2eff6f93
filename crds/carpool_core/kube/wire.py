"""What goes over the wire between a client and the API server: paths, lists, watch lines, refusals."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from carpool_core.kube.api import EventType, ResourceKind, Selector, WatchEvent
from carpool_core.kube.errors import (
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    NotFound,
    Overloaded,
    Refused,
)

_NOT_IN_A_SEGMENT = frozenset("/%?#")


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class ObjectList(msgspec.Struct, frozen=True):
    """One page of a list, its items still encoded."""

    metadata: _ListMeta = _ListMeta()
    items: list[msgspec.Raw] | None = None


class Status(msgspec.Struct, frozen=True):
    """A `metav1.Status`: how the API server says no."""

    message: str = ""
    reason: str = ""
    code: int = 0


class _WatchLine(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


def error_for(status: int, what: str, said: str, reason: str = "") -> KubeError:
    """Map an HTTP status to the error that says whether to try again.

    Args:
        status: HTTP status.
        what: Which call failed, for people.
        said: What the server answered.
        reason: The server's one word.
    """
    kinds: dict[int, type[KubeError]] = {
        400: Invalid, 401: Forbidden, 403: Forbidden, 404: NotFound, 409: Conflict, 410: Gone, 422: Invalid,
        429: Overloaded,
    }  # fmt: skip
    kind = kinds.get(status, Overloaded if status >= 500 else Refused)
    return kind(f"{what}: {said}", status=status, reason=reason, said=said)


def path_of(kind: ResourceKind, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """Return the URL path of a collection, an object or a subresource.

    Names may come from users (an owner reference holds whatever its writer likes), so none may lead out of its place.

    Raises:
        Invalid: A namespace, name or subresource is no single segment of a path, or one is missing before another.
    """
    for what, segment in (("namespace", namespace), ("name", name), ("subresource", subresource)):
        if segment in (".", "..") or not _NOT_IN_A_SEGMENT.isdisjoint(segment):
            raise Invalid(
                f"expected a {what} of {kind.plural} without any of / % ? #, and not . or .., found {segment!r}"
            )
    if subresource and not name:
        raise Invalid(f"expected the name of the {kind.kind} whose {subresource} is meant, found an empty string")
    root = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
    inside = f"/namespaces/{namespace}" if kind.namespaced and namespace else ""
    return root + inside + "".join(f"/{part}" for part in (kind.plural, name, subresource) if part)


def required(kind: ResourceKind, name: str) -> str:
    """Return the name of one object; Invalid where it is empty, because that would mean all objects of the kind."""
    if not name:
        raise Invalid(f"expected the name of a {kind.kind}, found an empty string")
    return name


def group_version(kind: ResourceKind) -> str:
    """Return `apiVersion` of a kind."""
    return f"{kind.group}/{kind.version}" if kind.group else kind.version


def query(selector: Selector) -> dict[str, str]:
    """Return a selector as parameters of a URL."""
    return {"labelSelector": selector.labels, "fieldSelector": selector.fields}


def object_of(body: bytes) -> dict[str, Any]:
    """Decode an object as plain data."""
    return msgspec.json.decode(body, type=dict[str, Any])


def call_name(method: str, kind: ResourceKind, namespace: str, name: str, subresource: str = "") -> str:
    """Name a call for people: `PATCH gpunodes/status n1`."""
    target = f"{namespace}/{name}".strip("/")
    return f"{method} {kind.plural}{'/' if subresource else ''}{subresource} {target}".rstrip()


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream, however long: aiohttp's own reader refuses lines over 128 KiB."""
    rest: list[bytes] = []
    async for chunk in content.iter_any():
        *whole, last = chunk.split(b"\n")
        for line in whole:
            if text := b"".join((*rest, line)):
                yield text
            rest = []
        if last:
            rest.append(last)


def event(line: bytes, what: str) -> WatchEvent:
    """Decode a line of a watch. Raises what an ERROR line tells."""
    event = msgspec.json.decode(line, type=_WatchLine)
    if event.type == "ERROR":
        said = msgspec.json.decode(event.object, type=Status)
        raise error_for(said.code, what, said.message, said.reason)
    return WatchEvent(_EVENT_TYPES[event.type], event.object)


_EVENT_TYPES: dict[str, EventType] = {
    "ADDED": "ADDED",
    "MODIFIED": "MODIFIED",
    "DELETED": "DELETED",
    "BOOKMARK": "BOOKMARK",
}
