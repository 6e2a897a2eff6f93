"""Bind: decide again, reserve, wait for the agent, bind. Idempotent by pod UID, and safe to kill at any await."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec
import structlog
from carpool_core.clock import Clock, parse_rfc3339
from carpool_core.keys import ANNOTATION_GPUS, ANNOTATION_MEMORY, ANNOTATION_MODE, ANNOTATION_REASON
from carpool_core.kube.api import PODS, KubeApi
from carpool_core.kube.errors import Conflict, KubeError, NotFound, Refused, Retryable, Unreachable
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import GpuNode, GpuNodeSpec, Reservation
from carpool_core.values import PartitionState, PodUid

from carpool_extender.cache import ledger
from carpool_extender.cache.cluster import GpuBackoff
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.extender_api import BindingArgs
from carpool_extender.framework.selection import EvaluationCache, place_on_node, reservation_of
from carpool_extender.informers import Informers
from carpool_extender.metrics import ExtenderMetrics
from carpool_extender.reservations.writer import Refusal, ReservationWriter
from carpool_extender.workloads import NotOurs, Workloads, too_many

MAX_CONCURRENT_BINDS = 128
"""Binds from reservation to Binding at the same time. A busy API server that completes eight binds a second works off
this many within the 20 s for which a reservation lasts."""
BINDING_ATTEMPTS = 3
FIRST_PAUSE_S = 0.2
"""Pause after the first Binding that got no answer; it doubles with each attempt."""
LATE_S = 5.0
"""Time after its deadline for which a Binding may still be under way; less than the grace of `ReservationGC`."""
UNPREPARED = ("PartitionFailed", "PartitionTimeout")
"""Reasons for which the GPUs take no pods for a while, so that others are tried first."""

T = TypeVar("T")


class BindError(Exception):
    """The pod was not bound, or it is unknown whether it was; the reservation stays until its deadline."""


class AbandonedError(BindError):
    """The pod was certainly not bound, so its reservation is released."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BindDeps:
    """Everything outside the extender's own state that binding uses."""

    api: KubeApi
    clock: Clock
    sleep: Callable[[float], Awaitable[Any]]
    events: EventRecorder
    telemetry: ExtenderMetrics
    backoff: GpuBackoff


@dataclass(frozen=True, slots=True)
class InFlightBind:
    """A bind in progress."""

    node: str
    task: asyncio.Task[str]


