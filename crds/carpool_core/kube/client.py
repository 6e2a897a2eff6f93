"""The Kubernetes API over aiohttp: the adapter behind `KubeApi`."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from carpool_core.clock import Clock, SystemClock
from carpool_core.kube.api import EventType, KubeApi, Page, ResourceKind, Selector, WatchEvent
from carpool_core.kube.config import Endpoint, load_endpoint
from carpool_core.kube.errors import (
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    NotFound,
    Overloaded,
    Refused,
    Unreachable,
)
from carpool_core.settings import KubeSettings

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
    return kind(f"{what}: {said}", status=status, reason=reason, server_message=said)


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


def selector_query(selector: Selector) -> dict[str, str]:
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


T = TypeVar("T")

_CALL_TIMEOUT_S = 30.0
_WATCH_LIFETIME_S = 300
"""The server ends a watch after this time; a new one then goes through authentication again."""
_SILENCE_S = 150.0
"""The server sends a bookmark about each minute; two in a row missing means that nobody is there."""
_OBJECT = "application/json"
_METADATA = f"{_OBJECT};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_CONNECTIONS = 32
"""Calls at once; watches have connections of their own, so that they cannot starve calls."""


@asynccontextmanager
async def connect(settings: KubeSettings, *, clock: Clock | None = None) -> AsyncIterator["KubeClient"]:
    """Open a client for the configured API server.

    Raises:
        KubeConfigError: No API server is configured, or its certificates cannot be read.
    """
    async with KubeClient(await asyncio.to_thread(load_endpoint, settings), clock=clock or SystemClock()) as client:
        yield client


class KubeClient(KubeApi):
    """Calls an API server; connections are reused. An async context manager."""

    def __init__(self, endpoint: Endpoint, *, clock: Clock, silence_s: float = _SILENCE_S) -> None:
        self._endpoint, self._clock, self._silence_s = endpoint, clock, silence_s
        self._calls: aiohttp.ClientSession | None = None
        self._watches: aiohttp.ClientSession | None = None
        self._renewing = asyncio.Lock()

    async def __aenter__(self) -> "KubeClient":
        self._calls = self._session(_CONNECTIONS, aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S))
        self._watches = self._session(0, aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self._silence_s))
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in (self._calls, self._watches):
            if session is not None:
                await session.close()
        self._calls = self._watches = None

    def _session(self, limit: int, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        tls: ssl.SSLContext | bool = self._endpoint.tls or True
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limit, ssl=tls),
            timeout=timeout,
            headers={"User-Agent": "carpool"},
            auto_decompress=True,
        )

    @property
    def namespace(self) -> str:
        """Namespace of the kubeconfig's context or of the pod."""
        return self._endpoint.namespace

    async def get(self, kind: ResourceKind, name: str, type_: type[T], *, namespace: str = "") -> T:
        """Read one object; unknown fields are ignored. Raises `Invalid` where it does not fit `type_`."""
        body = await self._call("GET", kind, name=required(kind, name), namespace=namespace)
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.ValidationError as error:
            raise Invalid(f"{call_name('GET', kind, namespace, name)}: unexpected object: {error}") from error

    async def list_page(
        self, kind: ResourceKind, selector: Selector, *, limit: int = 500, continue_token: str = ""
    ) -> Page:
        """Read one page. Raises `Gone` where the token has expired."""
        query = {"limit": str(limit), "continue": continue_token}
        body = await self._call("GET", kind, namespace=selector.namespace, query=query | selector_query(selector))
        found = msgspec.json.decode(body, type=ObjectList)
        return Page(found.items or [], found.metadata.resource_version, found.metadata.continue_)

    async def watch(self, kind: ResourceKind, selector: Selector, resource_version: str) -> AsyncIterator[WatchEvent]:
        """Follow changes, bookmarks included. Raises `Unreachable` after silence, `Gone` for too old a version."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(_WATCH_LIFETIME_S),
        } | selector_query(selector)
        what = call_name("WATCH", kind, selector.namespace, "")
        try:
            async with self._open(self._watches, "GET", kind, namespace=selector.namespace, query=query) as response:
                await self._check(response, what)
                try:
                    async for line in lines(response.content):
                        yield event(line, what)
                finally:
                    _abort(response)
        except TimeoutError as error:
            raise Unreachable(f"{what}: no word from the API server for {self._silence_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{what}: the connection broke: {error}") from error
        except msgspec.DecodeError as error:
            raise Unreachable(f"{what}: expected one JSON event on each line: {error}") from error

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
    ) -> dict[str, Any]:
        """Create an object, or post to a subresource of an existing one. Unknown fields are refused with `Invalid`."""
        content = msgspec.to_builtins(body)
        if not subresource:
            content = {"apiVersion": group_version(kind), "kind": kind.kind} | content
        return object_of(
            await self._call(
                "POST",
                kind,
                name=name,
                namespace=namespace,
                subresource=subresource,
                # A user's misspelt field in a pod template would otherwise vanish without a word.
                query={"fieldValidation": "Strict", "dryRun": "All" if is_dry_run else ""},
                body=content,
                accept=_OBJECT if wants_object else _METADATA,
            )
        )

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        patch: Mapping[str, Any] | list[Mapping[str, Any]],
        *,
        namespace: str = "",
        subresource: str = "",
        wants_object: bool = True,
    ) -> dict[str, Any]:
        """Patch an object: a mapping as a merge patch, a list as a JSON patch."""
        return object_of(
            await self._call(
                "PATCH",
                kind,
                name=required(kind, name),
                namespace=namespace,
                subresource=subresource,
                # To look for fields that it does not know costs the server time, and nobody hears of them.
                query={"fieldValidation": "Ignore"},
                body=patch,
                accept=_OBJECT if wants_object else _METADATA,
                content_type=f"application/{'json' if isinstance(patch, list) else 'merge'}-patch+json",
            )
        )

    async def replace_status(
        self, kind: ResourceKind, name: str, status: Mapping[str, Any], *, namespace: str = "", resource_version: str
    ) -> dict[str, Any]:
        """Replace an object's status as a whole; `Conflict` where the object has changed since."""
        metadata = {"name": name, "resourceVersion": resource_version} | ({"namespace": namespace} if namespace else {})
        body = {"apiVersion": group_version(kind), "kind": kind.kind, "metadata": metadata, "status": status}
        return object_of(
            await self._call(
                "PUT",
                kind,
                name=required(kind, name),
                namespace=namespace,
                subresource="status",
                query={"fieldValidation": "Ignore"},
                body=body,
                accept=_METADATA,
            )
        )

    async def delete(self, kind: ResourceKind, name: str, *, namespace: str = "", uid: str = "") -> None:
        """Delete an object; its dependents follow in the background. With `uid`, only that very one."""
        options: dict[str, Any] = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        await self._call("DELETE", kind, name=required(kind, name), namespace=namespace, body=options)

    async def _call(
        self,
        method: str,
        kind: ResourceKind,
        *,
        name: str = "",
        namespace: str = "",
        subresource: str = "",
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = _OBJECT,
    ) -> bytes:
        what = call_name(method, kind, namespace, name, subresource)
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._open(
                self._calls, method, kind, name=name, namespace=namespace, subresource=subresource, query=query or {},
                data=data, content_type=content_type, accept=accept,
            ) as response:  # fmt: skip
                await self._check(response, what)
                return await response.read()
        except TimeoutError as error:
            raise Unreachable(f"{what}: no answer from {self._endpoint.server} in {_CALL_TIMEOUT_S:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{what}: cannot reach {self._endpoint.server}: {error}") from error

    @asynccontextmanager
    async def _open(
        self,
        session: aiohttp.ClientSession | None,
        method: str,
        kind: ResourceKind,
        *,
        name: str = "",
        namespace: str = "",
        subresource: str = "",
        query: Mapping[str, str],
        data: bytes | None = None,
        content_type: str = "application/json",
        accept: str = _OBJECT,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if session is None:
            raise RuntimeError("the client is closed: use it inside `async with connect(…)`")
        headers = {"Accept": accept} | ({"Content-Type": content_type} if data is not None else {})
        if token := await self._bearer():
            headers["Authorization"] = f"Bearer {token}"
        url = self._endpoint.server + path_of(kind, namespace, name, subresource)
        params = {key: value for key, value in query.items() if value}
        async with session.request(method, url, params=params, data=data, headers=headers) as response:
            yield response

    async def _bearer(self) -> str:
        """Return the token; what reads it anew may ask somebody, and must not hold up whatever else goes on."""
        token = self._endpoint.token
        if token.is_due(self._clock.monotonic()):
            async with self._renewing:
                if token.is_due(self._clock.monotonic()):
                    await asyncio.to_thread(token.at, self._clock.monotonic())
        return token.at(self._clock.monotonic())

    async def _check(self, response: aiohttp.ClientResponse, what: str) -> None:
        if response.status < 400:
            return
        if response.status == 401:
            self._endpoint.token.forget()
        body = await response.read()
        try:
            said = msgspec.json.decode(body, type=Status)
        except msgspec.DecodeError:
            said = Status(message=body.decode(errors="replace")[:500].strip())
        message = said.message or response.reason or f"HTTP status {response.status}"
        raise error_for(response.status, what, message, said.reason)


def _abort(response: aiohttp.ClientResponse) -> None:
    """Break a connection off without TLS's farewell: nobody waits for it, and it would outlive the client."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
