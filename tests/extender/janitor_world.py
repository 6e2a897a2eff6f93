"""A janitor, and a server that it looks after."""

import asyncio
from contextlib import asynccontextmanager

from carpool_core.kube.api import GPU_NODES
from carpool_core.kube.events import EventRecorder
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.informers import Informers
from carpool_extender.reservations.gc import ReservationGC, Restorer
from carpool_extender.reservations.writer import ReservationWriter
from carpool_extender.testing import until


class Clean:
    """A janitor of one node, and what it stands on, with the pause that there is between writes."""

    def __init__(self, server=FakeKube, informers=Informers):
        self.clock = FakeClock()
        self.kube = server(self.clock)
        self.informers = informers(self.kube, self.clock, ClusterCache())
        writer = ReservationWriter(self.kube, self.informers, self.clock, self.clock.sleep, gather_s=0.1)
        self.restorer = Restorer(self.kube, self.informers, writer, EventRecorder(self.kube, self.clock, "test"), 8)
        self.gc = ReservationGC(
            self.kube, self.informers, writer, self.restorer, clock=self.clock, sleep=self.clock.sleep
        )

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
        running = asyncio.create_task(self.informers.run())
        try:
            await self.informers.wait_synced()
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
