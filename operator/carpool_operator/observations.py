"""Observations: measured memory and activity of an attempt, to compare with its prediction. Pure.

A running attempt is observed once its peak memory is old enough to count, and again when the peak has not changed for
long. An ended attempt is observed for good. Of a worker's GPUs, the one with the largest peak counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from carpool_core.clock import parse_rfc3339
from carpool_core.keys import SIMULATED_PREFIX
from carpool_core.kube.pods import Pod
from carpool_core.products import hardware_name
from carpool_core.resources.job import Attempt, GpuTrainingJob, JobStatus, WorkerPlacement
from carpool_core.resources.node import LOADING_S, STEADY_S, Device, GpuNode, Tenant
from carpool_core.values import GpuUuid, SharingMode
from carpool_predictor.calibration.colocation import (
    MAX_STEP_S,
    PAIR,
    MeasuredSteps,
    Origin,
    SoloRecord,
    pair_record,
    solo_family,
    solo_name,
)
from carpool_predictor.calibration.document import RunMeasurement
from carpool_predictor.calibration.run_history import memory_step
from carpool_predictor.models.slowdown import TenantActivity, is_saturated, pair_slowdown, solo_activity

from carpool_operator import attempts
from carpool_operator.outcomes import GPU_OUT_OF_MEMORY, Outcome
from carpool_operator.pods import started_at
from carpool_operator.snapshot import Snapshot

_BELIEVED_SHARE = 0.5
"""Least share of the available memory that an agent must have measured to believe that a worker ran out of it. Larger
single allocations are rare, and a message alone proves nothing."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Measurements of one attempt."""

    sample: str
    """Unique name of the attempt, so that it counts once."""
    product: str
    simulated: bool
    counted_mib: int
    """Memory bound that admission counted with, in MiB; 0 if the bound was not trusted."""
    measured: RunMeasurement
    mode: SharingMode = SharingMode.EXCLUSIVE
    tenants: tuple[TenantActivity, ...] = ()
    """Activity of all tenants of the GPU, the job's own first; empty unless all of them were measured."""

    def with_activity(self) -> RunMeasurement:
        """Return the measurements with the activity that the job would have on a GPU of its own."""
        if not self.tenants:
            return self.measured
        own, at_least = solo_activity(self.mode, self.tenants)[0], is_saturated(self.mode, self.tenants)
        return msgspec.structs.replace(self.measured, util=own.util, sm_active=own.sm, at_least=at_least)

    @property
    def key(self) -> str:
        """Identify the observation; an attempt has another one after it ended, or after its peak grew."""
        if self.measured.ended:
            return f"{self.sample} ended"
        peak_mib = self.measured.peak_mib
        return f"{self.sample} " + (
            f"steady {peak_mib:.0f}" if self.measured.steady else f"seen {memory_step(peak_mib)}"
        )


def sample_of(job: GpuTrainingJob, attempt: Attempt) -> str:
    """Return a name of an attempt that is unique in the cluster."""
    return f"{job.metadata.uid}/{attempt.number}"


def peak_of(pods: Sequence[Pod], nodes: Sequence[GpuNode]) -> int:
    """Return the largest memory that agents measured for these pods on one GPU, in MiB; 0 if none was measured."""
    uids = {pod.metadata.uid for pod in pods}
    return max(
        (max(t.memory_mib, t.peak_memory_mib) for n in nodes for t in n.status.tenants if t.pod_uid in uids), default=0
    )


def observe(
    snapshot: Snapshot, status: JobStatus, attempt: Attempt, pods: Sequence[Pod]
) -> tuple[Observation | None, float | None]:
    """Return an attempt's observation, None without one, and the seconds after which there may be another.

    `status` has the placement of the attempt, the latest one, and `pods` are its pods if it is active.
    """
    counted_mib = _counted_mib(snapshot, status)
    if counted_mib is None:
        return None, None
    place = status.placement[0]
    if attempt.ended_at is not None:
        measured, again_s = _measured_at_end(snapshot, status, attempt), None
    else:
        measured, again_s = _measured_while_running(snapshot, place, attempt, pods)
    if measured is None:
        return None, again_s
    sample = sample_of(snapshot.job, attempt)
    observation = Observation(
        sample=sample,
        product=hardware_name(place.product),
        simulated=place.product.startswith(SIMULATED_PREFIX),
        counted_mib=counted_mib,
        measured=msgspec.structs.replace(measured, sample=sample),
        mode=place.mode,
        tenants=() if attempt.ended_at is not None else _tenants(snapshot, place),
    )
    return observation, again_s


