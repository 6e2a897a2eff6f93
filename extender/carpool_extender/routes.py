"""HTTP: routes, limits on bodies, and errors that say what was expected, what was found, and what to do."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from carpool_extender.service import BadRequest, Service
from carpool_extender.telemetry import Telemetry
from carpool_extender.wire import BindingArgs, ExtenderArgs, PreemptionArgs

A = TypeVar("A")

MAX_BODY = 4 * 1024 * 1024
"""Bytes of a request's body. kube-scheduler sends one pod and node names: 5,000 nodes make 0.3 MB."""
VERBS = ("filter", "prioritize", "bind", "preempt")
_JSON = "application/json"


class _Answer(Exception):  # noqa: N818  # ends a request early with its answer
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.response = _error(status, message)


def create_app(service: Service, telemetry: Telemetry, not_ready: Callable[[], str | None]) -> FastAPI:
    """Build the ASGI application.

    Args:
        service: The verbs.
        telemetry: Measures requests.
        not_ready: None once every verb can answer, otherwise the reason.
    """
    app = FastAPI(title="Carpool scheduler extender", openapi_url=None, docs_url=None, redoc_url=None)

    def serve(verb: str, type_: type[A], act: Callable[[A], Awaitable[Any]]) -> None:
        decoder = msgspec.json.Decoder(type_)

        async def handle(request: Request) -> Response:
            with telemetry.request(verb):
                try:
                    _refuse_until_ready(not_ready)
                    args = _decode(decoder, await _body(request), verb)
                    return Response(msgspec.json.encode(await act(args)), media_type=_JSON)
                except BadRequest as refusal:
                    return _error(400, str(refusal))
                except _Answer as answer:
                    return answer.response

        app.add_api_route(f"/{verb}", handle, methods=["POST"], response_model=None)

    serve("filter", ExtenderArgs, service.filter)
    serve("prioritize", ExtenderArgs, service.prioritize)
    serve("bind", BindingArgs, service.bind)
    serve("preempt", PreemptionArgs, service.preempt)
    _add_errors(app)
    return app


def _add_errors(app: FastAPI) -> None:
    async def unknown(request: Request, _: Exception) -> Response:
        path = request.url.path
        return _error(404, f"expected a POST to /{', /'.join(VERBS)}, found {path}; check urlPrefix and the verbs")

    async def wrong_method(request: Request, _: Exception) -> Response:
        return _error(405, f"expected a POST to a verb (/{', /'.join(VERBS)}), found {request.method}")

    app.add_exception_handler(404, unknown)
    app.add_exception_handler(405, wrong_method)


def _error(status: int, message: str) -> Response:
    # `Error` as in the protocol's own answers, so that whoever reads the body finds the sentence where it always is.
    return Response(msgspec.json.encode({"Error": message}), status, media_type=_JSON)


def _refuse_until_ready(not_ready: Callable[[], str | None]) -> None:
    reason = not_ready()
    if reason is not None:
        raise _Answer(503, reason)


async def _body(request: Request) -> bytes:
    """Read the body, no more of it than is allowed, whatever its Content-Length says."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY:
        raise _too_large(int(declared))
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise _too_large(len(body))
    return bytes(body)


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
