"""Bind: decide once more, reserve, wait for the node's agent, bind. Idempotent by pod UID, safe to kill anywhere."""

import asyncio
from collections.abc import Awaitable, Container
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import structlog
from carpool_core.clock import rfc3339
from carpool_core.kube.api import PODS
from carpool_core.kube.errors import KubeError, NotFound
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import GpuNode, GpuNodeSpec, Reservation
from carpool_core.values import PartitionState, PodUid

from carpool_extender.kube.watches import Watches
from carpool_extender.kube.wire import BindingArgs
from carpool_extender.kube.workloads import NotOurs, NotYet, Workloads, too_many
from carpool_extender.placement.applicant import Applicant
from carpool_extender.placement.assessments import Assessments
from carpool_extender.placement.decide import place, reservation
from carpool_extender.placement.gangs import Gangs
from carpool_extender.reservations.binding import (
    AbandonedError,
    BindError,
    Poster,
    Tools,
    check_unbound,
    in_time,
    named,
)
from carpool_extender.reservations.book import Book, Refusal
from carpool_extender.reservations.inflow import Inflow
from carpool_extender.reservations.keeper import Keeper
from carpool_extender.reservations.turns import Turns
from carpool_extender.state import ledger
from carpool_extender.state.doubts import tells_nothing_new

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
        watches: What is known of the cluster.
        workloads: Who stands behind a pod.
        book: Where reservations are written.
        assessments: Where places are found.
        gangs: Whether all workers of a job would find one.
        keeper: Keeps GPUs for those whose turn it is.
        inflow: How many may be bound at once.
        slots: Most tenants of one GPU.
        timeout_s: Seconds from the reservation to its deadline.
    """

    def __init__(
        self,
        tools: Tools,
        watches: Watches,
        workloads: Workloads,
        book: Book,
        *,
        assessments: Assessments,
        gangs: Gangs,
        keeper: Keeper,
        inflow: Inflow,
        slots: int,
        timeout_s: float,
    ) -> None:
        self._tools, self._watches, self._workloads, self._book = tools, watches, workloads, book
        self._assessments, self._gangs, self._keeper, self._inflow = assessments, gangs, keeper, inflow
        self._slots, self._timeout_s = slots, timeout_s
        self._poster = Poster(tools.api, tools.clock, tools.sleep)
        self._open: dict[PodUid, _Open] = {}
        self._turns = Turns(inflow)
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
        if self._inflow.is_full:
            with self._tools.telemetry.kept_back():
                await self._inflow.room()

    async def bind(self, args: BindingArgs) -> str:
        """Bind a pod; return an empty string, or why it was not bound.

        A replay for the same node joins what is in progress; the caller may go away, the binding goes on.
        """
        uid = PodUid(args.pod_uid)
        running = self._open.get(uid)
        if running is None:
            running = _Open(args.node, asyncio.create_task(self._told(args)))
            self._open[uid] = running
            self._inflow.enter()
            self._keeper.binding(uid)
            running.task.add_done_callback(lambda task: self._ended(uid, task))
        elif running.node != args.node:
            return f"{named(args)} is being bound to node {running.node} at present, not to {args.node}; try again"
        return await asyncio.shield(running.task)

    def _ended(self, uid: PodUid, task: asyncio.Task[str]) -> None:
        self._open.pop(uid, None)
        self._inflow.leave()
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
                applicant = await self._workloads.of(pod)
                async with self._turns.of(applicant.demand.job_uid):
                    measured.enter_context(self._inflow.measured())
                    reserved = await self._reserve(applicant, args)
            await self._settle(args, reserved)

    async def _settle(self, args: BindingArgs, reserved: Reservation) -> None:
        """Have a reservation prepared, and bind its pod; what certainly came to nothing is given back."""
        try:
            with self._tools.telemetry.step("prepare"):
                await self._within_deadline(self._prepared(args, reserved), args, reserved)
            self._tools.standing.succeeded(args.node, reserved.gpu_uuids)
            with self._tools.telemetry.step("bind"):
                await self._poster.post(args, reserved)
        except AbandonedError as error:
            if error.reason in UNPREPARED:
                self._tools.standing.failed(args.node, reserved.gpu_uuids)
            await self._give_back(args, error)
            raise

    async def _pod(self, args: BindingArgs) -> Pod:
        known = self._watches.pod(PodUid(args.pod_uid))
        return known or await self._poster.read(args)

    async def _reserve(self, applicant: Applicant, args: BindingArgs) -> Reservation:
        """Write the reservation, or take over the one that an earlier try left behind."""
        uid = PodUid(args.pod_uid)
        for other in self._watches.cluster.holders(uid):
            if other != args.node:
                await self._not_held_on(other, args)

        cluster = self._watches.cluster
        self._keeper.reserving(uid, applicant.demand.job_uid)
        seen = cluster.counted(args.node)
        first = None if seen is None else self._foreseen(applicant, args, seen)

        def decide(node: GpuNode) -> GpuNodeSpec:
            deadline = self._tools.clock.now() + timedelta(seconds=self._timeout_s)
            if ledger.held(node.spec, uid) is not None:
                cluster.assume_no_more(args.node, uid)
                return ledger.prolong(node.spec, uid, rfc3339(deadline))
            known = first is not None and seen is not None and tells_nothing_new(node, seen, first.gpu_uuids)
            if first is not None and known and args.node not in cluster.hindered_nodes():
                # Time has passed while others were written.
                wanted = msgspec.structs.replace(first, deadline=rfc3339(deadline))
            else:
                cluster.assume_no_more(args.node, uid)
                wanted = self._wanted(applicant, args, node)
                self._assume(args.node, wanted)
            spec = ledger.reserve(node.spec, wanted, ledger.capacity_of(node, self._slots))
            if isinstance(spec, ledger.Rejected):
                raise Refusal(f"node {args.node} no longer has room for {named(args)}: {spec.reason}")
            return spec

        try:
            node = await self._book.change(args.node, decide)
        finally:
            cluster.assume_no_more(args.node, uid)
        reserved = ledger.held(node.spec, uid)
        if reserved is None:
            raise BindError(f"the reservation of {named(args)} on node {args.node} was taken away at once; try again")
        return reserved

    def _foreseen(self, applicant: Applicant, args: BindingArgs, seen: GpuNode) -> Reservation | None:
        """Decide on what was seen, and have it count; None where it is refused, and will be told once decided again."""
        if ledger.held(seen.spec, PodUid(args.pod_uid)) is not None:
            return None
        with suppress(Refusal):
            first = self._wanted(applicant, args, seen)
            self._assume(args.node, first)
            return first
        return None

    def _assume(self, node: str, wanted: Reservation) -> None:
        self._watches.cluster.assume(node, wanted)
        self._keeper.reserved(wanted.pod_uid, wanted.job_uid, {(node, gpu) for gpu in wanted.gpu_uuids})

    def _wanted(self, applicant: Applicant, args: BindingArgs, node: GpuNode) -> Reservation:
        """Decide on a reservation as things are now. Raises Refusal."""
        uid, now = PodUid(args.pod_uid), self._tools.clock.now()
        crowd = self._keeper.holders(applicant.demand.job_uid)
        if (crowded := too_many(applicant, uid, crowd)) is not None:
            raise Refusal(crowded)
        with self._keeper.deciding(applicant):
            if not self._keeper.has_begun(applicant) and (waits := self._gangs.refusal(applicant, uid)) is not None:
                raise Refusal(waits)
            chosen = place(self._assessments.of(applicant), args.node)
        if isinstance(chosen, str):
            raise Refusal(chosen)
        deadline = now + timedelta(seconds=self._timeout_s)
        wanted = reservation(chosen, applicant, uid, args.pod_name, now=now, deadline=deadline)
        return msgspec.structs.replace(wanted, generation=ledger.next_generation(node, uid, now))

    async def _not_held_on(self, other: str, args: BindingArgs) -> None:
        """Make sure that a pod has no reservation on another node; BindError where it has."""
        try:
            reserved = ledger.held((await self._book.read(other)).spec, PodUid(args.pod_uid))
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
            await in_time(work, self._poster.seconds_left(reserved), self._tools.sleep)
        except TimeoutError as error:
            raise AbandonedError(
                "PartitionTimeout",
                f"the agent of node {args.node} did not prepare the GPU for {named(args)} within "
                f"{self._timeout_s:g} s; see the node agent's log and `kubectl describe gpunode {args.node}`",
            ) from error

    async def _prepared(self, args: BindingArgs, reserved: Reservation) -> None:
        """Wait until the agent reports this reservation's share ready."""
        while True:
            node = self._watches.cluster.node(args.node)
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
            await self._watches.stirred(args.node)

    async def _give_back(self, args: BindingArgs, why: AbandonedError) -> None:
        """Release the reservation and tell the pod's owner; what fails here the janitor makes good."""
        try:
            await self._book.release(args.node, PodUid(args.pod_uid))
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
