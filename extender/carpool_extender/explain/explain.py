"""`carpool explain` and `carpool what-if`: the scheduler's own decision on a live cluster, with the caller's rights."""

from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from carpool_core.demand import Demand, prediction_message
from carpool_core.keys import (
    CONDITION_COMPLETE,
    CONDITION_FAILED,
    CONDITION_PLACED,
    CONDITION_PREDICTED,
    CONDITION_RUNNING,
    CONDITION_SUSPENDED,
    LABEL_MANAGED,
    REASON_EXCEEDS_EVERY_GPU,
    REASON_NO_SUCH_GPU,
    REASONS_PODS_REFUSED,
    SCHEDULER_NAME,
)
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS, KubeApi, Selector, list_all
from carpool_core.kube.errors import Forbidden, NotFound
from carpool_core.kube.nodes import Node
from carpool_core.kube.pods import Pod, PodSpec, job_owner_reference
from carpool_core.products import DeviceClass, device_class, products_of
from carpool_core.resources.job import GpuTrainingJob, WorkerPlacement
from carpool_core.resources.meta import Condition, ObjectMeta
from carpool_core.resources.node import GpuNode, Reservation, describe_later_tenants
from carpool_core.values import GpuUuid, JobState, PodUid, without_nulls
from carpool_predictor.predict import may_not_fit

from carpool_extender.cache.cluster import AGENT_DOWN, ClusterCache, listed, without_pods
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.explain.dry_run import DryRun, step_time_at
from carpool_extender.explain.queue_forecast import (
    Options,
    QueuePlace,
    is_of_earlier_attempt,
    place_in_queue,
    read_pending_jobs,
)
from carpool_extender.framework.diagnosis import explain_gpus, lines, with_measures, with_own
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.framework.selection import CachedEvaluation
from carpool_extender.informers import JobRow, JobSpecRow, JobStatusRow, agent_down_reason
from carpool_extender.queue.entries import pods_of_latest_attempt
from carpool_extender.queue.scheduling_queue import WaitReason
from carpool_extender.workloads import ANNOTATION_POLICY, NotOurs, demand_of_row, pod_request_of

_NOT_QUEUED = frozenset((JobState.SUSPENDED, JobState.UNPLACEABLE, JobState.BACKING_OFF))
_NO_GPU = frozenset(
    (WaitReason.NO_GPU_FITS, WaitReason.WOULD_DELAY, "Unschedulable", REASON_EXCEEDS_EVERY_GPU, REASON_NO_SUCH_GPU)
)
_NO_REASON = "no reason was written"
Predictor = Callable[[GpuTrainingJob, Collection[DeviceClass]], Awaitable[GpuTrainingJob]]
"""Returns a job with its prediction on the products of some GPUs."""


Adviser = Callable[[GpuTrainingJob, Collection[DeviceClass]], Awaitable[list[str]]]
"""Returns statements on changes of a predicted job that would save memory."""


class _Spec(JobSpecRow, frozen=True, kw_only=True):
    template: dict[str, Any] = msgspec.field(default_factory=dict)


