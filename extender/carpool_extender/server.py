"""The HTTPS server: uvicorn with mutual TLS."""

import ssl

import uvicorn
from fastapi import FastAPI

from carpool_extender.settings import ExtenderSettings


def create_server(app: FastAPI, settings: ExtenderSettings) -> uvicorn.Server:
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
    return uvicorn.Server(config)
