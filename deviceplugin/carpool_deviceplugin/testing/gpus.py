"""GPUs as NVML shows them, for the fake. Figures of NVIDIA's datasheets and of `nvidia-smi -q` on such machines."""

import uuid as uuids
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pynvml
from carpool_core.resources.node import NO_FIGURES, NvmlFigures

from carpool_deviceplugin.mig import MigTable, Profile

_EVEN, _TWO, _SEVEN = (0, 2, 4, 6), (0, 2, 4), (0, 1, 2, 3, 4, 5, 6)


def _seven(names: Sequence[str], memory_mib: Sequence[int], sm: Sequence[int]) -> MigTable:
    """Eight memory slices and seven compute slices.

    Args:
        names: Of 1g, 1g with double memory, 2g, 3g, 4g, 7g.
        memory_mib: Of the same.
        sm: SMs of 1g, 2g, 3g, 4g, 7g.
    """
    one, one_double, two, three, four, seven = names
    m1, m1d, m2, m3, m4, m7 = memory_mib
    return MigTable(
        8,
        (
            Profile(seven, 0, 7, 8, (0,), m7, sm[4]),
            Profile(four, 5, 4, 4, (0,), m4, sm[3]),
            Profile(three, 9, 3, 4, (0, 4), m3, sm[2]),
            Profile(two, 14, 2, 2, _TWO, m2, sm[1]),
            Profile(one_double, 15, 1, 2, _EVEN, m1d, sm[0]),
            Profile(one, 19, 1, 1, _SEVEN, m1, sm[0]),
            Profile(f"{one}+me", 20, 1, 1, _SEVEN, m1, sm[0], has_media=True),
        ),
    )


_A100_SM, _H100_SM = (14, 28, 42, 56, 98), (16, 32, 60, 64, 132)

