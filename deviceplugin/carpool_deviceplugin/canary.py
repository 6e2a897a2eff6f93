"""A small CUDA program that shows what a container got: its GPUs, MPS and its memory limit.

`python -m carpool_deviceplugin.canary` prints the driver's answers as JSON. It has a process of its own, because a CUDA
context lasts as long as its process.
"""

import ctypes
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from carpool_core.values import MIB, SharingMode

from carpool_deviceplugin.preflight import Outcome, Verdict, row

_LIBRARY = "libcuda.so.1"
_MPS_ENABLED = 133
"""CU_DEVICE_ATTRIBUTE_MPS_ENABLED: contexts on the device are shared through MPS. Known to drivers from 545 on."""
_INVALID_VALUE, _OUT_OF_MEMORY = 1, 2
_WITHIN_S = 30.0
_BIND_SHM = 'mount --bind "$0" /dev/shm && exec "$@"'
"""Gives a client the memory that its MPS daemon shares, as a container gets it by a mount."""


_NO_CONTEXT = (
    "see that nvidia-smi works here, and that the container has the GPU's device file and the driver's libraries"
)


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's answers to a process."""

    uuids: list[str] = []
    """The GPUs that it sees."""
    inside_mps: bool | None = False
    """None if the driver does not know."""
    small: int = 0
    """Result of allocating 1 MiB; 0 is success."""
    beyond: int = 0
    """Result of allocating 1 MiB more than the limit."""
    error: str = ""
    """The call that failed; empty if all succeeded."""
    absent: str = ""
    """Why there is no driver's library; empty if there is one."""


class _CudaError(Exception):
    """A call of CUDA's driver failed."""


def ask_driver(limit_mib: int | None) -> Answers:
    """Ask CUDA's driver; allocates memory in this process. Raises nothing."""
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError as e:
        return Answers(absent=str(e))
    try:
        return _ask(cuda, limit_mib)
    except _CudaError as e:
        return Answers(error=str(e))


def _ask(cuda: Any, limit_mib: int | None) -> Answers:
    def call(name: str, *args: Any) -> None:
        if code := getattr(cuda, name)(*args):
            text = ctypes.c_char_p()
            cuda.cuGetErrorName(code, ctypes.byref(text))
            raise _CudaError(f"{name} failed: {(text.value or b'unknown error').decode()} ({code})")

    def allocate(mib: int) -> int:
        code: int = cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(mib * MIB))
        return code

    call("cuInit", 0)
    call("cuDeviceGetCount", ctypes.byref(count := ctypes.c_int()))
    uuids: list[str] = []
    device = ctypes.c_int()
    for index in reversed(range(count.value)):  # `device` is the first one at the end
        call("cuDeviceGet", ctypes.byref(device), index)
        call("cuDeviceGetUuid", raw := ctypes.create_string_buffer(16), device)
        uuids.insert(0, f"GPU-{uuid.UUID(bytes=raw.raw)}")
    inside = ctypes.c_int()
    known = cuda.cuDeviceGetAttribute(ctypes.byref(inside), _MPS_ENABLED, device) != _INVALID_VALUE
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context := ctypes.c_void_p()), device)
    call("cuCtxSetCurrent", context)
    beyond = 0 if limit_mib is None else allocate(limit_mib + 1)
    return Answers(uuids=uuids, inside_mps=bool(inside.value) if known else None, small=allocate(1), beyond=beyond)


def limit_in(environment: Mapping[str, str]) -> int | None:
    """Return the memory limit that MPS keeps for a container, in MiB; None without one."""
    limit, mode = (environment.get(f"CARPOOL_{name}", "") for name in ("MEMORY_LIMIT_MIB", "GPU_MODE"))
    return int(limit) if limit.isdecimal() and mode == SharingMode.MPS else None


def run_client(environment: Mapping[str, str], shm: str = "") -> Answers:
    """Ask the driver in a new process with a container's environment and, if `shm` is not empty, its /dev/shm."""
    command = [sys.executable, "-m", "carpool_deviceplugin.canary"]
    if shm:
        command = ["unshare", "--mount", "sh", "-c", _BIND_SHM, shm, *command]
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    try:
        ended = subprocess.run(command, env={**kept, **environment}, capture_output=True, timeout=_WITHIN_S, check=True)
        return msgspec.json.decode(ended.stdout, type=Answers)
    except subprocess.TimeoutExpired:
        return Answers(error=f"no answer within {_WITHIN_S:g} s")
    except subprocess.CalledProcessError as e:
        printed = e.stderr.decode(errors="replace").strip()[-500:]
        return Answers(error=f"the client ended with {e.returncode}: {printed or 'no output'}")
    except (OSError, msgspec.MsgspecError) as e:
        return Answers(error=str(e))


def device_files(dev: Path = Path("/dev")) -> list[str]:
    """Return the device files of GPUs that a container has."""
    return sorted(path.name for path in dev.glob("nvidia[0-9]*"))


Client = Callable[[Mapping[str, str], str], Answers]


def judge(found: Answers, environment: Mapping[str, str], files: Sequence[str] = ()) -> list[Outcome]:
    """Compare the driver's answers with the environment that Carpool gave the container.

    `files` are the container's device files: under MPS, CUDA shows the daemon's GPU only, whatever the container has.
    """
    if found.absent:
        return [Outcome(name="canary", verdict=Verdict.SKIPPED, found=found.absent)]
    if found.error:
        return [row("canary", found.error, "a CUDA context", _NO_CONTEXT, passed="", otherwise=Verdict.FAILED)]
    gpus, limit_mib = environment.get("CARPOOL_VISIBLE_GPUS", "").split(","), limit_in(environment)
    seen, is_exact = _list(found.uuids), sorted(found.uuids) == sorted(gpus)
    if len(files) > len(gpus):
        seen, is_exact = f"{seen}, and the device files {', '.join(files)}", False
    advice = (
        "see that the container is not privileged, and that no other program or NVIDIA_VISIBLE_DEVICES gives it GPUs"
    )
    rows = [_row("canary-gpus", is_exact, _list(gpus), seen, advice)]
    if environment.get("CARPOOL_GPU_MODE") != SharingMode.MPS:
        return rows
    if found.inside_mps is None:
        why, needed = "CUDA does not say whether a client is inside MPS", "driver 545 or newer, whose CUDA does"
        rows.append(row("canary-mps", why, needed, "update the driver", passed="", otherwise=Verdict.UNKNOWN))
    else:
        outside = "one outside, to which no limit applies"
        advice = "see that the container has the daemon's directories, and that SELinux lets it open their sockets"
        rows.append(_row("canary-mps", found.inside_mps, "a client inside MPS", outside, advice))
    if limit_mib is not None:
        needed = f"1 MiB, and {limit_mib + 1:,} MiB refused for lack of memory"
        is_kept = (found.small, found.beyond) == (0, _OUT_OF_MEMORY)
        results = f"CUDA's results {found.small} and {found.beyond}"
        advice = "end co-tenants that leave less memory than the limit, and run it again; see the row canary-mps first"
        rows.append(_row("canary-memory", is_kept, needed, results, advice))
    return rows


def _list(uuids: Sequence[str]) -> str:
    return ", ".join(uuids) or "no GPU"


def _row(name: str, is_kept: bool, needed: str, found: str, advice: str) -> Outcome:
    return row(name, "" if is_kept else found, needed, advice, passed=needed, otherwise=Verdict.FAILED)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(ask_driver(limit_in(os.environ))))
