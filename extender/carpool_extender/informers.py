"""The extender's view of the cluster: four watches, the indices that decisions read, and subscribers to changes."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec
import structlog
from cachetools import LRUCache
from carpool_core.clock import Clock
from carpool_core.keys import OUTCOME_GPU_OUT_OF_MEMORY, RESOURCE_GPU, SCHEDULER_NAME
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS, KubeApi, Selector
from carpool_core.kube.nodes import Node
from carpool_core.kube.pods import Pod, job_owner_reference
from carpool_core.kube.reflector import Reflector, put_in_group
from carpool_core.resources.job import GpuSelector, MemoryOverride, Sharing
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import GpuNode
from carpool_core.resources.prediction import Prediction
from carpool_core.values import JobState, JobUid, PodUid

from carpool_extender.cache.cluster import (
    AGENT_DOWN,
    INVALID,
    UNRESERVED_POD,
    ClusterCache,
    listed,
    reuse_equal_parts,
    shortened,
)

_NEED_NO_PLACE = frozenset((JobState.STARTING, JobState.RUNNING, JobState.COMPLETE, JobState.FAILED))
_NO_PODS = frozenset((JobState.SUSPENDED, JobState.COMPLETE, JobState.FAILED))


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Camel-cased, partial snapshot of an object."""


class TrainingRow(_Wire, frozen=True, kw_only=True):
    """The part of a job's training that its duration depends on."""

    steps: int | None = None


class RunPolicyRow(_Wire, frozen=True, kw_only=True):
    """Whether the job may have pods."""

    suspend: bool = False


class JobSpecRow(_Wire, frozen=True, kw_only=True):
    """The part of a job's spec that its demand depends on, without template and features."""

    workers: int = 1
    gpus_per_worker: int = 1
    training: TrainingRow = TrainingRow()
    sharing: Sharing = Sharing()
    memory: MemoryOverride = MemoryOverride()
    gpu: GpuSelector = GpuSelector()
    run_policy: RunPolicyRow = RunPolicyRow()


class AttemptRow(_Wire, frozen=True, kw_only=True):
    """Number, pods and outcome of an attempt."""

    number: int = 0
    outcome: str = ""
    pod_uids: list[PodUid] = []
    """UIDs of its pods, as far as the operator has recorded them; of the latest attempt only."""


class ObservedRow(_Wire, frozen=True, kw_only=True):
    """The part of a job's measurements that the queue uses."""

    expected_end: str | None = None
    """Expected end by the measured step time, RFC 3339."""
    latest_end: str | None = None
    """The same at the upper end of the step time's interval."""


class JobStatusRow(_Wire, frozen=True, kw_only=True):
    """The part of a job's status that its demand depends on."""

    state: str = ""
    prediction: Prediction | None = None
    observed: ObservedRow | None = None
    attempts: list[AttemptRow] = []
    moves: int = 0

    @property
    def latest_attempt(self) -> AttemptRow:
        """The latest attempt; number 0 before the first."""
        return self.attempts[-1] if self.attempts else AttemptRow()

    @property
    def predicted_step_times_s(self) -> dict[str, float]:
        """Predicted step time by GPU product, in seconds."""
        products = [] if self.prediction is None else self.prediction.products
        return {product.product: product.step_time_seconds.median for product in products}

    @property
    def died_of_memory(self) -> bool:
        """Whether an attempt that is remembered used its GPU's memory up."""
        return any(attempt.outcome == OUTCOME_GPU_OUT_OF_MEMORY for attempt in self.attempts)


class JobRow(_Wire, frozen=True, kw_only=True):
    """A GpuTrainingJob with the attributes that `carpool_core.demand.demand_of` reads."""

    api_version: str = ""
    """Empty where it was not read alone: the watch asks for nothing but jobs."""
    kind: str = ""
    metadata: ObjectMeta
    spec: JobSpecRow = JobSpecRow()
    status: JobStatusRow = JobStatusRow()

    @property
    def inactive_because(self) -> str | None:
        """Why its pods get no GPUs; None while it is active."""
        if self.metadata.deletion_timestamp is not None:
            return "is being deleted"
        if self.spec.run_policy.suspend:
            return "is suspended"
        return f"is {self.status.state}" if self.status.state in _NO_PODS else None


