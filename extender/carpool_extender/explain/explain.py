"""`carpool explain` and `carpool what-if`: the scheduler's own decision on a live cluster, with the caller's rights."""

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
from carpool_core.clock import Clock
from carpool_core.demand import Demand, prediction_message
from carpool_core.keys import (
    CONDITION_COMPLETE,
    CONDITION_FAILED,
    CONDITION_PLACED,
    CONDITION_PREDICTED,
    CONDITION_RUNNING,
    CONDITION_SUSPENDED,
    LABEL_MANAGED,
    REASONS_PODS_REFUSED,
    SCHEDULER_NAME,
)
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS, KubeApi, Selector
from carpool_core.kube.errors import Forbidden, NotFound
from carpool_core.kube.pods import Pod, PodSpec, container_uid, job_owner_reference, parse_worker_name
from carpool_core.resources.job import GpuTrainingJob, WorkerPlacement
from carpool_core.resources.meta import Condition, ObjectMeta
from carpool_core.resources.node import GpuNode, Reservation, describe_later_tenants
from carpool_core.values import GpuUuid, JobState, JobUid, PodUid

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.health import GpuAvailability, listed
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.cache.usage import TenantUsage, counted_tenants, epoch_seconds, reserved_usage, usage_of
from carpool_extender.explain.counterfactual import without_pods
from carpool_extender.explain.dry_run import DryRun, step_time_at
from carpool_extender.explain.queue_position import Queue, list_all, queue_of, turn_of
from carpool_extender.framework.diagnosis import explain_gpus, lines, with_measures, with_own
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.informers import JobRow, JobSpecRow, JobStatusRow
from carpool_extender.queue.order import QueueOrder
from carpool_extender.workloads import ANNOTATION_POLICY, AS_SHIPPED, JobOptions, NotOurs, demand_of_row, pod_request_of

_NOT_QUEUED = frozenset((JobState.SUSPENDED, JobState.UNPLACEABLE, JobState.BACKING_OFF))
_NO_REASON = "no reason was written"
Predictor = Callable[[GpuTrainingJob, list[str]], Awaitable[GpuTrainingJob]]
"""Returns a job with its prediction on some GPU products."""


class _Spec(JobSpecRow, frozen=True, kw_only=True):
    template: dict[str, Any] = msgspec.field(default_factory=dict)


class _Status(JobStatusRow, frozen=True, kw_only=True):
    state: str = ""
    conditions: list[Condition] = msgspec.field(default_factory=list)
    placement: list[WorkerPlacement] = msgspec.field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether the job is Complete or Failed."""
        return any(c.type in (CONDITION_COMPLETE, CONDITION_FAILED) and c.status == "True" for c in self.conditions)


class _Job(JobRow, frozen=True, kw_only=True):
    """A job with its template, conditions and placements."""

    spec: _Spec = _Spec()
    status: _Status = _Status()


class NoSuchJobError(LookupError):
    """The job does not exist; `str()` names it."""


class Answer(NamedTuple):
    """The lines of an answer."""

    lines: list[str]
    is_infeasible: bool = False
    """Whether the job could never run on this cluster."""


@dataclass(frozen=True)
class Options:
    """How a question is answered."""

    clock: Clock
    job_options: JobOptions = AS_SHIPPED
    """What the site allows jobs."""
    order: QueueOrder = QueueOrder.ALTERNATE
    """The site's queue order."""
    each_gpu: bool = False
    """Whether every GPU gets a line of its own."""
    unchecked: Sequence[str] = ()
    """Sentences on parts of the job that could not be checked."""


@dataclass(frozen=True)
class ClusterView:
    """The cluster as the extender sees it, without its memory of GPUs that could not be prepared."""

    cluster: ClusterCache
    done: int = 0
    """Workers of the job that have succeeded."""

    def succeeded(self, job_uid: JobUid, pod_uid: PodUid) -> int:
        """Return the number of workers of the job that have succeeded."""
        return self.done


