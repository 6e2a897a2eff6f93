"""GPUs as NVML shows them, for the fake. Figures of NVIDIA's datasheets and of `nvidia-smi -q` on such machines."""

from dataclasses import dataclass

from carpool_deviceplugin.mig.profiles import MigTable
from carpool_deviceplugin.testing.mig_tables import A30, A100_40, A100_80, H100_80, H200


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one kind of GPU has and can say."""

    product: str
    memory_mib: int
    reserved_mib: int
    compute_capability: tuple[int, int]
    power_limit_w: int
    idle_w: int
    mig: MigTable | None = None
    mig_needs_reset: bool = True
    """Ampere takes a reset to switch MIG on or off, Hopper does not."""
    has_gpm: bool = False
    has_ecc: bool = True
    has_row_remap: bool = True
    """Ampere's data-centre GPUs and newer."""
    nvlinks: int = 0


HARDWARE = {
    "A100-40": Hardware("NVIDIA A100-SXM4-40GB", 40960, 624, (8, 0), 400, 50, A100_40, nvlinks=12),
    "A100-80": Hardware("NVIDIA A100-SXM4-80GB", 81920, 722, (8, 0), 400, 55, A100_80, nvlinks=12),
    "A30": Hardware("NVIDIA A30", 24576, 512, (8, 0), 165, 30, A30, nvlinks=4),
    "H100": Hardware(
        "NVIDIA H100 80GB HBM3", 81559, 551, (9, 0), 700, 70, H100_80, mig_needs_reset=False, has_gpm=True, nvlinks=18
    ),
    "H200": Hardware(
        "NVIDIA H200", 143771, 629, (9, 0), 700, 75, H200, mig_needs_reset=False, has_gpm=True, nvlinks=18
    ),
    "L4": Hardware("NVIDIA L4", 23034, 563, (8, 9), 72, 16),
    "T4": Hardware("Tesla T4", 15360, 430, (7, 5), 70, 10, has_row_remap=False),
    "V100": Hardware("Tesla V100-SXM2-16GB", 16384, 224, (7, 0), 300, 40, has_row_remap=False, nvlinks=6),
    "RTX4090": Hardware("NVIDIA GeForce RTX 4090", 24564, 412, (8, 9), 450, 20, has_ecc=False, has_row_remap=False),
}
"""By a short name."""
