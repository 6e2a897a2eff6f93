"""From counters to measures: what each pod uses of each GPU, smoothed."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from operator import attrgetter

import msgspec
from carpool_core.resources.node import Tenant
from carpool_core.values import GpuUuid, PodUid
from msgspec.structs import replace

from carpool_deviceplugin.gpu import ProcessUsage, Reading

SMOOTHING_S = 5.0
"""Time constant of the exponential average that metrics tell."""
STATUS_SMOOTHING_S = 90.0
"""The same of the activity that `GpuNode.status` tells, by which others are admitted: steps come and go, checkpoints
and evaluations take their time (90 s as in RAD-RM's monitor, Yousefzadeh-Asl-Miandoab, ITU 2025)."""
FORMER = 4
"""Samples that such a mean counts for once others came to the GPU or left it: what was done beside them says little,
but a pause in that moment is no reason to forget it."""
LEAST_BUSY = 0.01
"""Share of the last seconds below which a pod does not work: it loads, or waits, and will take its memory later."""
MOVED = 0.10
"""A measure that moved by less than this share is not written to the API server again."""
PEAK_MOVED = 0.01
"""The same of a peak, which only rises, and seldom: neighbours are admitted by it."""


class Rates(msgspec.Struct, frozen=True):
    """What one pod does to one GPU. Ratios 0..1; None where the GPU cannot say."""

    busy: float | None = 0.0
    sm: float | None = 0.0
    dram: float | None = 0.0
    power_w: float | None = 0.0

    def towards(self, now: "Rates", weight: float) -> "Rates":
        """Move to `now` by `weight`, 0..1."""
        return Rates(
            _towards(self.busy, now.busy, weight),
            _towards(self.sm, now.sm, weight),
            _towards(self.dram, now.dram, weight),
            _towards(self.power_w, now.power_w, weight),
        )


def _towards(was: float | None, now: float | None, weight: float) -> float | None:
    return now if was is None or now is None else was + weight * (now - was)


class PodUsage(msgspec.Struct, frozen=True):
    """What one pod uses of one GPU."""

    memory_mib: int = 0
    peak_memory_mib: int = 0
    rates: Rates | None = None
    """None until two samples exist. Of a pod whose processes have ended: as they were at last."""
    samples: int = 0
    """Samples with work since it began."""
    means: Rates | None = None
    """The same over `DECIDING_S`, or mostly since others came to the GPU or left it, where that is less."""
    mean_samples: int = 0
    """Samples with work that they are of."""
    is_running: bool = False
    """Whether it has a process on the GPU."""
    step_time_s: float | None = None
    energy_j: float | None = None
    """Above idle, since the agent started; None while nobody knows."""


_UNUSED = PodUsage()
_COUNTERS = attrgetter("busy_s", "sm_s", "dram_s", "energy_j")
"""Of a process; attribute by attribute they take longer than all that is reckoned from them."""
_NOTHING = (None,) * 4


class Meter:
    """Measures one GPU."""

    def __init__(self, uuid: GpuUuid) -> None:
        self.uuid = uuid
        self.reading: Reading | None = None
        self.is_current = False
        """Whether the GPU could be read when it was last asked."""
        self.usage: dict[PodUid, PodUsage] = {}

    def sample(self, reading: Reading) -> None:
        """Take in a reading."""
        before = self.reading
        earlier = {p.id: p for p in before.processes} if before else {}
        of_pods: dict[PodUid, list[ProcessUsage]] = {pod: [] for pod in self.usage}
        for process in reading.processes:
            of_pods.setdefault(process.pod_uid, []).append(process)
        was, now = (None if one is None else _pods(one) for one in (before, reading))
        for pod, processes in of_pods.items():
            use = self.usage.get(pod, _UNUSED)
            if was is not None and now is not None and was - {pod} != now - {pod}:
                use = replace(use, mean_samples=min(use.mean_samples, FORMER + 1))
            elapsed = _window_s(before, reading, processes)
            if elapsed > 0:
                self.usage[pod] = _advance(use, processes, earlier, elapsed)
            else:
                self.usage[pod] = _present(use, processes, is_new=before is not None)
        for process in reading.ended:
            self._see_last(process, earlier.get(process.id))
        self.reading, self.is_current = reading, True

    def _see_last(self, process: ProcessUsage, before: ProcessUsage | None) -> None:
        """Credit a pod with what its process drew between the last reading and its end."""
        use = self.usage.get(process.pod_uid)
        if use is not None and before is not None and process.energy_j is not None:
            drawn = max(0.0, process.energy_j - (before.energy_j or 0.0))
            self.usage[process.pod_uid] = replace(use, energy_j=_plus(use.energy_j, drawn))

    def running(self) -> Set[PodUid]:
        """Return the pods that have a process on the GPU."""
        return {pod for pod, use in self.usage.items() if use.is_running}

    def keep(self, pods: Set[PodUid]) -> None:
        """Forget all pods but these and those with processes."""
        there = _pods(self.reading) if self.reading else set()
        self.usage = {pod: use for pod, use in self.usage.items() if pod in pods or pod in there}

    def discard(self, pods: Set[PodUid]) -> None:
        """Say nothing of these pods until the GPU was read again: their reservations went, as they do at an end."""
        self.usage = {pod: use for pod, use in self.usage.items() if pod not in pods}

    def peaks(self) -> dict[PodUid, int]:
        """Return the most that each pod was measured to take, in MiB."""
        return {pod: use.peak_memory_mib for pod, use in self.usage.items()}

    def tenants(self) -> list[Tenant]:
        """Return what is measured, as `GpuNode.status` says it."""
        sharing = max(1, sum(use.is_running for use in self.usage.values()))
        idle_w = (self.reading.idle_power_w or 0.0) / sharing if self.reading else 0.0
        return [_tenant(pod, self.uuid, use, idle_w) for pod, use in sorted(self.usage.items())]

    def total(self, *, is_concurrent: bool) -> Rates:
        """What the whole GPU does, tenants together; `is_concurrent` where their kernels run at the same time."""
        rates = [use.rates for use in self.usage.values() if use.rates and use.is_running]
        idle = math.prod(1 - min(1.0, r.busy or 0.0) for r in rates)
        busy = 1 - idle if is_concurrent else min(1.0, sum(r.busy or 0.0 for r in rates))
        power = self.reading.power_w or 0.0 if self.reading else 0.0
        sm, dram = sum(r.sm or 0.0 for r in rates), sum(r.dram or 0.0 for r in rates)
        return Rates(busy, min(1.0, sm), min(1.0, dram), power)


def _pods(reading: Reading) -> set[PodUid]:
    """Return the pods that have a process on the GPU."""
    return {process.pod_uid for process in reading.processes}


def _window_s(before: Reading | None, now: Reading, processes: Sequence[ProcessUsage]) -> float:
    """Seconds that a pod's processes had since the reading before; 0 where nothing can be said of them."""
    if before is None or not processes:
        return 0.0
    return min(now.at - before.at, now.at - min(p.started for p in processes))


def _weight(samples: int, elapsed_s: float, constant_s: float = SMOOTHING_S) -> float:
    """Weight of a sample in the average: a plain mean at first, an exponential one later.

    The first sample with work began before the work did, so the second replaces it.
    """
    return 1.0 if samples <= 2 else max(1 - math.exp(-elapsed_s / constant_s), 1 / (samples - 1))


def _present(use: PodUsage, processes: Sequence[ProcessUsage], *, is_new: bool) -> PodUsage:
    """What can be said of a pod's processes when no time has passed.

    Args:
        use: What was known of the pod.
        processes: That it has now.
        is_new: Whether they began while the GPU was watched: what they drew before they were first seen is theirs.
    """
    drawn = [p.energy_j for p in processes if p.energy_j is not None] if is_new else []
    memory = sum(p.memory_mib for p in processes)
    peak = max([use.peak_memory_mib, memory, *(p.peak_memory_mib for p in processes)])
    return replace(
        use,
        memory_mib=memory,
        peak_memory_mib=peak,
        is_running=bool(processes),
        energy_j=_plus(use.energy_j, sum(drawn) if drawn else None),
    )


def _advance(
    use: PodUsage, processes: Sequence[ProcessUsage], earlier: Mapping[str, ProcessUsage], elapsed_s: float
) -> PodUsage:
    memory, peak, steps, steps_s = 0, use.peak_memory_mib, 0, 0.0
    gained: list[float | None] = [None] * len(_NOTHING)
    for p in processes:
        was = earlier.get(p.id)
        memory, peak = memory + p.memory_mib, max(peak, p.peak_memory_mib)
        steps += max(0, p.steps - (was.steps if was else 0))
        steps_s += max(0.0, p.steps_s - (was.steps_s if was else 0))
        for at, (now, then) in enumerate(zip(_COUNTERS(p), _COUNTERS(was) if was else _NOTHING, strict=True)):
            if now is not None:  # what no process can say stays unknown
                gained[at] = (gained[at] or 0.0) + max(0.0, now - (then or 0.0))
    busy, sm, dram, energy = gained
    rates = Rates(_ratio(busy, elapsed_s), _ratio(sm, elapsed_s), _ratio(dram, elapsed_s), _per(energy, elapsed_s))
    samples = use.samples + bool(busy or use.samples)
    mean_samples = use.mean_samples + bool(busy or use.mean_samples)
    weight = _weight(samples, elapsed_s)
    step_time = use.step_time_s
    if steps:
        mean = steps_s / steps
        step_time = mean if step_time is None else step_time + weight * (mean - step_time)
    return PodUsage(
        memory_mib=memory,
        peak_memory_mib=max(peak, memory),
        rates=use.rates.towards(rates, weight) if use.rates else rates,
        samples=samples,
        means=use.means.towards(rates, _weight(mean_samples, elapsed_s, STATUS_SMOOTHING_S)) if use.means else rates,
        mean_samples=mean_samples,
        is_running=bool(processes),
        step_time_s=step_time,
        energy_j=_plus(use.energy_j, energy),
    )


def _ratio(seconds: float | None, elapsed_s: float) -> float | None:
    return None if seconds is None else min(1.0, seconds / elapsed_s)


def _per(joules: float | None, elapsed_s: float) -> float | None:
    return None if joules is None else joules / elapsed_s


def _plus(was: float | None, more: float | None) -> float | None:
    return was if more is None else (was or 0.0) + more


def _tenant(pod: PodUid, uuid: GpuUuid, use: PodUsage, idle_w: float) -> Tenant:
    rates, means = use.rates, use.means
    return Tenant(
        pod_uid=pod,
        gpu_uuid=uuid,
        memory_mib=use.memory_mib,
        peak_memory_mib=use.peak_memory_mib,
        gpu_util_percent=None if means is None or means.busy is None else round(100 * means.busy, 1),
        sm_active_ratio=None if means is None or means.sm is None else round(means.sm, 4),
        working=None if rates is None or rates.busy is None else use.is_running and rates.busy >= LEAST_BUSY,
        power_w=None if rates is None or rates.power_w is None else round(rates.power_w + idle_w, 1),
        step_time_seconds=None if use.step_time_s is None else round(use.step_time_s, 6),
    )


def damp_changes(written: Iterable[Tenant], measured: Iterable[Tenant]) -> list[Tenant]:
    """Return the tenants as they should stand in the status: those that moved too little stay as they were written."""
    before = {(t.pod_uid, t.gpu_uuid): t for t in written}
    return [_kept(before.get((tenant.pod_uid, tenant.gpu_uuid)), tenant) for tenant in measured]


def _kept(old: Tenant | None, new: Tenant) -> Tenant:
    if old is None or old.working != new.working:
        return new
    least = {"memory_mib": 16, "peak_memory_mib": 16, "gpu_util_percent": 1, "sm_active_ratio": 0.01, "power_w": 2}
    for name in (*least, "step_time_seconds"):
        was, now = getattr(old, name), getattr(new, name)
        if (was is None) != (now is None):
            return new
        share = PEAK_MOVED if name == "peak_memory_mib" else MOVED
        if was is not None and abs(now - was) > max(share * abs(was), least.get(name, 0.0)):
            return new
    return old
