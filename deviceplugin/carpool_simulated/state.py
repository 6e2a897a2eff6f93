"""Files of a simulated GPU, and its errors.

SimulatedGpuError             a RuntimeError, as all errors of CUDA are in PyTorch
├── OutOfMemoryError          the device is full, or the MPS limit is reached
├── DeviceUnavailableError    the device's mode does not admit this process
├── MpsError                  the device is shared by MPS and its daemon cannot be reached
├── NoDeviceError             the environment names no device, or one that is not there
└── DeviceStateError          a file of the device is invalid
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin


class SimulatedGpuError(RuntimeError):
    """Base of all errors of a simulated GPU."""


class OutOfMemoryError(SimulatedGpuError):
    """The device is full; the message is that of `torch.OutOfMemoryError`, for programs that search for it."""


class DeviceUnavailableError(SimulatedGpuError):
    """The device's mode does not admit this process."""


class MpsError(SimulatedGpuError):
    """The MPS daemon cannot be reached."""


class NoDeviceError(SimulatedGpuError):
    """No device is visible."""


class DeviceStateError(SimulatedGpuError):
    """A file of a device is invalid."""

    def __init__(self, path: Path, *, expected: str, found: str, do: str) -> None:
        # A file name may contain bytes that are not valid UTF-8.
        name = os.fsencode(path).decode(errors="backslashreplace")
        super().__init__(f"{name}: expected {expected}, found {found}; {do}")


T = TypeVar("T")


def _kinds(declared: Any) -> tuple[type, ...]:
    return (dict,) if get_origin(declared) is dict else get_args(declared) or (declared,)


def checked(cls: type[T], raw: object, path: Path, do: str) -> T:
    """Build a flat dataclass from JSON and validate its types; raises DeviceStateError."""
    if not isinstance(raw, dict):
        raise DeviceStateError(path, expected="a JSON object", found=type(raw).__name__, do=do)
    values: dict[str, Any] = {}
    for spec in fields(cls):  # type: ignore[arg-type]
        if spec.name not in raw:
            if spec.default is MISSING and spec.default_factory is MISSING:
                raise DeviceStateError(path, expected=f"a field {spec.name!r}", found=f"only {sorted(raw)}", do=do)
            continue
        value, kinds = raw[spec.name], _kinds(spec.type)
        if float in kinds and type(value) is int:
            value = float(value)
        if type(value) not in kinds or (isinstance(value, float) and not math.isfinite(value)):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise DeviceStateError(path, expected=f"{spec.name!r} to be {names}", found=repr(value)[:80], do=do)
        values[spec.name] = value
    return cls(**values)


def read_json(path: Path, do: str) -> object:
    """Read a JSON file; raises DeviceStateError if it is absent or invalid."""
    try:
        text = path.read_bytes()
    except FileNotFoundError as e:
        raise DeviceStateError(path, expected="a file", found="nothing", do=do) from e
    except OSError as e:
        raise DeviceStateError(path, expected="a file that can be read", found=str(e), do=do) from e
    return parsed(text, path, do)


def parsed(text: bytes, path: Path, do: str) -> object:
    """Read JSON; raises DeviceStateError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise DeviceStateError(path, expected="JSON", found=repr(text[:60]), do=do) from e


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically; links at its place are not followed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "w") as file:
        os.fchmod(handle, 0o644)  # whatever the umask: containers run as any user
        file.write(text)
    temporary.replace(path)


_LOCK_TIMEOUT_S = 5.0


@contextlib.contextmanager
def locked(directory: Path, *, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the device's lock, so that only one process changes claims.

    Raises:
        DeviceUnavailableError: Another process held it for `timeout_s` seconds.
        DeviceStateError: There is no lock file.
    """
    path = directory / "lock"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # containers see it read-only, which suffices for a flock
    except OSError as e:
        do = "mount the device's directory; the node agent makes the file when it starts"
        raise DeviceStateError(path, expected="a lock file", found=str(e), do=do) from e
    try:
        until = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise DeviceUnavailableError(
                        f"{path}: expected the lock within {timeout_s:g} s, found it held all the time; "
                        "is a process stopped that uses this GPU? End it"
                    ) from None
                time.sleep(0.002)
        yield
    finally:
        os.close(handle)


_READS = 20
_POD_UID = re.compile(r"[A-Za-z0-9._-]{1,253}")
_LARGEST_CLAIM = 65_536
_MOST = 2**40
"""Upper bound of a claim's counters; sums stay within int64."""
_RATIOS = ("gpu_util", "sm_active", "dram_active")


@dataclass(slots=True)
class Claim:
    """Resources that one process holds, and its counters. Times are monotonic, in seconds."""

    pod_uid: str
    pid: int
    """In the process's own namespace."""
    started: float
    memory_mib: int
    """Context included."""
    peak_memory_mib: int
    gpu_util: float = 0.0
    """Solo activity of the present step, 0..1; so are the next two fields."""
    sm_active: float = 0.0
    dram_active: float = 0.0
    busy_until: float = 0.0
    """Until when that step, or the next one, keeps the device busy."""
    busy_s: float = 0.0
    """Time in which its kernels ran."""
    sm_s: float = 0.0
    """Time in which its work filled all SMs."""
    dram_s: float = 0.0
    """Time in which its work filled the memory bandwidth."""
    energy_j: float = 0.0
    """Energy above idle."""
    steps: int = 0
    steps_s: float = 0.0
    """Time of all steps, including the slowdown by other tenants."""


