"""MPS control daemons, one for each GPU: start, status, stop and cleanup.

States of a GPU's daemon, and what moves it:

    stopped ── start ──▶ running ── stop: `quit`, then SIGKILL ──▶ stopped
                         running ── its process ends ────────────▶ orphaned: its servers may live on
                         running ── no answer ───────────────────▶ silent: its clients may go on
    orphaned, silent ── start, stop or end, without clients: SIGKILL ──▶ stopped

Files in a GPU's directory. Clients can write in `pipe` and `shm` only, and through a FIFO there into the servers' log,
so the content of these is not trusted.

    pipe/     the daemon's pipes; containers mount it, so each daemon gets a new one
    log/      the logs of the daemon and its servers
    shm       link to the node's path of the memory that daemon and clients share
    memory/   parent of that memory, unless a separate file system holds it
    daemon    the daemon's process ID and start time
    home      the daemon's control group; the servers share it
    servers   process ID and start time of the servers, one a line
    .old.*    what waits for deletion

The plan lets pods of only one namespace or tenancy group use a daemon. The daemon itself serves one user at a time.
"""

import errno
import os
import random
import re
import secrets
import select
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
from typing import Protocol

import msgspec
import structlog
from carpool_core.values import GpuUuid

from carpool_deviceplugin.files import make_for_containers, write_file
from carpool_deviceplugin.gpu import DeviceError
from carpool_deviceplugin.processes import Stat, pod_of, read_stat
from carpool_deviceplugin.quoting import printable, quoted

PROGRAM = "nvidia-cuda-mps-control"
STOP_WITHIN_S = 2
"""How long `quit` waits for clients that are ending, in seconds; less than the timeout of an answer."""
CLEAN_WITHIN_S = 1.5
"""Time limit of one cleanup, in seconds. Several cleanups fit into the timeout of a request; a later one continues."""
_MAX_LEFTOVERS = 256
"""Maximum number of paths that one cleanup deletes."""
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PID = re.compile(r"[0-9]{1,7}")


class MpsError(DeviceError):
    """The daemon did not start, did not answer, or reported an error."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """Files and environment of a GPU's daemon."""

    uuid: GpuUuid
    directory: Path

    @property
    def pipe(self) -> Path:
        """The pipe directory, as a path on the node."""
        return self.directory / "pipe"

    @property
    def log(self) -> Path:
        """The log directory."""
        return self.directory / "log"

    @property
    def shm(self) -> Path:
        """The clients' /dev/shm, as a path on the node."""
        link = self.directory / "shm"
        return link.readlink() if link.is_symlink() else link

    @property
    def record(self) -> Path:
        """File with the daemon's process ID and start time."""
        return self.directory / "daemon"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the daemon and of programs that talk to it."""
        return {
            "CUDA_VISIBLE_DEVICES": self.uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }


MIN_DRIVER = 550
"""Daemons of older drivers do not answer `get_server_status`, so that a client's fatal fault is never seen."""


def driver_problem(driver: str) -> str:
    """Return why daemons of this driver version are not started; empty if they are, or the version is unknown."""
    major = driver.partition(".")[0]
    if not major.isdecimal() or int(major) >= MIN_DRIVER:
        return ""
    return (
        f"expected driver {MIN_DRIVER} or newer for MPS, found {driver}, whose daemons report no faults of clients; "
        "update the driver, or use TimeSlicing"
    )


_VERSION = re.compile(rb"\0(\d{3}\.\d{2,3}(?:\.\d{2})?)\0")


def program_version(recorded: Path | None = None) -> str:
    """Return the version in the program's file, or the recorded one; empty if it has none, as before driver 535."""
    try:
        if recorded is not None:
            return recorded.read_text()
        found = _VERSION.search(Path(shutil.which(PROGRAM) or "").read_bytes())
    except OSError:
        return ""
    return found[1].decode() if found else ""


