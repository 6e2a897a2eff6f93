"""Processes of the node and the pods that they belong to, from /proc."""

import os
import re
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


class Stat(NamedTuple):
    """Fields of /proc/PID/stat."""

    name: str
    """At most 15 characters."""
    state: str
    parent: int
    """Process ID of the parent."""
    started: int
    """Ticks since boot."""


_LONGEST_STAT = 4096
"""Bytes of /proc/PID/stat: at most 52 numbers and a name."""


def read_stat(proc: Path, pid: int) -> Stat | None:
    """Read /proc/PID/stat; None if the process has ended or is not visible."""
    try:
        file = os.open(f"{proc}/{int(pid)}/stat", os.O_RDONLY)  # less than half of pathlib's time
        try:
            content = os.read(file, _LONGEST_STAT)
        finally:
            os.close(file)
        name, _, rest = content.partition(b"(")[2].rpartition(b")")  # a name may contain both
        fields = rest.split(None, 20)
        return Stat(name.decode(errors="replace"), fields[0].decode(), int(fields[1]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


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
    """The node's processes, from /proc of the host's PID namespace."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root

    def find(self, pid: int, known: Process | None = None) -> Process | None:
        """Return a process; None if it has ended or the agent does not see the host's processes.

        If it is `known`, its control group is not read again: a process never moves to another pod.
        """
        stat = read_stat(self._root, pid)
        if stat is None:
            return None
        if known is not None and known.started == stat.started:
            return known
        try:
            cgroup = (self._root / str(int(pid)) / "cgroup").read_text(errors="replace")
        except OSError:
            return None
        return Process(int(pid), stat.started, stat.name, pod_of(cgroup))

    def user(self, pid: int) -> int | None:
        """Return the user ID of a process; None if it has ended."""
        try:
            lines = (self._root / str(int(pid)) / "status").read_text(errors="replace").splitlines()
        except OSError:
            return None
        user = next((line.split()[1] for line in lines if line.startswith("Uid:")), "")
        return int(user) if user.isdecimal() else None
