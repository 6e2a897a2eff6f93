"""The HTTPS server: uvicorn with mutual TLS."""

import asyncio
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import msgspec
import uvicorn
from carpool_core.settings import SettingsError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from carpool_extender.extender_api import BindingArgs, ExtenderArgs, PreemptionArgs
from carpool_extender.metrics import ExtenderMetrics
from carpool_extender.scheduler import BadRequest, Service
from carpool_extender.settings import ExtenderSettings


class Gathering(asyncio.Transport):
    """Writes at once what is written in one turn of the event loop.

    uvicorn writes the head of an answer and its body apart: two TLS records, two system calls, and whoever waits is
    woken twice, which takes a quarter of the time of a request whose answer is known.

    Args:
        inner: What it writes to.
    """

    def __init__(self, inner: asyncio.Transport) -> None:
        super().__init__()
        self._inner = inner
        self._held: list[bytes] = []

    def write(self, data: "bytes | bytearray | memoryview[Any]") -> None:
        """Write before the next turn."""
        if not self._held:
            asyncio.get_running_loop().call_soon(self._flush)
        self._held.append(bytes(data))

    def close(self) -> None:
        """Write what is held, then close."""
        self._flush()
        self._inner.close()

    def is_closing(self) -> bool:
        """Whether it is closing or closed."""
        return self._inner.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what is known of the connection."""
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Read no more for now."""
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._inner.resume_reading()

    def _flush(self) -> None:
        if self._held and not self._inner.is_closing():
            self._inner.write(b"".join(self._held))
        self._held.clear()


class _Protocol(HttpToolsProtocol):
    """uvicorn's own, over such a transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to serve a connection."""
        super().connection_made(Gathering(transport))


class Server(uvicorn.Server):
    """A server whose process ends in order: uvicorn's own raises the signal again, which would skip all clean-up."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen.

        Raises:
            SettingsError: Nobody can listen there; uvicorn's own ends the process.
        """
        try:
            await super().startup(sockets)
        except SystemExit as error:
            raise SettingsError(
                "CARPOOL_EXTENDER_HOST and CARPOOL_EXTENDER_PORT: expected an address of this host and a free port, "
                f"found {self.config.host} and {self.config.port}: {error.__context__}; set others"
            ) from error

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """End on SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def create_server(app: Starlette, settings: ExtenderSettings) -> Server:
    """Build the server; whoever shows no certificate of the client CA is refused in the handshake.

    Raises:
        SettingsError: A certificate is not set, or cannot be used.
    """
    cert, key, client_ca = settings.tls.files()
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=_Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=120,  # kube-scheduler keeps its connections; a new handshake costs more than a decision
        ssl_certfile=str(cert),
        ssl_keyfile=str(key),
        ssl_ca_certs=str(client_ca),
        ssl_cert_reqs=ssl.CERT_REQUIRED,
        proxy_headers=False,  # nobody stands between
    )
    try:
        config.load()
    except OSError as error:
        raise SettingsError(
            "CARPOOL_EXTENDER_TLS_CERT, _TLS_KEY and _CLIENT_CA: expected a certificate, its private key, and a CA, "
            f"each in PEM, found {cert}, {key} and {client_ca}: {error}"
        ) from error
    if config.ssl is not None:
        # kube-scheduler resumes no sessions, and two tickets for each of its connections take a third of a handshake.
        config.ssl.num_tickets = 0
    return Server(config)


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
        telemetry: ExtenderMetrics,
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


def create_app(service: Service, telemetry: ExtenderMetrics, not_ready: Callable[[], str | None]) -> Starlette:
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
