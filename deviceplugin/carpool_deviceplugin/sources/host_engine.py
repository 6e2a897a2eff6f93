"""DCGM's host engine, where it runs and its library can be loaded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from carpool_core.values import GpuUuid

from carpool_deviceplugin.sources.feed import Counters, Place, SourceError

GPU, INSTANCE = 1, 4
"""DCGM's kinds of entities."""
UUID_FIELD = 54
FIELDS: Mapping[int, str] = {
    100: "DCGM_FI_DEV_SM_CLOCK",
    101: "DCGM_FI_DEV_MEM_CLOCK",
    150: "DCGM_FI_DEV_GPU_TEMP",
    155: "DCGM_FI_DEV_POWER_USAGE",
    203: "DCGM_FI_DEV_GPU_UTIL",
    204: "DCGM_FI_DEV_MEM_COPY_UTIL",
    230: "DCGM_FI_DEV_XID_ERRORS",
    251: "DCGM_FI_DEV_FB_FREE",
    252: "DCGM_FI_DEV_FB_USED",
    393: "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
    394: "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
    395: "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    1001: "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    1002: "DCGM_FI_PROF_SM_ACTIVE",
    1003: "DCGM_FI_PROF_SM_OCCUPANCY",
    1004: "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    1005: "DCGM_FI_PROF_DRAM_ACTIVE",
}
"""DCGM's field IDs (dcgm_fields.h). Without energy: that of pods adds up to NVML's counter."""
_EVERY_S = 1.0


class DcgmError(SourceError):
    """A call of DCGM failed."""


@dataclass(frozen=True, slots=True)
class Entity:
    """A GPU or a MIG instance, as DCGM numbers them."""

    kind: int
    number: int


@dataclass(frozen=True, slots=True)
class EngineInstance:
    """A MIG instance as DCGM knows it."""

    entity: Entity
    gpu_uuid: str
    instance_id: int
    """NVML's GPU instance ID."""


class DcgmLibrary(Protocol):
    """The calls of libdcgm that are used. All raise DcgmError."""

    def connect(self, address: str) -> None:
        """Connect to a host engine: HOST:PORT, or unix:///PATH."""
        ...

    def disconnect(self) -> None:
        """End the connection, and with it the watches; errors are of no interest."""
        ...

    def gpus(self) -> Sequence[Entity]:
        """List the GPUs."""
        ...

    def instances(self) -> Sequence[EngineInstance]:
        """List the MIG instances."""
        ...

    def watch(self, fields: Sequence[int], every_s: float) -> None:
        """Let these fields be measured on all GPUs and MIG instances."""
        ...

    def latest(self, entities: Sequence[Entity], fields: Sequence[int]) -> Mapping[tuple[Entity, int], float | str]:
        """Return the latest values; what is not known is absent."""
        ...


class HostEngine:
    """One connection to the host engine, opened anew where it was lost.

    Args:
        library: DCGM's.
        address: HOST:PORT, or unix:///PATH.
    """

    name = "dcgm"
    is_public = False

    def __init__(self, library: DcgmLibrary, address: str) -> None:
        self._library, self._address = library, address
        self._uuids: dict[Entity, GpuUuid] = {}

    def values(self) -> Mapping[Place, Counters]:
        """Return the latest values of all GPUs and MIG instances; raises SourceError."""
        try:
            if not self._uuids:
                self._begin()
            places: dict[Entity, Place] = {entity: (uuid, None) for entity, uuid in self._uuids.items()}
            for found in self._library.instances():
                places[found.entity] = (GpuUuid(found.gpu_uuid), found.instance_id)
            latest = self._library.latest([*places], [*FIELDS])
        except DcgmError:
            self._uuids = {}
            self._library.disconnect()
            raise
        values: dict[Place, dict[str, float]] = {}
        for (entity, field), value in latest.items():
            if isinstance(value, float | int) and math.isfinite(value):
                values.setdefault(places[entity], {})[FIELDS[field]] = float(value)
        return values

    def _begin(self) -> None:
        self._library.connect(self._address)
        self._library.watch([*FIELDS, UUID_FIELD], _EVERY_S)
        gpus = self._library.gpus()
        names = self._library.latest(gpus, [UUID_FIELD])
        self._uuids = {gpu: GpuUuid(str(names[gpu, UUID_FIELD])) for gpu in gpus if (gpu, UUID_FIELD) in names}
        if not self._uuids:
            raise DcgmError(f"{self._address}: expected a host engine with GPUs, found none")