class MpsCommands(Protocol):
    """The program `nvidia-cuda-mps-control` and its processes. `start`, `ask` and `kill` raise MpsError."""

    def start(self, daemon: Daemon, shm: Path) -> None:
        """Start a daemon that outlives this process; `shm` becomes its /dev/shm.

        If it raises, no daemon is left; the error names a process that could not be killed.
        """
        ...

    def ask(self, daemon: Daemon, command: str) -> str:
        """Send a command to the daemon and return its answer."""
        ...

    def is_alive(self, daemon: Daemon) -> bool:
        """Whether the daemon's process exists."""
        ...

    def kill(self, daemon: Daemon) -> None:
        """Kill the daemon and its recorded servers, as far as they exist."""
        ...

    def servers(self, daemon: Daemon, present: Iterable[int] = (), listed: Iterable[int] = ()) -> frozenset[int]:
        """Return the process IDs of the daemon's living servers, and record them; they may outlive the daemon.

        `present` are the process IDs on the GPU, from the driver. `listed` are those of the daemon's answer, which is
        untrusted.
        """
        ...


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
    hit: tuple[frozenset[int], ...] = ()
    """Clients that each fatal fault ends together, also those that have ended."""


class Mps:
    """The MPS daemons of a node, each in its GPU's directory below `directory`.

    `shared` is a file system for shared memory; None uses `directory`. `clean_within_s` limits the time of one cleanup.
    """

    def __init__(
        self,
        commands: MpsCommands,
        directory: Path,
        shared: SharedMemory | None = None,
        *,
        clean_within_s: float = CLEAN_WITHIN_S,
    ) -> None:
        self._commands, self._directory, self._shared = commands, directory, shared
        self._clean_within_s = clean_within_s

    def daemon(self, uuid: GpuUuid) -> Daemon:
        """Return the files of a GPU's daemon; raises MpsError for an invalid UUID."""
        if not _UUID.fullmatch(uuid):
            raise MpsError(f"expected a GPU's UUID such as GPU-8f2c…, found {quoted(uuid)}")
        return Daemon(uuid, self._directory / uuid)

    def is_running(self, uuid: GpuUuid) -> bool:
        """Whether a GPU's daemon is alive; starts no program."""
        return self._commands.is_alive(self.daemon(uuid))

    def start(self, uuid: GpuUuid) -> None:
        """Start a GPU's daemon, or adopt a running one, and check that it answers."""
        daemon = self.daemon(uuid)
        if not self._commands.is_alive(daemon):
            try:
                daemon.log.mkdir(parents=True, exist_ok=True)
                _put_away(daemon.pipe)  # a new daemon does not start on the pipes of a dead one
                make_for_containers(daemon.pipe)
                self._clean(daemon)
                shm = self._make_shm(daemon)
            except OSError as e:
                raise MpsError(f"GPU {uuid}: expected to make the MPS daemon's directories, found {e}") from e
            if self._commands.servers(daemon):
                self._commands.kill(daemon)
            self._commands.start(daemon, shm)
        self._commands.ask(daemon, "get_server_list")

    def stop(self, uuid: GpuUuid) -> None:
        """Stop a GPU's daemon, if it runs. Its clients must have ended before.

        Raises:
            MpsError: The daemon is still alive.
            OSError: Its pipe directory could not be moved aside.
        """
        daemon = self.daemon(uuid)
        if self._commands.is_alive(daemon):
            try:
                self._commands.ask(daemon, f"quit -t {STOP_WITHIN_S}")
            except MpsError:
                self.end(uuid)  # it has no clients, so it may be killed
        elif self._commands.servers(daemon):
            self.end(uuid)
        if self._commands.is_alive(daemon):
            raise MpsError(f"GPU {uuid}: expected the MPS daemon to stop, found it still there; end its clients")
        _put_away(daemon.pipe)  # a container that is still ending may have it mounted; the next daemon gets another
        self._clean(daemon, daemon.log)

    def end(self, uuid: GpuUuid) -> None:
        """Kill a GPU's daemon and its servers. The GPU must have no clients."""
        self._commands.kill(self.daemon(uuid))
        self._clean(self.daemon(uuid), self.daemon(uuid).log)

    def tidy(self, uuid: GpuUuid) -> None:
        """Delete the leftovers of clients, unless the GPU's daemon runs."""
        if not self.is_running(uuid):
            self._clean(self.daemon(uuid), self.daemon(uuid).log)

    def sweep(self) -> None:
        """Delete leftovers of earlier stops, for all GPUs, within one time limit."""
        gpus = [path for path in self._directory.glob("GPU-*") if _UUID.fullmatch(path.name) and not path.is_symlink()]
        self._delete(old for gpu in gpus for old in gpu.glob(".old.*"))

    def status(self, uuid: GpuUuid, present: Iterable[int] = ()) -> MpsStatus:
        """Return the state of a GPU's daemon; never raises for a daemon that is dead or hangs.

        Servers of a daemon that does not answer may be among `present`, the process IDs on the GPU.
        """
        daemon, problem, listed = self.daemon(uuid), "", frozenset[int]()
        is_running = self._commands.is_alive(daemon)
        if is_running:
            try:
                listed = _process_ids(self._commands.ask(daemon, "get_server_list"))
            except MpsError as e:
                # Its clients may still run: a second daemon would end them.
                problem = f"the MPS daemon does not answer: {e}"
        servers = self._commands.servers(daemon, present, listed)  # a client can forge the answer: `listed` is verified
        if problem or not is_running:
            return MpsStatus(is_running, servers, problem=problem, is_silent=bool(problem))
        clients, problems, is_silent = set[int](), list[str](), False
        try:
            hit = faults_in(_read_end(daemon.log / "server.log"))
        except OSError as e:
            hit, problems = [], [f"expected to read the log of its MPS server, found {e}; make it readable"]
        for server in sorted(listed & servers):
            try:
                own = _process_ids(self._commands.ask(daemon, f"get_client_list {server}"))
                state = self._commands.ask(daemon, f"get_server_status {server}")
            except MpsError as e:
                problems.append(f"MPS server {server} does not answer: {e}")
                is_silent = True
                continue
            clients |= own
            if "FAULT" in state.upper():
                hit.append(own)
                names = ", ".join(map(str, sorted(own))) or "none left"
                problems.append(f"MPS server {server} was hit by a client's fatal fault (clients: {names})")
        return MpsStatus(True, servers, frozenset(clients), "; ".join(problems), is_silent, tuple(hit))

    def _memory(self, daemon: Daemon) -> SharedMemory:
        """Return the parent of the shared memory of a GPU's daemons."""
        if self._shared is not None:
            return SharedMemory(self._shared.here / daemon.uuid, self._shared.on_node / daemon.uuid)
        return SharedMemory(daemon.directory / "memory", daemon.directory / "memory")

    def _make_shm(self, daemon: Daemon) -> Path:
        """Create a new shared-memory directory, so that a new daemon never sees the files of earlier clients."""
        memory, name = self._memory(daemon), secrets.token_hex(8)
        make_for_containers(here := memory.here / name)
        here.chmod(0o1777)  # the mode of /dev/shm: clients run as any user
        (link := daemon.directory / ".shm.new").unlink(missing_ok=True)
        link.symlink_to(memory.on_node / name)
        link.replace(daemon.directory / "shm")
        return here

    def _clean(self, daemon: Daemon, *directories: Path) -> None:
        """Delete the GPU's shared memory, what waits for deletion, and the content of these directories."""
        parents = [self._memory(daemon).here, *directories]
        self._delete([*daemon.directory.glob(".old.*"), *(path for parent in parents for path in parent.glob("*"))])

    def _delete(self, paths: Iterable[Path]) -> None:
        """Delete as much as the time limit allows; closed directories of another user stay.

        `find` deletes, because millions of files would need unbounded memory in this process. The order is random, so
        that a path that cannot be deleted does not use up the time of the others in each cleanup.
        """
        if found := [str(path.absolute()) for path in paths]:
            chosen = random.sample(found, min(len(found), _MAX_LEFTOVERS))
            quiet = subprocess.DEVNULL
            with suppress(OSError, subprocess.TimeoutExpired):
                command = ["find", *chosen, "-delete"]
                subprocess.run(
                    command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=self._clean_within_s, check=False
                )


