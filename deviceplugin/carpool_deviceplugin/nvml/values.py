"""What NVML says of a GPU, in our units. Absent (None) is what this GPU cannot say."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from carpool_core.values import GpuUuid


@dataclass(frozen=True, slots=True)
class Identity:
    """What never changes of a GPU, but for its MIG mode."""

    uuid: GpuUuid
    index: int
    minor: int | None
    """N of /dev/nvidiaN."""
    product: str
    memory_mib: int
    reserved_mib: int
    """What the driver keeps."""
    compute_capability: str
    pci_bus_id: str
    numa_node: int | None
    nvlink_peers: tuple[str, ...]
    """PCI bus IDs at the other ends of active links, each once; switches among them."""
    mig_capable: bool
    mig_enabled: bool
    mig_pending: bool
    """What MIG mode will be after the next reset."""
    power_limit_w: float | None


def linked(known: Identity, everyone: Mapping[GpuUuid, Identity]) -> list[GpuUuid]:
    """Return the other GPUs at the ends of a GPU's links, or at the same switch."""
    ends, own = set(known.nvlink_peers), {each.pci_bus_id for each in everyone.values()}
    return [
        uuid
        for uuid, other in everyone.items()
        if uuid != known.uuid and (other.pci_bus_id in ends or (ends - own) & set(other.nvlink_peers))
    ]


class Telemetry(msgspec.Struct, frozen=True):
    """A GPU's counters at one moment."""

    memory_used_mib: int
    memory_free_mib: int
    gpu_util_percent: float | None = None
    """Share of time in which some kernel ran; absent under MIG."""
    memory_util_percent: float | None = None
    power_w: float | None = None
    energy_mj: int | None = None
    """Since the driver was loaded."""
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    clock_reasons: int | None = None
    """NVML's bits of why the clocks are lower than they could be."""
    ecc_uncorrectable: int | None = None
    """Since the driver was loaded."""
    rows_remapped_correctable: int | None = None
    rows_remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    """A reset is needed to take a bad row out of use."""
    remap_failed: bool | None = None
    """No spare row was left: replace the GPU."""


class RunningProcess(msgspec.Struct, frozen=True):
    """A process with a CUDA context."""

    pid: int
    memory_mib: int | None
    """Absent in containers that lack rights to see it."""
    gpu_instance_id: int | None = None


UtilizationSample = tuple[int, int, int]
"""What one process did in one of the driver's sampling periods: process ID, microseconds of the node's clock as the
driver stamps it, SM share in percent. Plain, because thousands are read."""


class GpmMetrics(msgspec.Struct, frozen=True):
    """Activity between two samples, ratios 0..1; only on Hopper and newer."""

    graphics: float | None = None
    sm: float | None = None
    occupancy: float | None = None
    tensor: float | None = None
    dram: float | None = None
