"""Use of each GPU by each pod: smoothed rates from the measurements of its processes."""

import math
from collections.abc import Iterable, Sequence, Set

import msgspec
from carpool_core.resources.node import Tenant
from carpool_core.values import GpuUuid, PodUid
from msgspec.structs import replace

from carpool_deviceplugin.gpu import ProcessUsage, Reading

SMOOTHING_S = 5.0
"""Time constant of the exponential average in metrics."""
STATUS_SMOOTHING_S = 90.0
"""Time constant of the activity in `GpuNode.status`, by which pods are admitted beside others: longer than a checkpoint
or an evaluation (90 s as in RAD-RM's monitor, Yousefzadeh-Asl-Miandoab, ITU 2025)."""
FORMER_SAMPLES = 4
"""Weight of the mean, in samples, after the tenants of the GPU changed: the activity beside the former co-tenants has
little value, but one pause must not replace it."""
MIN_BUSY = 0.01
"""Below this share of the last seconds a pod does not work: it loads, or waits, and may allocate memory later."""
MIN_CHANGE = 0.10
"""A smaller relative change of a measurement is not written to the API server."""
MIN_PEAK_CHANGE = 0.01
"""The same for a memory peak, which rises rarely, and decides about new co-tenants."""


class Rates(msgspec.Struct, frozen=True):
    """Rates of one pod on one GPU. Ratios 0..1; None if the GPU does not measure one."""

    busy: float | None = 0.0
    sm: float | None = 0.0
    dram: float | None = 0.0
    power_w: float | None = 0.0

    def towards(self, now: "Rates", weight: float) -> "Rates":
        """Move to `now` by `weight`, 0..1."""
        return Rates(
            *(
                new if old is None or new is None else old + weight * (new - old)
                for old, new in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(now), strict=True)
            )
        )


class PodUsage(msgspec.Struct, frozen=True):
    """Use of one GPU by one pod."""

    memory_mib: int = 0
    peak_memory_mib: int = 0
    rates: Rates | None = None
    """Averages over `SMOOTHING_S`; None before the second reading. They stay after the processes have ended."""
    samples: int = 0
    """Readings since the first work."""
    means: Rates | None = None
    """Averages over `STATUS_SMOOTHING_S`, mostly since the last change of co-tenants."""
    mean_samples: int = 0
    """Readings with work in `means`."""
    measured_s: float = 0.0
    """Time for which its processes were measured."""
    is_running: bool = False
    """Whether it has a process on the GPU."""
    step_time_s: float | None = None
    energy_j: float | None = None
    """Energy above idle since the start of the agent; None if unknown."""


_UNUSED = PodUsage()


class Meter:
    """Use of one GPU by its pods."""

    def __init__(self, uuid: GpuUuid) -> None:
        self.uuid = uuid
        self.reading: Reading | None = None
        self.is_current = False
        """Whether the last reading succeeded."""
        self.usage: dict[PodUid, PodUsage] = {}

    def sample(self, reading: Reading) -> None:
        """Add a reading."""
        before = None if self.reading is None else _pods(self.reading)
        now = _pods(reading)
        of_pods: dict[PodUid, list[ProcessUsage]] = {pod: [] for pod in self.usage}
        for process in reading.processes:
            of_pods.setdefault(process.pod_uid, []).append(process)
        for pod, processes in of_pods.items():
            use = self.usage.get(pod, _UNUSED)
            if before is not None and before - {pod} != now - {pod}:
                use = replace(use, mean_samples=min(use.mean_samples, FORMER_SAMPLES + 1))
            use = _advance(use, processes)
            energy_j = _total((use.energy_j, reading.energy_of_ended_j.get(pod)))
            self.usage[pod] = replace(use, energy_j=energy_j)
        self.reading, self.is_current = reading, True

    def running(self) -> Set[PodUid]:
        """Return the pods that have a process on the GPU."""
        return {pod for pod, use in self.usage.items() if use.is_running}

    def keep(self, pods: Set[PodUid]) -> None:
        """Remove all pods except these and those with processes."""
        there = _pods(self.reading) if self.reading else set()
        self.usage = {pod: use for pod, use in self.usage.items() if pod in pods or pod in there}

    def discard(self, pods: Set[PodUid]) -> None:
        """Remove these pods until the next reading, because their reservations ended."""
        self.usage = {pod: use for pod, use in self.usage.items() if pod not in pods}

    def peaks(self) -> dict[PodUid, int]:
        """Return the peak memory of each pod, in MiB."""
        return {pod: use.peak_memory_mib for pod, use in self.usage.items()}

    def tenants(self) -> list[Tenant]:
        """Return the measurements for `GpuNode.status`."""
        sharing = max(1, sum(use.is_running for use in self.usage.values()))
        idle_w = (self.reading.idle_power_w or 0.0) / sharing if self.reading else 0.0
        return [_tenant(pod, self.uuid, use, idle_w) for pod, use in sorted(self.usage.items())]

    def total(self, *, is_concurrent: bool) -> Rates:
        """Return the rates of all tenants together; `is_concurrent` if their kernels run at the same time (MPS)."""
        rates = [use.rates for use in self.usage.values() if use.rates and use.is_running]
        idle = math.prod(1 - min(1.0, r.busy or 0.0) for r in rates)
        busy = 1 - idle if is_concurrent else min(1.0, sum(r.busy or 0.0 for r in rates))
        power = self.reading.power_w or 0.0 if self.reading else 0.0
        sm, dram = sum(r.sm or 0.0 for r in rates), sum(r.dram or 0.0 for r in rates)
        return Rates(busy, min(1.0, sm), min(1.0, dram), power)