A100_40 = _seven(
    ("1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
    (4864, 9984, 9984, 20096, 20096, 40192),
    _A100_SM,
)
_80GB = ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
A100_80 = _seven(_80GB, (9728, 19968, 19968, 40192, 40192, 80640), _A100_SM)
H100_80 = _seven(_80GB, (9984, 20096, 20096, 40448, 40448, 81152), _H100_SM)
H100_PCIE = MigTable(
    8,
    # A GPU of 114 SMs: what takes all of it has no more than those.
    tuple(replace(profile, sm_count=min(profile.sm_count, 114)) for profile in H100_80.profiles),
)
H200 = _seven(
    ("1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),
    (16384, 33280, 33280, 71424, 71424, 143104),
    _H100_SM,
)
A30 = MigTable(
    4,
    (
        Profile("4g.24gb", 0, 4, 4, (0,), 24000, 56),
        Profile("2g.12gb", 5, 2, 2, (0, 2), 11968, 28),
        Profile("2g.12gb+me", 6, 2, 2, (0, 2), 11968, 28, has_media=True),
        Profile("1g.6gb", 14, 1, 1, (0, 1, 2, 3), 5952, 14),
        Profile("1g.6gb+me", 21, 1, 1, (0, 1, 2, 3), 5952, 14, has_media=True),
    ),
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Properties and supported queries of one kind of GPU."""

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
    figures: NvmlFigures = NO_FIGURES
    """Its speed as NVML reports it; 0 is unsupported."""


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

TABLES: Mapping[str, MigTable] = {kind.product: kind.mig for kind in HARDWARE.values() if kind.mig is not None} | {
    "NVIDIA A100-PCIE-40GB": A100_40,
    "NVIDIA A100 80GB PCIe": A100_80,
    "NVIDIA H100 PCIe": H100_PCIE,
}
"""By product, as NVML names it."""


def require(is_fulfilled: object, code: int) -> None:
    """Raise NVML's error with this code unless the condition holds."""
    if not is_fulfilled:
        raise pynvml.NVMLError(code)


_SLICES_OF_INDEX = {
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE: (1, 1, False),
    pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE: (2, 2, False),
    pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE: (3, 4, False),
    pynvml.NVML_GPU_INSTANCE_PROFILE_4_SLICE: (4, 4, False),
    pynvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE: (7, 8, False),
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1: (1, 1, True),
    pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1: (2, 2, True),
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2: (1, 2, False),
}
"""NVML's index of a profile: compute slices, memory slices, media extensions."""

_COMPUTE_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7}
"""Index and ID of a compute instance profile: its slices."""

_FIRST_ID = {7: 0, 4: 1, 3: 1, 2: 3, 1: 7}
"""GPU instance IDs begin here, by compute slices."""


@dataclass
class FakeCompute:
    """A compute instance."""

    id: int
    profile_id: int
    instance_id: int
    uuid: str


@dataclass
class FakeInstance:
    """A GPU instance."""

    id: int
    profile: Profile
    start: int
    compute: dict[int, FakeCompute] = field(default_factory=dict)


class FakeMig:
    """MIG of one GPU."""

    def __init__(self, hardware: Hardware) -> None:
        self.table: MigTable | None = hardware.mig
        self.is_enabled = self.is_pending = False
        self.instances: dict[int, FakeInstance] = {}
        self._needs_reset = hardware.mig_needs_reset
        self.can_reset = True
        """False in a virtual machine with the GPU passed through."""
        self._made = 0

    @property
    def most(self) -> int:
        """How many instances there can be at most."""
        return max((p.compute_slices for p in self.table.profiles), default=0) if self.table else 0

    def switch(self, enabled: bool, *, in_use: bool) -> int:
        """Switch the mode; return NVML's activation status."""
        require(not self.instances, pynvml.NVML_ERROR_IN_USE)
        self.is_pending = enabled
        if in_use:
            return int(pynvml.NVML_ERROR_IN_USE)
        if self._needs_reset and self.is_enabled != enabled and not self.can_reset:
            return int(pynvml.NVML_ERROR_RESET_REQUIRED)
        self.is_enabled = enabled
        return int(pynvml.NVML_SUCCESS)

    def reset(self) -> None:
        """The GPU was reset, or the driver loaded anew: instances are gone, and Hopper forgets its mode."""
        self.is_pending = self.is_pending and self._needs_reset
        self.is_enabled = self.is_pending
        self.instances.clear()

    def profile(self, profile_id: int) -> Profile:
        """Find a profile by its ID."""
        for profile in self.table.profiles if self.table else ():
            if profile.id == profile_id:
                return profile
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def profile_info(self, index: int) -> Any:
        """Describe a profile by NVML's index."""
        slices = _SLICES_OF_INDEX.get(index)
        for p in self.table.profiles if self.table else ():
            if slices == (p.compute_slices, p.memory_slices, p.has_media):
                info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
                info.id, info.sliceCount, info.instanceCount = p.id, p.compute_slices, len(p.starts)
                info.multiprocessorCount, info.memorySizeMB = p.sm_count, p.memory_mib
                info.name = f"MIG {p.name}".encode()
                return info
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def create(self, profile_id: int, start: int, size: int) -> FakeInstance:
        """Create an instance at a place."""
        profile = self.profile(profile_id)
        require(start in profile.starts and size == profile.memory_slices, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for other in self.instances.values():
            overlaps = start < other.start + other.profile.memory_slices and other.start < start + size
            require(
                not overlaps and not (profile.has_media and other.profile.has_media),
                pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES,
            )
        number = _FIRST_ID[profile.compute_slices]
        while number in self.instances:
            number += 1
        self.instances[number] = made = FakeInstance(number, profile, start)
        return made

    def must_exist(self, made: FakeInstance) -> None:
        """Refuse an instance that is gone."""
        require(self.instances.get(made.id) is made, pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def destroy(self, made: FakeInstance) -> None:
        """Destroy an instance that has no compute instances."""
        self.must_exist(made)
        require(not made.compute, pynvml.NVML_ERROR_IN_USE)
        del self.instances[made.id]

    def compute_profile_info(self, made: FakeInstance, index: int) -> Any:
        """Describe a compute instance profile of an instance."""
        self.must_exist(made)
        slices = _COMPUTE_SLICES.get(index)
        if slices is None or slices > made.profile.compute_slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info = pynvml.c_nvmlComputeInstanceProfileInfo_v2_t()
        info.id, info.sliceCount = index, slices
        return info

    def create_compute(self, made: FakeInstance, profile_id: int) -> FakeCompute:
        """Create a compute instance."""
        self.must_exist(made)
        taken = sum(_COMPUTE_SLICES[c.profile_id] for c in made.compute.values())
        require(
            taken + _COMPUTE_SLICES[profile_id] <= made.profile.compute_slices, pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
        )
        self._made += 1
        name = f"MIG-{uuids.uuid5(uuids.NAMESPACE_OID, f'{id(self)}/{self._made}')}"
        number = max(made.compute, default=-1) + 1
        made.compute[number] = compute = FakeCompute(number, profile_id, made.id, name)
        return compute

    def destroy_compute(self, made: FakeInstance, compute: FakeCompute) -> None:
        """Destroy a compute instance."""
        self.must_exist(made)
        del made.compute[compute.id]

    def device_at(self, index: int) -> FakeCompute:
        """Return the MIG device of an index."""
        devices = [c for made in self.instances.values() for c in made.compute.values()]
        require(index < len(devices), pynvml.NVML_ERROR_NOT_FOUND)
        return devices[index]


@dataclass
class FakeProcess:
    """A process with a context on a GPU, and the activity of its kernels."""

    pid: int
    memory_mib: int
    instance: int | None = None
    sm: float = 0.0
    """Share of the sampling period in which its kernels run."""
    dram: float = 0.0


@dataclass
class FakeGpu:
    """One GPU."""

    hardware: Hardware
    uuid: str
    index: int
    mig: FakeMig
    processes: dict[int, FakeProcess] = field(default_factory=dict)
    energy_mj: float = 0.0
    is_lost: bool = False
    compute_mode: int = 0
    """NVML's compute mode; 0 is Default."""
    is_persistent: bool = True
    graphics_pids: list[int] = field(default_factory=list)
    is_stuck: bool = False
    """It reports full utilization, and draws idle power."""
    ecc_uncorrectable: int = 0
    remap: tuple[int, int, int, int] = (0, 0, 0, 0)
    clock_reasons: int = 0
    temperature_c: int = 40
    leaked_mib: int = 0
    """Memory in use that no process has."""
    samples: deque[tuple[int, dict[int, tuple[float, float]]]] = field(default_factory=lambda: deque(maxlen=72))
    """The driver's last sampling periods: stamp, and the processes' shares of the time and of the DRAM's bandwidth.

    The driver assigns a period to the process that is active at its end; here each active process has its share."""
    integrals: dict[int | None, list[float]] = field(default_factory=dict)
    """Seconds of time, graphics, SM, occupancy, tensor and DRAM activity, of the GPU and of its instances."""

    @property
    def power_w(self) -> float:
        """Idle power plus the power of the processes."""
        busy = 0.0 if self.is_stuck else min(1.0, sum(p.sm for p in self.processes.values()))
        return self.hardware.idle_w + busy * (self.hardware.power_limit_w - self.hardware.idle_w)

    @property
    def used_mib(self) -> int:
        """Memory in use beside the reserved."""
        return self.leaked_mib + sum(p.memory_mib for p in self.processes.values())
