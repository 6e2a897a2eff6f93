"""Writing the ledgers: compare-and-swap on GpuNodes, so that two writers never promise the same thing twice."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from carpool_core.clock import Clock, rfc3339
from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import GPU_NODES, KubeApi
from carpool_core.kube.errors import Conflict, NotFound, Retryable
from carpool_core.resources.node import GpuNode, GpuNodeSpec
from carpool_core.values import PodUid

from carpool_extender import ledger
from carpool_extender.watches import Watches

ATTEMPTS = 8
FIRST_PAUSE_S = 0.05


class Refusal(Exception):  # noqa: N818  # an answer, not a failure of ours
    """The newest state of a node does not allow a change; `str()` says why."""


class Book:
    """The ledgers of all nodes."""

    def __init__(self, api: KubeApi, watches: Watches, clock: Clock, sleep: Callable[[float], Awaitable[Any]]) -> None:
        self._api, self._watches, self._clock, self._sleep = api, watches, clock, sleep
        self._writing: dict[str, asyncio.Lock] = {}

    async def read(self, name: str) -> GpuNode:
        """Read a GpuNode from the server. Raises KubeError."""
        node = await self._api.get(GPU_NODES, name, GpuNode)
        self._watches.take(node)
        return self._watches.cluster.node(name) or node

    async def change(self, name: str, decide: Callable[[GpuNode], GpuNodeSpec], *, frees: bool = False) -> GpuNode:
        """Apply a decision to the newest state of a node.

        The decision is made on what the watch has seen; when that is out of date, or refuses, it is made again on what
        the server has.

        Args:
            name: Name of the GpuNode.
            decide: Returns the new spec, or the same where nothing is to be written; raises Refusal. It is called again
                after each conflict.
            frees: Whether pods that wait should be tried again afterwards.

        Returns:
            The node as it is now.

        Raises:
            Refusal: The server's own state does not allow it.
            KubeError: It could not be read or written; a Retryable only after several tries.
        """
        # Held for one write, never while an agent works: without it, binds to one node would only conflict.
        async with self._writing.setdefault(name, asyncio.Lock()):
            return await self._change(name, decide, frees=frees)

    async def _change(self, name: str, decide: Callable[[GpuNode], GpuNodeSpec], *, frees: bool) -> GpuNode:
        cached = self._watches.cluster.node(name)
        failure: Retryable | None = None
        for attempt in range(ATTEMPTS):
            try:
                node = cached or await self.read(name)
                spec = decide(node)
                return node if spec is node.spec else await self._write(node, spec, frees=frees)
            except Refusal:
                if cached is None:
                    raise
            except Conflict as error:
                failure = error
            except Retryable as error:
                # Whether it was written is unknown; the next read tells.
                failure = error
                await self._sleep(FIRST_PAUSE_S * 2**attempt)
            cached = None
        raise failure or AssertionError("no attempt was made")

    async def release(self, name: str, pod_uid: PodUid) -> None:
        """Take a pod's reservation away; it may be gone already. Raises KubeError."""
        try:
            await self.change(name, lambda node: ledger.release(node.spec, pod_uid), frees=True)
        except NotFound:
            return

    async def _write(self, node: GpuNode, spec: GpuNodeSpec, *, frees: bool) -> GpuNode:
        metadata: dict[str, Any] = {"resourceVersion": node.metadata.resource_version}
        if frees:
            # Written together with the release, so that a crash before the Node is touched is made good later.
            metadata["annotations"] = {ANNOTATION_CAPACITY_FREED: rfc3339(self._clock.now())}
        patch = {"metadata": metadata, "spec": {"reservations": msgspec.to_builtins(spec.reservations)}}
        answer = await self._api.patch(GPU_NODES, node.metadata.name, patch)
        written = msgspec.convert(answer, GpuNode)
        self._watches.take(written)
        return written
