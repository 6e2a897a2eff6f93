"""`KubeApi` over aiohttp and msgspec."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from carpool_core.clock import Clock, SystemClock
from carpool_core.kube.api import PODS, EventType, KubeApi, Page, ResourceKind, Selector, WatchEvent
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

if TYPE_CHECKING:
    from carpool_core.metrics import ApiMetrics  # commands without metrics start sooner without its library

T = TypeVar("T")

_CALL_TIMEOUT_S = 30.0
_WATCH_LIFETIME_S = 300
"""The server ends a watch after this time; a new one then goes through authentication again."""
_SILENCE_S = 150.0
"""A watch without data for this time is broken: the server sends a bookmark about each minute."""
_DATE_NOISE_S = 1.0
"""Differences below this are rounding of the `Date` header and the time on the way."""
_OBJECT = "application/json"
_METADATA = f"{_OBJECT};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_UNCHECKED = {"fieldValidation": "Ignore"}
"""Query of writes whose unknown fields are not reported, because looking for them costs the server time."""
_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
"""Method of a call → Kubernetes' verb, as rights have it."""
_CONNECTIONS = 32
"""Concurrent calls. Watches have their own connections, so that they cannot starve calls."""


@asynccontextmanager
async def connect(settings: KubeSettings, *, clock: Clock | None = None) -> AsyncIterator["KubeClient"]:
    """Open a client for the configured API server.

    Raises:
        KubeConfigError: No API server is configured, or its certificates or credentials cannot be read.
    """
    async with KubeClient(await asyncio.to_thread(load_endpoint, settings), clock=clock or SystemClock()) as client:
        yield client