class _Status(JobStatusRow, frozen=True, kw_only=True):
    conditions: list[Condition] = msgspec.field(default_factory=list)
    placement: list[WorkerPlacement] = msgspec.field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether the job is Complete or Failed."""
        return any(c.type in (CONDITION_COMPLETE, CONDITION_FAILED) and c.status == "True" for c in self.conditions)

    @property
    def has_no_gpu(self) -> bool:
        """Whether the condition Placed names a lack of GPUs."""
        placed = next((c for c in self.conditions if c.type == CONDITION_PLACED), None)
        return placed is not None and placed.status == "False" and placed.reason in _NO_GPU


class _Job(JobRow, frozen=True, kw_only=True):
    """A job with its template, conditions and placements."""

    spec: _Spec = _Spec()
    status: _Status = _Status()


class _Named(msgspec.Struct, frozen=True):
    metadata: ObjectMeta


class NoSuchJobError(LookupError):
    """The job does not exist; `str()` names it."""


class Answer(NamedTuple):
    """The lines of an answer."""

    lines: list[str]
    is_infeasible: bool = False
    """Whether the job could never run on this cluster."""


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
    head = _state_lines(job.status.state, job.status.conditions)
    if job.status.is_finished:
        last = [f"{p.pod} ran on {p.node}: {p.reason or _NO_REASON}" for p in job.status.placement]
        last = last or [f"{namespace}/{name} had no place when it ended"]
        return Answer([*head, *last, "it has ended, so no decision is made for it"])
    # 2. Its reservations.
    nodes, invalid = await _read_gpu_nodes(api)
    own = {n.metadata.name: [r for r in n.spec.reservations if r.job_uid == job.metadata.uid] for n in nodes}
    demand, steps = demand_of_row(job), job.spec.training.steps
    reserved = [(node, r) for node in nodes for r in own[node.metadata.name]]
    head += [
        f"{r.pod_name} of an earlier attempt still holds GPUs of {node.metadata.name}: its container may run there"
        for node, r in reserved
        if is_of_earlier_attempt(r, job)
    ]
    places = [_reserved_line(demand, node, r, steps) for node, r in reserved if not is_of_earlier_attempt(r, job)]
    try:
        request = pod_request_of(job, _pod_spec(job.spec.template), options.job_options)
    except NotOurs as refusal:
        return Answer([*head, *places, str(refusal)])
    held = {r.pod_uid: r for found in own.values() for r in found if not is_of_earlier_attempt(r, job)}
    # 3. Its workers, some of which may be done or bound without a reservation.
    workers = Workers()
    if len(held) < request.workers and (request.workers > 1 or job.status.placement):
        workers = await _read_workers(api, job, namespace, held)
    unreserved = _unreserved_workers(job.status.placement, workers, own, held)
    done, places = workers.done.union(unreserved), [*places, *unreserved.values()]
    lacking = max(0, request.workers - len(done.union(held)))
    # 4. The decision without the job, or for the workers that have no place.
    remaining, compares = nodes, not lacking or not held
    if compares:
        remaining = [without_pods(node, held.keys()) for node in nodes]
    kube_nodes = await _read_nodes(api)
    cluster = cluster_view(remaining, config, kube_nodes)
    dry_run = DryRun(cluster, request, config, lacking or max(0, request.workers - len(done)), steps)
    if job.status.prediction is None:
        head.append("its status has no prediction yet: the answer is that for a job of which nothing is known")
    own_gpus = frozenset(uuid for r in held.values() for uuid in r.gpu_uuids) if compares else frozenset()
    without_gpus = _nodes_without_gpus(nodes, kube_nodes, invalid)
    gpus = _gpu_lines(cluster, request, config, options, without_gpus, own_gpus)
    warning = _memory_warning(demand, nodes, held.values())
    # 5. Its place in the queue, and what it waits for.
    is_complete = not invalid and not without_gpus
    may_be_fewer = bool(places or workers.unread)  # than the workers that a decision for all of them counts with
    if lacking and not may_be_fewer and (never := dry_run.never(is_complete=is_complete)) is not None:
        places = never
    elif lacking:
        place = QueuePlace()
        if job.status.state not in _NOT_QUEUED:
            pending = await read_pending_jobs(api)
            place = place_in_queue(pending, request, cluster_view(nodes, config, kube_nodes), config, options)
        if places:
            places.append(_missing_workers(workers, lacking, request.workers))
        else:
            places.append(f"{namespace}/{name} has no place yet")
            places += [f"some workers may have succeeded already ({workers.unread})"] if workers.unread else []
        decided = dry_run.outcome(place.waits)
        if place.is_admitted and dry_run.fits:
            decided = [f"by the GPUs alone: {decided[0]}", *decided[1:]]
        elif head and dry_run.fits and place.waits is None and job.status.has_no_gpu:
            head[0] += "; that was written before GPUs became free for it"
        places += [*place.lines, *decided]
    elif held:
        places += dry_run.again([frozenset(r.gpu_uuids) for r in held.values() if r.pod_uid not in done])
    elif not places:
        all_ = "its worker has" if request.workers == 1 else f"all of its {request.workers} workers have"
        places = [f"{namespace}/{name} has no place yet", f"{all_} succeeded"]
    return Answer([*warning, *head, *places, *gpus, *invalid.values(), *_unread(kube_nodes)])


def _memory_warning(demand: Demand, nodes: Iterable[GpuNode], held: Collection[Reservation]) -> list[str]:
    """Return a line on the GPUs that a job may not fit: those that it has, or else all of the cluster.

    There is none for a job with a memory limit, or whose workers have all shown their peak.
    """
    is_measured = bool(held) and all(one.tenant.measured_mib is not None for one in held)
    if demand.prediction is None or demand.memory_limit_mib is not None or is_measured:
        return []
    own = {uuid for one in held for uuid in one.gpu_uuids}
    devices = [device for node in nodes for device in node.status.devices]
    kinds = {device_class(device) for device in [one for one in devices if one.uuid in own] or devices}
    found = may_not_fit(demand.prediction.products, products_of(kinds))
    return [found] if found else []


async def what_if(
    api: KubeApi,
    job: GpuTrainingJob,
    config: SchedulerConfig,
    predictor: Predictor,
    options: Options,
    adviser: Adviser | None = None,
) -> Answer:
    """Return where a job would go now, with which co-tenants and how fast; nothing is created.

    The adviser names changes of a job that could never run.

    Raises:
        KubeError: The GpuNodes could not be read.
    """
    # 1. Its prediction on the products of the cluster.
    nodes, invalid = await _read_gpu_nodes(api)
    kinds = {device_class(device) for node in nodes for device in node.status.devices}
    predicted = await predictor(job, kinds)
    prediction, head = predicted.status.prediction, list[str]()
    if prediction is not None:
        message = prediction_message(prediction, predicted.spec.sharing.mode, predicted.spec.memory.limit)
        head = [f"prediction: {prediction.outcome} ({prediction.reason}) {message}"]
    # 2. Its request.
    try:
        row = msgspec.convert(msgspec.to_builtins(predicted), JobRow)
        request = pod_request_of(row, _pod_spec(job.spec.template), options.job_options)
    except NotOurs as refusal:
        return Answer([*head, str(refusal), *options.unchecked], is_infeasible=True)
    # 3. The decision.
    kube_nodes = await _read_nodes(api)
    cluster = cluster_view(nodes, config, kube_nodes)
    dry_run = DryRun(cluster, request, config, request.workers, job.spec.training.steps, options.unchecked)
    without_gpus = _nodes_without_gpus(nodes, kube_nodes, invalid)
    gpus = [*_gpu_lines(cluster, request, config, options, without_gpus), *invalid.values(), *_unread(kube_nodes)]
    is_complete = not invalid and not without_gpus
    if (never := dry_run.never(is_complete=is_complete)) is not None:
        advice = [] if adviser is None else await adviser(predicted, kinds)
        return Answer([*head, *advice, *never, *gpus], is_infeasible=is_complete)
    has_class = bool((job.spec.template.get("spec") or {}).get("priorityClassName"))
    pending, copy = await read_pending_jobs(api), cluster_view(nodes, config, kube_nodes)
    place = place_in_queue(pending, request, copy, config, options, is_new=True, has_class=has_class)
    return Answer([*head, *place.lines, *dry_run.outcome(place.waits), *gpus])


def _state_lines(state: str, conditions: Sequence[Condition]) -> list[str]:
    """Return the condition that explains a job's state, and what to do about it."""
    by_type = {condition.type: condition for condition in conditions}
    ended = [by_type[t] for t in (CONDITION_FAILED, CONDITION_COMPLETE, CONDITION_SUSPENDED) if t in by_type]
    chosen = next((c for c in ended if c.status == "True"), None)
    placed, running = by_type.get(CONDITION_PLACED), by_type.get(CONDITION_RUNNING)
    if chosen is None:
        chosen = running if placed is None or (placed.status == "True" and running is not None) else placed
    chosen = chosen or by_type.get(CONDITION_PREDICTED)
    if chosen is None:
        return []
    found = [f"{state or 'its state'}: {chosen.type} is {chosen.status} ({chosen.reason}) {chosen.message}".rstrip()]
    predicted = by_type.get(CONDITION_PREDICTED)
    if predicted is not None and predicted is not chosen and predicted.status == "False":
        found.append(f"it has no prediction ({predicted.reason}): {predicted.message}")
    if chosen.reason == "SchedulerError" or "SchedulerError" in chosen.message:
        found.append(
            "kube-scheduler got no answer from Carpool's extender, and the job waits until it runs again; ask an "
            "administrator to check the scheduler's pods and their logs"
        )
    if chosen.reason in REASONS_PODS_REFUSED:
        found.append("not all of its pods can be created; the rest of this answer assumes that they can")
    return found