def _counted_mib(snapshot: Snapshot, status: JobStatus) -> int | None:
    """Return the prediction's upper bound in MiB, 0 if it was not trusted, None if no comparison is possible."""
    prediction, spec, places = status.prediction, snapshot.job.spec, status.placement
    if prediction is None or prediction.outcome != "Predicted":
        return None
    if len(places) != spec.workers or len({place.product for place in places}) != 1:
        return None
    product = hardware_name(places[0].product)
    found = next((p.memory for p in prediction.products if p.product == product), None)
    if found is None:
        return None
    return found.upper_mib if found.trusted else 0


def _devices(snapshot: Snapshot, place: WorkerPlacement) -> list[tuple[GpuNode, Device]]:
    """Return a worker's GPUs, each with its node."""
    return [(node, gpu) for node in snapshot.nodes for gpu in node.status.devices if gpu.uuid in place.gpu_uuids]


def _device(snapshot: Snapshot, place: WorkerPlacement) -> tuple[GpuNode, Device] | None:
    return next(iter(_devices(snapshot, place)), None)


def _measured_while_running(
    snapshot: Snapshot, place: WorkerPlacement, attempt: Attempt, pods: Sequence[Pod]
) -> tuple[RunMeasurement | None, float | None]:
    started, found = started_at(pods), _device(snapshot, place)
    if started is None or found is None or not attempt.peak_memory_mib:
        return None, None
    age_s = (snapshot.now - parse_rfc3339(started)).total_seconds()
    stable_s = min(age_s, snapshot.calibration.peak_stable_s)
    again_s = next((wanted_s - stable_s for wanted_s in (LOADING_S, STEADY_S) if stable_s < wanted_s), None)
    if stable_s < LOADING_S:
        return None, again_s
    measured = RunMeasurement(
        peak_mib=attempt.peak_memory_mib,
        capacity_mib=found[1].memory_mib,
        ended=False,
        steady=stable_s >= STEADY_S,
    )
    return measured, again_s


def _measured_at_end(snapshot: Snapshot, status: JobStatus, attempt: Attempt) -> RunMeasurement | None:
    found = _device(snapshot, status.placement[0])
    capacity_mib = attempt.peak_memory_mib if found is None else found[1].memory_mib
    if attempt.outcome == attempts.COMPLETE and attempt.peak_memory_mib:
        return RunMeasurement(peak_mib=attempt.peak_memory_mib, capacity_mib=capacity_mib)
    is_believed = attempt.outcome == GPU_OUT_OF_MEMORY and not attempt.doubted
    available_mib = _available_mib(snapshot, status.placement) if is_believed else None
    if available_mib is None or attempt.ended_at is None or attempt.peak_memory_mib < _BELIEVED_SHARE * available_mib:
        return None
    return RunMeasurement(
        peak_mib=available_mib,
        capacity_mib=max(capacity_mib, available_mib),
        out_of_memory=True,
        namespace=snapshot.job.metadata.namespace,
        ended_at=int(parse_rfc3339(attempt.ended_at).timestamp()),
    )


def doubt_oom(snapshot: Snapshot, places: Sequence[WorkerPlacement], attempt: Attempt, outcome: Outcome) -> str | None:
    """Return why nothing is learned from an attempt that ran out of GPU memory; None if log and measurements agree."""
    if outcome.is_unreported:
        # Some frameworks reserve nearly all memory in advance, so a peak at the limit alone proves nothing.
        return "only its measured memory shows that, so nothing is learned"
    available_mib, peak_mib = _available_mib(snapshot, places), attempt.peak_memory_mib
    if available_mib is None or peak_mib >= _BELIEVED_SHARE * available_mib:
        return None
    measured = f"at most {peak_mib:,} MiB" if peak_mib else "none"
    return f"the node's agent measured {measured} of the {available_mib:,} MiB that it could use, so nothing is learned"


