"""MPS control daemons, one for each GPU: start, status, stop and cleanup.

Layout of a GPU's directory: `pipe/` (the daemon's pipes), `log/`, and `shm`, a link to the node's path of the memory
that the daemon shares with its clients. Clients can write in `pipe/` and `shm`, so their content is not trusted. The
process IDs of daemon and servers are kept beside them. The plan lets pods of only one namespace use a daemon. The
daemon itself serves one user at a time.
"""

import errno
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import socketserver
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Protocol

import msgspec
import structlog
from carpool_core.values import GpuUuid

from carpool_deviceplugin.gpu import DeviceError
from carpool_deviceplugin.processes import pod_of
from carpool_deviceplugin.quoting import printable, quoted

_OLD = re.compile(r"\.old\.[0-9a-f]{16}")
_MOST = 256
"""Maximum number of directories in one call of `find`."""
MOMENT_S = 1.5
"""Time limit of one cleanup, so that a tenant with many files cannot delay the next one. Several cleanups fit into the
timeout of a request. The next start or stop of a daemon removes the rest."""


def make_empty(directory: Path, within_s: float = MOMENT_S) -> None:
    """Create an empty directory; one that cannot be emptied is moved aside. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    empty(directory, within_s=within_s)
    if _has_something(directory):
        put_away(directory, within_s)
        directory.mkdir()


def put_away(directory: Path, within_s: float = MOMENT_S) -> None:
    """Move a directory aside, and delete as much of it as the time allows; an absent one is ignored. Raises OSError."""
    with suppress(FileNotFoundError):
        directory.rename(directory.with_name(f".old.{secrets.token_hex(8)}"))
    sweep(directory.parent, within_s=within_s)


def sweep(*directories: Path, within_s: float = MOMENT_S) -> None:
    """Delete directories that `put_away` moved aside, as far as the time allows.

    The order is random, so that an undeletable directory cannot use up the time of the others for ever.
    """
    old = [Path(entry.path) for directory in directories for entry in _put_away(directory)]
    some = SystemRandom().sample(old, min(len(old), _MOST))
    empty(*some, within_s=within_s)
    for one in some:
        with suppress(OSError):
            one.rmdir()


def _put_away(directory: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(directory) as entries:
            return [one for one in entries if _OLD.fullmatch(one.name) and one.is_dir(follow_symlinks=False)]
    except OSError:
        return []  # a later use of the directory reports the error


def empty(*directories: Path, within_s: float = MOMENT_S) -> None:
    """Delete the files that clients and daemon left in these directories, as far as the time allows.

    `find` deletes them, because millions of files would need unbounded memory in this process. Files in closed
    directories of another user stay.
    """
    with suppress(OSError, subprocess.TimeoutExpired):
        if full := [str(one.absolute()) for one in directories if _has_something(one)]:
            command = ["find", *full, "-mindepth", "1", "-delete"]
            quiet = subprocess.DEVNULL
            subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=within_s, check=False)


def _has_something(directory: Path) -> bool:
    """Whether a directory has entries; also True if it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True


PROGRAM = "nvidia-cuda-mps-control"
PID_FILE = "nvidia-cuda-mps-control.pid"
"""File in the pipe directory into which the daemon writes its process ID."""


class MpsError(DeviceError):
    """The daemon did not start, did not answer, or reported an error."""


