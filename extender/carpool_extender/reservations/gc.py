"""Gives back the reservations of pods that need them no longer, and has waiting pods tried again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Iterable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import structlog
from carpool_core.clock import Clock, parse_rfc3339, rfc3339
from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import NODES, PODS, KubeApi
from carpool_core.kube.errors import KubeError, NotFound
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import GpuNode, GpuNodeSpec, Reservation
from carpool_core.values import PodUid

from carpool_extender.cache import ledger
from carpool_extender.cache.cluster import may_free_capacity
from carpool_extender.informers import Informers
from carpool_extender.reservations.writer import Refusal, ReservationWriter
from carpool_extender.workloads import gpus_asked

GRACE_S = 10.0
"""Beyond a deadline before a reservation lapses: whoever was binding has long given up, whatever its clock says."""
UNCONFIRMED_S = 30.0
"""After its grace period, how long a kubelet has to confirm the end of a pod that it never started. One that lives does
so at once and starts nothing that is being deleted; of a dead node nobody ever confirms it."""


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


def is_certain(reservation: Reservation, node: str, pod: Pod | None) -> bool:
    """Whether a pod runs where its reservation is: so of nearly all, and nothing more has to be asked."""
    if pod is None or pod.metadata.uid != reservation.pod_uid or pod.spec.node_name != node:
        return False
    return not pod.is_finished and pod.metadata.deletion_timestamp is None


AT_A_TIME = 50
"""Pods that are looked at in one go, while requests wait."""


class Restorer:
    """Remembers the reservations that vanish from GpuNodes, and writes those again whose pods run on.

    Without its reservation nothing is kept for a running pod but what it is measured to take, and only its agent's word
    keeps others off its GPU.

    Args:
        api: The Kubernetes API.
        informers: What is known of the cluster.
        writer: Where reservations are written.
        events: Where it is told that a reservation is lost for good.
        slots: Most tenants of one GPU.
    """

    def __init__(
        self, api: KubeApi, informers: Informers, writer: ReservationWriter, events: EventRecorder, slots: int
    ) -> None:
        self._api, self._informers, self._writer, self._events, self._slots = api, informers, writer, events, slots
        self._vanished: dict[PodUid, tuple[str, Reservation]] = {}
        self._told: set[PodUid] = set()
        self._unsure: set[PodUid] = set()
        self._log = structlog.get_logger()
        informers.on_pod(self._pod_changed)
        informers.on_node(self._node_changed)

    async def restore(self, open_: Container[PodUid], *, is_all: bool = True) -> None:
        """Look after bound pods that run without a reservation, but not those that are being bound.

        Args:
            open_: The pods that are being bound.
            is_all: Whether to look at every pod, not only at those of which something was heard, or that had none.
        """
        unsure, self._unsure = self._unsure, set()
        known = (self._informers.pod(uid) for uid in unsure)
        pods = list(self._informers.pods()) if is_all else [pod for pod in known if pod is not None]
        for begin in range(0, len(pods), AT_A_TIME):
            without = [pod for pod in pods[begin : begin + AT_A_TIME] if self._runs_without(pod)]
            self._unsure.update(PodUid(pod.metadata.uid) for pod in without)
            await self._look_at(without, open_)
            await asyncio.sleep(0)  # requests come before

    async def restore_vanished(self, open_: Container[PodUid]) -> None:
        """Look after the pods whose reservations vanished only."""
        pods = [self._informers.pod(uid) for uid in self._vanished]
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
        for uid in [uid for uid in (*self._vanished, *self._told) if not _runs(self._informers.pod(uid))]:
            self._vanished.pop(uid, None)
            self._told.discard(uid)

    def _runs_without(self, pod: Pod) -> bool:
        """Whether a bound pod runs without a reservation, and nobody was told of that."""
        uid, node = PodUid(pod.metadata.uid), pod.spec.node_name
        return (
            bool(node)
            and node not in self._informers.cluster.nodes_holding(uid)
            and uid not in self._told
            and _runs(pod)
        )

    def _lacks_reservation(self, pod: Pod) -> bool:
        """Whether it does so on a node whose agent reports GPUs; others have to wait for that."""
        node = self._informers.cluster.node(pod.spec.node_name) if self._runs_without(pod) else None
        return node is not None and bool(node.status.devices) and bool(gpus_asked(pod))

    async def _restore(self, pod: Pod) -> None:
        """Write a pod's reservation again, if the server says too that the pod runs and has none."""
        uid, name = PodUid(pod.metadata.uid), pod.spec.node_name
        if ledger.held((await self._writer.read(name)).spec, uid) is not None or not await self._still_runs(pod):
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
            await self._writer.change(name, decide)
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


T = TypeVar("T")

