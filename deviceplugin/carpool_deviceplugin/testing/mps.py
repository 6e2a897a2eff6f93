"""MPS control daemons in memory: they start, serve, fault, die and hang."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from carpool_deviceplugin.mps import Daemon, MpsError

_NO_ANSWER = "expected an answer of nvidia-cuda-mps-control within 3 s, found none"


@dataclass
class FakeDaemon:
    """A running daemon."""

    files: Daemon
    shm: Path
    """Its /dev/shm."""
    clients: set[int] = field(default_factory=set)
    server: int | None = None
    is_faulty: bool = False
    is_wedged: bool = False
    is_server_wedged: bool = False

    def write_log(self, *lines: object) -> None:
        """Append to the server's log."""
        with (self.files.log / "server.log").open("a") as log:
            log.writelines(f"[2026-11-27 23:14:20.053 Server  {self.server}] {line}\n" for line in lines)

    def fault(self) -> None:
        """A client's illegal address hits the server and all its clients."""
        self.is_faulty = bool(self.clients)
        devices = ("The following devices will be reset:", 0)
        self.write_log(*devices, "The following client process have a sticky error set:", *sorted(self.clients))

    def leave(self, pid: int) -> None:
        """A client ends; after the last one, a server that was hit is as before."""
        self.clients.discard(pid)
        self.is_faulty = self.is_faulty and bool(self.clients)


class FakeMpsCommands:
    """NVIDIA's program as documented, and as recorded on an H100 with driver 580.

    A server exists from the first client on, and may outlive its daemon.
    """

    def __init__(self) -> None:
        self.daemons: dict[str, FakeDaemon] = {}
        """By pipe directory."""
        self.starts = self.asked = 0
        self.servers_of: dict[str, set[int]] = {}
        """Server processes by pipe directory."""
        self.refuse = ""
        """Error of each start; empty if daemons start."""
        self.refuse_kill = ""
        """Error of each kill; empty if processes can be killed."""
        self.ended: Callable[[int], None] = lambda _: None
        """Called with the process ID of each server that has ended."""
        self._recorded: set[int] = set()
        self._next_server = 9000

    def start(self, daemon: Daemon, shm: Path) -> None:
        """Start a daemon; a second one on a pipe directory is refused."""
        pipe = str(daemon.pipe)
        if self.refuse:
            raise MpsError(self.refuse)
        if pipe in self.daemons:
            raise MpsError("An instance of this daemon is already running")
        if not (daemon.pipe.is_dir() and shm.is_dir()):
            raise MpsError(f"expected directories {pipe} and {shm}")
        self.starts += 1
        self.daemons[pipe] = FakeDaemon(daemon, shm)
        (daemon.pipe / "control").touch()
        (daemon.log / "server.log").touch()

    def ask(self, daemon: Daemon, command: str) -> str:
        """Answer as the daemon would."""
        self.asked += 1
        pipe = str(daemon.pipe)
        found = self.daemons.get(pipe)
        if found is None:
            raise MpsError(f"Cannot find MPS control daemon process in {pipe}")
        verb, _, server = command.partition(" ")
        if found.is_wedged or (found.is_server_wedged and verb not in ("get_server_list", "quit")):
            raise MpsError(_NO_ANSWER)
        match verb:
            case "get_server_list":
                return f"{found.server}\n" if found.server else ""
            case "get_server_status" if not server:
                return "A server PID is required\n"
            case "get_client_list" | "get_server_status" if server != str(found.server):
                return f"Server {server or 0} not found\n"
            case "get_client_list":
                return "".join(f"{pid}\n" for pid in sorted(found.clients))
            case "get_server_status":
                return "FAULT\n" if found.is_faulty else "ACTIVE\n"
            case "quit":
                self._end(pipe, self.servers_of.get(pipe, set()))
                return ""
        return f'Unknown command "{command}"\n'

    def is_alive(self, daemon: Daemon) -> bool:
        """Whether there is a daemon."""
        return str(daemon.pipe) in self.daemons

    def kill(self, daemon: Daemon) -> None:
        """End a daemon and its recorded servers."""
        if self.refuse_kill:
            raise MpsError(self.refuse_kill)
        self._end(str(daemon.pipe), self._recorded)

    def _end(self, pipe: str, servers: set[int]) -> None:
        self.daemons.pop(pipe, None)
        for server in self.servers_of.get(pipe, set()) & servers:
            self.servers_of[pipe].remove(server)
            self.ended(server)

    def servers(self, daemon: Daemon, present: Iterable[int] = (), listed: Iterable[int] = ()) -> frozenset[int]:
        """Return the daemon's servers that were recorded, are on the GPU, or are listed by a living daemon."""
        pipe = str(daemon.pipe)
        visible = self._recorded | {*present, *(listed if pipe in self.daemons else ())}
        found = frozenset(self.servers_of.get(pipe, set()) & visible)
        self._recorded |= found
        return found

    def has_server(self, pid: int) -> bool:
        """Whether a server process lives."""
        return any(pid in servers for servers in self.servers_of.values())

    def connect(self, pipe: str, pid: int) -> int:
        """Connect a client; return the server's process ID."""
        daemon = self.daemons[pipe]
        if daemon.server is None:
            daemon.server, self._next_server = self._next_server, self._next_server + 1
            self.servers_of.setdefault(pipe, set()).add(daemon.server)
        daemon.clients.add(pid)
        daemon.write_log(f"Status of client {{PID: {pid}, Context ID: 1}} is ACTIVE")
        return daemon.server

    def die(self, pipe: str) -> None:
        """End a daemon as a crash would; its server lives on."""
        del self.daemons[pipe]
