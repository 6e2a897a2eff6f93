"""The HTTPS server: uvicorn with mutual TLS."""

import asyncio
import signal
import ssl
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from carpool_extender.settings import ExtenderSettings


class Server(uvicorn.Server):
    """A server whose process ends in order: uvicorn's own raises the signal again, which would skip all clean-up."""

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
        SettingsError: A certificate is not set or not there.
    """
    cert, key, client_ca = settings.tls.files()
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=120,  # kube-scheduler keeps its connections; a new handshake costs more than a decision
        ssl_certfile=str(cert),
        ssl_keyfile=str(key),
        ssl_ca_certs=str(client_ca),
        ssl_cert_reqs=ssl.CERT_REQUIRED,
    )
    return Server(config)
