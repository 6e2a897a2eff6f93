"""Gives back the reservations of pods that need them no longer, and has waiting pods tried again."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Container, Iterable
from datetime import timedelta
from typing import Any, TypeVar

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
from carpool_extender.endings import ended, is_certain
from carpool_extender.restorer import Restorer
from carpool_extender.watches import Watches

T = TypeVar("T")

PERIOD_S = 5.0
AT_A_TIME = 10
"""Nodes that are looked at in one go, while requests wait: a request takes several turns, and waits in each."""
ASKED_AT_ONCE = 10
"""Most nodes about which a sweep asks or tells the server at once, so that it answers binds meanwhile; of what pods and
nodes tell of, as many."""
TOUCH_LATE_S = 600.0
"""After this time a Node need not be touched any more: kube-scheduler has retried every pod by itself (5 minutes)."""


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
        self._restoring = asyncio.Lock()
        self._stirred = asyncio.Event()
        self._due: set[str] = set()
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
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep_for_ever())
            group.create_task(self._answer_for_ever())

    async def _sweep_for_ever(self) -> None:
        while True:
            again_at = self._clock.monotonic() + PERIOD_S
            await self.sweep()
            await self._sleep(max(0.0, again_at - self._clock.monotonic()))

    async def _answer_for_ever(self) -> None:
        """Look at what pods and nodes tell of; a sweep that has much to release keeps nobody waiting."""
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            due, self._due = self._due, set()
            await self._look_at(due)

    async def sweep(self) -> None:
        """Release what is needed no longer, restore what was lost, touch the Nodes whose GPUs have more room."""
        names, due = list(self._watches.cluster.nodes), []
        for begin in range(0, len(names), AT_A_TIME):
            due += self._uncertain(names[begin : begin + AT_A_TIME])
            await asyncio.sleep(0)  # requests come before
        await self._release(due)
        async with self._restoring:
            await self._restorer.restore(self._open)
        # Time alone may have made room: a GPU whose rest is over, an agent that is back.
        hindered = self._watches.cluster.hindered_nodes()
        self._grown |= self._hindered - hindered
        self._hindered = hindered
        freed = []
        for begin in range(0, len(names), AT_A_TIME):
            freed += self._untouched(names[begin : begin + AT_A_TIME])
            await asyncio.sleep(0)
        await self._touch(freed)
        self._forget()

    def _forget(self) -> None:
        """Keep in mind what exists only."""
        cluster = self._watches.cluster
        self._touched = {name: freed for name, freed in self._touched.items() if name in cluster.nodes}
        self._grown &= cluster.nodes.keys()
        self._unreadable = {uid for uid in self._unreadable if cluster.holders(uid)}

    async def _look_at(self, names: Collection[str]) -> None:
        await self._release(self._uncertain(names))
        async with self._restoring:
            await self._restorer.restore_vanished(self._open)
        await self._touch(self._untouched(names))

    def _uncertain(self, names: Iterable[str]) -> list[tuple[str, list[Reservation]]]:
        """Return what of some nodes has to be judged, node by node."""
        due = []
        for name in names:
            node = self._watches.cluster.node(name)
            here = [r for r in (() if node is None else node.spec.reservations) if self._is_uncertain(name, r)]
            if here:
                due.append((name, here))
        return due

    def _is_uncertain(self, name: str, reservation: Reservation) -> bool:
        known = self._watches.pod(reservation.pod_uid)
        return reservation.pod_uid not in self._open and not is_certain(reservation, name, known)

    async def _release(self, due: Iterable[tuple[str, list[Reservation]]]) -> None:
        await _few_at_once(self._judge_all, due)

    async def _judge_all(self, name: str, reservations: list[Reservation]) -> None:
        """Judge what stands on a node before anything is released, so that all of it is written at once."""
        reasons = await asyncio.gather(*(self._judge(name, reservation) for reservation in reservations))
        over = [(one, why) for one, why in zip(reservations, reasons, strict=True) if why is not None]
        await asyncio.gather(*(self._give_back(name, reservation, why) for reservation, why in over))

    def _untouched(self, names: Iterable[str]) -> list[tuple[str, GpuNode]]:
        """Return those of some nodes where capacity was freed since they were last touched.

        It goes by what stands in the GpuNode, so that a release whose writer died before touching is made good, and
        each extender touches only after it has itself seen the release.
        """
        found = [(name, self._watches.cluster.node(name)) for name in names]
        return [(name, node) for name, node in found if node is not None and not self._is_touched(name, node)]

    def _is_touched(self, name: str, node: GpuNode) -> bool:
        return name not in self._grown and self._touched.get(name, "") == _freed(node)

    async def _touch(self, nodes: Iterable[tuple[str, GpuNode]]) -> None:
        await _few_at_once(self._touch_one, nodes)

    async def _judge(self, name: str, reservation: Reservation) -> str | None:
        """Say why a reservation is needed no longer if the cache says so and the server confirms it."""
        self._tell_if_unreadable(name, reservation)
        if self._ended(name, reservation) is None:
            return None
        try:
            return ended(reservation, name, await self._read(reservation), self._clock.now())
        except KubeError as error:
            self._tell_failure(name, reservation, error)
            return None

    def _ended(self, name: str, reservation: Reservation) -> str | None:
        """What the cache says."""
        return ended(reservation, name, self._watches.pod(reservation.pod_uid), self._clock.now())

    async def _give_back(self, name: str, reservation: Reservation, why: str) -> None:
        # Others of the node were asked about meanwhile: it may have been bound in that time, or released.
        node = self._watches.cluster.node(name)
        held = None if node is None else ledger.held(node.spec, reservation.pod_uid)
        if held is None or not self._is_uncertain(name, held) or self._ended(name, held) is None:
            return
        try:
            await self._book.release(name, reservation.pod_uid)
        except KubeError as error:
            self._tell_failure(name, reservation, error)
            return
        self._log.info("released", node=name, pod=f"{reservation.pod_namespace}/{reservation.pod_name}", because=why)

    def _tell_failure(self, name: str, reservation: Reservation, error: KubeError) -> None:
        self._log.warning("release failed", node=name, pod=reservation.pod_name, error=str(error))

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

    async def _touch_one(self, name: str, node: GpuNode) -> None:
        """Touch the Node, unless it is so long ago that kube-scheduler has tried every pod by itself."""
        if self._is_touched(name, node):
            return  # meanwhile
        freed = _freed(node)
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
        if not self._is_touched(name, new):
            self._due.add(name)
            self._stirred.set()


def _freed(node: GpuNode) -> str:
    """When capacity was freed there last; empty where that was never told."""
    return node.metadata.annotations.get(ANNOTATION_CAPACITY_FREED, "")


async def _few_at_once(work: Callable[[str, T], Awaitable[None]], items: Iterable[tuple[str, T]]) -> None:
    """Do something for each of some nodes; one that takes long keeps its place, and the others go on."""
    places = asyncio.Semaphore(ASKED_AT_ONCE)

    async def one(name: str, item: T) -> None:
        async with places:
            await work(name, item)

    await asyncio.gather(*(one(name, item) for name, item in items))
