"""A device's lock: one at a time does sums over claims."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from carpool_simulated.errors import DeviceStateError, DeviceUnavailableError

_LOCK_TIMEOUT_S = 5.0


@contextlib.contextmanager
def locked(
    directory: Path,
    *,
    timeout_s: float = _LOCK_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold the device's lock: one at a time does sums over claims.

    Raises:
        DeviceUnavailableError: Somebody else kept it for `timeout_s` seconds.
        DeviceStateError: There is no lock file.
    """
    path = directory / "lock"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # containers see it read-only, which suffices for a flock
    except OSError as e:
        do = "mount the device's directory; the node agent makes the file when it starts"
        raise DeviceStateError(path, expected="a lock file", found=str(e), do=do) from e
    try:
        until = clock() + timeout_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock() >= until:
                    raise DeviceUnavailableError(
                        f"{path}: expected the lock within {timeout_s:g} s, found it held all the time; "
                        "is a process stopped that uses this GPU? End it"
                    ) from None
                sleep(0.002)
        yield
    finally:
        os.close(handle)
