"""The scheduler's own decision on a live cluster, asked for with a user's rights."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from carpool_core.clock import Clock
from carpool_core.demand import prediction_message
from carpool_core.keys import CONDITION_COMPLETE, CONDITION_FAILED
from carpool_core.kube.api import GPU_TRAINING_JOBS, KubeApi
from carpool_core.kube.errors import NotFound
from carpool_core.kube.pods import PodSpec, container_uid
from carpool_core.resources.job import GpuTrainingJob, WorkerPlacement
from carpool_core.resources.meta import Condition
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import GpuUuid, JobState, JobUid, PodUid

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.health import GpuAvailability
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.cache.usage import epoch_seconds
from carpool_extender.explain.measures import differences
from carpool_extender.explain.outlook import standing
from carpool_extender.explain.places import as_if_gone, reserved, unreserved, without_gpus
from carpool_extender.explain.reading import Workers, gpu_nodes, hosts_of, workers_of
from carpool_extender.explain.rehearsal import Rehearsal
from carpool_extender.explain.turns import Queue, queue_of, turn_of
from carpool_extender.framework.diagnosis import lines, with_measures, with_own, with_refusals
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.framework.selection import explain_gpus
from carpool_extender.informers import JobRow, JobSpecRow, JobStatusRow
from carpool_extender.queue.order import QueueOrder
from carpool_extender.workloads import ANNOTATION_POLICY, AS_SHIPPED, JobOptions, NotOurs, demand_of_row, pod_request_of

_WAIT_FOR_NO_PLACE = frozenset((JobState.SUSPENDED, JobState.UNPLACEABLE, JobState.BACKING_OFF))
Predictor = Callable[[GpuTrainingJob, list[str]], Awaitable[GpuTrainingJob]]


class _Spec(JobSpecRow, frozen=True, kw_only=True):
    template: dict[str, Any] = msgspec.field(default_factory=dict)


class _Status(JobStatusRow, frozen=True, kw_only=True):
    state: str = ""
    conditions: list[Condition] = msgspec.field(default_factory=list)
    placement: list[WorkerPlacement] = msgspec.field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is decided for the job any more."""
        return any(c.type in (CONDITION_COMPLETE, CONDITION_FAILED) and c.status == "True" for c in self.conditions)


class _Job(JobRow, frozen=True, kw_only=True):
    """A job with what kube-scheduler and people look at, too."""

    spec: _Spec = _Spec()
    status: _Status = _Status()


class NoSuchJobError(LookupError):
    """There is no job of that name; `str()` says so."""


class Answer(NamedTuple):
    """What is told."""

    lines: list[str]
    is_hopeless: bool = False
    """Whether the job could never run on this cluster."""


@dataclass(frozen=True)
class Asker:
    """Who asks."""

    clock: Clock
    choices: JobOptions = AS_SHIPPED
    """What the site allows jobs."""
    order: QueueOrder = QueueOrder.ALTERNATE
    """How the site sorts those that wait."""
    each_gpu: bool = False
    """Whether to tell of every GPU on a line of its own, where the same is to be said of many."""
    unchecked: Sequence[str] = ()
    """What could not be checked of the job itself, as sentences."""


@dataclass(frozen=True)
class Snapshot:
    """The cluster at one moment: what the extender knows of it, but its rests of GPUs that could not be prepared."""

    cluster: ClusterCache
    done: int = 0
    """Workers of the job in question that have done their work, and hold nothing in this cluster."""

    def succeeded(self, job_uid: JobUid, pod_uid: PodUid) -> int:
        """How many pods of the job in question have done their work."""
        return self.done


def snapshot(nodes: Sequence[GpuNode], rules: SchedulerConfig, clock: Clock, done: int = 0) -> Snapshot:
    """Take in GpuNodes.

    An agent counts as silent by its heartbeat and the asker's clock: other than the extender the asker sees it once.
    One that never sent any is silent since its GpuNode was made.
    """
    standing, now = GpuAvailability(clock), clock.now().timestamp()
    cluster = ClusterCache(rules.slots, standing)
    heard = [(epoch_seconds(n.status.heartbeat_time or n.metadata.creation_timestamp or "") or now, n) for n in nodes]
    for at, node in sorted(heard, key=lambda one: one[0]):
        standing.record_heartbeat(node.metadata.name, node.status.heartbeat_time, max(0.0, now - at))
    for node in nodes:
        cluster.apply(node)
    return Snapshot(cluster, done)


