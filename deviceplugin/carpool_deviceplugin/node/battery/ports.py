"""The machine with a GPU, as the battery handles it; `testing.battery` has a fake of it, `hardware` the real one."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from carpool_core.values import GpuUuid, PodUid

from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.nvml.devices import NvmlDevices


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