def _put_away(directory: Path) -> None:
    """Rename a directory, so that the next cleanup deletes it; raises OSError. An absent one is ignored."""
    with suppress(FileNotFoundError):
        directory.rename(directory.with_name(f".old.{secrets.token_hex(8)}"))


def _process_ids(answer: str) -> frozenset[int]:
    """Parse lines that are a process ID of at most seven digits; others, such as `Server 7 not found`, are ignored.

    A client can forge the answer.
    """
    return frozenset(int(line) for line in map(str.strip, answer.splitlines()) if _PID.fullmatch(line))


_LONGEST_LOG = 1 << 16
"""Bytes at a log's end that are searched, about 500 lines; a client that comes and goes is ten."""
_LOGGED = re.compile(r"^\[[^]\n]* Server +\d+\] (.*)\n", re.MULTILINE)
_STICKY = "have a sticky error set:"
_BEGUN = re.compile(r"Status of client \{(?:PID: )?(\d{1,7}),.*\} is ACTIVE")


def faults_in(log: str) -> list[frozenset[int]]:
    """Return the clients that each fatal fault has ended, from a server's log, of which the start may be missing.

    The server's status shows a fault only until the last client has left: 0.4 s in our recording. A process ID that has
    connected again since is another process.
    """
    found, is_listing = list[set[int]](), False
    for line in _LOGGED.findall(log):
        if line.endswith(":"):
            if is_listing := line.endswith(_STICKY):
                found.append(set())
        elif is_listing and _PID.fullmatch(line):
            found[-1].add(int(line))
        elif begun := _BEGUN.fullmatch(line):
            for clients in found:
                clients.discard(int(begun[1]))
    return [frozenset(clients) for clients in found]


