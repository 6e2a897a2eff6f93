"""What the container's environment says of its GPUs, as the node agent set it through CDI."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from carpool_simulated.errors import NoDeviceError, SimulatedGpuError

_LIMIT = re.compile(r"^\s*(\d+)=(\d+)([KMGT]?)B?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Environment:
    """What the container's environment says, as the node agent set it through CDI."""

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
        SimulatedGpuError: A variable cannot be understood.
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
