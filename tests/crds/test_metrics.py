import aiohttp
import pytest
from carpool_core import metrics
from carpool_core.settings import SettingsError
from prometheus_client import CollectorRegistry, Gauge


async def _get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


async def test_metrics_are_read_at_scrape_time() -> None:
    registry = CollectorRegistry()
    metrics.build_info(registry, "agent", "1.2.3")
    gauge = Gauge("carpool_things_total", "Things.", registry=registry)
    server = await metrics.serve(registry, 0, "127.0.0.1")
    try:
        gauge.set(7)
        status, text = await _get(server.port, "/metrics")
        assert status == 200
        assert "carpool_things_total 7.0" in text
        assert 'carpool_build_info{process="agent",version="1.2.3"} 1.0' in text
        assert (await _get(server.port, "/healthz"))[0] == 200
        assert (await _get(server.port, "/readyz")) == (200, "ok\n")
    finally:
        await server.close()


async def test_readiness_says_what_is_missing() -> None:
    waiting_for: list[str] = ["the first list of GpuNodes"]
    server = await metrics.serve(CollectorRegistry(), 0, "127.0.0.1", lambda: waiting_for[0] if waiting_for else None)
    try:
        assert (await _get(server.port, "/readyz")) == (503, "the first list of GpuNodes\n")
        waiting_for.clear()
        assert (await _get(server.port, "/readyz"))[0] == 200
    finally:
        await server.close()


async def test_a_port_that_is_taken_is_a_sentence() -> None:
    """Regression: operator and extender ended with a traceback."""
    server = await metrics.serve(CollectorRegistry(), 0, "127.0.0.1")
    try:
        with pytest.raises(SettingsError, match=r"expected a free port at 127.0.0.1, found \d+: .*; set another$"):
            await metrics.serve(CollectorRegistry(), server.port, "127.0.0.1")
    finally:
        await server.close()
