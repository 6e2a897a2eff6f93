"""Whose turn it is: how far in the queue a job stands, of all that wait for a place."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from carpool_core.clock import Clock
from carpool_core.durations import ASSUMED_DURATION_S, format_duration
from carpool_core.keys import SCHEDULER_NAME
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS, KubeApi, ResourceKind, Selector
from carpool_core.kube.errors import Forbidden, KubeError
from carpool_core.kube.pods import Pod, job_owner_reference
from carpool_core.resources.node import GpuNode
from carpool_core.values import JobUid

from carpool_extender.cache.gpu_table import Snapshot
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.informers import JobRow
from carpool_extender.queue.order import (
    QueueEnd,
    QueueKey,
    QueueOrder,
    created_s,
    duration_bucket_in,
    duration_in,
    queue_order,
)
from carpool_extender.workloads import JobOptions, NotOurs, pod_request_of

T = TypeVar("T")

_PENDING = Selector(fields=f"spec.schedulerName={SCHEDULER_NAME},status.phase=Pending")
_UNTOLD = "not told: how many jobs come before it"
_LAST = 1 << 62
"""The number of a ticket behind all others."""


@dataclass(frozen=True, slots=True)
class Queue:
    """The jobs that wait."""

    jobs: Sequence[JobRow] = ()
    """In the order in which they came."""
    priorities: Mapping[JobUid, int] = field(default_factory=dict)
    """Of their pods, by job."""
    unread: str = ""
    """Why they are not known; empty where they are."""


async def queue_of(api: KubeApi, nodes: Sequence[GpuNode]) -> Queue:
    """Read which jobs have pods that wait for a place.

    Args:
        api: The Kubernetes API, with the asker's rights.
        nodes: All GpuNodes: a pod that has a reservation does not wait any more.
    """
    reserved = {r.pod_uid for node in nodes for r in node.spec.reservations}
    what, priorities = "pods", dict[JobUid, int]()
    try:
        for pod in await _readable(api, PODS, Pod, _PENDING):
            owner, is_going = job_owner_reference(pod.metadata), bool(pod.metadata.deletion_timestamp)
            if owner is not None and not (pod.spec.node_name or is_going or pod.metadata.uid in reserved):
                uid = JobUid(owner.uid)
                priorities[uid] = max(priorities.get(uid, pod.spec.priority), pod.spec.priority)
        what = "jobs"
        known = await _readable(api, GPU_TRAINING_JOBS, JobRow, Selector())
    except Forbidden:
        return Queue(unread=f"you may not list {what} of all namespaces")
    except KubeError as error:
        return Queue(unread=f"{what} of all namespaces cannot be listed: {error}")
    jobs = [job for job in known if job.metadata.uid in priorities]
    jobs.sort(key=lambda job: (job.metadata.creation_timestamp or "", job.metadata.namespace, job.metadata.name))
    return Queue(jobs, priorities)


async def _readable(api: KubeApi, kind: ResourceKind, type_: type[T], selector: Selector) -> list[T]:
    """Read all objects of a kind but those that make no sense, for which the extender decides nothing either."""
    found = []
    for raw in await list_all(api, kind, msgspec.Raw, selector):
        with suppress(msgspec.ValidationError):
            found.append(msgspec.json.decode(raw, type=type_))
    return found


def turn_of(
    queue: Queue,
    pod_request: PodRequest,
    snapshot: Snapshot,
    order: QueueOrder,
    *,
    choices: JobOptions,
    clock: Clock,
    has_class: bool = False,
) -> list[str]:
    """Say which place a job has in the queue, or would have; nothing where no other waits.

    Who came in the same second stands there in the order in which kube-scheduler asked about them, and from which end
    of a batch the next one is taken the extender alone remembers. So it may be any of several places.

    Args:
        queue: Those that wait, the job itself among them or not.
        pod_request: What each worker of the job asks for.
        snapshot: The cluster, on whose GPUs lengths depend.
        order: How the site sorts its queue.
        choices: What the site allows jobs.
        clock: Tells when a job came that is not there yet.
        has_class: Whether its template names a PriorityClass.
    """
    if queue.unread:
        return [f"{_UNTOLD} ({queue.unread})"]
    mine, now_s = pod_request.demand.job_uid, clock.now().timestamp()
    others = []
    for number, job in enumerate(queue.jobs):
        try:
            other = pod_request_of(job, None, choices)
        except NotOurs:
            continue  # refused whenever it is asked about
        if other.demand.job_uid != mine:
            others.append(_ticket(other, snapshot, order, queue.priorities[other.demand.job_uid], number, now_s))
    if not others:
        return []
    priority = queue.priorities.get(mine, 0)
    if mine not in queue.priorities and (has_class or any(other.urgency for other in others)):
        return [f"{_UNTOLD} (its pods are not there, which tell its priority)"]
    places = set[int]()
    for number in (-1, _LAST):
        own = _ticket(pod_request, snapshot, order, priority, number, now_s)
        places |= {queue_order([*others, own], order, end).index(own) + 1 for end in QueueEnd}
    first, last = min(places), max(places)
    place = _ordinal(first) if first == last else f"{_ordinal(first)} to {_ordinal(last)}"
    counts = "" if order is QueueOrder.ARRIVAL else f", where it counts as {_length(pod_request, snapshot)}"
    rest = "; those before it are served first where there is a place for them, too" if last > 1 else ""
    return [f"its turn: {place} of {len(others) + 1} jobs that wait, by the order {order}{counts}{rest}"]


def _ticket(
    pod_request: PodRequest, snapshot: Snapshot, order: QueueOrder, priority: int, number: int, now_s: float
) -> QueueKey:
    return QueueKey(-priority, created_s(pod_request, now_s), duration_bucket_in(pod_request, snapshot, order), number)


def _length(pod_request: PodRequest, snapshot: Snapshot) -> str:
    if (seconds := duration_in(pod_request, snapshot)) is not None:
        return f"{format_duration(seconds)} long"
    unknown = (
        "it says no spec.training.steps" if pod_request.steps is None else "the time of its steps is not predicted"
    )
    return f"{format_duration(ASSUMED_DURATION_S)} long ({unknown})"


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{suffix}"


_EVERYTHING = Selector()


async def list_all(api: KubeApi, kind: ResourceKind, type_: type[T], selector: Selector = _EVERYTHING) -> list[T]:
    """Read all selected objects of a kind, page by page.

    Raises:
        KubeError: They could not be read.
    """
    found, token = [], ""
    while True:
        page = await api.list_page(kind, selector, continue_token=token)
        found += [msgspec.json.decode(item, type=type_) for item in page.items]
        token = page.continue_token
        if not token:
            return found