class WatchedStatus(JobStatusRow, frozen=True, kw_only=True):
    """The same, without the prediction of a job that needs no GPU any more: predictions would be most of the memory.

    If it is needed after all, because a pod was replaced before the job's state changed, the job is read.
    """

    step_times_s: dict[str, float] = {}
    """Predicted step time by GPU product, in seconds; kept while the job runs, because its end is predicted by it."""

    @property
    def predicted_step_times_s(self) -> dict[str, float]:
        """Predicted step time by GPU product, in seconds; kept while the job runs."""
        return self.step_times_s or super().predicted_step_times_s

    def __post_init__(self) -> None:
        """Delete the parts that no decision needs."""
        if self.state in _NEED_NO_PLACE and self.prediction is not None:
            if self.state not in (JobState.COMPLETE, JobState.FAILED):
                msgspec.structs.force_setattr(self, "step_times_s", super().predicted_step_times_s)
            msgspec.structs.force_setattr(self, "prediction", None)
        if len(self.attempts) > 1 and not self.died_of_memory:
            msgspec.structs.force_setattr(self, "attempts", self.attempts[-1:])


class WatchedJob(JobRow, frozen=True, kw_only=True):
    """A stored job."""

    status: WatchedStatus = WatchedStatus()


def agent_down_reason(node: Node | None) -> str | None:
    """Return why no agent can prepare the GPUs of a node; None if its agent serves the kubelet.

    A dead agent, and one without contact to the API server, offers no slots. A full node offers those in use.
    """
    if node is None:
        return "its Node does not exist"
    if not any(one.type == "Ready" and one.status == "True" for one in node.status.conditions):
        return "its Node is not ready"
    if node.status.allocatable.get(RESOURCE_GPU, "0") == "0":
        return f"its Node offers no {RESOURCE_GPU}: is the node agent running there?"
    return None


def workers_with_reservation(cluster: ClusterCache, job_uid: JobUid, pods: Iterable[Pod]) -> set[PodUid]:
    """Return the UIDs of a job's pods that have reservations, without deleted ones: a dead node keeps those.

    `pods` are those that name the job as their controller.
    """
    deleted = {PodUid(pod.metadata.uid) for pod in pods if pod.metadata.deletion_timestamp is not None}
    return cluster.pods_of_job(job_uid) - deleted


DELETED_REMEMBERED = 1024
"""UIDs of deleted GpuNodes that are remembered: more than can be deleted while one answer is on its way."""


def may_run(pod: Pod) -> bool:
    """Return whether a bound pod runs or may still start; one that is deleted before it started never will."""
    if not pod.spec.node_name or pod.is_finished:
        return False
    return pod.has_started or pod.metadata.deletion_timestamp is None