def _available_mib(snapshot: Snapshot, places: Sequence[WorkerPlacement]) -> int | None:
    """Return the memory of the worker that had least: its limit, or what its co-tenants left; None if unknown."""
    amounts = []
    for place in places:
        if place.memory_limit_mib is not None:
            amounts.append(place.memory_limit_mib)
        for node, device in _devices(snapshot, place) if place.mode is not SharingMode.MIG else ():
            others = [t.memory_mib for t in _tenants_on(node, device.uuid) if t.pod_uid != place.pod_uid]
            amounts.append(device.memory_mib - device.reserved_mib - sum(others))
    return max(1, min(amounts)) if amounts else None


def measured_steps(snapshot: Snapshot, status: JobStatus, attempt: Attempt) -> MeasuredSteps | None:
    """Return what the steps of a running attempt show: its step time alone, and its slowdown beside one co-tenant.

    A step time alone counts for whole GPUs, so that on a MIG instance is left out.
    Pairs are of jobs of a single GPU: any GPU of another job may be the one that slows it. The slowdown counts once
    both tenants were measured for `LOADING_S`.
    """
    job, observed, places = snapshot.job, status.observed, status.placement
    workers, gpus = job.spec.workers, job.spec.gpus_per_worker
    if observed is None or len(places) != workers or len({one.product for one in places}) != 1:
        return None
    place = places[0]
    found = _device(snapshot, place)
    held = [] if found is None else [r for r in found[0].spec.reservations if found[1].uuid in r.gpu_uuids]
    own, other = (next((r for r in held if (r.pod_uid == place.pod_uid) is is_own), None) for is_own in (True, False))
    if own is None:
        return None
    is_simulated = place.product.startswith(SIMULATED_PREFIX)
    origin = Origin(job.metadata.namespace, own.tenancy_domain, hardware_name(place.product), is_simulated)
    solo, pair = None, None
    is_whole = all(one.mode is not SharingMode.MIG for one in places)  # a MIG instance is slower than its product
    if is_whole and observed.solo_step_time_seconds and observed.solo_source == "Run":
        family = "" if job.spec.model is None else job.spec.model.family
        solo = SoloRecord(
            solo_name(snapshot.digest, workers, gpus),
            *origin,
            observed.solo_step_time_seconds,
            family=solo_family(family, workers, gpus),
            predicted_s=_modelled_step_s(status, origin.product),
        )
    if (
        workers * gpus == 1
        and observed.slowdown
        and other is not None
        and len(_tenants(snapshot, place)) == len(held) == PAIR
    ):
        sample = f"{sample_of(job, attempt)} {other.pod_uid}"
        predicted = pair_slowdown(place.mode, own.tenant, other.tenant)
        pair = pair_record(sample, origin, place.mode, own.tenant, other.tenant, observed.slowdown, predicted)
    return MeasuredSteps(pair=pair, solo=solo) if pair or solo else None


def _modelled_step_s(status: JobStatus, product: str) -> float:
    """Return the step time alone by the shipped model, in seconds; 0 if unknown or longer than `MAX_STEP_S`."""
    products = [] if status.prediction is None else status.prediction.products
    found = next((p.step_time_seconds.median / p.step_time_factor for p in products if p.product == product), 0.0)
    return found if found <= MAX_STEP_S else 0.0


def _tenants_on(node: GpuNode, gpu: GpuUuid) -> list[Tenant]:
    return [tenant for tenant in node.status.tenants if tenant.gpu_uuid == gpu]


def _tenants(snapshot: Snapshot, place: WorkerPlacement) -> tuple[TenantActivity, ...]:
    """Return the activity of all tenants of a worker's GPU; empty if one of them is too young or was not measured."""
    found = _device(snapshot, place)
    if found is None:
        return ()
    node, device = found
    held = {r.pod_uid: r for r in node.spec.reservations if device.uuid in r.gpu_uuids}
    tenants = {tenant.pod_uid: tenant for tenant in _tenants_on(node, device.uuid)}
    activities = []
    for uid in sorted(held, key=lambda one: one != place.pod_uid):
        tenant, reserved_at = tenants.get(uid), held[uid].reserved_at
        if tenant is None or tenant.gpu_util_percent is None or tenant.sm_active_ratio is None or not reserved_at:
            return ()
        if (snapshot.now - parse_rfc3339(reserved_at)).total_seconds() < LOADING_S:
            return ()
        # Agents measure no DRAM activity; the predicted one is used.
        dram = held[uid].tenant.dram_active_ratio
        activities.append(TenantActivity(tenant.gpu_util_percent / 100, tenant.sm_active_ratio, dram))
    return tuple(activities) if place.pod_uid in held else ()
