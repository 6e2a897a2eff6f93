"""Releases reservations that no pod needs, and restores lost ones."""

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import structlog
from carpool_core.clock import Clock, parse_rfc3339
from carpool_core.keys import ANNOTATION_GPUS
from carpool_core.kube.api import PODS, KubeApi
from carpool_core.kube.errors import KubeError, NotFound
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import GpuNode, GpuNodeSpec, Reservation
from carpool_core.values import PodUid

from carpool_extender.cache import ledger
from carpool_extender.informers import Informers, may_run
from carpool_extender.reservations.writer import Refusal, ReservationWriter
from carpool_extender.workloads import gpus_asked

PERIOD_S = 5.0
"""Seconds from one sweep to the next."""
GRACE_S = 10.0
"""Seconds beyond its deadline after which a reservation lapses; a Binding in progress ends earlier (`LATE_S`)."""
UNCONFIRMED_S = 30.0
"""Seconds after its grace period in which a live kubelet confirms the end of a pod that it never started. A dead one
never does."""
CHUNK = 50
"""Nodes or pods that a sweep checks before it lets requests run."""
CONCURRENT = 10
"""Nodes that a sweep reads or writes at the same time, so that the API server still answers binds."""

T = TypeVar("T")
R = TypeVar("R")


def release_reason(reservation: Reservation, node: str, pod: Pod | None, now: datetime) -> str | None:
    """Return why a reservation is no longer needed; None if it is. `pod` is the one that has its pod's name now."""
    if pod is None or pod.metadata.uid != reservation.pod_uid:
        return "its pod is gone"
    if pod.is_finished:
        return f"its pod has ended with {pod.status.phase}"
    if pod.spec.node_name not in ("", node):
        return f"its pod runs on node {pod.spec.node_name}"
    if pod.spec.node_name and _never_started(pod, now):
        return f"its pod was deleted before it started, and node {node} does not confirm it"
    if not pod.spec.node_name and ledger.has_lapsed(reservation, now, GRACE_S):
        return f"its pod was not bound by {reservation.deadline}"
    return None


def _never_started(pod: Pod, now: datetime) -> bool:
    """Return whether a pod that never started was deleted so long ago that its kubelet must be dead."""
    if pod.has_started or pod.metadata.deletion_timestamp is None:
        return False
    # The API server stores the end of the grace period there, not its beginning.
    return now - parse_rfc3339(pod.metadata.deletion_timestamp) > timedelta(seconds=UNCONFIRMED_S)


async def filter_in_chunks(check: Callable[[T], R | None], items: Iterable[T]) -> list[R]:
    """Return the results of a check that are not None; requests run after every `CHUNK` items."""
    found = []
    for number, item in enumerate(list(items), start=1):
        if (result := check(item)) is not None:
            found.append(result)
        if number % CHUNK == 0:
            await asyncio.sleep(0)
    return found


