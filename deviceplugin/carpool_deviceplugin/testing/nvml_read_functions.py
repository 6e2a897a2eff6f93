"""What a GPU is and does, as NVML's functions say it."""

from typing import Any

import pynvml
from carpool_core.values import MIB

from carpool_deviceplugin.testing.nvml_calls import Calls
from carpool_deviceplugin.testing.nvml_event_functions import NONE
from carpool_deviceplugin.testing.nvml_gpus import FakeGpu
from carpool_deviceplugin.testing.nvml_mig import FakeCompute


class ReadFunctions(Calls):
    """The part of the fake library that only reads."""

    def nvmlDeviceGetIndex(self, handle: Any) -> int:
        return self._gpu("nvmlDeviceGetIndex", handle).index

    def nvmlDeviceGetMinorNumber(self, handle: Any) -> int:
        return self._gpu("nvmlDeviceGetMinorNumber", handle).index

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return self._gpu("nvmlDeviceGetName", handle).hardware.product

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        gpu = self._gpu("nvmlDeviceGetMemoryInfo", handle)
        found = self._object(handle)
        if isinstance(found, FakeCompute):
            return _memory_of_part(gpu, found)
        total, reserved = gpu.hardware.memory_mib * MIB, gpu.hardware.reserved_mib * MIB
        used = gpu.used_mib * MIB
        if version is None:  # the first version counts what is reserved as used
            return pynvml.c_nvmlMemory_t(total=total, free=total - used - reserved, used=used + reserved)
        return pynvml.c_nvmlMemory_v2_t(
            version=version, total=total, reserved=reserved, free=total - used - reserved, used=used
        )

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        return self._gpu("nvmlDeviceGetCudaComputeCapability", handle).hardware.compute_capability

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        gpu = self._gpu("nvmlDeviceGetPciInfo", handle)
        return pynvml.nvmlPciInfo_t(busId=f"00000000:{0x10 + gpu.index:02X}:00.0".encode(), bus=0x10 + gpu.index)

    def nvmlDeviceGetNumaNodeId(self, handle: Any) -> int:
        return self._gpu("nvmlDeviceGetNumaNodeId", handle).index // 4

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:
        gpu = self._gpu("nvmlDeviceGetNvLinkState", handle)
        if not gpu.hardware.nvlinks:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if link >= gpu.hardware.nvlinks:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(len(self.gpus) > 1)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Any, link: int) -> Any:
        gpu = self._gpu("nvmlDeviceGetNvLinkRemotePciInfo", handle)
        others = [g for g in self.gpus if g is not gpu]
        return pynvml.nvmlPciInfo_t(busId=f"00000000:{0x10 + others[link % len(others)].index:02X}:00.0".encode())

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        gpu = self._gpu("nvmlDeviceGetComputeRunningProcesses", handle)
        return [
            pynvml.nvmlFriendlyObject(
                {
                    "pid": p.pid,
                    "usedGpuMemory": p.memory_mib * MIB,
                    "gpuInstanceId": NONE if p.instance is None else p.instance,
                    "computeInstanceId": NONE if p.instance is None else 0,
                }
            )
            for p in gpu.processes.values()
        ]

    def nvmlDeviceGetProcessUtilization(self, handle: Any, since_us: int) -> list[Any]:
        gpu = self._gpu("nvmlDeviceGetProcessUtilization", handle)
        if gpu.mig.is_enabled:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        found = [s for s in gpu.samples if s.timeStamp > since_us]
        if not found:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        unfilled = pynvml.c_nvmlProcessUtilizationSample_t()
        return [*found, unfilled]

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        gpu = self._gpu("nvmlDeviceGetUtilizationRates", handle)
        if gpu.mig.is_enabled:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        busy = min(1.0, sum(p.sm for p in gpu.processes.values()))
        memory = min(1.0, sum(p.dram for p in gpu.processes.values()))
        return pynvml.c_nvmlUtilization_t(gpu=round(100 * busy), memory=round(100 * memory))

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return round(1000 * self._gpu("nvmlDeviceGetPowerUsage", handle).power_w)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        return 1000 * self._gpu("nvmlDeviceGetEnforcedPowerLimit", handle).hardware.power_limit_w

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        return int(self._gpu("nvmlDeviceGetTotalEnergyConsumption", handle).energy_mj)

    def nvmlDeviceGetClockInfo(self, handle: Any, type_: int) -> int:
        self._gpu("nvmlDeviceGetClockInfo", handle)
        return 1410 if type_ == pynvml.NVML_CLOCK_SM else 1215

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return self._gpu("nvmlDeviceGetTemperature", handle).temperature_c

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self._gpu("nvmlDeviceGetCurrentClocksEventReasons", handle).clock_reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, error: int, counter: int) -> int:
        gpu = self._gpu("nvmlDeviceGetTotalEccErrors", handle)
        if not gpu.hardware.has_ecc:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.ecc_uncorrectable if error == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else 0

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, int, int, int]:
        gpu = self._gpu("nvmlDeviceGetRemappedRows", handle)
        if not gpu.hardware.has_row_remap:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.remap


def _memory_of_part(gpu: FakeGpu, compute: FakeCompute) -> Any:
    total = gpu.mig.instances[compute.instance_id].profile.memory_mib * MIB
    used = sum(p.memory_mib for p in gpu.processes.values() if p.instance == compute.instance_id) * MIB
    return pynvml.c_nvmlMemory_t(total=total, free=total - used, used=used)
