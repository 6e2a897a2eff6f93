"""Bind: decide once more, reserve, wait for the node's agent, bind. Idempotent by pod UID, safe to kill anywhere."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
import structlog
from carpool_core.clock import Clock, parse_rfc3339, rfc3339
from carpool_core.keys import ANNOTATION_GPUS, ANNOTATION_MEMORY, ANNOTATION_MODE, ANNOTATION_REASON
from carpool_core.kube.api import PODS, KubeApi
from carpool_core.kube.errors import Conflict, KubeError, NotFound, Refused, Retryable, Unreachable
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import GpuNode, GpuNodeSpec, Reservation
from carpool_core.values import JobUid, PartitionState, PodUid

from carpool_extender.cache import ledger
from carpool_extender.cache.health import GpuAvailability, still_valid
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.extender_api import BindingArgs
from carpool_extender.framework.evaluation_cache import EvaluationCache
from carpool_extender.framework.gang import Gangs
from carpool_extender.framework.selection import place_on_node, reservation_of
from carpool_extender.informers import Informers
from carpool_extender.metrics import ExtenderMetrics
from carpool_extender.queue.nominator import Keeper
from carpool_extender.reservations.writer import Refusal, ReservationWriter
from carpool_extender.workloads import NotOurs, NotYet, Workloads, too_many

TRIES = 3
PAUSE_S = 0.2
LATE_S = 5.0
"""How long after its deadline a Binding may still be on its way; less than the janitor's grace."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BindDeps:
    """What binding needs of the world."""

    api: KubeApi
    clock: Clock
    sleep: Callable[[float], Awaitable[Any]]
    events: EventRecorder
    telemetry: ExtenderMetrics
    standing: GpuAvailability


class BindError(Exception):
    """The pod was not bound, or nobody knows; whatever is reserved stays until its deadline. `str()` says why."""


class AbandonedError(BindError):
    """The pod was certainly not bound, so its reservation is given back."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def named(args: BindingArgs) -> str:
    """Name a pod for people."""
    return f"pod {args.pod_namespace}/{args.pod_name}"


def check_unbound(pod: Pod, args: BindingArgs) -> None:
    """See that a pod can still be bound.

    Raises:
        BindError: It cannot.
    """
    if pod.spec.node_name:
        raise BindError(f"{named(args)} is bound to node {pod.spec.node_name}, so it cannot be bound to {args.node}")
    if pod.is_finished or pod.metadata.deletion_timestamp is not None:
        raise BindError(f"{named(args)} has finished or is being deleted, so it is not bound")


async def wait_for(work: Awaitable[T], limit_s: float, sleep: Callable[[float], Awaitable[Any]]) -> T:
    """Wait for some work so long and no longer.

    Args:
        work: What is waited for; it is cancelled where it takes too long.
        limit_s: Seconds that it may take.
        sleep: Tells when they are over.

    Raises:
        TimeoutError: It took longer.
    """
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


def binding_of(reserved: Reservation, node: str) -> dict[str, Any]:
    """Build the Binding of a reservation's pod, with annotations for people and for runtimes without CDI.

    Its UID is a precondition. The API server merges the annotations into the pod in the same write as `nodeName`.
    Nothing of ours trusts them.
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