def _reserved_line(demand: Demand, node: GpuNode, held: Reservation, steps: int | None) -> str:
    """Return the place of a worker that has a reservation on a node, its step time there, and the reason."""
    devices, name = node.status.devices, node.metadata.name
    missing = [uuid for uuid in held.gpu_uuids if uuid not in {device.uuid for device in devices}]
    unreported = f"; {name} does not report {listed(missing)} now" if missing else ""
    place = f"{held.pod_name} has a place on {name}{step_time_at(demand, held, devices, steps)}"
    return f"{place}: {held.reason or _NO_REASON}{describe_later_tenants(node, held)}{unreported}"


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a job's last attempt, by their pods."""

    done: frozenset[PodUid] = frozenset()
    """Pods that have succeeded."""
    waiting: tuple[str, ...] = ()
    """Names of pods without a place."""
    bound: Mapping[PodUid, tuple[str, str]] = field(default_factory=dict)
    """Pods on a node that have not ended: pod name and node name by UID."""
    unread: str = ""
    """Why the pods could not be read; empty if they were."""


async def _read_workers(api: KubeApi, job: JobRow, namespace: str, held: Container[PodUid]) -> Workers:
    """Read the pods of a job's last attempt; `held` are the pods that have reservations."""
    ours = Selector(namespace=namespace, fields=f"spec.schedulerName={SCHEDULER_NAME}")
    try:
        found = await list_all(api, PODS, Pod, ours)
    except Forbidden:
        return Workers(unread=f"you may not list pods in namespace {namespace}")
    owned = [pod for pod in found if (o := job_owner_reference(pod.metadata)) and o.uid == job.metadata.uid]
    pods = pods_of_latest_attempt(job, owned)
    waiting = [
        pod.metadata.name
        for pod in pods
        if pod.status.phase == "Pending" and not pod.metadata.deletion_timestamp and pod.metadata.uid not in held
    ]
    done = frozenset(PodUid(pod.metadata.uid) for pod in pods if pod.status.phase == "Succeeded")
    bound = {
        PodUid(pod.metadata.uid): (pod.metadata.name, pod.spec.node_name)
        for pod in pods
        if pod.spec.node_name and not pod.is_finished
    }
    return Workers(done, tuple(sorted(waiting)), bound)


