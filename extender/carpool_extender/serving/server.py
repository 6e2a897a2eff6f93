"""The HTTPS server: uvicorn with mutual TLS."""

import asyncio
import signal
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from carpool_core.settings import SettingsError
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
