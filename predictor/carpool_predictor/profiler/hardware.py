"""A real GPU for the profiler: NVML for measurements, worker processes with PyTorch, and an MPS daemon.

Only the fake of this interface was tested; it never ran on hardware.
"""

import contextlib
import importlib.metadata
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec
import pynvml
from carpool_core.values import MIB

from carpool_predictor.profiler.machine import Activity, Description, Failed, Process, Reply, Sample, Workload

WORKER = (sys.executable, "-W", "ignore", "-m", "carpool_predictor.profiler.worker")
MPS_CONTROL = "nvidia-cuda-mps-control"
_ENDING_S = 10.0

_REPLIES = msgspec.json.Decoder(Reply)


class WorkerProcess:
    """One worker process, started early so that it has imported PyTorch when its task comes.

    Args:
        command: Command line of the worker.
    """

    def __init__(self, command: tuple[str, ...] = WORKER) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (`stop` closes it)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid

    def give(self, workload: Workload, environment: dict[str, str]) -> None:
        """Send the task."""
        self._send({"workload": msgspec.to_builtins(workload), "environment": environment})

    def run(self, seconds: float) -> None:
        """Start a run of some seconds."""
        self._send({"seconds": seconds})

    def _send(self, message: object) -> None:
        if self._process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):  # the process ended; `reply` returns the reason
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def reply(self) -> Reply | None:
        """Return the next reply, or the reason why the process ended; None if there is none yet."""
        try:
            reply: Reply = _REPLIES.decode(self._lines.get_nowait())
            return reply
        except queue.Empty:
            if self._process.poll() is None or self._reader.is_alive():
                return None
            return Failed(f"the process ended with code {self._process.returncode}: {self._last_error()}")

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    def stop(self) -> None:
        """End it, and wait until its memory is free."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._reader.join(_ENDING_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


class Refused:
    """A process that could not be started."""

    pid = 0

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def run(self, seconds: float) -> None:
        """Do nothing."""

    def reply(self) -> Reply | None:
        """Return the reason."""
        return Failed(self._reason)

    def stop(self) -> None:
        """Do nothing."""


class MpsDaemon:
    """The profiler's MPS daemon.

    Args:
        directory: Directory of its pipe and log.
        gpu: UUID of the GPU.
        program: Path of nvidia-cuda-mps-control.
    """

    def __init__(self, directory: Path, gpu: str, program: str = MPS_CONTROL) -> None:
        self._program = program
        self._environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(directory / "log"),
            "CUDA_VISIBLE_DEVICES": gpu,
        }
        self._running = False

    def environment(self) -> dict[str, str]:
        """Start the daemon if needed, and return its clients' environment variables.

        Raises:
            OSError: It cannot be started; the message says why.
        """
        if not self._running:
            for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
                Path(self._environment[name]).mkdir(parents=True, exist_ok=True)
            try:
                self._tell(["-d"])
            except (OSError, subprocess.SubprocessError) as e:
                raise OSError(f"expected {self._program} to start, as NVIDIA's driver brings it: {e}") from e
            self._running = True
        return {"CUDA_MPS_PIPE_DIRECTORY": self._environment["CUDA_MPS_PIPE_DIRECTORY"]}

    def stop(self) -> None:
        """End the daemon."""
        if self._running:
            self._tell([], b"quit\n")
            self._running = False

    def _tell(self, arguments: list[str], text: bytes = b"") -> None:
        subprocess.run(
            [self._program, *arguments],
            input=text,
            env={**os.environ, **self._environment},
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
    """There is no usable GPU; the message says why."""


class NvmlMachine:
    """One GPU of this machine.

    Args:
        index: Its NVML index.
        library: NVIDIA's bindings of NVML.
        worker: Starts a process that waits for a task.

    Raises:
        HardwareError: NVML or the GPU is missing.
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
        """Return the description of the GPU and its software."""
        cuda = int(self._nvml.nvmlSystemGetCudaDriverVersion())
        return Description(
            product=str(self._nvml.nvmlDeviceGetName(self._handle)),
            memory_mib=int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total) // MIB,
            driver=str(self._nvml.nvmlSystemGetDriverVersion()),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            torch=importlib.metadata.version("torch"),
        )

    def start(self, workload: Workload, *, mps: bool) -> Process:
        """Give the task to the process in reserve, and start another one."""
        # A client without its own daemon must not connect to a foreign one.
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