def cluster_view(nodes: Sequence[GpuNode], config: SchedulerConfig, clock: Clock, done: int = 0) -> ClusterView:
    """Build the cluster cache from GpuNodes.

    An agent is silent by its last heartbeat and the caller's clock. Without a heartbeat the GpuNode's creation counts.
    """
    availability, now = GpuAvailability(clock), clock.now().timestamp()
    cluster = ClusterCache(config.slots, availability)
    heard = [(epoch_seconds(n.status.heartbeat_time or n.metadata.creation_timestamp or "") or now, n) for n in nodes]
    for at, node in sorted(heard, key=lambda one: one[0]):
        availability.record_heartbeat(node.metadata.name, node.status.heartbeat_time, max(0.0, now - at))
    for node in nodes:
        cluster.apply(node)
    return ClusterView(cluster, done)


async def explain_job(api: KubeApi, name: str, namespace: str, config: SchedulerConfig, options: Options) -> Answer:
    """Explain a job: its state, its places with their reasons, and the decision for every GPU without the job.

    Raises:
        NoSuchJobError: There is no such job.
        KubeError: The job or the GpuNodes could not be read.
    """
    # 1. The job and its state.
    try:
        job = await api.get(GPU_TRAINING_JOBS, name, _Job, namespace=namespace)
    except NotFound as error:
        if error.reason != "NotFound":  # the resource type itself is missing
            raise
        raise NoSuchJobError(f"no GpuTrainingJob {name} in namespace {namespace}") from error
    head = state_lines(job.status.state, job.status.conditions)
    if job.status.is_finished:
        return Answer([*head, *_last_places(job)])
    # 2. Its reservations.
    nodes, unreadable = await read_gpu_nodes(api)
    own = {n.metadata.name: [r for r in n.spec.reservations if r.job_uid == job.metadata.uid] for n in nodes}
    demand, steps = demand_of_row(job), job.spec.training.steps
    places = [line for node in nodes for line in reserved_lines(demand, node, own[node.metadata.name], steps)]
    try:
        pod_request = pod_request_of(job, _user(job.spec.template), options.job_options)
    except NotOurs as refusal:
        return Answer([*head, *places, str(refusal)])
    held = [r for found in own.values() for r in found]
    # 3. Its workers, some of which may be done or bound without a reservation.
    workers = await _workers(api, job, pod_request, held)
    more = unreserved_workers(job.status.placement, workers, own, {r.pod_uid for r in held})
    workers, places = workers.also_done(more.pods), [*places, *more.lines]
    lacking = max(0, pod_request.workers - len(workers.done.union(r.pod_uid for r in held)))
    # 4. The decision without the job, or for the workers that have no place.
    without_job = lacking == 0 or not held
    if without_job:
        nodes = [without_pods(node, {r.pod_uid for r in own[node.metadata.name]}) for node in nodes]
    done = workers.done if without_job else workers.done.difference(r.pod_uid for r in held)
    view = cluster_view(nodes, config, options.clock, len(done))
    dry_run = DryRun(view, pod_request, config, steps)
    if job.status.prediction is None:
        head.append("its status has no prediction yet: the answer is that for a job of which nothing is known")
    own_gpus = frozenset(uuid for r in held for uuid in r.gpu_uuids) if without_job else frozenset()
    gpus = _gpu_lines(view.cluster, pod_request, config, options, own_gpus)
    without = _nodes_without_gpus(nodes, await managed_nodes(api), unreadable, each=options.each_gpu)
    gpus = _indented(gpus, without)
    if not places:
        position = []
        if dry_run.wanted and job.status.state not in _NOT_QUEUED:
            position = _queue_position(await queue_of(api, nodes), pod_request, view.cluster, options)
        places = [f"{namespace}/{name} has no place yet", *position, *_waiting_lines(dry_run, workers)]
    elif lacking:
        places += [_unplaced_workers(dry_run, workers), *dry_run.rest()]
    elif held:
        places += dry_run.again([frozenset(r.gpu_uuids) for r in held if r.pod_uid not in workers.done])
    return Answer([*head, *places, *_own_policy(pod_request, config), *gpus, *unreadable.values()])


