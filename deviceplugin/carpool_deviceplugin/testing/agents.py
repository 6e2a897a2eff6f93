"""Agents for tests: quick ones, and waiting for what they do."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import ParamSpec, TypeVar

from carpool_core.kube.api import KubeApi
from carpool_core.testing.clock import FakeClock

from carpool_deviceplugin.app import Agent, build
from carpool_deviceplugin.devices.patience import Rhythm
from carpool_deviceplugin.devices.port import Devices
from carpool_deviceplugin.settings import AgentSettings

P = ParamSpec("P")
T = TypeVar("T")


class Inline:
    """Makes calls where it stands, without threads."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call."""
        return function(*args, **kwargs)


_STEP_S, _PER_STEP_S = 0.1, 0.001
"""How much time passes for agents, and how much for the machine: threads and sockets need some of it."""


class Flow(FakeClock):
    """Time that passes a hundred times faster for agents than for the machine, in steps, while one of them runs."""

    async def run(self) -> None:
        """Let time pass, for ever."""
        while True:
            self.advance(_STEP_S)
            await asyncio.sleep(_PER_STEP_S)


def flowing(
    settings: AgentSettings,
    api: KubeApi,
    devices: Devices | None = None,
    rhythm: Rhythm = Rhythm(labels_s=30.0),  # noqa: B008  # a value
) -> Agent:
    """Put an agent together that lives in a time of its own."""
    clock = Flow()
    return build(settings, api, clock, devices, replace(rhythm, sleep=clock.sleep))


async def until(condition: Callable[[], T], within_s: float = 30.0) -> T:
    """Wait for something that other tasks will make true."""
    end = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() >= end:
            raise AssertionError(f"expected it to come true within {within_s:g} s, found it still false")
        await asyncio.sleep(0.005)
    return found


@asynccontextmanager
async def running(*agents: Agent) -> AsyncIterator[Agent]:
    """Run agents, each with its time, for as long as the block lasts."""
    tasks = [asyncio.ensure_future(agent.run()) for agent in agents]
    tasks += [asyncio.ensure_future(agent.clock.run()) for agent in agents if isinstance(agent.clock, Flow)]
    try:
        yield agents[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
