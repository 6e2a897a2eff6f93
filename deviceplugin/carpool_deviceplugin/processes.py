"""From a process ID to the pod that it belongs to, by its cgroup; the tree of /proc is an argument."""

import re
from dataclasses import dataclass
from pathlib import Path

from carpool_core.values import PodUid

_POD = re.compile(
    r"(?:^|[/-])pod(?P<uid>[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
    r"(?:\.slice)?(?:/|$)"
)
"""cgroupfs writes `/kubepods/burstable/pod<uid>/…`, systemd `kubepods-burstable-pod<uid with _>.slice/…`; static pods
have a digest without dashes."""
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
        self._root = root

    def find(self, pid: int) -> Process | None:
        """Look a process up; None where it has ended, or where the agent does not see the host's processes."""
        directory = self._root / str(int(pid))
        try:
            stat = (directory / "stat").read_text(errors="replace")
            cgroup = (directory / "cgroup").read_text(errors="replace")
        except OSError:
            return None
        name, _, rest = stat.partition("(")[2].rpartition(")")  # a command may contain spaces and parentheses
        fields = rest.split()
        if len(fields) <= _START_TIME or not fields[_START_TIME].isdecimal():
            return None
        return Process(int(pid), int(fields[_START_TIME]), name, pod_of(cgroup))
