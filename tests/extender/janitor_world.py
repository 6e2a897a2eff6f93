"""A janitor, and a server that it looks after."""

import asyncio
from contextlib import asynccontextmanager

from carpool_core.kube.api import GPU_NODES
from carpool_core.kube.events import EventRecorder
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_extender.cache.cluster import Cluster
from carpool_extender.informers import Watches
from carpool_extender.reservations.gc import Janitor, Restorer
from carpool_extender.reservations.writer import Book
from carpool_extender.testing import until


class Clean:
    """A janitor of one node, and what it stands on, with the pause that there is between writes."""

    def __init__(self, server=FakeKube, watches=Watches):
        self.clock = FakeClock()
        self.kube = server(self.clock)
        self.watches = watches(self.kube, self.clock, Cluster())
        book = Book(self.kube, self.watches, self.clock, self.clock.sleep, gather_s=0.1)
        self.restorer = Restorer(self.kube, self.watches, book, EventRecorder(self.kube, self.clock, "test"), 8)
        self.janitor = Janitor(self.kube, self.watches, book, self.restorer, clock=self.clock, sleep=self.clock.sleep)

    async def finish(self, work):
        """Wait for some work, however many pauses it makes."""
        working = asyncio.create_task(work)
        while not working.done():
            await until(lambda: working.done() or self.clock.sleeping != [])
            self.clock.advance(0.1)

    @property
    def writes(self):
        return [call for call in self.kube.calls if call.verb == "patch" and call.plural == GPU_NODES.plural]

    @asynccontextmanager
    async def watching(self):
        running = asyncio.create_task(self.watches.run())
        try:
            await self.watches.wait_synced()
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