def _unreserved_workers(
    placement: Sequence[WorkerPlacement], workers: Workers, nodes: Container[str], held: Container[PodUid]
) -> dict[PodUid, str]:
    """Return a line for each worker that is on a node without a reservation.

    The status keeps the places of a failed attempt until the next one, so only running pods count. If pods could not
    be read, placements on nodes without a readable GpuNode count.
    """
    found = {uid: (f"{name} runs on {node}", node) for uid, (name, node) in workers.bound.items()}
    for place in placement:
        if place.node not in nodes if workers.unread else place.pod_uid in workers.bound:
            line = f"{place.pod} has a place on {place.node}: {place.reason or _NO_REASON}"
            found[place.pod_uid] = (line, place.node)
    return {
        uid: f"{line}; its reservation is missing in the GpuNode"
        if node in nodes
        else f"{line}; no GPUs of {node} are reported now"
        for uid, (line, node) in found.items()
        if uid not in held
    }


def _missing_workers(workers: Workers, lacking: int, total: int) -> str:
    """Name the workers without a place, if others of the job have theirs."""
    it, wait, have = ("it", "waits", "has") if lacking == 1 else ("they", "wait", "have")
    if workers.unread:
        why = f"{it} {wait}, or {have} succeeded ({workers.unread})"
    elif len(workers.waiting) == lacking:
        why = f"{' and '.join(workers.waiting)} {wait}"
    else:
        why = f"not all of their pods exist yet{': ' if workers.waiting else ''}{', '.join(workers.waiting)}"
    return f"{lacking} of {total} workers {have} no place: {why}"


