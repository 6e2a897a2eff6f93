"""The measured memory peak of a running tenant, and when it replaces the reserved bound. Pure, but for the clock."""

import math
from collections.abc import Container, Mapping
from typing import NamedTuple

import msgspec
from carpool_core.clock import Clock
from carpool_core.durations import MEASURED_STEPS
from carpool_core.resources.node import LOADING_S, STEADY_S, GpuNode, GpuNodeSpec, Reservation, Tenant
from carpool_core.values import GpuUuid, PodUid
from carpool_predictor.calibration.run_history import OOM_FACTOR, RUN_TOLERANCE

from carpool_extender.cache.gpu_table import peak_mib

STABLE_FACTOR = 1.01
"""A peak that has risen by less than this factor is stable; agents do not report smaller changes."""
LEAST_MARGIN = 1 + RUN_TOLERANCE
"""Smallest margin: the difference of two runs of a job that count as equal."""
LEAST_BUSY_PERCENT = 1.0
"""GPU utilization below which a tenant does not work: it loads data or waits, and allocates its memory later."""


class StablePeak(NamedTuple):
    """Stable peaks of a pod."""

    peaks: tuple[int, ...]
    """Peaks on each of a pod's GPUs, in MiB."""
    margin: float
    """Factor from these peaks to the memory that counts; larger peaks are not covered."""


class _Observation(NamedTuple):
    """Observations of a tenant."""

    peaks: tuple[int, ...]
    """Peaks on each of its GPUs at their last change, in MiB."""
    stable_s: float
    """Its working time since then, in seconds."""
    at_s: float
    """Time of this observation, in monotonic seconds."""
    works: bool
    """Whether it worked then."""


def margins(steady_s: float = STEADY_S) -> tuple[tuple[float, float], ...]:
    """Return pairs of a stable working time, in seconds, and the margin with which a peak counts from then on.

    An early peak may still grow, so that its margin is the factor after a death of memory.

    Args:
        steady_s: Time after which a peak counts as the job's.
    """
    return (LOADING_S, OOM_FACTOR), (steady_s, LEAST_MARGIN)


def use_measured_peak(
    spec: GpuNodeSpec, tenants: Mapping[tuple[PodUid, GpuUuid], Tenant], pods: Mapping[PodUid, StablePeak]
) -> GpuNodeSpec:
    """Let reservations count with the measured peaks of their pods, times a margin.

    A reservation never counts with more than before, with one exception: a pod that exceeds its measured peak counts
    with its full promise for good. That is written, too, because a new agent has no earlier peaks.

    Args:
        spec: Spec of a node.
        tenants: Measurements there, by pod and GPU.
        pods: Pods with stable peaks. A pod whose peak has risen since then stays as before.

    Returns:
        The new spec; the same object if nothing changes.
    """
    after = [_with_measured_peak(one, tenants, pods.get(one.pod_uid)) for one in spec.reservations]
    if all(new is old for new, old in zip(after, spec.reservations, strict=True)):
        return spec
    return msgspec.structs.replace(spec, reservations=after)


def _with_measured_peak(
    one: Reservation, tenants: Mapping[tuple[PodUid, GpuUuid], Tenant], stable: StablePeak | None
) -> Reservation:
    counted_mib = one.tenant.counted_mib(0)
    taken_mib = max(peak_mib(tenants.get((one.pod_uid, gpu))) for gpu in one.gpu_uuids)
    if one.tenant.provisional and counted_mib is not None and taken_mib > counted_mib:
        tenant = msgspec.structs.replace(one.tenant, provisional=False, measured_mib=None)
        return msgspec.structs.replace(one, tenant=tenant)
    if stable is None or not _is_stable(peaks_of(one, tenants), stable.peaks):
        return one
    mib = _measured_bound_mib(one, tenants, stable.margin)
    if mib is None:
        return one
    return msgspec.structs.replace(one, tenant=msgspec.structs.replace(one.tenant, measured_mib=mib))


