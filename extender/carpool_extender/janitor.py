"""Gives back the reservations of pods that need them no longer, and has waiting pods tried again."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Container, Iterable
from datetime import datetime, timedelta
from typing import Any

import structlog
from carpool_core.clock import Clock, parse_rfc3339, rfc3339
from carpool_core.deviceclass import class_of
from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import NODES, PODS, KubeApi
from carpool_core.kube.errors import KubeError, NotFound
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import Device, GpuNode, Reservation
from carpool_core.values import DeviceHealth, PodUid

from carpool_extender import ledger
from carpool_extender.book import Book
from carpool_extender.doubts import has_strangers
from carpool_extender.restorer import Restorer
from carpool_extender.watches import Watches

PERIOD_S = 5.0
AT_A_TIME = 10
"""Nodes that are looked at in one go, while requests wait: a request takes several turns, and waits in each."""
GRACE_S = 10.0
"""Beyond a deadline before a reservation lapses: whoever was binding has long given up, whatever its clock says."""
UNCONFIRMED_S = 30.0
"""After its grace period, how long a kubelet has to confirm the end of a pod that it never started. One that lives does
so at once and starts nothing that is being deleted; of a dead node nobody ever confirms it."""
TOUCH_LATE_S = 600.0
"""After this time a Node need not be touched any more: kube-scheduler has retried every pod by itself (5 minutes)."""


def ended(reservation: Reservation, node: str, pod: Pod | None, now: datetime) -> str | None:
    """Say why a reservation on a node is needed no longer; None where it is.

    Args:
        reservation: Whose end is in question.
        node: Name of the node that it stands on.
        pod: The pod that has its name, or None.
        now: Present time.
    """
    if pod is None or pod.metadata.uid != reservation.pod_uid:
        return "its pod is gone"
    if pod.is_finished:
        return f"its pod has ended with {pod.status.phase}"
    if pod.spec.node_name not in ("", node):
        return f"its pod runs on node {pod.spec.node_name}"
    if pod.spec.node_name and _is_given_up(pod, now):
        return f"its pod was deleted before it started, and node {node} does not confirm it"
    if not pod.spec.node_name and ledger.has_lapsed(reservation, now, GRACE_S):
        return f"its pod was not bound by {reservation.deadline}"
    return None


def _is_given_up(pod: Pod, now: datetime) -> bool:
    """Whether a pod that never started was deleted so long ago that its node must be gone."""
    if pod.has_started or pod.metadata.deletion_timestamp is None:
        return False
    # The API server writes the end of the grace period there, not its beginning.
    return now - parse_rfc3339(pod.metadata.deletion_timestamp) > timedelta(seconds=UNCONFIRMED_S)


def may_hold_more(old: GpuNode | None, new: GpuNode) -> bool:
    """Whether a change of a GpuNode may give a waiting pod a place, besides releases: those tell of themselves.

    That a GPU changed its mode for a tenant, or fell sick, gives nobody a place.
    """
    if old is None or (has_strangers(old) and not has_strangers(new)):
        return True
    before = {device.uuid: device for device in old.status.devices}
    return any(_may_hold_more(before.get(device.uuid), device) for device in new.status.devices)


def _may_hold_more(old: Device | None, new: Device) -> bool:
    if old is None or (old.health is not new.health and new.health is DeviceHealth.HEALTHY):
        return True
    return class_of(old) != class_of(new) or old.nvlink_peers != new.nvlink_peers


def is_certain(reservation: Reservation, node: str, pod: Pod | None) -> bool:
    """Whether a pod runs where its reservation is: so of nearly all, and nothing more has to be asked."""
    if pod is None or pod.metadata.uid != reservation.pod_uid or pod.spec.node_name != node:
        return False
    return not pod.is_finished and pod.metadata.deletion_timestamp is None


class Janitor:
    """Looks at a node when a pod of it ends or its capacity changes, and at all of them every few seconds."""

    def __init__(
        self,
        api: KubeApi,
        watches: Watches,
        book: Book,
        restorer: Restorer,
        clock: Clock,
        sleep: Callable[[float], Awaitable[Any]],
    ) -> None:
        self._restorer = restorer
        self._api, self._watches, self._book, self._clock, self._sleep = api, watches, book, clock, sleep
        self._open: Container[PodUid] = ()
        self._stirred = asyncio.Event()
        self._due: set[str] = set()
        self._all_at = 0.0
        self._touched: dict[str, str] = {}
        self._grown: set[str] = set()
        self._hindered: set[str] = set()
        self._unreadable: set[PodUid] = set()
        self._log = structlog.get_logger()
        watches.on_pod_end(self._pod_ended)
        watches.on_node(self._node_changed)

    @property
    def remembered(self) -> set[str]:
        """Names of the nodes of which something is kept in mind."""
        return {*self._touched, *self._grown, *self._hindered}

    def leave_alone(self, pods: Container[PodUid]) -> None:
        """Name the pods that are being bound at present, whose reservations are not to be judged."""
        self._open = pods

    async def run(self) -> None:
        """Look after nodes for ever, once all watches have listed."""
        await self._watches.wait_synced()
        while True:
            self._stirred.clear()
            due, self._due = self._due, set()
            if self._clock.monotonic() >= self._all_at:
                self._all_at = self._clock.monotonic() + PERIOD_S
                await self.sweep()
            else:
                await self._look_at(due)
            await self._rest()

    async def sweep(self) -> None:
        """Release what is needed no longer, restore what was lost, touch the Nodes whose GPUs have more room."""
        names = list(self._watches.cluster.nodes)
        for begin in range(0, len(names), AT_A_TIME):
            await self._release(names[begin : begin + AT_A_TIME])
            await asyncio.sleep(0)  # requests come before
        await self._restorer.restore(self._open)
        # Time alone may have made room: a GPU whose rest is over, an agent that is back.
        hindered = self._watches.cluster.hindered_nodes()
        self._grown |= self._hindered - hindered
        self._hindered = hindered
        for begin in range(0, len(names), AT_A_TIME):
            await self._touch(names[begin : begin + AT_A_TIME])
            await asyncio.sleep(0)
        self._forget()

    def _forget(self) -> None:
        """Keep in mind what exists only."""
        cluster = self._watches.cluster
        self._touched = {name: freed for name, freed in self._touched.items() if name in cluster.nodes}
        self._grown &= cluster.nodes.keys()
        self._unreadable = {uid for uid in self._unreadable if cluster.holders(uid)}

    async def _look_at(self, names: Collection[str]) -> None:
        await self._release(names)
        await self._restorer.restore_vanished(self._open)
        await self._touch(names)

    async def _release(self, names: Iterable[str]) -> None:
        """Judge all of some nodes at once: what is released of a node together is written together."""
        due = []
        for name in names:
            node = self._watches.cluster.node(name)
            for reservation in () if node is None else node.spec.reservations:
                known = self._watches.pod(reservation.pod_uid)
                if reservation.pod_uid not in self._open and not is_certain(reservation, name, known):
                    due.append((name, reservation))
        await asyncio.gather(*(self._judge(name, reservation) for name, reservation in due))

    async def _touch(self, names: Iterable[str]) -> None:
        for name in names:
            node = self._watches.cluster.node(name)
            if node is not None:
                await self._touch_if_freed(name, node)

    async def _rest(self) -> None:
        left_s = max(0.0, self._all_at - self._clock.monotonic())
        waits = [asyncio.ensure_future(self._stirred.wait()), asyncio.ensure_future(self._sleep(left_s))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _judge(self, name: str, reservation: Reservation) -> None:
        """Release a reservation if the cache says so and the server confirms it."""
        self._tell_if_unreadable(name, reservation)
        known = self._watches.pod(reservation.pod_uid)
        if ended(reservation, name, known, self._clock.now()) is None:
            return
        try:
            why = ended(reservation, name, await self._read(reservation), self._clock.now())
            if why is None or reservation.pod_uid in self._open:
                return
            await self._book.release(name, reservation.pod_uid)
        except KubeError as error:
            self._log.warning("release failed", node=name, pod=reservation.pod_name, error=str(error))
            return
        self._log.info("released", node=name, pod=f"{reservation.pod_namespace}/{reservation.pod_name}", because=why)

    def _tell_if_unreadable(self, name: str, reservation: Reservation) -> None:
        """Log, once, a deadline that cannot be read, and so ends nothing."""
        if not reservation.deadline or ledger.deadline_of(reservation) is not None:
            return
        if reservation.pod_uid not in self._unreadable:
            self._unreadable.add(reservation.pod_uid)
            self._log.warning(
                "deadline unreadable", node=name, pod=reservation.pod_name, found=reservation.deadline[:64]
            )

    async def _read(self, reservation: Reservation) -> Pod | None:
        try:
            return await self._api.get(PODS, reservation.pod_name, Pod, namespace=reservation.pod_namespace)
        except NotFound:
            return None

    async def _touch_if_freed(self, name: str, node: GpuNode) -> None:
        """Touch the Node if capacity was freed there since it was last touched.

        It goes by what stands in the GpuNode, so that a release whose writer died before touching is made good, and
        each extender touches only after it has itself seen the release.
        """
        freed = node.metadata.annotations.get(ANNOTATION_CAPACITY_FREED, "")
        if name not in self._grown and self._touched.get(name, "") == freed:
            return
        if name in self._grown or not self._is_old(freed):
            try:
                mark = {ANNOTATION_CAPACITY_FREED: rfc3339(self._clock.now())}
                await self._api.patch(NODES, name, {"metadata": {"annotations": mark}})
            except NotFound:
                self._log.info("node gone", node=name)
            except KubeError as error:
                self._log.warning("touch failed", node=name, error=str(error))
                return
        self._touched[name] = freed
        self._grown.discard(name)

    def _is_old(self, freed: str) -> bool:
        try:
            return self._clock.now() - parse_rfc3339(freed) > timedelta(seconds=TOUCH_LATE_S)
        except ValueError:
            return False

    def _pod_ended(self, pod: Pod) -> None:
        self._due.update(self._watches.cluster.holders(PodUid(pod.metadata.uid)))
        self._stirred.set()

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if new is None:
            return
        name = new.metadata.name
        if may_hold_more(old, new):
            self._grown.add(name)
        if name in self._grown or self._touched.get(name, "") != new.metadata.annotations.get(
            ANNOTATION_CAPACITY_FREED, ""
        ):
            self._due.add(name)
            self._stirred.set()