async def explained(api: KubeApi, name: str, namespace: str, rules: SchedulerConfig, asker: Asker) -> Answer:
    """Say how a job stands, where its workers are and why, and of every GPU what the decision would be without them.

    Of a job that has ended it says where its workers ran.

    Raises:
        NoSuchJobError: There is no such job.
        KubeError: The job or the GpuNodes could not be read.
    """
    try:
        job = await api.get(GPU_TRAINING_JOBS, name, _Job, namespace=namespace)
    except NotFound as error:
        if error.reason != "NotFound":  # the kind itself is not known there
            raise
        raise NoSuchJobError(f"no GpuTrainingJob {name} in namespace {namespace}") from error
    told = standing(job.status.state, job.status.conditions)
    if job.status.is_finished:
        return Answer([*told, *_ran(job)])
    nodes, odd = await gpu_nodes(api)
    own = {n.metadata.name: [r for r in n.spec.reservations if r.job_uid == job.metadata.uid] for n in nodes}
    demand, steps = demand_of_row(job), job.spec.training.steps
    places = [line for node in nodes for line in reserved(demand, node, own[node.metadata.name], steps)]
    try:
        pod_request = pod_request_of(job, _user(job.spec.template), asker.choices)
    except NotOurs as refusal:
        return Answer([*told, *places, str(refusal)])
    held = [r for found in own.values() for r in found]
    workers = await _workers(api, job, pod_request, held)
    more = unreserved(job.status.placement, workers, own, {r.pod_uid for r in held})
    workers, places = workers.but(more.pods), [*places, *more.lines]
    lacking = _lacking(pod_request, workers, held)
    without = lacking == 0 or not held
    if without:
        nodes = [as_if_gone(node, own[node.metadata.name]) for node in nodes]
    done = workers.done if without else workers.done.difference(r.pod_uid for r in held)
    seen = snapshot(nodes, rules, asker.clock, len(done))
    hosts = await hosts_of(api, job.spec.template, without=JobUid(job.metadata.uid) if without else None)
    rehearsal = Rehearsal(seen, pod_request, rules, hosts, job.spec.training.steps)
    if job.status.prediction is None:
        told.append("its status tells no prediction yet: the answer is that for a job of which nothing is known")
    own_gpus = frozenset(uuid for r in held for uuid in r.gpu_uuids) if without else frozenset()
    gpus = _gpus(seen.cluster, rehearsal, rules, asker, own_gpus)
    gpus = _or_none(gpus, without_gpus(nodes, hosts, odd, each=asker.each_gpu))
    if not places:
        turn = []
        if rehearsal.wanted and job.status.state not in _WAIT_FOR_NO_PLACE:
            turn = _turn(await queue_of(api, nodes), pod_request, seen.cluster, asker)
        places = [f"{namespace}/{name} has no place yet", *turn, *_waits(rehearsal, workers)]
    elif lacking:
        places += [_who_waits(rehearsal, workers), *rehearsal.rest()]
    elif held:
        places += rehearsal.anew([frozenset(r.gpu_uuids) for r in held if r.pod_uid not in workers.done])
    return Answer([*told, *places, *_chosen(pod_request, rules), *gpus, *odd.values()])


async def _workers(api: KubeApi, job: _Job, pod_request: PodRequest, held: Sequence[Reservation]) -> Workers:
    """Read how far the workers of a job are, where that is not plain already."""
    if (pod_request.workers == 1 and not job.status.placement) or len(held) == pod_request.workers:
        return Workers()
    return await workers_of(api, JobUid(job.metadata.uid), job.metadata.namespace, {r.pod_uid for r in held})


def _lacking(pod_request: PodRequest, workers: Workers, held: Sequence[Reservation]) -> int:
    """How many workers of a job need a place and have none."""
    return max(0, pod_request.workers - len(workers.done.union(r.pod_uid for r in held)))


def _waits(rehearsal: Rehearsal, workers: Workers) -> list[str]:
    """Say of a job without any place why it waits, or which places it has to choose from."""
    if rehearsal.wanted == 0:
        several = f"all of its {rehearsal.pod_request.workers} workers have done their work"
        done = "its worker has done its work" if rehearsal.pod_request.workers == 1 else several
        return [done, *rehearsal.unchecked]
    if (waits := rehearsal.gang()) is None:
        return [*rehearsal.unchecked, *(rehearsal.ranked() or rehearsal.changes())]
    fewer = [f"fewer, if some have done their work already ({workers.unread})"] if workers.unread else []
    return [waits, *fewer, *rehearsal.unchecked, *rehearsal.changes(of_all=True)]


def _who_waits(rehearsal: Rehearsal, workers: Workers) -> str:
    """Say which workers of a job have no place, where others have theirs."""
    lacking, all_ = rehearsal.wanted, rehearsal.pod_request.workers
    it, wait, have = ("it", "waits", "has") if lacking == 1 else ("they", "wait", "have")
    if workers.unread:
        why = f"{it} {wait}, or {have} done the work ({workers.unread})"
    elif len(workers.waiting) == lacking:
        why = f"{' and '.join(workers.waiting)} {wait}"
    else:
        why = f"not all of their pods are there yet{': ' if workers.waiting else ''}{', '.join(workers.waiting)}"
    return f"{lacking} of {all_} workers {have} no place: {why}"