class KubeClient(KubeApi):
    """Client of one API server with reused connections. An async context manager."""

    def __init__(self, endpoint: Endpoint, *, clock: Clock, silence_s: float = _SILENCE_S) -> None:
        self._endpoint, self._clock, self._silence_s = endpoint, clock, silence_s
        self._calls: aiohttp.ClientSession | None = None
        self._watches: aiohttp.ClientSession | None = None
        self._token_lock = asyncio.Lock()
        self._server_ahead_s = 0.0
        self.metrics: ApiMetrics | None = None
        """Measures calls; None in processes without metrics."""

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
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limit, ssl=self._endpoint.tls or True),
            timeout=timeout,
            headers={"User-Agent": "carpool"},
            auto_decompress=True,
        )

    @property
    def namespace(self) -> str:
        """Namespace of the kubeconfig's context or of the pod."""
        return self._endpoint.namespace

    @property
    def server_ahead_s(self) -> float:
        """Seconds by which the server's clock is ahead of this machine's, by the `Date` of its answers."""
        return self._server_ahead_s

    async def get(self, kind: ResourceKind, name: str, type_: type[T], *, namespace: str = "") -> T:
        """Return one object; unknown fields are ignored. Raises `Invalid` if it does not fit `type_`."""
        body = await self._call("GET", _object(kind, namespace, name))
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.ValidationError as error:
            raise Invalid(f"{describe_call('GET', kind, namespace, name)}: unexpected object: {error}") from error

    async def list_page(
        self, kind: ResourceKind, selector: Selector, *, limit: int = 500, continue_token: str = ""
    ) -> Page:
        """Return one page. Raises `Gone` if the token has expired."""
        query = {"limit": str(limit), "continue": continue_token} | _query(selector)
        body = await self._call("GET", _Target(kind, selector.namespace), query=query)
        found = msgspec.json.decode(body, type=_ObjectList)
        return Page(found.items or [], found.metadata.resource_version, found.metadata.continue_)

    async def watch(self, kind: ResourceKind, selector: Selector, resource_version: str) -> AsyncIterator[WatchEvent]:
        """Yield changes and bookmarks. Raises `Unreachable` after silence, `Gone` if the version is too old."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(_WATCH_LIFETIME_S),
        } | _query(selector)
        target = _Target(kind, selector.namespace)
        call = describe_call("WATCH", *target)
        with self._failures_of("watch"):
            try:
                async with self._open(self._watches, "GET", target, query) as response:
                    await self._check(response, call)
                    try:
                        async for line in _lines(response.content):
                            yield _watch_event(line, call)
                    finally:
                        _abort(response)
            except TimeoutError as error:
                raise Unreachable(f"{call}: the API server sent nothing for {self._silence_s:.0f} s") from error
            except (aiohttp.ClientError, OSError) as error:
                raise Unreachable(f"{call}: the connection broke: {error}") from error
            except msgspec.DecodeError as error:
                raise Unreachable(f"{call}: expected one JSON event on each line: {error}") from error

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
        """Create an object, or post to a subresource of an existing one. Raises `Invalid` on unknown fields."""
        content = msgspec.to_builtins(body)
        if not subresource:
            content = {"apiVersion": kind.api_version, "kind": kind.kind} | content
        target = _object(kind, namespace, name, subresource) if subresource else _Target(kind, namespace)
        # Otherwise the server silently drops a misspelt field of a user's pod template.
        query = {"fieldValidation": "Strict", "dryRun": "All" if is_dry_run else ""}
        return _decoded(
            await self._call("POST", target, query=query, body=content, accept=_OBJECT if wants_object else _METADATA)
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
        """Patch an object: a mapping is a merge patch, a list a JSON patch."""
        return _decoded(
            await self._call(
                "PATCH",
                _object(kind, namespace, name, subresource),
                query=_UNCHECKED,
                body=patch,
                accept=_OBJECT if wants_object else _METADATA,
                content_type=f"application/{'json' if isinstance(patch, list) else 'merge'}-patch+json",
            )
        )

    async def replace_status(
        self, kind: ResourceKind, name: str, status: Mapping[str, Any], *, namespace: str = "", resource_version: str
    ) -> dict[str, Any]:
        """Replace an object's status; `Conflict` if the object has changed since."""
        metadata = {"name": name, "resourceVersion": resource_version} | ({"namespace": namespace} if namespace else {})
        body = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "status": status}
        target = _object(kind, namespace, name, "status")
        return _decoded(await self._call("PUT", target, query=_UNCHECKED, body=body, accept=_METADATA))

    async def logs(
        self, pod: str, *, namespace: str, container: str, is_followed: bool = False, tail_lines: int | None = None
    ) -> AsyncIterator[str]:
        """Yield the lines of a container's log; with `is_followed` until it ends. Raises `Invalid` before it starts."""
        target, rest = _object(PODS, namespace, pod, "log"), b""
        call = describe_call("GET", *target)
        tail = "" if tail_lines is None else str(tail_lines)
        query = {"container": container, "follow": "true" if is_followed else "", "tailLines": tail}
        quiet = aiohttp.ClientTimeout(total=None, sock_connect=10)  # a training may write nothing for hours
        try:
            async with self._open(self._watches, "GET", target, query, {"Accept": "*/*"}, limits=quiet) as response:
                await self._check(response, call)
                async for chunk in response.content.iter_any():
                    *whole, rest = (rest + chunk).split(b"\n")
                    for line in whole:
                        yield line.decode(errors="replace")
                if rest:
                    yield rest.decode(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{call}: the connection broke: {error}") from error

    async def delete(
        self, kind: ResourceKind, name: str, *, namespace: str = "", uid: str = "", resource_version: str = ""
    ) -> None:
        """Delete an object, its dependents in the background; `Conflict` if it has another UID or version."""
        given = {"uid": uid, "resourceVersion": resource_version}
        options = {"propagationPolicy": "Background", "preconditions": {key: one for key, one in given.items() if one}}
        await self._call("DELETE", _object(kind, namespace, name), body=options)

    async def _call(
        self,
        method: str,
        target: "_Target",
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = _OBJECT,
        accept: str = _OBJECT,
    ) -> bytes:
        call = describe_call(method, *target)
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Accept": accept} | ({} if data is None else {"Content-Type": content_type})
        verb = "list" if method == "GET" and not target.name else _VERBS[method]
        began = self._clock.monotonic()
        with self._failures_of(verb):
            try:
                async with self._open(self._calls, method, target, query or {}, headers, data) as response:
                    answer = await response.read()
                    if self.metrics is not None:
                        self.metrics.answered(verb, self._clock.monotonic() - began)
                    await self._check(response, call)
                    return answer
            except TimeoutError as error:
                no_answer = f"no answer from {self._endpoint.server} in {_CALL_TIMEOUT_S:.0f} s"
                raise Unreachable(f"{call}: {no_answer}") from error
            except (aiohttp.ClientError, OSError) as error:
                raise Unreachable(f"{call}: cannot reach {self._endpoint.server}: {error}") from error

    @contextmanager
    def _failures_of(self, verb: str) -> Iterator[None]:
        try:
            yield
        except KubeError as error:
            if self.metrics is not None:
                self.metrics.failed(verb, error.status)
            raise

    @asynccontextmanager
    async def _open(
        self,
        session: aiohttp.ClientSession | None,
        method: str,
        target: "_Target",
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
        limits: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if session is None:
            raise RuntimeError("the client is closed: use it inside `async with connect(…)`")
        token = await self._token()
        authorized = {**(headers or {"Accept": _OBJECT}), **({"Authorization": f"Bearer {token}"} if token else {})}
        url = self._endpoint.server + url_path(*target)
        params = {key: value for key, value in query.items() if value}
        timeout = limits or session.timeout
        call = session.request(method, url, params=params, data=data, headers=authorized, timeout=timeout)
        async with call as response:
            self._note_date(response.headers.get("Date", ""))
            yield response

    def _note_date(self, date: str) -> None:
        """Compare the clocks. `Date` has whole seconds, so smaller changes of the difference are noise."""
        try:
            ahead_s = (parsedate_to_datetime(date) - self._clock.now()).total_seconds() + 0.5
        except (ValueError, TypeError):
            return
        if abs(ahead_s - self._server_ahead_s) > _DATE_NOISE_S:
            self._server_ahead_s = ahead_s

    async def _token(self) -> str:
        """Return the token; rereads it in a thread, because an exec plugin may block."""
        token = self._endpoint.token
        if token.is_due(self._clock.monotonic()):
            async with self._token_lock:
                if token.is_due(self._clock.monotonic()):
                    await asyncio.to_thread(token.at, self._clock.monotonic())
        return token.at(self._clock.monotonic())

    async def _check(self, response: aiohttp.ClientResponse, call: str) -> None:
        if response.status < 400:
            return
        if response.status == 401:
            self._endpoint.token.forget()
        body = await response.read()
        try:
            status = msgspec.json.decode(body, type=_Status)
        except msgspec.DecodeError:
            status = _Status(message=body.decode(errors="replace")[:500].strip())
        message = status.message or response.reason or f"HTTP status {response.status}"
        raise error_for(response.status, call, message, status.reason)


def _abort(response: aiohttp.ClientResponse) -> None:
    """Close a connection without TLS's closing handshake, which would outlive the client."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


# The wire: paths, lists, watch lines, errors


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _ObjectList(msgspec.Struct, frozen=True):
    metadata: _ListMeta = _ListMeta()
    items: list[msgspec.Raw] | None = None


class _Status(msgspec.Struct, frozen=True):
    """A `metav1.Status`."""

    message: str = ""
    reason: str = ""
    code: int = 0


class _WatchLine(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


_ERROR_TYPES: dict[int, type[KubeError]] = {
    400: Invalid, 401: Forbidden, 403: Forbidden, 404: NotFound, 409: Conflict, 410: Gone, 422: Invalid,
    429: Overloaded,
}  # fmt: skip


def error_for(status: int, call: str, server_message: str, reason: str = "") -> KubeError:
    """Return the error of an HTTP status, whose type decides whether to retry."""
    kind = _ERROR_TYPES.get(status, Overloaded if status >= 500 else Refused)
    return kind(f"{call}: {server_message}", status=status, reason=reason, server_message=server_message)


_RESERVED_CHARACTERS = frozenset("/%?#")


def url_path(kind: ResourceKind, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """Return the URL path of a collection, an object or a subresource.

    Raises:
        Invalid: A part would change the path, as a name in a forged owner reference may.
    """
    for what, segment in (("namespace", namespace), ("name", name), ("subresource", subresource)):
        if segment in (".", "..") or not _RESERVED_CHARACTERS.isdisjoint(segment):
            raise Invalid(
                f"expected a {what} of {kind.plural} without any of / % ? #, and not . or .., found {segment!r}"
            )
    root = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
    inside = f"/namespaces/{namespace}" if kind.namespaced and namespace else ""
    return root + inside + "".join(f"/{part}" for part in (kind.plural, name, subresource) if part)


class _Target(NamedTuple):
    """Collection, object or subresource that a call addresses."""

    kind: ResourceKind
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def _object(kind: ResourceKind, namespace: str, name: str, subresource: str = "") -> _Target:
    """Return the target of an object. Raises `Invalid` without a name, which would address all objects of the kind."""
    if not name:
        raise Invalid(f"expected the name of a {kind.kind}, found an empty string")
    return _Target(kind, namespace, name, subresource)


def describe_call(method: str, kind: ResourceKind, namespace: str, name: str = "", subresource: str = "") -> str:
    """Return a call for messages: `PATCH gpunodes/status n1`."""
    target = f"{namespace}/{name}".strip("/")
    return f"{method} {kind.plural}{'/' if subresource else ''}{subresource} {target}".rstrip()


def _query(selector: Selector) -> dict[str, str]:
    return {"labelSelector": selector.labels, "fieldSelector": selector.fields}


def _decoded(body: bytes) -> dict[str, Any]:
    return msgspec.json.decode(body, type=dict[str, Any])


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream. aiohttp's own reader refuses lines over 128 KiB."""
    rest: list[bytes] = []
    async for chunk in content.iter_any():
        *whole, last = chunk.split(b"\n")
        for line in whole:
            if text := b"".join((*rest, line)):
                yield text
            rest = []
        if last:
            rest.append(last)


def _watch_event(line: bytes, call: str) -> WatchEvent:
    """Return the event of a watch line. Raises the error of an ERROR line."""
    found = msgspec.json.decode(line, type=_WatchLine)
    if found.type == "ERROR":
        status = msgspec.json.decode(found.object, type=_Status)
        raise error_for(status.code, call, status.message, status.reason)
    return WatchEvent(msgspec.convert(found.type, EventType), found.object)