async def what_if(
    api: KubeApi, job: GpuTrainingJob, config: SchedulerConfig, predictor: Predictor, options: Options
) -> Answer:
    """Return where a job would go now, beside which tenants and how fast; nothing is created.

    Raises:
        KubeError: The GpuNodes could not be read.
    """
    nodes, unreadable = await read_gpu_nodes(api)
    products = {device.product for node in nodes for device in node.status.devices}
    predicted = await predictor(job, sorted(products))
    prediction, head = predicted.status.prediction, list[str]()
    if prediction is not None:
        message = prediction_message(prediction, predicted.spec.sharing.mode, predicted.spec.memory.limit)
        head = [f"prediction: {prediction.outcome} ({prediction.reason}) {message}"]
    try:
        row = msgspec.convert(msgspec.to_builtins(predicted), JobRow)
        pod_request = pod_request_of(row, _user(job.spec.template), options.job_options)
    except NotOurs as refusal:
        return Answer([*head, str(refusal), *options.unchecked], is_infeasible=True)
    view = cluster_view(nodes, config, options.clock)
    dry_run = DryRun(view, pod_request, config, job.spec.training.steps, options.unchecked)
    without = _nodes_without_gpus(nodes, await managed_nodes(api), unreadable, each=options.each_gpu)
    listed_gpus = _indented(_gpu_lines(view.cluster, pod_request, config, options), without)
    gpus = [*_own_policy(pod_request, config), *listed_gpus, *unreadable.values()]
    if (reason := dry_run.infeasible()) is not None:
        # A node that cannot be read, or reports no GPUs yet, may have suitable ones.
        is_complete = not unreadable and not without
        head.append(f"could never run {'here' if is_complete else 'on the GPUs that are known'}: {reason}")
        advice = dry_run.advice(whole_gang=dry_run.gang() is not None)
        return Answer([*head, *dry_run.unchecked, *advice, *gpus], is_infeasible=is_complete)
    spec = job.spec.template.get("spec")
    has_class = isinstance(spec, dict) and bool(spec.get("priorityClassName"))
    queue = await queue_of(api, nodes)
    position = _queue_position(queue, pod_request, view.cluster, options, is_new=True, has_class=has_class)
    return Answer([*head, *position, *dry_run.outcome(), *gpus])


def state_lines(state: str, conditions: Sequence[Condition]) -> list[str]:
    """Return the condition that explains a job's state, and what to do about it."""
    known = {condition.type: condition for condition in conditions}
    ended = [known[t] for t in (CONDITION_FAILED, CONDITION_COMPLETE, CONDITION_SUSPENDED) if t in known]
    chosen = next((c for c in ended if c.status == "True"), None)
    placed, running = known.get(CONDITION_PLACED), known.get(CONDITION_RUNNING)
    if chosen is None:
        chosen = running if placed is None or (placed.status == "True" and running is not None) else placed
    chosen = chosen or known.get(CONDITION_PREDICTED)
    if chosen is None:
        return []
    found = [f"{state or 'its state'}: {chosen.type} is {chosen.status} ({chosen.reason}) {chosen.message}".rstrip()]
    if chosen.reason == "SchedulerError" or "SchedulerError" in chosen.message:
        found.append(
            "kube-scheduler got no answer from Carpool's extender, and the job waits until it runs again; ask an "
            "administrator to look at the scheduler's pods and their logs"
        )
    if chosen.reason in REASONS_PODS_REFUSED:
        found.append("not all of its pods can be created; the rest of this answer assumes that they can")
    return found


def reserved_lines(demand: Demand, node: GpuNode, held: Sequence[Reservation], steps: int | None) -> list[str]:
    """Return a line for each worker that has a reservation on a node: its step time there and the reason.

    Args:
        demand: The demand of one worker.
        node: The node.
        held: The job's reservations there.
        steps: Training steps of the job, or None.
    """
    devices, name = node.status.devices, node.metadata.name
    return [
        f"{r.pod_name} has a place on {name}{step_time_at(demand, r, devices, steps)}: {r.reason or _NO_REASON}"
        f"{describe_later_tenants(node, r)}{_unreported_gpus(node, r)}"
        for r in held
    ]


