"""Admission of jobs: the queue decides on the leader, and the scheduling gates of admitted pods are removed.

```
Queued ──── fits, delays no reservation in time ───▶ Admitted ──── reserved by bind ───▶ Bound
  ▲                                                    │
  └── Backoff ◀── not reserved within the timeout ─────┘   (its pods are deleted, and created again with gates)
```

An admitted pod has a *claim*: the GPUs that the queue gave it, counted in the cluster cache until bind replaces it by a
reservation. Nothing else is stored: a new leader finds ungated pods without reservation, and claims GPUs for them.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from carpool_core.clock import Clock, rfc3339
from carpool_core.keys import CONDITION_ADMITTED, GATE_ADMISSION
from carpool_core.kube.api import PODS, KubeApi
from carpool_core.kube.errors import KubeError, NotFound, Refused, Retryable
from carpool_core.kube.leader import LeaseWatcher
from carpool_core.kube.pods import Pod, job_owner_reference, why_unscheduled
from carpool_core.products import DeviceClass
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import JobUid, PodUid

from carpool_extender.cache.cluster import may_free_capacity
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.selection import EvaluationCache
from carpool_extender.informers import Informers, JobRow, ObservedRow
from carpool_extender.metrics import ExtenderMetrics
from carpool_extender.queue.entries import (
    Gang,
    backoff_message,
    claims_of_admitted,
    entry_of,
    gang_of,
    predicted_end_of,
)
from carpool_extender.queue.scheduling_queue import (
    Admitted,
    Claim,
    QueuedJobInfo,
    SchedulingQueue,
    Waiting,
    WaitReason,
    refusal_message,
)
from carpool_extender.workloads import NotOurs, Workloads, controller_of, no_such_job

BATCH_S = 0.1
"""Shortest time from the start of one pass to the next; one pass answers all changes in between."""
BUSY_SHARE = 0.25
"""Largest share of its time that the process spends on passes."""
IDLE_S = 5.0
"""Longest time between passes: backoffs and predicted ends pass without a change of an object."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 10.0, 300.0
PATCHES_AT_ONCE = 32
TRIES = 4
PAUSE_S = 0.2
CONDITION_EVERY_S = 10.0
"""Shortest time between two status writes about one waiting job."""
CONDITIONS_A_SECOND = 20
LONGEST_MESSAGE = 1000
AT_ONCE = "AtOnce"
"""Reason in the metrics of jobs that the first pass admitted."""
_LACKS_GPUS = (WaitReason.NO_GPU_FITS, WaitReason.BACKOFF)
"""Reasons to wait that a new node may remove."""


@dataclass(slots=True)
class _Job:
    """State of a job whose pods wait, or that backs off."""

    gang: Gang | None = None
    """Waiting pods of its latest attempt; None if there are none."""
    request: PodRequest | None = None
    """Request of each worker; None if it was refused."""
    refusal: tuple[Pod, str] | None = None
    """A pod, and why the job may not ask for GPUs as it does."""
    failures: int = 0
    """Admissions in a row after which no pod was bound."""
    retry_at_s: float = 0.0
    retry_reason: str = ""
    """kube-scheduler's message about the last failure."""
    waited: str = AT_ONCE
    """Last reason for which it waited, before its present entry of the queue."""
    written_at_s: float = float("-inf")
    """Monotonic time at which its condition was last compared or written."""


@dataclass(slots=True)
class _AdmittedPod:
    """A pod whose gate was removed or is being removed, and that is not bound yet."""

    since_s: float
    """Monotonic time at which its gate was removed, or it was first seen without."""
    claim: Claim | None = None