class Poster:
    """Writes Bindings.

    Args:
        api: The Kubernetes API.
        clock: Tells whether a reservation may still be bound.
        sleep: Waits between tries.
    """

    def __init__(self, api: KubeApi, clock: Clock, sleep: Callable[[float], Awaitable[Any]]) -> None:
        self._api, self._clock, self._sleep = api, clock, sleep
        self._log = structlog.get_logger()

    def seconds_left(self, reserved: Reservation) -> float:
        """Return how long a reservation lives still."""
        return (parse_rfc3339(reserved.deadline) - self._clock.now()).total_seconds()

    async def post(self, args: BindingArgs, reserved: Reservation) -> None:
        """Bind; where the answer leaves it open, read the pod.

        Raises:
            AbandonedError: The pod was not bound.
            BindError: Whether it was is not known.
        """
        for attempt in range(TRIES):
            if self.seconds_left(reserved) < -LATE_S:
                # Other extenders may release the reservation from now on, so the pod must not be bound on it.
                break
            definite = await self._try(args, reserved)
            if definite is None or await self._is_bound(args):
                return
            if isinstance(definite, Refused | Conflict) and attempt == 0:
                raise AbandonedError("BindingRefused", f"{named(args)} was not bound: {definite}") from definite
            if isinstance(definite, Refused | Conflict):
                break
            await self._sleep(PAUSE_S * 2**attempt)
        raise BindError(
            f"whether {named(args)} was bound to node {args.node} is not known, because the API server did not answer "
            f"in time; its reservation stays until {reserved.deadline}"
        )

    async def _try(self, args: BindingArgs, reserved: Reservation) -> KubeError | None:
        """Write the Binding once; return what came of it instead.

        Nothing is waited for beyond the time in which the reservation surely stands: the call itself may take longer.
        """
        body = binding_of(reserved, args.node)
        call = self._api.create(PODS, body, namespace=args.pod_namespace, name=args.pod_name, subresource="binding")
        try:
            await wait_for(call, self.seconds_left(reserved) + LATE_S, self._sleep)
        except (Conflict, Refused) as error:
            return error
        except TimeoutError as error:
            self._log.warning("binding unanswered", pod=named(args), error=str(error))
            return Unreachable(str(error))
        except Retryable as error:
            self._log.warning("binding unanswered", pod=named(args), error=str(error))
            return error
        return None

    async def read(self, args: BindingArgs) -> Pod:
        """Read the pod from the server.

        Raises:
            AbandonedError: It is gone, or another one has its name.
            KubeError: It could not be read.
        """
        try:
            pod = await self._api.get(PODS, args.pod_name, Pod, namespace=args.pod_namespace)
        except NotFound as error:
            raise AbandonedError("PodGone", f"{named(args)} no longer exists") from error
        if pod.metadata.uid != args.pod_uid:
            raise AbandonedError("PodGone", f"{named(args)} has UID {pod.metadata.uid} now, not {args.pod_uid}")
        return pod

    async def _is_bound(self, args: BindingArgs) -> bool:
        """Read whether the pod is bound as decided. Raises AbandonedError where it never can be: gone, or elsewhere."""
        try:
            pod = await self.read(args)
        except Retryable:
            return False
        if pod.spec.node_name not in ("", args.node):
            raise AbandonedError("BoundElsewhere", f"{named(args)} is bound to node {pod.spec.node_name} already")
        return pod.spec.node_name == args.node


FIRST, LEAST, MOST = 128, 32, 512
"""Binds that may be under way at once: at first, and whatever happens. A control plane that does nothing else has forty
to eighty, so that nothing is kept back there."""
QUICK, SLOW = 0.15, 0.6
"""A bind that took less of the time for which a reservation lasts shows that there is room for more of them, one that
took more of it that there are too many."""
MORE = 0.25
"""What a quick bind adds to the number: those that began before many others are quick, too."""
CUT, CUT_EVERY_S = 0.75, 5.0
"""What is left of the number after a slow bind, and for how long later slow ones tell nothing new."""
PATIENCE_S = 5.0
"""Longest that a pod is kept back: binds that wait for a sick node's agent hold up nobody for long."""