class Binder:
    """Binds many pods concurrently, each once.

    Args:
        in_flight: Binds in progress by pod; the binder keeps it up to date.
        forget_claim: Deletes the claim of a pod, in whose place its reservation is decided.
    """

    def __init__(
        self,
        deps: BindDeps,
        informers: Informers,
        workloads: Workloads,
        writer: ReservationWriter,
        *,
        evaluation_cache: EvaluationCache,
        in_flight: dict[PodUid, InFlightBind],
        forget_claim: Callable[[PodUid], None],
        slots: int,
        timeout_s: float,
    ) -> None:
        self._deps, self._informers, self._workloads, self._writer = deps, informers, workloads, writer
        self._evaluation_cache, self._forget_claim = evaluation_cache, forget_claim
        self._slots, self._timeout_s = slots, timeout_s
        self._in_flight = in_flight
        self._concurrent = asyncio.Semaphore(MAX_CONCURRENT_BINDS)
        self._log = structlog.get_logger()

    def node_of(self, uid: PodUid) -> str | None:
        """Return the node that a pod is being bound to; None if no bind is in progress."""
        running = self._in_flight.get(uid)
        return None if running is None else running.node

    async def bind(self, args: BindingArgs) -> str:
        """Bind a pod; return an empty string, or the reason why it was not bound.

        A replay for the same node joins the bind in progress. The bind goes on if the caller is cancelled.
        """
        uid = PodUid(args.pod_uid)
        running = self._in_flight.get(uid)
        if running is None:
            running = self._in_flight[uid] = InFlightBind(args.node, asyncio.create_task(self._run(args)))
            running.task.add_done_callback(lambda _: self._in_flight.pop(uid))
        elif running.node != args.node:
            return f"{_name(args)} is being bound to node {running.node} at present, not to {args.node}; try again"
        return await asyncio.shield(running.task)

    async def _run(self, args: BindingArgs) -> str:
        """Bind, and turn every expected failure into its message."""
        log = self._log.bind(pod=f"{args.pod_namespace}/{args.pod_name}", node=args.node)
        try:
            await self._bind(args)
        except (BindError, NotOurs, Refusal) as error:
            message = str(error)
        except KubeError as error:
            message = f"{_name(args)} was not bound to node {args.node}: {error}"
        else:
            log.info("bound")
            return ""
        log.warning("not bound", error=message)
        return message

    async def _bind(self, args: BindingArgs) -> None:
        step = self._deps.telemetry.step

        # 1. Find the pod. A replay of a bind that succeeded ends here.
        pod = self._informers.pod(PodUid(args.pod_uid)) or await self._read_pod(args)
        if pod.spec.node_name == args.node:
            return
        check_unbound(pod, args)

        async with self._limited():
            # 2. Decide on the GPUs with the newest state, and write the reservation.
            with step("reserve"):
                reserved, is_found = await self._reserve(await self._workloads.of(pod), args)
            try:
                # 3. Wait until the node's agent reports the share Ready.
                with step("prepare"):
                    await self._wait_until_ready(args, reserved)
                # 4. Bind the pod.
                with step("bind"):
                    await self._post_binding(args, reserved)
            except AbandonedError as error:
                # 5. Give back a reservation that this bind has written: the pod was certainly not bound. The bind that
                #    wrote any other may be bound by an extender that led before: `ReservationGC` releases it.
                if not is_found:
                    await self._give_back(args, reserved, error)
                await self._report(args, error)
                raise

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Wait until fewer than `MAX_CONCURRENT_BINDS` binds are under way: too many would all miss their deadlines."""
        with self._deps.telemetry.kept_back() if self._concurrent.locked() else nullcontext():
            await self._concurrent.acquire()
        try:
            yield
        finally:
            self._concurrent.release()

    # Step 2: reserve

    async def _reserve(self, pod_request: PodRequest, args: BindingArgs) -> tuple[Reservation, bool]:
        """Write the reservation, or take over the one that an earlier bind left; return it, and whether it was found.

        The decision counts in the cluster cache until it is written, so that other pods see its GPUs as taken. A
        reservation that was taken over has another deadline, so that the earlier bind, perhaps of another extender,
        does not release it.
        """
        uid, cluster = PodUid(args.pod_uid), self._informers.cluster
        for other in cluster.nodes_holding(uid):
            if other != args.node:
                await self._check_not_held_on(other, args)

        is_found, wanted = False, None

        def decide(node: GpuNode) -> GpuNodeSpec:
            nonlocal is_found, wanted
            cluster.forget(args.node, uid)
            found = ledger.held(node.spec, uid)
            is_own = found is not None and wanted is not None and ledger.is_same(found, wanted)  # the answer was lost
            is_found = found is not None and not is_own
            if found is not None:
                return node.spec if is_own else ledger.take_over(node.spec, uid, self._timeout_s)
            wanted = self._assume(pod_request, args, node)
            spec = ledger.reserve(node.spec, wanted, ledger.capacity_of(node, self._slots))
            if isinstance(spec, ledger.Rejected):
                raise Refusal(f"node {args.node} no longer has room for {_name(args)}: {spec.reason}")
            return spec

        self._forget_claim(uid)
        watched = cluster.node(args.node)
        if watched is not None and ledger.held(watched.spec, uid) is not None:
            await self._writer.read(args.node)  # `decide` may find nothing to write
        elif watched is not None:
            with suppress(Refusal):  # `decide` refuses it, too
                self._assume(pod_request, args, watched)
        try:
            node = await self._writer.change(args.node, decide)
        finally:
            cluster.forget(args.node, uid)
        reserved = ledger.held(node.spec, uid)
        if reserved is None:
            raise BindError(f"the reservation of {_name(args)} on node {args.node} was taken away at once; try again")
        return reserved, is_found

    def _assume(self, pod_request: PodRequest, args: BindingArgs, node: GpuNode) -> Reservation:
        """Decide on a reservation by the cluster cache, and count it there. Raises Refusal."""
        wanted = self._wanted(pod_request, args, node)
        self._informers.cluster.assume(args.node, wanted)
        return wanted

    def _wanted(self, pod_request: PodRequest, args: BindingArgs, node: GpuNode) -> Reservation:
        uid, now = PodUid(args.pod_uid), self._deps.clock.now()
        holders = self._informers.workers_with_reservation(pod_request.demand.job_uid)
        if (reason := too_many(pod_request, uid, holders)) is not None:
            raise Refusal(reason)
        among = self._informers.cluster.without_workers(pod_request.demand.job_uid, [uid])
        chosen = place_on_node(self._evaluation_cache.of(pod_request), args.node, among)
        if isinstance(chosen, str):
            raise Refusal(chosen)
        wanted = reservation_of(chosen, pod_request, uid, args.pod_name, now=now, deadline=self._deadline())
        return msgspec.structs.replace(wanted, generation=ledger.next_generation(node, uid, now))

    async def _check_not_held_on(self, other: str, args: BindingArgs) -> None:
        """Raise BindError if the pod has a reservation on another node."""
        try:
            held = ledger.held((await self._writer.read(other)).spec, PodUid(args.pod_uid))
        except NotFound:
            return
        if held is not None:
            raise BindError(
                f"{_name(args)} has a reservation on node {other}, so it cannot be bound to {args.node}; "
                f"retry on {other}, or after {held.deadline}, when it lapses unless the pod is bound there"
            )

    # Step 3: wait until Ready

    async def _wait_until_ready(self, args: BindingArgs, reserved: Reservation) -> None:
        """Wait for the agent until the reservation's deadline. Raises AbandonedError."""
        try:
            await wait_for(self._ready(args, reserved), self._seconds_left(reserved), self._deps.sleep)
        except TimeoutError as error:
            raise AbandonedError(
                "PartitionTimeout",
                f"the agent of node {args.node} did not prepare the GPU for {_name(args)} within "
                f"{self._timeout_s:g} s; see the node agent's log and `kubectl describe gpunode {args.node}`",
            ) from error
        self._deps.backoff.record_success(args.node, reserved.gpu_uuids)

    async def _ready(self, args: BindingArgs, reserved: Reservation) -> None:
        while True:
            node = self._informers.cluster.node(args.node)
            if node is None or ledger.held(node.spec, reserved.pod_uid) is None:
                raise AbandonedError("ReservationGone", f"the reservation of {_name(args)} on {args.node} is gone")
            for partition in node.status.partitions:
                if (partition.pod_uid, partition.generation) != (reserved.pod_uid, reserved.generation):
                    continue
                if partition.state is PartitionState.READY:
                    return
                if partition.state is PartitionState.FAILED:
                    raise AbandonedError(
                        "PartitionFailed",
                        f"node {args.node} could not prepare {reserved.mode} for {_name(args)}: {partition.message}",
                    )
            await self._informers.wait_for_change(args.node)

    # Step 4: bind

    async def _post_binding(self, args: BindingArgs, reserved: Reservation) -> None:
        """Write the Binding. If its outcome is unknown, read the pod and try again.

        Raises:
            AbandonedError: The pod was certainly not bound.
            BindError: It is unknown whether the pod was bound.
        """
        for attempt in range(BINDING_ATTEMPTS):
            if self._seconds_left(reserved) < -LATE_S:
                break  # from now on another extender may release the reservation
            error = await self._try_binding(args, reserved)
            if error is None:
                return
            is_bound = await self._is_bound(args)
            if is_bound:
                return
            if isinstance(error, Refused | Conflict):
                # After a lost answer, or with an unreadable pod, a refusal does not prove that the pod is unbound.
                if attempt == 0 and is_bound is False:
                    raise AbandonedError("BindingRefused", f"{_name(args)} was not bound: {error}") from error
                break
            await self._deps.sleep(FIRST_PAUSE_S * 2**attempt)
        raise BindError(
            f"whether {_name(args)} was bound to node {args.node} is not known, because the API server did not answer "
            f"in time; its reservation stays until {reserved.deadline}"
        )

    async def _try_binding(self, args: BindingArgs, reserved: Reservation) -> KubeError | None:
        """Write the Binding once; return the error, or None. The call ends before the reservation may be released."""
        body = binding_of(reserved, args.node)
        call = self._deps.api.create(
            PODS, body, namespace=args.pod_namespace, name=args.pod_name, subresource="binding"
        )
        try:
            await wait_for(call, self._seconds_left(reserved) + LATE_S, self._deps.sleep)
        except (Conflict, Refused) as error:
            return error
        except (TimeoutError, Retryable) as error:
            self._log.warning("binding unanswered", pod=_name(args), error=str(error))
            return error if isinstance(error, Retryable) else Unreachable(str(error))
        return None

    async def _is_bound(self, args: BindingArgs) -> bool | None:
        """Return whether the pod is bound to the node; None if it cannot be read.

        Raises:
            AbandonedError: The pod is gone, or bound to another node.
        """
        try:
            pod = await self._read_pod(args)
        except KubeError:
            return None
        if pod.spec.node_name not in ("", args.node):
            raise AbandonedError("BoundElsewhere", f"{_name(args)} is bound to node {pod.spec.node_name} already")
        return pod.spec.node_name == args.node

    async def _read_pod(self, args: BindingArgs) -> Pod:
        """Read the pod from the API server. Raises AbandonedError if it is gone, KubeError if it cannot be read."""
        try:
            pod = await self._deps.api.get(PODS, args.pod_name, Pod, namespace=args.pod_namespace)
        except NotFound as error:
            raise AbandonedError("PodGone", f"{_name(args)} no longer exists") from error
        if pod.metadata.uid != args.pod_uid:
            raise AbandonedError("PodGone", f"{_name(args)} has UID {pod.metadata.uid} now, not {args.pod_uid}")
        return pod

    # Step 5: give back

    async def _give_back(self, args: BindingArgs, reserved: Reservation, why: AbandonedError) -> None:
        """Release the reservation. `ReservationGC` repeats a release that fails here."""
        if why.reason in UNPREPARED:
            self._deps.backoff.record_failure(args.node, reserved.gpu_uuids)
        try:
            await self._writer.release(args.node, reserved)
        except KubeError as error:
            self._log.warning("release failed", pod=_name(args), node=args.node, error=str(error))

    async def _report(self, args: BindingArgs, why: AbandonedError) -> None:
        """Record an Event of the pod."""
        if why.reason != "PodGone":
            await self._deps.events.record(
                kind=PODS,
                namespace=args.pod_namespace,
                name=args.pod_name,
                uid=args.pod_uid,
                type="Warning",
                reason=why.reason,
                message=str(why),
            )

    def _deadline(self) -> datetime:
        return self._deps.clock.now() + timedelta(seconds=self._timeout_s)

    def _seconds_left(self, reserved: Reservation) -> float:
        """Return the seconds until a reservation's deadline; negative after it."""
        return (parse_rfc3339(reserved.deadline) - self._deps.clock.now()).total_seconds()


