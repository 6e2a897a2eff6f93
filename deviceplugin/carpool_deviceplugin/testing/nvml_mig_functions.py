"""MIG as NVML's functions take and return it; the rules stand in FakeMig."""

from typing import Any

import pynvml

from carpool_deviceplugin.testing.nvml_calls import Calls
from carpool_deviceplugin.testing.nvml_gpus import FakeGpu
from carpool_deviceplugin.testing.nvml_mig import FakeMig


class MigFunctions(Calls):
    """The part of the fake library that divides GPUs."""

    def _mig(self, name: str, handle: Any, *, enabled: bool = True) -> tuple[FakeGpu, FakeMig]:
        gpu = self._gpu(name, handle)
        if gpu.mig.table is None or (enabled and not gpu.mig.is_enabled):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu, gpu.mig

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        _, mig = self._mig("nvmlDeviceGetMigMode", handle, enabled=False)
        return [int(mig.is_enabled), int(mig.is_pending)]

    def nvmlDeviceSetMigMode(self, handle: Any, mode: int) -> int:
        gpu, mig = self._mig("nvmlDeviceSetMigMode", handle, enabled=False)
        was = mig.is_enabled
        status = mig.switch(bool(mode), in_use=bool(gpu.processes))
        if mig.is_enabled != was and gpu.hardware.mig_needs_reset:
            self._reset(gpu)
        return status

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        gpu = self._gpu("nvmlDeviceGetMaxMigDeviceCount", handle)
        return gpu.mig.most if gpu.mig.is_enabled else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        _, mig = self._mig("nvmlDeviceGetMigDeviceHandleByIndex", handle)
        return self._pointer(mig.device_at(index), pynvml.c_nvmlDevice_t)

    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int:
        self._enter("nvmlDeviceGetGpuInstanceId")
        return int(self._object(handle).instance_id)

    def nvmlDeviceGetComputeInstanceId(self, handle: Any) -> int:
        self._enter("nvmlDeviceGetComputeInstanceId")
        return int(self._object(handle).id)

    def nvmlDeviceGetGpuInstanceProfileInfo(self, handle: Any, profile: int, version: int = 2) -> Any:
        _, mig = self._mig("nvmlDeviceGetGpuInstanceProfileInfo", handle, enabled=False)
        return mig.profile_info(profile)

    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, handle: Any, profile_id: int, placements: Any, count: Any
    ) -> int:
        _, mig = self._mig("nvmlDeviceGetGpuInstancePossiblePlacements", handle, enabled=False)
        profile = mig.profile(profile_id)
        for i, start in enumerate(profile.starts):
            placements[i].start, placements[i].size = start, profile.memory_slices
        count._obj.value = len(profile.starts)
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstances(self, handle: Any, profile_id: int, instances: Any, count: Any) -> int:
        _, mig = self._mig("nvmlDeviceGetGpuInstances", handle)
        found = [made for made in mig.instances.values() if made.profile.id == profile_id]
        for i, made in enumerate(found):
            instances[i] = self._pointer((mig, made), pynvml.c_nvmlGpuInstance_t)
        count._obj.value = len(found)
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceGetInfo(self, instance: Any) -> Any:
        self._enter("nvmlGpuInstanceGetInfo")
        mig, made = self._object(instance)
        mig.must_exist(made)
        place = pynvml.c_nvmlGpuInstancePlacement_t(made.start, made.profile.memory_slices)
        return pynvml.c_nvmlGpuInstanceInfo_t(id=made.id, profileId=made.profile.id, placement=place)

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, handle: Any, profile_id: int, placement: Any) -> Any:
        _, mig = self._mig("nvmlDeviceCreateGpuInstanceWithPlacement", handle)
        made = mig.create(profile_id, placement._obj.start, placement._obj.size)
        return self._pointer((mig, made), pynvml.c_nvmlGpuInstance_t)

    def nvmlGpuInstanceDestroy(self, instance: Any) -> int:
        self._enter("nvmlGpuInstanceDestroy")
        mig, made = self._object(instance)
        mig.destroy(made)
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, instance: Any, profile: int, engine_profile: int, version: int = 2
    ) -> Any:
        self._enter("nvmlGpuInstanceGetComputeInstanceProfileInfo")
        mig, made = self._object(instance)
        return mig.compute_profile_info(made, profile)

    def nvmlGpuInstanceCreateComputeInstance(self, instance: Any, profile_id: int) -> Any:
        self._enter("nvmlGpuInstanceCreateComputeInstance")
        mig, made = self._object(instance)
        return self._pointer((mig, made, mig.create_compute(made, profile_id)), pynvml.c_nvmlComputeInstance_t)

    def nvmlGpuInstanceGetComputeInstances(self, instance: Any, profile_id: int, instances: Any, count: Any) -> int:
        self._enter("nvmlGpuInstanceGetComputeInstances")
        mig, made = self._object(instance)
        found = [c for c in made.compute.values() if c.profile_id == profile_id]
        for i, compute in enumerate(found):
            instances[i] = self._pointer((mig, made, compute), pynvml.c_nvmlComputeInstance_t)
        count._obj.value = len(found)
        return int(pynvml.NVML_SUCCESS)

    def nvmlComputeInstanceDestroy(self, instance: Any) -> int:
        self._enter("nvmlComputeInstanceDestroy")
        mig, made, compute = self._object(instance)
        mig.destroy_compute(made, compute)
        return int(pynvml.NVML_SUCCESS)