class MpsCommands(Protocol):
    """The program `nvidia-cuda-mps-control`. `start`, `ask` and `kill` raise MpsError."""

    def start(self, environment: Mapping[str, str], shm: Path) -> None:
        """Start a daemon that outlives this process; `shm` becomes its /dev/shm.

        If it raises, no daemon is left; the error names a process that could not be killed.
        """
        ...

    def ask(self, environment: Mapping[str, str], command: str) -> str:
        """Send a command to the daemon and return its answer."""
        ...

    def is_alive(self, environment: Mapping[str, str]) -> bool:
        """Whether the daemon's process exists."""
        ...

    def kill(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> None:
        """Kill the daemon, if it exists, and these servers (start time by process ID)."""
        ...

    def living(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> Mapping[int, int]:
        """Return those of the servers (start time by process ID) that are alive and belong to no other GPU."""
        ...

    def home(self, environment: Mapping[str, str]) -> str | None:
        """Return the control group of the daemon and its servers, which no client can join; None without a daemon."""
        ...

    def servers(
        self, environment: Mapping[str, str], home: str, present: Iterable[int], listed: Iterable[int]
    ) -> Mapping[int, int]:
        """Return the servers of this GPU's daemon, as start time by process ID.

        Args:
            environment: Environment of the daemon.
            home: Control group of the daemon; daemons of several GPUs may share it.
            present: Process IDs on the GPU, from the driver.
            listed: Process IDs from the daemon's answer; untrusted.
        """
        ...


_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PID = re.compile(r"[0-9]{1,7}")
STOP_WITHIN_S = 2
"""How long `quit` waits for clients that are ending, in seconds; less than the timeout of an answer."""
_MEMORY = "memory"
_HOME = "home"
"""File beside the pipe directory with the last known control group of the daemon."""
_SERVERS = "servers"
"""File beside the pipe directory with the servers and their start times. Servers may outlive their daemon."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A separate file system for the memory that daemons and clients share."""

    here: Path
    """Its path in this process."""
    on_node: Path
    """Its path on the node, as the container runtime sees it."""


@dataclass(frozen=True, slots=True)
class MpsStatus:
    """State of a GPU's daemon."""

    is_running: bool = False
    servers: frozenset[int] = frozenset()
    """Process IDs of its servers, also after it has ended. They hold contexts on the GPU and belong to no pod."""
    clients: frozenset[int] = frozenset()
    """Process IDs of its clients."""
    problem: str = ""
    """Error message; empty if the daemon is healthy."""
    is_silent: bool = False
    """Whether the daemon or one of its servers does not answer."""
    faulty: frozenset[int] = frozenset()
    """Clients of servers with a fatal fault; all of them end."""


class Mps:
    """The MPS daemons of a node.

    Args:
        commands: NVIDIA's program.
        directory: Parent of the GPUs' directories.
        shared: File system for shared memory; None uses `directory`.
        may_write: Whether to record daemons and servers; False beside an agent that does.
        tidy_within_s: Time limit of one cleanup, in seconds.
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
        """Return a GPU's directory; raises MpsError for an invalid UUID."""
        if not _UUID.fullmatch(uuid):
            raise MpsError(f"expected a GPU's UUID such as GPU-8f2c…, found {quoted(uuid)}")
        return self._directory / uuid

    def pipe(self, uuid: GpuUuid) -> Path:
        """Return the pipe directory of a GPU's daemon, as a path on the node."""
        return self.directory(uuid) / "pipe"

    def shm(self, uuid: GpuUuid) -> Path:
        """Return the /dev/shm of a daemon's clients, as a path on the node."""
        place = self.directory(uuid) / "shm"
        return place.readlink() if place.is_symlink() else place

    def _memory(self, uuid: GpuUuid) -> SharedMemory:
        """Return the parent of the shared-memory directories of a GPU's daemons."""
        if self._shared is not None:
            return SharedMemory(self._shared.here / uuid, self._shared.on_node / uuid)
        return SharedMemory(self.directory(uuid) / _MEMORY, self.directory(uuid) / _MEMORY)

    def _environment(self, uuid: GpuUuid) -> Mapping[str, str]:
        if uuid not in self._environments:
            directory = self.directory(uuid)
            self._environments[uuid] = {
                "CUDA_VISIBLE_DEVICES": uuid,
                "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"),
                "CUDA_MPS_LOG_DIRECTORY": str(directory / "log"),
            }
        return self._environments[uuid]

    def is_running(self, uuid: GpuUuid) -> bool:
        """Whether a GPU's daemon is alive; starts no program."""
        return self._commands.is_alive(self._environment(uuid))

    def start(self, uuid: GpuUuid) -> None:
        """Start a GPU's daemon, or adopt a running one, and check that it answers."""
        environment, directory = self._environment(uuid), self.directory(uuid)
        if self._commands.is_alive(environment):
            self._commands.ask(environment, "get_server_list")
            return
        try:
            (directory / "log").mkdir(parents=True, exist_ok=True)
            # A new daemon does not start on the pipes of a dead one.
            make_empty(directory / "pipe", self._tidy_within_s)
            shm = self._make_shm(uuid)
        except OSError as e:
            raise MpsError(f"GPU {uuid}: expected to make the MPS daemon's directories, found {e}") from e
        if left := self._left(uuid):
            self._commands.kill(environment, left)  # servers of a dead daemon
        self._commands.start(environment, shm)
        self._commands.ask(environment, "get_server_list")

    def _make_shm(self, uuid: GpuUuid) -> Path:
        """Create a new shared-memory directory, so that a new daemon never sees the files of earlier clients."""
        place, memory, name = self.directory(uuid) / "shm", self._memory(uuid), secrets.token_hex(8)
        empty(memory.here, within_s=self._tidy_within_s)
        (here := memory.here / name).mkdir(parents=True)
        here.chmod(0o1777)  # the mode of /dev/shm: clients run as any user
        if place.is_dir() and not place.is_symlink():
            put_away(place, self._tidy_within_s)  # earlier versions made a directory
        (link := place.with_name(".shm.new")).unlink(missing_ok=True)
        link.symlink_to(memory.on_node / name)
        link.replace(place)
        return here

    def stop(self, uuid: GpuUuid) -> None:
        """Stop a GPU's daemon, if it runs. Its clients must have ended before.

        Raises:
            MpsError: The daemon is still alive.
            OSError: Its pipe directory could not be moved aside.
        """
        environment = self._environment(uuid)
        if self._commands.is_alive(environment):
            try:
                self._commands.ask(environment, f"quit -t {STOP_WITHIN_S}")
            except MpsError:
                self.end(uuid)  # it has no clients, so it may be killed
        elif self._left(uuid):
            self.end(uuid)
        if self._commands.is_alive(environment):
            raise MpsError(f"GPU {uuid}: expected the MPS daemon to stop, found it still there; end its clients")
        # A container that is still ending may have it mounted; it must not reach the next daemon.
        put_away(self.pipe(uuid), self._tidy_within_s)
        self._empty(uuid)

    def end(self, uuid: GpuUuid) -> None:
        """Kill a GPU's daemon and its servers. The GPU must have no clients."""
        self._commands.kill(self._environment(uuid), self._left(uuid))
        self._empty(uuid)

    def sweep(self) -> None:
        """Delete leftovers of earlier stops, for all GPUs, within one time limit."""
        with suppress(OSError):  # a later use of the directory reports the error
            gpus = [one for one in self._directory.iterdir() if _UUID.fullmatch(one.name) and not one.is_symlink()]
            sweep(*gpus, within_s=self._tidy_within_s)

    def tidy(self, uuid: GpuUuid) -> None:
        """Delete the leftovers of clients, unless the GPU's daemon runs."""
        if not self.is_running(uuid):
            self._empty(uuid)

    def _empty(self, uuid: GpuUuid) -> None:
        empty(self._memory(uuid).here, self.directory(uuid) / "log", within_s=self._tidy_within_s)

    def _left(self, uuid: GpuUuid) -> dict[int, int]:
        """Return recorded servers that are still alive, as start time by process ID."""
        return dict(self._commands.living(self._environment(uuid), self._seen(uuid)))

    def _seen(self, uuid: GpuUuid) -> dict[int, int]:
        try:
            lines = (self.directory(uuid) / _SERVERS).read_text().splitlines()
            return {int(pid): int(began) for pid, began in map(str.split, lines)}
        except (OSError, ValueError):
            return {}

    def _home(self, uuid: GpuUuid) -> str | None:
        """Return the control group of a GPU's daemon, or the last known one; None if it never ran."""
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
        with suppress(OSError):  # on a full disk the daemon's own answer still counts
            temporary.write_text(text)
            temporary.replace(file)

    def status(self, uuid: GpuUuid, present: Iterable[int] = ()) -> MpsStatus:
        """Return the state of a GPU's daemon; never raises for a daemon that is dead or hangs.

        Args:
            uuid: The GPU.
            present: Process IDs on the GPU; servers of a daemon that does not answer may be among them.
        """
        environment, known = self._environment(uuid), self._left(uuid)
        home, is_running, problem, listed = self._home(uuid), self._commands.is_alive(environment), "", frozenset[int]()
        if is_running:
            try:
                listed = _numbers(self._commands.ask(environment, "get_server_list"))
            except MpsError as e:
                # Its clients may still run: a second daemon would end them.
                problem = f"the MPS daemon does not answer: {e}"
        # A client can forge the answer, so the processes that it lists are verified.
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
                is_silent = True
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
    """Parse process IDs of at most seven digits; other words are ignored, because a client can forge the answer."""
    return frozenset(int(word) for word in answer.split() if _PID.fullmatch(word))


_COMM = PROGRAM[:15]
"""The kernel's name of the daemon and its servers."""
_STATE, _PARENT, _STARTED = 0, 1, 19
"""Indexes of the fields after the command's name in /proc/PID/stat."""
_LONGEST_PID = 32
_LOOK_EVERY_S = 0.1
_END_WITHIN_S = {signal.SIGTERM: 1.0, signal.SIGKILL: 3.0}
"""Seconds to wait after each signal; the driver needs time to free a process's GPU resources."""


class MpsProcesses:
    """MPS processes in this process's PID namespace.

    Args:
        proc: Path of /proc.
        monotonic: Monotonic clock, in seconds.
        sleep: Waits for the given number of seconds.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._proc, self._monotonic, self._sleep = proc, monotonic, sleep

    def began(self, pid: int) -> tuple[int, int] | None:
        """Return start time (ticks since boot) and parent of a daemon or server; None for any other process."""
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
        """Return a name of a process's control group that does not depend on the reader's group; None if it has ended.

        The start of a path depends on the reader's cgroup namespace, so only the pod and the last path components
        count. In the reader's own namespace root the name is "-".
        """
        try:
            text = (self._proc / str(pid) / "cgroup").read_text()
        except OSError:
            return None
        return " ".join([pod_of(text) or "-", *sorted({line.rpartition("/")[2] for line in text.splitlines()} - {""})])

    def written(self, directory: Path) -> int | None:
        """Return the process ID that the daemon wrote into its pipe directory; None if absent or not trustworthy.

        Clients can write there. So links and pipes are not opened. The process must be in this process's control
        group and have this directory in its environment.
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
        """Return a function that finds our daemons and servers of a pipe directory, recorded or not.

        It returns start times by process ID. The first call reads all processes; later calls read the known and the
        new ones, and all of them again before they return nothing. A process that was found counts until it has
        ended, because its environment disappears before its GPU resources.
        """
        others, ours = set[int](), dict[int, int]()

        def look() -> Mapping[int, int]:
            there = {int(entry.name) for entry in os.scandir(self._proc) if entry.name.isdecimal()}
            found = {pid: at for pid, at in ours.items() if (known := self.began(pid)) is not None and known[0] == at}
            found |= self._among(there - others, directory)
            if others and not found:  # a PID may have been reused, or a process may have called exec
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
        """End processes by SIGTERM, then SIGKILL, including those that appear meanwhile.

        Args:
            find: Returns the remaining processes, as start time by process ID.

        Raises:
            MpsError: A process does not end, or the right to signal it is missing.
        """
        if not find():
            return
        for number, within_s in _END_WITHIN_S.items():
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
        """Whether a process is in our control group and has this pipe directory in its environment."""
        try:
            is_managed = (self._proc / str(pid) / "cgroup").read_bytes() == (
                self._proc / "self" / "cgroup"
            ).read_bytes()
            its = (self._proc / str(pid) / "environ").read_bytes().split(b"\0") if is_managed else []
        except OSError:
            return False
        return f"CUDA_MPS_PIPE_DIRECTORY={directory}".encode() in its


LONGEST_ANSWER = 1 << 16
"""In bytes; more than the process IDs of all possible clients of a daemon."""
_POLL_EVERY_S = 0.01


def talk(program: str, process: "subprocess.Popen[bytes]", text: str, within_s: float) -> tuple[str, str]:
    """Send text to a program and return its output and error output.

    A client can forge a daemon's answer, so its length is limited. The answer ends when the program ends, even if
    another process holds its output open.

    Raises:
        TimeoutExpired: The program did not end in time.
        MpsError: The answer is longer than LONGEST_ANSWER.
    """
    end = time.monotonic() + within_s
    assert process.stdin is not None  # noqa: S101  # all three are pipes
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(text.encode())
    said = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    with selectors.DefaultSelector() as selector:
        for file in said:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            has_ended = process.poll() is not None
            ready = selector.select(0 if has_ended else _POLL_EVERY_S)
            if not ready and has_ended:
                break
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(process.args, within_s)
            for file in (key.fd for key, _ in ready):
                piece = os.read(file, LONGEST_ANSWER)
                said[file] += piece
                if len(said[file]) > LONGEST_ANSWER:
                    raise MpsError(f"expected an answer of {program} of at most {LONGEST_ANSWER:,} bytes, found more")
                if not piece:
                    selector.unregister(file)
    process.wait(max(0.0, end - time.monotonic()))
    output, errors = (one.decode(errors="replace") for one in said.values())
    return output, errors


RECORD = "daemon"
"""File beside the pipe directory, where no client can write, with the daemon's process ID and start time."""
_CAPABILITIES = {"SETGID": 6, "SETUID": 7, "SYS_ADMIN": 21}
"""A daemon runs its server as its client's user, and mounts its own /dev/shm."""
_PRIVATE_SHM = 'mount --bind "$1" /dev/shm && exec "$2" -d'
"""Mounts a private /dev/shm for a daemon, so that tenants of two GPUs never see each other's files."""


class MpsProgram:
    """Runs `nvidia-cuda-mps-control` from PATH.

    Args:
        private_shm: Whether each daemon gets its own /dev/shm; needs CAP_SYS_ADMIN.
        within_s: Timeout of an answer, in seconds.
        processes: The node's processes; None reads /proc.
    """

    def __init__(
        self, *, private_shm: bool = True, within_s: float = 3.0, processes: MpsProcesses | None = None
    ) -> None:
        self._private_shm, self._within_s = private_shm, within_s
        self._processes = processes or MpsProcesses()

    @staticmethod
    def is_installed() -> bool:
        """Whether the program is on PATH; it comes with the driver."""
        return shutil.which(PROGRAM) is not None

    @staticmethod
    def missing(status: Path = Path("/proc/self/status")) -> str:
        """Return the missing requirement of mode MPS and how to provide it; empty if there is none."""
        if not MpsProgram.is_installed():
            return f"{PROGRAM} on PATH; it comes with the driver: mount it, or install cuda-mps"
        for program, package in (("unshare", "util-linux"), ("find", "findutils")):
            if shutil.which(program) is None:
                return f"{program} on PATH; install {package}"
        held = next((line for line in status.read_text().splitlines() if line.startswith("CapEff:")), "CapEff: 0")
        lacking = [name for name, bit in _CAPABILITIES.items() if not int(held.split()[1], 16) >> bit & 1]
        return f"the capabilities {', '.join(lacking)}; add them to the pod carpool-mps" if lacking else ""

    def start(self, environment: Mapping[str, str], shm: Path) -> None:
        """Start a daemon; unrecorded processes of an interrupted or failed start are ended."""
        program = shutil.which(PROGRAM)
        if program is None:
            raise MpsError(f"expected {PROGRAM} on PATH, found none; it comes with NVIDIA's driver, mount it")
        command = [program, "-d"]
        if self._private_shm:
            command = ["unshare", "--mount", "sh", "-c", _PRIVATE_SHM, "mps", str(shm), program]
        directory = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        self._processes.end(self._processes.of_directory(directory))
        try:
            self._launch(command, environment)
            self._record(environment)
        except MpsError as e:
            try:
                self._processes.end(self._processes.of_directory(directory))
            except MpsError as left:
                raise MpsError(f"{e}; moreover {left}") from e
            raise

    def ask(self, environment: Mapping[str, str], command: str) -> str:
        """Send a command to a daemon."""
        try:
            mode = (Path(environment["CUDA_MPS_PIPE_DIRECTORY"]) / "control").lstat().st_mode
        except OSError as e:  # without the pipe the program would wait for ever
            raise MpsError(f"expected an MPS daemon, found no control pipe: {e}") from e
        if stat.S_ISLNK(mode):  # the program would follow a link that a client made
            raise MpsError("expected an MPS daemon's control pipe, found a link that a client has put there; end it")
        return self._run([PROGRAM], environment, f"{command}\n")

    def is_alive(self, environment: Mapping[str, str]) -> bool:
        """Whether the daemon's process exists."""
        return self._pid(environment) is not None

    def kill(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> None:
        """Kill the daemon and these servers, unless their process IDs were reused."""
        wanted = dict(servers)
        if (known := _recorded(environment)) is not None:
            wanted[known[0]] = known[1]
        self._processes.end(lambda: {pid: at for pid, at in wanted.items() if self.started(pid) == at})

    def started(self, pid: int) -> int | None:
        """Return the start time of a daemon or server, in ticks since boot; None for any other process."""
        found = self._processes.began(pid)
        return found[0] if found is not None else None

    def living(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> dict[int, int]:
        """Return those of the servers that are alive and neither another GPU's daemon nor its child."""
        others = self._others(environment) if servers else set()
        return {
            pid: at
            for pid, at in servers.items()
            if (known := self._processes.began(pid)) is not None
            and known[0] == at
            and others.isdisjoint((pid, known[1]))
        }

    def home(self, environment: Mapping[str, str]) -> str | None:
        """Return the name of the daemon's control group; None without a daemon."""
        pid = self._pid(environment)
        return self._processes.group(pid) if pid is not None else None

    def servers(
        self, environment: Mapping[str, str], home: str, present: Iterable[int], listed: Iterable[int]
    ) -> dict[int, int]:
        """Return processes of that control group with the servers' name, on the GPU or children of the daemon."""
        own, there, found = self._pid(environment), set(present), dict[int, int]()
        others = self._others(environment)
        for pid in there.union(listed):
            if (known := self._processes.began(pid)) is None or pid in others or known[1] in others:
                continue
            if (pid in there or known[1] == own) and self._processes.group(pid) == home:
                found[pid] = known[0]
        return found

    def _others(self, environment: Mapping[str, str]) -> set[int]:
        """Process IDs of the other GPUs' daemons."""
        own = Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).parent
        known = [_read_record(record) for record in own.parent.glob(f"*/{RECORD}") if record.parent != own]
        return {one[0] for one in known if one is not None and self.started(one[0]) == one[1]}

    def _pid(self, environment: Mapping[str, str]) -> int | None:
        """Return the process ID of the daemon; None if it has ended or its ID was reused."""
        known = _recorded(environment)
        return known[0] if known is not None and self.started(known[0]) == known[1] else None

    def _record(self, environment: Mapping[str, str]) -> None:
        """Record the daemon's process ID and start time before clients can connect."""
        directory = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        until = time.monotonic() + self._within_s
        while (pid := self._processes.written(directory)) is None or (started := self.started(pid)) is None:
            if time.monotonic() > until:
                raise MpsError(f"expected the MPS daemon's process ID in {directory / PID_FILE}, found no such daemon")
            time.sleep(_POLL_EVERY_S)
        record = directory.parent / RECORD
        temporary = record.with_name(f".{RECORD}.new")
        try:
            temporary.write_text(f"{pid} {started}")
            temporary.replace(record)
        except OSError as e:
            raise MpsError(f"expected to write {record}, found {e}; free some space") from e

    def _launch(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Run the program that starts a daemon. Its output goes to a file: a closed pipe would end the daemon later."""
        try:
            with tempfile.TemporaryFile(dir=environment["CUDA_MPS_LOG_DIRECTORY"]) as printed:
                ended = subprocess.run(
                    command,
                    env={"PATH": os.environ.get("PATH", ""), **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    start_new_session=True,
                    timeout=self._within_s,
                    check=False,
                )
                printed.seek(0)
                said = printed.read(LONGEST_ANSWER).decode(errors="replace").strip()
        except subprocess.TimeoutExpired as e:
            raise MpsError(f"expected {PROGRAM} to start within {self._within_s:g} s, found that it did not") from e
        except OSError as e:
            raise MpsError(f"expected to run {command[0]}, found {e}") from e
        if ended.returncode:
            raise MpsError(f"{PROGRAM} ended with {ended.returncode}: {printable(said[:500]) or 'no output'}")

    def _run(self, command: list[str], environment: Mapping[str, str], text: str) -> str:
        try:
            with subprocess.Popen(
                command,
                env={"PATH": os.environ.get("PATH", ""), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            ) as process:
                try:
                    output, errors = talk(PROGRAM, process, text, self._within_s)
                except BaseException:
                    process.kill()
                    raise
        except subprocess.TimeoutExpired as e:
            raise MpsError(f"expected an answer of {PROGRAM} within {self._within_s:g} s, found none") from e
        except OSError as e:
            raise MpsError(f"expected to run {command[0]}, found {e}") from e
        said = (output + errors).strip()
        if process.returncode or "Cannot find MPS control daemon" in said:
            raise MpsError(f"{PROGRAM} ended with {process.returncode}: {printable(said[:500]) or 'no output'}")
        return output


def _recorded(environment: Mapping[str, str]) -> tuple[int, int] | None:
    return _read_record(Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).parent / RECORD)


def _read_record(record: Path) -> tuple[int, int] | None:
    try:
        pid, started = record.read_text().split()
        return int(pid), int(started)
    except (OSError, ValueError):
        return None


_WITHIN_S = 8.0
_TURN_WITHIN_S = 5.0
"""How long a request waits for an earlier one, in seconds; less than the client's timeout."""
_LONGEST = 4096
_END = "end "
"""Prefix of a request to kill a GPU's daemon and servers."""
_TIDY = "tidy "
"""Prefix of a request to delete the leftovers of clients, unless a daemon runs."""


class UntidiedError(MpsError):
    """The daemon has stopped, but its host did not delete the clients' files in shared memory."""


class _AwayError(MpsError):
    """No host listens on the socket."""


class _UnknownError(MpsError):
    """The host is an earlier version that does not know the request."""


class _Answer(msgspec.Struct, frozen=True):
    error: str = ""
    is_understood: bool = False
    """Whether the host knows the request; the first versions do not set this."""


class HostedMps(Mps):
    """Daemons that the process `carpool node mps-host` starts.

    Args:
        commands: See Mps.
        directory: See Mps.
        host: Socket of that process.
        may_write: See Mps.
        within_s: Timeout of an answer, in seconds.
        tidy_within_s: See Mps.
    """

    def __init__(
        self,
        commands: MpsCommands,
        directory: Path,
        host: Path,
        *,
        may_write: bool = True,
        within_s: float = _WITHIN_S,
        tidy_within_s: float = MOMENT_S,
    ) -> None:
        super().__init__(commands, directory, may_write=may_write, tidy_within_s=tidy_within_s)
        self._host, self._within_s = host, within_s
        self._log = structlog.get_logger()

    def start(self, uuid: GpuUuid) -> None:
        """Ask the host to start a GPU's daemon and to check that it answers."""
        self.directory(uuid)  # raises for an invalid UUID
        self._tell(uuid, uuid)

    def stop(self, uuid: GpuUuid) -> None:
        """Stop a GPU's daemon, and ask the host to delete the clients' files in its shared memory.

        Raises:
            UntidiedError: The host did not delete them.
            MpsError: The daemon is still alive.
            OSError: Its pipe directory could not be moved aside.
        """
        super().stop(uuid)
        try:
            self._tell(uuid, f"{_TIDY}{uuid}")
        except (_AwayError, _UnknownError) as e:  # the next start deletes them
            self._log.warning("files of mps clients stay until the next daemon starts", gpu=uuid, reason=str(e))
        except MpsError as e:
            raise UntidiedError(
                f"GPU {uuid}: expected what the clients of its MPS daemon left to be removed, found the daemon stopped,"
                f" and of its host: {e}; the agent tries again"
            ) from e

    def end(self, uuid: GpuUuid) -> None:
        """Ask the host to kill a GPU's daemon and its servers."""
        self.directory(uuid)
        self._tell(uuid, f"{_END}{uuid}")

    def _tell(self, uuid: GpuUuid, what: str) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._within_s)
                connection.connect(str(self._host))
                connection.sendall(f"{what}\n".encode())
                answer = msgspec.json.decode(connection.makefile("rb").readline(_LONGEST), type=_Answer)
        except (OSError, msgspec.DecodeError) as e:
            is_away = isinstance(e, FileNotFoundError | ConnectionRefusedError)
            raise (_AwayError if is_away else MpsError)(
                f"GPU {uuid}: expected the MPS daemons' host at {self._host}, found {e}; look at the pod carpool-mps"
            ) from e
        if answer.error:
            raise (MpsError if answer.is_understood else _UnknownError)(answer.error)


class _Handler(socketserver.StreamRequestHandler):
    timeout = 5.0

    def handle(self) -> None:
        """Handle one request."""
        server = self.server
        assert isinstance(server, MpsHost)  # noqa: S101  # socketserver knows no types
        said = self.rfile.readline(_LONGEST).decode(errors="replace").strip()
        error = server.obey(said, lambda: _has_hung_up(self.connection))
        with suppress(ConnectionError):
            self.wfile.write(msgspec.json.encode(_Answer(error[: _LONGEST // 2], is_understood=True)) + b"\n")


def _has_hung_up(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        if not selector.select(0):
            return False
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _make_room(path: Path) -> None:
    """Remove the socket of a host that has ended; raises OSError if anything else is there."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "something that is no socket", str(path))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(_TURN_WITHIN_S)
            asking.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink()
        return
    raise FileExistsError(errno.EADDRINUSE, "another host that answers there", str(path))


class MpsHost(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Starts daemons on request; only root can open its socket.

    Args:
        path: Path of the socket.
        mps: The daemons.
        within_s: How long a request waits for another one of the same GPU, in seconds.

    Raises:
        OSError: The socket cannot be made, or another file or a running host is there.
    """

    daemon_threads = True
    request_queue_size = 128
    """All GPUs of a node may request their daemons at once."""

    def __init__(self, path: Path, mps: Mps, *, within_s: float = _TURN_WITHIN_S) -> None:
        self._mps, self._within_s = mps, within_s
        self._locks: dict[str, threading.Lock] = {}
        self._log = structlog.get_logger()
        _make_room(path)
        before = os.umask(0o177)
        try:
            super().__init__(str(path), _Handler)
        finally:
            os.umask(before)

    def obey(self, said: str, has_hung_up: Callable[[], bool]) -> str:
        """Start or adopt, kill, or clean up after a GPU's daemon.

        Args:
            said: The request: an optional prefix and the GPU's UUID.
            has_hung_up: Whether the client has disconnected; called when earlier requests are done.

        Returns:
            The error message; empty on success.
        """
        word = next((word for word in (_END, _TIDY) if said.startswith(word)), "")
        uuid = GpuUuid(said.removeprefix(word))
        what, act = {
            _END: ("ended", self._mps.end),
            _TIDY: ("tidied", self._mps.tidy),
        }.get(word, ("runs", self._mps.start))
        try:
            if not self._one_by_one(uuid, act, has_hung_up):
                self._log.info("mps request dropped: the client has disconnected", gpu=uuid, wanted=what)
                return ""
        except (DeviceError, OSError) as e:
            self._log.warning(f"mps daemon not {what}", gpu=uuid[:64], error=str(e))
            return str(e)
        self._log.info(f"mps daemon {what}", gpu=uuid)
        return ""

    def _one_by_one(self, uuid: GpuUuid, act: Callable[[GpuUuid], None], has_hung_up: Callable[[], bool]) -> bool:
        self._mps.directory(uuid)  # raises for an invalid UUID, so that only GPUs get locks
        lock = self._locks.setdefault(uuid, threading.Lock())
        if not lock.acquire(timeout=self._within_s):
            raise MpsError(f"GPU {uuid}: an earlier request goes on; look at its daemon on the node")
        try:
            if has_hung_up():
                return False
            act(uuid)
        finally:
            lock.release()
        return True
