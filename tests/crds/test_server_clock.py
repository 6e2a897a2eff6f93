"""Deadlines that several processes compare follow the API server's clock."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from carpool_core.clock import ServerClock
from carpool_core.kube.api import PODS
from carpool_core.kube.client import KubeClient
from carpool_core.kube.config import Endpoint, Token
from carpool_core.kube.errors import NotFound
from carpool_core.kube.pods import Pod
from carpool_core.testing.clock import FakeClock


@pytest.mark.parametrize(
    ("date", "ahead_s"),
    [
        pytest.param(format_datetime(datetime(2026, 1, 31, 12, 1, tzinfo=UTC), usegmt=True), 60.5, id="server ahead"),
        pytest.param(
            format_datetime(datetime(2026, 1, 31, 11, 59, tzinfo=UTC), usegmt=True), -59.5, id="server behind"
        ),
        pytest.param(
            format_datetime(datetime(2026, 1, 31, 12, tzinfo=UTC), usegmt=True), 0.0, id="rounding is no error"
        ),
        pytest.param("yesterday", 0.0, id="no date"),
    ],
)
async def test_the_clock_follows_the_date_of_each_answer_of_errors_too(date: str, ahead_s: float) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"message": "no such pod"}, status=404, headers={"Date": date})

    app, clock = web.Application(), FakeClock()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server:
        endpoint = Endpoint(str(server.make_url("")).rstrip("/"), None, Token(lambda _: ""))
        async with KubeClient(endpoint, clock=clock) as client:
            of_server = ServerClock(clock, client)
            assert of_server.now() == clock.now()
            with pytest.raises(NotFound):
                await client.get(PODS, "x", Pod, namespace="default")
            assert of_server.now() - clock.now() == timedelta(seconds=ahead_s)
            assert of_server.monotonic() == clock.monotonic()
