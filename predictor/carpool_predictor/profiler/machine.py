"""The machine with a GPU, as the profiler sees it; `testing` has a fake of it, `hardware` the real one."""

from dataclasses import dataclass
from typing import Protocol

import msgspec
from carpool_core.values import Optimizer, Precision


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One training job of the sweep."""

    model: str
    """Catalog name, such as `timm/resnet50`."""
    batch_size: int
    optimizer: Optimizer = Optimizer.SGD_MOMENTUM
    precision: Precision = Precision.FP32

    @property
    def key(self) -> str:
        """Return what tells workloads apart."""
        return f"{self.model}|{self.batch_size}|{self.optimizer}|{self.precision}"


@dataclass(frozen=True, slots=True)
class Description:
    """What the measurements hold for."""

    product: str
    memory_mib: int
    driver: str
    cuda: str
    torch: str


@dataclass(frozen=True, slots=True)
class Sample:
    """What NVML says at one moment."""

    gpu_util_percent: float
    memory_used_mib: float
    power_w: float
    process_mib: dict[int, float]
    """Memory by process id; empty where the driver does not tell, as in some containers."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What GPM says of a span of time; ratios."""

    sm_active: float
    sm_occupancy: float
    dram_active: float
    tensor_active: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The job is built and warm."""


class OutOfMemory(msgspec.Struct, frozen=True, tag=True):
    """The GPU's memory did not suffice."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Anything else went wrong."""

    reason: str


class Window(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What the job says of a span of training."""

    steps: int
    step_time_s: float
    """Median."""
    peak_allocated_mib: float
    """Since the job began, by PyTorch."""
    peak_reserved_mib: float


Reply = Ready | OutOfMemory | Failed | Window


class Process(Protocol):
    """A training job in a process of its own, idle until told to run."""

    @property
    def pid(self) -> int:
        """Return the process's id as NVML would give it."""
        ...

    def run(self, seconds: float) -> None:
        """Begin to train for so long; `reply` tells when it is over."""
        ...

    def reply(self) -> Reply | None:
        """Return what the process said last: ready after it was built and warmed up, a window after each run."""
        ...

    def stop(self) -> None:
        """End it, and wait until its memory is free."""
        ...


class Machine(Protocol):
    """A GPU that nobody else uses."""

    def describe(self) -> Description:
        """Say what this is."""
        ...

    def start(self, workload: Workload, *, mps: bool) -> Process:
        """Start a job; behind an MPS daemon, or by itself (two of these take turns)."""
        ...

    def sample(self) -> Sample:
        """Ask NVML."""
        ...

    def begin_activity(self) -> None:
        """Mark the beginning of a span for GPM."""
        ...

    def end_activity(self) -> Activity | None:
        """Return what happened since; None where the GPU has no GPM (before Hopper)."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start."""
        ...
