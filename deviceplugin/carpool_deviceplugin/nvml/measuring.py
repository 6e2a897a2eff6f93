"""Measures the GPUs: their counters, their MIG instances', and what each process used."""

from collections.abc import Callable, Mapping, Sequence

import pynvml
from carpool_core.values import MIB, GpuUuid

from carpool_deviceplugin.gpu import PartReading, Reading
from carpool_deviceplugin.nvml.accounting import Ledger, Moment, PartMoment, Present
from carpool_deviceplugin.nvml.calls import NvmlError, Session
from carpool_deviceplugin.nvml.counters import dcgm_of_part, dcgm_values
from carpool_deviceplugin.nvml.gpm import Gpm
from carpool_deviceplugin.nvml.instances import Found
from carpool_deviceplugin.nvml.presence import Watcher
from carpool_deviceplugin.nvml.reading import read_telemetry, read_utilization
from carpool_deviceplugin.nvml.values import GpmMetrics, Identity

GPM, PLAIN = "nvml-gpm", "nvml"
"""Sources of counters, as metrics name them."""


class Measuring:
    """Measures the GPUs of a node.

    Args:
        session: The open library.
        uuids: The GPUs.
        watcher: Who is there.
        monotonic: Seconds.
    """

    def __init__(
        self, session: Session, uuids: Sequence[GpuUuid], watcher: Watcher, monotonic: Callable[[], float]
    ) -> None:
        self._session, self._watcher, self._monotonic = session, watcher, monotonic
        self._ledgers = {uuid: Ledger() for uuid in uuids}
        self._gpm = Gpm(session)
        self._parts: dict[GpuUuid, tuple[Found, ...]] = {}

    def divided(self, uuid: GpuUuid, found: Sequence[Found]) -> None:
        """Take in which MIG instances a GPU has now."""
        for gone in {f.instance.id for f in self._parts.get(uuid, ())} - {f.instance.id for f in found}:
            self._gpm.forget(uuid, gone)
        self._parts[uuid] = tuple(found)

    def read(self, uuid: GpuUuid, known: Identity) -> Reading:
        """Read a GPU's counters; raises NvmlError."""
        ledger, found = self._ledgers[uuid], self._parts.get(uuid, ())
        telemetry = read_telemetry(self._session, uuid)
        there = self._watcher.look_lately(uuid).pods
        samples = read_utilization(self._session, uuid, ledger.since_us) if not found else None
        gpm = self._gpm.sample(uuid)
        of_parts = {f.instance.id: self._sample(uuid, f.instance.id) for f in found}
        at = self._monotonic()
        energy_j = None if telemetry.energy_mj is None else telemetry.energy_mj / 1000
        parts = {f.instance.id: _moment(f, of_parts[f.instance.id]) for f in found}
        processes = ledger.take(Moment(at, there, samples, energy_j, gpm, parts))
        return Reading(
            at=at,
            processes=tuple(processes),
            power_w=telemetry.power_w,
            idle_power_w=ledger.idle_power_w,
            power_limit_w=known.power_limit_w,
            energy_j=energy_j,
            counters=dcgm_values(known, telemetry, gpm),
            pci_bus_id=known.pci_bus_id,
            parts=tuple(self._part(uuid, f, there, of_parts) for f in found),
            source=GPM if self._gpm.is_supported(uuid) else PLAIN,
        )

    def _sample(self, uuid: GpuUuid, instance: int) -> GpmMetrics | None:
        try:
            return self._gpm.sample(uuid, instance)
        except NvmlError as e:
            if e.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                return None  # it was destroyed a moment ago
            raise

    def _part(
        self, uuid: GpuUuid, found: Found, there: Sequence[Present], gpm: Mapping[int, GpmMetrics | None]
    ) -> PartReading:
        number = found.instance.id
        pods = {p.process.pod_uid for p in there if p.running.gpu_instance_id == number}
        return PartReading(
            instance_id=number,
            profile=found.instance.placement.profile.name,
            pod_uid=found.own.pod_uid if found.own is not None else pods.pop() if len(pods) == 1 else None,
            counters=dcgm_of_part(self._memory(uuid, found), gpm[number]),
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
