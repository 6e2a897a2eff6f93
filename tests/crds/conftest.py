import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from carpool_core.kube.client import connect
from carpool_core.settings import KubeSettings
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube

# --import-mode=importlib gives test folders no import path of their own; the worlds are shared by these files only.
sys.path.insert(0, str(Path(__file__).parent))

from kube_backends import Backend
from reflector_world import World

_NUMBERS = itertools.count(1)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.e2e)])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    tag = f"t{next(_NUMBERS)}"
    if request.param == "fake":
        yield Backend(FakeKube(), tag)
        return
    cluster = request.getfixturevalue("control_plane")
    async with connect(KubeSettings(str(cluster.kubeconfig))) as client:
        yield Backend(client, tag)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def api(clock: FakeClock) -> FakeKube:
    return FakeKube(clock)


@pytest.fixture
async def start(api: FakeKube, clock: FakeClock) -> AsyncIterator[Callable[..., World]]:
    worlds: list[World] = []

    def begin(**options: Any) -> World:
        worlds.append(World(options.pop("api", api), clock, **options))
        return worlds[-1]

    yield begin
    for world in worlds:
        world.task.cancel()
        await asyncio.gather(world.task, return_exceptions=True)