def _pod_spec(template: dict[str, Any]) -> PodSpec:
    """Return the spec in a template. A null is the same as no value, as for the API server.

    Raises:
        NotOurs: It is invalid.
    """
    try:
        return msgspec.convert(without_nulls(template).get("spec", {}), PodSpec)
    except msgspec.ValidationError as error:
        raise NotOurs(f"InvalidTemplate: no decision, because spec.template.spec is invalid: {error}") from error


async def read_cluster(api: KubeApi, config: SchedulerConfig) -> ClusterCache:
    """Read the valid GpuNodes, and the Nodes if the caller may list them, into a cluster cache.

    Raises:
        KubeError: The GpuNodes could not be read.
    """
    nodes, _ = await _read_gpu_nodes(api)
    return cluster_view(nodes, config, await _read_nodes(api))


def cluster_view(
    nodes: Sequence[GpuNode], config: SchedulerConfig, kube_nodes: Mapping[str, Node] | None
) -> ClusterCache:
    """Build the cluster cache from GpuNodes and Nodes; without Nodes, every node counts as running and accepted."""
    cluster = ClusterCache(config.slots)
    for node in nodes:
        cluster.apply(node)
        if kube_nodes is not None:
            reason = agent_down_reason(kube_nodes.get(node.metadata.name))
            cluster.set_unavailable(node.metadata.name, AGENT_DOWN, reason)
            cluster.set_kube_node(node.metadata.name, kube_nodes.get(node.metadata.name))
    return cluster


def _gpu_lines(
    cluster: ClusterCache,
    request: PodRequest,
    config: SchedulerConfig,
    options: Options,
    without_gpus: Sequence[str],
    own: frozenset[GpuUuid] = frozenset(),
) -> list[str]:
    """Return a line for each GPU or group of equal GPUs, and for the nodes that report none."""
    found = explain_gpus(CachedEvaluation(request, config, cluster.snapshot()).evaluation, sorted(cluster.nodes))
    gpus = lines(with_own(with_measures(found, cluster.nodes.values()), own), each=options.each_gpu)
    question = "is the node agent running there?"
    if options.each_gpu or len(without_gpus) < 2:
        gpus += [f"{name} reports no GPUs: {question}" for name in without_gpus]
    else:
        gpus.append(f"{len(without_gpus):,} nodes report no GPUs ({listed(without_gpus)}): {question}")
    policy = []
    if request.policy not in (None, config.policy.name):
        policy = [f"its annotation {ANNOTATION_POLICY} selects policy {request.policy} instead of {config.policy.name}"]
    return [*policy, *(f"  {line}" for line in gpus or ["no node reports GPUs; is the node agent running?"])]


async def _read_nodes(api: KubeApi) -> dict[str, Node] | None:
    """Read all Nodes by name; None if the caller may not list them."""
    try:
        return {node.metadata.name: node for node in await list_all(api, NODES, Node)}
    except Forbidden:
        return None


def _unread(kube_nodes: Mapping[str, Node] | None) -> list[str]:
    """Return what is missing in an answer without Nodes."""
    return [] if kube_nodes is not None else ["you may not list Nodes: those that are down or excluded count as usable"]


def _nodes_without_gpus(
    nodes: Iterable[GpuNode], kube_nodes: Mapping[str, Node] | None, invalid: Container[str]
) -> list[str]:
    """Return the names of the nodes that should report GPUs and report none, sorted.

    Without Nodes, only those with a GpuNode are known. Invalid GpuNodes have lines of their own.
    """
    managed = [
        name for name, node in (kube_nodes or {}).items() if node.metadata.labels.get(LABEL_MANAGED) == "managed"
    ]
    reporting = {node.metadata.name: bool(node.status.devices) for node in nodes}
    names = {*reporting, *managed}
    return sorted(name for name in names if not reporting.get(name, False) and name not in invalid)


async def _read_gpu_nodes(api: KubeApi) -> tuple[list[GpuNode], dict[str, str]]:
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
