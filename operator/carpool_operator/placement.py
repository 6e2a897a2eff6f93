"""Placement and measurements of a job's pods, read from GpuNodes. Pure."""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from statistics import fmean

import msgspec
from carpool_core.clock import parse_rfc3339, rfc3339
from carpool_core.durations import measured_step_time, remaining_s
from carpool_core.kube.pods import Pod
from carpool_core.moves import SETTLED_S
from carpool_core.products import hardware_name
from carpool_core.resources.job import GpuTrainingJob, Neighbour, Observed, WorkerPlacement
from carpool_core.resources.node import MAX_REASON_LENGTH, GpuNode, Reservation, Tenant, describe_later_tenants
from carpool_core.resources.prediction import Interval
from carpool_core.values import JobUid, NodeName, PodUid

from carpool_operator.pods import worker_of

_LONGEST_S = 10 * 365 * 86_400.0
"""A later end is not reported."""


def _neighbours(node: GpuNode, own: Reservation) -> list[Neighbour]:
    """Return the jobs that share a GPU with a reservation, sorted."""
    found = {
        (other.pod_namespace, other.job_name, uuid)
        for other in node.spec.reservations
        if other.job_uid != own.job_uid
        for uuid in other.gpu_uuids
        if uuid in own.gpu_uuids
    }
    return [Neighbour(namespace=namespace, job=job, gpu_uuid=uuid) for namespace, job, uuid in sorted(found)]


def placement_of(pod: Pod, worker: int, node: GpuNode, job_uid: JobUid) -> WorkerPlacement | None:
    """Return a bound pod's placement by its reservation; None before it is reserved and after it is released."""
    uid = PodUid(pod.metadata.uid)
    found = next((r for r in node.spec.reservations if r.pod_uid == uid and r.job_uid == job_uid), None)
    if found is None:
        return None
    return WorkerPlacement(
        worker=worker,
        pod=pod.metadata.name,
        pod_uid=uid,
        node=NodeName(node.metadata.name),
        gpu_uuids=found.gpu_uuids,
        product=next((d.product for d in node.status.devices if d.uuid in found.gpu_uuids), ""),
        mode=found.mode,
        memory_limit_mib=found.memory_limit_mib,
        thread_percentage=found.thread_percentage,
        mig_profile=found.mig_profile,
        provisional=found.tenant.provisional,
        measured_mib=found.tenant.measured_mib,
        expected_slowdown=found.expected_slowdown,
        neighbours=_neighbours(node, found),
        reason=f"{found.reason}{describe_later_tenants(node, found)}"[:MAX_REASON_LENGTH] if found.reason else "",
    )


def pods_without_reservation(job_uid: JobUid, pods: Iterable[Pod], nodes: Sequence[GpuNode]) -> frozenset[str]:
    """Return the UIDs of bound, unfinished pods for which no GpuNode holds a reservation."""
    held = {r.pod_uid for node in nodes for r in node.spec.reservations if r.job_uid == job_uid}
    bound = [PodUid(pod.metadata.uid) for pod in pods if pod.spec.node_name and not pod.is_finished]
    return frozenset(uid for uid in bound if uid not in held)


def placements(job: GpuTrainingJob, pods: Iterable[Pod], nodes: Sequence[GpuNode]) -> list[WorkerPlacement]:
    """Return the placement of each bound pod of an attempt, by worker.

    A placement that the status holds stays after its reservation was released, which happens once the pod finishes.
    """
    known = {place.pod_uid: place for place in job.status.placement}
    by_name = {node.metadata.name: node for node in nodes}
    found: dict[int, WorkerPlacement] = {}
    for pod in pods:
        worker, node = worker_of(pod), by_name.get(pod.spec.node_name)
        if worker is None:
            continue
        fresh = None if node is None else placement_of(pod, worker, node, JobUid(job.metadata.uid))
        before = known.get(PodUid(pod.metadata.uid))
        place = fresh or before
        if place is not None and place.measured_mib is None and before is not None:
            # Others may have joined the worker while it counted with its measured peak; see `attribute_oom`.
            place = msgspec.structs.replace(place, measured_mib=before.measured_mib)
        if place is not None:
            found[worker] = place
    return [found[worker] for worker in sorted(found)]


def describe(place: WorkerPlacement) -> str:
    """Describe a placement: `worker 0: GPU-1, 9,300 MiB: least-slowdown: MPS on GPU 0 of n1 beside …`.

    The scheduler's reason holds most facts; only those that it leaves out precede it.
    """
    gpus = "+".join(place.gpu_uuids)
    slowdown = f"expected slowdown {place.expected_slowdown:.2f}"
    parts = [
        gpus if _mentions(place.reason, place.node) else f"{place.node}/{gpus}",
        "" if _mentions(place.reason, place.mode.value) else place.mode.value,
        place.mig_profile or (f"{place.thread_percentage}% of threads" if place.thread_percentage else ""),
        "" if place.memory_limit_mib is None else f"{place.memory_limit_mib:,} MiB",
        "" if _mentions(place.reason, slowdown) else slowdown,
    ]
    text = f"worker {place.worker}: " + ", ".join(part for part in parts if part)
    return f"{text}: {place.reason}" if place.reason else text


def _mentions(text: str, words: str) -> bool:
    """Return whether a text contains these words, not as part of longer ones."""
    return re.search(rf"(?<![\w.-]){re.escape(words)}(?![\w-]|\.\w)", text) is not None


def _mean(values: Iterable[float | None], default: float | None, digits: int) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), digits) if known else default


