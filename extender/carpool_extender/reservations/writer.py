"""Writing the ledgers: compare-and-swap on GpuNodes, so that two writers never promise the same thing twice."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from carpool_core.clock import Clock, rfc3339
from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import GPU_NODES, KubeApi
from carpool_core.kube.errors import PATCH_DOES_NOT_APPLY, Conflict, Invalid, KubeError, NotFound, Retryable
from carpool_core.resources.node import GpuNode, GpuNodeSpec
from carpool_core.values import PodUid

from carpool_extender.cache import ledger
from carpool_extender.informers import Informers

UNTRACKED: Mapping[str, Any] = {"op": "add", "path": "/metadata/managedFields", "value": [{}]}
"""As a part of a JSON patch. Nobody applies a GpuNode, and that record is to be read and written with each report of
its agent: with dozens of reservations, each with a dozen fields, it is as long as the rest."""
AT_ONCE = 4


class Untracker:
    """Looks after GpuNodes that were created, and have no reservation yet: the first one has the same done.

    An agent cannot do it: it may write the status of its GpuNode only.

    Args:
        api: The Kubernetes API.
        informers: What is known of the cluster.
    """

    def __init__(self, api: KubeApi, informers: Informers) -> None:
        self._api, self._informers = api, informers
        self._asked: set[str] = set()
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Look for ever. A server that was too busy is asked again with the node's next sign of life."""
        while True:
            await self._informers.heard_of_tracked.wait()
            self._informers.heard_of_tracked.clear()
            await self.sweep()

    async def sweep(self) -> None:
        """Ask for it once for each GpuNode, a few at a time."""
        tracked = dict(self._informers.tracked)
        self._asked &= {*tracked.values()}
        due = [(name, uid) for name, uid in tracked.items() if uid not in self._asked]
        for begin in range(0, len(due), AT_ONCE):
            await asyncio.gather(*(self._ask(name, uid) for name, uid in due[begin : begin + AT_ONCE]))

    async def _ask(self, name: str, uid: str) -> None:
        patch: list[Mapping[str, Any]] = [{"op": "test", "path": "/metadata/uid", "value": uid}, UNTRACKED]
        try:
            await self._api.patch(GPU_NODES, name, patch, wants_object=False)
        except Retryable:
            return
        except KubeError as error:
            self._log.info("fields stay tracked", node=name, error=str(error))
        self._asked.add(uid)


ATTEMPTS = 8
FIRST_PAUSE_S = 0.05
GATHER_S = 0.1
"""After a write of a node, so long is gathered what is written there next: a GpuNode has tens of reservations, every
write carries all of them, and its agent answers each with a report. What comes to a node at rest is written at once."""

MOST_GATHERED_S = 1.0
"""Longest that is gathered. Where a write takes long the API server is busy: four times as long is gathered then, so
that there is less to write. One of sixteen reservations costs it six times as much as a pod.

Only what was gathered shows that there is something to gather: a single change is mostly followed by one that waits for
it, such as the next worker of a gang. And whoever is to have what was freed is not kept waiting for it."""


class Refusal(Exception):  # noqa: N818  # an answer, not a failure of ours
    """The newest state of a node does not allow a change; `str()` says why."""


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """Something to be written."""

    decide: Callable[[GpuNode], GpuNodeSpec]
    frees: bool
    outcome: "asyncio.Future[GpuNode]"

    def fail(self, error: Exception) -> None:
        """Tell whoever waits, if somebody does still."""
        if not self.outcome.done():
            self.outcome.set_exception(error)


