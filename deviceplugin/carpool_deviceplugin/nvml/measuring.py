"""Measures the GPUs: their counters, their MIG instances', and what each process used."""

from collections.abc import Callable, Mapping, Sequence

import pynvml
from carpool_core.values import MIB, GpuUuid

from carpool_deviceplugin.devices.gpu import PartReading, Reading
from carpool_deviceplugin.nvml.accounting import AHEAD_US, Ledger, Moment, PartMoment, Present
from carpool_deviceplugin.nvml.calls import NvmlError, Session
from carpool_deviceplugin.nvml.counters import activity_of, dcgm_of_part, dcgm_values
from carpool_deviceplugin.nvml.glances import Glances
from carpool_deviceplugin.nvml.gpm import Gpm
from carpool_deviceplugin.nvml.instances import Found
from carpool_deviceplugin.nvml.presence import Watcher
from carpool_deviceplugin.nvml.reading import read_utilization
from carpool_deviceplugin.nvml.values import GpmMetrics, Identity, UtilizationSample
from carpool_deviceplugin.sources.feed import Feed, Source

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


class Measuring:
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
        glances: Glances,
        watcher: Watcher,
        feed: Feed,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._session, self._glances, self._watcher = session, glances, watcher
        self._monotonic, self._wall = monotonic, wall
        self._ledgers = {uuid: Ledger() for uuid in uuids}
        self._gpm, self._feed = Gpm(session), feed
        self._parts: dict[GpuUuid, tuple[Found, ...]] = {}

    def divided(self, uuid: GpuUuid, found: Sequence[Found]) -> None:
        """Take in which MIG instances a GPU has now."""
        for gone in {f.instance.id for f in self._parts.get(uuid, ())} - {f.instance.id for f in found}:
            self._gpm.forget(uuid, gone)
        self._parts[uuid] = tuple(found)

    def begin_anew(self, uuid: GpuUuid) -> None:
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
        parts = {f.instance.id: _moment(f, of_parts[f.instance.id][1]) for f in found}
        processes, ended = ledger.take(Moment(at, there, samples, energy_j, gpm, parts))
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
            parts=tuple(self._part(uuid, f, there, *of_parts[f.instance.id]) for f in found),
            source=told_by.name if told_by else GPM if self._gpm.is_supported(uuid) else PLAIN,
            is_shown_elsewhere=told is not None and told.is_public,
        )

    def _samples(self, uuid: GpuUuid, ledger: Ledger) -> Sequence[UtilizationSample] | None:
        now_us = round(1e6 * self._wall())
        ledger.keep_up(now_us)
        return read_utilization(self._session, uuid, ledger.since_us, now_us + AHEAD_US)

    def _told(self, uuid: GpuUuid, instance: int | None) -> Mapping[str, float]:
        """What others say, as far as it is shown."""
        said = self._feed.at(uuid, instance)
        return {} if said is None else {name: said[1][name] for name in SHOWN & said[1].keys()}

    def _activity(self, uuid: GpuUuid, instance: int | None) -> tuple[Source | None, GpmMetrics | None]:
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
        self, uuid: GpuUuid, found: Found, there: Sequence[Present], told: Source | None, gpm: GpmMetrics | None
    ) -> PartReading:
        number = found.instance.id
        pods = {p.process.pod_uid for p in there if p.running.gpu_instance_id == number}
        return PartReading(
            instance_id=number,
            profile=found.instance.placement.profile.name,
            pod_uid=found.own.pod_uid if found.own is not None else pods.pop() if len(pods) == 1 else None,
            counters={**dcgm_of_part(self._memory(uuid, found), gpm), **self._told(uuid, number)},
            is_shown_elsewhere=told is not None and told.is_public,
        )

    def _memory(self, uuid: GpuUuid, found: Found) -> tuple[int, int] | None:
        """Used and free memory of an instance, in MiB; None where its device cannot be asked."""
        if found.device is None:
            return None
        session, library = self._session, self._session.library
        handle = session.ask(
            uuid, library.nvmlDeviceGetHandleByUUID, found.device.uuid, absent=pynvml.NVML_ERROR_NOT_FOUND
        )
        memory = None if handle is None else session.ask(uuid, library.nvmlDeviceGetMemoryInfo, handle)
        return None if memory is None else (memory.used // MIB, memory.free // MIB)


def _moment(found: Found, gpm: GpmMetrics | None) -> PartMoment:
    return PartMoment(found.instance.placement.profile.sm_count, gpm)
