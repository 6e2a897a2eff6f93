"""A simulated GPU in a client process."""

import fcntl
import math
import os
import re
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from carpool_simulated.device import Activity, Device, contention, dynamic_power_w
from carpool_simulated.state import (
    Claim,
    DeviceUnavailableError,
    NoDeviceError,
    OutOfMemoryError,
    SimulatedGpuError,
    encode_claim,
    locked,
)

_LIMIT = re.compile(r"^\s*(\d+)=(\d+)([KMGT]?)B?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Environment:
    """The container's variables, which the node agent sets through CDI."""

    root: Path
    uuids: tuple[str, ...]
    pod_uid: str
    pipe_directory: Path | None
    limits_mib: Mapping[int, int]
    """CUDA_MPS_PINNED_DEVICE_MEM_LIMIT by GPU index."""
    threads: float
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE as a ratio, 0..1."""


def parse_environment(environ: Mapping[str, str]) -> Environment:
    """Read the variables that CDI sets.

    Raises:
        NoDeviceError: No GPU is visible.
        SimulatedGpuError: A variable is invalid.
    """
    root, visible = environ.get("CARPOOL_SIMULATED_GPUS_DIR", ""), environ.get("CARPOOL_VISIBLE_GPUS", "")
    uuids = tuple(part.strip() for part in visible.split(",") if part.strip())
    if not root or not uuids:
        raise NoDeviceError(
            "no CUDA-capable device is detected (expected CARPOOL_SIMULATED_GPUS_DIR and CARPOOL_VISIBLE_GPUS, found "
            f"{root!r} and {visible!r}; ask for carpool.dev/gpu in the container's limits)"
        )
    pipe = environ.get("CUDA_MPS_PIPE_DIRECTORY")
    return Environment(
        root=Path(root),
        uuids=uuids,
        pod_uid=environ.get("CARPOOL_POD_UID", "unknown"),
        pipe_directory=Path(pipe) if pipe else None,
        limits_mib=_memory_limits(environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "")),
        threads=_threads(environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")),
    )


def _memory_limits(text: str) -> dict[int, int]:
    """`0=9216M,1=4G` → MiB by index."""
    limits: dict[int, int] = {}
    for part in filter(None, text.split(",")):
        found = _LIMIT.match(part)
        if not found:
            raise SimulatedGpuError(
                f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: expected index=amount such as 0=9216M, found {text!r}"
            )
        limits[int(found[1])] = int(found[2]) * _UNITS[found[3].upper()] // 2**20
    return limits


def _threads(text: str) -> float:
    if not text:
        return 1.0
    try:
        percentage = float(text)
    except ValueError:
        percentage = math.nan
    if not 0 < percentage <= 100:
        raise SimulatedGpuError(f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: expected more than 0 up to 100, found {text!r}")
    return percentage / 100


_SLICE_S = 0.05
"""Interval at which a long step reads the other claims and updates its own, in seconds."""


def _size(mib: float) -> str:
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.2f} MiB"


class Gpu:
    """A GPU in this process, with a CUDA context on it. Not thread-safe.

    Args:
        device: The device.
        index: CUDA's index in this process.
        environment: The container's variables.
        clock: Monotonic seconds, the same for all processes of the machine.
        sleep: Waits for some seconds.

    Raises:
        SimulatedGpuError: The device does not admit this process, is full, or is corrupt.
    """

    def __init__(
        self,
        device: Device,
        index: int,
        environment: Environment,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device, self.index, self._environment = device, index, environment
        self._clock, self._sleep = clock, sleep
        self._pid = os.getpid()
        self._handle = -1
        with locked(device.directory):
            self._facts = device.facts()
            self.mode = device.admit(environment.pod_uid, environment.pipe_directory).mode
            self._claim = Claim(environment.pod_uid, self._pid, clock(), memory_mib=0, peak_memory_mib=0)
            self._make_room(self._facts.context_mib)
            self._claim.memory_mib = self._claim.peak_memory_mib = self._facts.context_mib
            self._path = self._open_claim()
        weak = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: gpu._forget() if (gpu := weak()) else None)

    def _open_claim(self) -> Path:
        """Create and lock the claim under a hidden name, then rename it, so that others only see locked claims."""
        path = self._device.claims_directory / f"{uuid.uuid4().hex}.claim"
        hidden = path.with_suffix(".new")
        self._handle = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.fchmod(self._handle, 0o666)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        self._write_claim()
        hidden.rename(path)
        return path

    def _forget(self) -> None:
        """Close the handle in a forked child, because it would keep the claim alive after the parent's end."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _write_claim(self) -> None:
        line = encode_claim(self._claim)
        os.pwrite(self._handle, line, 0)
        os.ftruncate(self._handle, len(line))

    @property
    def name(self) -> str:
        """Product name, beginning with `Simulated`."""
        return self._facts.product

    @property
    def uuid(self) -> str:
        """The GPU's UUID."""
        return self._facts.uuid

    @property
    def total_mib(self) -> int:
        """Capacity that processes can use, in MiB."""
        return self._facts.memory_mib - self._facts.reserved_mib

    @property
    def memory_limit_mib(self) -> int | None:
        """This process's MPS memory limit in MiB, context included; None without one."""
        return self._environment.limits_mib.get(self.index) if self.mode == "MPS" else None

    @property
    def allocated_mib(self) -> int:
        """Memory that `allocate` took and `free` did not return, in MiB."""
        return self._claim.memory_mib - self._facts.context_mib

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise SimulatedGpuError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
                "you must use the 'spawn' start method"
            )
        if self._handle < 0:
            raise DeviceUnavailableError(
                f"GPU {self.index}: expected an open GPU, found it closed; call open_gpus again"
            )

    def allocate(self, mib: float) -> None:
        """Take memory, rounded up to whole MiB.

        Raises:
            OutOfMemoryError: The device is full or the MPS limit is reached; the words are PyTorch's.
        """
        if not (math.isfinite(mib) and mib > 0):
            raise ValueError(f"expected a positive number of MiB to allocate, found {mib!r}")
        self._check_open()
        with locked(self._device.directory):
            self._make_room(math.ceil(mib))
            self._claim.memory_mib += math.ceil(mib)
            self._claim.peak_memory_mib = max(self._claim.peak_memory_mib, self._claim.memory_mib)
            self._write_claim()

    def free(self, mib: float) -> None:
        """Return memory, rounded up as `allocate` did."""
        if not (mib > 0 and mib <= self.allocated_mib):
            raise ValueError(f"expected at most {self.allocated_mib} MiB to free, which are allocated; found {mib!r}")
        self._check_open()
        with locked(self._device.directory):
            self._claim.memory_mib -= math.ceil(mib)
            self._write_claim()

    def _make_room(self, mib: int) -> None:
        """Check that the memory is free for this process; raises OutOfMemoryError. The caller holds the lock."""
        held, _ = self._device.held()
        used = sum(h.claim.memory_mib for h in held)
        mine = self._claim.memory_mib
        limit = self.memory_limit_mib
        free = self.total_mib - used
        if limit is not None:
            free = min(free, limit - mine)
        if mib <= free:
            return
        allowed = f"{_size(limit)} allowed; " if limit is not None else ""
        context = min(mine, self._facts.context_mib)
        raise OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {_size(mib)}. GPU {self.index} has a total capacity of "
            f"{_size(self.total_mib)} of which {_size(max(0, free))} is free. Including non-PyTorch memory, this "
            f"process has {_size(mine)} memory in use. {allowed}Of the allocated memory {_size(mine - context)} is "
            f"allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. (Simulated {self.uuid})"
        )

    def run(self, step_time_s: float, sm_active: float = 1.0, dram_active: float = 0.5, gpu_util: float = 1.0) -> float:
        """Run one training step; it takes longer beside other tenants.

        Args:
            step_time_s: Time that the step takes alone, in seconds.
            sm_active: Share of SM-time with work when alone, 0..1.
            dram_active: Share of the memory bandwidth in use when alone, 0..1.
            gpu_util: Share of the time in which a kernel runs when alone, 0..1.

        Returns:
            The time that the step took, in seconds.
        """
        for name, value in (("sm_active", sm_active), ("dram_active", dram_active), ("gpu_util", gpu_util)):
            if not 0 <= value <= 1:
                raise ValueError(f"expected {name} between 0 and 1, found {value!r}")
        if not (math.isfinite(step_time_s) and step_time_s > 0):
            raise ValueError(f"expected a positive step_time_s in seconds, found {step_time_s!r}")
        activity = Activity(gpu_util, sm_active, dram_active)
        self._check_open()
        self._claim.gpu_util, self._claim.sm_active, self._claim.dram_active = gpu_util, sm_active, dram_active
        started, left = self._clock(), step_time_s
        while left > 1e-9:
            left -= self._advance(activity, left, step_time_s)
        took = self._clock() - started
        self._claim.steps += 1
        self._claim.steps_s += took
        self._write_claim()
        return took

    def _advance(self, activity: Activity, left: float, step_time_s: float) -> float:
        """Run for a slice of time; return the completed part of the step's solo time, in seconds."""
        before = self._clock()
        slowdown = self.contention(activity)
        wait = min(_SLICE_S, left * slowdown)
        # A gap of up to one step counts as busy, so that the GPU is not free between two steps.
        self._claim.busy_until = before + wait + step_time_s
        self._write_claim()
        self._sleep(wait)
        elapsed = self._clock() - before
        done = min(left, elapsed / slowdown)
        claim, facts = self._claim, self._facts
        host = 1 - activity.gpu_util
        own_time = slowdown - host if self.mode == "MPS" and activity.gpu_util else activity.gpu_util
        claim.busy_s += min(elapsed, done * own_time)
        claim.sm_s += done * activity.sm_active
        claim.dram_s += done * activity.dram_active
        claim.energy_j += done * dynamic_power_w(activity, idle_w=facts.idle_power_w, limit_w=facts.power_limit_w)
        return done

    def contention(self, activity: Activity) -> float:
        """Return the slowdown of such a step now, by other tenants and the MPS thread limit."""
        now = self._clock()
        held, _ = self._device.held()
        others = [
            Activity(h.claim.gpu_util, h.claim.sm_active, h.claim.dram_active)
            for h in held
            if h.id != self._path.stem and h.claim.busy_until > now
        ]
        return contention(self.mode, activity, others, self._environment.threads)

    def close(self) -> None:
        """Release the GPU. The end of the process has the same effect."""
        if self._handle < 0 or os.getpid() != self._pid:
            return
        os.close(self._handle)  # unlocks the claim, and the agent removes it
        self._handle = -1


