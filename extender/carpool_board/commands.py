"""`carpool board`."""

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import click
import structlog
import uvicorn
from carpool_core import logs
from carpool_core.clock import Clock, SystemClock
from carpool_core.kube.api import KubeApi
from carpool_core.kube.client import KubeClient
from carpool_core.kube.config import Endpoint, KubeConfigError, load_endpoint
from carpool_core.kube.errors import KubeError
from carpool_core.kubectl.output import UnansweredError
from carpool_core.settings import (
    KubeSettings,
    LogSettings,
    MisconfiguredError,
    SettingsError,
    click_options,
    setting,
)
from carpool_extender.explain.commands import read_site, rights_remedy
from carpool_extender.settings import AskSettings
from carpool_extender.uvicorn_server import Server

from carpool_board.app import LOOPBACK, Board, create_app
from carpool_board.viewers import Viewers
from carpool_board.watch import ClusterWatch

_SHUTDOWN_S = 2
"""Time for open pages to end after a signal, in seconds; their streams of notices never end by themselves."""
_CHECK_S = 10.0
"""Seconds between two looks at the certificate's files."""


@dataclass(frozen=True)
class BoardSettings:
    """Settings of the board."""

    host: str = setting(
        "127.0.0.1",
        env="CARPOOL_BOARD_HOST",
        help="Address to listen on. On 127.0.0.1 viewers have your own rights. On any other address each request needs "
        "the viewer's bearer token, whose rights count.",
    )
    port: int = setting(
        8044,
        env="CARPOOL_BOARD_PORT",
        minimum=0,
        maximum=65535,
        help="TCP port of the pages; 0 takes a free one.",
    )
    tls_cert: Path | None = setting(
        None,
        env="CARPOOL_BOARD_TLS_CERT",
        help="Certificate of HTTPS, PEM, read again when it changes. If empty, the pages are served over HTTP.",
    )
    tls_key: Path | None = setting(
        None,
        env="CARPOOL_BOARD_TLS_KEY",
        help="The certificate's private key, PEM. If empty, it is in the certificate's file.",
    )
    site: str = setting(
        "carpool-system/carpool",
        help="Installation whose settings decide queue and explanations, as NAMESPACE/NAME. They are read from its "
        "ConfigMap NAME-settings. If empty, the defaults apply.",
        allow_empty=True,
    )
    plan: str = setting(
        "",
        env="CARPOOL_BOARD_PLAN",
        help="Folder into which `carpool simulate` wrote, for the page of capacity planning. If empty, there is none.",
        allow_empty=True,
    )
    kube: KubeSettings = field(default_factory=KubeSettings)
    log: LogSettings = field(default_factory=LogSettings)


@click.command(short_help="Serve web pages of GPUs, queue and jobs.")
@click_options(BoardSettings)
def board(settings: BoardSettings) -> None:
    """Serve read-only web pages of GPUs, queue and jobs until Ctrl-C: GPUs with their tenants, reasons, timelines.

    The pages are at http://127.0.0.1:8044 and have your own rights. On another address, each request needs the viewer's
    bearer token. /v1 describes the same documents as JSON.
    """
    logs.configure(settings.log, "board")
    try:
        asyncio.run(serve(settings, SystemClock()))
    except (SettingsError, KubeConfigError) as error:
        raise MisconfiguredError(str(error)) from error
    except KubeError as error:
        raise UnansweredError(f"the cluster could not be reached: {error}") from error


def connecting(endpoint: Endpoint, clock: Clock) -> Callable[[str | None], AbstractAsyncContextManager[KubeApi]]:
    """Return a function that opens a client with a token; None means the credentials of the endpoint."""
    return lambda token: KubeClient(endpoint if token is None else endpoint.for_token(token), clock=clock)


async def serve(settings: BoardSettings, clock: Clock) -> None:
    """Serve until a signal.

    Raises:
        SettingsError: An address is not available, or the certificate cannot be used.
        KubeConfigError: The credentials cannot be used.
        KubeError: The API server cannot be asked for the process's own rights.
    """
    if settings.tls_key and not settings.tls_cert:
        raise SettingsError(
            f"CARPOOL_BOARD_TLS_CERT: expected the certificate of {settings.tls_key}, found none; set --tls-cert"
        )
    endpoint = await asyncio.to_thread(load_endpoint, settings.kube)
    needs_token = settings.host not in LOOPBACK
    if needs_token:
        endpoint.for_token("")  # raises now instead of at each request
    asked, connect = AskSettings(site=settings.site), connecting(endpoint, clock)
    viewers = Viewers(connect, clock, rights_remedy(settings.site))
    async with connect(None) as api:
        watch = ClusterWatch(api, clock, lambda: read_site(api, asked, frozenset(), clock))
        namespace = "" if needs_token else endpoint.namespace
        app = create_app(
            Board(
                viewers,
                watch,
                clock,
                settings.site,
                needs_token=needs_token,
                namespace=namespace,
                plan=Path(settings.plan) if settings.plan else None,
            )
        )
        config = uvicorn.Config(
            app, host=settings.host, port=settings.port, lifespan="off", ws="none", access_log=False, log_config=None,
            log_level="warning", proxy_headers=False, server_header=False, timeout_graceful_shutdown=_SHUTDOWN_S,
            ssl_certfile=settings.tls_cert, ssl_keyfile=settings.tls_key,
        )  # fmt: skip
        loaded = load(config)
        await _Server(config, "CARPOOL_BOARD").serve_beside(watch.run(viewers), keep_current(config, loaded))


def load(config: uvicorn.Config) -> list[int]:
    """Load a server's configuration with its certificate, and return when the files had been changed before.

    Raises:
        SettingsError: There is no certificate with its key in the files.
    """
    try:
        before = _changed(config)
        config.load()
    except OSError as error:
        raise SettingsError(
            f"CARPOOL_BOARD_TLS_CERT and CARPOOL_BOARD_TLS_KEY: expected a certificate and its key, found "
            f"{' and '.join(map(str, _files(config)))}: {error}"
        ) from error
    return before


async def keep_current(
    config: uvicorn.Config, loaded: list[int], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Load the server's certificate whenever a file changes; a failure is tried again, with the old one in use."""
    while config.ssl is not None:
        await sleep(_CHECK_S)
        try:
            found = _changed(config)
            if found != loaded:
                # A failure leaves a context with the new certificate and no key.
                for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl):
                    context.load_cert_chain(config.ssl_certfile or "", config.ssl_keyfile)
            loaded = found
        except OSError as error:
            structlog.get_logger().error("certificate not loaded", error=str(error))
    await asyncio.Event().wait()  # HTTP has none; the server goes on


def _files(config: uvicorn.Config) -> list[str | os.PathLike[str]]:
    return [file for file in (config.ssl_certfile, config.ssl_keyfile) if file]


def _changed(config: uvicorn.Config) -> list[int]:
    return [os.stat(file).st_mtime_ns for file in _files(config)]


class _Server(Server):
    """Prints its address once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        scheme = "https" if self.config.is_ssl else "http"
        click.echo(f"the board is at {scheme}://{self.config.host}:{port} until Ctrl-C")