def _unreported_gpus(node: GpuNode, held: Reservation) -> str:
    known = {device.uuid for device in node.status.devices}
    missing = [uuid for uuid in held.gpu_uuids if uuid not in known]
    return f"; {node.metadata.name} does not report {listed(missing)} now" if missing else ""


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a job's last attempt, by their pods."""

    done: frozenset[PodUid] = frozenset()
    """Pods that have succeeded, or need no place for another reason."""
    waiting: tuple[str, ...] = ()
    """Names of pods without a place."""
    bound: Mapping[PodUid, tuple[str, str]] = field(default_factory=dict)
    """Pods on a node that have not ended: pod name and node name by UID."""
    unread: str = ""
    """Why the pods could not be read; empty where they were."""

    def also_done(self, pods: frozenset[PodUid]) -> "Workers":
        """Return a copy in which some more pods need no place."""
        return replace(self, done=self.done | pods)


async def _workers(api: KubeApi, job: _Job, pod_request: PodRequest, held: Sequence[Reservation]) -> Workers:
    """Read the job's pods, unless the reservations answer everything."""
    if (pod_request.workers == 1 and not job.status.placement) or len(held) == pod_request.workers:
        return Workers()
    return await read_workers(api, JobUid(job.metadata.uid), job.metadata.namespace, {r.pod_uid for r in held})


async def read_workers(api: KubeApi, job_uid: JobUid, namespace: str, held: Container[PodUid]) -> Workers:
    """Read the pods of a job's last attempt.

    Args:
        api: The Kubernetes API, with the caller's rights.
        job_uid: The job.
        namespace: Its namespace.
        held: Pods that have reservations.
    """
    ours = Selector(namespace=namespace, fields=f"spec.schedulerName={SCHEDULER_NAME}")
    try:
        found = await list_all(api, PODS, Pod, ours)
    except Forbidden:
        return Workers(unread=f"you may not list pods in namespace {namespace}")
    pods = _of_last_attempt(found, job_uid)
    waiting = [
        pod.metadata.name
        for pod in pods
        if pod.status.phase == "Pending" and not pod.metadata.deletion_timestamp and pod.metadata.uid not in held
    ]
    done = frozenset(PodUid(pod.metadata.uid) for pod in pods if pod.status.phase == "Succeeded")
    bound = {
        PodUid(pod.metadata.uid): (pod.metadata.name, pod.spec.node_name)
        for pod in pods
        if pod.spec.node_name and pod.status.phase not in ("Succeeded", "Failed")
    }
    return Workers(done, tuple(sorted(waiting)), bound)


def _of_last_attempt(pods: Iterable[Pod], job_uid: JobUid) -> list[Pod]:
    attempts: dict[int, list[Pod]] = {}
    for pod in pods:
        owner, named = job_owner_reference(pod.metadata), parse_worker_name(pod.metadata.name)
        if owner is not None and owner.uid == job_uid and named is not None:
            attempts.setdefault(named.attempt, []).append(pod)
    return attempts[max(attempts)] if attempts else []


@dataclass(frozen=True, slots=True)
class UnreservedWorkers:
    """Workers on a node for which no GpuNode has a reservation."""

    pods: frozenset[PodUid]
    lines: list[str]
    """One line for each."""


def unreserved_workers(
    placement: Sequence[WorkerPlacement], workers: Workers, nodes: Container[str], held: Container[PodUid]
) -> UnreservedWorkers:
    """Return the workers that are on a node without a reservation.

    The status keeps the places of a failed attempt until the next one, so only running pods count. Where pods may
    not be read, placements on nodes without a readable GpuNode count.

    Args:
        placement: Placements in the job's status.
        workers: The job's pods.
        nodes: Names of the readable GpuNodes.
        held: Pods that have reservations.
    """
    places: Mapping[PodUid, WorkerPlacement] = {
        place.pod_uid: place
        for place in placement
        if (place.node not in nodes if workers.unread else place.pod_uid in workers.bound)
    }
    found = {
        pod: f"{place.pod} has a place on {place.node}: {place.reason or _NO_REASON}; {_missing(place.node, nodes)}"
        for pod, place in places.items()
    }
    found |= {
        pod: f"{name} runs on {node}: {_missing(node, nodes)}"
        for pod, (name, node) in workers.bound.items()
        if pod not in places
    }
    found = {pod: line for pod, line in found.items() if pod not in held}
    return UnreservedWorkers(frozenset(found), list(found.values()))


