"""The processes of MPS, as the kernel knows them: nothing that clients can say or write is believed here."""

import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from carpool_deviceplugin.devices.processes import pod_of
from carpool_deviceplugin.mps.port import PID_FILE, PROGRAM, MpsError

_COMM = PROGRAM[:15]
"""What the kernel calls the daemon, and its servers."""
_STATE, _PARENT, _STARTED = 0, 1, 19
"""Places among what follows the command's name in /proc/PID/stat."""
_LONGEST_PID = 32
_LOOK_EVERY_S = 0.1
_END_WITHIN_S = {signal.SIGTERM: 1.0, signal.SIGKILL: 3.0}
"""A driver takes its time to free what a process has on the GPU."""


class MpsProcesses:
    """Those of this process's PID namespace.

    Args:
        proc: Where the kernel tells of them.
        monotonic: Seconds that only pass.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._proc, self._monotonic, self._sleep = proc, monotonic, sleep

    def began(self, pid: int) -> tuple[int, int] | None:
        """When a daemon or server began, in ticks since boot, and its parent; None where that process is none."""
        try:
            text = (self._proc / str(pid) / "stat").read_text(errors="replace")
            name, _, rest = text.partition("(")[2].rpartition(")")
            fields = rest.split()
            if name != _COMM or fields[_STATE] in ("Z", "X"):
                return None
            return int(fields[_STARTED]), int(fields[_PARENT])
        except (OSError, ValueError, IndexError):
            return None

    def group(self, pid: int) -> str | None:
        """Name a process's control group, in the same way whoever looks from another one; None where it has ended.

        From within, in a control group namespace of one's own, it is the root and has no name: it is "-" then.
        Where a path begins hangs on the looker's own group, and some hierarchies may hold nobody (version 1 beside 2),
        so only the pod and the paths' last names count.
        """
        try:
            text = (self._proc / str(pid) / "cgroup").read_text()
        except OSError:
            return None
        return " ".join([pod_of(text) or "-", *sorted({line.rpartition("/")[2] for line in text.splitlines()} - {""})])

    def written(self, directory: Path) -> int | None:
        """Read the process ID that the daemon of a pipe directory wrote there; None while none did.

        Its clients may write there, too: links and pipes are not opened, and the process has to be this one's own child
        by its control group, with this very directory in its environment.
        """
        try:
            file = os.open(directory / PID_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                pid = int(os.read(file, _LONGEST_PID)) if stat.S_ISREG(os.fstat(file).st_mode) else 0
            finally:
                os.close(file)
        except (OSError, ValueError):
            return None
        return pid if self._is_ours(pid, directory) else None

    def of_directory(self, directory: Path) -> Callable[[], Mapping[int, int]]:
        """Return a look for a pipe directory's daemons and servers that we started, written down or not.

        A look returns who is there, and since when. The first one asks of all processes, of which there may be
        thousands; later ones only of those that it found, and of new ones, before they say that nobody is left. Who was
        found is there until it has ended: its environment goes first, and what it has on the GPU later.
        """
        others, ours = set[int](), dict[int, int]()

        def look() -> Mapping[int, int]:
            there = {int(entry.name) for entry in os.scandir(self._proc) if entry.name.isdecimal()}
            found = {pid: at for pid, at in ours.items() if (known := self.began(pid)) is not None and known[0] == at}
            found |= self._among(there - others, directory)
            if others and not found:  # a number may be another process's by now, and a process another program
                found = self._among(there, directory)
            others.clear()
            others.update(there - found.keys())
            ours.clear()
            ours.update(found)
            return found

        return look

    def _among(self, pids: Iterable[int], directory: Path) -> dict[int, int]:
        return {pid: known[0] for pid in pids if (known := self.began(pid)) and self._is_ours(pid, directory)}

    def end(self, find: Callable[[], Mapping[int, int]]) -> None:
        """End processes, by SIGKILL at last, also those that appear meanwhile.

        Args:
            find: Returns who of them is still there, and since when.

        Raises:
            MpsError: One of them may not be ended, or does not end.
        """
        if not find():
            return
        for number, within_s in _END_WITHIN_S.items():  # one that hangs does not end by the first
            for pid in find():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
                except OSError as e:
                    raise MpsError(
                        f"expected to end process {pid} of MPS, found {e}; the pod carpool-mps has the right to (set "
                        "nodeAgent.mps), or end it on the node"
                    ) from e
            until = self._monotonic() + within_s
            while find() and self._monotonic() < until:
                self._sleep(_LOOK_EVERY_S)
        if left := find():
            whom = ", ".join(map(str, sorted(left)))
            raise MpsError(
                f"expected MPS processes to end when they are killed, found {whom} still there; the driver holds them: "
                "look at dmesg, and restart the node"
            )

    def _is_ours(self, pid: int, directory: Path) -> bool:
        """Whether a process is of our own control group, and has this pipe directory in its environment."""
        try:
            is_ours = (self._proc / str(pid) / "cgroup").read_bytes() == (self._proc / "self" / "cgroup").read_bytes()
            its = (self._proc / str(pid) / "environ").read_bytes().split(b"\0") if is_ours else []
        except OSError:
            return False
        return f"CUDA_MPS_PIPE_DIRECTORY={directory}".encode() in its
