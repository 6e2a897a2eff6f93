"""Reads the counters of GPUs and MIG instances from all sources, and the use by each process between two readings."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pynvml
from carpool_core.values import MIB, GpuUuid, PodUid

from carpool_deviceplugin.dcgm import CounterFeed
from carpool_deviceplugin.gpu import Counters, InstanceReading, ProcessUsage, Reading
from carpool_deviceplugin.gpu_processes import GpuProcess
from carpool_deviceplugin.mig_instances import FoundInstance
from carpool_deviceplugin.nvlib import (
    Handle,
    Identity,
    Session,
    Telemetry,
    read_utilization,
)

NVML, GPM = "nvml", "nvml-gpm"
"""Names of the sources in metrics."""
SM_ACTIVE, DRAM_ACTIVE = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE"
ACTIVITY: Mapping[str, int] = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    SM_ACTIVE: pynvml.NVML_GPM_METRIC_SM_UTIL,
    "DCGM_FI_PROF_SM_OCCUPANCY": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    DRAM_ACTIVE: pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}
"""Activity counters, ratios 0..1, and the GPM metric of each."""


def nvml_counters(known: Identity, telemetry: Telemetry) -> dict[str, float]:
    """Return NVML's counters of a whole GPU by DCGM's field names; unsupported ones are absent."""
    values: dict[str, float | None] = {
        "DCGM_FI_DEV_GPU_UTIL": telemetry.gpu_util_percent,
        "DCGM_FI_DEV_MEM_COPY_UTIL": telemetry.memory_util_percent,
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
    }
    return {name: float(value) for name, value in values.items() if value is not None}


AHEAD_US = 2_000_000
"""Stamps further ahead of the node's clock are from before the clock was set back."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of a GPU."""

    at: float
    """Monotonic time, in seconds."""
    present: Sequence[GpuProcess]
    busy: Mapping[int, float] | None
    """Share of the time since the last reading in which each process's kernels ran, by process ID; None if the GPU does
    not measure it (MIG)."""
    energy_j: float | None
    """NVML's counter."""
    activity: Mapping[int | None, Mapping[str, float]] = field(default_factory=dict)
    """Activity counters of the whole GPU (None) and of each MIG instance by ID."""
    sm_counts: Mapping[int, int] = field(default_factory=dict)
    """SMs of each MIG instance, by ID."""


class ProcessAccounts:
    """Use of one GPU by each process between two readings."""

    def __init__(self) -> None:
        self._present: Mapping[str, GpuProcess] = {}
        self._at: float | None = None
        self._energy_j: float | None = None
        self.idle_power_w: float | None = None
        """Lowest mean power measured without processes; None before the first measurement."""

    def add(self, now: GpuSample) -> tuple[list[ProcessUsage], dict[PodUid, float]]:
        """Add a reading.

        Returns:
            The use of the present processes since the last reading, and the energy of ended processes by pod, in J.
        """
        elapsed = 0.0 if self._at is None else now.at - self._at
        energy = self._energy_since_last(now.energy_j)
        present = {p.process.key: p for p in now.present}
        gone = [p for key, p in self._present.items() if key not in present]
        if not present and not gone and elapsed > 0 and energy is not None:
            power = energy / elapsed
            self.idle_power_w = power if self.idle_power_w is None else min(power, self.idle_power_w)
        busy = None if now.busy is None else {pid: share * max(0.0, elapsed) for pid, share in now.busy.items()}
        accounted = [p for p in gone if p.running.gpu_instance_id in (None, *now.sm_counts)]
        above_idle = 0.0 if energy is None else max(0.0, energy - (self.idle_power_w or 0.0) * elapsed)
        weights = {} if energy is None else _energy_weights([*now.present, *accounted], now, busy or {})
        energies = {key: above_idle * weight for key, weight in weights.items()}
        ended = dict[PodUid, float]()
        for p in gone:
            if p.process.pod_uid is not None and p.process.key in energies:
                ended[p.process.pod_uid] = ended.get(p.process.pod_uid, 0.0) + energies[p.process.key]
        shares = _activity_shares(now, busy or {})
        uses = []
        for key, p in present.items():
            is_new = key not in self._present  # it started at an unknown time since the last reading
            own = None if busy is None else 0.0 if is_new else busy.get(p.running.pid, 0.0)
            share = shares[p.running.pid] * (0.0 if is_new else elapsed)
            uses.append(_usage(p, now, 0.0 if is_new else elapsed, own, share, energies.get(key)))
        self._at, self._present = now.at, present
        return uses, ended

    def _energy_since_last(self, counter_j: float | None) -> float | None:
        before, self._energy_j = self._energy_j, counter_j
        if before is None or counter_j is None or counter_j < before:
            return None  # the driver was restarted
        return counter_j - before


