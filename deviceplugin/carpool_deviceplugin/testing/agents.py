"""Agents for tests: quick ones, and waiting for what they do."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from carpool_deviceplugin.app import Agent
from carpool_deviceplugin.patience import Rhythm

P = ParamSpec("P")
T = TypeVar("T")


class Inline:
    """Makes calls where it stands, without threads."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call."""
        return function(*args, **kwargs)


QUICK = Rhythm(
    waiting_s=0.02,
    resync_s=0.2,
    sample_s=0.02,
    idle_samples=1,
    measures_s=0.05,
    retry_s=0.02,
    kubelet_s=0.02,
    patience_s=0.3,
)
"""A hundred times faster than in production."""


async def until(condition: Callable[[], T], within_s: float = 30.0) -> T:
    """Wait for something that other tasks will make true."""
    end = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() >= end:
            raise AssertionError(f"expected it to come true within {within_s:g} s, found it still false")
        await asyncio.sleep(0.005)
    return found


@asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[Agent]:
    """Run an agent for as long as the block lasts."""
    task = asyncio.ensure_future(agent.run())
    try:
        yield agent
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
