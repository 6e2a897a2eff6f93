"""The extender's HTTPS server: a FastAPI application behind uvicorn with mutual TLS.

kube-scheduler's verbs are raw routes that decode and encode with msgspec; health and version are typed FastAPI routes.
"""

import ssl
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, Literal, TypeVar

import msgspec
import uvicorn
from carpool_core.settings import SettingsError
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from carpool_extender.certificates import Certificates
from carpool_extender.extender_api import BindingArgs, ExtenderArgs, PreemptionArgs
from carpool_extender.metrics import VERBS, ExtenderMetrics
from carpool_extender.scheduler import BadRequest, Scheduler
from carpool_extender.settings import ExtenderSettings
from carpool_extender.uvicorn_server import Server

A = TypeVar("A")
Endpoint = Callable[[Request], Awaitable[Response]]

MAX_BODY = 4 * 1024 * 1024
"""Largest body of a request in bytes. kube-scheduler sends one pod and node names: 0.3 MB for 5,000 nodes."""


class Health(BaseModel):
    """Answer of `/healthz` and `/readyz`."""

    status: Literal["ok", "not ready"]
    reason: str | None = None
    """Why the process is not ready; None if it is."""


class Version(BaseModel):
    """Answer of `/version`."""

    version: str
    """Version of Carpool."""


class _Rejected(Exception):  # noqa: N818  # ends a request with an error status
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(scheduler: Scheduler, metrics: ExtenderMetrics, not_ready: Callable[[], str | None]) -> FastAPI:
    """Build the application.

    `not_ready` returns None once every verb can answer, otherwise the reason.
    """
    # The OpenAPI pages load scripts from a CDN, which clusters often cannot reach.
    app = FastAPI(
        title="Carpool scheduler extender",
        openapi_url=None,
        exception_handlers={404: _unknown_path, 405: _wrong_method},
    )

    def verb(name: str, arguments: type[A], decide: Callable[[A], Awaitable[Any]]) -> None:
        app.add_route(f"/{name}", _endpoint(name, arguments, decide, metrics, not_ready), methods=["POST"])

    verb("filter", ExtenderArgs, scheduler.filter)
    verb("prioritize", ExtenderArgs, scheduler.prioritize)
    verb("bind", BindingArgs, scheduler.bind)
    verb("preempt", PreemptionArgs, scheduler.preempt)

    @app.get("/healthz")
    async def healthz() -> Health:
        return Health(status="ok")

    @app.get("/readyz", responses={503: {"model": Health}})
    async def readyz(response: Response) -> Health:
        if (reason := not_ready()) is None:
            return Health(status="ok")
        response.status_code = 503
        return Health(status="not ready", reason=reason)

    @app.get("/version")
    async def installed_version() -> Version:
        return Version(version=version("carpool"))

    return app


def _endpoint(
    verb: str,
    arguments: type[A],
    decide: Callable[[A], Awaitable[Any]],
    metrics: ExtenderMetrics,
    not_ready: Callable[[], str | None],
) -> Endpoint:
    """Return the raw endpoint of one verb."""
    decoder = msgspec.json.Decoder(arguments)

    async def endpoint(request: Request) -> Response:
        with metrics.request(verb):
            try:
                if (reason := not_ready()) is not None:
                    raise _Rejected(503, reason)
                result = await decide(_decode(decoder, await _body(request), verb))
            except BadRequest as error:
                return _error(400, str(error))
            except _Rejected as error:
                return _error(error.status, str(error))
            return Response(msgspec.json.encode(result), media_type="application/json")

    return endpoint


def _error(status: int, message: str) -> Response:
    # The protocol's own answers have the field `Error`, too.
    return Response(msgspec.json.encode({"Error": message}), status, media_type="application/json")


async def _unknown_path(request: Request, _: Exception) -> Response:
    verbs, path = ", /".join(VERBS), request.url.path
    return _error(404, f"expected a POST to /{verbs}, found {path}; check urlPrefix and the verbs")


async def _wrong_method(request: Request, _: Exception) -> Response:
    path = request.url.path
    expected = "POST" if path.removeprefix("/") in VERBS else "GET"
    return _error(405, f"expected {expected} {path}, found {request.method}")


async def _body(request: Request) -> bytes:
    """Read the body; reject it as soon as it exceeds `MAX_BODY`, also if its Content-Length is smaller."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY:
        raise _too_large(int(declared))
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise _too_large(len(body))
    return bytes(body)


def _too_large(size: int) -> _Rejected:
    return _Rejected(
        413,
        f"expected a body of at most {MAX_BODY:,} bytes, found {size:,} or more; "
        "set nodeCacheCapable: true, so that the scheduler sends names instead of whole nodes",
    )


def _decode(decoder: msgspec.json.Decoder[A], body: bytes, verb: str) -> A:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _Rejected(
            400, f"expected the arguments of {verb} (k8s.io/kube-scheduler/extender/v1): {error}"
        ) from error
    except msgspec.DecodeError as error:
        found = body[:60].decode("utf-8", "replace")
        raise _Rejected(400, f"expected JSON with the arguments of {verb}, found {found!r}: {error}") from error


def create_server(app: FastAPI, settings: ExtenderSettings, certificates: Certificates) -> Server:
    """Build the server. It refuses clients without a certificate of the client CA in the TLS handshake.

    Raises:
        SettingsError: A certificate is not set, or cannot be used.
    """
    cert, key, client_ca = certificates.files()
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=120,  # kube-scheduler reuses its connections; a TLS handshake costs more than a decision
        ssl_certfile=str(cert),
        ssl_keyfile=str(key),
        ssl_ca_certs=str(client_ca),
        ssl_cert_reqs=ssl.CERT_REQUIRED,
        proxy_headers=False,
    )
    try:
        config.load()
        if config.ssl is not None:  # always: a certificate is set
            certificates.keep_current(config.ssl)
    except OSError as error:
        raise SettingsError(
            "CARPOOL_EXTENDER_TLS_CERT, _TLS_KEY and _CLIENT_CA: expected a certificate, its private key, and a CA, "
            f"each in PEM, found {cert}, {key} and {client_ca}: {error}"
        ) from error
    return Server(config, "CARPOOL_EXTENDER")