class ReservationWriter:
    """The ledgers of all nodes. What comes while a node is being written, or soon after, is written together.

    Args:
        api: Where GpuNodes are written.
        informers: What is known of them.
        clock: Tells when capacity was freed.
        sleep: Waits between tries, and while changes are gathered.
        gather_s: Seconds from one write of a node to the next.
    """

    def __init__(
        self,
        api: KubeApi,
        informers: Informers,
        clock: Clock,
        sleep: Callable[[float], Awaitable[Any]],
        gather_s: float = GATHER_S,
    ) -> None:
        self._api, self._informers, self._clock, self._sleep = api, informers, clock, sleep
        self._gather_s = gather_s
        self._waiting: dict[str, list[_Change]] = {}
        self._writers: dict[str, asyncio.Task[None]] = {}
        self._took_s: dict[str, float] = {}

    async def read(self, name: str) -> GpuNode:
        """Read a GpuNode from the server. Raises KubeError."""
        node = await self._api.get(GPU_NODES, name, GpuNode)
        self._informers.take(node)
        return self._informers.cluster.node(name) or node

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
        change = _Change(decide, frees, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(name, []).append(change)
        if name not in self._writers:
            self._writers[name] = asyncio.create_task(self._write_all(name))
        return await change.outcome

    async def _write_all(self, name: str) -> None:
        """Write until nothing waits any more."""
        try:
            while batch := self._waiting.pop(name, []):
                gathers_more = len(batch) > 1 and not any(change.frees for change in batch)
                await self._settle(name, batch)
                took_s = self._took_s.pop(name, 0.0)
                stretched_s = min(4 * took_s, MOST_GATHERED_S) if gathers_more else 0.0
                await self._sleep(max(self._gather_s, stretched_s))
        finally:
            del self._writers[name]

    async def _settle(self, name: str, batch: list[_Change]) -> None:
        cached = self._informers.cluster.node(name)
        failure: KubeError | None = None
        for attempt in range(ATTEMPTS):
            try:
                batch = await self._try(cached or await self.read(name), batch, is_final=cached is None)
                if not batch:
                    return
            except Conflict as error:
                failure = error
            except Retryable as error:
                # Whether it was written is unknown; the next read tells.
                failure = error
                if attempt + 1 < ATTEMPTS:
                    await self._sleep(FIRST_PAUSE_S * 2**attempt)
            except Exception as error:
                if isinstance(error, Invalid) and len(batch) > 1:
                    for change in batch:  # one that can never be written takes no other with it
                        await self._settle(name, [change])
                    return
                for change in batch:
                    change.fail(error)
                return
            cached = None
        for change in batch:
            change.fail(failure or AssertionError("no attempt was made"))

    async def _try(self, node: GpuNode, batch: list[_Change], *, is_final: bool) -> list[_Change]:
        """Decide everything on one state of a node and write it; return what that state refuses, unless it is final."""
        spec, accepted, refused = node.spec, [], []
        for change in batch:
            try:
                spec = change.decide(node if spec is node.spec else msgspec.structs.replace(node, spec=spec))
                accepted.append(change)
            except Refusal as refusal:
                if is_final:
                    change.fail(refusal)
                else:
                    refused.append(change)
        batch[:] = [*accepted, *refused]  # what is refused for good is not decided again after a conflict
        frees = any(change.frees for change in accepted)
        written = node if spec is node.spec else await self._write(node, spec, frees=frees)
        for change in accepted:
            if not change.outcome.done():
                change.outcome.set_result(written)
        return refused

    async def release(self, name: str, pod_uid: PodUid) -> None:
        """Take a pod's reservation away; it may be gone already. Raises KubeError."""
        try:
            await self.change(name, lambda node: ledger.release(node.spec, pod_uid), frees=True)
        except NotFound:
            return

    async def _write(self, node: GpuNode, spec: GpuNodeSpec, *, frees: bool) -> GpuNode:
        name, said = node.metadata.name, _checked(spec)
        began = self._clock.monotonic()
        if frees:
            # Written together with the release, so that a crash before the Node is touched is made good later.
            freed = {ANNOTATION_CAPACITY_FREED: rfc3339(self._clock.now())}
            metadata = {"resourceVersion": node.metadata.resource_version, "annotations": freed}
            answer = await self._api.patch(GPU_NODES, name, {"metadata": metadata, "spec": {"reservations": said}})
        else:
            answer = await self._write_unless_changed(node, said)
        self._took_s[name] = self._clock.monotonic() - began
        try:
            written = msgspec.convert(answer, GpuNode)
        except msgspec.ValidationError as error:
            raise Invalid(f"GpuNode {name} makes no sense since it was written: {error}") from error
        self._informers.take(written)
        return written

    async def _write_unless_changed(self, node: GpuNode, reservations: list[Any]) -> dict[str, Any]:
        """Replace the reservations unless others have changed them. Raises Conflict.

        The generation counts changes of the spec alone, so that nothing has to be decided again because the agent has
        reported: it reports on each reservation at about the time when the next one is written.
        """
        patch: list[Mapping[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": node.metadata.uid},
            {"op": "test", "path": "/metadata/generation", "value": node.metadata.generation},
            {"op": "add", "path": "/spec", "value": {"reservations": reservations}},
            UNTRACKED,
        ]
        try:
            return await self._api.patch(GPU_NODES, node.metadata.name, patch)
        except Invalid as error:
            if error.server_message.startswith(PATCH_DOES_NOT_APPLY):
                raise Conflict(f"the reservations of {node.metadata.name} have changed: {error}") from error
            raise


def _checked(spec: GpuNodeSpec) -> list[Any]:
    """Return reservations as they go over the wire; the API server takes whatever it is given, and readers do not.

    Raises:
        Invalid: Nobody would read them.
    """
    said = msgspec.to_builtins(spec)
    try:
        msgspec.convert(said, GpuNodeSpec)
    except msgspec.ValidationError as error:
        raise Invalid(f"a reservation makes no sense: {error}") from error
    return list(said.get("reservations", ()))
