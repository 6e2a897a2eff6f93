"""Writes reservations into GpuNodes by compare-and-swap, so that two writers never promise the same GPU memory."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from carpool_core.kube.api import GPU_NODES, KubeApi
from carpool_core.kube.errors import PATCH_DOES_NOT_APPLY, Conflict, Invalid, KubeError, NotFound, Retryable
from carpool_core.resources.node import GpuNode, GpuNodeSpec, Reservation

from carpool_extender.cache import ledger
from carpool_extender.informers import Informers

ATTEMPTS = 8
FIRST_PAUSE_S = 0.05
"""Pause after the first attempt that got no answer; it doubles with each attempt."""
GATHER_S = 0.1
"""Pause between two writes of one node. Each write carries all reservations of the node, so fewer writes cost less."""


class Refusal(Exception):  # noqa: N818  # an answer, not a failure
    """The newest state of a node does not allow a change; `str()` is the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """One change that waits to be written."""

    decide: Callable[[GpuNode], GpuNodeSpec]
    outcome: "asyncio.Future[GpuNode]"

    def succeed(self, node: GpuNode) -> None:
        if not self.outcome.done():  # its caller may have been cancelled
            self.outcome.set_result(node)

    def fail(self, error: Exception) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


class ReservationWriter:
    """Changes the reservations of nodes. Changes of one node that wait at the same time are one write."""

    def __init__(
        self,
        api: KubeApi,
        informers: Informers,
        sleep: Callable[[float], Awaitable[Any]],
        gather_s: float = GATHER_S,
    ) -> None:
        self._api, self._informers, self._sleep = api, informers, sleep
        self._gather_s = gather_s
        self._waiting: dict[str, list[_Change]] = {}
        self._writers: dict[str, asyncio.Task[None]] = {}

    async def read(self, name: str) -> GpuNode:
        """Read a GpuNode from the API server. Raises KubeError."""
        node = await self._api.get(GPU_NODES, name, GpuNode)
        self._informers.take(node)
        return self._informers.cluster.node(name) or node

    async def change(self, name: str, decide: Callable[[GpuNode], GpuNodeSpec]) -> GpuNode:
        """Apply a decision to the newest state of a node.

        The first decision is made on the watched state. If that state is outdated or refuses, the decision is made
        again on the state that the API server has.

        Args:
            name: Name of the GpuNode.
            decide: Returns the new spec, or the same object if nothing is to be written; raises Refusal. It is called
                again after each conflict.

        Returns:
            The node after the change.

        Raises:
            Refusal: The API server's state does not allow the change.
            KubeError: The node could not be read or written; a Retryable only after `ATTEMPTS` attempts.
        """
        change = _Change(decide, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(name, []).append(change)
        if name not in self._writers:
            self._writers[name] = asyncio.create_task(self._write_waiting(name))
        return await change.outcome

    async def release(self, name: str, judged: Reservation) -> bool:
        """Remove a reservation, unless it has changed since it was judged.

        Returns:
            Whether it was removed.

        Raises:
            KubeError: The node could not be read or written.
        """
        is_unchanged = False

        def decide(node: GpuNode) -> GpuNodeSpec:
            nonlocal is_unchanged
            held = ledger.held(node.spec, judged.pod_uid)
            is_unchanged = held is not None and ledger.is_same(held, judged)
            return ledger.release(node.spec, judged.pod_uid) if is_unchanged else node.spec

        try:
            await self.change(name, decide)
        except NotFound:
            return False
        return is_unchanged

    async def _write_waiting(self, name: str) -> None:
        """Write batches until no change waits."""
        try:
            while batch := self._waiting.pop(name, []):
                await self._write_batch(name, batch)
                await self._sleep(self._gather_s)
        finally:
            del self._writers[name]

    async def _write_batch(self, name: str, batch: list[_Change]) -> None:
        watched = self._informers.cluster.node(name)
        failure: KubeError | None = None
        for attempt in range(ATTEMPTS):
            try:
                node = watched or await self.read(name)
                spec, accepted, refused = _decide(node, batch)
                if watched is None:
                    for change, refusal in refused:
                        change.fail(refusal)
                    batch, refused = accepted, []
                written = node if spec is node.spec else await self._write(node, spec)
                for change in accepted:
                    change.succeed(written)
                batch = [change for change, _ in refused]
                if not batch:
                    return
            except Conflict as error:
                failure = error
            except Retryable as error:  # the next read shows whether the write arrived
                failure = error
                if attempt + 1 < ATTEMPTS:
                    await self._sleep(FIRST_PAUSE_S * 2**attempt)
            except Exception as error:  # the callers raise it
                if isinstance(error, Invalid) and len(batch) > 1:
                    for change in batch:  # one invalid change must not fail the others
                        await self._write_batch(name, [change])
                    return
                for change in batch:
                    change.fail(error)
                return
            watched = None
        for change in batch:
            change.fail(failure or AssertionError("no attempt was made"))

    async def _write(self, node: GpuNode, spec: GpuNodeSpec) -> GpuNode:
        """Replace the reservations, unless another writer has changed them. Raises Conflict, KubeError.

        The patch tests `generation`, which counts changes of the spec only: an agent's status report is no conflict.
        """
        meta, name = node.metadata, node.metadata.name
        patch: list[Mapping[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": meta.uid},
            {"op": "test", "path": "/metadata/generation", "value": meta.generation},
            {"op": "add", "path": "/spec", "value": {"reservations": _encoded(spec)}},
        ]
        try:
            answer = await self._api.patch(GPU_NODES, name, patch)
        except Invalid as error:
            if error.server_message.startswith(PATCH_DOES_NOT_APPLY):
                raise Conflict(f"the reservations of {name} have changed: {error}") from error
            raise
        try:
            written = msgspec.convert(answer, GpuNode)
        except msgspec.ValidationError as error:
            raise Invalid(f"GpuNode {name} is invalid after it was written: {error}") from error
        self._informers.take(written)
        return written


def _decide(node: GpuNode, batch: list[_Change]) -> tuple[GpuNodeSpec, list[_Change], list[tuple[_Change, Refusal]]]:
    """Apply a batch to one state of a node; return the new spec, the accepted changes and the refused ones."""
    spec, accepted, refused = node.spec, [], []
    for change in batch:
        try:
            spec = change.decide(node if spec is node.spec else msgspec.structs.replace(node, spec=spec))
            accepted.append(change)
        except Refusal as refusal:
            refused.append((change, refusal))
    return spec, accepted, refused


def _encoded(spec: GpuNodeSpec) -> list[Any]:
    """Return the reservations in wire form. The API server would accept invalid ones, which no reader could decode.

    Raises:
        Invalid: A reservation could not be decoded again.
    """
    encoded = msgspec.to_builtins(spec)
    try:
        msgspec.convert(encoded, GpuNodeSpec)
    except msgspec.ValidationError as error:
        raise Invalid(f"a reservation is invalid: {error}") from error
    return list(encoded.get("reservations", ()))
