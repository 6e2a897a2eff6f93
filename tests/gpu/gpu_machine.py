"""The machine of the GPU tests: real processes in pods' cgroups, on a GPU that nothing else uses."""

import json
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid as uuids
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid, SharingMode
from carpool_deviceplugin import cdi
from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.check import FailedError, SkippedError, prepare
from carpool_deviceplugin.dcgm import CounterSource
from carpool_deviceplugin.mps import Mps, MpsProgram
from carpool_deviceplugin.nvlib import NvmlLibrary
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.processes import Process, ProcTree


class Kind(StrEnum):
    """Work of a process on the GPU."""

    TRAIN = "train"
    """Trains a small network, step after step."""
    PRODUCT = "product"
    """Multiplies two bf16 matrices of 8192 x 8192, again and again: a kernel that fills every GPU."""
    BLOCK = "block"
    """Runs kernels of a single block: one SM is busy, and no other."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Where something is tried."""

    machine: Any
    gpu: GpuUuid


LOAD = Path(__file__).with_name("load.py")
_CGROUPS = Path("/sys/fs/cgroup")
_SHARED = 'mount --bind "$1" /dev/shm && shift && exec "$@"'
"""Gives a client the /dev/shm of its daemon, as its container's mounts would."""
_ENDS_WITHIN_S = 10.0


class Attributed(ProcTree):
    """The node's processes; those of the battery belong to its made-up pods, whatever their cgroup."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        super().__init__(root)
        self.pods: dict[int, PodUid] = {}

    def find(self, pid: int, known: Process | None = None) -> Process | None:
        """Look a process up."""
        found = super().find(pid, known)
        if found is None or found.pod_uid is not None or pid not in self.pods:
            return found
        return Process(found.pid, found.started, found.name, self.pods[pid])


class ProcessLoad:
    """A process of `load.py`.

    Args:
        command: What to start.
        environment: All that it gets.
        pod_uid: The pod that it counts for.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], pod_uid: PodUid) -> None:
        self.pod_uid = pod_uid
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `stop` closes it
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._steps, self._ended = 0, ""

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self._process.pid

    def _listen(self) -> None:
        while not self._lines.empty():
            try:
                report = json.loads(self._lines.get())
            except ValueError:
                continue  # what a library printed
            self._steps, self._ended = report.get("steps", self._steps), report.get("ended", self._ended)

    def steps(self) -> int:
        """How many steps it has made."""
        self._listen()
        return self._steps

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        if self._process.poll() is None:
            return None
        self._reader.join(_ENDS_WITHIN_S)
        self._listen()
        return self._ended or f"code {self._process.returncode}: {self._last_error()}"

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"

    def take(self, mib: int) -> None:
        """Let it take more memory."""
        self._tell(f"take {mib}")

    def fault(self) -> None:
        """Let it write to an illegal address, which ends all clients of its MPS server."""
        self._tell("fault")

    def fail_assertion(self) -> None:
        """Let it fail an assertion in a kernel, which ends itself."""
        self._tell("assert")

    def _tell(self, word: str) -> None:
        if self._process.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended or was stopped; `ended` has the reason
                self._process.stdin.write(f"{word}\n".encode())
                self._process.stdin.flush()

    def stop(self) -> None:
        """End it."""
        self._tell("stop")
        try:
            self._process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_ENDS_WITHIN_S)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