def _missing(node: str, nodes: Container[str]) -> str:
    return "its reservation is missing in the GpuNode" if node in nodes else f"no GPUs of {node} are reported now"


def _waiting_lines(dry_run: DryRun, workers: Workers) -> list[str]:
    """Return why a job without any place waits, or the places that it could have."""
    if dry_run.wanted == 0:
        several = f"all of its {dry_run.pod_request.workers} workers have succeeded"
        return ["its worker has succeeded" if dry_run.pod_request.workers == 1 else several, *dry_run.unchecked]
    if (waits := dry_run.gang()) is None:
        return [*dry_run.unchecked, *(dry_run.ranking() or dry_run.advice())]
    fewer = [f"fewer, if some have succeeded already ({workers.unread})"] if workers.unread else []
    return [waits, *fewer, *dry_run.unchecked, *dry_run.advice(whole_gang=True)]


def _unplaced_workers(dry_run: DryRun, workers: Workers) -> str:
    """Name the workers without a place, where others of the job have theirs."""
    lacking, total = dry_run.wanted, dry_run.pod_request.workers
    it, wait, have = ("it", "waits", "has") if lacking == 1 else ("they", "wait", "have")
    if workers.unread:
        why = f"{it} {wait}, or {have} succeeded ({workers.unread})"
    elif len(workers.waiting) == lacking:
        why = f"{' and '.join(workers.waiting)} {wait}"
    else:
        why = f"not all of their pods exist yet{': ' if workers.waiting else ''}{', '.join(workers.waiting)}"
    return f"{lacking} of {total} workers {have} no place: {why}"


def _user(template: dict[str, Any]) -> int | None:
    """Return the UID that the workers run as; None where the template names none or is invalid."""
    try:
        return container_uid(msgspec.convert(template.get("spec") or {}, PodSpec))
    except msgspec.ValidationError:
        return None


def _last_places(job: _Job) -> list[str]:
    name = f"{job.metadata.namespace}/{job.metadata.name}"
    places = [f"{p.pod} ran on {p.node}: {p.reason or _NO_REASON}" for p in job.status.placement]
    return [*(places or [f"{name} had no place when it ended"]), "it has ended, so no decision is made for it"]


def _queue_position(
    queue: Queue,
    pod_request: PodRequest,
    cluster: ClusterCache,
    options: Options,
    *,
    is_new: bool = False,
    has_class: bool = False,
) -> list[str]:
    if not (is_new or queue.unread or pod_request.demand.job_uid in queue.priorities):
        return []  # none of its pods is pending
    return turn_of(
        queue,
        pod_request,
        cluster.snapshot(),
        options.order,
        choices=options.job_options,
        clock=options.clock,
        has_class=has_class,
    )


def _own_policy(pod_request: PodRequest, config: SchedulerConfig) -> list[str]:
    if pod_request.policy in (None, config.policy.name):
        return []
    return [f"its annotation {ANNOTATION_POLICY} selects policy {pod_request.policy} instead of {config.policy.name}"]


def _gpu_lines(
    cluster: ClusterCache,
    pod_request: PodRequest,
    config: SchedulerConfig,
    options: Options,
    own: frozenset[GpuUuid] = frozenset(),
) -> list[str]:
    found = explain_gpus(CachedEvaluation(pod_request, config, cluster.snapshot()), sorted(cluster.nodes))
    measured = {uuid: text for node in cluster.nodes.values() for uuid, text in measured_differences(node).items()}
    return lines(with_own(with_measures(found, measured), own), each=options.each_gpu)


def _indented(gpus: Sequence[str], without: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in [*gpus, *without] or ["no node reports GPUs; is the node agent running?"]]


