"""The client against a small HTTP server that answers as the API server does."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from carpool_core.kube.api import GPU_NODES, PODS, Selector
from carpool_core.kube.client import KubeClient
from carpool_core.kube.config import Endpoint, Token
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
from carpool_core.kube.pods import Pod
from carpool_core.metrics import ApiMetrics
from carpool_core.resources.node import GpuNode, ObjectMeta
from carpool_core.testing.clock import FakeClock
from prometheus_client import CollectorRegistry

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Start = Callable[..., Awaitable[KubeClient]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    opened: list[Any] = []

    async def begin(handler: Handler, token: str = "", silence_s: float = 5.0) -> KubeClient:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        server = TestServer(app)
        await server.start_server()
        endpoint = Endpoint(str(server.make_url("")).rstrip("/"), None, Token(lambda _: token))
        client = KubeClient(endpoint, clock=FakeClock(), silence_s=silence_s)
        await client.__aenter__()
        opened.extend([server, client])
        return client

    yield begin
    for one in reversed(opened):
        await (one.close() if isinstance(one, TestServer) else one.__aexit__())


def _answers(status: int, body: object) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text)

    return handler


def _recording(seen: list[tuple[str, str, str, Any]]) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        text = await request.text()
        content_type = request.headers.get("Content-Type", "")
        seen.append((request.method, request.path_qs, content_type, json.loads(text) if text else None))
        return web.json_response({})

    return handler


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Invalid), (401, Forbidden), (403, Forbidden), (404, NotFound), (405, Refused), (409, Conflict), (410, Gone),
     (422, Invalid), (429, Overloaded), (500, Overloaded), (503, Overloaded), (504, Overloaded)],
)  # fmt: skip
async def test_status_code_decides_the_error_type(start: Start, status: int, kind: type[KubeError]) -> None:
    client = await start(_answers(status, {"kind": "Status", "message": "because of this", "reason": "Because"}))
    with pytest.raises(kind) as caught:
        await client.patch(GPU_NODES, "n1", {}, subresource="status")
    assert type(caught.value) is kind
    assert str(caught.value) == "PATCH gpunodes/status n1: because of this"
    assert (caught.value.status, caught.value.reason) == (status, "Because")


async def test_error_without_status_object_keeps_its_text(start: Start) -> None:
    client = await start(_answers(502, "<html>bad gateway</html>"))
    with pytest.raises(Overloaded, match="GET pods default/a: <html>bad gateway</html>"):
        await client.get(PODS, "a", Pod, namespace="default")


async def test_unreachable_server_is_retryable() -> None:
    async with KubeClient(Endpoint("http://127.0.0.1:9", None, Token()), clock=FakeClock()) as client:
        with pytest.raises(Unreachable, match=r"cannot reach http://127\.0\.0\.1:9"):
            await client.get(PODS, "a", Pod, namespace="default")
        with pytest.raises(Unreachable, match="WATCH pods: the connection broke"):
            await anext(client.watch(PODS, Selector(), "1"))


async def test_closed_client_names_its_context_manager() -> None:
    client = KubeClient(Endpoint("http://127.0.0.1:9", None, Token()), clock=FakeClock())
    with pytest.raises(RuntimeError, match="async with connect"):
        await client.get(PODS, "a", Pod)


@pytest.mark.parametrize("segment", ["../x", "..", ".", "a/b", "a%2fb", "a?watch=1", "a#b"])
@pytest.mark.parametrize("where", ["namespace", "name", "subresource"])
async def test_name_cannot_change_the_path(start: Start, where: str, segment: str) -> None:
    seen: list[tuple[str, str, str, Any]] = []
    client = await start(_recording(seen))
    with pytest.raises(Invalid, match=f"expected a {where} of pods without any of"):
        await client.patch(PODS, **({"name": "a", "patch": {}, "namespace": "d"} | {where: segment}))
    assert seen == []


async def test_empty_name_is_refused(start: Start) -> None:
    seen: list[tuple[str, str, str, Any]] = []
    client = await start(_recording(seen))
    for call in (
        client.get(PODS, "", Pod, namespace="d"),
        client.patch(PODS, "", {}, namespace="d"),
        client.delete(PODS, "", namespace="d"),
        client.create(PODS, {}, namespace="d", subresource="binding"),
    ):
        with pytest.raises(Invalid, match="expected the name of"):
            await call
    assert seen == []


async def test_writes_use_the_right_verb_path_and_body(start: Start) -> None:
    seen: list[tuple[str, str, str, Any]] = []
    client = await start(_recording(seen))
    await client.create(GPU_NODES, GpuNode(metadata=ObjectMeta(name="n1")))
    await client.create(PODS, {"target": {"name": "n1"}}, namespace="d", name="a", subresource="binding")
    await client.patch(GPU_NODES, "n1", {"spec": {"reservations": []}})
    await client.patch(PODS, "a", [{"op": "test", "path": "/x", "value": 1}], namespace="d")
    await client.delete(PODS, "a", namespace="d", uid="u1", resource_version="7")
    jobs, binding, merge, patch, delete = seen
    body = {"apiVersion": "carpool.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "n1"}}
    assert jobs == ("POST", "/apis/carpool.dev/v1alpha1/gpunodes?fieldValidation=Strict", "application/json", body)
    assert binding[1].startswith("/api/v1/namespaces/d/pods/a/binding")
    assert binding[3] == {"target": {"name": "n1"}}
    assert merge[2:] == ("application/merge-patch+json", {"spec": {"reservations": []}})
    assert patch[2:] == ("application/json-patch+json", [{"op": "test", "path": "/x", "value": 1}])
    assert delete[3] == {"propagationPolicy": "Background", "preconditions": {"uid": "u1", "resourceVersion": "7"}}


async def test_token_is_sent(start: Start) -> None:
    sent: list[str | None] = []

    async def handler(request: web.Request) -> web.Response:
        sent.append(request.headers.get("Authorization"))
        return web.json_response({"message": "Unauthorized"}, status=401)

    client = await start(handler, token="secret")
    with pytest.raises(Forbidden):
        await client.get(PODS, "a", Pod, namespace="d")
    assert sent == ["Bearer secret"]


async def test_get_ignores_unknown_fields(start: Start) -> None:
    pod = {"metadata": {"name": "a", "managedFields": [1]}, "spec": {"nodeName": "n1", "volumes": [{}]}}
    client = await start(_answers(200, pod))
    assert (await client.get(PODS, "a", Pod, namespace="d")).spec.node_name == "n1"


async def test_get_of_a_malformed_object_is_invalid(start: Start) -> None:
    client = await start(_answers(200, {"metadata": {"name": 7}}))
    with pytest.raises(Invalid, match=r"GET pods d/a: unexpected object: .*metadata.name"):
        await client.get(PODS, "a", Pod, namespace="d")


async def test_list_page_sends_selectors_and_token(start: Start) -> None:
    seen: list[tuple[str, str, str, Any]] = []
    recording = _recording(seen)

    async def handler(request: web.Request) -> web.StreamResponse:
        await recording(request)
        return web.json_response({"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"a": 1}]})

    client = await start(handler)
    page = await client.list_page(PODS, Selector("d", "app=x", "spec.nodeName=n"), limit=9, continue_token="t")
    path, _, query = seen[0][1].partition("?")
    assert path == "/api/v1/namespaces/d/pods"
    assert query == "limit=9&continue=t&labelSelector=app%3Dx&fieldSelector=spec.nodeName%3Dn"
    assert (page.resource_version, page.continue_token, [bytes(i) for i in page.items]) == ("7", "more", [b'{"a": 1}'])


def _streams(*chunks: bytes, hold: bool = False) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if hold:
            await asyncio.Event().wait()
        return response

    return handler


def _line(type_: str, item: object) -> bytes:
    return json.dumps({"type": type_, "object": item}).encode() + b"\n"


async def test_watch_joins_chunks_to_lines_of_any_length(start: Start) -> None:
    long = {"metadata": {"name": "x" * 300_000}}
    text = _line("ADDED", {"metadata": {}}) + _line("MODIFIED", long) + _line("BOOKMARK", {})
    client = await start(_streams(text[:10], text[10:90], text[90:200_000], text[200_000:]))
    events = [event async for event in client.watch(PODS, Selector(), "5")]
    assert [event.type for event in events] == ["ADDED", "MODIFIED", "BOOKMARK"]
    assert json.loads(bytes(events[1].object)) == long


async def test_watch_requests_bookmarks_and_a_timeout(start: Start) -> None:
    seen: list[tuple[str, str, str, Any]] = []
    client = await start(_recording(seen))
    assert [event async for event in client.watch(GPU_NODES, Selector(), "5")] == []
    assert seen[0][1].endswith("?watch=1&allowWatchBookmarks=true&resourceVersion=5&timeoutSeconds=300")


EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 5 (9)"}


@pytest.mark.parametrize(
    ("handler", "kind", "message"),
    [
        pytest.param(_streams(b"surprise\n"), Unreachable, "expected one JSON event on each line", id="malformed"),
        pytest.param(_streams(_line("ERROR", EXPIRED)), Gone, "WATCH pods: too old resource version", id="error event"),
        pytest.param(_answers(403, {"message": "pods is forbidden"}), Forbidden, "pods is forbidden", id="refused"),
    ],
)
async def test_watch_that_fails_raises_its_type(
    start: Start, handler: Handler, kind: type[KubeError], message: str
) -> None:
    client = await start(handler)
    with pytest.raises(kind, match=message):
        await anext(client.watch(PODS, Selector(), "5"))


async def test_silent_watch_is_unreachable(start: Start) -> None:
    client = await start(_streams(_line("ADDED", {}), hold=True), silence_s=0.05)
    watch = client.watch(PODS, Selector(), "5")
    assert (await anext(watch)).type == "ADDED"
    with pytest.raises(Unreachable, match="the API server sent nothing for"):
        await anext(watch)


async def test_watch_can_be_cancelled(start: Start) -> None:
    client = await start(_streams(_line("ADDED", {}), hold=True))
    watch = client.watch(PODS, Selector(), "5")
    await anext(watch)
    await watch.aclose()  # type: ignore[attr-defined]
    waiting = asyncio.create_task(anext(client.watch(PODS, Selector(namespace="other"), "5")))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_broken_connection_ends_the_watch(start: Start) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(_line("ADDED", {}))
        assert request.transport is not None
        request.transport.abort()
        return response

    client = await start(handler)
    with pytest.raises(Unreachable, match="the connection broke"):
        _ = [event async for event in client.watch(PODS, Selector(), "5")]


async def test_calls_are_measured_by_verb_and_failures_by_status(start: Start) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/gone") or "watch" in request.query:
            return web.Response(status=410, text="{}")
        return web.Response(text='{"metadata": {"name": "n"}, "items": []}')

    client, registry = await start(handler), CollectorRegistry()
    client.metrics = ApiMetrics(registry)
    await client.list_page(PODS, Selector())
    await client.patch(PODS, "p", {}, namespace="n")
    with pytest.raises(Gone):
        await client.get(GPU_NODES, "gone", GpuNode)
    with pytest.raises(Gone):
        await anext(client.watch(PODS, Selector(), "1"))
    answered = {
        verb: registry.get_sample_value("carpool_api_request_seconds_count", {"verb": verb})
        for verb in ("list", "patch", "get", "watch")
    }
    assert answered == {"list": 1, "patch": 1, "get": 1, "watch": None}, "a watch lasts for minutes"
    for verb in ("get", "watch"):
        assert registry.get_sample_value("carpool_api_errors_total", {"verb": verb, "status": "410"}) == 1
    await client.__aexit__()
    client._endpoint = Endpoint("http://127.0.0.1:1", None, Token(lambda _: ""))
    async with client:
        with pytest.raises(Unreachable):
            await client.delete(PODS, "p", namespace="n")
    assert registry.get_sample_value("carpool_api_errors_total", {"verb": "delete", "status": "0"}) == 1
