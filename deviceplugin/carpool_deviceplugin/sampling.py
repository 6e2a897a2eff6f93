"""Measures the GPUs: their counters, their MIG instances', and what each process used."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import pynvml
from carpool_core.values import MIB, GpuUuid
from msgspec.structs import replace

from carpool_deviceplugin.dcgm import CounterFeed, CounterSource
from carpool_deviceplugin.gpu import InstanceReading, ProcessUsage, Reading
from carpool_deviceplugin.gpu_processes import GpuProcess, ProcessWatcher
from carpool_deviceplugin.mig_instances import FoundInstance
from carpool_deviceplugin.nvlib import (
    GpmMetrics,
    Handle,
    Identity,
    NvmlError,
    RunningProcess,
    Session,
    Telemetry,
    TelemetryCache,
    UtilizationSample,
    read_utilization,
)


def dcgm_values(known: Identity, telemetry: Telemetry, gpm: GpmMetrics | None) -> dict[str, float]:
    """Return what can be said of a GPU now, by DCGM's field names."""
    values: dict[str, float | None] = {
        "DCGM_FI_DEV_GPU_UTIL": telemetry.gpu_util_percent,
        "DCGM_FI_DEV_MEM_COPY_UTIL": telemetry.memory_util_percent,
        # NVML's first version counts what the driver keeps as used.
        "DCGM_FI_DEV_FB_USED": max(0, telemetry.memory_used_mib - known.reserved_mib),
        "DCGM_FI_DEV_FB_FREE": telemetry.memory_free_mib,
        "DCGM_FI_DEV_FB_RESERVED": known.reserved_mib,
        "DCGM_FI_DEV_POWER_USAGE": telemetry.power_w,
        "DCGM_FI_DEV_GPU_TEMP": telemetry.temperature_c,
        "DCGM_FI_DEV_SM_CLOCK": telemetry.sm_clock_mhz,
        "DCGM_FI_DEV_MEM_CLOCK": telemetry.memory_clock_mhz,
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": telemetry.rows_remapped_uncorrectable,
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": telemetry.rows_remapped_correctable,
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": telemetry.remap_failed,
        **_activity(gpm or GpmMetrics()),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def dcgm_of_part(memory_mib: tuple[int, int] | None, gpm: GpmMetrics | None) -> dict[str, float]:
    """Return what can be said of a MIG instance now: its memory (used, free) and its activity."""
    used, free = memory_mib or (None, None)
    values = {"DCGM_FI_DEV_FB_USED": used, "DCGM_FI_DEV_FB_FREE": free, **_activity(gpm or GpmMetrics())}
    return {name: float(value) for name, value in values.items() if value is not None}


def activity_of(counters: Mapping[str, float]) -> GpmMetrics | None:
    """Read what DCGM says of a GPU's activity; None where it says nothing of its SMs."""
    if "DCGM_FI_PROF_SM_ACTIVE" not in counters:
        return None
    return GpmMetrics(*(counters.get(name) for name in _activity(GpmMetrics())))


def _activity(gpm: GpmMetrics) -> dict[str, float | None]:
    return {
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE": gpm.graphics,
        "DCGM_FI_PROF_SM_ACTIVE": gpm.sm,
        "DCGM_FI_PROF_SM_OCCUPANCY": gpm.occupancy,
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": gpm.tensor,
        "DCGM_FI_PROF_DRAM_ACTIVE": gpm.dram,
    }


_BY_TIME = itemgetter(1)
"""Of a sample."""
_FIRST_SAMPLE_US = 1e6 / 6
_LONGEST_SAMPLE_US = 1_000_000
"""The driver samples each sixth of a second to each second; a longer gap was no sample."""
_UNSEEN = GpmMetrics()
AHEAD_US = 2_000_000
"""Stamps so far ahead of the node's clock are of a time before it was set back."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """What was read of the GPU at one moment."""

    at: float
    """Monotonic time, in seconds."""
    present: Sequence[GpuProcess]
    samples: Sequence[UtilizationSample] | None
    """Since the moment before; None where the GPU cannot say."""
    energy_j: float | None
    gpm: GpmMetrics | None
    mig_instances: Mapping[int, "InstanceSample"] = field(default_factory=dict)
    """Of MIG instances, by ID."""


@dataclass(frozen=True, slots=True)
class InstanceSample:
    """What was read of a MIG instance."""

    sm_count: int
    gpm: GpmMetrics | None


class ProcessAccounts:
    """What each process of one GPU has used since it was first seen."""

    def __init__(self) -> None:
        self._uses: dict[str, ProcessUsage] = {}
        self._there: Mapping[str, GpuProcess] = {}
        self._last_us: dict[int, int] = {}
        self._at: float | None = None
        self._energy_j: float | None = None
        self.since_us = 0
        """Stamp of the last sample: ask for what came after it."""
        self.idle_power_w: float | None = None
        """The least that was measured with nobody on the GPU; None until that was."""

    def handle_clock_change(self, now_us: int) -> None:
        """Begin anew with the driver's stamps where the node's clock was set back: all of them would be in the past."""
        if self.since_us > now_us + AHEAD_US:
            self.since_us = 0
            self._last_us.clear()

    def take(self, now: GpuSample) -> tuple[list[ProcessUsage], list[ProcessUsage]]:
        """Take in a moment.

        Returns:
            What the processes that are there have used, and what those that have ended since the moment before had.
        """
        elapsed = 0.0 if self._at is None else now.at - self._at
        energy = self._energy(now.energy_j)
        there = {p.process.key: p for p in now.present}
        gone = [p for key, p in self._there.items() if key not in there]
        if not now.present and not gone and elapsed > 0 and energy is not None:
            power = energy / elapsed
            self.idle_power_w = power if self.idle_power_w is None else min(power, self.idle_power_w)
        busy = None if now.samples is None else self._busy(now.samples, elapsed)
        known = [p for p in gone if p.running.gpu_instance_id in (None, *now.mig_instances)]
        energies = self._shared(_weights([*now.present, *known], now, busy), energy, elapsed)
        ended = [self._ended(p.process.key, energies.get(p.process.key)) for p in gone]
        shares = _shares(now, busy)
        self._uses = {
            key: self._used(key, p, now, elapsed, busy, shares, energies.get(key)) for key, p in there.items()
        }
        self._last_us = {p.running.pid: self._last_us.get(p.running.pid, self.since_us) for p in now.present}
        self._at, self._there = now.at, there
        return list(self._uses.values()), ended

    def _ended(self, key: str, energy: float | None) -> ProcessUsage:
        was = self._uses[key]
        return replace(was, energy_j=_plus(was.energy_j, energy))

    def _energy(self, counter_j: float | None) -> float | None:
        before, self._energy_j = self._energy_j, counter_j
        if before is None or counter_j is None or counter_j < before:
            return None  # the driver began anew
        return counter_j - before

    def _busy(self, samples: Sequence[UtilizationSample], elapsed: float) -> dict[int, float]:
        """Seconds of kernels of each process ID."""
        busy: dict[int, float] = {}
        last_us, ordered = self._last_us, sorted(samples, key=_BY_TIME)
        for pid, at_us, sm_percent in ordered:
            last = last_us.get(pid, 0)
            us = at_us - last if last else _FIRST_SAMPLE_US
            if us > _LONGEST_SAMPLE_US:  # there are thousands: each call counts
                us = _LONGEST_SAMPLE_US
            if us > 0:
                busy[pid] = busy.get(pid, 0.0) + sm_percent * us
            last_us[pid] = at_us
        if ordered:
            self.since_us = max(self.since_us, _BY_TIME(ordered[-1]))
        return {pid: min(percent_us / 1e8, elapsed) if elapsed > 0 else 0.0 for pid, percent_us in busy.items()}

    def _shared(self, weights: Mapping[str, float], energy: float | None, elapsed: float) -> dict[str, float]:
        if energy is None:
            return {}
        above = max(0.0, energy - (self.idle_power_w or 0.0) * elapsed)
        return {key: above * weight for key, weight in weights.items()}

    def _used(
        self,
        key: str,
        p: GpuProcess,
        now: GpuSample,
        elapsed: float,
        busy: Mapping[int, float] | None,
        shares: Mapping[int, float],
        energy: float | None,
    ) -> ProcessUsage:
        memory, was = p.running.memory_mib or 0, self._uses.get(key)
        gpm, share = _seen(p, now), shares[p.running.pid]
        if was is None:
            return ProcessUsage(
                id=key,
                pod_uid=p.process.pod_uid,  # type: ignore[arg-type]  # the caller leaves out who has no pod
                started=now.at,
                memory_mib=memory,
                peak_memory_mib=memory,
                busy_s=None if busy is None else 0.0,
                sm_s=None if gpm.sm is None else 0.0,
                dram_s=None if gpm.dram is None else 0.0,
                energy_j=energy,
                steps=0,
                steps_s=0.0,
            )
        return ProcessUsage(
            id=key,
            pod_uid=was.pod_uid,
            started=was.started,
            memory_mib=memory,
            peak_memory_mib=max(was.peak_memory_mib, memory),
            busy_s=_plus(was.busy_s, None if busy is None else busy.get(p.running.pid, 0.0)),
            sm_s=_plus(was.sm_s, None if gpm.sm is None else gpm.sm * elapsed * share),
            dram_s=_plus(was.dram_s, None if gpm.dram is None else gpm.dram * elapsed * share),
            energy_j=_plus(was.energy_j, energy),
            steps=was.steps,
            steps_s=was.steps_s,
        )


def _seen(p: GpuProcess, now: GpuSample) -> GpmMetrics:
    """What was seen of the SMs where a process is."""
    instance = p.running.gpu_instance_id
    if instance is None:
        return now.gpm or _UNSEEN
    part = now.mig_instances.get(instance)
    return (part.gpm if part else None) or _UNSEEN


def _shares(now: GpuSample, busy: Mapping[int, float] | None) -> dict[int, float]:
    """Share of what was seen where it is, of each process ID."""
    beside = Counter(p.running.gpu_instance_id for p in now.present)
    times = {p.running.pid: (busy or {}).get(p.running.pid, 0.0) for p in now.present}
    total = sum(times.values())

    def share(running: RunningProcess) -> float:
        if running.gpu_instance_id is not None:
            return 1 / beside[running.gpu_instance_id]
        return times[running.pid] / total if total else 0.0

    return {p.running.pid: share(p.running) for p in now.present}


def _weights(there: Sequence[GpuProcess], now: GpuSample, busy: Mapping[int, float] | None) -> dict[str, float]:
    """Share of the GPU's energy of each process that was there, 1 together; empty where nobody knows."""
    instances = Counter(p.running.gpu_instance_id for p in there)
    times: dict[str, float] = {}
    for p in there:
        instance = p.running.gpu_instance_id
        if instance is None:
            times[p.process.key] = (busy or {}).get(p.running.pid, 0.0)
            continue
        part = now.mig_instances.get(instance)
        if part is None or part.gpm is None or part.gpm.sm is None:
            return {}
        times[p.process.key] = part.gpm.sm * part.sm_count / instances[instance]
    total = sum(times.values())
    return {key: time / total if total else 1 / len(times) for key, time in times.items()}


def _plus(was: float | None, more: float | None) -> float | None:
    """A sum of what is known; nothing is known where it never was."""
    if more is None:
        return was
    return (was or 0.0) + more


_METRICS = (
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
)


def _request() -> pynvml.c_nvmlGpmMetricsGet_t:
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(_METRICS)
    for place, metric in enumerate(_METRICS):
        request.metrics[place].metricId = metric
    return request


def _ratio(metric: pynvml.c_nvmlGpmMetric_t) -> float | None:
    """Read one metric; where it could not be computed the driver's number is none, and would count as zero."""
    percent: float = metric.value
    if metric.nvmlReturn != pynvml.NVML_SUCCESS or not math.isfinite(percent):
        return None
    return min(1.0, max(0.0, percent / 100))


@dataclass
class _Pair:
    samples: tuple[Handle, Handle]
    filled: int = 0
    opening: int = field(default=0)
    request: pynvml.c_nvmlGpmMetricsGet_t = field(default_factory=_request)
    """Asked again and again."""


class GpmSampler:
    """Takes samples of GPUs and of their MIG instances, and says what happened between the last two."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._supported: dict[GpuUuid, bool] = {}
        self._pairs: dict[tuple[GpuUuid, int | None], _Pair] = {}

    def is_supported(self, uuid: GpuUuid) -> bool:
        """Whether this GPU and driver can say it."""
        if uuid not in self._supported:
            session = self._session
            found = session.ask(uuid, session.library.nvmlGpmQueryDeviceSupport, session.handle(uuid))
            self._supported[uuid] = found is not None and bool(found.isSupportedDevice)
        return self._supported[uuid]

    def sample(self, uuid: GpuUuid, instance: int | None = None) -> GpmMetrics | None:
        """Take a sample, and return what happened since the one before; None at first, and where unsupported.

        Args:
            uuid: The GPU.
            instance: A GPU instance ID; the whole GPU when None.

        Raises:
            NvmlError: The GPU cannot be read.
        """
        if not self.is_supported(uuid):
            return None
        session, key = self._session, (uuid, instance)
        handle = session.handle(uuid)
        pair = self._pairs.get(key)
        if pair is None or pair.opening != session.generation:
            allocate = session.library.nvmlGpmSampleAlloc
            samples = (session.call(uuid, allocate), session.call(uuid, allocate))
            pair = self._pairs[key] = _Pair(samples, opening=session.generation)
        before, now = pair.samples
        if instance is None:
            taken = session.ask(uuid, session.library.nvmlGpmSampleGet, handle, now)
        else:
            taken = session.ask(uuid, session.library.nvmlGpmMigSampleGet, handle, instance, now)
        if taken is None:
            return None
        pair.samples, pair.filled = (now, before), pair.filled + 1
        return self._between(uuid, before, now, pair.request) if pair.filled > 1 else None

    def _between(
        self, uuid: GpuUuid, before: Handle, now: Handle, request: pynvml.c_nvmlGpmMetricsGet_t
    ) -> GpmMetrics | None:
        request.sample1, request.sample2 = before, now
        if self._session.ask(uuid, self._session.library.nvmlGpmMetricsGet, request) is None:
            return None
        return GpmMetrics(*(_ratio(metric) for metric in request.metrics[: len(_METRICS)]))

    def forget(self, uuid: GpuUuid, instance: int | None = None) -> None:
        """Free the samples of what is gone."""
        pair = self._pairs.pop((uuid, instance), None)
        if pair is not None and pair.opening == self._session.generation:
            for sample in pair.samples:
                self._session.ask(uuid, self._session.library.nvmlGpmSampleFree, sample)


GPM, PLAIN = "nvml-gpm", "nvml"
"""Sources of counters, as metrics name them."""
SHOWN = frozenset(
    {
        "DCGM_FI_DEV_SM_CLOCK",
        "DCGM_FI_DEV_MEM_CLOCK",
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        "DCGM_FI_DEV_XID_ERRORS",
        "DCGM_FI_DEV_FB_FREE",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        "DCGM_FI_PROF_SM_ACTIVE",
        "DCGM_FI_PROF_SM_OCCUPANCY",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "DCGM_FI_PROF_DRAM_ACTIVE",
    }
)
"""What DCGM knows better than NVML, or as well."""


class Sampler:
    """Measures the GPUs of a node.

    Args:
        session: The open library.
        uuids: The GPUs.
        glances: Their telemetry.
        watcher: Who is there.
        feed: What others on the node measure.
        monotonic: Seconds.
        wall: Seconds since 1970, as the driver stamps its samples.
    """

    def __init__(
        self,
        session: Session,
        uuids: Sequence[GpuUuid],
        glances: TelemetryCache,
        watcher: ProcessWatcher,
        feed: CounterFeed,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._session, self._glances, self._watcher = session, glances, watcher
        self._monotonic, self._wall = monotonic, wall
        self._ledgers = {uuid: ProcessAccounts() for uuid in uuids}
        self._gpm, self._feed = GpmSampler(session), feed
        self._parts: dict[GpuUuid, tuple[FoundInstance, ...]] = {}

    def divided(self, uuid: GpuUuid, found: Sequence[FoundInstance]) -> None:
        """Take in which MIG instances a GPU has now."""
        for gone in {f.instance.id for f in self._parts.get(uuid, ())} - {f.instance.id for f in found}:
            self._gpm.forget(uuid, gone)
        self._parts[uuid] = tuple(found)

    def after_reset(self, uuid: GpuUuid) -> None:
        """The GPU was reset by us: samples of before say nothing of what comes."""
        self._gpm.forget(uuid)

    def read(self, uuid: GpuUuid, known: Identity) -> Reading:
        """Read a GPU's counters; raises NvmlError."""
        ledger, found = self._ledgers[uuid], self._parts.get(uuid, ())
        telemetry = self._glances.now(uuid)
        there = self._watcher.now(uuid)[0].pods
        samples = self._samples(uuid, ledger) if not found else None
        told, gpm = self._activity(uuid, None)
        of_parts = {f.instance.id: self._activity(uuid, f.instance.id) for f in found}
        told_by = next((source for source in (told, *(source for source, _ in of_parts.values())) if source), None)
        at = self._monotonic()
        energy_j = None if telemetry.energy_mj is None else telemetry.energy_mj / 1000
        mig_instances = {f.instance.id: _moment(f, of_parts[f.instance.id][1]) for f in found}
        processes, ended = ledger.take(GpuSample(at, there, samples, energy_j, gpm, mig_instances))
        return Reading(
            at=at,
            processes=tuple(processes),
            ended=tuple(ended),
            power_w=telemetry.power_w,
            idle_power_w=ledger.idle_power_w,
            power_limit_w=known.power_limit_w,
            energy_j=energy_j,
            counters={**dcgm_values(known, telemetry, gpm), **self._told(uuid, None)},
            pci_bus_id=known.pci_bus_id,
            mig_instances=tuple(self._part(uuid, f, there, *of_parts[f.instance.id]) for f in found),
            source=told_by.name if told_by else GPM if self._gpm.is_supported(uuid) else PLAIN,
            is_exported_elsewhere=told is not None and told.is_scraped,
        )

    def _samples(self, uuid: GpuUuid, ledger: ProcessAccounts) -> Sequence[UtilizationSample] | None:
        now_us = round(1e6 * self._wall())
        ledger.handle_clock_change(now_us)
        return read_utilization(self._session, uuid, ledger.since_us, now_us + AHEAD_US)

    def _told(self, uuid: GpuUuid, instance: int | None) -> Mapping[str, float]:
        """What others say, as far as it is shown."""
        said = self._feed.at(uuid, instance)
        return {} if said is None else {name: said[1][name] for name in SHOWN & said[1].keys()}

    def _activity(self, uuid: GpuUuid, instance: int | None) -> tuple[CounterSource | None, GpmMetrics | None]:
        said = self._feed.at(uuid, instance)
        activity = activity_of(said[1]) if said else None
        return said[0] if said else None, activity or self._sample(uuid, instance)

    def _sample(self, uuid: GpuUuid, instance: int | None) -> GpmMetrics | None:
        try:
            return self._gpm.sample(uuid, instance)
        except NvmlError as e:
            if instance is not None and e.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                return None  # it was destroyed a moment ago
            raise

    def _part(
        self,
        uuid: GpuUuid,
        found: FoundInstance,
        there: Sequence[GpuProcess],
        told: CounterSource | None,
        gpm: GpmMetrics | None,
    ) -> InstanceReading:
        number = found.instance.id
        pods = {p.process.pod_uid for p in there if p.running.gpu_instance_id == number}
        return InstanceReading(
            instance_id=number,
            profile=found.instance.placement.profile.name,
            pod_uid=found.own.pod_uid if found.own is not None else pods.pop() if len(pods) == 1 else None,
            counters={**dcgm_of_part(self._memory(uuid, found), gpm), **self._told(uuid, number)},
            is_exported_elsewhere=told is not None and told.is_scraped,
        )

    def _memory(self, uuid: GpuUuid, found: FoundInstance) -> tuple[int, int] | None:
        """Used and free memory of an instance, in MiB; None where its device cannot be asked."""
        if found.device is None:
            return None
        session, library = self._session, self._session.library
        handle = session.ask(
            uuid, library.nvmlDeviceGetHandleByUUID, found.device.uuid, absent=pynvml.NVML_ERROR_NOT_FOUND
        )
        memory = None if handle is None else session.ask(uuid, library.nvmlDeviceGetMemoryInfo, handle)
        return None if memory is None else (memory.used // MIB, memory.free // MIB)


def _moment(found: FoundInstance, gpm: GpmMetrics | None) -> InstanceSample:
    return InstanceSample(found.instance.placement.profile.sm_count, gpm)
