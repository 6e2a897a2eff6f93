"""A real GPU for the profiler: NVML for measurements, worker processes with PyTorch, and an MPS daemon.

It ran on one H100; its tests use a fake of NVML.
"""

import contextlib
import importlib.metadata
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import pynvml
from carpool_core.values import MIB

from carpool_predictor.profiler.machine import Activity, Description, Failed, Process, Reply, Sample, Workload

MPS_CONTROL = "nvidia-cuda-mps-control"
_ENDING_S = 10.0
_CONTEXT = multiprocessing.get_context("forkserver")
"""A process that has imported PyTorch, and nothing of CUDA, forks the workers: a group of them starts at once."""
_CONTEXT.set_forkserver_preload(["carpool_predictor.profiler.worker"])


def _work(connection: Connection) -> None:
    from carpool_predictor.profiler import worker

    worker.serve(connection)


class WorkerProcess:
    """One worker process."""

    def __init__(self, target: Callable[[Connection], None] = _work) -> None:
        self._connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=target, args=(theirs,))
        self._process.start()
        theirs.close()  # otherwise the pipe would not end with the process

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid or 0

    def give(self, workload: Workload, environment: dict[str, str]) -> None:
        """Send the task, with environment variables that must be set before CUDA starts."""
        self._send((workload, environment))

    def run(self, seconds: float) -> None:
        """Start a run of some seconds."""
        self._send(seconds)

    def _send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process ended; `reply` returns the reason
            self._connection.send(message)

    def reply(self) -> Reply | None:
        """Return the next reply, or the reason why the process ended; None if there is none yet."""
        try:
            reply: Reply | None = self._connection.recv() if self._connection.poll() else None
        except (EOFError, ConnectionResetError):
            self._process.join()
            return Failed(f"the process ended with code {self._process.exitcode}")
        return reply

    def stop(self) -> None:
        """End it, and wait until its memory is free."""
        self._process.kill()
        self._process.join()
        self._connection.close()


class MpsDaemon:
    """The profiler's MPS daemon of one GPU; the directory receives its pipe and log."""

    def __init__(self, directory: Path, gpu: str, program: str = MPS_CONTROL) -> None:
        self._program, self._gpu = program, gpu
        self._pipe, self._log = directory / "pipe", directory / "log"
        self._running = False

    def environment(self) -> dict[str, str]:
        """Start the daemon if needed, and return its clients' environment variables.

        Raises:
            OSError: It cannot be started; the message gives the reason.
        """
        if not self._running:
            for folder in (self._pipe, self._log):
                folder.mkdir(parents=True, exist_ok=True)
            try:
                self._control("-d")
            except (OSError, subprocess.SubprocessError) as e:
                raise OSError(f"expected {self._program} to start, which NVIDIA's driver installs: {e}") from e
            self._running = True
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self._pipe)}

    def stop(self) -> None:
        """End the daemon."""
        if self._running:
            self._control(text=b"quit\n")
            self._running = False

    def _control(self, *arguments: str, text: bytes = b"") -> None:
        folders = {"CUDA_MPS_PIPE_DIRECTORY": str(self._pipe), "CUDA_MPS_LOG_DIRECTORY": str(self._log)}
        subprocess.run(
            [self._program, *arguments],
            input=text,
            env={**os.environ, **folders, "CUDA_VISIBLE_DEVICES": self._gpu},
            check=True,
            capture_output=True,
            timeout=_ENDING_S,
        )


_METRICS = (
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
)


class HardwareError(RuntimeError):
    """There is no usable GPU; the message gives the reason."""


class NvmlMachine:
    """One GPU of this machine, by its NVML index; raises HardwareError without NVML or the GPU."""

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
        self._has_gpm = self._supports_gpm()
        self._before: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mps.stop()
        self._nvml.nvmlShutdown()
        self._directory.cleanup()

    def _supports_gpm(self) -> bool:
        try:
            return bool(self._nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice)
        except pynvml.NVMLError:
            return False

    def describe(self) -> Description:
        """Return the description of the GPU and its software."""
        cuda = int(self._nvml.nvmlSystemGetCudaDriverVersion())
        return Description(
            product=str(self._nvml.nvmlDeviceGetName(self._handle)),
            capacity_mib=int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total) // MIB,
            driver=str(self._nvml.nvmlSystemGetDriverVersion()),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            torch=importlib.metadata.version("torch"),
        )

    def start(self, workload: Workload, *, mps: bool) -> Process:
        """Start a process with the task; raises OSError without an MPS daemon."""
        # A client without its own daemon must not connect to a foreign one.
        environment = {"CUDA_VISIBLE_DEVICES": self._uuid, "CUDA_MPS_PIPE_DIRECTORY": f"{self._directory.name}/none"}
        if mps:
            environment |= self._mps.environment()
        process = self._worker()
        process.give(workload, environment)
        return process

    def sample(self) -> Sample:
        """Return NVML's current values."""
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return Sample(
            gpu_util_percent=float(rates.gpu),
            memory_used_mib=self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used / MIB,
            power_w=self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
            process_mib={p.pid: p.usedGpuMemory / MIB for p in running if p.usedGpuMemory is not None},
        )

    def begin_activity(self) -> None:
        """Take the first GPM sample."""
        if self._has_gpm:
            self._before = self._nvml.nvmlGpmSampleGet(self._handle, self._nvml.nvmlGpmSampleAlloc())

    def end_activity(self) -> Activity | None:
        """Return the activity since the first GPM sample."""
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
