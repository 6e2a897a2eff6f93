"""A real GPU behind the profiler's port: NVML for what it does, processes with PyTorch for what it is given to do.

This never ran on hardware: it was written after NVIDIA's documentation, and only the port's fake was measured.
"""

import importlib.metadata
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pynvml
from carpool_core.values import MIB

from carpool_predictor.profiler.ports import Activity, Description, Process, Sample, Workload
from carpool_predictor.profiler.processes import MpsDaemon, Refused, WorkerProcess

_METRICS = (
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
)


class HardwareError(RuntimeError):
    """There is no usable GPU; the message says why."""


class NvmlMachine:
    """One GPU of this machine.

    Args:
        index: Its number, by NVML.
        library: NVIDIA's bindings of NVML.
        worker: Starts a process that waits for a task.

    Raises:
        HardwareError: NVML or the GPU is not there.
    """

    def __init__(self, index: int, library: Any = pynvml, worker: Callable[[], WorkerProcess] = WorkerProcess) -> None:
        self._nvml, self._worker = library, worker
        try:
            library.nvmlInit()
            self._handle = library.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as e:
            raise HardwareError(f"expected GPU {index} behind NVML, found {e}; is NVIDIA's driver installed?") from e
        self._uuid = str(library.nvmlDeviceGetUUID(self._handle))
        self._directory = tempfile.TemporaryDirectory(prefix="carpool-profile-")
        self._mps = MpsDaemon(Path(self._directory.name) / "mps", self._uuid)
        self._spare = worker()
        self._has_gpm = self._supports_gpm()
        self._before: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spare.stop()
        self._mps.stop()
        self._nvml.nvmlShutdown()
        self._directory.cleanup()

    def _supports_gpm(self) -> bool:
        try:
            return bool(self._nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice)
        except pynvml.NVMLError:
            return False

    def describe(self) -> Description:
        """Say what this is."""
        cuda = int(self._nvml.nvmlSystemGetCudaDriverVersion())
        return Description(
            product=str(self._nvml.nvmlDeviceGetName(self._handle)),
            memory_mib=int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total) // MIB,
            driver=str(self._nvml.nvmlSystemGetDriverVersion()),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            torch=importlib.metadata.version("torch"),
        )

    def start(self, workload: Workload, *, mps: bool) -> Process:
        """Give the task to the process in reserve, and put another one there."""
        # A client without a daemon of its own must not find one that somebody else runs.
        environment = {"CUDA_VISIBLE_DEVICES": self._uuid, "CUDA_MPS_PIPE_DIRECTORY": f"{self._directory.name}/none"}
        if mps:
            try:
                environment |= self._mps.environment()
            except OSError as e:
                return Refused(str(e))
        process, self._spare = self._spare, self._worker()
        process.give(workload, environment)
        return process

    def sample(self) -> Sample:
        """Ask NVML."""
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return Sample(
            gpu_util_percent=float(rates.gpu),
            memory_used_mib=self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used / MIB,
            power_w=self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
            process_mib={p.pid: p.usedGpuMemory / MIB for p in running if p.usedGpuMemory is not None},
        )

    def begin_activity(self) -> None:
        """Take GPM's first sample."""
        if self._has_gpm:
            self._before = self._nvml.nvmlGpmSampleGet(self._handle, self._nvml.nvmlGpmSampleAlloc())

    def end_activity(self) -> Activity | None:
        """Take the second one, and compare."""
        if self._before is None:
            return None
        before, self._before = self._before, None
        after = self._nvml.nvmlGpmSampleGet(self._handle, self._nvml.nvmlGpmSampleAlloc())
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_METRICS)
        request.sample1, request.sample2 = before, after
        for number, metric in enumerate(_METRICS):
            request.metrics[number].metricId = metric
        try:
            self._nvml.nvmlGpmMetricsGet(request)
            found = [request.metrics[number] for number in range(len(_METRICS))]
        finally:
            self._nvml.nvmlGpmSampleFree(before)
            self._nvml.nvmlGpmSampleFree(after)
        if any(metric.nvmlReturn != pynvml.NVML_SUCCESS for metric in found):
            return None
        return Activity(*(float(metric.value) / 100 for metric in found))

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def monotonic(self) -> float:
        """Seconds since the machine started."""
        return time.monotonic()
