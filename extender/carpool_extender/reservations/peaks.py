"""Writes the measured memory peak of running tenants into their reservations once the peak is stable."""

import asyncio
from collections.abc import Mapping

import structlog
from carpool_core.kube.errors import KubeError
from carpool_core.resources.node import GpuNode, GpuNodeSpec
from carpool_core.values import PodUid

from carpool_extender.cache.peaks import PeakTracker, StablePeak, measured_tenants, use_measured_peak
from carpool_extender.informers import Informers
from carpool_extender.reservations.writer import ReservationWriter

CONCURRENT = 16
"""Nodes that are written at the same time, so that a few slow ones delay no others."""


class PeakUpdater:
    """Checks a node at each status report of its agent, which comes twice a minute.

    Args:
        informers: Watched nodes.
        writer: Writes reservations.
        tracker: Measures for how long peaks have been stable.
    """

    def __init__(self, informers: Informers, writer: ReservationWriter, tracker: PeakTracker) -> None:
        self._informers, self._writer, self._tracker = informers, writer, tracker
        self._due: dict[str, Mapping[PodUid, StablePeak]] = {}
        self._semaphore = asyncio.Semaphore(CONCURRENT)
        self._wake = asyncio.Event()
        self._log = structlog.get_logger()
        informers.on_node(self._node_changed)

    async def run(self) -> None:
        """Write forever. A node whose write failed is due again at its next report."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                due, self._due = self._due, {}
                for name, pods in due.items():
                    group.create_task(self._write(name, pods))

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if old is not None and (new is None or new.metadata.uid != old.metadata.uid):
            self._tracker.forget(old.metadata.name)
            self._due.pop(old.metadata.name, None)
        if new is None:
            return
        pods = self._tracker.look(new)
        if use_measured_peak(new.spec, measured_tenants(new), pods) is not new.spec:
            self._due[new.metadata.name] = pods
            self._wake.set()
        else:
            self._due.pop(new.metadata.name, None)

    async def _write(self, name: str, pods: Mapping[PodUid, StablePeak]) -> None:
        def decide(node: GpuNode) -> GpuNodeSpec:
            return use_measured_peak(node.spec, measured_tenants(node), pods)

        try:
            async with self._semaphore:
                watched = self._informers.cluster.node(name)
                if watched is None or decide(watched) is watched.spec:  # changed meanwhile
                    return
                await self._writer.change(name, decide)
        except KubeError as error:
            self._log.warning("measured peaks not written", node=name, error=str(error))
            return
        self._log.info("reservations count as measured", node=name, pods=sorted(pods))