def _read_end(log: Path) -> str:
    """Return the end of a log, empty if there is none; raises OSError."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LONGEST_LOG))
            return file.read(_LONGEST_LOG).decode(errors="replace")
    except FileNotFoundError:
        return ""


_COMM = PROGRAM[:15]
"""The kernel's name of the daemon and its servers."""
_LOOK_EVERY_S = 0.1
_END_WITHIN_S = {signal.SIGTERM: 1.0, signal.SIGKILL: 3.0}
"""Seconds to wait after each signal; the driver needs time to free a process's GPU resources."""


class MpsProcesses:
    """MPS processes in this process's PID namespace."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._proc, self.monotonic, self.sleep = proc, monotonic, sleep

    def find(self, pid: int) -> Stat | None:
        """Return a living daemon or server; None for any other process."""
        found = read_stat(self._proc, pid)
        return found if found is not None and found.name == _COMM and found.state not in ("Z", "X") else None

    def started(self, pid: int) -> int | None:
        """Return the start time of a daemon or server, in ticks since boot; None for any other process."""
        found = self.find(pid)
        return found.started if found is not None else None

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

    def of_pipe(self, pipe: Path) -> Callable[[], Mapping[int, int]]:
        """Return a function that finds our daemons and servers of a pipe directory, recorded or not.

        It returns start times by process ID. They are in our control group, have the name of MPS's processes and this
        directory in their environment: a pod chooses the latter two, but not the first. A process that was found
        counts until it has ended, because its environment disappears before its GPU resources.
        """
        ours = dict[int, int]()

        def find() -> Mapping[int, int]:
            for pid in (int(entry.name) for entry in os.scandir(self._proc) if entry.name.isdecimal()):
                started = self.started(pid)
                if started is not None and ours.get(pid) != started and self._is_ours(pid, pipe):
                    ours[pid] = started
            for pid in [pid for pid, started in ours.items() if self.started(pid) != started]:
                del ours[pid]
            return ours

        return find

    def _is_ours(self, pid: int, pipe: Path) -> bool:
        def read(process: int | str, name: str) -> bytes:
            return (self._proc / str(process) / name).read_bytes()

        try:
            is_ours = read(pid, "cgroup") == read("self", "cgroup")
            return is_ours and f"CUDA_MPS_PIPE_DIRECTORY={pipe}".encode() in read(pid, "environ").split(b"\0")
        except OSError:
            return False

    def wait(self, remain: Callable[[], object], within_s: float) -> None:
        """Wait until no processes remain, at most for this time in seconds."""
        until = self.monotonic() + within_s
        while remain() and self.monotonic() < until:
            self.sleep(_LOOK_EVERY_S)

    def end(self, find: Callable[[], Mapping[int, int]]) -> None:
        """End processes by SIGTERM, then SIGKILL, including those that appear meanwhile.

        `find` returns the remaining processes, as start time by process ID.

        Raises:
            MpsError: A process does not end, or the right to signal it is missing.
        """
        for number, within_s in _END_WITHIN_S.items():
            for pid in list(find()):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
                except OSError as e:
                    raise MpsError(
                        f"expected to end process {pid} of MPS, found {e}; the pod carpool-mps has the right to (set "
                        "nodeAgent.mps), or end it on the node"
                    ) from e
            self.wait(find, within_s)
        if left := find():
            raise MpsError(
                f"expected MPS processes to end when they are killed, found {', '.join(map(str, sorted(left)))} still "
                "there; the driver holds them: check dmesg, and restart the node"
            )


LONGEST_ANSWER = 1 << 16
"""In bytes; more than the process IDs of all possible clients of a daemon. A client can forge an endless answer."""
_POLL_EVERY_S = 0.01
_CAPABILITIES = {"SETGID": 6, "SETUID": 7, "SYS_ADMIN": 21}
"""A daemon runs its server as its client's user, and mounts its own /dev/shm."""
_PRIVATE_SHM = 'mount --bind "$1" /dev/shm && exec "$2" -d'
"""Mounts a private /dev/shm for a daemon, so that tenants of two GPUs never see each other's files."""
_LONGEST_PIPE = 87
"""In bytes, measured: the daemon's `control_privileged` there fits into the 107 that a Unix socket's path may have."""
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH")
"""Variables that find the program and libcuda."""


