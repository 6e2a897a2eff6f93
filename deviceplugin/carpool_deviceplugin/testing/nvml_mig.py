"""MIG of one GPU in memory, with the rules of placements."""

import uuid as uuids
from dataclasses import dataclass, field
from typing import Any

import pynvml

from carpool_deviceplugin.mig.profiles import MigTable, Profile
from carpool_deviceplugin.testing.nvml_hardware import Hardware

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
        self.busy: set[int] = set()
        """Instances with processes."""
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
        if self.instances:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
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
            whole = p.compute_slices == 4 and p.memory_slices == 4
            if slices == (p.compute_slices, p.memory_slices, p.has_media) or (whole and slices == (4, 4, False)):
                info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
                info.id, info.sliceCount, info.instanceCount = p.id, p.compute_slices, len(p.starts)
                info.multiprocessorCount, info.memorySizeMB = p.sm_count, p.memory_mib
                info.name = f"MIG {p.name}".encode()
                return info
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def create(self, profile_id: int, start: int, size: int) -> FakeInstance:
        """Create an instance at a place."""
        profile = self.profile(profile_id)
        if start not in profile.starts or size != profile.memory_slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for other in self.instances.values():
            overlaps = start < other.start + other.profile.memory_slices and other.start < start + size
            if overlaps or (profile.has_media and other.profile.has_media):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
        number = _FIRST_ID[profile.compute_slices]
        while number in self.instances:
            number += 1
        self.instances[number] = made = FakeInstance(number, profile, start)
        return made

    def must_exist(self, made: FakeInstance) -> None:
        """Refuse an instance that is gone."""
        if self.instances.get(made.id) is not made:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def destroy(self, made: FakeInstance) -> None:
        """Destroy an instance that has no compute instances."""
        self.must_exist(made)
        if made.compute:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
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
        if taken + _COMPUTE_SLICES[profile_id] > made.profile.compute_slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
        self._made += 1
        name = f"MIG-{uuids.uuid5(uuids.NAMESPACE_OID, f'{id(self)}/{self._made}')}"
        number = max(made.compute, default=-1) + 1
        made.compute[number] = compute = FakeCompute(number, profile_id, made.id, name)
        return compute

    def destroy_compute(self, made: FakeInstance, compute: FakeCompute) -> None:
        """Destroy a compute instance that nobody uses."""
        self.must_exist(made)
        if made.id in self.busy:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
        del made.compute[compute.id]

    def device_at(self, index: int) -> FakeCompute:
        """Return the MIG device of an index."""
        devices = [c for made in self.instances.values() for c in made.compute.values()]
        if index >= len(devices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return devices[index]
