"""`carpool node battery`."""

import ctypes
import errno
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
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
import msgspec
import pynvml
from carpool_core.products import UnknownProductError, find_product
from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid, SharingMode

from carpool_deviceplugin import cdi
from carpool_deviceplugin.app import metrics_sources
from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.dcgm import CounterSource
from carpool_deviceplugin.gpu import DeviceError, NoDevicesError
from carpool_deviceplugin.health import XidWatch
from carpool_deviceplugin.mig import MigRefusal, plan_mig
from carpool_deviceplugin.mig_instances import apply_plan, read_instances, read_mig_devices, read_table
from carpool_deviceplugin.mps import PID_FILE, Mps, MpsProgram
from carpool_deviceplugin.nvlib import (
    Handle,
    NvmlError,
    NvmlLibrary,
    Session,
    list_gpus,
    list_samples,
    load_nvml,
    read_identity,
    read_processes,
    read_telemetry,
)
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.partitions import plan
from carpool_deviceplugin.preflight import InputError, find_gpu, no_gpus, node_settings
from carpool_deviceplugin.processes import Process, ProcTree
from carpool_deviceplugin.quoting import quoted
from carpool_deviceplugin.sampling import AHEAD_US, GpmSampler


class Kind(StrEnum):
    """What a process does on the GPU."""

    TRAIN = "train"
    """Trains a small network, step after step."""
    PRODUCT = "product"
    """Multiplies two bf16 matrices of 8192 x 8192, again and again: a kernel that fills every GPU."""
    BLOCK = "block"
    """Runs kernels of a single block: one SM is busy, and no other."""


class SkippedError(Exception):
    """This cannot be tried here; `str()` says what it takes."""


class FailedError(DeviceError):
    """Something was otherwise than expected; `str()` says what was expected and what was found."""


class Load(Protocol):
    """A process on the GPU."""

    @property
    def pid(self) -> int:
        """Its process ID."""
        ...

    @property
    def pod_uid(self) -> PodUid:
        """The pod that it counts for."""
        ...

    def steps(self) -> int:
        """How many steps it has made."""
        ...

    def ended(self) -> str | None:
        """How it ended, such as `out of memory`; None while it runs."""
        ...

    def take(self, mib: int) -> None:
        """Let it take so much more memory."""
        ...

    def fault(self) -> None:
        """Let it do what no kernel may."""
        ...

    def stop(self) -> None:
        """End it, and wait until its memory is free."""
        ...


class Machine(Protocol):
    """A machine with a GPU that nobody else uses."""

    @property
    def devices(self) -> NvmlDevices:
        """The agent's own view of its GPUs."""
        ...

    def pod(self, name: str) -> PodUid:
        """Return the UID of a made-up pod."""
        ...

    def start(self, gpu: GpuUuid, kind: Kind, pod: str, environment: Mapping[str, str]) -> Load:
        """Start a process in a made-up pod; raises SkippedError where there is nothing to run it with."""
        ...

    def in_cgroup(self, load: Load) -> str:
        """Say why a process is not in a pod's cgroup; empty where it is."""
        ...

    def kill_daemon(self, gpu: GpuUuid) -> None:
        """End a GPU's MPS daemon as a crash would."""
        ...

    def cpu_s(self) -> float:
        """Processor time that the battery has taken so far, in seconds."""
        ...

    def dmon_cpu_s(self, seconds: float) -> float:
        """Processor time that `nvidia-smi dmon` takes in so long; raises SkippedError where it is not there."""
        ...

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        ...

    def monotonic(self) -> float:
        """Seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Trial:
    """Where something is tried."""

    machine: Machine
    gpu: GpuUuid
    may_divide: bool = False
    """Whether MIG instances may be made and destroyed."""


LOAD = Path(__file__).with_name("gpu_load.py")
_CGROUPS = Path("/sys/fs/cgroup")
_SHARED = 'mount --bind "$1" /dev/shm && shift && exec "$@"'
"""Gives a client the /dev/shm of its daemon, as its container's mounts would."""
_ENDS_WITHIN_S = 10.0


class Attributed(ProcTree):
    """The node's processes; those of the battery belong to its made-up pods, whatever their cgroup."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        super().__init__(root)
        self.pods: dict[int, PodUid] = {}

    def find(self, pid: int) -> Process | None:
        """Look a process up."""
        found = super().find(pid)
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
                said = json.loads(self._lines.get())
            except ValueError:
                continue  # what a library printed
            self._steps, self._ended = said.get("steps", self._steps), said.get("ended", self._ended)

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
        return lines[-1][:300] if lines else "it said nothing"

    def take(self, mib: int) -> None:
        """Let it take more memory."""
        self._tell(f"take {mib}")

    def fault(self) -> None:
        """Let it do what no kernel may."""
        self._tell("fault")

    def _tell(self, word: str) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):  # it has ended, and `ended` says how
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
        self._is_private = not MpsProgram.missing()
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
            raise SkippedError(f"it takes PyTorch with CUDA in {self._python} (--python): {why}")
        command = [self._python, "-W", "ignore", str(LOAD), kind]
        if self._is_private and self._mps is not None and "CUDA_MPS_PIPE_DIRECTORY" in environment:
            shm = str(self._mps.shm(gpu))
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
        directory = self._cgroups / "carpool-battery" / f"pod{load.pod_uid}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "cgroup.procs").write_text(f"{load.pid}\n")
        except OSError as e:
            return f"{directory}: {e}; run it as root on a node with cgroups of version 2"
        return ""

    def in_cgroup(self, load: object) -> str:
        """Say why a process is not in a pod's cgroup; empty where it is."""
        pid = getattr(load, "pid", 0)
        why = self._cgroup_of.get(pid, "nobody put it there")
        if why:
            return why
        found = ProcTree().find(pid)
        return "" if found is not None and found.pod_uid else "its cgroup names no pod"

    def kill_daemon(self, gpu: GpuUuid) -> None:
        """End a GPU's MPS daemon as a crash would."""
        if self._mps is not None:
            os.kill(int((self._mps.directory(gpu) / "pipe" / PID_FILE).read_text()), signal.SIGKILL)

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
        for directory in (self._cgroups / "carpool-battery").glob("pod*"):
            with suppress(OSError):
                directory.rmdir()
        with suppress(OSError):
            (self._cgroups / "carpool-battery").rmdir()


