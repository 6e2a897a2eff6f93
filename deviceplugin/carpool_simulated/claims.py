"""Claims: what each process holds of a simulated device, in a file that it keeps locked for as long as it lives."""

import errno
import fcntl
import json
import os
import re
import stat
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from carpool_simulated.errors import DeviceStateError
from carpool_simulated.jsonfiles import checked, parsed

_READS = 20
_POD_UID = re.compile(r"[A-Za-z0-9._-]{1,253}")
_LARGEST_CLAIM = 65_536
_MOST = 2**40
"""No counter of a claim comes near it, and sums of them stay far below what JSON and int64 hold."""
_RATIOS = ("gpu_util", "sm_active", "dram_active")


@dataclass(slots=True)
class Claim:
    """What one process holds of the device, and what it has used so far. Times are monotonic, in seconds."""

    pod_uid: str
    pid: int
    """In the process's own namespace."""
    started: float
    memory_mib: int
    """Context included."""
    peak_memory_mib: int
    gpu_util: float = 0.0
    """Activity alone, of the step that runs; 0..1, as the two that follow."""
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
    """Time of all steps, neighbours included."""


def encode_claim(claim: Claim) -> bytes:
    """One line: a checksum, and the claim as JSON."""
    body = json.dumps(asdict(claim), separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(body), body)


def read_claim(path: Path) -> Claim:
    """Read a claim; raises DeviceStateError where it stays unreadable."""
    line = b""
    do = "end its process; nobody else is affected"
    for _ in range(_READS):
        try:
            line = _read_regular(path).partition(b"\n")[0]
        except FileNotFoundError as e:
            raise DeviceStateError(path, expected="a claim", found="nothing: its process has ended", do=do) from e
        except OSError as e:
            raise DeviceStateError(path, expected="a claim that can be read", found=str(e), do=do) from e
        checksum, _, body = line.partition(b" ")
        if checksum == b"%08x" % zlib.crc32(body) and body:
            return _sensible(checked(Claim, parsed(body, path, do), path, do), path, do)
    raise DeviceStateError(path, expected="a checksum and a claim as JSON", found=repr(line[:60]), do=do)


def _sensible(claim: Claim, path: Path, do: str) -> Claim:
    if not _POD_UID.fullmatch(claim.pod_uid):
        raise DeviceStateError(path, expected="'pod_uid' to be a UID", found=ascii(claim.pod_uid[:60]), do=do)
    for name, value in asdict(claim).items():
        most = 1 if name in _RATIOS else _MOST
        if name != "pod_uid" and not 0 <= value <= most:
            raise DeviceStateError(path, expected=f"{name!r} from 0 to {most}", found=repr(value)[:60], do=do)
    return claim


def _open_regular(path: Path) -> int:
    """Open a file to read that others may have put there: neither a link, nor anything that makes its reader wait.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is no regular file")


def _read_regular(path: Path) -> bytes:
    with os.fdopen(_open_regular(path), "rb") as file:
        return file.read(_LARGEST_CLAIM)


def is_held(path: Path) -> bool:
    """Whether a living process holds the claim file.

    Raises:
        DeviceStateError: It is not a file that any process could hold as its claim.
    """
    try:
        handle = _open_regular(path)
    except FileNotFoundError:
        return False
    except OSError as e:
        do = "it counts for nothing, and the node agent will remove it"
        raise DeviceStateError(path, expected="a regular file that can be read", found=str(e.strerror), do=do) from e
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def is_claimed(path: Path) -> bool:
    """Whether this is the claim of a living process, and not something to be removed."""
    try:
        return path.suffix == ".claim" and is_held(path)
    except DeviceStateError:
        return False