def _usage(
    p: GpuProcess, now: GpuSample, elapsed_s: float, busy_s: float | None, active_s: float, energy_j: float | None
) -> ProcessUsage:
    """Return the use by a process that was active in `active_s` seconds of the activity of its GPU or MIG instance."""
    memory, activity = p.running.memory_mib or 0, now.activity.get(p.running.gpu_instance_id, {})
    sm, dram = activity.get(SM_ACTIVE), activity.get(DRAM_ACTIVE)
    return ProcessUsage(
        id=p.process.key,
        pod_uid=p.process.pod_uid,  # type: ignore[arg-type]  # the caller passes processes of pods only
        memory_mib=memory,
        peak_memory_mib=memory,
        elapsed_s=elapsed_s,
        busy_s=busy_s,
        sm_s=None if sm is None else sm * active_s,
        dram_s=None if dram is None else dram * active_s,
        energy_j=energy_j,
    )


def _activity_shares(now: GpuSample, busy: Mapping[int, float]) -> dict[int, float]:
    """Return each process's share of the activity of its GPU (by kernel time) or MIG instance (equal parts)."""
    counts = Counter(p.running.gpu_instance_id for p in now.present)
    total = sum(busy.get(p.running.pid, 0.0) for p in now.present)
    return {
        p.running.pid: 1 / counts[p.running.gpu_instance_id]
        if p.running.gpu_instance_id is not None
        else (busy.get(p.running.pid, 0.0) / total if total else 0.0)
        for p in now.present
    }


def _energy_weights(there: Sequence[GpuProcess], now: GpuSample, busy: Mapping[int, float]) -> dict[str, float]:
    """Return each process's share of the GPU's energy, 1 together; empty if an instance's activity is unknown."""
    counts = Counter(p.running.gpu_instance_id for p in there)
    weights: dict[str, float] = {}
    for p in there:
        instance = p.running.gpu_instance_id
        if instance is None:
            weights[p.process.key] = busy.get(p.running.pid, 0.0)
            continue
        sm = now.activity.get(instance, {}).get(SM_ACTIVE)
        if sm is None or instance not in now.sm_counts:
            return {}
        weights[p.process.key] = sm * now.sm_counts[instance] / counts[instance]
    total = sum(weights.values())
    return {key: weight / total if total else 1 / len(weights) for key, weight in weights.items()}


def _request() -> pynvml.c_nvmlGpmMetricsGet_t:
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(ACTIVITY)
    for place, metric in enumerate(ACTIVITY.values()):
        request.metrics[place].metricId = metric
    return request


@dataclass
class _Pair:
    """The last two samples of a GPU or MIG instance."""

    samples: tuple[Handle, Handle]
    generation: int
    """Opening of the driver that allocated the samples."""
    filled: int = 0
    request: pynvml.c_nvmlGpmMetricsGet_t = field(default_factory=_request)


