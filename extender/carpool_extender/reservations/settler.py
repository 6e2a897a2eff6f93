"""Writes what running tenants were measured to take into their reservations, once that has stood still."""

import asyncio
from collections.abc import Mapping

import structlog
from carpool_core.kube.errors import KubeError
from carpool_core.resources.node import GpuNode, GpuNodeSpec
from carpool_core.values import PodUid

from carpool_extender.kube.watches import Watches
from carpool_extender.reservations.book import Book
from carpool_extender.state.settling import Still, Stillness, by_place, settle

AT_ONCE = 16
"""Nodes that are written at the same time: enough that a few slow ones hold up no others."""


class Settler:
    """Looks at a node whenever its agent has told something, which it does twice a minute.

    Args:
        watches: What is known of the cluster.
        book: Where reservations are written.
        stillness: Since when peaks have stood still.
    """

    def __init__(self, watches: Watches, book: Book, stillness: Stillness) -> None:
        self._watches, self._book, self._stillness = watches, book, stillness
        self._due: dict[str, Mapping[PodUid, Still]] = {}
        self._busy: set[str] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._stirred = asyncio.Event()
        self._log = structlog.get_logger()
        watches.on_node(self._node_changed)

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
        if settle(new.spec, by_place(new), pods) is not new.spec:
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

    async def _write(self, name: str, pods: Mapping[PodUid, Still]) -> None:
        def decide(node: GpuNode) -> GpuNodeSpec:
            return settle(node.spec, by_place(node), pods)

        known = self._watches.cluster.node(name)
        if known is None or decide(known) is known.spec:
            return  # written meanwhile, or it would count with no less
        try:
            await self._book.change(name, decide, frees=bool(pods))
        except KubeError as error:
            self._log.warning("measured peaks not written", node=name, error=str(error))
            return
        self._log.info("counts as measured", node=name, pods=sorted(pods))