def _solo_step_time(job: GpuTrainingJob, places: Sequence[WorkerPlacement]) -> Interval | None:
    """Return the predicted step time alone on the slowest product of the workers, in seconds; None if unknown."""
    prediction = job.status.prediction
    if prediction is None or not places:
        return None
    names = {hardware_name(place.product) for place in places}
    known = [p.step_time_seconds for p in prediction.products if p.product in names]
    return max(known, key=lambda one: one.median, default=None)


def _has_whole_gpus(tenants: Iterable[Tenant], places: Iterable[WorkerPlacement], now: datetime) -> bool:
    """Return whether the steps that the agents measured last were of a job without co-tenants on any of its GPUs.

    A worker waits for all others. So an agent whose own GPU is not shared cannot know that.
    """
    if any(place.neighbours for place in places):
        return False
    return all(
        one.settled
        and one.step_time_seconds
        and one.tenants_since
        and (now - parse_rfc3339(one.tenants_since)).total_seconds() >= SETTLED_S
        for one in tenants
    )


def observed(
    job: GpuTrainingJob,
    pods: Iterable[Pod],
    nodes: Sequence[GpuNode],
    places: Sequence[WorkerPlacement],
    now: datetime,
    earlier_solo_step_s: float | None = None,
) -> Observed | None:
    """Summarise the agents' measurements of the pods; missing values keep the last one, and the peak never falls.

    `earlier_solo_step_s`, the step time alone of an earlier run, counts until this run's own is measured.
    """
    uids = {PodUid(pod.metadata.uid) for pod in pods}
    tenants: list[Tenant] = [t for node in nodes for t in node.status.tenants if t.pod_uid in uids]
    old = job.status.observed
    if not tenants:
        return old
    before = old or Observed()
    step_time_s = _mean((t.step_time_seconds for t in tenants), before.step_time_seconds, 6)
    solo = _solo_step_time(job, places)
    ratio = before.step_time_ratio
    if step_time_s is not None and solo is not None and solo.median:
        ratio = round(step_time_s / solo.median, 3)
    deviations = [t.step_time_deviation_seconds for t in tenants if t.step_time_deviation_seconds is not None]
    if (gpus := job.spec.workers * job.spec.gpus_per_worker) == 1:
        solo_step_s = next((t.solo_step_time_seconds for t in tenants if t.solo_step_time_seconds), None)
    else:
        solo_step_s = step_time_s if len(tenants) == gpus and _has_whole_gpus(tenants, places, now) else None
    slowest = min((t for t in tenants if t.steps is not None), key=lambda t: t.steps or 0, default=None)
    samples = {t.pod_uid: t.samples_per_second for t in tenants if t.samples_per_second is not None}
    found = Observed(
        peak_memory_mib=max(before.peak_memory_mib, *(max(t.memory_mib, t.peak_memory_mib) for t in tenants)),
        gpu_util_percent=_mean((t.gpu_util_percent for t in tenants), before.gpu_util_percent, 1),
        sm_active_ratio=_mean((t.sm_active_ratio for t in tenants), before.sm_active_ratio, 3),
        step_time_seconds=step_time_s,
        step_time_ratio=ratio,
        solo_step_time_seconds=solo_step_s or before.solo_step_time_seconds or earlier_solo_step_s,
        solo_source="Run" if solo_step_s else before.solo_source or ("EarlierRun" if earlier_solo_step_s else None),
        steps=before.steps if slowest is None else slowest.steps,
        steps_at=before.steps_at if slowest is None else slowest.steps_at,
        samples_per_second=round(sum(samples.values()), 1) if samples else before.samples_per_second,
        data_wait_ratio=_mean((t.data_wait_ratio for t in tenants), before.data_wait_ratio, 3),
        checkpoint_ratio=_mean((t.checkpoint_ratio for t in tenants), before.checkpoint_ratio, 3),
        copy_ratio=_mean((t.copy_ratio for t in tenants), before.copy_ratio, 3),
    )
    slowdown = None
    if step_time_s is not None and found.solo_step_time_seconds:
        slowdown = round(step_time_s / found.solo_step_time_seconds, 3)
    # An agent that has just started knows no deviation: then the last interval says how wide it is.
    known = solo if deviations else before.step_time_interval or solo
    interval = measured_step_time(known, found.steps, step_time_s, max(deviations, default=None))
    interval = interval or before.step_time_interval
    end, latest = _ends(found, interval, job.spec.training.steps)
    return msgspec.structs.replace(
        found, slowdown=slowdown, step_time_interval=interval, expected_end=end, latest_end=latest
    )


def _ends(found: Observed, step_time: Interval | None, steps: int | None) -> tuple[str | None, str | None]:
    """Return when a job has done its steps at the measured step time and its upper end, RFC 3339; None if unknown."""
    if step_time is None or steps is None or found.steps is None or found.steps_at is None:
        return None, None
    left, at = remaining_s(step_time, steps - found.steps, found.checkpoint_ratio), parse_rfc3339(found.steps_at)
    end, latest = (rfc3339(at + timedelta(seconds=s)) if s <= _LONGEST_S else None for s in (left.median, left.upper))
    return end, latest


def without_progress(found: Observed | None) -> Observed | None:
    """Return the measurements without those that describe the steps of one attempt."""
    if found is None:
        return None
    return Observed(
        peak_memory_mib=found.peak_memory_mib,
        gpu_util_percent=found.gpu_util_percent,
        sm_active_ratio=found.sm_active_ratio,
    )
