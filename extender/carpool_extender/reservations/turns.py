"""One worker of a job after the other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from carpool_core.values import JobUid

from carpool_extender.reservations.inflow import Inflow


class Turns:
    """Lets workers of a job reserve one after the other: two at once would not see each other's reservation.

    Args:
        inflow: Counts binds that are under way; one that waits for its turn is not.
    """

    def __init__(self, inflow: Inflow) -> None:
        self._inflow = inflow
        self._locks: WeakValueDictionary[JobUid, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, job: JobUid) -> AsyncIterator[None]:
        """Wait for the turn of a worker of a job, and have it until the block ends."""
        lock = self._locks.setdefault(job, asyncio.Lock())
        async with AsyncExitStack() as turn:
            if lock.locked():
                async with self._inflow.aside():
                    await turn.enter_async_context(lock)
            else:
                await turn.enter_async_context(lock)
            yield
