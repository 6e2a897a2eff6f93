"""HTTP: routes, limits on bodies, and errors that say what was expected, what was found, and what to do."""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from carpool_extender.kube.wire import BindingArgs, ExtenderArgs, PreemptionArgs
from carpool_extender.serving.service import BadRequest, Service
from carpool_extender.telemetry import Telemetry

A = TypeVar("A")

MAX_BODY = 4 * 1024 * 1024
"""Bytes of a request's body. kube-scheduler sends one pod and node names: 5,000 nodes make 0.3 MB."""
VERBS = ("filter", "prioritize", "bind", "preempt")
_JSON = "application/json"


class _Answer(Exception):  # noqa: N818  # ends a request early with its answer
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.body = _error(status, message)


class _Verb(Generic[A]):
    """One verb as a bare ASGI application: what a framework does besides for a request costs more than a decision.

    Args:
        name: The verb.
        type_: What its arguments are.
        act: Answers them.
        telemetry: Measures requests.
        not_ready: None once the verb can answer, otherwise the reason.
    """

    def __init__(
        self,
        name: str,
        type_: type[A],
        act: Callable[[A], Awaitable[Any]],
        telemetry: Telemetry,
        not_ready: Callable[[], str | None],
    ) -> None:
        self._name, self._act, self._telemetry, self._not_ready = name, act, telemetry, not_ready
        self._decoder, self._encoder = msgspec.json.Decoder(type_), msgspec.json.Encoder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        with self._telemetry.request(self._name):
            status, body = await self._answer(scope, receive)
        headers = [(b"content-type", _JSON.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        try:
            if (reason := self._not_ready()) is not None:
                return _error(503, reason)
            args = _decode(self._decoder, await _body(scope, receive), self._name)
            return 200, self._encoder.encode(await self._act(args))
        except BadRequest as refusal:
            return _error(400, str(refusal))
        except _Answer as answer:
            return answer.status, answer.body


def create_app(service: Service, telemetry: Telemetry, not_ready: Callable[[], str | None]) -> Starlette:
    """Build the ASGI application.

    Args:
        service: The verbs.
        telemetry: Measures requests.
        not_ready: None once every verb can answer, otherwise the reason.
    """
    verbs: tuple[ASGIApp, ...] = (
        _Verb("filter", ExtenderArgs, service.filter, telemetry, not_ready),
        _Verb("prioritize", ExtenderArgs, service.prioritize, telemetry, not_ready),
        _Verb("bind", BindingArgs, service.bind, telemetry, not_ready),
        _Verb("preempt", PreemptionArgs, service.preempt, telemetry, not_ready),
    )
    routes = [Route(f"/{name}", verb, methods=["POST"]) for name, verb in zip(VERBS, verbs, strict=True)]
    return Starlette(routes=routes, exception_handlers={404: _unknown, 405: _wrong_method})


async def _unknown(request: Request, _: Exception) -> Response:
    path = request.url.path
    return _response(404, f"expected a POST to /{', /'.join(VERBS)}, found {path}; check urlPrefix and the verbs")


async def _wrong_method(request: Request, _: Exception) -> Response:
    return _response(405, f"expected a POST to a verb (/{', /'.join(VERBS)}), found {request.method}")


def _response(status: int, message: str) -> Response:
    return Response(_error(status, message)[1], status, media_type=_JSON)


def _error(status: int, message: str) -> tuple[int, bytes]:
    # `Error` as in the protocol's own answers, so that whoever reads the body finds the sentence where it always is.
    return status, msgspec.json.encode({"Error": message})


async def _body(scope: Scope, receive: Receive) -> bytes:
    """Read the body, no more of it than is allowed, whatever its Content-Length says."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if declared.isdigit() and int(declared) > MAX_BODY:
        raise _too_large(int(declared))
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size, more = size + len(chunk), message.get("more_body", False)
        if size > MAX_BODY:
            raise _too_large(size)
    return b"".join(chunks)


def _too_large(size: int) -> _Answer:
    return _Answer(
        413,
        f"expected a body of at most {MAX_BODY:,} bytes, found {size:,} or more; "
        "set nodeCacheCapable: true, so that the scheduler sends names instead of whole nodes",
    )


def _decode(decoder: msgspec.json.Decoder[A], body: bytes, verb: str) -> A:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _Answer(400, f"expected the arguments of {verb} (k8s.io/kube-scheduler/extender/v1): {error}") from error
    except msgspec.DecodeError as error:
        found = body[:60].decode("utf-8", "replace")
        raise _Answer(400, f"expected JSON with the arguments of {verb}, found {found!r}: {error}") from error
