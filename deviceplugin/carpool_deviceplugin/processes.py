"""Processes of the node and the pods that they belong to, from /proc."""

import os
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from carpool_core.values import PodUid

_POD = re.compile(
    r"(?:^|[/-])pod(?P<uid>[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
    r"(?:\.slice)?(?:/|$)"
)
"""cgroupfs writes `/kubepods/burstable/pod<uid>/…`, systemd `kubepods-burstable-pod<uid with _>.slice/…`; static pods
have a digest without dashes."""
_CACHED = 4096
_CHUNK = 1 << 16


class Stat(NamedTuple):
    """Fields of /proc/PID/stat."""

    name: str
    """At most 15 characters."""
    state: str
    parent: int
    """Process ID of the parent."""
    started: int
    """Ticks since boot."""


def read_stat(proc: Path | str, pid: int) -> Stat | None:
    """Read /proc/PID/stat; None if the process has ended or is not visible."""
    try:
        name, _, rest = _read(f"{proc}/{int(pid)}/stat").partition(b"(")[2].rpartition(b")")  # a name may contain both
        fields = rest.split(None, 20)
        return Stat(name.decode(errors="replace"), fields[0].decode(), int(fields[1]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def _read(path: str) -> bytes:
    # Called for each process of each GPU at each sample: os.open is several times faster than Path.read_bytes.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.read(file, _CHUNK)
        while piece := os.read(file, _CHUNK):  # the kernel may return less than the whole file
            found += piece
        return found
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the node."""

    pid: int
    started: int
    """Ticks since boot; with the ID they identify one process, although IDs are reused."""
    name: str
    pod_uid: PodUid | None
    """None for processes outside of pods."""

    @property
    def key(self) -> str:
        """Identifies the process until the node reboots."""
        return f"{self.pid}-{self.started}"


def pod_of(cgroup: str) -> PodUid | None:
    """Return the UID of the pod in the content of /proc/PID/cgroup; None outside of pods."""
    found = [match["uid"] for line in cgroup.splitlines() for match in _POD.finditer(line)]
    return PodUid(found[-1].replace("_", "-")) if found else None


class ProcTree:
    """The node's processes.

    Args:
        root: /proc of the host's PID namespace.
    """

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = str(root)
        self._cache: OrderedDict[int, Process] = OrderedDict()

    def find(self, pid: int) -> Process | None:
        """Return a process; None if it has ended or the agent does not see the host's processes.

        The pod of a process never changes, so its cgroup is read once.
        """
        stat, cached = read_stat(self._root, pid), self._cache.get(pid)
        if stat is None or (cached is not None and cached.started == stat.started):
            return cached if stat is not None else None
        try:
            cgroup = _read(f"{self._root}/{int(pid)}/cgroup").decode(errors="replace")
        except OSError:
            return None
        found = self._cache[pid] = Process(int(pid), stat.started, stat.name, pod_of(cgroup))
        while len(self._cache) > _CACHED:
            self._cache.popitem(last=False)
        return found

    def user(self, pid: int) -> int | None:
        """Return the user ID of a process; None if it has ended."""
        try:
            lines = _read(f"{self._root}/{int(pid)}/status").decode(errors="replace").splitlines()
        except OSError:
            return None
        user = next((line.split()[1] for line in lines if line.startswith("Uid:")), "")
        return int(user) if user.isdecimal() else None
