"""Writes reservations again that running pods have lost, as when a GpuNode was deleted and created anew."""

import asyncio
from collections.abc import Container

import structlog
from carpool_core.kube.api import PODS, KubeApi
from carpool_core.kube.errors import KubeError, NotFound
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import GpuNode, GpuNodeSpec, Reservation
from carpool_core.values import PodUid

from carpool_extender.kube.watches import Watches
from carpool_extender.kube.workloads import gpus_asked
from carpool_extender.reservations.book import Book, Refusal
from carpool_extender.state import ledger

AT_A_TIME = 50
"""Pods that are looked at in one go, while requests wait."""


class Restorer:
    """Remembers the reservations that vanish from GpuNodes, and writes those again whose pods run on.

    Without its reservation nothing is kept for a running pod but what it is measured to take, and only its agent's word
    keeps others off its GPU.

    Args:
        api: The Kubernetes API.
        watches: What is known of the cluster.
        book: Where reservations are written.
        events: Where it is told that a reservation is lost for good.
        slots: Most tenants of one GPU.
    """

    def __init__(self, api: KubeApi, watches: Watches, book: Book, events: EventRecorder, slots: int) -> None:
        self._api, self._watches, self._book, self._events, self._slots = api, watches, book, events, slots
        self._vanished: dict[PodUid, tuple[str, Reservation]] = {}
        self._told: set[PodUid] = set()
        self._unsure: set[PodUid] = set()
        self._log = structlog.get_logger()
        watches.on_pod(self._pod_changed)
        watches.on_node(self._node_changed)

    async def restore(self, open_: Container[PodUid], *, is_all: bool = True) -> None:
        """Look after bound pods that run without a reservation, but not those that are being bound.

        Args:
            open_: The pods that are being bound.
            is_all: Whether to look at every pod, not only at those of which something was heard, or that had none.
        """
        unsure, self._unsure = self._unsure, set()
        known = (self._watches.pod(uid) for uid in unsure)
        pods = list(self._watches.pods()) if is_all else [pod for pod in known if pod is not None]
        for begin in range(0, len(pods), AT_A_TIME):
            without = [pod for pod in pods[begin : begin + AT_A_TIME] if self._runs_without(pod)]
            self._unsure.update(PodUid(pod.metadata.uid) for pod in without)
            await self._look_at(without, open_)
            await asyncio.sleep(0)  # requests come before

    async def restore_vanished(self, open_: Container[PodUid]) -> None:
        """Look after the pods whose reservations vanished only."""
        pods = [self._watches.pod(uid) for uid in self._vanished]
        await self._look_at([pod for pod in pods if pod is not None], open_)

    async def _look_at(self, pods: list[Pod], open_: Container[PodUid]) -> None:
        """Restore all of some pods at once: what is restored on a node together is written together."""
        self._forget_ended()
        due = [pod for pod in pods if self._lacks_reservation(pod) and pod.metadata.uid not in open_]
        await asyncio.gather(*(self._try(pod) for pod in due))

    async def _try(self, pod: Pod) -> None:
        try:
            await self._restore(pod)
        except KubeError as error:
            self._log.warning("restoring failed", pod=_named(pod), node=pod.spec.node_name, error=str(error))

    def _pod_changed(self, _: Pod | None, new: Pod | None) -> None:
        if new is not None:
            self._unsure.add(PodUid(new.metadata.uid))

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if old is None:
            return
        left = set() if new is None else {r.pod_uid for r in new.spec.reservations}
        for reservation in old.spec.reservations:
            if reservation.pod_uid not in left:
                self._vanished[reservation.pod_uid] = (old.metadata.name, reservation)
                self._unsure.add(reservation.pod_uid)

    def _forget_ended(self) -> None:
        for uid in [uid for uid in (*self._vanished, *self._told) if not _runs(self._watches.pod(uid))]:
            self._vanished.pop(uid, None)
            self._told.discard(uid)

    def _runs_without(self, pod: Pod) -> bool:
        """Whether a bound pod runs without a reservation, and nobody was told of that."""
        uid, node = PodUid(pod.metadata.uid), pod.spec.node_name
        return bool(node) and node not in self._watches.cluster.holders(uid) and uid not in self._told and _runs(pod)

    def _lacks_reservation(self, pod: Pod) -> bool:
        """Whether it does so on a node whose agent reports GPUs; others have to wait for that."""
        node = self._watches.cluster.node(pod.spec.node_name) if self._runs_without(pod) else None
        return node is not None and bool(node.status.devices) and bool(gpus_asked(pod))

    async def _restore(self, pod: Pod) -> None:
        """Write a pod's reservation again, if the server says too that the pod runs and has none."""
        uid, name = PodUid(pod.metadata.uid), pod.spec.node_name
        if ledger.held((await self._book.read(name)).spec, uid) is not None or not await self._still_runs(pod):
            return
        node, known = self._vanished.get(uid, ("", None))
        if known is None or node != name:
            await self._tell(pod, "nothing is known of the reservation that it had")
            return

        def decide(node: GpuNode) -> GpuNodeSpec:
            spec = ledger.reserve(node.spec, known, ledger.capacity_of(node, self._slots))
            if isinstance(spec, ledger.Rejected):
                raise Refusal(spec.reason)
            return spec

        try:
            await self._book.change(name, decide)
        except Refusal as refusal:
            await self._tell(pod, f"the reservation that it had cannot be written again: {refusal}")
            return
        self._log.warning("reservation restored", pod=_named(pod), node=name, gpus=known.gpu_uuids)

    async def _still_runs(self, pod: Pod) -> bool:
        try:
            found = await self._api.get(PODS, pod.metadata.name, Pod, namespace=pod.metadata.namespace)
        except NotFound:
            return False
        return found.metadata.uid == pod.metadata.uid and _runs(found)

    async def _tell(self, pod: Pod, why: str) -> None:
        """Say once that nothing is kept for a pod."""
        self._told.add(PodUid(pod.metadata.uid))
        message = (
            f"pod {_named(pod)} runs on node {pod.spec.node_name} without a reservation, so nothing is kept for it; "
            f"{why}; delete the pod, and the operator makes another in its place"
        )
        self._log.error("reservation lost", pod=_named(pod), node=pod.spec.node_name, because=why)
        await self._events.record(
            kind=PODS,
            namespace=pod.metadata.namespace,
            name=pod.metadata.name,
            uid=pod.metadata.uid,
            type="Warning",
            reason="ReservationLost",
            message=message,
        )


def _runs(pod: Pod | None) -> bool:
    """Whether a pod has a node and may run there; one that is being deleted before it started never will."""
    if pod is None or not pod.spec.node_name or pod.is_finished:
        return False
    return pod.has_started or pod.metadata.deletion_timestamp is None


def _named(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