def _measured_bound_mib(one: Reservation, tenants: Mapping[tuple[PodUid, GpuUuid], Tenant], by: float) -> int | None:
    peaks = peaks_of(one, tenants) if one.tenant.provisional else None
    if peaks is None:
        return None
    proven, counted = math.ceil(max(peaks) * by), one.tenant.counted_mib(0)
    return proven if counted is None or proven < counted else None


def peaks_of(one: Reservation, tenants: Mapping[tuple[PodUid, GpuUuid], Tenant]) -> tuple[int, ...] | None:
    """Return what a pod was measured to take of each of its GPUs, in MiB; None if one of them is unknown."""
    peaks = tuple(peak_mib(tenants.get((one.pod_uid, gpu))) for gpu in one.gpu_uuids)
    return peaks if all(peaks) else None


def _is_stable(now: tuple[int, ...] | None, was: tuple[int, ...]) -> bool:
    """Whether the peaks on all of a pod's GPUs are stable."""
    return (
        now is not None
        and len(now) == len(was)
        and all(peak <= STABLE_FACTOR * of for peak, of in zip(now, was, strict=True))
    )


class PeakTracker:
    """Remembers since when the peaks of working tenants are stable.

    Time counts from the first observation by this process. A restart loses only this time, because results are written.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._observations: dict[str, dict[PodUid, _Observation]] = {}

    def observe(self, node: GpuNode) -> dict[PodUid, StablePeak]:
        """Add an observation of a node; return the pods whose peaks have been stable for long enough."""
        name, now_s = node.metadata.name, self._clock.monotonic()
        tenants = measured_tenants(node)
        waiting = [one for one in node.spec.reservations if _measured_bound_mib(one, tenants, LEAST_MARGIN) is not None]
        if not waiting:
            self.forget(name)
            return {}
        known = self._observations.get(name, {})
        observed = {one.pod_uid: _observe(one, tenants, known.get(one.pod_uid), now_s) for one in waiting}
        self._observations[name] = observed
        return {
            pod: StablePeak(found.peaks, by)
            for pod, found in observed.items()
            for after_s, by in margins()
            if found.stable_s >= after_s
        }

    def forget(self, name: str) -> None:
        """Forget a node."""
        self._observations.pop(name, None)

    def keep(self, names: Container[str]) -> None:
        """Forget all nodes but these."""
        self._observations = {name: observed for name, observed in self._observations.items() if name in names}


def _observe(
    one: Reservation, tenants: Mapping[tuple[PodUid, GpuUuid], Tenant], before: _Observation | None, now_s: float
) -> _Observation:
    """Return the state of a tenant that is measured on all of its GPUs; time counts only while it works."""
    peaks = peaks_of(one, tenants) or ()
    is_stable = before is not None and _is_stable(peaks, before.peaks)
    works = all(_works(tenants[one.pod_uid, gpu]) for gpu in one.gpu_uuids)
    if before is None or not is_stable:
        return _Observation(peaks, 0.0, now_s, works)
    gained_s = now_s - before.at_s if works and before.works else 0.0
    return _Observation(before.peaks, before.stable_s + gained_s, now_s, works)


def _works(tenant: Tenant) -> bool:
    """Return whether a tenant works now; without that report its mean utilization decides, which lags by minutes.

    One that reports its steps is still starting before twenty of them.
    """
    busy, is_working = tenant.gpu_util_percent, tenant.working
    if is_working is None:
        is_working = busy is not None and busy >= LEAST_BUSY_PERCENT
    has_started = tenant.steps is None or tenant.steps >= MEASURED_STEPS
    return tenant.memory_mib > 0 and is_working and has_started


def measured_tenants(node: GpuNode) -> dict[tuple[PodUid, GpuUuid], Tenant]:
    """Return what a node's agent measures, by pod and GPU."""
    return {(tenant.pod_uid, tenant.gpu_uuid): tenant for tenant in node.status.tenants}
