"""One MPS control daemon for each GPU: started, asked how it is, drained and stopped.

Layout of a GPU's directory: `pipe/` (clients and daemon meet there), `log/`, `shm` (a link to where the node has the
memory that this very daemon and its clients share). Clients write in both, so nothing there is believed; who daemon and
servers are stands beside them. A daemon serves one GPU, and the plan lets only pods of one namespace behind it; the
daemon itself serves one user at a time.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from carpool_core.values import GpuUuid

from carpool_deviceplugin.mps.leftovers import MOMENT_S, empty, make_empty, put_away, sweep
from carpool_deviceplugin.mps.port import MpsCommands, MpsError
from carpool_deviceplugin.quoting import quoted

_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PID = re.compile(r"[0-9]{1,7}")
STOP_WITHIN_S = 2
"""How long `quit` waits for clients that are ending; less than an answer may take."""
_MEMORY = "memory"
_HOME = "home"
"""Beside the pipe directory: where the daemon lived when it was last seen, and its servers with it."""
_SERVERS = "servers"
"""Beside it: servers and when they began. They may outlive a daemon, or one that answers."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A file system of its own for what daemons and clients share; without one it is the node's disk."""

    here: Path
    """Where this process has it."""
    on_node: Path
    """Where the node has it, as whoever starts a container sees it."""


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
    is_silent: bool = False
    """Whether it, or a server of its, does not answer."""
    faulty: frozenset[int] = frozenset()
    """Clients of servers that a fatal fault has hit: all of them end with it."""


