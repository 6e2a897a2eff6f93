"""Use of each GPU by each pod: smoothed rates from the measurements of its processes."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import timedelta

import msgspec
from carpool_core.clock import parse_rfc3339, rfc3339
from carpool_core.durations import MEASURED_STEPS
from carpool_core.resources.node import Reservation, Tenant
from carpool_core.values import GpuUuid, PodUid
from msgspec.structs import replace

from carpool_deviceplugin.anomalies import AnomalyWatch, Sample
from carpool_deviceplugin.gpu import MIN_BUSY, ProcessUsage, Reading, StepCounts, StepReport

SMOOTHING_S = 5.0
"""Time constant of the exponential average in metrics."""
STATUS_SMOOTHING_S = 90.0
"""Time constant of the activity in `GpuNode.status`, by which pods are admitted beside others: longer than a checkpoint
or an evaluation (90 s as in RAD-RM's monitor, Yousefzadeh-Asl-Miandoab, ITU 2025)."""
PROGRESS_EVERY_S = 300.0
"""Longest time after which a changed number of steps is written to the API server: readers extrapolate it."""
FORMER_SAMPLES = 4
"""Weight of the mean, in samples, after the tenants of the GPU changed: the activity beside the former co-tenants has
little value, but one pause must not replace it."""
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

        def mean(old: float | None, new: float | None) -> float | None:
            return new if old is None or new is None else old + weight * (new - old)

        return Rates(
            mean(self.busy, now.busy),
            mean(self.sm, now.sm),
            mean(self.dram, now.dram),
            mean(self.power_w, now.power_w),
        )


_STEP_READINGS = 10
"""Time constant of the means of long steps, in readings with steps: such a mean weighs twenty readings."""


class StepMeans(msgspec.Struct, frozen=True):
    """Sums of step counters, exponentially decayed with `STATUS_SMOOTHING_S`, for long steps with `_STEP_READINGS`.

    Their ratios are means.
    """

    sums: StepCounts = StepCounts()
    squares: float = 0.0
    """Sum over readings of steps times the square of their mean time in s, decayed likewise."""
    total: int = 0
    """Timed steps without decay."""
    readings: int = 0
    """Readings with timed steps."""
    waited_s: float = 0.0
    """Time since the last of them."""

    def add(self, counts: StepCounts) -> "StepMeans":
        """Add the counters of another reading."""
        steps, waited_s = counts.timed_steps, self.waited_s + counts.elapsed_s
        if not steps:
            return replace(self, sums=self.sums.plus(counts), waited_s=waited_s)
        scaled = self.scaled(math.exp(-min(waited_s / STATUS_SMOOTHING_S, 1 / _STEP_READINGS)))
        own_s = counts.steps_s - counts.checkpoint_s
        square = own_s * own_s / steps
        return StepMeans(scaled.sums.plus(counts), scaled.squares + square, self.total + steps, self.readings + 1)

    def scaled(self, factor: float) -> "StepMeans":
        """Return the means with another weight."""
        sums = StepCounts(*(factor * value for value in msgspec.structs.astuple(self.sums)))
        return replace(self, sums=sums, squares=factor * self.squares)

    @property
    def step_time_s(self) -> float | None:
        """Mean time of a step without checkpoints; None before the second step."""
        sums = self.sums
        return max(0.0, sums.steps_s - sums.checkpoint_s) / sums.timed_steps if self.total else None

    @property
    def deviation_s(self) -> float | None:
        """Standard deviation of the step time between readings, each weighted by its steps; None before twenty."""
        mean_s = self.step_time_s
        if mean_s is None or self.readings < MEASURED_STEPS:
            return None
        return math.sqrt(max(0.0, self.squares / self.sums.timed_steps - mean_s * mean_s))

    def rate(self, amount: float) -> float | None:
        """Return a sum over the elapsed time; None without steps."""
        return amount / self.sums.elapsed_s if self.sums.elapsed_s and self.total else None


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
    steps: int | None = None
    """Training steps since its start; None if it reports none."""
    step_means: StepMeans = StepMeans()
    """Means of its steps, mostly since the last change of co-tenants."""
    solo_steps: StepMeans = StepMeans()
    """Means of its steps while no other pod worked on the GPU."""
    saved_at_step: int | None = None
    """Steps at the last reading in which it wrote a checkpoint; None once steps followed it."""
    checkpoint_age_s: float | None = None
    """Time since its last complete checkpoint, which steps followed; None before the first."""
    energy_j: float | None = None
    """Energy above idle since the start of the agent; None if unknown."""

    @property
    def solo_step_time_s(self) -> float | None:
        """Mean time of a step while no other pod worked on the GPU; None if that was not measured."""
        return self.solo_steps.step_time_s if self.solo_steps.total >= MEASURED_STEPS else None


JOB_ENERGY_S = 3600.0
"""Time for which the energy of a job without pods is kept, in seconds."""
_UNUSED = PodUsage()
STEPS_AFTER_CHECKPOINT = 2
"""Steps after which a checkpoint counts as complete."""
CHECKPOINTS_EVERY_S = 60.0
"""Least time between two checkpoints that are written to the status, in seconds."""
_FORMER_SHARE = 0.05
"""Weight of the steps beside former co-tenants, of 1."""


class Meter:
    """Use of one GPU by its pods."""

    def __init__(self, uuid: GpuUuid) -> None:
        self.uuid = uuid
        self.reading: Reading | None = None
        self.is_current = False
        """Whether the last reading succeeded."""
        self.usage: dict[PodUid, PodUsage] = {}
        self._changed_at = 0.0
        """Time of the reading in which a pod's processes last came or were gone, as in `Reading.at`."""
        self._watches: dict[PodUid, AnomalyWatch] = {}

    def remember(self, tenants: Iterable[Tenant]) -> None:
        """Keep the anomalies that an earlier agent wrote, as far as its successor cannot find them."""
        self._watches = {one.pod_uid: AnomalyWatch(one.anomalies) for one in tenants if one.gpu_uuid == self.uuid}

    def sample(
        self,
        reading: Reading,
        reports: Mapping[PodUid, StepReport | None] = {},
        limits: Mapping[PodUid, int | None] = {},
        usable_mib: int | None = None,
    ) -> dict[PodUid, float]:
        """Add a reading, and return the energy that each pod has drawn since the last one, in J, as far as known.

        Args:
            reading: The reading.
            reports: Step counters of the pods that report some.
            limits: Memory limit of the pods with a reservation, in MiB; None without one.
            usable_mib: Memory of the GPU for all pods; None if unknown.
        """
        came_or_went = set() if self.reading is None else _pods(self.reading) ^ _pods(reading)
        if came_or_went or self.reading is None:
            self._changed_at = reading.at
        drawn: dict[PodUid, float] = {}
        of_pods: dict[PodUid, list[ProcessUsage]] = {pod: [] for pod in self.usage}
        for process in reading.processes:
            of_pods.setdefault(process.pod_uid, []).append(process)
        working = {pod: _busy_ratio(processes) for pod, processes in of_pods.items() if _is_working(processes)}
        for pod, processes in of_pods.items():
            use = self.usage.get(pod, _UNUSED)
            if came_or_went - {pod}:
                means = use.step_means.scaled(_FORMER_SHARE)
                use = replace(use, mean_samples=min(use.mean_samples, FORMER_SAMPLES + 1), step_means=means)
            use = _advance(use, processes)
            steps, counts = _growth(use, processes, reports.get(pod))
            others_busy = [] if reading.mig_instances else [busy for other, busy in working.items() if other != pod]
            use = _count_steps(use, steps, counts, is_alone=not others_busy)
            if processes:
                limit_mib = limits.get(pod)
                if limit_mib is None and usable_mib is not None and pod in limits and not reading.mig_instances:
                    limit_mib = usable_mib - sum(p.memory_mib for p in reading.processes if p.pod_uid != pod)
                report, counters = reports.get(pod), reading.counters.values if reading.counters else {}
                sample = Sample(
                    at=reading.at,
                    steps=steps,
                    counts=counts,
                    waits_for=report.waits_for if report else "",
                    busy=use.rates.busy if use.rates else None,
                    others_busy=sum(others_busy),
                    memory_mib=use.memory_mib,
                    limit_mib=limit_mib,
                    clock_mhz=counters.get("DCGM_FI_DEV_SM_CLOCK"),
                    temperature_c=counters.get("DCGM_FI_DEV_GPU_TEMP"),
                )
                if pod not in self._watches:
                    self._watches[pod] = AnomalyWatch()
                self._watches[pod].add(sample)
            energy_j = _total((*(p.energy_j for p in processes), reading.energy_of_ended_j.get(pod)))
            if energy_j is not None:
                drawn[pod] = energy_j
            self.usage[pod] = replace(use, energy_j=_total((use.energy_j, energy_j)))
        self.reading, self.is_current = reading, True
        return drawn

    def running(self) -> Set[PodUid]:
        """Return the pods that have a process on the GPU."""
        return {pod for pod, use in self.usage.items() if use.is_running}

    def keep(self, pods: Set[PodUid]) -> None:
        """Remove all pods except these and those with processes."""
        there = _pods(self.reading) if self.reading else set()
        self.usage = {pod: use for pod, use in self.usage.items() if pod in pods or pod in there}
        self._watches = {pod: watch for pod, watch in self._watches.items() if pod in pods or pod in there}

    def discard(self, pods: Set[PodUid]) -> None:
        """Remove these pods until the next reading, because their reservations ended."""
        self.usage = {pod: use for pod, use in self.usage.items() if pod not in pods}

    def peaks(self) -> dict[PodUid, int]:
        """Return the peak memory of each pod, in MiB."""
        return {pod: use.peak_memory_mib for pod, use in self.usage.items()}

    def tenants(self, now: str) -> list[Tenant]:
        """Return the measurements for `GpuNode.status`; `now` is the time, RFC 3339."""
        sharing = max(1, sum(use.is_running for use in self.usage.values()))
        idle_w = (self.reading.idle_power_w or 0.0) / sharing if self.reading else 0.0
        found = [_tenant(pod, self.uuid, use, idle_w, now) for pod, use in sorted(self.usage.items())]
        none, since = AnomalyWatch(), None if self.reading is None else _before(now, self.reading.at - self._changed_at)
        return [
            replace(one, tenants_since=since, anomalies=self._watches.get(one.pod_uid, none).anomalies) for one in found
        ]

    def total(self, *, is_concurrent: bool) -> Rates:
        """Return the rates of all tenants together; `is_concurrent` if their kernels run at the same time (MPS)."""
        rates = [use.rates for use in self.usage.values() if use.rates and use.is_running]
        idle = math.prod(1 - min(1.0, r.busy or 0.0) for r in rates)
        busy = 1 - idle if is_concurrent else min(1.0, sum(r.busy or 0.0 for r in rates))
        power = self.reading.power_w or 0.0 if self.reading else 0.0
        sm, dram = sum(r.sm or 0.0 for r in rates), sum(r.dram or 0.0 for r in rates)
        return Rates(busy, min(1.0, sm), min(1.0, dram), power)


class JobEnergy:
    """Energy by job on this node. It outlives a job's pods by an hour, so that it is read after the last has ended."""

    def __init__(self) -> None:
        self.joules: dict[tuple[str, str], float] = {}
        """Energy above idle since the start of the agent, by namespace and job."""
        self._held_at: dict[tuple[str, str], float] = {}
        """Last time at which a pod of the job had a reservation."""

    def add(self, reserved: Iterable[Reservation], energy_j: Mapping[PodUid, float], now: float) -> None:
        """Add the energy that pods have drawn since the last reading; `now` is the monotonic time in s."""
        for held in reserved:
            job = held.pod_namespace, held.job_name
            if held.pod_uid in energy_j:
                self.joules[job] = self.joules.get(job, 0.0) + energy_j[held.pod_uid]
            self._held_at[job] = now
        for job in [job for job, at in self._held_at.items() if now - at > JOB_ENERGY_S]:
            del self._held_at[job]
            self.joules.pop(job, None)


class SavedTime:
    """GPU time that sharing saved on this node, against one tenant on each GPU, since the start of the agent.

    A tenant does the work of a GPU of its own, divided by its expected slowdown.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._saved_gpus, self._since = 0.0, math.inf

    def add(self, reserved: Iterable[Reservation], now: float) -> None:
        """Add the time since the last call; `now` is monotonic, in s."""
        self.seconds += self._saved_gpus * max(0.0, now - self._since)
        work = defaultdict[GpuUuid, float](float)
        for held in reserved:
            for uuid in held.gpu_uuids:
                work[uuid] += 1 / max(1.0, held.expected_slowdown)
        self._saved_gpus, self._since = sum(max(0.0, gpus - 1) for gpus in work.values()), now


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
    return replace(
        use,
        rates=use.rates.towards(rates, weight) if use.rates else rates,
        samples=samples,
        means=use.means.towards(rates, _weight(mean_samples, elapsed_s, STATUS_SMOOTHING_S)) if use.means else rates,
        mean_samples=mean_samples,
        measured_s=use.measured_s + elapsed_s,
    )


def _is_working(processes: Sequence[ProcessUsage]) -> bool:
    """Whether a pod's kernels ran since the last reading; supposed if that is not measured."""
    return any(p.busy_s is None or p.busy_s > MIN_BUSY * p.elapsed_s for p in processes)


def _busy_ratio(processes: Sequence[ProcessUsage]) -> float:
    """Return the share of time in which their kernels ran, all together; supposed 1 if that is not measured."""
    return sum(1.0 if p.busy_s is None else p.busy_s / p.elapsed_s for p in processes if p.elapsed_s > 0)


def _growth(
    use: PodUsage, processes: Sequence[ProcessUsage], report: StepReport | None
) -> tuple[int | None, StepCounts]:
    """Return a pod's steps and their growth: those of its probe, else of its processes.

    A pod whose kernels never ran in the last minutes is not believed.
    """
    steps, counts = use.steps, StepCounts()
    if report is not None:
        steps, counts = report.steps, report.since
    elif own := sum(p.steps for p in processes):
        elapsed_s, own_s = max(p.elapsed_s for p in processes), sum(p.steps_s for p in processes)
        steps, counts = (use.steps or 0) + own, StepCounts(elapsed_s, own, own_s, own)
    if not processes or counts.elapsed_s <= 0 or (use.means is not None and use.means.busy == 0):
        return use.steps, StepCounts()
    return steps, counts


def _count_steps(use: PodUsage, steps: int | None, counts: StepCounts, *, is_alone: bool) -> PodUsage:
    """Add the growth of a pod's steps."""
    if counts.elapsed_s <= 0:
        return use
    solo = use.solo_steps.add(counts) if is_alone else use.solo_steps
    use = _count_checkpoints(use, steps, counts)
    return replace(use, steps=steps, step_means=use.step_means.add(counts), solo_steps=solo)


def _count_checkpoints(use: PodUsage, steps: int | None, counts: StepCounts) -> PodUsage:
    """Follow a checkpoint until steps show that all of its files were written; many trainings write several."""
    age_s = None if use.checkpoint_age_s is None else use.checkpoint_age_s + counts.elapsed_s
    if counts.checkpoint_s > 0:
        return replace(use, saved_at_step=steps, checkpoint_age_s=age_s)
    if use.saved_at_step is not None and (steps or 0) >= use.saved_at_step + STEPS_AFTER_CHECKPOINT:
        return replace(use, saved_at_step=None, checkpoint_age_s=0.0)
    return replace(use, checkpoint_age_s=age_s)


def _total(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratio(seconds: float | None, elapsed_s: float) -> float | None:
    return None if seconds is None else min(1.0, seconds / elapsed_s)


def _tenant(pod: PodUid, uuid: GpuUuid, use: PodUsage, idle_w: float, now: str) -> Tenant:
    rates, means, steps, sums = use.rates, use.means, use.step_means, use.step_means.sums
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
        steps=use.steps,
        steps_at=None if use.steps is None else now,
        step_time_seconds=_rounded(steps.step_time_s, 6),
        step_time_deviation_seconds=_rounded(steps.deviation_s, 6),
        solo_step_time_seconds=_rounded(use.solo_step_time_s, 6),
        checkpointed_at=None if use.checkpoint_age_s is None else _before(now, use.checkpoint_age_s),
        samples_per_second=_rounded(steps.rate(sums.samples) or None, 1),
        data_wait_ratio=_rounded(steps.rate(sums.data_s), 3),
        checkpoint_ratio=_rounded(steps.rate(sums.checkpoint_s), 3),
        copy_ratio=_rounded(steps.rate(sums.copy_s), 3),
    )


def _before(now: str, seconds: float) -> str:
    return rfc3339(parse_rfc3339(now) - timedelta(seconds=seconds))


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def damp_changes(written: Iterable[Tenant], measured: Iterable[Tenant]) -> list[Tenant]:
    """Return the tenants for the status: those with small changes only stay as written."""
    before = {(t.pod_uid, t.gpu_uuid): t for t in written}
    return [_kept(before.get((tenant.pod_uid, tenant.gpu_uuid)), tenant) for tenant in measured]


_LEAST_CHANGES = {
    "memory_mib": 16, "peak_memory_mib": 16, "gpu_util_percent": 1, "sm_active_ratio": 0.01, "power_w": 2,
    "step_time_seconds": 0.0, "solo_step_time_seconds": 0.0, "samples_per_second": 0.0,
    "step_time_deviation_seconds": math.inf,  # written once it is known, and later with other changes
    "data_wait_ratio": 0.02, "checkpoint_ratio": 0.02, "copy_ratio": 0.02,
}  # fmt: skip
"""Smallest absolute change of each measurement that is written."""


def _has_progressed(old: Tenant, new: Tenant) -> bool:
    """Whether the number of steps must be written: it doubled, changed minutes ago, or begins again."""
    if old.steps is None or new.steps is None or old.steps_at is None or new.steps_at is None:
        return old.steps != new.steps
    age_s = (parse_rfc3339(new.steps_at) - parse_rfc3339(old.steps_at)).total_seconds()
    return not old.steps <= new.steps < 2 * max(1, old.steps) or (new.steps != old.steps and age_s >= PROGRESS_EVERY_S)


def _is_later(old: str | None, new: str | None, by_s: float) -> bool:
    """Whether a time is new or so much later."""
    if old is None or new is None:
        return old != new
    return (parse_rfc3339(new) - parse_rfc3339(old)).total_seconds() >= by_s


def _kept(old: Tenant | None, new: Tenant) -> Tenant:
    if old is None or (old.working, old.settled, old.anomalies) != (new.working, new.settled, new.anomalies):
        return new
    if _has_progressed(old, new):
        return new
    if _is_later(old.checkpointed_at, new.checkpointed_at, CHECKPOINTS_EVERY_S):
        return new
    if _is_later(old.tenants_since, new.tenants_since, 1.0):
        return new
    for name, least in _LEAST_CHANGES.items():
        was, now = getattr(old, name), getattr(new, name)
        if (was is None) != (now is None):
            return new
        share = MIN_PEAK_CHANGE if name == "peak_memory_mib" else MIN_CHANGE
        if was is not None and abs(now - was) > max(share * abs(was), least):
            return new
    return old