class RealMachine:
    """This machine.

    Args:
        library: NVML.
        directory: Of its own, for the agent's state and the MPS daemons.
        python: An interpreter with PyTorch.
        sources: Who else measures the GPUs.
        cdi: NVIDIA's CDI specifications.
        cgroups: Where cgroups are made.

    Raises:
        NoDevicesError: There is no driver, or it may not be used.
    """

    def __init__(
        self,
        library: NvmlLibrary,
        directory: Path,
        *,
        python: str = sys.executable,
        sources: Sequence[CounterSource] = (),
        cdi: Sequence[Path] = (),
        cgroups: Path = _CGROUPS,
    ) -> None:
        self._python, self._directory, self._cgroups = python, directory, cgroups
        self._is_private = not MpsProgram.problem()
        mps = Mps(MpsProgram(private_shm=self._is_private), directory / "mps") if MpsProgram.is_installed() else None
        self._mps, self._processes = mps, Attributed()
        self._cgroup_of: dict[int, str] = {}
        self._why_no_torch: str | None = None
        self.devices = NvmlDevices(
            library,
            mps=mps,
            cdi=NvidiaCdi(cdi),
            state_dir=directory / "state",
            processes=self._processes,
            sources=sources,
        )

    def pod(self, name: str) -> PodUid:
        """Return the UID of a made-up pod."""
        return PodUid(str(uuids.uuid5(uuids.NAMESPACE_OID, f"{self._directory}/{name}")))

    def start(self, gpu: GpuUuid, kind: Kind, pod: str, environment: Mapping[str, str]) -> ProcessLoad:
        """Start a process."""
        if why := self._no_torch():
            raise SkippedError(f"it takes PyTorch with CUDA in {self._python} (CARPOOL_GPU_PYTHON): {why}")
        command = [self._python, "-W", "ignore", str(LOAD), kind]
        if self._is_private and self._mps is not None and "CUDA_MPS_PIPE_DIRECTORY" in environment:
            shm = str(self._mps.daemon(gpu).shm)
            command = ["unshare", "--mount", "sh", "-c", _SHARED, "client", shm, *command]
        paths = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
        load = ProcessLoad(command, {**paths, **environment}, self.pod(pod))
        self._processes.pods[load.pid] = load.pod_uid
        self._cgroup_of[load.pid] = self._moved(load)
        return load

    def _no_torch(self) -> str:
        """Why the interpreter does not do; empty where it does. Asked once: it takes seconds."""
        if self._why_no_torch is None:
            self._why_no_torch = _lacks_torch(self._python)
        return self._why_no_torch

    def _moved(self, load: ProcessLoad) -> str:
        """Put a process into a pod's cgroup; return why not, or an empty text."""
        directory = self._cgroups / "carpool-gpu-tests" / f"pod{load.pod_uid}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "cgroup.procs").write_text(f"{load.pid}\n")
        except OSError as e:
            return f"{directory}: {e}; run it as root on a node with cgroups of version 2"
        return ""

    def in_cgroup(self, load: object) -> str:
        """Say why a process is not in a pod's cgroup; empty where it is."""
        pid = getattr(load, "pid", 0)
        why = self._cgroup_of.get(pid, "it was not moved there")
        if why:
            return why
        found = ProcTree().find(pid)
        return "" if found is not None and found.pod_uid else "its cgroup names no pod"

    def kill_daemon(self, gpu: GpuUuid) -> None:
        """End a GPU's MPS daemon as a crash would."""
        if self._mps is not None:
            os.kill(int(self._mps.daemon(gpu).record.read_text().split()[0]), signal.SIGKILL)

    def cpu_s(self) -> float:
        """Processor time of this process."""
        return time.process_time()

    def dmon_cpu_s(self, seconds: float) -> float:
        """Processor time of `nvidia-smi dmon`."""
        if shutil.which("nvidia-smi") is None:
            raise SkippedError("nvidia-smi is not on PATH")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(["nvidia-smi", "dmon", "-c", str(round(seconds))], stdout=subprocess.DEVNULL, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def monotonic(self) -> float:
        """Seconds."""
        return time.monotonic()

    def close(self) -> None:
        """Take away the cgroups that were made."""
        for directory in (self._cgroups / "carpool-gpu-tests").glob("pod*"):
            with suppress(OSError):
                directory.rmdir()
        with suppress(OSError):
            (self._cgroups / "carpool-gpu-tests").rmdir()


def _lacks_torch(python: str) -> str:
    asked = [python, "-c", "import torch; assert torch.cuda.is_available(), 'it finds no GPU'"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    return (done.stderr.strip().splitlines() or ["no output"])[-1][:200] if done.returncode else ""


BEGINS_WITHIN_S = 180.0
"""From the start of a process to its first step: PyTorch is imported, CUDA and its libraries begin."""
NOTICED_WITHIN_S = 10.0
"""The agent reads its GPUs every 10 s, and sooner after events."""
LOOK_EVERY_S = 1.0
SM_ACTIVE = "DCGM_FI_PROF_SM_ACTIVE"


def wait_until(trial: Trial, holds: Callable[[], bool], within_s: float, expected: str) -> float:
    """Wait for something; return the seconds that it took. Raises FailedError."""
    machine, began = trial.machine, trial.machine.monotonic()
    while not holds():
        if (waited := machine.monotonic() - began) >= within_s:
            raise FailedError(f"expected {expected} within {within_s:g} s, found it not so after {waited:.0f} s")
        machine.wait(LOOK_EVERY_S)
    return float(machine.monotonic() - began)


def reservation(
    trial: Trial, name: str, mode: SharingMode, *, mib: int | None = None, percent: int | None = None
) -> Reservation:
    """Write down what a made-up pod is promised."""
    return Reservation(
        pod_uid=trial.machine.pod(name),
        pod_namespace="gpu-tests",
        pod_name=name,
        job_uid=JobUid(name),
        job_name=name,
        gpu_uuids=[trial.gpu],
        mode=mode,
        memory_limit_mib=mib,
        thread_percentage=percent,
        reserved_at=name,
    )


def environment(trial: Trial, reserved: Reservation) -> Mapping[str, str]:
    """Return what the pod's container would be given, with the paths of the node in the place of the container's."""
    access = trial.machine.devices.access(trial.gpu, reserved.pod_uid)
    given = {**cdi.environment(reserved, {trial.gpu: access}), "CUDA_VISIBLE_DEVICES": trial.gpu}
    pipe = access.mps_pipe
    if "CUDA_MPS_PIPE_DIRECTORY" in given and pipe is not None:
        given["CUDA_MPS_PIPE_DIRECTORY"] = pipe.host_path
    return given


@contextmanager
def running(trial: Trial, kind: Kind, wanted: Sequence[Reservation]) -> Iterator[list[Any]]:
    """Prepare the GPU, start a process of each pod, and wait until all have begun; afterwards all is as before.

    Raises:
        SkippedError: The GPU cannot be had in this mode, or there is nothing to run.
        DeviceError: Something was otherwise than expected.
    """
    modes = trial.machine.devices.actual(trial.gpu).modes
    if lacking := {r.mode for r in wanted} - modes:
        raise SkippedError(f"it takes mode {', '.join(lacking)}, the GPU has {', '.join(sorted(modes)) or 'none'}")
    loads: list[Any] = []
    try:
        prepare(trial.machine.devices, trial.gpu, wanted)
        loads += [trial.machine.start(trial.gpu, kind, r.pod_name, environment(trial, r)) for r in wanted]
        for load in loads:
            wait_until(trial, partial(_has_begun, load), BEGINS_WITHIN_S, "a first step")
        dead = [f"{load.pod_uid}: {load.ended()}" for load in loads if load.ended() is not None]
        if dead:
            raise FailedError(f"expected every process to begin, found that they ended: {'; '.join(dead)}")
        yield loads
    finally:
        for load in loads:
            load.stop()
        _return(trial)


def _has_begun(load: Any) -> bool:
    return load.steps() > 0 or load.ended() is not None


def _return(trial: Trial) -> None:
    """Leave the GPU idle, with no daemon. Raises DeviceError."""
    devices, gpu = trial.machine.devices, trial.gpu
    wait_until(trial, lambda: not devices.actual(gpu).tenants, NOTICED_WITHIN_S, "the processes to leave the GPU")
    prepare(trial.machine.devices, trial.gpu, [])


def still_step(trial: Trial, loads: Sequence[Any], seconds: float = 5.0) -> list[float]:
    """Return the steps per second of each process over a while. Raises FailedError if one makes no step."""
    before, began = [load.steps() for load in loads], trial.machine.monotonic()
    trial.machine.wait(seconds)
    elapsed = trial.machine.monotonic() - began
    rates = [(load.steps() - was) / elapsed for load, was in zip(loads, before, strict=True)]
    if not all(rates):
        raise FailedError(f"expected every process to make steps, found {[round(r, 1) for r in rates]} a second")
    return rates


def sm_active(trial: Trial, seconds: float = 10.0) -> float:
    """Return the GPU's mean SM activity over a while, 0..1. Raises SkippedError if it is not measured."""
    machine, found = trial.machine, list[float]()
    machine.devices.refresh_counters()
    machine.devices.read(trial.gpu)
    for _ in range(round(seconds / LOOK_EVERY_S)):
        machine.wait(LOOK_EVERY_S)
        machine.devices.refresh_counters()
        counters = machine.devices.read(trial.gpu).counters
        if counters is not None and SM_ACTIVE in counters.values:
            found.append(counters.values[SM_ACTIVE])
    if not found:
        raise SkippedError("SM activity is measured on Hopper and newer, or where DCGM's host engine runs")
    return sum(found) / len(found)
