"""MPS control daemons in memory: they start, serve, fault, die and wedge."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from carpool_deviceplugin.mps import MpsError


@dataclass
class FakeDaemon:
    """One daemon."""

    environment: Mapping[str, str]
    shm: Path
    """Its /dev/shm."""
    clients: set[int] = field(default_factory=set)
    server: int | None = None
    is_faulty: bool = False
    is_wedged: bool = False
    is_server_wedged: bool = False


class FakeMpsCommands:
    """Behaves as NVIDIA's program is documented to: a server exists from the first client on."""

    def __init__(self) -> None:
        self.daemons: dict[str, FakeDaemon] = {}
        """By pipe directory."""
        self.starts = self.asked = 0
        self.servers_of: dict[str, set[int]] = {}
        """Server processes by pipe directory; they outlive a daemon that was killed."""
        self.refuse = ""
        """Why no daemon starts; empty where they do."""
        self.refuse_kill = ""
        """Why neither daemon nor server is ended; empty where they are."""
        self.ended: Callable[[int], None] = lambda _: None
        """Called with the process ID of each server that has ended."""
        self._next_server = 9000

    def start(self, environment: Mapping[str, str], shm: Path) -> None:
        """Start a daemon; two on one pipe directory cannot be."""
        pipe = environment["CUDA_MPS_PIPE_DIRECTORY"]
        if self.refuse:
            raise MpsError(self.refuse)
        if pipe in self.daemons:
            raise MpsError("An instance of this daemon is already running")
        if not (Path(pipe).is_dir() and shm.is_dir()):
            raise MpsError(f"expected directories {pipe} and {shm}")
        self.starts += 1
        self.daemons[pipe] = FakeDaemon(dict(environment), shm)
        (Path(pipe) / "control").touch()

    def ask(self, environment: Mapping[str, str], command: str) -> str:
        """Answer as the daemon would."""
        self.asked += 1
        pipe = environment["CUDA_MPS_PIPE_DIRECTORY"]
        daemon = self.daemons.get(pipe)
        if daemon is None:
            raise MpsError(f"Cannot find MPS control daemon process in {pipe}")
        if daemon.is_wedged:
            raise MpsError("expected an answer of nvidia-cuda-mps-control within 3 s, found none")
        if daemon.is_server_wedged and command != "get_server_list" and not command.startswith("quit"):
            raise MpsError("expected an answer of nvidia-cuda-mps-control within 3 s, found none")
        match command.split():
            case ["get_server_list"]:
                return f"{daemon.server}\n" if daemon.server else ""
            case ["get_client_list", _]:
                return "".join(f"{pid}\n" for pid in sorted(daemon.clients))
            case ["get_server_status", _]:
                return "FAULT\n" if daemon.is_faulty else "ACTIVE\n"
            case ["quit", *_]:
                del self.daemons[pipe]
                self._end(pipe, set(self.servers_of.get(pipe, ())))
                return ""
        raise MpsError(f"Unrecognized command {command}")

    def is_alive(self, environment: Mapping[str, str]) -> bool:
        """Whether there is a daemon."""
        return environment["CUDA_MPS_PIPE_DIRECTORY"] in self.daemons

    def kill(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> None:
        """End a daemon and servers."""
        if self.refuse_kill:
            raise MpsError(self.refuse_kill)
        pipe = environment["CUDA_MPS_PIPE_DIRECTORY"]
        self.daemons.pop(pipe, None)
        self._end(pipe, self.servers_of.get(pipe, set()) & servers.keys())

    def _end(self, pipe: str, servers: set[int]) -> None:
        for server in servers:
            self.servers_of[pipe].remove(server)
            self.ended(server)

    def started(self, pid: int) -> int | None:
        """When a server began; its number is never used again."""
        return pid if any(pid in servers for servers in self.servers_of.values()) else None

    def living(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> dict[int, int]:
        """Return those of these servers that still run and belong to this daemon."""
        own = self.servers_of.get(environment["CUDA_MPS_PIPE_DIRECTORY"], set())
        return {pid: began for pid, began in servers.items() if pid in own}

    def home(self, environment: Mapping[str, str]) -> str | None:
        """Name where a daemon lives: each somewhere else."""
        pipe = environment["CUDA_MPS_PIPE_DIRECTORY"]
        return pipe if pipe in self.daemons else None

    def servers(
        self, environment: Mapping[str, str], home: str, present: Iterable[int], listed: Iterable[int]
    ) -> dict[int, int]:
        """Return the daemon's servers; without a daemon only those that are on the GPU."""
        believed = {*present, *(listed if environment["CUDA_MPS_PIPE_DIRECTORY"] in self.daemons else ())}
        return {pid: pid for pid in self.servers_of.get(home, set()) & believed}

    def connect(self, pipe: str, pid: int) -> int:
        """A client connects; return the server's process ID."""
        daemon = self.daemons[pipe]
        if daemon.server is None:
            daemon.server, self._next_server = self._next_server, self._next_server + 1
            self.servers_of.setdefault(pipe, set()).add(daemon.server)
        daemon.clients.add(pid)
        return daemon.server

    def die(self, pipe: str) -> None:
        """The daemon dies; its server lives on."""
        del self.daemons[pipe]