class Gpus(tuple[Gpu, ...]):
    """The GPUs of this process; leaving the `with` block closes them all."""

    __slots__ = ()

    def __enter__(self) -> "Gpus":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for gpu in self:
            gpu.close()


def open_gpus(
    environ: Mapping[str, str] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Gpus:
    """Open all GPUs of the container, in CUDA's order.

    Args:
        environ: The environment; the process's own when None.
        clock: Monotonic seconds, the same for all processes of the machine.
        sleep: Waits for some seconds.

    Raises:
        NoDeviceError: No GPU is visible, or a directory is missing.
        DeviceUnavailableError: A GPU's mode does not admit this process.
        MpsError: A GPU is shared by MPS and its daemon cannot be reached.
        OutOfMemoryError: Not even a context fits.
        DeviceStateError: A device's file is corrupt.
    """
    environment = parse_environment(os.environ if environ is None else environ)
    opened: list[Gpu] = []
    try:
        for index, name in enumerate(environment.uuids):
            directory = environment.root / name
            if not directory.is_dir():
                raise NoDeviceError(
                    f"no CUDA-capable device is detected (expected GPU {name} in {environment.root}, found no such "
                    "directory; was the container started by the node agent's CDI spec?)"
                )
            opened.append(Gpu(Device(directory, clock), index, environment, clock, sleep))
    except BaseException:
        for gpu in opened:
            gpu.close()
        raise
    return Gpus(opened)
