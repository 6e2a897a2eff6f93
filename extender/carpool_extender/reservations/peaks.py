"""Writes the measured memory peak of running tenants into their reservations once the peak is stable."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog
from carpool_core.kube.errors import KubeError
from carpool_core.resources.node import GpuNode, GpuNodeSpec
from carpool_core.values import PodUid

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.peaks import PeakTracker, StablePeak, measured_tenants, use_measured_peak
from carpool_extender.reservations.writer import ReservationWriter

CHECK_EVERY_S = 10.0
"""Time between two observations of a node."""
CONCURRENT = 16
"""Nodes that are written at the same time, so that a few slow ones delay no others."""


class PeakUpdater:
    """Observes all nodes at regular intervals. A standby observes too, so that it knows the times when it leads."""

    def __init__(
        self,
        cluster: ClusterCache,
        writer: ReservationWriter,
        tracker: PeakTracker,
        leads: Callable[[], bool],
        sleep: Callable[[float], Awaitable[Any]],
    ) -> None:
        self._cluster, self._writer, self._tracker, self._sleep = cluster, writer, tracker, sleep
        self._leads = leads
        self._writing: set[str] = set()
        self._semaphore = asyncio.Semaphore(CONCURRENT)
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Write forever. A node whose write failed is due again at the next observation."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._tracker.keep(self._cluster.nodes)
                for name in [*self._cluster.nodes]:
                    if (pods := self._due(name)) is not None and self._leads():
                        self._writing.add(name)
                        group.create_task(self._write(name, pods))
                    await asyncio.sleep(0)  # thousands of nodes delay no other work
                await self._sleep(CHECK_EVERY_S)

    def _due(self, name: str) -> Mapping[PodUid, StablePeak] | None:
        """Return the stable peaks of a node if they change its reservations, else None."""
        node = self._cluster.node(name)
        if node is None or self._cluster.is_agent_down(name):
            self._tracker.forget(name)  # a peak may be missed, and a new agent begins with its own
            return None
        pods = self._tracker.observe(node)
        is_changed = use_measured_peak(node.spec, measured_tenants(node), pods) is not node.spec
        return pods if is_changed and name not in self._writing else None

    async def _write(self, name: str, pods: Mapping[PodUid, StablePeak]) -> None:
        def decide(node: GpuNode) -> GpuNodeSpec:
            return use_measured_peak(node.spec, measured_tenants(node), pods)

        try:
            async with self._semaphore:
                watched = self._cluster.node(name)
                if watched is None or decide(watched) is watched.spec or not self._leads():  # changed meanwhile
                    return
                await self._writer.change(name, decide)
        except KubeError as error:
            self._log.warning("measured peaks not written", node=name, error=str(error))
            return
        finally:
            self._writing.discard(name)
        self._log.info("reservations count as measured", node=name, pods=sorted(pods))
