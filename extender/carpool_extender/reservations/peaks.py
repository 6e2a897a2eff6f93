"""Writes the measured memory peak of running tenants into their reservations once it is stable."""

import asyncio
from collections.abc import Mapping

import structlog
from carpool_core.kube.errors import KubeError
from carpool_core.resources.node import GpuNode, GpuNodeSpec
from carpool_core.values import PodUid

from carpool_extender.cache.peaks import PeakTracker, StablePeak, measured_tenants, use_measured_peak
from carpool_extender.informers import Informers
from carpool_extender.reservations.writer import ReservationWriter

AT_ONCE = 16
"""Nodes that are written at the same time: enough that a few slow ones hold up no others."""


class PeakUpdater:
    """Looks at a node whenever its agent has told something, which it does twice a minute.

    Args:
        informers: What is known of the cluster.
        writer: Where reservations are written.
        stillness: Since when peaks have stood still.
    """

    def __init__(self, informers: Informers, writer: ReservationWriter, stillness: PeakTracker) -> None:
        self._informers, self._writer, self._stillness = informers, writer, stillness
        self._due: dict[str, Mapping[PodUid, StablePeak]] = {}
        self._busy: set[str] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._stirred = asyncio.Event()
        self._log = structlog.get_logger()
        informers.on_node(self._node_changed)

    async def run(self) -> None:
        """Write for ever. What could not be written is due again with the node's next word."""
        async with asyncio.TaskGroup() as writers:
            while True:
                await self._stirred.wait()
                self._stirred.clear()
                for name in self._due.keys() - self._busy:
                    self._busy.add(name)
                    writers.create_task(self._write_due(name))

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if old is not None and (new is None or new.metadata.uid != old.metadata.uid):
            self._stillness.forget(old.metadata.name)
            self._due.pop(old.metadata.name, None)
        if new is None:
            return
        pods = self._stillness.look(new)
        if use_measured_peak(new.spec, measured_tenants(new), pods) is not new.spec:
            self._due[new.metadata.name] = pods
            self._stirred.set()
        else:
            self._due.pop(new.metadata.name, None)

    async def _write_due(self, name: str) -> None:
        async with self._turns:
            if (pods := self._due.pop(name, None)) is not None:
                await self._write(name, pods)
        self._busy.discard(name)
        if name in self._due:
            self._stirred.set()  # told while it was being written

    async def _write(self, name: str, pods: Mapping[PodUid, StablePeak]) -> None:
        def decide(node: GpuNode) -> GpuNodeSpec:
            return use_measured_peak(node.spec, measured_tenants(node), pods)

        known = self._informers.cluster.node(name)
        if known is None or decide(known) is known.spec:
            return  # written meanwhile, or it would count with no less
        try:
            await self._writer.change(name, decide, frees=bool(pods))
        except KubeError as error:
            self._log.warning("measured peaks not written", node=name, error=str(error))
            return
        self._log.info("counts as measured", node=name, pods=sorted(pods))
