"""The interface of a machine with a GPU, and the values that it measures. `hardware` implements it."""

from dataclasses import dataclass
from typing import Literal, Protocol

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
        """Return a key that is unique among workloads."""
        return f"{self.model}|{self.batch_size}|{self.optimizer}|{self.precision}"


@dataclass(frozen=True, slots=True)
class Description:
    """Hardware and software of the measurements."""

    product: str
    capacity_mib: int
    driver: str
    cuda: str
    torch: str


@dataclass(frozen=True, slots=True)
class Sample:
    """NVML's values at one moment."""

    gpu_util_percent: float
    memory_used_mib: float
    power_w: float
    process_mib: dict[int, float]
    """Memory by process id; empty if the driver does not report it, as in some containers."""


@dataclass(frozen=True, slots=True)
class Activity:
    """GPM's means over a time; ratios."""

    sm_active_ratio: float
    sm_occupancy_ratio: float
    dram_active_ratio: float
    tensor_active_ratio: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The job is built and warm."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The job failed."""

    reason: str = ""
    status: Literal["failed", "out_of_memory"] = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The job's own measurements of a run."""

    steps: int
    step_time_s: float
    """Median."""
    peak_allocated_mib: float
    """Peak since the start of the job, by PyTorch."""
    peak_reserved_mib: float


Reply = Ready | Failed | Window


class Process(Protocol):
    """A training job in its own process; idle between runs."""

    @property
    def pid(self) -> int:
        """Return the process id, as NVML reports it."""
        ...

    def run(self, seconds: float) -> None:
        """Start a run of some seconds; `reply` returns its window."""
        ...

    def reply(self) -> Reply | None:
        """Return the next reply: `Ready` after the warm-up, a `Window` after each run; None if there is none yet."""
        ...

    def stop(self) -> None:
        """End it, and wait until its memory is free."""
        ...


class Machine(Protocol):
    """A GPU without other users."""

    def describe(self) -> Description:
        """Return the description of the GPU and its software."""
        ...

    def start(self, workload: Workload, *, mps: bool) -> Process:
        """Start a job behind an MPS daemon, or without; several without time-slice. Raises OSError without a daemon."""
        ...

    def sample(self) -> Sample:
        """Return NVML's current values."""
        ...

    def begin_activity(self) -> None:
        """Take the first GPM sample."""
        ...

    def end_activity(self) -> Activity | None:
        """Return the activity since the first GPM sample; None if the GPU has no GPM (before Hopper)."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start."""
        ...