def _user(template: dict[str, Any]) -> int | None:
    """Return the user that a job's workers run as, where the template says."""
    try:
        return container_uid(msgspec.convert(template.get("spec") or {}, PodSpec))
    except msgspec.ValidationError:
        return None  # `hosts_of` says what is wrong with it


def _ran(job: _Job) -> list[str]:
    """Say where the last workers of a job ran that has ended."""
    name = f"{job.metadata.namespace}/{job.metadata.name}"
    places = [f"{p.pod} ran on {p.node}: {p.reason or 'no reason was written'}" for p in job.status.placement]
    return [*(places or [f"{name} had no place when it ended"]), "it has ended, so nothing is decided for it any more"]


async def asked(
    api: KubeApi, job: GpuTrainingJob, rules: SchedulerConfig, predictor: Predictor, asker: Asker
) -> Answer:
    """Say where a job would go now, beside whom and how fast; nothing is created."""
    nodes, odd = await gpu_nodes(api)
    products = {device.product for node in nodes for device in node.status.devices}
    known = await predictor(job, sorted(products))
    prediction = known.status.prediction
    told = []
    if prediction is not None:
        said = prediction_message(prediction, known.spec.sharing.mode, known.spec.memory.limit)
        told = [f"prediction: {prediction.outcome} ({prediction.reason}) {said}"]
    try:
        row = msgspec.convert(msgspec.to_builtins(known), JobRow)
        pod_request = pod_request_of(row, _user(job.spec.template), asker.choices)
    except NotOurs as refusal:
        return Answer([*told, str(refusal), *asker.unchecked], is_hopeless=True)
    seen = snapshot(nodes, rules, asker.clock)
    hosts = await hosts_of(api, job.spec.template, unchecked=asker.unchecked)
    rehearsal = Rehearsal(seen, pod_request, rules, hosts, job.spec.training.steps)
    none = without_gpus(nodes, hosts, odd, each=asker.each_gpu)
    listed = _or_none(_gpus(seen.cluster, rehearsal, rules, asker), none)
    gpus = [*_chosen(pod_request, rules), *listed, *odd.values()]
    if (never := rehearsal.never()) is not None:
        # A node that cannot be read, or reports no GPUs yet, may have what is lacking.
        is_known = not odd and not none
        told.append(f"could never run {'here' if is_known else 'on the GPUs that are known'}: {never}")
        changes = rehearsal.changes(of_all=rehearsal.gang() is not None)
        return Answer([*told, *rehearsal.unchecked, *changes, *gpus], is_hopeless=is_known)
    spec = job.spec.template.get("spec")
    has_class = isinstance(spec, dict) and bool(spec.get("priorityClassName"))
    turn = _turn(await queue_of(api, nodes), pod_request, seen.cluster, asker, is_new=True, has_class=has_class)
    return Answer([*told, *turn, *rehearsal.outcome(), *gpus])


def _turn(
    queue: Queue,
    pod_request: PodRequest,
    cluster: ClusterCache,
    asker: Asker,
    *,
    is_new: bool = False,
    has_class: bool = False,
) -> list[str]:
    if not (is_new or queue.unread or pod_request.demand.job_uid in queue.priorities):
        return []  # none of its pods waits
    snapshot, choices, clock = cluster.snapshot(), asker.choices, asker.clock
    return turn_of(queue, pod_request, snapshot, asker.order, choices=choices, clock=clock, has_class=has_class)


def _chosen(pod_request: PodRequest, rules: SchedulerConfig) -> list[str]:
    """Say that a job goes by a policy of its own, where the asker's or the site's is another one."""
    if pod_request.policy in (None, rules.policy.name):
        return []
    return [f"by its annotation {ANNOTATION_POLICY} it goes by {pod_request.policy}, not by {rules.policy.name}"]


def _gpus(
    cluster: ClusterCache,
    rehearsal: Rehearsal,
    rules: SchedulerConfig,
    asker: Asker,
    own: frozenset[GpuUuid] = frozenset(),
) -> list[str]:
    found = explain_gpus(cluster.snapshot(), rehearsal.pod_request, sorted(cluster.nodes), rules)
    measures = {uuid: said for node in cluster.nodes.values() for uuid, said in differences(node).items()}
    answers = with_refusals(with_measures(found, measures), rehearsal.refused)
    return lines(with_own(answers, own), each=asker.each_gpu)


def _or_none(gpus: Sequence[str], without: Sequence[str]) -> list[str]:
    """List what is said of GPUs, and of the nodes without any."""
    return [f"  {line}" for line in [*gpus, *without] or ["no node reports GPUs; is the node agent running?"]]