class MpsProgram:
    """Runs `nvidia-cuda-mps-control` from PATH, and waits `within_s` seconds for an answer.

    With `private_shm` each daemon gets its own /dev/shm, which needs CAP_SYS_ADMIN. `may_write` is whether to record
    servers; it is False beside an agent that does.
    """

    def __init__(
        self,
        *,
        private_shm: bool = True,
        within_s: float = 3.0,
        may_write: bool = True,
        processes: MpsProcesses | None = None,
    ) -> None:
        self._private_shm, self._within_s, self._may_write = private_shm, within_s, may_write
        self._processes = processes or MpsProcesses()

    @staticmethod
    def is_installed() -> bool:
        """Whether the program is on PATH; it comes with the driver."""
        return shutil.which(PROGRAM) is not None

    @staticmethod
    def problem(status: Path = Path("/proc/self/status")) -> str:
        """Return why this process cannot run daemons and what to do; empty if it can."""
        if not MpsProgram.is_installed():
            return f"expected {PROGRAM} on PATH, found none; mount the driver's, or install Debian's nvidia-cuda-mps"
        for program, package in (("unshare", "util-linux"), ("find", "findutils")):
            if shutil.which(program) is None:
                return f"expected {program} on PATH, found none; install {package}"
        held = next((line for line in status.read_text().splitlines() if line.startswith("CapEff:")), "CapEff: 0")
        lacking = [name for name, bit in _CAPABILITIES.items() if not int(held.split()[1], 16) >> bit & 1]
        if not lacking:
            return ""
        return f"expected the capabilities {', '.join(lacking)}, found none of them; add them to the pod carpool-mps"

    def start(self, daemon: Daemon, shm: Path) -> None:
        """Start a daemon; unrecorded processes of an interrupted or failed start are ended."""
        if (program := shutil.which(PROGRAM)) is None:
            raise MpsError(self.problem())
        command = [program, "-d"]
        if self._private_shm:
            command = ["unshare", "--mount", "sh", "-c", _PRIVATE_SHM, "mps", str(shm), program]
        self._processes.end(self._processes.of_pipe(daemon.pipe))
        try:
            self._launch(command, daemon)
            self._record(daemon)
        except MpsError as e:
            try:
                self._processes.end(self._processes.of_pipe(daemon.pipe))
            except MpsError as left:
                raise MpsError(f"{e}; moreover {left}") from e
            raise

    def ask(self, daemon: Daemon, command: str) -> str:
        """Send a command to a daemon and return its answer."""
        try:
            mode = (daemon.pipe / "control").lstat().st_mode
        except OSError as e:  # without the pipe the program would never end
            raise MpsError(f"expected an MPS daemon, found no control pipe: {e}") from e
        if stat.S_ISLNK(mode):  # the program would follow a link that a client made
            raise MpsError("expected an MPS daemon's control pipe, found a link that a client has put there; end it")
        try:
            with subprocess.Popen(
                [PROGRAM],
                env=_environment(daemon),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process:
                try:
                    answer = _talk(process, f"{command}\n", self._within_s)
                except BaseException:
                    process.kill()
                    raise
        except subprocess.TimeoutExpired as e:
            raise MpsError(f"expected an answer of {PROGRAM} within {self._within_s:g} s, found none") from e
        except OSError as e:
            raise MpsError(f"expected to run {PROGRAM}, found {e}") from e
        if process.returncode or "Cannot find MPS control daemon" in answer:
            raise _failed(process.returncode, answer)
        if command.startswith("quit"):  # answered a moment before the daemon's process has ended
            self._processes.wait(lambda: self.is_alive(daemon), _END_WITHIN_S[signal.SIGTERM])
        return answer

    def is_alive(self, daemon: Daemon) -> bool:
        """Whether the daemon's process exists."""
        return self._pid(daemon) is not None

    def kill(self, daemon: Daemon) -> None:
        """Kill the daemon and its recorded servers, unless their process IDs were reused."""
        wanted = self._find_servers(daemon) | _read_processes(daemon.record)
        self._processes.end(lambda: {pid: at for pid, at in wanted.items() if self._processes.started(pid) == at})

    def servers(self, daemon: Daemon, present: Iterable[int] = (), listed: Iterable[int] = ()) -> frozenset[int]:
        """Return the recorded servers, and the processes of the daemon's group on the GPU or with the daemon as parent.

        Other GPUs' daemons and their children never count.
        """
        return frozenset(self._find_servers(daemon, frozenset(present), frozenset(listed)))

    def _find_servers(
        self, daemon: Daemon, present: frozenset[int] = frozenset(), listed: frozenset[int] = frozenset()
    ) -> dict[int, int]:
        recorded = _read_processes(daemon.directory / "servers")
        unknown = present.union(listed) - recorded.keys()
        found, own = dict[int, int](), self._pid(daemon)
        home = self._home(daemon, own) if unknown else None
        others = self._other_daemons(daemon) if unknown or recorded else set()
        for pid in unknown | recorded.keys():
            process = self._processes.find(pid)
            if process is None or not others.isdisjoint((pid, process.parent)):
                continue
            is_there = pid in present or process.parent == own
            is_server = is_there and home is not None and self._processes.group(pid) == home
            if is_server or recorded.get(pid) == process.started:
                found[pid] = process.started
        if found != recorded:
            self._keep(daemon.directory / "servers", "".join(f"{pid} {at}\n" for pid, at in sorted(found.items())))
        return found

    def _home(self, daemon: Daemon, pid: int | None) -> str | None:
        """Return the control group of a GPU's daemon, or the last known one; None if it never ran."""
        file = daemon.directory / "home"
        try:
            recorded = file.read_text()
        except (OSError, ValueError):
            recorded = None
        home = self._processes.group(pid) if pid is not None else None
        if home is not None and home != recorded:
            self._keep(file, home)
        return home or recorded

    def _keep(self, file: Path, text: str) -> None:
        if self._may_write:
            with suppress(OSError):  # on a full disk the daemon's own answer still counts
                write_file(file, text.encode())

    def _other_daemons(self, daemon: Daemon) -> set[int]:
        """Return the process IDs of the other GPUs' daemons."""
        records = [record for record in daemon.directory.parent.glob("*/daemon") if record != daemon.record]
        return {pid for record in records for pid in self._living(record)}

    def _pid(self, daemon: Daemon) -> int | None:
        """Return the process ID of the daemon; None if it has ended or its ID was reused."""
        return next(iter(self._living(daemon.record)), None)

    def _living(self, file: Path) -> set[int]:
        """Return the recorded processes that live; one with a reused ID is another process."""
        return {pid for pid, started in _read_processes(file).items() if self._processes.started(pid) == started}

    def _record(self, daemon: Daemon) -> None:
        """Record the daemon's process ID and start time before clients can connect.

        The daemon is found among the processes, because drivers before 550 write no file with its process ID.
        """
        until, find = self._processes.monotonic() + self._within_s, self._processes.of_pipe(daemon.pipe)
        while not (found := find()):
            if self._processes.monotonic() > until:
                raise MpsError(f"expected a process of the MPS daemon of {daemon.pipe}, found none")
            self._processes.sleep(_POLL_EVERY_S)
        pid = min(found, key=lambda one: (found[one], one))
        try:
            write_file(daemon.record, f"{pid} {found[pid]}".encode())
        except OSError as e:
            raise MpsError(f"expected to write {daemon.record}, found {e}; free some space") from e

    def _launch(self, command: list[str], daemon: Daemon) -> None:
        """Run the program that starts a daemon. Its output goes to a file: a closed pipe would end the daemon later."""
        try:
            with tempfile.TemporaryFile(dir=daemon.log) as printed:
                ended = subprocess.run(
                    command,
                    env=_environment(daemon),
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    start_new_session=True,
                    timeout=self._within_s,
                    check=False,
                )
                printed.seek(0)
                output = printed.read(LONGEST_ANSWER).decode(errors="replace")
        except subprocess.TimeoutExpired as e:
            raise MpsError(f"expected {PROGRAM} to start within {self._within_s:g} s, found that it did not") from e
        except OSError as e:
            raise MpsError(f"expected to run {command[0]}, found {e}") from e
        if ended.returncode:
            raise _failed(ended.returncode, output or _path_problem(daemon.pipe))


def _path_problem(pipe: Path) -> str:
    """Return that the daemon's sockets have too long a path, which it does not report; empty if they have not."""
    if (length := len(os.fsencode(pipe))) <= _LONGEST_PIPE:
        return ""
    return (
        f"expected at most {_LONGEST_PIPE} bytes for the path of its pipe directory, found {length}; choose a shorter "
        "directory for the agent's state (CARPOOL_STATE_DIR)"
    )


def _environment(daemon: Daemon) -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | daemon.environment


def _failed(code: int, output: str) -> MpsError:
    return MpsError(f"{PROGRAM} ended with {code}: {printable(output.strip()[:500]) or 'no output'}")


def _talk(process: "subprocess.Popen[bytes]", text: str, within_s: float) -> str:
    """Send text to a program and return its output.

    The answer ends when the program ends, even if another process holds its output open.

    Raises:
        TimeoutExpired: The program did not end in time.
        MpsError: The answer is longer than LONGEST_ANSWER.
    """
    end = time.monotonic() + within_s
    assert process.stdin is not None  # noqa: S101  # both are pipes
    assert process.stdout is not None  # noqa: S101
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(text.encode())
    answer, piece = b"", b"?"
    while piece:
        has_ended = process.poll() is not None
        is_ready = select.select([process.stdout], [], [], 0 if has_ended else _POLL_EVERY_S)[0]
        if has_ended and not is_ready:
            break
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired(process.args, within_s)
        if is_ready:
            answer += (piece := os.read(process.stdout.fileno(), LONGEST_ANSWER))
        if len(answer) > LONGEST_ANSWER:
            raise MpsError(f"expected an answer of {PROGRAM} of at most {LONGEST_ANSWER:,} bytes, found more")
    process.wait(max(0.0, end - time.monotonic()))
    return answer.decode(errors="replace")


def _read_processes(file: Path) -> dict[int, int]:
    """Return recorded processes, as start time by process ID; none if the file is absent or damaged."""
    try:
        return {int(pid): int(started) for pid, started in map(str.split, file.read_text().splitlines())}
    except (OSError, ValueError):
        return {}


_ANSWER_WITHIN_S = 8.0
_LOCK_WITHIN_S = 5.0
"""How long a request waits for an earlier one, in seconds; less than the client's timeout."""
_LONGEST_LINE = 4096


class _NoHostError(MpsError):
    """No host listens on the socket."""


class HostedMps(Mps):
    """Daemons that the process `carpool node mps-host` starts; `host` is its socket.

    A request is one line: a GPU's UUID starts its daemon, after `end ` kills it, and after `tidy ` deletes what its
    clients left. The answer is a line of JSON with the field `error`.
    """

    def __init__(
        self,
        commands: MpsCommands,
        directory: Path,
        host: Path,
        *,
        within_s: float = _ANSWER_WITHIN_S,
        clean_within_s: float = CLEAN_WITHIN_S,
    ) -> None:
        super().__init__(commands, directory, clean_within_s=clean_within_s)
        self._host, self._within_s = host, within_s
        self._log = structlog.get_logger()

    def start(self, uuid: GpuUuid) -> None:
        """Ask the host to start a GPU's daemon and to check that it answers."""
        self._request(uuid, "")

    def stop(self, uuid: GpuUuid) -> None:
        """Stop a GPU's daemon, and ask the host to delete the clients' files in its shared memory.

        Raises:
            MpsError: The daemon is still alive, or the host did not delete them.
            OSError: Its pipe directory could not be moved aside.
        """
        super().stop(uuid)
        try:
            self._request(uuid, "tidy ")
        except _NoHostError as e:  # its memory has ended with it, or the next start deletes the files
            self._log.warning("files of mps clients stay until the next daemon starts", gpu=uuid, reason=str(e))
        except MpsError as e:
            raise MpsError(
                f"GPU {uuid}: expected what the clients of its MPS daemon left to be removed, found the daemon stopped,"
                f" and of its host: {e}; the agent tries again"
            ) from e

    def end(self, uuid: GpuUuid) -> None:
        """Ask the host to kill a GPU's daemon and its servers."""
        self._request(uuid, "end ")

    def _request(self, uuid: GpuUuid, verb: str) -> None:
        self.daemon(uuid)  # raises for an invalid UUID
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._within_s)
                connection.connect(str(self._host))
                connection.sendall(f"{verb}{uuid}\n".encode())
                answer = msgspec.json.decode(connection.makefile("rb").readline(_LONGEST_LINE), type=dict[str, object])
        except (OSError, msgspec.MsgspecError) as e:
            is_away = isinstance(e, FileNotFoundError | ConnectionRefusedError)
            raise (_NoHostError if is_away else MpsError)(
                f"GPU {uuid}: expected the MPS daemons' host at {self._host}, found {e}; check the pod carpool-mps"
            ) from e
        if error := answer.get("error"):
            raise MpsError(str(error))


