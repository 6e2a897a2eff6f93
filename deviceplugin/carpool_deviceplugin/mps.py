"""One MPS control daemon for each GPU: started, asked how it is, drained and stopped.

Layout of a GPU's directory: `pipe/` (clients and daemon meet there), `log/`, `shm/` (their shared memory). Clients
write in `pipe/` and `shm/`, so nothing there is believed; who daemon and servers are stands beside them. A daemon
serves one GPU, and the plan lets only pods of one namespace behind it; the daemon itself serves one user at a time.
"""

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from carpool_core.values import GpuUuid

from carpool_deviceplugin.gpu import DeviceError

_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
PID_FILE = "nvidia-cuda-mps-control.pid"
"""In the pipe directory: the daemon's process ID, written by itself."""
STOP_WITHIN_S = 2
"""How long `quit` waits for clients that are ending; less than an answer may take."""
_SERVERS = "servers"
"""Beside the pipe directory: servers and when they began. They may outlive a daemon, or one that answers."""


class MpsError(DeviceError):
    """The daemon did not start, did not answer, or answered no."""


class MpsCommands(Protocol):
    """NVIDIA's program `nvidia-cuda-mps-control`. Starting and asking raise MpsError."""

    def start(self, environment: Mapping[str, str], shm: Path) -> None:
        """Start a daemon, which goes on without us; `shm` becomes its /dev/shm."""
        ...

    def ask(self, environment: Mapping[str, str], command: str) -> str:
        """Send a command to the daemon of that pipe directory, and return what it answers."""
        ...

    def is_alive(self, environment: Mapping[str, str]) -> bool:
        """Whether the daemon's process exists, answering or not."""
        ...

    def kill(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> None:
        """End a daemon that does not answer, if there is one, and these servers (process ID, and when it began)."""
        ...

    def started(self, pid: int) -> int | None:
        """When a server began; None where that process is no server. With the ID it names one process only."""
        ...


@dataclass(frozen=True, slots=True)
class MpsStatus:
    """How a GPU's daemon is."""

    is_running: bool = False
    servers: frozenset[int] = frozenset()
    """Process IDs of its servers, also after it has ended: they hold contexts on the GPU, and belong to no pod."""
    clients: frozenset[int] = frozenset()
    """Process IDs of those that use it."""
    problem: str = ""
    """What is wrong with it; empty where nothing is."""
    faulty: frozenset[int] = frozenset()
    """Clients of servers that a fatal fault has hit: all of them end with it."""


class Mps:
    """The daemons of a node.

    Args:
        commands: Of NVIDIA's program.
        directory: Where each GPU has a directory of its own.
    """

    def __init__(self, commands: MpsCommands, directory: Path) -> None:
        self._commands, self._directory = commands, directory

    def directory(self, uuid: GpuUuid) -> Path:
        """Return a GPU's directory; raises MpsError for what is no UUID: names become paths here."""
        if not _UUID.fullmatch(uuid):
            raise MpsError(f"expected a GPU's UUID such as GPU-8f2c…, found {uuid!r}")
        return self._directory / uuid

    def _environment(self, uuid: GpuUuid) -> dict[str, str]:
        directory = self.directory(uuid)
        return {
            "CUDA_VISIBLE_DEVICES": uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(directory / "log"),
        }

    def is_running(self, uuid: GpuUuid) -> bool:
        """Whether a GPU's daemon lives; starts no program."""
        return self._commands.is_alive(self._environment(uuid))

    def start(self, uuid: GpuUuid) -> None:
        """Start a GPU's daemon and see that it answers; one that runs already is taken over."""
        environment, directory = self._environment(uuid), self.directory(uuid)
        if self._commands.is_alive(environment):
            self._commands.ask(environment, "get_server_list")
            return
        try:
            for name in ("pipe", "log", "shm"):
                (directory / name).mkdir(parents=True, exist_ok=True)
            (directory / "shm").chmod(0o1777)  # as /dev/shm: clients run as any user
            for name in ("control", "control_lock", "control_privileged", PID_FILE):
                (directory / "pipe" / name).unlink(missing_ok=True)  # of a dead daemon: a new one would not start
        except OSError as e:
            raise MpsError(f"GPU {uuid}: expected to make the MPS daemon's directories, found {e}") from e
        if left := self._left(uuid):
            self._commands.kill(environment, left)  # a dead daemon's: they serve nobody any more
        self._commands.start(environment, directory / "shm")
        self._commands.ask(environment, "get_server_list")

    def stop(self, uuid: GpuUuid) -> None:
        """Stop a GPU's daemon; one that does not run is stopped already. Clients must have left before."""
        environment = self._environment(uuid)
        if self._commands.is_alive(environment):
            try:
                self._commands.ask(environment, f"quit -t {STOP_WITHIN_S}")
            except MpsError:
                self.end(uuid)  # nobody is on the GPU, so a daemon that does not answer serves nobody
        elif self._left(uuid):
            self.end(uuid)
        if self._commands.is_alive(environment):
            raise MpsError(f"GPU {uuid}: expected the MPS daemon to stop, found it still there; end its clients")
        self._empty(uuid)

    def end(self, uuid: GpuUuid) -> None:
        """End a GPU's daemon and its servers, whether they answer or not; nobody may be on the GPU."""
        self._commands.kill(self._environment(uuid), self._left(uuid))

    def _empty(self, uuid: GpuUuid) -> None:
        """Remove what clients and daemon left: the node's disk holds it, and nobody else would remove it."""
        for name in ("shm", "log"):
            # Made by clients: what lies too deep, or in another user's own directory, cannot be removed and stays.
            with suppress(OSError, RecursionError):
                for path in list((self.directory(uuid) / name).iterdir()):
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)

    def _left(self, uuid: GpuUuid) -> dict[int, int]:
        """Servers that were seen and still live, and when they began."""
        try:
            lines = (self.directory(uuid) / _SERVERS).read_text().splitlines()
            known = {int(pid): int(began) for pid, began in map(str.split, lines)}
        except (OSError, ValueError):
            return {}
        return {pid: began for pid, began in known.items() if self._commands.started(pid) == began}

    def _remember(self, uuid: GpuUuid, servers: frozenset[int], left: Mapping[int, int]) -> None:
        began = {pid: self._commands.started(pid) for pid in servers}
        known = {**left, **{pid: at for pid, at in began.items() if at is not None}}
        if known == left:
            return
        file = self.directory(uuid) / _SERVERS
        temporary = file.with_name(f".{_SERVERS}.new")
        with suppress(OSError):  # a full disk: they are told all the same while the daemon answers
            temporary.write_text("".join(f"{pid} {at}\n" for pid, at in sorted(known.items())))
            temporary.replace(file)

    def status(self, uuid: GpuUuid) -> MpsStatus:
        """Ask a GPU's daemon how it is; never raises for a daemon that is dead or wedged."""
        environment, left = self._environment(uuid), self._left(uuid)
        if not self._commands.is_alive(environment):
            return MpsStatus(servers=frozenset(left))
        try:
            servers = _numbers(self._commands.ask(environment, "get_server_list"))
        except MpsError as e:
            # It may serve its clients all the same: a second daemon in its place would end them.
            problem = f"the MPS daemon does not answer: {e}"
            return MpsStatus(is_running=True, servers=frozenset(left), problem=problem)
        self._remember(uuid, servers, left)
        clients: set[int] = set()
        faulty: set[int] = set()
        problems: list[str] = []
        for server in sorted(servers):
            try:
                own = _numbers(self._commands.ask(environment, f"get_client_list {server}"))
                state = self._commands.ask(environment, f"get_server_status {server}").strip()
            except MpsError as e:
                problems.append(f"MPS server {server} does not answer: {e}")
                continue
            clients |= own
            if "FAULT" in state.upper():
                faulty |= own
                whom = ", ".join(map(str, sorted(own))) or "none left"
                problems.append(f"MPS server {server} was hit by a client's fatal fault (clients: {whom})")
        return MpsStatus(True, servers | left.keys(), frozenset(clients), "; ".join(problems), frozenset(faulty))


def _numbers(answer: str) -> frozenset[int]:
    return frozenset(int(word) for word in answer.split() if word.isdecimal())