def check_unbound(pod: Pod, args: BindingArgs) -> None:
    """Raise BindError if a pod can no longer be bound."""
    if pod.spec.node_name:
        raise BindError(f"{_name(args)} is bound to node {pod.spec.node_name}, so it cannot be bound to {args.node}")
    if pod.is_finished or pod.metadata.deletion_timestamp is not None:
        raise BindError(f"{_name(args)} has finished or is being deleted, so it is not bound")


def binding_of(reserved: Reservation, node: str) -> dict[str, Any]:
    """Return the Binding of a reservation's pod, with annotations for people and for runtimes without CDI.

    The UID is a precondition. The API server merges the annotations into the pod in the same write as `nodeName`.
    Carpool trusts none of them; a reservation that contradicts them is not restored.
    """
    annotations = {
        ANNOTATION_GPUS: ",".join(reserved.gpu_uuids),
        ANNOTATION_MODE: reserved.mode.value,
        ANNOTATION_REASON: reserved.reason,
    }
    if reserved.memory_limit_mib is not None:
        annotations[ANNOTATION_MEMORY] = str(reserved.memory_limit_mib)
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": reserved.pod_name,
            "namespace": reserved.pod_namespace,
            "uid": reserved.pod_uid,
            "annotations": annotations,
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }


async def wait_for(work: Awaitable[T], limit_s: float, sleep: Callable[[float], Awaitable[Any]]) -> T:
    """Return the result of some work; cancel it after `limit_s` seconds and raise TimeoutError."""
    working = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(sleep(max(0.0, limit_s)))
    try:
        await asyncio.wait({working, timer}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        working.cancel()
        timer.cancel()
    raise TimeoutError(f"expected an answer within {limit_s:.0f} s, found none")


def _name(args: BindingArgs) -> str:
    return f"pod {args.pod_namespace}/{args.pod_name}"