def encode_claim(claim: Claim) -> bytes:
    """Return a line with a checksum and the claim as JSON."""
    body = json.dumps(asdict(claim), separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(body), body)


def read_claim(path: Path) -> Claim:
    """Read a claim, with retries; raises DeviceStateError."""
    line = b""
    do = "end its process; other processes are not affected"
    for _ in range(_READS):
        try:
            with os.fdopen(_open_regular(path), "rb") as file:
                line = file.read(_LARGEST_CLAIM).partition(b"\n")[0]
        except FileNotFoundError as e:
            raise DeviceStateError(path, expected="a claim", found="nothing: its process has ended", do=do) from e
        except OSError as e:
            raise DeviceStateError(path, expected="a claim that can be read", found=str(e), do=do) from e
        checksum, _, body = line.partition(b" ")
        if checksum == b"%08x" % zlib.crc32(body) and body:
            return _validated(checked(Claim, parsed(body, path, do), path, do), path, do)
    raise DeviceStateError(path, expected="a checksum and a claim as JSON", found=repr(line[:60]), do=do)


def _validated(claim: Claim, path: Path, do: str) -> Claim:
    if not _POD_UID.fullmatch(claim.pod_uid):
        raise DeviceStateError(path, expected="'pod_uid' to be a UID", found=ascii(claim.pod_uid[:60]), do=do)
    for name, value in asdict(claim).items():
        most = 1 if name in _RATIOS else _MOST
        if name != "pod_uid" and not 0 <= value <= most:
            raise DeviceStateError(path, expected=f"{name!r} from 0 to {most}", found=repr(value)[:60], do=do)
    return claim


def _open_regular(path: Path) -> int:
    """Open an untrusted file for reading; links and pipes are refused.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is no regular file")


def is_held(path: Path) -> bool:
    """Whether a live process holds the claim file.

    Raises:
        DeviceStateError: It is not a readable regular file.
    """
    try:
        handle = _open_regular(path)
    except FileNotFoundError:
        return False
    except OSError as e:
        do = "it is ignored, and the node agent will remove it"
        raise DeviceStateError(path, expected="a regular file that can be read", found=str(e.strerror), do=do) from e
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


IDLE = "Idle"
MODES = (IDLE, "Exclusive", "TimeSlicing", "MPS")


@dataclass(frozen=True, slots=True)
class Facts:
    """`device.json`: properties of the device. Memory in MiB, power in W."""

    uuid: str
    product: str
    """Begins with `Simulated `."""
    memory_mib: int
    reserved_mib: int
    """Memory that the driver reserves."""
    context_mib: int
    """Memory of a process's CUDA context."""
    power_limit_w: float
    idle_power_w: float


@dataclass(frozen=True, slots=True)
class Limit:
    """MPS limits of a pod; they apply to each process, as CUDA's do."""

    memory_mib: int | None = None
    thread_percentage: int | None = None


@dataclass(frozen=True, slots=True)
class Mode:
    """`mode.json`: sharing mode of the device."""

    mode: str = IDLE
    """`Idle` (no process is admitted), `Exclusive`, `TimeSlicing` or `MPS`."""
    mps_daemon: bool = False
    limits: dict[str, Limit] = field(default_factory=dict)
    """Limits by pod UID."""


def read_facts(directory: Path) -> Facts:
    """Read `device.json`; raises DeviceStateError."""
    path = directory / "device.json"
    do = "restart the node agent, which writes it again"
    facts = checked(Facts, read_json(path, do), path, do)
    if facts.uuid != directory.name:
        raise DeviceStateError(path, expected=f"uuid {directory.name!r}, the directory's name", found=facts.uuid, do=do)
    if not 0 <= facts.reserved_mib < facts.memory_mib:
        found = f"reserved_mib {facts.reserved_mib} of memory_mib {facts.memory_mib}"
        raise DeviceStateError(path, expected="0 <= reserved_mib < memory_mib", found=found, do=do)
    return facts


def read_mode(directory: Path) -> Mode:
    """Read `mode.json`; raises DeviceStateError."""
    path = directory / "mode.json"
    do = "end the processes on this GPU and remove the file; the node agent will prepare the GPU again"
    mode = checked(Mode, read_json(path, do), path, do)
    if mode.mode not in MODES:
        raise DeviceStateError(path, expected=f"mode to be one of {', '.join(MODES)}", found=repr(mode.mode), do=do)
    limits = {pod: checked(Limit, raw, path, do) for pod, raw in mode.limits.items()}
    return Mode(mode.mode, mode.mps_daemon, limits)


def write(directory: Path, value: Facts | Mode) -> None:
    """Write `device.json` or `mode.json` atomically."""
    name = "device.json" if isinstance(value, Facts) else "mode.json"
    write_text(directory / name, json.dumps(asdict(value), indent=1) + "\n")