class Mps:
    """The daemons of a node.

    Args:
        commands: Of NVIDIA's program.
        directory: Where each GPU has a directory of its own.
        shared: Where daemons and clients share memory; there, too, when None.
        may_write: Whether what is seen of daemons and servers is kept; not beside an agent that does so.
        tidy_within_s: How long one removal of what clients left may take, in seconds.
    """

    def __init__(
        self,
        commands: MpsCommands,
        directory: Path,
        shared: SharedMemory | None = None,
        *,
        may_write: bool = True,
        tidy_within_s: float = MOMENT_S,
    ) -> None:
        self._commands, self._directory, self._shared, self._may_write = commands, directory, shared, may_write
        self._tidy_within_s = tidy_within_s
        self._environments: dict[GpuUuid, Mapping[str, str]] = {}

    def directory(self, uuid: GpuUuid) -> Path:
        """Return a GPU's directory; raises MpsError for what is no UUID: names become paths here."""
        if not _UUID.fullmatch(uuid):
            raise MpsError(f"expected a GPU's UUID such as GPU-8f2c…, found {quoted(uuid)}")
        return self._directory / uuid

    def pipe(self, uuid: GpuUuid) -> Path:
        """Return where clients meet a GPU's daemon, as the node sees it."""
        return self.directory(uuid) / "pipe"

    def shm(self, uuid: GpuUuid) -> Path:
        """Return what becomes /dev/shm of a daemon's clients, as the node sees it."""
        place = self.directory(uuid) / "shm"
        return place.readlink() if place.is_symlink() else place

    def _memory(self, uuid: GpuUuid) -> SharedMemory:
        """Where the memory of a GPU's daemons is, of each in a directory of its own."""
        if self._shared is not None:
            return SharedMemory(self._shared.here / uuid, self._shared.on_node / uuid)
        return SharedMemory(self.directory(uuid) / _MEMORY, self.directory(uuid) / _MEMORY)

    def _environment(self, uuid: GpuUuid) -> Mapping[str, str]:
        if uuid not in self._environments:  # asked for at each look
            directory = self.directory(uuid)
            self._environments[uuid] = {
                "CUDA_VISIBLE_DEVICES": uuid,
                "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"),
                "CUDA_MPS_LOG_DIRECTORY": str(directory / "log"),
            }
        return self._environments[uuid]

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
            (directory / "log").mkdir(parents=True, exist_ok=True)
            make_empty(
                directory / "pipe", self._tidy_within_s
            )  # of a dead daemon a new one would not start, and its clients wrote there
            shm = self._make_shm(uuid)
        except OSError as e:
            raise MpsError(f"GPU {uuid}: expected to make the MPS daemon's directories, found {e}") from e
        if left := self._left(uuid):
            self._commands.kill(environment, left)  # a dead daemon's: they serve nobody any more
        self._commands.start(environment, shm)
        self._commands.ask(environment, "get_server_list")

    def _make_shm(self, uuid: GpuUuid) -> Path:
        """Make a new daemon's memory: what earlier clients left and cannot be removed takes space, and is not in it."""
        place, memory, name = self.directory(uuid) / "shm", self._memory(uuid), secrets.token_hex(8)
        empty(memory.here, within_s=self._tidy_within_s)
        (here := memory.here / name).mkdir(parents=True)
        here.chmod(0o1777)  # as /dev/shm: clients run as any user
        if place.is_dir() and not place.is_symlink():
            put_away(place, self._tidy_within_s)  # of an earlier version
        (link := place.with_name(".shm.new")).unlink(missing_ok=True)
        link.symlink_to(memory.on_node / name)
        link.replace(place)
        return here

    def stop(self, uuid: GpuUuid) -> None:
        """Stop a GPU's daemon; one that does not run is stopped already. Clients must have left before.

        Raises:
            MpsError: It goes on.
            OSError: Its directory could not be put away.
        """
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
        # A container that has not ended yet may hold it, and must not meet the next daemon.
        put_away(self.pipe(uuid), self._tidy_within_s)
        self._empty(uuid)

    def end(self, uuid: GpuUuid) -> None:
        """End a GPU's daemon and its servers, whether they answer or not; nobody may be on the GPU."""
        self._commands.kill(self._environment(uuid), self._left(uuid))
        self._empty(uuid)

    def sweep(self) -> None:
        """Remove what earlier stops put away and could not remove at once, of all GPUs; takes a moment at most."""
        with suppress(OSError):  # whoever needs the directory is told
            gpus = [one for one in self._directory.iterdir() if _UUID.fullmatch(one.name) and not one.is_symlink()]
            sweep(*gpus, within_s=self._tidy_within_s)

    def tidy(self, uuid: GpuUuid) -> None:
        """Remove what clients of a GPU's daemon left, if it does not run."""
        if not self.is_running(uuid):
            self._empty(uuid)

    def _empty(self, uuid: GpuUuid) -> None:
        empty(self._memory(uuid).here, self.directory(uuid) / "log", within_s=self._tidy_within_s)

    def _left(self, uuid: GpuUuid) -> dict[int, int]:
        """Servers that were seen and still live, and when they began."""
        return dict(self._commands.living(self._environment(uuid), self._seen(uuid)))

    def _seen(self, uuid: GpuUuid) -> dict[int, int]:
        try:
            lines = (self.directory(uuid) / _SERVERS).read_text().splitlines()
            return {int(pid): int(began) for pid, began in map(str.split, lines)}
        except (OSError, ValueError):
            return {}

    def _home(self, uuid: GpuUuid) -> str | None:
        """Where a GPU's daemon lives, or lived when it was last seen; None where it never was."""
        home = self._commands.home(self._environment(uuid))
        try:
            kept = (self.directory(uuid) / _HOME).read_text()
        except (OSError, ValueError):
            kept = None
        if home is not None and home != kept:
            self._keep(uuid, _HOME, home)
        return home if home is not None else kept

    def _keep(self, uuid: GpuUuid, name: str, text: str) -> None:
        if not self._may_write:
            return
        file = self.directory(uuid) / name
        temporary = file.with_name(f".{name}.new")
        with suppress(OSError):  # a full disk: while the daemon answers, it says so itself
            temporary.write_text(text)
            temporary.replace(file)

    def status(self, uuid: GpuUuid, present: Iterable[int] = ()) -> MpsStatus:
        """Ask a GPU's daemon how it is; never raises for a daemon that is dead or wedged.

        Args:
            uuid: The GPU.
            present: Process IDs of who is on it: servers of a daemon that answers no more may be among them.
        """
        environment, known = self._environment(uuid), self._left(uuid)
        home, is_running, problem, listed = self._home(uuid), self._commands.is_alive(environment), "", frozenset[int]()
        if is_running:
            try:
                listed = _numbers(self._commands.ask(environment, "get_server_list"))
            except MpsError as e:
                # It may serve its clients all the same: a second daemon in its place would end them.
                problem = f"the MPS daemon does not answer: {e}"
        # Its answer came through a directory in which clients write: no process is a server because it is named there.
        left = {**known, **(self._commands.servers(environment, home, present, listed) if home is not None else {})}
        if left != self._seen(uuid):
            self._keep(uuid, _SERVERS, "".join(f"{pid} {at}\n" for pid, at in sorted(left.items())))
        if problem or not is_running:
            return MpsStatus(is_running, frozenset(left), problem=problem, is_silent=bool(problem))
        clients: set[int] = set()
        faulty: set[int] = set()
        problems: list[str] = []
        is_silent = False
        for server in sorted(listed & left.keys()):
            try:
                own = _numbers(self._commands.ask(environment, f"get_client_list {server}"))
                state = self._commands.ask(environment, f"get_server_status {server}").strip()
            except MpsError as e:
                problems.append(f"MPS server {server} does not answer: {e}")
                is_silent = True  # nobody gets any further there than behind a daemon that hangs
                continue
            clients |= own
            if "FAULT" in state.upper():
                faulty |= own
                whom = ", ".join(map(str, sorted(own))) or "none left"
                problems.append(f"MPS server {server} was hit by a client's fatal fault (clients: {whom})")
        return MpsStatus(
            True,
            frozenset(left),
            frozenset(clients),
            "; ".join(problems),
            is_silent=is_silent,
            faulty=frozenset(faulty),
        )


def _numbers(answer: str) -> frozenset[int]:
    """Read process IDs; the kernel has none of more than seven digits, and a client may answer."""
    return frozenset(int(word) for word in answer.split() if _PID.fullmatch(word))