class BindLimiter:
    """Keeps pods back while as many are being bound as can be.

    kube-scheduler offers the next pod while the last is being bound, as fast as the extender answers. On a machine that
    is too busy the binds grow in number until each takes longer than a reservation lasts. Then all of them are given
    back and tried again, which is more work than before, and nothing is bound any more. So a pod is offered a place
    only where few enough are under way, of which there may be one more with every few quick binds, and a quarter less
    with a slow one. kube-scheduler asks about one pod at a time, and waits meanwhile.

    Args:
        clock: Tells how long binds take.
        sleep: Ends the patience of a pod.
        timeout_s: Seconds for which a reservation lasts.
    """

    def __init__(self, clock: Clock, sleep: Callable[[float], Awaitable[Any]], timeout_s: float) -> None:
        self._clock, self._sleep = clock, sleep
        self._quick_s, self._slow_s = QUICK * timeout_s, SLOW * timeout_s
        self._under_way = 0
        self._cut_at = clock.monotonic() - CUT_EVERY_S
        self._left = asyncio.Event()
        self.limit: float = FIRST
        """Binds that may be under way at once."""

    @property
    def is_full(self) -> bool:
        """Whether as many binds are under way as may be."""
        return self._under_way >= self.limit

    async def room(self) -> None:
        """Wait until another pod may be bound, or has waited long enough."""
        if self.is_full:
            with suppress(TimeoutError):
                await wait_for(self._until_room(), PATIENCE_S, self._sleep)

    async def _until_room(self) -> None:
        while self.is_full:
            self._left.clear()
            await self._left.wait()

    def enter(self) -> None:
        """Count a bind that has begun."""
        self._under_way += 1

    def leave(self) -> None:
        """Count a bind that has ended."""
        self._under_way -= 1
        self._left.set()

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """Do not count a bind that waits for others of its job, and have it wait for room like one that begins.

        Otherwise the workers of a job of more of them than may be under way would keep everybody else back.
        """
        self.leave()
        try:
            yield
            await self.room()
        finally:
            self.enter()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Learn from how long a bind takes; one that failed at once tells nothing."""
        began, succeeded = self._clock.monotonic(), False
        try:
            yield
            succeeded = True
        finally:
            now = self._clock.monotonic()
            if now - began >= self._slow_s:
                self._cut(now)
            elif succeeded and now - began < self._quick_s and 2 * self._under_way > self.limit:
                self.limit = min(MOST, self.limit + MORE)

    def _cut(self, now: float) -> None:
        if now - self._cut_at >= CUT_EVERY_S:
            self._cut_at = now
            self.limit = max(LEAST, CUT * self.limit)


class Turns:
    """Lets workers of a job reserve one after the other: two at once would not see each other's reservation.

    Args:
        bind_limiter: Counts binds that are under way; one that waits for its turn is not.
    """

    def __init__(self, bind_limiter: BindLimiter) -> None:
        self._bind_limiter = bind_limiter
        self._locks: WeakValueDictionary[JobUid, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, job: JobUid) -> AsyncIterator[None]:
        """Wait for the turn of a worker of a job, and have it until the block ends."""
        lock = self._locks.setdefault(job, asyncio.Lock())
        async with AsyncExitStack() as turn:
            if lock.locked():
                async with self._bind_limiter.aside():
                    await turn.enter_async_context(lock)
            else:
                await turn.enter_async_context(lock)
            yield


UNPREPARED = ("PartitionFailed", "PartitionTimeout")
"""Reasons of an `AbandonedError` that lie with the GPUs: others are tried first from then on."""


@dataclass(frozen=True, slots=True)
class _Open:
    node: str
    task: asyncio.Task[str]


class Binder:
    """Binds pods, many at a time, each once.

    Args:
        tools: The outside.
        informers: What is known of the cluster.
        workloads: Who stands behind a pod.
        writer: Where reservations are written.
        evaluation_cache: Where places are found.
        gangs: Whether all workers of a job would find one.
        keeper: Keeps GPUs for those whose turn it is.
        bind_limiter: How many may be bound at once.
        slots: Most tenants of one GPU.
        timeout_s: Seconds from the reservation to its deadline.
    """

    def __init__(
        self,
        tools: BindDeps,
        informers: Informers,
        workloads: Workloads,
        writer: ReservationWriter,
        *,
        evaluation_cache: EvaluationCache,
        gangs: Gangs,
        keeper: Keeper,
        bind_limiter: BindLimiter,
        slots: int,
        timeout_s: float,
    ) -> None:
        self._tools, self._informers, self._workloads, self._writer = tools, informers, workloads, writer
        self._evaluation_cache, self._gangs, self._keeper, self._bind_limiter = (
            evaluation_cache,
            gangs,
            keeper,
            bind_limiter,
        )
        self._slots, self._timeout_s = slots, timeout_s
        self._poster = Poster(tools.api, tools.clock, tools.sleep)
        self._open: dict[PodUid, _Open] = {}
        self._turns = Turns(bind_limiter)
        self._log = structlog.get_logger()

    @property
    def open(self) -> Container[PodUid]:
        """Pods whose binding is in progress."""
        return self._open

    def node_of(self, uid: PodUid) -> str | None:
        """Return the node that a pod is being bound to at present; None where it is not."""
        running = self._open.get(uid)
        return None if running is None else running.node

    async def room(self) -> None:
        """Wait until another pod may be bound; see `Inflow`."""
        if self._bind_limiter.is_full:
            with self._tools.telemetry.kept_back():
                await self._bind_limiter.room()

    async def bind(self, args: BindingArgs) -> str:
        """Bind a pod; return an empty string, or why it was not bound.

        A replay for the same node joins what is in progress; the caller may go away, the binding goes on.
        """
        uid = PodUid(args.pod_uid)
        running = self._open.get(uid)
        if running is None:
            running = _Open(args.node, asyncio.create_task(self._told(args)))
            self._open[uid] = running
            self._bind_limiter.enter()
            self._keeper.binding(uid)
            running.task.add_done_callback(lambda task: self._ended(uid, task))
        elif running.node != args.node:
            return f"{named(args)} is being bound to node {running.node} at present, not to {args.node}; try again"
        return await asyncio.shield(running.task)

    def _ended(self, uid: PodUid, task: asyncio.Task[str]) -> None:
        self._open.pop(uid, None)
        self._bind_limiter.leave()
        if task.cancelled() or task.exception() is not None or task.result():
            self._keeper.unbound(uid)

    async def _told(self, args: BindingArgs) -> str:
        """Bind, and turn every expected failure into its sentence."""
        log = self._log.bind(pod=f"{args.pod_namespace}/{args.pod_name}", node=args.node)
        try:
            await self._bind(args)
        except (BindError, NotOurs, NotYet, Refusal) as error:
            told = str(error)
        except KubeError as error:
            told = f"{named(args)} was not bound to node {args.node}: {error}"
        else:
            log.info("bound")
            return ""
        log.warning("not bound", error=told)
        return told

    async def _bind(self, args: BindingArgs) -> None:
        pod = await self._pod(args)
        if pod.spec.node_name == args.node:
            return
        check_unbound(pod, args)
        with ExitStack() as measured:
            with self._tools.telemetry.step("reserve"):
                pod_request = await self._workloads.of(pod)
                async with self._turns.of(pod_request.demand.job_uid):
                    measured.enter_context(self._bind_limiter.measured())
                    reserved = await self._reserve(pod_request, args)
            await self._settle(args, reserved)

    async def _settle(self, args: BindingArgs, reserved: Reservation) -> None:
        """Have a reservation prepared, and bind its pod; what certainly came to nothing is given back."""
        try:
            with self._tools.telemetry.step("prepare"):
                await self._within_deadline(self._prepared(args, reserved), args, reserved)
            self._tools.standing.record_success(args.node, reserved.gpu_uuids)
            with self._tools.telemetry.step("bind"):
                await self._poster.post(args, reserved)
        except AbandonedError as error:
            if error.reason in UNPREPARED:
                self._tools.standing.record_failure(args.node, reserved.gpu_uuids)
            await self._give_back(args, error)
            raise

    async def _pod(self, args: BindingArgs) -> Pod:
        known = self._informers.pod(PodUid(args.pod_uid))
        return known or await self._poster.read(args)

    async def _reserve(self, pod_request: PodRequest, args: BindingArgs) -> Reservation:
        """Write the reservation, or take over the one that an earlier try left behind."""
        uid = PodUid(args.pod_uid)
        for other in self._informers.cluster.nodes_holding(uid):
            if other != args.node:
                await self._not_held_on(other, args)

        cluster = self._informers.cluster
        self._keeper.reserving(uid, pod_request.demand.job_uid)
        seen = cluster.with_assumed(args.node)
        first = None if seen is None else self._foreseen(pod_request, args, seen)

        def decide(node: GpuNode) -> GpuNodeSpec:
            deadline = self._tools.clock.now() + timedelta(seconds=self._timeout_s)
            if ledger.held(node.spec, uid) is not None:
                cluster.forget(args.node, uid)
                return ledger.prolong(node.spec, uid, rfc3339(deadline))
            known = first is not None and seen is not None and still_valid(node, seen, first.gpu_uuids)
            if first is not None and known and args.node not in cluster.unavailable_nodes():
                # Time has passed while others were written.
                wanted = msgspec.structs.replace(first, deadline=rfc3339(deadline))
            else:
                cluster.forget(args.node, uid)
                wanted = self._wanted(pod_request, args, node)
                self._assume(args.node, wanted)
            spec = ledger.reserve(node.spec, wanted, ledger.capacity_of(node, self._slots))
            if isinstance(spec, ledger.Rejected):
                raise Refusal(f"node {args.node} no longer has room for {named(args)}: {spec.reason}")
            return spec

        try:
            node = await self._writer.change(args.node, decide)
        finally:
            cluster.forget(args.node, uid)
        reserved = ledger.held(node.spec, uid)
        if reserved is None:
            raise BindError(f"the reservation of {named(args)} on node {args.node} was taken away at once; try again")
        return reserved

    def _foreseen(self, pod_request: PodRequest, args: BindingArgs, seen: GpuNode) -> Reservation | None:
        """Decide on what was seen, and have it count; None where it is refused, and will be told once decided again."""
        if ledger.held(seen.spec, PodUid(args.pod_uid)) is not None:
            return None
        with suppress(Refusal):
            first = self._wanted(pod_request, args, seen)
            self._assume(args.node, first)
            return first
        return None

    def _assume(self, node: str, wanted: Reservation) -> None:
        self._informers.cluster.assume(node, wanted)
        self._keeper.reserved(wanted.pod_uid, wanted.job_uid, {(node, gpu) for gpu in wanted.gpu_uuids})

    def _wanted(self, pod_request: PodRequest, args: BindingArgs, node: GpuNode) -> Reservation:
        """Decide on a reservation as things are now. Raises Refusal."""
        uid, now = PodUid(args.pod_uid), self._tools.clock.now()
        crowd = self._keeper.holders(pod_request.demand.job_uid)
        if (crowded := too_many(pod_request, uid, crowd)) is not None:
            raise Refusal(crowded)
        with self._keeper.deciding(pod_request):
            if not self._keeper.has_begun(pod_request) and (waits := self._gangs.refusal(pod_request, uid)) is not None:
                raise Refusal(waits)
            chosen = place_on_node(self._evaluation_cache.of(pod_request), args.node)
        if isinstance(chosen, str):
            raise Refusal(chosen)
        deadline = now + timedelta(seconds=self._timeout_s)
        wanted = reservation_of(chosen, pod_request, uid, args.pod_name, now=now, deadline=deadline)
        return msgspec.structs.replace(wanted, generation=ledger.next_generation(node, uid, now))

    async def _not_held_on(self, other: str, args: BindingArgs) -> None:
        """Make sure that a pod has no reservation on another node; BindError where it has."""
        try:
            reserved = ledger.held((await self._writer.read(other)).spec, PodUid(args.pod_uid))
        except NotFound:
            return
        if reserved is not None:
            raise BindError(
                f"{named(args)} has a reservation on node {other}, so it cannot be bound to {args.node}; "
                f"retry on {other}, or after {reserved.deadline}, when it lapses unless the pod is bound there"
            )

    async def _within_deadline(self, work: Awaitable[None], args: BindingArgs, reserved: Reservation) -> None:
        """Wait for some work no longer than a reservation lives."""
        try:
            await wait_for(work, self._poster.seconds_left(reserved), self._tools.sleep)
        except TimeoutError as error:
            raise AbandonedError(
                "PartitionTimeout",
                f"the agent of node {args.node} did not prepare the GPU for {named(args)} within "
                f"{self._timeout_s:g} s; see the node agent's log and `kubectl describe gpunode {args.node}`",
            ) from error

    async def _prepared(self, args: BindingArgs, reserved: Reservation) -> None:
        """Wait until the agent reports this reservation's share ready."""
        while True:
            node = self._informers.cluster.node(args.node)
            if node is None or ledger.held(node.spec, reserved.pod_uid) is None:
                raise AbandonedError("ReservationGone", f"the reservation of {named(args)} on {args.node} is gone")
            for partition in node.status.partitions:
                if partition.pod_uid == reserved.pod_uid and partition.generation == reserved.generation:
                    if partition.state is PartitionState.READY:
                        return
                    if partition.state is PartitionState.FAILED:
                        raise AbandonedError(
                            "PartitionFailed",
                            f"node {args.node} could not prepare {reserved.mode} for {named(args)}: "
                            f"{partition.message}",
                        )
            await self._informers.stirred(args.node)

    async def _give_back(self, args: BindingArgs, why: AbandonedError) -> None:
        """Release the reservation and tell the pod's owner; what fails here the janitor makes good."""
        try:
            await self._writer.release(args.node, PodUid(args.pod_uid))
        except KubeError as error:
            self._log.warning("release failed", pod=named(args), node=args.node, error=str(error))
        if why.reason != "PodGone":
            await self._tools.events.record(
                kind=PODS,
                namespace=args.pod_namespace,
                name=args.pod_name,
                uid=args.pod_uid,
                type="Warning",
                reason=why.reason,
                message=str(why),
            )
