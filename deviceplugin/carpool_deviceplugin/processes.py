"""From a process ID to the pod that it belongs to, by its cgroup; the tree of /proc is an argument."""

import os
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from carpool_core.values import PodUid

_POD = re.compile(
    r"(?:^|[/-])pod(?P<uid>[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
    r"(?:\.slice)?(?:/|$)"
)
"""cgroupfs writes `/kubepods/burstable/pod<uid>/…`, systemd `kubepods-burstable-pod<uid with _>.slice/…`; static pods
have a digest without dashes."""
_REMEMBERED = 4096
_PIECE = 1 << 16
_START_TIME = 19
"""Place of `starttime` among what follows the command's name in /proc/PID/stat."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the node."""

    pid: int
    started: int
    """Ticks since boot: with the ID it names one process only, however often IDs are used again."""
    name: str
    pod_uid: PodUid | None
    """None for processes outside of pods."""

    @property
    def key(self) -> str:
        """Names this process and no other, until the node reboots."""
        return f"{self.pid}-{self.started}"


def pod_of(cgroup: str) -> PodUid | None:
    """Read a pod's UID out of /proc/PID/cgroup; None where there is none."""
    found = [match["uid"] for line in cgroup.splitlines() for match in _POD.finditer(line)]
    return PodUid(found[-1].replace("_", "-")) if found else None


class ProcTree:
    """The node's processes.

    Args:
        root: /proc of the host's PID namespace.
    """

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = str(root)
        self._known: OrderedDict[int, Process] = OrderedDict()

    def find(self, pid: int) -> Process | None:
        """Look a process up; None where it has ended, or where the agent does not see the host's processes.

        Whose a process is never changes: its cgroup is read once.
        """
        try:
            stat = self._read(pid, "stat")
            command, _, rest = stat.partition(b"(")[2].rpartition(b")")  # the name may contain spaces and parentheses
            fields = rest.split(None, _START_TIME + 1)
            if len(fields) <= _START_TIME or not fields[_START_TIME].isdigit():
                return None
            started = int(fields[_START_TIME])
            known = self._known.get(pid)
            if known is not None and known.started == started:
                return known
            cgroup = self._read(pid, "cgroup").decode(errors="replace")
            found = Process(int(pid), started, command.decode(errors="replace"), pod_of(cgroup))
        except OSError:
            return None
        self._known[pid] = found
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return found

    def user(self, pid: int) -> int | None:
        """Return the user that a process runs as; None where it has ended."""
        try:
            lines = self._read(pid, "status").decode(errors="replace").splitlines()
        except OSError:
            return None
        real = next((line.split()[1] for line in lines if line.startswith("Uid:")), "")
        return int(real) if real.isdecimal() else None

    def _read(self, pid: int, name: str) -> bytes:
        # Called for each process of each GPU at each sample: os.open is several times faster than Path.read_bytes.
        file = os.open(f"{self._root}/{int(pid)}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.read(file, _PIECE)
            while piece := os.read(file, _PIECE):  # the kernel may return less than the whole file
                found += piece
            return found
        finally:
            os.close(file)