AT_ONCE = 10
"""Most nodes about which the server is asked or told at once, so that it answers binds meanwhile."""


async def gather_bounded(work: Callable[[str, T], Awaitable[None]], items: Iterable[tuple[str, T]]) -> None:
    """Do something for each of some nodes; one that takes long keeps its place, and the others go on."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(name: str, item: T) -> None:
        async with places:
            await work(name, item)

    await asyncio.gather(*(one(name, item) for name, item in items))


PERIOD_S = 5.0
EVERYTHING_EVERY = 12
"""Of so many sweeps one looks at everything, the others at what has changed or was not certain: a minute is soon enough
for what nobody told of, and to ask about each of 30,000 reservations takes long."""
JANITOR_AT_A_TIME, GLANCES = 10, 250
"""Nodes that are looked at in one go, or glanced at, while requests wait, which take several turns."""
TOUCH_LATE_S = 600.0
"""After this time a Node need not be touched any more: kube-scheduler has retried every pod by itself (5 minutes)."""


class ReservationGC:
    """Looks at a node when a pod of it ends or its capacity changes, and at all of them every few seconds."""

    def __init__(
        self,
        api: KubeApi,
        informers: Informers,
        writer: ReservationWriter,
        restorer: Restorer,
        *,
        clock: Clock,
        sleep: Callable[[float], Awaitable[Any]],
    ) -> None:
        self._restorer = restorer
        self._api, self._informers, self._writer, self._clock, self._sleep = api, informers, writer, clock, sleep
        self._open: Container[PodUid] = ()
        self._restoring = asyncio.Lock()
        self._stirred = asyncio.Event()
        self._due: set[str] = set()
        self._touched: dict[str, str] = {}
        self._grown: set[str] = set()
        self._unavailable: set[str] = set()
        self._unreadable: set[PodUid] = set()
        self._certain: dict[str, GpuNodeSpec] = {}
        self._late: set[str] = set()
        self._sweeps = 0
        self._log = structlog.get_logger()
        informers.on_pod(self._pod_changed)
        informers.on_node(self._node_changed)

    @property
    def remembered(self) -> set[str]:
        """Names of the nodes of which something is kept in mind."""
        return {*self._touched, *self._grown, *self._unavailable, *self._certain, *self._late}

    def leave_alone(self, pods: Container[PodUid]) -> None:
        """Name the pods that are being bound at present, whose reservations are not to be judged."""
        self._open = pods

    def remind(self, name: str) -> None:
        """Have kube-scheduler try those that wait, because of what a node has room for."""
        if self._informers.cluster.node(name) is None:
            return
        self._grown.add(name)
        self._due.add(name)
        self._stirred.set()

    async def run(self) -> None:
        """Look after nodes for ever, once all watches have listed."""
        await self._informers.wait_synced()
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
        is_all = self._sweeps % EVERYTHING_EVERY == 0
        self._sweeps += 1
        await self._release([over async for over in self._all_over(is_all=is_all)])
        async with self._restoring:
            await self._restorer.restore(self._open, is_all=is_all)
        # Time alone may have made room: a GPU whose rest is over, an agent that is back.
        unavailable = self._informers.cluster.unavailable_nodes()
        nodes = self._informers.cluster.nodes.keys()
        self._grown |= (self._unavailable - unavailable) & nodes
        self._unavailable = unavailable
        if is_all:
            self._late |= nodes
            self._forget((self._touched.keys() | self._certain.keys()) - nodes)
        names, freed = list(self._grown | self._late), []
        for begin in range(0, len(names), GLANCES):
            freed += self._untouched(names[begin : begin + GLANCES])
            await asyncio.sleep(0)
        await self._touch(freed)

    async def _all_over(self, *, is_all: bool) -> AsyncIterator[tuple[str, list[Reservation]]]:
        """Go through all nodes, or those of which not everything was certain; requests come before."""
        names = list(self._informers.cluster.nodes)
        for begin in range(0, len(names), GLANCES):
            some = [name for name in names[begin : begin + GLANCES] if is_all or self._is_open(name)]
            for first in range(0, len(some), JANITOR_AT_A_TIME):
                for over in self._over(some[first : first + JANITOR_AT_A_TIME]):
                    yield over
                await asyncio.sleep(0)
            await asyncio.sleep(0)

    def _is_open(self, name: str) -> bool:
        """Whether not all reservations of a node were certain when it was last looked at, or it has changed since."""
        node = self._informers.cluster.node(name)
        return node is not None and self._certain.get(name) is not node.spec

    def _forget(self, names: Iterable[str]) -> None:
        """Keep in mind what exists only."""
        for name in names:
            self._touched.pop(name, None)
            self._certain.pop(name, None)
            self._grown.discard(name)
        self._unreadable = {uid for uid in self._unreadable if self._informers.cluster.nodes_holding(uid)}

    async def _look_at(self, names: Collection[str]) -> None:
        await self._release(self._over(names))
        async with self._restoring:
            await self._restorer.restore_vanished(self._open)
        await self._touch(self._untouched(names))

    def _over(self, names: Iterable[str]) -> list[tuple[str, list[Reservation]]]:
        """Return what is needed no longer on some nodes, as far as is known here, node by node."""
        due = []
        for name in names:
            node = self._informers.cluster.node(name)
            if node is None:
                continue
            pod = self._informers.pod
            uncertain = [one for one in node.spec.reservations if not is_certain(one, name, pod(one.pod_uid))]
            if not uncertain:
                self._certain[name] = node.spec  # until that is another, or a pod of it changes
            for one in uncertain:
                self._tell_if_unreadable(name, one)
            if over := [one for one in uncertain if one.pod_uid not in self._open and self._ended(name, one)]:
                due.append((name, over))
        return due

    async def _release(self, due: Iterable[tuple[str, list[Reservation]]]) -> None:
        await gather_bounded(self._judge_all, due)

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
        found = []
        for name in names:
            node = self._informers.cluster.node(name)
            if node is None or self._is_touched(name, node):
                self._late.discard(name)
            else:
                found.append((name, node))
        return found

    def _is_touched(self, name: str, node: GpuNode) -> bool:
        return name not in self._grown and self._touched.get(name, "") == _freed(node)

    async def _touch(self, nodes: Iterable[tuple[str, GpuNode]]) -> None:
        await gather_bounded(self._touch_one, nodes)

    async def _judge(self, name: str, reservation: Reservation) -> str | None:
        """Say why a reservation is needed no longer if the server confirms it."""
        try:
            return ended(reservation, name, await self._read(reservation), self._clock.now())
        except KubeError as error:
            self._tell_failure(name, reservation, error)
            return None

    def _ended(self, name: str, reservation: Reservation) -> str | None:
        """What the cache says."""
        return ended(reservation, name, self._informers.pod(reservation.pod_uid), self._clock.now())

    async def _give_back(self, name: str, reservation: Reservation, why: str) -> None:
        # Others of the node were asked about meanwhile: it may have been bound in that time, or released.
        node = self._informers.cluster.node(name)
        pod_uid = reservation.pod_uid
        held = None if node is None else ledger.held(node.spec, pod_uid)
        if held is None or pod_uid in self._open or self._ended(name, held) is None:
            return
        try:
            await self._writer.release(name, pod_uid)
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
            found = reservation.deadline[:64]
            self._log.warning("deadline unreadable", node=name, pod=reservation.pod_name, found=found)

    async def _read(self, reservation: Reservation) -> Pod | None:
        try:
            return await self._api.get(PODS, reservation.pod_name, Pod, namespace=reservation.pod_namespace)
        except NotFound:
            return None

    async def _touch_one(self, name: str, node: GpuNode) -> None:
        """Touch the Node, unless it is so long ago that kube-scheduler has tried every pod by itself."""
        if self._is_touched(name, node):
            return  # meanwhile
        freed, has_grown = _freed(node), name in self._grown
        self._grown.discard(name)  # what is told meanwhile is for the next time
        if has_grown or not self._is_old(freed):
            try:
                mark = {ANNOTATION_CAPACITY_FREED: rfc3339(self._clock.now())}
                await self._api.patch(NODES, name, {"metadata": {"annotations": mark}})
            except NotFound:
                self._log.info("node gone", node=name)
            except KubeError as error:
                self._log.warning("touch failed", node=name, error=str(error))
                self._grown |= {name} if has_grown else set()
                return
        self._touched[name] = freed

    def _is_old(self, freed: str) -> bool:
        try:
            return self._clock.now() - parse_rfc3339(freed) > timedelta(seconds=TOUCH_LATE_S)
        except ValueError:
            return False

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        for pod in (old, new):
            holders = [] if pod is None else self._informers.cluster.nodes_holding(PodUid(pod.metadata.uid))
            for name in holders:
                self._certain.pop(name, None)
            if holders and pod is not None and (pod.is_finished or new is None):
                self._due.update(holders)
                self._stirred.set()

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if new is None:
            self._forget([] if old is None else [old.metadata.name])
            return
        name = new.metadata.name
        if may_free_capacity(old, new):
            self._grown.add(name)
        if not self._is_touched(name, new):
            self._late.add(name)  # until it is, however often that fails
            self._due.add(name)
            self._stirred.set()


def _freed(node: GpuNode) -> str:
    """When capacity was freed there last; empty where that was never told."""
    return node.metadata.annotations.get(ANNOTATION_CAPACITY_FREED, "")
