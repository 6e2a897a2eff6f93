"""HTTP server of `/metrics`, `/healthz` and `/readyz`, which every process runs."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from carpool_core.settings import SettingsError


def build_info(registry: CollectorRegistry, process: str, version: str) -> None:
    """Register `carpool_build_info` and the process's own `process_*` metrics."""
    ProcessCollector(registry=registry)
    gauge = Gauge("carpool_build_info", "Version of this process; always 1.", ["process", "version"], registry=registry)
    gauge.labels(process, version).set(1)


class ApiMetrics:
    """Measures calls to the API server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "carpool_api_request_seconds",
            "Time from a call to the API server to the end of its answer.",
            ["verb"],
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
            registry=registry,
        )
        self._errors = Counter(
            "carpool_api_errors_total",
            "Calls to the API server that failed, and watches that ended by an error, by HTTP status; 0 is no answer.",
            ["verb", "status"],
            registry=registry,
        )

    def answered(self, verb: str, seconds: float) -> None:
        """Count a call that the server answered, also with an error."""
        self._seconds.labels(verb).observe(seconds)

    def failed(self, verb: str, status: int) -> None:
        """Count a call that failed."""
        self._errors.labels(verb, status).inc()


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

    Port 0 takes a free one. `readiness` returns None if ready, else the reason, which `/readyz` sends with status 503.

    Raises:
        SettingsError: The port is not available.
    """

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))  # OpenMetrics, or text
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

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
