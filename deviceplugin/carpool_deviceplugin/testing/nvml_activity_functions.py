"""GPM: samples of activity, and what happened between two of them."""

from typing import Any

import pynvml

from carpool_deviceplugin.testing.nvml_calls import Calls, key_of
from carpool_deviceplugin.testing.nvml_gpus import FakeGpu


class ActivityFunctions(Calls):
    """The part of the fake library that takes samples."""

    def nvmlGpmQueryDeviceSupport(self, handle: Any) -> Any:
        gpu = self._gpu("nvmlGpmQueryDeviceSupport", handle)
        return pynvml.c_nvmlGpmSupport_t(version=1, isSupportedDevice=int(gpu.hardware.has_gpm))

    def nvmlGpmSampleAlloc(self) -> Any:
        self._enter("nvmlGpmSampleAlloc")
        return self._pointer([0.0] * 6, pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self._enter("nvmlGpmSampleFree")
        self._object(sample)
        del self._objects[key_of(sample)]

    def nvmlGpmSampleGet(self, handle: Any, sample: Any) -> Any:
        return self._gpm(self._gpu("nvmlGpmSampleGet", handle), None, sample)

    def nvmlGpmMigSampleGet(self, handle: Any, instance: int, sample: Any) -> Any:
        gpu = self._gpu("nvmlGpmMigSampleGet", handle)
        if instance not in gpu.mig.instances:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._gpm(gpu, instance, sample)

    def _gpm(self, gpu: FakeGpu, instance: int | None, sample: Any) -> Any:
        if not gpu.hardware.has_gpm:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._object(sample)[:] = gpu.integrals.get(instance, [0.0] * 6)
        return sample

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        self._enter("nvmlGpmMetricsGet")
        before, now = self._object(request.sample1), self._object(request.sample2)
        places = {
            pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: 1,
            pynvml.NVML_GPM_METRIC_SM_UTIL: 2,
            pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: 3,
            pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 4,
            pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 5,
        }
        elapsed = now[0] - before[0]
        for i in range(request.numMetrics):
            at = places[request.metrics[i].metricId]
            request.metrics[i].nvmlReturn = pynvml.NVML_SUCCESS if elapsed > 0 else pynvml.NVML_ERROR_NO_DATA
            request.metrics[i].value = 100 * (now[at] - before[at]) / elapsed if elapsed > 0 else 0.0
        return request
