"""The API server on paper: what it tells whoever watches it."""

import asyncio
import json

import aiohttp
from carpool_core.testing.clock import FakeClock
from carpool_e2e.bench.world import BEAT_S, PaperApi
from carpool_extender.testing import gpu_node, tenant, until


async def test_every_agent_tells_that_it_lives_and_nothing_that_was_changed_is_lost() -> None:
    """Regression: no agent wrote anything, so that after a minute nobody could be placed any more."""
    clock = FakeClock()
    api = PaperApi([gpu_node("a"), gpu_node("b")], [], [], clock, clock.sleep)
    runner, port = await api.serve()
    try:
        path = f"http://127.0.0.1:{port}/apis/carpool.dev/v1alpha1/gpunodes?watch=1"
        async with aiohttp.ClientSession() as session, session.get(path) as watch:
            api.change(gpu_node("b", 1, [tenant("x", ["GPU-b-0"])]))
            told = [json.loads(await watch.content.readline())["object"]]
            for _ in range(4):
                await until(lambda: bool(clock.sleeping))
                clock.advance(BEAT_S / 2)
                told.append(json.loads(await watch.content.readline())["object"])
    finally:
        await runner.cleanup()
    assert [one["metadata"]["name"] for one in told] == ["b", "a", "b", "a", "b"]
    assert [one["status"].get("heartbeatTime", "")[11:19] for one in told] == [
        "",
        "12:00:12",
        "12:00:25",
        "12:00:37",
        "12:00:50",
    ]
    assert [len(one["spec"]["reservations"]) for one in told if one["metadata"]["name"] == "b"] == [1, 1, 1]
    assert "agents live" not in {task.get_name() for task in asyncio.all_tasks()}