class GpmSampler:
    """Reads activity with NVML's GPU performance monitoring (GPM): Hopper and newer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._supported: dict[GpuUuid, bool] = {}
        self._pairs: dict[tuple[GpuUuid, int | None], _Pair] = {}

    def is_supported(self, uuid: GpuUuid) -> bool:
        """Whether this GPU and driver support GPM; raises NvmlError."""
        if uuid not in self._supported:
            session = self._session
            found = session.ask(uuid, session.library.nvmlGpmQueryDeviceSupport, session.handle(uuid))
            self._supported[uuid] = found is not None and bool(found.isSupportedDevice)
        return self._supported[uuid]

    def sample(self, uuid: GpuUuid, instance: int | None = None) -> dict[str, float]:
        """Take a sample of a GPU or MIG instance; return the activity since the last one, by DCGM's field names.

        It is empty after the first sample, and where unsupported. Raises NvmlError.
        """
        if not self.is_supported(uuid):
            return {}
        session, key = self._session, (uuid, instance)
        library, handle, pair = session.library, session.handle(uuid), self._pairs.get(key)
        if pair is None or pair.generation != session.generation:
            samples = (session.call(uuid, library.nvmlGpmSampleAlloc), session.call(uuid, library.nvmlGpmSampleAlloc))
            pair = self._pairs[key] = _Pair(samples, session.generation)
        before, now = pair.samples
        if instance is None:
            taken = session.ask(uuid, library.nvmlGpmSampleGet, handle, now)
        else:
            absent = pynvml.NVML_ERROR_INVALID_ARGUMENT  # the instance was destroyed a moment ago
            taken = session.ask(uuid, library.nvmlGpmMigSampleGet, handle, instance, now, absent=absent)
        if taken is None:
            return {}
        pair.samples, pair.filled = (now, before), pair.filled + 1
        if pair.filled == 1:
            return {}
        request = pair.request
        request.sample1, request.sample2 = before, now
        if session.ask(uuid, library.nvmlGpmMetricsGet, request) is None:
            return {}
        return {
            name: min(1.0, max(0.0, metric.value / 100))
            for name, metric in zip(ACTIVITY, request.metrics, strict=False)
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(metric.value)
        }

    def forget(self, uuid: GpuUuid, instance: int | None = None) -> None:
        """Free the samples of a GPU that was reset, or of an instance that was destroyed."""
        pair = self._pairs.pop((uuid, instance), None)
        if pair is not None and pair.generation == self._session.generation:
            for sample in pair.samples:
                self._session.ask(uuid, self._session.library.nvmlGpmSampleFree, sample)


class Sampler:
    """Reads the counters of a node's GPUs; `feed` has those of other programs on the node.

    `monotonic` returns seconds, and `wall` seconds since 1970, the clock of the driver's stamps.
    """

    def __init__(
        self,
        session: Session,
        uuids: Sequence[GpuUuid],
        feed: CounterFeed,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._session, self._monotonic, self._wall = session, monotonic, wall
        self._accounts = {uuid: ProcessAccounts() for uuid in uuids}
        self._gpm, self._feed = GpmSampler(session), feed
        self._instances: dict[GpuUuid, tuple[FoundInstance, ...]] = {}
        self._asked_us: dict[GpuUuid, int] = {}
        """Stamp of the last question for utilization."""

    def set_instances(self, uuid: GpuUuid, found: Sequence[FoundInstance]) -> None:
        """Set the MIG instances of a GPU."""
        for gone in {f.instance.id for f in self._instances.get(uuid, ())} - {f.instance.id for f in found}:
            self._gpm.forget(uuid, gone)
        self._instances[uuid] = tuple(found)

    def after_reset(self, uuid: GpuUuid) -> None:
        """Handle a reset of the GPU by the agent: earlier samples are invalid."""
        self._gpm.forget(uuid)

    def read(self, uuid: GpuUuid, known: Identity, telemetry: Telemetry, present: Sequence[GpuProcess]) -> Reading:
        """Read the other counters of a GPU with this telemetry and these processes of pods; raises NvmlError."""
        accounts, instances = self._accounts[uuid], self._instances.get(uuid, ())
        asked_us = round(1e6 * self._wall())
        busy = None if instances else self._busy(uuid, asked_us)
        counters: dict[int | None, Counters] = {None: self._counters(uuid, None, nvml_counters(known, telemetry))}
        counters |= {f.instance.id: self._counters(uuid, f.instance.id, self._memory(uuid, f)) for f in instances}
        at, energy_j = self._monotonic(), None if telemetry.energy_mj is None else telemetry.energy_mj / 1000
        activity = {place: found.values for place, found in counters.items()}
        sm_counts = {f.instance.id: f.instance.placement.profile.sm_count for f in instances}
        processes, ended = accounts.add(GpuSample(at, present, busy, energy_j, activity, sm_counts))
        self._asked_us[uuid] = asked_us  # after a reading that failed, the next one asks for its time, too
        return Reading(
            at=at,
            processes=tuple(processes),
            energy_of_ended_j=ended,
            power_w=telemetry.power_w,
            idle_power_w=accounts.idle_power_w,
            power_limit_w=known.power_limit_w,
            energy_j=energy_j,
            counters=counters[None],
            pci_bus_id=known.pci_bus_id,
            mig_instances=tuple(_instance_reading(f, present, counters[f.instance.id]) for f in instances),
            sources=tuple(dict.fromkeys(source for found in counters.values() for source in found.sources.values())),
        )

    def _busy(self, uuid: GpuUuid, now_us: int) -> dict[int, float] | None:
        """Return each process's share of the time since the last question; None if unsupported.

        After a gap that is longer than the driver's buffer, it is the share of the buffer's time. So is it if the
        node's clock was set back.
        """
        since_us = self._asked_us.get(uuid, 0)
        found = read_utilization(self._session, uuid, since_us if since_us <= now_us else 0, now_us + AHEAD_US)
        return None if found is None else {pid: sm_percent / 100 for pid, _, sm_percent in found}

    def _counters(self, uuid: GpuUuid, instance: int | None, nvml: Mapping[str, float]) -> Counters:
        """Merge all sources per field: DCGM, then GPM, then NVML's other counters."""
        counters = self._feed.at(uuid, instance)
        if not ACTIVITY.keys() <= counters.values.keys() and self._gpm.is_supported(uuid):
            gpm = Counters(self._gpm.sample(uuid, instance), dict.fromkeys(ACTIVITY, GPM))
            counters = counters.completed_by(gpm)
        return counters.completed_by(Counters(nvml, dict.fromkeys(nvml, NVML)))

    def _memory(self, uuid: GpuUuid, found: FoundInstance) -> dict[str, float]:
        """Return the memory counters of a MIG instance; empty if its device cannot be read."""
        if found.device is None:
            return {}
        session, library = self._session, self._session.library
        handle = session.ask(
            uuid, library.nvmlDeviceGetHandleByUUID, found.device.uuid, absent=pynvml.NVML_ERROR_NOT_FOUND
        )
        memory = None if handle is None else session.ask(uuid, library.nvmlDeviceGetMemoryInfo, handle)
        if memory is None:
            return {}
        return {"DCGM_FI_DEV_FB_USED": memory.used // MIB, "DCGM_FI_DEV_FB_FREE": memory.free // MIB}


def _instance_reading(found: FoundInstance, present: Sequence[GpuProcess], counters: Counters) -> InstanceReading:
    pods = {p.process.pod_uid for p in present if p.running.gpu_instance_id == found.instance.id}
    return InstanceReading(
        instance_id=found.instance.id,
        profile=found.instance.placement.profile.name,
        pod_uid=found.own.pod_uid if found.own is not None else pods.pop() if len(pods) == 1 else None,
        counters=counters,
    )