class Informers:
    """Keeps GpuNodes, jobs, and the pods of our scheduler."""

    def __init__(self, api: KubeApi, clock: Clock, cluster: ClusterCache) -> None:
        self.cluster = cluster
        self._clock = clock
        self._nodes = Reflector(
            api,
            GPU_NODES,
            GpuNode,
            clock=clock,
            on_change=self._node_changed,
            on_unreadable=self._set_unreadable,
            share=self._shared,
        )
        self._kube_nodes = Reflector(api, NODES, Node, clock=clock, on_change=self._kube_node_changed)
        self._jobs = Reflector(api, GPU_TRAINING_JOBS, WatchedJob, clock=clock, on_change=self._job_changed)
        ours = Selector(fields=f"spec.schedulerName={SCHEDULER_NAME}")
        self._pods = Reflector(api, PODS, Pod, selector=ours, clock=clock, on_change=self._pod_changed)
        self._watches: dict[str, Reflector[Any]] = {
            "GpuNode": self._nodes, "Node": self._kube_nodes, "GpuTrainingJob": self._jobs, "Pod": self._pods
        }  # fmt: skip
        self._jobs_by_uid: dict[JobUid, JobRow] = {}
        self._pods_by_uid: dict[PodUid, Pod] = {}
        self._pods_by_job: dict[JobUid, dict[PodUid, Pod]] = {}
        self._bound_pods: dict[str, dict[PodUid, Pod]] = {}
        """Workers that are bound to each node and may run."""
        self._node_events: dict[str, asyncio.Event] = {}
        self._deleted: LRUCache[str, None] = LRUCache(DELETED_REMEMBERED)
        self._invalid_nodes: set[str] = set()
        self._log = structlog.get_logger()
        self._on_node: list[Callable[[GpuNode | None, GpuNode | None], None]] = []
        self._on_pod: list[Callable[[Pod | None, Pod | None], None]] = []
        self._on_job: list[Callable[[JobRow | None, JobRow | None], None]] = []

    def job(self, uid: JobUid) -> JobRow | None:
        """Return the job with that UID, if it was seen."""
        return self._jobs_by_uid.get(uid)

    def pod(self, uid: PodUid) -> Pod | None:
        """Return the pod with that UID, if it was seen and exists still."""
        return self._pods_by_uid.get(uid)

    def pods_of(self, job_uid: JobUid) -> Collection[Pod]:
        """Return the pods that name a job as their controller."""
        return self._pods_by_job.get(job_uid, {}).values()

    def workers_with_reservation(self, job_uid: JobUid) -> set[PodUid]:
        """Return the pods of a job that hold GPUs; see the function of this name."""
        return workers_with_reservation(self.cluster, job_uid, self.pods_of(job_uid))

    def pods(self) -> Iterable[Pod]:
        """Return every pod of our scheduler."""
        return self._pods_by_uid.values()

    def on_node(self, callback: Callable[[GpuNode | None, GpuNode | None], None]) -> None:
        """Call back with old and new for every change of a GpuNode after the first list."""
        self._on_node.append(callback)

    def on_pod(self, callback: Callable[[Pod | None, Pod | None], None]) -> None:
        """Call back with old and new for every change of a pod."""
        self._on_pod.append(callback)

    def on_job(self, callback: Callable[[JobRow | None, JobRow | None], None]) -> None:
        """Call back with old and new for every change of a job."""
        self._on_job.append(callback)

    def take(self, node: GpuNode) -> None:
        """Apply a GpuNode that a call returned, before the watch shows it; ignore one whose deletion was watched."""
        if node.metadata.uid in self._deleted:
            return
        self._apply(node)
        self._wake_waiters(node.metadata.name)

    async def wait_for_change(self, name: str) -> None:
        """Wait for the next change of a GpuNode."""
        await self._node_events.setdefault(name, asyncio.Event()).wait()

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for reflector in self._watches.values():
                group.create_task(reflector.run())

    async def wait_synced(self) -> None:
        """Wait until every watch has listed."""
        await asyncio.gather(*(reflector.wait_synced() for reflector in self._watches.values()))

    def not_ready(self) -> str | None:
        """Return which watches have not listed yet; None once all have."""
        missing = [f"{kind}s" for kind, reflector in self._watches.items() if not reflector.store.synced]
        return f"the first list of {', '.join(missing)} is not complete; try again shortly" if missing else None

    def ages(self) -> dict[str, float]:
        """Return the seconds since the server's last answer or event, by kind; infinite before the first."""
        now = self._clock.monotonic()
        return {kind: reflector.store.age(now) for kind, reflector in self._watches.items()}

    def _shared(self, old: GpuNode, new: GpuNode) -> GpuNode:
        # The answer to a write is stored before the watch reports the change.
        return reuse_equal_parts(self.cluster.node(new.metadata.name) or old, new)

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if old is not None and new is None:
            self._forget(old)
        if new is not None:
            self._apply(new)
        some = new or old
        if some is not None:
            self._wake_waiters(some.metadata.name)
            if old is None or new is None or old.spec is not new.spec:
                self._find_unreserved(some.metadata.name)
            if old is None or new is None:
                self._check_agent(some.metadata.name)
        if self._nodes.store.synced:
            for callback in self._on_node:
                callback(old, new)

    def _kube_node_changed(self, old: Node | None, new: Node | None) -> None:
        if (some := new or old) is not None:
            self.cluster.set_kube_node(some.metadata.name, new)
            self._check_agent(some.metadata.name)

    def _check_agent(self, name: str) -> None:
        """Update whether the agent of a node with a GpuNode is down."""
        has_gpus = self._nodes.store.get(name) is not None
        reason = agent_down_reason(self._kube_nodes.store.get(name)) if has_gpus else None
        self.cluster.set_unavailable(name, AGENT_DOWN, reason)

    def _set_unreadable(self, name: str, why: str | None) -> None:
        """Leave out a GpuNode that cannot be decoded, whose last readable version stays; `why` None: it can again."""
        reason = None if why is None else f"GpuNode {name} is invalid: {shortened(why)}"
        self.cluster.set_unavailable(name, INVALID, reason)

    def _apply(self, node: GpuNode) -> None:
        """Apply a GpuNode; one with values that no computation accepts counts as having no GPUs."""
        name = node.metadata.name
        try:
            self.cluster.apply(node)
            self._invalid_nodes.discard(name)
        except (ArithmeticError, ValueError) as error:
            if name not in self._invalid_nodes:
                self._invalid_nodes.add(name)
                self._log.error("GPUs of a node left out", node=name, error=str(error))
            empty = msgspec.structs.replace(node.status, devices=[], partitions=[], tenants=[])
            self.cluster.apply(msgspec.structs.replace(node, status=empty))

    def _forget(self, node: GpuNode) -> None:
        """Forget a GpuNode that was deleted; an answer may have brought the next of its name already."""
        self._deleted[node.metadata.uid] = None
        known = self.cluster.node(node.metadata.name)
        if known is not None and known.metadata.uid == node.metadata.uid:
            self.cluster.remove(node.metadata.name)
            self._invalid_nodes.discard(node.metadata.name)

    def _wake_waiters(self, name: str) -> None:
        if (event := self._node_events.pop(name, None)) is not None:
            event.set()

    def _job_changed(self, old: JobRow | None, new: JobRow | None) -> None:
        if old is not None:
            self._jobs_by_uid.pop(JobUid(old.metadata.uid), None)
        if new is not None:
            self._jobs_by_uid[JobUid(new.metadata.uid)] = new
        changed = new or old
        if changed is not None and (new is None or old is None or old.status.attempts != new.status.attempts):
            for name in {pod.spec.node_name for pod in self.pods_of(JobUid(changed.metadata.uid))} - {""}:
                self._find_unreserved(name)
        for callback in self._on_job:
            callback(old, new)

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        if old is not None:
            self._pods_by_uid.pop(PodUid(old.metadata.uid), None)
            self._index(old, None)
        if new is not None:
            self._pods_by_uid[PodUid(new.metadata.uid)] = new
            self._index(new, new)
        for name in {pod.spec.node_name for pod in (old, new) if pod is not None} - {""}:
            self._find_unreserved(name)
        for callback in self._on_pod:
            callback(old, new)

    def _find_unreserved(self, node: str) -> None:
        """Find the workers that run on a node without a reservation, as after its GpuNode was deleted."""
        unreserved = [
            f"{pod.metadata.namespace}/{pod.metadata.name}"
            for uid, pod in self._bound_pods.get(node, {}).items()
            if node not in self.cluster.nodes_holding(uid) and self._is_recorded(pod)
        ]
        runs = "runs" if len(unreserved) == 1 else "run"
        reason = f"{listed(unreserved)} {runs} on its node without a reservation" if unreserved else None
        self.cluster.set_unavailable(node, UNRESERVED_POD, reason)

    def _is_recorded(self, pod: Pod) -> bool:
        """Whether the operator recorded the pod as a worker; users can create pods that name a job as their owner."""
        owner = job_owner_reference(pod.metadata)
        job = None if owner is None else self.job(JobUid(owner.uid))
        return job is not None and pod.metadata.uid in job.status.latest_attempt.pod_uids

    def _index(self, pod: Pod, now: Pod | None) -> None:
        """Keep the pods of each job and of each node."""
        owner = job_owner_reference(pod.metadata)
        if owner is None:
            return
        job, uid, node = JobUid(owner.uid), PodUid(pod.metadata.uid), pod.spec.node_name
        put_in_group(self._bound_pods, node, uid, now if now is not None and may_run(now) else None)
        put_in_group(self._pods_by_job, job, uid, now)