class _Handler(socketserver.StreamRequestHandler):
    timeout = 5.0

    def handle(self) -> None:
        """Handle one request."""
        server = self.server
        assert isinstance(server, MpsHost)  # noqa: S101  # socketserver has no types
        request = self.rfile.readline(_LONGEST_LINE).decode(errors="replace").strip()
        error = server.handle(request, self.connection)
        with suppress(ConnectionError):
            self.wfile.write(msgspec.json.encode({"error": error[: _LONGEST_LINE // 2]}) + b"\n")


def _has_hung_up(connection: socket.socket) -> bool:
    if not select.select([connection], [], [], 0)[0]:
        return False
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of a host that has ended; raises OSError if anything else is there."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "something that is no socket", str(path))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(_LOCK_WITHIN_S)
            asking.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink()
        return
    raise FileExistsError(errno.EADDRINUSE, "another host that answers there", str(path))


class MpsHost(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Starts daemons on request; only root can open its socket.

    A request waits `within_s` seconds for another one of the same GPU.

    Raises:
        OSError: The socket cannot be made, or another file or a running host is there.
    """

    daemon_threads = True
    request_queue_size = 128
    """All GPUs of a node may request their daemons at once."""

    def __init__(self, path: Path, mps: Mps, *, within_s: float = _LOCK_WITHIN_S) -> None:
        self._within_s = within_s
        self._locks: dict[str, threading.Lock] = {}
        self._mps = mps
        self._verbs = {"": ("runs", mps.start), "end": ("ended", mps.end), "tidy": ("tidied", mps.tidy)}
        self._log = structlog.get_logger()
        _remove_stale_socket(path)
        before = os.umask(0o177)
        try:
            super().__init__(str(path), _Handler)
        finally:
            os.umask(before)

    def handle(self, request: str, connection: socket.socket) -> str:
        """Start or adopt, kill, or clean up after a GPU's daemon; return the error message, empty on success.

        A request whose client has disconnected while it waited for earlier ones is dropped.
        """
        verb, _, name = request.rpartition(" ")
        done, act = self._verbs.get(verb, self._verbs[""])
        uuid = GpuUuid(name if verb in self._verbs else request)
        try:
            self._mps.daemon(uuid)  # raises for an invalid UUID, so that only GPUs get locks
            lock = self._locks.setdefault(uuid, threading.Lock())
            if not lock.acquire(timeout=self._within_s):
                raise MpsError(f"GPU {uuid}: an earlier request goes on; check its daemon on the node")
            try:
                if _has_hung_up(connection):
                    self._log.info("mps request dropped: the client has disconnected", gpu=uuid, wanted=done)
                    return ""
                act(uuid)
            finally:
                lock.release()
        except (DeviceError, OSError) as e:
            self._log.warning(f"mps daemon not {done}", gpu=uuid[:64], error=str(e))
            return str(e)
        self._log.info(f"mps daemon {done}", gpu=uuid)
        return ""