class AdmissionController:
    """Runs the queue on the leader and keeps the claims of admitted pods.

    Args:
        in_flight: Pods that are being bound: their admission does not time out meanwhile.
        timeout_s: Time from ungating to the reservation, in seconds, after which a job goes back to the queue.
        autoscaling: Whether pods that wait for GPUs are marked for cluster autoscalers.
    """

    def __init__(
        self,
        api: KubeApi,
        informers: Informers,
        workloads: Workloads,
        queue: SchedulingQueue,
        *,
        evaluations: EvaluationCache,
        in_flight: Container[PodUid],
        leadership: LeaseWatcher,
        timeout_s: float,
        autoscaling: bool,
        clock: Clock,
        sleep: Callable[[float], Awaitable[Any]],
        metrics: ExtenderMetrics,
    ) -> None:
        self._api, self._informers, self._workloads, self._queue = api, informers, workloads, queue
        self._evaluations, self._leadership, self._timeout_s = evaluations, leadership, timeout_s
        self._autoscaling = autoscaling
        self._clock, self._sleep, self._metrics = clock, sleep, metrics
        self._in_flight = in_flight
        for reason in (AT_ONCE, *WaitReason):
            metrics.queue_wait.labels(reason)
        self._jobs: defaultdict[JobUid, _Job] = defaultdict(_Job)
        self._admitted: dict[PodUid, _AdmittedPod] = {}
        self._ends: dict[PodUid, tuple[Reservation, ObservedRow | None, float]] = {}
        """Reservations with their predicted ends, in seconds since 1970."""
        self._dirty: set[JobUid] = set()
        self._classes: frozenset[DeviceClass] = frozenset()
        self._patches = asyncio.Semaphore(PATCHES_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._log = structlog.get_logger()
        informers.on_pod(self._pod_changed)
        informers.on_node(self._node_changed)
        informers.on_job(self._job_changed)
        leadership.on_change(self._changed.set)

    def claim_of(self, uid: PodUid) -> Claim | None:
        """Return the claim of a pod."""
        admitted = self._admitted.get(uid)
        return None if admitted is None else admitted.claim

    def forget_claim(self, uid: PodUid) -> None:
        """Delete the claim of a pod: bind decides now, or the pod is gone."""
        admitted = self._admitted.get(uid)
        if admitted is not None and admitted.claim is not None:
            self._informers.cluster.forget(admitted.claim.node, uid)
            admitted.claim = None

    async def run(self) -> None:
        """Admit jobs until cancelled, once all watches have listed."""
        await self._informers.wait_synced()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_passes())
            group.create_task(self._write_conditions())
            group.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await self._sleep(IDLE_S)
            if not self._leadership.leads():
                self._dirty = {job for job in self._dirty if self._informers.job(job) is not None}
            self._changed.set()

    async def _run_passes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._leadership.leads():
                self._resign()
                continue
            began = self._clock.monotonic()
            await self.run_once()
            took_s = self._clock.monotonic() - began
            await self._sleep(max(BATCH_S - took_s, took_s / BUSY_SHARE - took_s, 0.0))

    def _resign(self) -> None:
        """Delete a leader's state. Its jobs are marked as changed, so that the next term gathers them again."""
        for uid in [*self._admitted]:
            self._forget_pod(uid)
        for job in self._jobs:
            self._queue.remove(job)
        self._dirty.update(self._jobs)
        self._jobs.clear()
        self._metrics.pending_jobs.set(0)

    async def run_once(self) -> None:
        """Run one pass: claim for admitted pods, return those that did not start, admit pending jobs."""
        # 1. Bring the jobs up to date whose pods, status or GPUs have changed.
        now_s = self._clock.now().timestamp()
        classes = frozenset(self._informers.cluster.snapshot().present_classes)
        if classes != self._classes:
            self._classes = classes
            self._dirty.update(self._jobs)  # predicted lengths depend on the products of the cluster
        dirty, self._dirty = self._dirty, set()
        for job in sorted(dirty):
            await self._update(job)
        # 2. Claim GPUs for admitted pods that have none, and return those that were not reserved in time.
        for job, state in self._jobs.items():
            if state.gang is not None and state.gang.admitted:
                self._follow_admitted(job, state, state.gang, now_s)
        # 3. Admit pending jobs, and remove the gates of their pods.
        with self._metrics.admission_pass():
            for one in self._queue.admit(self._end_of, now_s):
                self._start(one)
        self._metrics.pending_jobs.set(len(self._queue))

    # --- gathering -------------------------------------------------------------------------------------------------

    async def _update(self, job: JobUid) -> None:
        """Gather the pods of a job, and its entry of the queue."""
        row, state = self._informers.job(job), self._jobs[job]
        gang = state.gang = gang_of(row, self._informers.pods_of(job), self._admitted)
        state.request = state.refusal = None
        workers = set[PodUid]() if gang is None else {PodUid(pod.metadata.uid) for pod in gang.admitted}
        for uid in self._informers.cluster.pods_of_job(job) - workers:
            self.forget_claim(uid)  # it is no worker any more, as after a user removed its owner
        if (waiting := self._queue.waiting(job)) is not None:
            state.waited = waiting.reason
        info = None if gang is None else await self._gather(job, state, gang)
        if info is None:
            self._queue.remove(job)
        else:
            self._queue.add(info)
        if state.gang is None and (row is None or not state.failures):
            del self._jobs[job]

    async def _gather(self, job: JobUid, state: _Job, gang: Gang) -> QueuedJobInfo | None:
        """Return a job's entry of the queue; None if it has none, or may not ask for GPUs as it does."""
        pod = (gang.gated or gang.admitted)[0]
        try:
            if self._informers.job(job) is None:  # not read: users can name any number of jobs; a new one is watched
                raise no_such_job(pod, controller_of(pod))
            state.request = await self._workloads.of(pod)
        except NotOurs as refusal:
            state.refusal = pod, str(refusal)
            for uid in (PodUid(admitted.metadata.uid) for admitted in gang.admitted):
                if uid not in self._in_flight:
                    self.forget_claim(uid)
            return None
        except KubeError as error:
            self._log.warning("job not read", pod=pod.metadata.name, error=str(error))
            self._dirty.add(job)
            state.gang = None
            return None
        return entry_of(gang, state.request, self._informers.cluster.snapshot(), state.retry_at_s)

    def _end_of(self, held: Reservation) -> float | None:
        """Predict the end of a reservation; the result is kept until it or its job's measurements change."""
        known, job = self._ends.get(held.pod_uid), self._informers.job(held.job_uid)
        observed = None if job is None else job.status.observed
        if known is not None and known[0] is held and known[1] == observed:
            return known[2]
        end_s = predicted_end_of(held, job, self._informers.cluster)
        if end_s is not None and self._informers.pod(held.pod_uid) is not None:
            self._ends[held.pod_uid] = held, observed, end_s
        return end_s

    # --- admitted pods ---------------------------------------------------------------------------------------------

    def _follow_admitted(self, job: JobUid, state: _Job, gang: Gang, now_s: float) -> None:
        now, unclaimed, cluster = self._clock.monotonic(), list[Pod](), self._informers.cluster
        for pod in gang.admitted:
            uid = PodUid(pod.metadata.uid)
            if uid in self._in_flight:
                continue
            if cluster.nodes_holding(uid):
                self.forget_claim(uid)
                continue
            admitted = self._admitted.setdefault(uid, _AdmittedPod(now))
            if now - admitted.since_s > self._timeout_s and not self._watched(pod).is_gated:
                self._give_up(job, state, gang, now_s)
                return
            if admitted.claim is None:
                unclaimed.append(pod)
        if unclaimed and state.request is not None:
            for claim in claims_of_admitted(unclaimed, state.request, cluster, self._evaluations, now_s):
                cluster.assume(claim.node, claim.reservation)
                self._admitted[claim.reservation.pod_uid].claim = claim

    def _watched(self, pod: Pod) -> Pod:
        """Return the newest state of a pod: some changes do not concern the queue, and do not update its gang."""
        return self._informers.pod(PodUid(pod.metadata.uid)) or pod

    def _give_up(self, job: JobUid, state: _Job, gang: Gang, now_s: float) -> None:
        """Return a job to the queue: delete its pods that were never bound, whose gates cannot be added again."""
        state.failures, state.waited = state.failures + 1, WaitReason.BACKOFF
        delay_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(state.failures - 1, 16))
        pods = [self._watched(pod) for pod in gang.admitted]
        state.retry_at_s, state.retry_reason = now_s + delay_s, why_unscheduled(pods)
        self._metrics.admissions.labels("returned").inc()
        for pod in pods:
            uid = PodUid(pod.metadata.uid)
            if uid in self._in_flight or self._informers.cluster.nodes_holding(uid):
                continue
            self.forget_claim(uid)
            self._admitted[uid] = _AdmittedPod(self._clock.monotonic())  # tried again after as long, if this fails
            self._spawn(self._delete(pod))
        self._log.info("not started in time", job=str(job), retry_in_s=delay_s, because=state.retry_reason)

    async def _delete(self, pod: Pod) -> None:
        """Delete a pod that was never bound; one that has changed, perhaps by its Binding, is left for the next try."""
        meta = pod.metadata
        try:
            await self._api.delete(
                PODS, meta.name, namespace=meta.namespace, uid=meta.uid, resource_version=meta.resource_version
            )
        except NotFound:
            return
        except KubeError as error:
            self._log.warning("pod not deleted", pod=meta.name, error=str(error))

    # --- admission -------------------------------------------------------------------------------------------------

    def _start(self, one: Admitted) -> None:
        """Take the claims of an admitted job over from the queue, and remove the gates of its pods."""
        now = self._clock.monotonic()
        for claim in one.claims:
            self._admitted[claim.reservation.pod_uid] = _AdmittedPod(now, claim)
        self._dirty.add(one.info.job)
        self._metrics.admissions.labels("admitted").inc()
        if one.info.arrived_s:  # 0 for the rest of a gang
            reason = one.waited or self._jobs[one.info.job].waited
            waited_s = max(0.0, self._clock.now().timestamp() - one.info.arrived_s)
            self._metrics.queue_wait.labels(reason).observe(waited_s)
        self._log.info("admitted", job=one.info.name, nodes=sorted({claim.node for claim in one.claims}))
        for ref in one.info.pods:
            if (pod := self._informers.pod(ref.uid)) is not None:
                self._spawn(self._ungate(pod))
            else:
                self._abandon(ref.uid)

    async def _ungate(self, pod: Pod) -> None:
        """Remove our gate from a pod; an answer that was lost is followed by another try."""
        uid, meta = PodUid(pod.metadata.uid), pod.metadata
        gates = [gate.name for gate in pod.spec.scheduling_gates]
        if GATE_ADMISSION not in gates:
            return  # the watch has shown meanwhile that an earlier try arrived
        at = gates.index(GATE_ADMISSION)
        patch: list[Mapping[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": meta.uid},
            {"op": "test", "path": f"/spec/schedulingGates/{at}/name", "value": GATE_ADMISSION},
            {"op": "remove", "path": f"/spec/schedulingGates/{at}"},
        ]
        for attempt in range(TRIES):
            try:
                async with self._patches:
                    await self._api.patch(PODS, meta.name, patch, namespace=meta.namespace, wants_object=False)
                return
            except Retryable as error:
                self._log.warning("gate not removed", pod=meta.name, error=str(error))
                await self._sleep(PAUSE_S * 2**attempt)
            except Refused as error:
                # The pod is gone or another one, or a try before has removed the gate.
                if not await self._is_ungated(pod):
                    self._log.info("gate not removed", pod=meta.name, error=str(error))
                    break
                return
        self._abandon(uid)

    async def _is_ungated(self, pod: Pod) -> bool:
        try:
            found = await self._api.get(PODS, pod.metadata.name, Pod, namespace=pod.metadata.namespace)
        except KubeError:
            return False
        return found.metadata.uid == pod.metadata.uid and not found.is_gated

    def _abandon(self, uid: PodUid) -> None:
        """Count a pod as not admitted."""
        self._forget_pod(uid)
        self._ends.pop(uid, None)
        self._touch(self._informers.pod(uid))

    def _forget_pod(self, uid: PodUid) -> None:
        self.forget_claim(uid)
        self._admitted.pop(uid, None)

    # --- reasons of waiting jobs -----------------------------------------------------------------------------------

    async def _write_conditions(self) -> None:
        """Write why jobs wait: at most once in ten seconds for each job, and a limited number in each second."""
        while True:
            await self._sleep(1.0)
            if self._leadership.leads():
                await asyncio.gather(*(self._write_condition(*one) for one in self._due_conditions()))

    def _due_conditions(self) -> list[tuple[Pod, list[Mapping[str, Any]]]]:
        """Return pods of waiting jobs with the changes of their conditions, as JSON patch operations."""
        now, due, texts = self._clock.monotonic(), [], dict[tuple[object, ...], str]()
        late = [
            (state.written_at_s, job)
            for job in (*self._queue, *(job for job, state in self._jobs.items() if state.refusal is not None))
            if now - (state := self._jobs[job]).written_at_s >= CONDITION_EVERY_S
        ]
        for _, job in sorted(late)[: 4 * CONDITIONS_A_SECOND]:
            state = self._jobs[job]
            waiting = self._queue.waiting(job)
            if state.refusal is not None:
                uids, text = [PodUid(state.refusal[0].metadata.uid)], state.refusal[1]
            elif waiting is not None:
                uids, text = [ref.uid for ref in waiting.info.pods], self._explain(waiting, state, texts)
            else:
                continue
            state.written_at_s = now
            lacks_gpus = self._autoscaling and waiting is not None and waiting.reason in _LACKS_GPUS
            for uid in uids:
                if (pod := self._informers.pod(uid)) is None or not pod.is_gated:
                    continue
                changes = _scheduled_changes(pod, text if lacks_gpus else "")
                if uid == uids[0]:
                    changes += _admitted_changes(pod, text, rfc3339(self._clock.now()))
                if changes:
                    due.append((pod, changes))
            if len(due) >= CONDITIONS_A_SECOND:
                break
        return due

    def _explain(self, waiting: Waiting, state: _Job, texts: dict[tuple[object, ...], str]) -> str:
        """Return `Reason: sentence` for a waiting job; equal requests share one text."""
        if waiting.reason is WaitReason.BACKOFF:
            return f"Unschedulable: {backoff_message(state.retry_reason, state.retry_at_s)}"
        is_own = waiting.info.request.workers > 1 or waiting.reason is WaitReason.TOO_MANY_WORKERS
        key = (waiting.reason, waiting.info.name if is_own else waiting.behind, *waiting.info.shape)
        if key not in texts:
            texts[key] = refusal_message(waiting, self._evaluations)
            if waiting.reason is WaitReason.NO_GPU_FITS:
                failed = self._evaluations.of(waiting.info.request).evaluation.results.failed
                self._metrics.refused(failed)
        return texts[key]

    async def _write_condition(self, pod: Pod, changes: Sequence[Mapping[str, Any]]) -> None:
        patch = [{"op": "test", "path": "/metadata/uid", "value": pod.metadata.uid}, *changes]
        try:
            async with self._patches:
                await self._api.patch(
                    PODS,
                    pod.metadata.name,
                    patch,
                    namespace=pod.metadata.namespace,
                    subresource="status",
                    wants_object=False,
                )
        except KubeError as error:
            self._log.info("reason not written", pod=pod.metadata.name, error=str(error))

    # --- changes ---------------------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _touch(self, pod: Pod | None) -> None:
        """Check the job of a pod in the next pass."""
        owner = None if pod is None else job_owner_reference(pod.metadata)
        if owner is not None:
            self._dirty.add(JobUid(owner.uid))
            self._changed.set()

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        if pod is None or (old is not None and new is not None and _is_same(old, new)):
            return
        self._touch(old)
        uid = PodUid(pod.metadata.uid)
        is_over = new is None or new.is_finished or new.metadata.deletion_timestamp is not None
        if is_over or pod.spec.node_name:
            self._forget_pod(uid)
        if is_over:
            self._ends.pop(uid, None)
        elif pod.spec.node_name:
            owner = job_owner_reference(pod.metadata)
            state = None if owner is None else self._jobs.get(JobUid(owner.uid))
            if state is not None:
                state.failures, state.retry_at_s, state.retry_reason = 0, 0.0, ""
        self._touch(pod)

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if new is not None and may_free_capacity(old, new):
            self._changed.set()

    def _job_changed(self, old: JobRow | None, new: JobRow | None) -> None:
        if (row := new or old) is None:
            return
        job = JobUid(row.metadata.uid)
        if job in self._jobs or not (old and new) or old.status.latest_attempt != new.status.latest_attempt:
            self._dirty.add(job)
            self._changed.set()


def _is_same(old: Pod, new: Pod) -> bool:
    """Return whether a change of a pod does not concern the queue."""
    before, after = (
        (one.metadata.owner_references, one.spec, one.is_finished, one.metadata.deletion_timestamp)
        for one in (old, new)
    )
    return before == after


def _admitted_changes(pod: Pod, text: str, now: str) -> list[Mapping[str, Any]]:
    """Return the changes after which a waiting pod has a condition `Reason: message`; none if it has it already."""
    reason, _, message = text.partition(": ")
    message = message[:LONGEST_MESSAGE]
    condition = {
        "type": CONDITION_ADMITTED,
        "status": "False",
        "reason": reason,
        "message": message,
        "lastTransitionTime": now,
    }
    known = [one.type for one in pod.status.conditions]
    if not known:
        return [{"op": "add", "path": "/status/conditions", "value": [condition]}]
    if CONDITION_ADMITTED not in known:
        return [{"op": "add", "path": "/status/conditions/-", "value": condition}]
    found = pod.status.conditions[number := known.index(CONDITION_ADMITTED)]
    if (found.status, found.reason, found.message) == ("False", reason, message):
        return []
    at = f"/status/conditions/{number}"
    test: Mapping[str, Any] = {"op": "test", "path": f"{at}/type", "value": CONDITION_ADMITTED}
    return [test, {"op": "replace", "path": at, "value": condition}]


def _scheduled_changes(pod: Pod, text: str) -> list[Mapping[str, Any]]:
    """Return the changes of a gated pod's PodScheduled by which autoscalers count it; they ignore SchedulingGated.

    `text` is why it needs a new node; empty if it does not need one.
    """
    reason = "Unschedulable" if text else "SchedulingGated"
    for number, one in enumerate(pod.status.conditions):
        if one.type == "PodScheduled" and one.status == "False" and one.reason != reason:
            at = f"/status/conditions/{number}"
            return [
                {"op": "test", "path": f"{at}/type", "value": "PodScheduled"},
                {"op": "add", "path": f"{at}/reason", "value": reason},
                {"op": "add", "path": f"{at}/message", "value": text[:LONGEST_MESSAGE]},
            ]
    return []