def _nodes_without_gpus(
    nodes: Sequence[GpuNode], managed: Iterable[str], unreadable: Container[str], *, each: bool
) -> list[str]:
    """Return lines about nodes that should report GPUs and report none.

    Args:
        nodes: The valid GpuNodes.
        managed: Names of the Nodes that are labelled for Carpool.
        unreadable: Names of the invalid GpuNodes, which have lines of their own.
        each: Whether every node gets a line of its own.
    """
    reporting = {node.metadata.name: bool(node.status.devices) for node in nodes}
    names = sorted(n for n in {*reporting, *managed} if not reporting.get(n, False) and n not in unreadable)
    question = "is the node agent running there?"
    if each or len(names) < 2:
        return [f"{name} reports no GPUs: {question}" for name in names]
    return [f"{len(names):,} nodes report no GPUs ({listed(names)}): {question}"]


async def managed_nodes(api: KubeApi) -> list[str]:
    """Return the names of the Nodes that are labelled for Carpool; none where the caller may not list Nodes."""
    try:
        found = await list_all(api, NODES, _Named, Selector(labels=f"{LABEL_MANAGED}=managed"))
    except Forbidden:
        return []
    return [node.metadata.name for node in found]


def measured_differences(node: GpuNode) -> Mapping[GpuUuid, str]:
    """Return, by GPU, where a tenant's measurement counts instead of its prediction, or will count later."""
    with_assumed, found = counted_tenants(node), {}
    for uuid in {uuid for one in node.spec.reservations for uuid in one.gpu_uuids}:
        held = [one for one in node.spec.reservations if uuid in one.gpu_uuids]
        known = usage_of(held, [with_assumed.get((one.pod_uid, uuid)) for one in held])
        changed = [text for one, of in zip(held, known, strict=True) if (text := _measured(one, of))]
        parts = [f"counts as measured: {', '.join(changed)}"] if changed else []
        if later := [_unmeasured(one) for one in held if one.tenant.provisional and one.tenant.measured_mib is None]:
            parts.append(f"until its measured peak is stable: {', '.join(later)}")
        if parts:
            found[uuid] = "; ".join(parts)
    return found


def _unmeasured(held: Reservation) -> str:
    memory = held.tenant.memory_mib
    return f"{held.pod_namespace}/{held.job_name} counts as {'a whole GPU' if memory is None else f'{memory:,} MiB'}"


def _measured(held: Reservation, known: TenantUsage) -> str:
    """Return where a tenant counts differently from its prediction; empty where it does not, in whole percents."""
    expected, parts = reserved_usage(held.tenant), []
    with_assumed, bound = known.memory_mib, held.tenant.memory_mib
    if with_assumed is not None and with_assumed != bound:
        at_most = "whole GPU" if bound is None else f"at most {bound:,} MiB"
        parts.append(f"{with_assumed:,} MiB, {at_most} expected")
    elif held.tenant.measured_mib is not None and with_assumed != held.tenant.measured_mib:
        parts.append(f"more than the {held.tenant.measured_mib:,} MiB measured before")
    for what, now, then in (("SM", known.sm, expected.sm), ("utilization", known.util, expected.util)):
        if f"{now:.0%}" != f"{then:.0%}":
            parts.append(f"measured {what} {now:.0%}, predicted {then:.0%}")
    return f"{held.pod_namespace}/{held.job_name} ({'; '.join(parts)})" if parts else ""


class _Named(msgspec.Struct, frozen=True):
    metadata: ObjectMeta


async def read_gpu_nodes(api: KubeApi) -> tuple[list[GpuNode], dict[str, str]]:
    """Read all GpuNodes; return the valid ones, and a sentence for each invalid one by name.

    Raises:
        KubeError: They could not be read.
    """
    found, invalid = [], {}
    for raw in await list_all(api, GPU_NODES, msgspec.Raw):
        try:
            found.append(msgspec.json.decode(raw, type=GpuNode))
        except msgspec.ValidationError as error:
            name = msgspec.json.decode(raw, type=_Named).metadata.name
            invalid[name] = f"left out: GpuNode {name} is invalid: {error}"
    return found, invalid