async def gather_bounded(work: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    """Do some work for each item, `CONCURRENT` of them at the same time."""
    semaphore = asyncio.Semaphore(CONCURRENT)

    async def one(item: T) -> None:
        async with semaphore:
            await work(item)

    await asyncio.gather(*(one(item) for item in items))


class ReservationGC:
    """Checks a node when one of its pods ends or it lost a reservation, and all nodes every `PERIOD_S` seconds.

    A reservation is released only if the watched pods *and* the API server show that it is no longer needed.
    """

    def __init__(
        self,
        api: KubeApi,
        informers: Informers,
        writer: ReservationWriter,
        restorer: "Restorer",
        *,
        in_flight: Container[PodUid],
        leads: Callable[[], bool],
        clock: Clock,
        sleep: Callable[[float], Awaitable[Any]],
    ) -> None:
        self._api, self._informers, self._writer, self._restorer = api, informers, writer, restorer
        self._in_flight, self._leads, self._clock, self._sleep = in_flight, leads, clock, sleep
        self.orphaned = 0
        """Reservations that no pod needs and that the last sweep could not release; 0 on a standby."""
        self._due: set[str] = set()
        self._wake = asyncio.Event()
        self._log = structlog.get_logger()
        informers.on_pod(self._pod_changed)
        informers.on_node(self._node_changed)

    async def run(self) -> None:
        """Check nodes forever, once all watches have listed."""
        await self._informers.wait_synced()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep_forever())
            group.create_task(self._check_changed_forever())

    async def _sweep_forever(self) -> None:
        while True:
            next_s = self._clock.monotonic() + PERIOD_S
            await self.sweep()
            await self._sleep(max(0.0, next_s - self._clock.monotonic()))

    async def _check_changed_forever(self) -> None:
        """Check changed nodes, also while a sweep waits for a slow node."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            due, self._due = sorted(self._due), set()
            await self._check(due, [pod for name in due for pod in self._restorer.lost_on(name)])

    async def sweep(self) -> None:
        """Check every node and every pod."""
        self._restorer.forget_ended()
        self.orphaned = await self._check(self._informers.cluster.nodes, self._informers.pods())

    async def _check(self, names: Iterable[str], pods: Iterable[Pod]) -> int:
        """Release and restore reservations; return how many that no pod needs are left on these nodes."""
        if not self._leads():
            return 0
        expired = await filter_in_chunks(self._expired_on, names)
        await gather_bounded(self._release_all, expired)
        left = [still[1] for name, _ in expired if (still := self._expired_on(name)) is not None]
        await self._restorer.restore(pods, self._in_flight)
        return sum(map(len, left))

    def _expired_on(self, name: str) -> tuple[str, list[Reservation]] | None:
        """Return the reservations of a node that its watched pods no longer need; None if there are none."""
        node = self._informers.cluster.node(name)
        if node is None:
            return None
        expired = [one for one in node.spec.reservations if self._watched_reason(name, one) is not None]
        return (name, expired) if expired else None

    def _watched_reason(self, name: str, reservation: Reservation) -> str | None:
        if reservation.pod_uid in self._in_flight:
            return None
        return release_reason(reservation, name, self._informers.pod(reservation.pod_uid), self._clock.now())

    async def _release_all(self, expired: tuple[str, list[Reservation]]) -> None:
        name, reservations = expired
        await asyncio.gather(*(self._release(name, one) for one in reservations))

    async def _release(self, name: str, reservation: Reservation) -> None:
        """Release a reservation if the API server confirms that it is no longer needed."""
        pod = f"{reservation.pod_namespace}/{reservation.pod_name}"
        try:
            reason = release_reason(reservation, name, await self._read_pod(reservation), self._clock.now())
            # The pod may have been bound while the API server was asked.
            if reason is None or self._watched_reason(name, reservation) is None:
                return
            if await self._writer.release(name, reservation):
                self._log.info("released", node=name, pod=pod, because=reason)
        except KubeError as error:
            self._log.warning("release failed", node=name, pod=pod, error=str(error))

    async def _read_pod(self, reservation: Reservation) -> Pod | None:
        try:
            return await self._api.get(PODS, reservation.pod_name, Pod, namespace=reservation.pod_namespace)
        except NotFound:
            return None

    def _check_soon(self, *names: str) -> None:
        self._due.update(names)
        self._wake.set()

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        for pod in (old, new):
            if pod is not None and (pod.is_finished or new is None):
                holders = self._informers.cluster.nodes_holding(PodUid(pod.metadata.uid))
                if holders:
                    self._check_soon(*holders)

    def _node_changed(self, _: GpuNode | None, new: GpuNode | None) -> None:
        if new is not None and self._restorer.lost_on(new.metadata.name):
            self._check_soon(new.metadata.name)


class Restorer:
    """Writes the reservations of running pods again that vanished from GpuNodes.

    Without its reservation, only the agent's measurement keeps other pods off the GPUs of a running pod. A pod that has
    not started gets none back: its GPUs may have been given away before its Binding arrived. The operator replaces it.
    """

    def __init__(
        self, api: KubeApi, informers: Informers, writer: ReservationWriter, events: EventRecorder, slots: int
    ) -> None:
        self._api, self._informers, self._writer, self._events, self._slots = api, informers, writer, events, slots
        self._vanished: dict[str, dict[PodUid, Reservation]] = {}
        """Reservations that vanished from each watched GpuNode, until their pods have ended."""
        self._reported: set[PodUid] = set()
        self._log = structlog.get_logger()
        informers.on_node(self._node_changed)

    def lost_on(self, name: str) -> list[Pod]:
        """Return the running pods whose reservations vanished from a watched GpuNode."""
        pods = (self._informers.pod(uid) for uid in self._vanished.get(name, ()))
        return [pod for pod in pods if pod is not None and may_run(pod)]

    def forget_ended(self) -> None:
        """Forget what vanished or was reported about pods that have ended; a standby does this, too."""
        for name, lost in list(self._vanished.items()):
            self._vanished[name] = {uid: one for uid, one in lost.items() if self._runs(uid)}
            if not self._vanished[name]:
                del self._vanished[name]
        self._reported = {uid for uid in self._reported if self._runs(uid)}

    def _runs(self, uid: PodUid) -> bool:
        pod = self._informers.pod(uid)
        return pod is not None and may_run(pod)

    async def restore(self, pods: Iterable[Pod], in_flight: Container[PodUid]) -> None:
        """Restore the reservations of some pods that run without one, except for pods that are being bound."""
        without = await filter_in_chunks(lambda pod: pod if self._lacks_reservation(pod) else None, pods)
        await gather_bounded(self._try, [pod for pod in without if pod.metadata.uid not in in_flight])

    async def _try(self, pod: Pod) -> None:
        try:
            await self._restore(pod)
        except KubeError as error:
            self._log.warning("restoring failed", pod=_name(pod), node=pod.spec.node_name, error=str(error))

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        left = set() if new is None else {one.pod_uid for one in new.spec.reservations}
        for one in () if old is None else old.spec.reservations:
            if old is not None and one.pod_uid not in left:
                self._vanished.setdefault(old.metadata.name, {})[one.pod_uid] = one

    def _lacks_reservation(self, pod: Pod) -> bool:
        """Return whether a pod has started and has no reservation, which can be restored or reported.

        A node without GPUs has to wait: its agent has not reported yet.
        """
        uid, name = PodUid(pod.metadata.uid), pod.spec.node_name
        if not (pod.has_started and may_run(pod)) or name in self._informers.cluster.nodes_holding(uid):
            return False
        if uid in self._reported and uid not in self._vanished.get(name, {}):
            return False
        node = self._informers.cluster.node(name)
        return node is not None and bool(node.status.devices) and bool(gpus_asked(pod))

    async def _restore(self, pod: Pod) -> None:
        """Write a pod's reservation again if the API server confirms that the pod runs and has none."""
        uid, name = PodUid(pod.metadata.uid), pod.spec.node_name
        if ledger.held((await self._writer.read(name)).spec, uid) is not None:
            return
        if (found := await self._still_running(pod)) is None:
            return
        lost = self._vanished.get(name, {}).get(uid)
        # A broken watch may have missed the last reservation, so that an earlier one is known, on other GPUs.
        bound_to = found.metadata.annotations.get(ANNOTATION_GPUS)
        if lost is None or bound_to not in (None, ",".join(lost.gpu_uuids)):
            await self._report(pod, "nothing is known of the reservation that it had")
            return

        def decide(node: GpuNode) -> GpuNodeSpec:
            spec = ledger.reserve(node.spec, lost, ledger.capacity_of(node, self._slots))
            if isinstance(spec, ledger.Rejected):
                raise Refusal(spec.reason)
            return spec

        try:
            await self._writer.change(name, decide)
        except Refusal as refusal:  # the next sweep tries again
            await self._report(pod, f"the reservation that it had cannot be written again: {refusal}")
            return
        self._log.warning("reservation restored", pod=_name(pod), node=name, gpus=lost.gpu_uuids)

    async def _still_running(self, pod: Pod) -> Pod | None:
        """Read a pod; return None if it does not run any more."""
        try:
            found = await self._api.get(PODS, pod.metadata.name, Pod, namespace=pod.metadata.namespace)
        except NotFound:
            return None
        return found if found.metadata.uid == pod.metadata.uid and may_run(found) else None

    async def _report(self, pod: Pod, reason: str) -> None:
        """Record once that a running pod has no reservation."""
        uid = PodUid(pod.metadata.uid)
        if uid in self._reported:
            return
        self._reported.add(uid)
        message = (
            f"pod {_name(pod)} runs on node {pod.spec.node_name} without a reservation, so nothing is kept for it; "
            f"{reason}; delete the pod, and the operator makes another in its place"
        )
        self._log.error("reservation lost", pod=_name(pod), node=pod.spec.node_name, because=reason)
        await self._events.record(
            kind=PODS,
            namespace=pod.metadata.namespace,
            name=pod.metadata.name,
            uid=pod.metadata.uid,
            type="Warning",
            reason="ReservationLost",
            message=message,
        )


def _name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