def _pods(reading: Reading) -> set[PodUid]:
    """Return the pods that have a process on the GPU."""
    return {process.pod_uid for process in reading.processes}


def _weight(samples: int, elapsed_s: float, constant_s: float = SMOOTHING_S) -> float:
    """Return the weight of a sample in the average: a plain mean at first, an exponential one later.

    The first sample with work started before the work did, so the second replaces it.
    """
    return 1.0 if samples <= 2 else max(1 - math.exp(-elapsed_s / constant_s), 1 / (samples - 1))


def _advance(use: PodUsage, processes: Sequence[ProcessUsage]) -> PodUsage:
    """Return the use of a pod after a reading of its present processes; there are no rates without elapsed time."""
    memory = sum(p.memory_mib for p in processes)
    elapsed_s = max((p.elapsed_s for p in processes), default=0.0)
    energy = _total(p.energy_j for p in processes)
    use = replace(
        use,
        memory_mib=memory,
        peak_memory_mib=max([use.peak_memory_mib, memory, *(p.peak_memory_mib for p in processes)]),
        is_running=bool(processes),
        energy_j=_total((use.energy_j, energy)),
    )
    if elapsed_s <= 0:
        return use
    busy = _total(p.busy_s for p in processes)
    sm, dram = _total(p.sm_s for p in processes), _total(p.dram_s for p in processes)
    power_w = None if energy is None else energy / elapsed_s
    rates = Rates(_ratio(busy, elapsed_s), _ratio(sm, elapsed_s), _ratio(dram, elapsed_s), power_w)
    samples = use.samples + bool(busy or use.samples)
    mean_samples = use.mean_samples + bool(busy or use.mean_samples)
    weight = _weight(samples, elapsed_s)
    step_time = use.step_time_s
    if steps := sum(p.steps for p in processes):
        mean = sum(p.steps_s for p in processes) / steps
        step_time = mean if step_time is None else step_time + weight * (mean - step_time)
    return replace(
        use,
        rates=use.rates.towards(rates, weight) if use.rates else rates,
        samples=samples,
        means=use.means.towards(rates, _weight(mean_samples, elapsed_s, STATUS_SMOOTHING_S)) if use.means else rates,
        mean_samples=mean_samples,
        measured_s=use.measured_s + elapsed_s,
        step_time_s=step_time,
    )


def _total(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratio(seconds: float | None, elapsed_s: float) -> float | None:
    return None if seconds is None else min(1.0, seconds / elapsed_s)


def _tenant(pod: PodUid, uuid: GpuUuid, use: PodUsage, idle_w: float) -> Tenant:
    rates, means = use.rates, use.means
    return Tenant(
        pod_uid=pod,
        gpu_uuid=uuid,
        memory_mib=use.memory_mib,
        peak_memory_mib=use.peak_memory_mib,
        gpu_util_percent=None if means is None or means.busy is None else round(100 * means.busy, 1),
        sm_active_ratio=None if means is None or means.sm is None else round(means.sm, 4),
        working=None if rates is None or rates.busy is None else use.is_running and rates.busy >= MIN_BUSY,
        settled=use.measured_s >= STATUS_SMOOTHING_S,
        power_w=None if rates is None or rates.power_w is None else round(rates.power_w + idle_w, 1),
        step_time_seconds=None if use.step_time_s is None else round(use.step_time_s, 6),
    )


def damp_changes(written: Iterable[Tenant], measured: Iterable[Tenant]) -> list[Tenant]:
    """Return the tenants for the status: those with small changes only stay as written."""
    before = {(t.pod_uid, t.gpu_uuid): t for t in written}
    return [_kept(before.get((tenant.pod_uid, tenant.gpu_uuid)), tenant) for tenant in measured]


def _kept(old: Tenant | None, new: Tenant) -> Tenant:
    if old is None or (old.working, old.settled) != (new.working, new.settled):
        return new
    least = {"memory_mib": 16, "peak_memory_mib": 16, "gpu_util_percent": 1, "sm_active_ratio": 0.01, "power_w": 2}
    for name in (*least, "step_time_seconds"):
        was, now = getattr(old, name), getattr(new, name)
        if (was is None) != (now is None):
            return new
        share = MIN_PEAK_CHANGE if name == "peak_memory_mib" else MIN_CHANGE
        if was is not None and abs(now - was) > max(share * abs(was), least.get(name, 0.0)):
            return new
    return old