def _lacks_torch(python: str) -> str:
    asked = [python, "-c", "import torch; assert torch.cuda.is_available(), 'it finds no GPU'"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    return (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:200] if done.returncode else ""


T = TypeVar("T")
Rule = Callable[[Session], Iterator[str]]
"""Yields what is otherwise than expected."""
_BEYOND_PIDS = 2**22 + 1
"""The kernel has no larger ones."""
_FEW = 3
_FIRST_STAMP_US = 1_500_000_000_000_000
"""In 2017: what is less is counted in other units, or from another moment."""
NO_GPU = "GPU-00000000-0000-0000-0000-000000000000"


def identity_makes_sense(session: Session) -> Iterator[str]:
    """UUIDs, indices and sizes are what they can be."""
    uuids = list_gpus(session)
    if not uuids or len(set(uuids)) != len(uuids):
        yield f"expected GPUs with a UUID each, found {uuids}"
    for index, uuid in enumerate(uuids):
        known = read_identity(session, uuid)
        fine = {
            "the UUID that it was asked by": known.uuid == uuid and uuid.startswith("GPU-"),
            f"index {index}": known.index == index,
            "more than 1 GiB": known.memory_mib > 1024,
            "less than a quarter of it reserved": 0 <= known.reserved_mib < known.memory_mib / 4,
            "compute capability 5.0 or more": float(known.compute_capability) >= 5,
            "a PCI bus ID with a domain": known.pci_bus_id.count(":") == 2,
            "a power limit from 5 to 5,000 W": known.power_limit_w is None or 5 < known.power_limit_w < 5000,
            "NVLinks to others only": known.pci_bus_id not in known.nvlink_peers,
            "MIG switched on only where there is MIG": known.mig_capable or not known.mig_enabled,
        }
        yield from _unmet(fine, known)


def telemetry_makes_sense(session: Session) -> Iterator[str]:
    """Counters are within what they can be, and energy never falls."""
    for uuid in list_gpus(session):
        known, first, second = read_identity(session, uuid), *(read_telemetry(session, uuid) for _ in range(2))
        for seen in (first, second):
            fine = {
                "no more memory than there is": seen.memory_used_mib + seen.memory_free_mib <= known.memory_mib,
                "a temperature from -20 to 130 C": seen.temperature_c is None or -20 < seen.temperature_c < 130,
                "a power from 0 to 5,000 W": seen.power_w is None or 0 < seen.power_w < 5000,
                "a utilization of 0 to 100%": seen.gpu_util_percent is None or 0 <= seen.gpu_util_percent <= 100,
            }
            yield from _unmet(fine, seen)
        if first.energy_mj is not None and (second.energy_mj is None or second.energy_mj < first.energy_mj):
            yield f"expected an energy counter that never falls, found {first.energy_mj}, then {second.energy_mj}"


def processes_make_sense(session: Session) -> Iterator[str]:
    """Processes have IDs and no more memory than there is, and are told once, on an instance only where those are."""
    for uuid in list_gpus(session):
        known, found = read_identity(session, uuid), read_processes(session, uuid)
        for p in found:
            fine = {
                "a process ID": 0 < p.pid < _BEYOND_PIDS,
                "no more memory than there is, or none told": 0 <= (p.memory_mib or 0) <= known.memory_mib,
                "an instance only where MIG is switched on": p.gpu_instance_id is None or known.mig_enabled,
            }
            yield from _unmet(fine, p)
        yield from _repeated(f"GPU {uuid}: expected each process once", found, lambda p: (p.pid, p.gpu_instance_id))


def utilization_makes_sense(session: Session, wall: Callable[[], float] = time.time) -> Iterator[str]:
    """What a process did is a share at a moment of the node's clock; a GPU may be unable to say it."""
    for uuid in list_gpus(session):
        found = list_samples(session, uuid, 0) or ()
        latest = round(1e6 * wall()) + AHEAD_US
        for pid, at_us, sm_percent in found:
            fine = {
                "a process ID": pid < _BEYOND_PIDS,
                "0 to 100% of the SMs": sm_percent <= 100,
                "microseconds since 1970, and none to come": _FIRST_STAMP_US < at_us <= latest,
            }
            yield from _unmet(fine, (pid, at_us, sm_percent))
        yield from _repeated(f"GPU {uuid}: expected each process once at each moment", found, lambda one: one[:2])


def gpm_says_ratios_or_nothing(session: Session) -> Iterator[str]:
    """One sample says nothing, two say ratios."""
    gpm = GpmSampler(session)
    for uuid in list_gpus(session):
        if gpm.sample(uuid) is not None:
            yield "expected nothing of a single sample, found something"
        found = gpm.sample(uuid)
        if found is not None and found.sm is not None and not 0 <= found.sm <= 1:
            yield f"expected an SM activity of 0 to 1, found {found.sm}"
        gpm.forget(uuid)


def xids_can_be_watched(session: Session) -> Iterator[str]:
    """Events can be registered for, and looked at without waiting."""
    uuids = list_gpus(session)
    watch = XidWatch(session, uuids)
    for uuid in uuids:
        yield from (f"expected XIDs from 1 up, found {xid}" for xid in watch.seen(uuid) if xid <= 0)


def mig_profiles_lie_within_the_gpu(session: Session) -> Iterator[str]:
    """A GPU with MIG has profiles, with names and places that fit on it."""
    for uuid in list_gpus(session):
        known = read_identity(session, uuid)
        table = read_table(session, uuid) if known.mig_capable else None
        if (table is not None) != known.mig_capable:
            yield f"expected MIG profiles where there is MIG, found {table}"
        for profile in table.profiles if table else ():
            fine = {
                "a name such as 3g.20gb": "g." in profile.name and not profile.name.startswith("MIG "),
                "less memory than the GPU has": profile.memory_mib < known.memory_mib,
                "places within the GPU": max(profile.starts) + profile.memory_slices
                <= (table.memory_slices if table else 0),
            }
            yield from _unmet(fine, profile)


def unknown_gpu_is_an_error_that_names_it(session: Session) -> Iterator[str]:
    """Nobody's UUID is refused."""
    try:
        session.handle(NO_GPU)
    except NvmlError as e:
        if NO_GPU not in str(e):
            yield f"expected an error that names the GPU, found {e}"
    else:
        yield f"expected no GPU {NO_GPU}, found one"


CONTRACT: Sequence[Rule] = (
    identity_makes_sense,
    telemetry_makes_sense,
    processes_make_sense,
    utilization_makes_sense,
    gpm_says_ratios_or_nothing,
    xids_can_be_watched,
    mig_profiles_lie_within_the_gpu,
    unknown_gpu_is_an_error_that_names_it,
)


def _repeated(expected: str, found: Sequence[T], key: Callable[[T], Hashable]) -> Iterator[str]:
    """Say which of these were told before, the first few of them: there may be thousands."""
    seen, again = set[Hashable](), list[T]()
    for one in found:
        if (name := key(one)) in seen:
            again.append(one)
        seen.add(name)
    if again:
        few = ", ".join(map(str, again[:_FEW])) + " …" * (len(again) > _FEW)
        yield f"{expected}, found {len(again):,} of {len(found):,} that were told before: {few}"


def _unmet(fine: dict[str, bool], found: object) -> Iterator[str]:
    yield from (f"expected {what}, found {found}" for what, is_so in fine.items() if not is_so)


BEGINS_WITHIN_S = 180.0
"""From the start of a process to its first step: PyTorch is imported, CUDA and its libraries begin."""
NOTICED_WITHIN_S = 10.0
"""The agent looks at its GPUs each 10 s; what it is told by events it looks at sooner."""
LOOK_EVERY_S = 1.0
SM_ACTIVE = "DCGM_FI_PROF_SM_ACTIVE"


def wait_until(trial: Trial, holds: Callable[[], bool], within_s: float, expected: str) -> float:
    """Wait for something; return the seconds that it took. Raises FailedError."""
    machine, began = trial.machine, trial.machine.monotonic()
    while not holds():
        if (waited := machine.monotonic() - began) >= within_s:
            raise FailedError(f"expected {expected} within {within_s:g} s, found it not so after {waited:.0f} s")
        machine.wait(LOOK_EVERY_S)
    return machine.monotonic() - began


def reservation(
    trial: Trial, name: str, mode: SharingMode, *, mib: int | None = None, percent: int | None = None
) -> Reservation:
    """Write down what a made-up pod is promised."""
    return Reservation(
        pod_uid=trial.machine.pod(name),
        pod_namespace="battery",
        pod_name=name,
        job_uid=JobUid(name),
        job_name=name,
        gpu_uuids=[trial.gpu],
        mode=mode,
        memory_limit_mib=mib,
        thread_percentage=percent,
        reserved_at=name,
    )


def prepare(trial: Trial, wanted: Sequence[Reservation]) -> None:
    """Bring the GPU to what is wanted, as the agent would. Raises DeviceError."""
    devices, gpu = trial.machine.devices, trial.gpu
    for step in plan(devices.actual(gpu), wanted).steps:
        devices.apply(gpu, step)
    found = plan(devices.actual(gpu), wanted)
    if found.steps or found.waiting or found.refused or len(found.ready) != len(wanted):
        raise FailedError(f"expected the GPU to be prepared for {len(wanted)} pods, found {found} still to do")


def environment(trial: Trial, reserved: Reservation) -> Mapping[str, str]:
    """Return what the pod's container would be given, with the paths of the node in the place of the container's."""
    access = trial.machine.devices.access(trial.gpu, reserved.pod_uid)
    given = {**cdi.environment(reserved, {trial.gpu: access}), "CUDA_VISIBLE_DEVICES": trial.gpu}
    pipe = access.mps_pipe
    if "CUDA_MPS_PIPE_DIRECTORY" in given and pipe is not None:
        given["CUDA_MPS_PIPE_DIRECTORY"] = pipe.host_path
    return given


@contextmanager
def running(trial: Trial, kind: Kind, wanted: Sequence[Reservation]) -> Iterator[list[Load]]:
    """Prepare the GPU, start a process of each pod, and wait until all have begun; afterwards all is as before.

    Raises:
        SkippedError: The GPU cannot be had in this mode, or there is nothing to run.
        DeviceError: Something was otherwise than expected.
    """
    modes = trial.machine.devices.actual(trial.gpu).modes
    if lacking := {r.mode for r in wanted} - modes:
        raise SkippedError(f"it takes mode {', '.join(lacking)}, the GPU has {', '.join(sorted(modes)) or 'none'}")
    loads: list[Load] = []
    try:
        prepare(trial, wanted)
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


def _has_begun(load: Load) -> bool:
    return load.steps() > 0 or load.ended() is not None


def _return(trial: Trial) -> None:
    """Leave the GPU idle, with no daemon. Raises DeviceError."""
    devices, gpu = trial.machine.devices, trial.gpu
    wait_until(trial, lambda: not devices.actual(gpu).tenants, NOTICED_WITHIN_S, "the processes to leave the GPU")
    prepare(trial, [])


def still_step(trial: Trial, loads: Sequence[Load], seconds: float = 5.0) -> list[float]:
    """Return the steps per second of each process over a while. Raises FailedError where one stands still."""
    before, began = [load.steps() for load in loads], trial.machine.monotonic()
    trial.machine.wait(seconds)
    elapsed = trial.machine.monotonic() - began
    rates = [(load.steps() - was) / elapsed for load, was in zip(loads, before, strict=True)]
    if not all(rates):
        raise FailedError(f"expected every process to make steps, found {[round(r, 1) for r in rates]} a second")
    return rates


def sm_active(trial: Trial, seconds: float = 10.0) -> float:
    """Return the GPU's mean SM activity over a while, 0..1. Raises SkippedError where nobody measures it."""
    machine, found = trial.machine, list[float]()
    machine.devices.refresh_counters()
    machine.devices.read(trial.gpu)
    for _ in range(round(seconds / LOOK_EVERY_S)):
        machine.wait(LOOK_EVERY_S)
        machine.devices.refresh_counters()
        counters = machine.devices.read(trial.gpu).counters or {}
        if SM_ACTIVE in counters:
            found.append(counters[SM_ACTIVE])
    if not found:
        raise SkippedError("SM activity is measured on Hopper and newer, or where DCGM's host engine runs")
    return sum(found) / len(found)


MPS = SharingMode.MPS
LIMIT_MIB, BEYOND_MIB = 4096, 8192
"""A small training and PyTorch fit into the one; the other is more than a process may have."""
SHARES = (100, 50, 25)
DIES_WITHIN_S = 30.0


def two_share(trial: Trial) -> str:
    """Two training processes behind one daemon; the one that asks for too much dies alone."""
    return _share(trial, 2)


def three_share(trial: Trial) -> str:
    """The same with three."""
    return _share(trial, 3)


def _share(trial: Trial, count: int) -> str:
    wanted = [reservation(trial, f"p{i}", MPS, mib=LIMIT_MIB, percent=100 // count) for i in range(count)]
    with running(trial, Kind.TRAIN, wanted) as loads:
        actual = trial.machine.devices.actual(trial.gpu)
        if actual.problem or actual.tenants != {r.pod_uid for r in wanted}:
            raise FailedError(
                f"expected {count} pods on the GPU and nobody else, found {len(actual.tenants)}: {actual.problem}"
            )
        rates = still_step(trial, loads)
        greedy, others = loads[-1], loads[:-1]
        greedy.take(BEYOND_MIB)
        took_s = wait_until(
            trial,
            lambda: greedy.ended() is not None or max(memory_mib(trial, greedy), 0) > LIMIT_MIB,
            DIES_WITHIN_S,
            f"the process that asks for {BEYOND_MIB:,} MiB of {LIMIT_MIB:,} MiB to die",
        )
        if greedy.ended() != "out of memory":
            raise FailedError(
                f"expected it to die of memory at {LIMIT_MIB:,} MiB, found {greedy.ended() or 'it alive'} with "
                f"{memory_mib(trial, greedy):,} MiB"
            )
        still_step(trial, others)
    each = ", ".join(f"{rate:.1f}" for rate in rates)
    return (
        f"{count} processes made {each} steps/s; the one that asked for {BEYOND_MIB:,} MiB of {LIMIT_MIB:,} died alone "
        f"after {took_s:.0f} s"
    )


def memory_mib(trial: Trial, load: Load) -> int:
    """Memory that a process's pod has on the GPU."""
    uses = trial.machine.devices.read(trial.gpu).processes
    return sum(p.memory_mib for p in uses if p.pod_uid == load.pod_uid)


def threads_show_in_sm_activity(trial: Trial) -> str:
    """A kernel that fills the GPU fills the share of it that its pod was promised."""
    found: dict[int, float] = {}
    for percent in SHARES:
        wanted = [reservation(trial, "p0", MPS, percent=percent)]
        with running(trial, Kind.PRODUCT, wanted):
            found[percent] = sm_active(trial)
    said = ", ".join(f"{share}%: {active:.2f}" for share, active in found.items())
    wrong = [share for share, active in found.items() if not 0.7 * share / 100 <= active <= share / 100 + 0.1]
    if wrong:
        raise FailedError(f"expected an SM activity of about each thread percentage, found {said}")
    return f"SM activity by thread percentage: {said}"


def fault_is_told(trial: Trial) -> str:
    """A client's fatal fault is noticed, and the pods that it ends together are named."""
    wanted = [reservation(trial, f"p{i}", MPS, mib=LIMIT_MIB) for i in range(2)]
    with running(trial, Kind.TRAIN, wanted) as loads:
        trial.machine.devices.actual(trial.gpu)
        loads[0].fault()
        took_s = _struck(trial, loads)
        wait_until(trial, lambda: all(load.ended() is not None for load in loads), DIES_WITHIN_S, "both to end")
        ends = ", ".join(str(load.ended()) for load in loads)
    return f"told after {took_s:.0f} s, with both pods; they ended: {ends}"


def daemon_that_dies_is_told(trial: Trial) -> str:
    """A daemon that is gone is noticed, its clients are named, and it is started again when they have left."""
    wanted = [reservation(trial, f"p{i}", MPS, mib=LIMIT_MIB) for i in range(2)]
    devices, gpu = trial.machine.devices, trial.gpu
    with running(trial, Kind.TRAIN, wanted) as loads:
        trial.machine.kill_daemon(gpu)
        took_s = _struck(trial, loads)
        for load in loads:
            load.stop()
        wait_until(trial, lambda: not devices.actual(gpu).tenants, DIES_WITHIN_S, "the clients to leave the GPU")
        began = trial.machine.monotonic()
        prepare(trial, wanted)
        again_s = trial.machine.monotonic() - began
        if not devices.actual(gpu).mps_daemon:
            raise FailedError("expected another daemon in the place of the dead one, found none")
    return f"told after {took_s:.0f} s, with both pods; another daemon answered after {again_s:.2f} s"


def _struck(trial: Trial, loads: list[Load]) -> float:
    """Wait until the agent names all of these pods; return the seconds."""
    pods, devices = {load.pod_uid for load in loads}, trial.machine.devices
    return wait_until(
        trial,
        lambda: devices.actual(trial.gpu).ended.keys() >= pods,
        NOTICED_WITHIN_S,
        "the agent to name all pods that end together",
    )


ALONE = SharingMode.EXCLUSIVE
IDLE_S, BUSY_S = 10.0, 30.0
READ_EVERY_S, COST_S = 5.0, 60.0
"""As the agent reads its GPUs."""
MOST_TOLD = 10
"""Of what is otherwise than expected: each of thousands of processes may be."""
MOST_OF_A_CORE = 0.005


def contract_holds(trial: Trial) -> str:
    """All that the agent relies on, by the contract that the fakes are held to."""
    broken = [why for rule in CONTRACT for why in rule(trial.machine.devices.session)]
    if broken:
        more = f"; and {len(broken) - MOST_TOLD:,} more" if len(broken) > MOST_TOLD else ""
        raise FailedError("; ".join(broken[:MOST_TOLD]) + more)
    return f"{len(CONTRACT)} rules hold"


def activity_of_known_kernels(trial: Trial) -> str:
    """A product that fills the GPU is about all of it, a single block about one SM."""
    found: dict[Kind, float] = {}
    for kind in (Kind.PRODUCT, Kind.BLOCK):
        with running(trial, kind, [reservation(trial, "p0", ALONE)]):
            found[kind] = sm_active(trial)
    said = f"product {found[Kind.PRODUCT]:.3f}, one block {found[Kind.BLOCK]:.4f}"
    if found[Kind.PRODUCT] < 0.85:
        raise FailedError(f"expected an SM activity of at least 0.85 for an 8192³ product, found {said}")
    try:
        sms = find_product(trial.machine.devices.identity(trial.gpu).product).sm_count
    except UnknownProductError as e:
        return f"SM activity: {said}; how many SMs it has is not known: {e}"
    one = 1 / sms
    if not 0.5 * one <= found[Kind.BLOCK] <= 2 * one:
        raise FailedError(f"expected one block to be about one of {sms} SMs ({one:.4f}), found {said}")
    return f"SM activity: {said}, of {sms} SMs"


def energy_adds_up(trial: Trial) -> str:
    """What the pods and the idle GPU take together is what the GPU's counter says, and its power over the time."""
    machine, gpu = trial.machine, trial.gpu
    machine.devices.read(gpu)
    machine.wait(IDLE_S)
    if machine.devices.read(gpu).energy_j is None:
        raise SkippedError("this GPU has no counter of energy")
    wanted = [reservation(trial, name, SharingMode.TIME_SLICING) for name in ("p0", "p1")]
    with running(trial, Kind.TRAIN, wanted):
        first = machine.devices.read(gpu)
        power_j, last = 0.0, first
        while last.at - first.at < BUSY_S:
            machine.wait(LOOK_EVERY_S)
            now = machine.devices.read(gpu)
            power_j += ((now.power_w or 0.0) + (last.power_w or 0.0)) / 2 * (now.at - last.at)
            last = now
    before = {p.pod_uid: p.energy_j or 0.0 for p in first.processes}
    pods_j = sum((p.energy_j or 0.0) - before.get(p.pod_uid, 0.0) for p in last.processes)
    idle_j = (last.idle_power_w or 0.0) * (last.at - first.at)
    counter_j = (last.energy_j or 0.0) - (first.energy_j or 0.0)
    said = f"pods {pods_j:,.0f} J + idle {idle_j:,.0f} J beside {counter_j:,.0f} J of the counter"
    if abs(pods_j + idle_j - counter_j) > 0.01 * counter_j:
        raise FailedError(f"expected them to be equal within 1%, found {said}")
    if abs(power_j - counter_j) > 0.1 * counter_j:
        raise FailedError(f"expected power over time to be the counter within 10%, found {power_j:,.0f} J; {said}")
    return f"{said}; power over time {power_j:,.0f} J"


def processes_belong_to_pods(trial: Trial) -> str:
    """A process in a pod's cgroup is that pod's, with its memory and its share of the time."""
    wanted = [reservation(trial, name, SharingMode.TIME_SLICING) for name in ("p0", "p1")]
    with running(trial, Kind.TRAIN, wanted) as loads:
        for load in loads:
            if why := trial.machine.in_cgroup(load):
                raise SkippedError(f"it takes a cgroup of the pod: {why}")
        trial.machine.devices.read(trial.gpu)
        trial.machine.wait(READ_EVERY_S)
        found = {p.pod_uid: p for p in trial.machine.devices.read(trial.gpu).processes}
        memory = [memory_mib(trial, load) for load in loads]
    if found.keys() != {load.pod_uid for load in loads} or not all(memory):
        raise FailedError(f"expected {len(loads)} pods with memory, found {len(found)} with {memory} MiB")
    busy = [found[load.pod_uid].busy_s for load in loads]
    if None in busy or not any(busy):
        raise FailedError(f"expected the time of each pod's kernels, found {busy}")
    return f"2 pods with {memory[0]:,} and {memory[1]:,} MiB, and {busy[0]:.1f} and {busy[1]:.1f} s of kernels"


def cost_beside_dmon(trial: Trial) -> str:
    """What the agent's own readings take of a core, beside `nvidia-smi dmon`."""
    machine = trial.machine
    began, spent = machine.monotonic(), machine.cpu_s()
    while machine.monotonic() - began < COST_S:
        for uuid in machine.devices.uuids:
            machine.devices.read(uuid)
            machine.devices.actual(uuid)
        machine.wait(READ_EVERY_S)
    share = (machine.cpu_s() - spent) / (machine.monotonic() - began)
    said = f"{100 * share:.2f}% of a core with {len(machine.devices.uuids)} GPUs, read each {READ_EVERY_S:g} s"
    if share > MOST_OF_A_CORE:
        raise FailedError(f"expected at most {100 * MOST_OF_A_CORE:g}% of a core, found {said}")
    try:
        return f"{said}; nvidia-smi dmon, each second: {100 * machine.dmon_cpu_s(READ_EVERY_S) / READ_EVERY_S:.2f}%"
    except SkippedError as e:
        return f"{said}; not beside dmon: {e}"


def instances_come_and_go(trial: Trial) -> str:
    """MIG instances of two profiles are made, read back, and destroyed."""
    session, gpu = trial.machine.devices.session, trial.gpu
    if not trial.may_divide:
        raise SkippedError("only with --mig, on a machine whose settings may be changed")
    known = trial.machine.devices.identity(gpu)
    table = read_table(session, gpu) if known.mig_enabled else None
    if table is None:
        raise SkippedError(f"MIG is switched off (nvidia-smi -i {known.index} -mig 1), or this GPU has none")
    if read_instances(session, gpu, table):
        raise SkippedError("somebody else's instances stand there")
    plain = {p.compute_slices: p for p in table.profiles if "+me" not in p.name}
    wanted = [plain[size] for size in sorted(plain)[:2]]
    for profiles in (wanted, []):
        found = plan_mig(table, read_instances(session, gpu, table), set(), profiles)
        if isinstance(found, MigRefusal):
            raise FailedError(found.message)
        apply_plan(session, gpu, table, found, trial.machine.monotonic)
        devices, there = read_mig_devices(session, gpu), read_instances(session, gpu, table)
        if sorted(i.placement.profile.name for i in there) != sorted(p.name for p in profiles) or len(devices) != len(
            profiles
        ):
            raise FailedError(f"expected {[p.name for p in profiles]}, found {[str(i) for i in there]}")
    return f"{' and '.join(p.name for p in wanted)} made, read back and destroyed"


NEAR_MIB = 64
"""By so much may what the driver reserves, or an instance's memory, differ from one driver to another."""
_NO_LINK, _NO_PROFILE, _NO_TYPE = 99, 99, 99


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One MIG profile as the driver describes it."""

    name: str
    id: int
    compute_slices: int
    memory_slices: int
    starts: list[int]
    memory_mib: int
    sm_count: int


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU answered."""

    product: str
    driver: str
    memory_mib: int
    reserved_mib: int
    compute_capability: str
    power_limit_w: float | None
    mig: list[Profile]
    codes: dict[str, int]
    """NVML's return code of each question, by what was asked; 0 is success."""


def record(session: Session, uuid: GpuUuid) -> Recording:
    """Ask a GPU all that a fake must answer alike. It only reads; raises NvmlError where it cannot be read at all."""
    known = read_identity(session, uuid)
    table = read_table(session, uuid) if known.mig_capable else None
    return Recording(
        product=known.product,
        driver=session.ask("", session.library.nvmlSystemGetDriverVersion) or "",
        memory_mib=known.memory_mib,
        reserved_mib=known.reserved_mib,
        compute_capability=known.compute_capability,
        power_limit_w=known.power_limit_w,
        mig=[
            Profile(
                name=p.name,
                id=p.id,
                compute_slices=p.compute_slices,
                memory_slices=p.memory_slices,
                starts=list(p.starts),
                memory_mib=p.memory_mib,
                sm_count=p.sm_count,
            )
            for p in (table.profiles if table else ())
        ],
        codes={name: _code(ask) for name, ask in _questions(session.library, session.handle(uuid))},
    )


def differences(recorded: Recording, other: Recording) -> list[str]:
    """Say in what another library's answers are not those that were recorded; what drivers vary is allowed for."""
    found = [
        f"{name}: recorded {getattr(recorded, name)}, found {getattr(other, name)}"
        for name in ("product", "memory_mib", "compute_capability")
        if getattr(recorded, name) != getattr(other, name)
    ]
    if abs(recorded.reserved_mib - other.reserved_mib) > NEAR_MIB:
        found.append(f"reserved_mib: recorded {recorded.reserved_mib}, found {other.reserved_mib}")
    ours, theirs = ({p.name: p for p in one.mig} for one in (other, recorded))
    found += [
        f"MIG profile {name}: recorded {theirs.get(name)}, found {ours.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if not _is_as(theirs.get(name), ours.get(name))
    ]
    return found + [
        f"{name}: recorded {_named(code)}, found {_named(other.codes.get(name))}"
        for name, code in recorded.codes.items()
        if other.codes.get(name) != code
    ]


def _is_as(recorded: Profile | None, other: Profile | None) -> bool:
    if recorded is None or other is None:
        return False
    near = abs(recorded.memory_mib - other.memory_mib) <= NEAR_MIB
    return near and msgspec.structs.replace(recorded, memory_mib=0) == msgspec.structs.replace(other, memory_mib=0)


def _named(code: int | None) -> str:
    return "nothing" if code is None else "success" if code == 0 else f"{pynvml.NVMLError(code)} ({code})"


def _code(ask: Callable[[], Any]) -> int:
    try:
        ask()
    except pynvml.NVMLError as e:
        return int(e.value)
    return 0


def _questions(library: NvmlLibrary, handle: Handle) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what some GPUs cannot say, and what none can, each with a name that says what was asked."""
    yield "NUMA node", lambda: library.nvmlDeviceGetNumaNodeId(handle)
    yield "MIG mode", lambda: library.nvmlDeviceGetMigMode(handle)
    yield "remapped rows", lambda: library.nvmlDeviceGetRemappedRows(handle)
    yield (
        "uncorrectable ECC errors",
        lambda: library.nvmlDeviceGetTotalEccErrors(
            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
    )
    yield "energy", lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle)
    yield "reasons of clocks", lambda: library.nvmlDeviceGetCurrentClocksEventReasons(handle)
    yield "a sensor of temperature that there is none of", lambda: library.nvmlDeviceGetTemperature(handle, _NO_TYPE)
    yield "what processes did in the future", lambda: library.nvmlDeviceGetProcessUtilization(handle, 2**62)
    yield "the first NVLink", lambda: library.nvmlDeviceGetNvLinkState(handle, 0)
    yield "an NVLink that there is none of", lambda: library.nvmlDeviceGetNvLinkState(handle, _NO_LINK)
    yield "an unknown UUID", lambda: library.nvmlDeviceGetHandleByUUID(NO_GPU)
    yield "an index beyond the last", lambda: library.nvmlDeviceGetHandleByIndex(library.nvmlDeviceGetCount())
    yield "XIDs where there are none", lambda: _wait(library)
    for index in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        yield f"MIG profile {index}", partial(library.nvmlDeviceGetGpuInstanceProfileInfo, handle, index)
    yield (
        "places of an unknown MIG profile",
        lambda: library.nvmlDeviceGetGpuInstancePossiblePlacements(
            handle,
            _NO_PROFILE,
            (pynvml.c_nvmlGpuInstancePlacement_t * 16)(),
            ctypes.byref(ctypes.c_uint(16)),
        ),
    )


def _wait(library: NvmlLibrary) -> None:
    events = library.nvmlEventSetCreate()
    try:
        library.nvmlEventSetWait(events, 0)
    finally:
        library.nvmlEventSetFree(events)


TRIALS: Mapping[str, Callable[[Trial], str]] = {
    "contract": contract_holds,
    "activity": activity_of_known_kernels,
    "energy": energy_adds_up,
    "attribution": processes_belong_to_pods,
    "mps-two": two_share,
    "mps-three": three_share,
    "mps-threads": threads_show_in_sm_activity,
    "mps-fault": fault_is_told,
    "mps-killed": daemon_that_dies_is_told,
    "mig": instances_come_and_go,
    "cost": cost_beside_dmon,
}
"""By the name by which one is asked for, in the order in which they are tried."""


class Verdict(StrEnum):
    """What came of a trial."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One trial."""

    name: str
    verdict: Verdict
    said: str
    """What was measured, what was otherwise than expected, or what it takes."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ran where; its `nvml` is what the fakes are checked against."""

    carpool: str
    gpu: GpuUuid
    nvml: Recording
    outcomes: list[Outcome]


def tried(trial: Trial, names: Collection[str]) -> Iterator[Outcome]:
    """Try what was asked for; one that fails keeps no other from being tried."""
    for name, attempt in TRIALS.items():
        if name not in names:
            continue
        try:
            yield Outcome(name=name, verdict=Verdict.PASSED, said=attempt(trial))
        except SkippedError as e:
            yield Outcome(name=name, verdict=Verdict.SKIPPED, said=str(e))
        except DeviceError as e:
            yield Outcome(name=name, verdict=Verdict.FAILED, said=str(e))


def write(report: Report, path: Path) -> None:
    """Write it down; raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def read(path: Path) -> Report:
    """Read it again; raises OSError and msgspec.MsgspecError."""
    return msgspec.json.decode(path.read_bytes(), type=Report)


@click.command(short_help="Try the agent on a real GPU that nobody uses.")
@click.option(
    "--gpu",
    default="0",
    show_default=True,
    help="Index or UUID of a GPU that nobody uses, or UUID of a MIG device on it.",
)
@click.option("--only", multiple=True, type=click.Choice([*TRIALS]), help="Try this; several times for several.")
@click.option("--python", default=sys.executable, help="An interpreter with PyTorch; this one where left out.")
@click.option("--mig", is_flag=True, help="MIG instances may be made and destroyed on this GPU.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write what came of it to.")
@click.pass_context
def battery(context: click.Context, gpu: str, only: tuple[str, ...], python: str, mig: bool, out: Path | None) -> None:
    """Try the agent on a real GPU that nobody uses: MPS, limits, measures, energy, faults. Takes about ten minutes."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="carpool-battery-")
    except OSError as e:
        raise InputError(f"expected a directory for what takes minutes, found {e}; set TMPDIR to a writable one") from e
    with temporary as directory:
        machine = context.obj if context.obj is not None else _machine(Path(directory), python)
        try:
            outcomes = _run(
                Trial(machine, _idle(machine, find_gpu(machine.devices, gpu)), may_divide=mig), set(only or TRIALS), out
            )
        except DeviceError as e:
            raise InputError(str(e)) from e
        finally:
            if isinstance(machine, RealMachine):
                machine.close()
    count = Counter(outcome.verdict for outcome in outcomes)
    passed, failed = count[Verdict.PASSED], count[Verdict.FAILED]
    click.echo(f"{passed} passed, {failed} failed, {count[Verdict.SKIPPED]} skipped")
    context.exit(1 if failed else 0 if passed else 2)


def _machine(directory: Path, python: str) -> RealMachine:
    settings = node_settings()
    if shutil.which(python) is None:
        raise InputError(f"--python: expected an interpreter, found no program {quoted(Path(python))}; give its path")
    try:
        return RealMachine(
            load_nvml(),
            directory,
            python=python,
            sources=metrics_sources(settings),
            cdi=(Path("/etc/cdi"), settings.cdi_dir),
        )
    except NoDevicesError as e:
        raise no_gpus(e, settings) from e


def _idle(machine: Machine, uuid: GpuUuid) -> GpuUuid:
    """Return a GPU if nobody uses it; raises DeviceError."""
    actual = machine.devices.actual(uuid)
    if actual.tenants or actual.problem:
        raise DeviceError(
            f"GPU {uuid}: expected one that is well and that nobody uses, found "
            f"{actual.problem or f'pods {sorted(actual.tenants)}'}; the battery starts and kills processes there"
        )
    return uuid


def _run(trial: Trial, names: set[str], out: Path | None) -> list[Outcome]:
    session = trial.machine.devices.session
    recording = record(session, trial.gpu)
    click.echo(f"{recording.product}, driver {recording.driver}  {trial.gpu}")
    report = Report(carpool=version("carpool"), gpu=trial.gpu, nvml=recording, outcomes=[])
    _keep(report, out)  # before the first of ten minutes: it may not be possible
    for outcome in tried(trial, names):
        click.echo(f"{outcome.verdict:<8} {outcome.name:<12} {outcome.said}")
        report.outcomes.append(outcome)
        _keep(report, out)
    if out is not None:
        click.echo(f"written to {quoted(out)}")
    return report.outcomes


def _keep(report: Report, out: Path | None) -> None:
    if out is None:
        return
    try:
        write(report, out)
    except OSError as e:
        do = {
            errno.ENOENT: "give a file in a directory that is there",
            errno.ENOSPC: "free some space, or give a file elsewhere",
        }
        raise DeviceError(
            f"--out: expected to write to {quoted(out)}, found {e.strerror}; "
            f"{do.get(e.errno or 0, 'give a file that can be written')}"
        ) from e
