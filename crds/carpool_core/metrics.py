"""HTTP server of `/metrics`, `/healthz` and `/readyz`, which every process runs."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from carpool_core.settings import SettingsError


def build_info(registry: CollectorRegistry, process: str, version: str) -> None:
    """Register `carpool_build_info` and the process's own `process_*` metrics."""
    ProcessCollector(registry=registry)
    gauge = Gauge("carpool_build_info", "Version of this process; always 1.", ["process", "version"], registry=registry)
    gauge.labels(process, version).set(1)


class MetricsServer:
    """A running server on `port`; `close()` stops it."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        self._runner = runner
        self.port = port

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()


async def serve(
    registry: CollectorRegistry,
    port: int,
    host: str = "0.0.0.0",  # noqa: S104  # Prometheus scrapes from outside the pod
    readiness: Callable[[], str | None] = lambda: None,
) -> MetricsServer:
    """Serve metrics and health.

    Args:
        registry: Metrics of `/metrics`, read at scrape time.
        port: TCP port; 0 takes a free one.
        host: Address to listen on.
        readiness: Returns None if ready, else the reason, which `/readyz` sends with status 503.

    Raises:
        SettingsError: The port is not available.
    """

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        reason = readiness()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise SettingsError(
            f"CARPOOL_METRICS_PORT: expected a free port at {host}, found {port}: {error}; set another"
        ) from error
    return MetricsServer(runner, runner.addresses[0][1])
