"""One MPS control daemon for each GPU: started, asked how it is, drained and stopped.

Layout of a GPU's directory: `pipe/` (clients and daemon meet there), `log/`, `shm` (a link to where the node has the
memory that this very daemon and its clients share). Clients write in both, so nothing there is believed; who daemon and
servers are stands beside them. A daemon serves one GPU, and the plan lets only pods of one namespace behind it; the
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
"""Directories named to one program."""
MOMENT_S = 1.5
"""Whoever leaves more than can be removed, or goes on writing there, must not keep the next tenant waiting: several of
these fit into the time in which an answer is expected. What is left stays until the next daemon starts or ends."""


def make_empty(directory: Path, within_s: float = MOMENT_S) -> None:
    """Make a directory with nothing in it, in place of one that cannot be emptied, too; raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    empty(directory, within_s=within_s)
    if _has_something(directory):
        put_away(directory, within_s)
        directory.mkdir()


def put_away(directory: Path, within_s: float = MOMENT_S) -> None:
    """Make a directory's place free, and remove of it what can be; raises OSError, but not where there is none."""
    with suppress(FileNotFoundError):
        directory.rename(directory.with_name(f".old.{secrets.token_hex(8)}"))
    sweep(directory.parent, within_s=within_s)


def sweep(*directories: Path, within_s: float = MOMENT_S) -> None:
    """Remove what was put away in these, and could not be removed so far; as much of it as a moment allows.

    In any order: what can never be removed must not keep a moment's time from the rest for ever.
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
        return []  # whoever needs the directory is told


def empty(*directories: Path, within_s: float = MOMENT_S) -> None:
    """Remove what clients and daemon left, as much of it as a moment allows: nobody else would.

    Millions of files, or directories as deep, are removed in a process that lists them piece by piece: in this one they
    would take memory without a limit. What stands in another user's own directory cannot be removed and stays.
    """
    with suppress(OSError, subprocess.TimeoutExpired):
        if full := [str(one.absolute()) for one in directories if _has_something(one)]:
            command = ["find", *full, "-mindepth", "1", "-delete"]
            quiet = subprocess.DEVNULL
            subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=within_s, check=False)


def _has_something(directory: Path) -> bool:
    """Whether there is anything in it; where nobody may look there is."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True


PROGRAM = "nvidia-cuda-mps-control"
PID_FILE = "nvidia-cuda-mps-control.pid"
"""In the pipe directory: the daemon's process ID, written by itself."""


class MpsError(DeviceError):
    """The daemon did not start, did not answer, or answered no."""


class MpsCommands(Protocol):
    """NVIDIA's program `nvidia-cuda-mps-control`. Starting, asking and ending raise MpsError."""

    def start(self, environment: Mapping[str, str], shm: Path) -> None:
        """Start a daemon, which goes on without us; `shm` becomes its /dev/shm.

        Where it raises, none is left, but for one that cannot be ended: the error says so.
        """
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

    def living(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> Mapping[int, int]:
        """Return who of these servers (process ID, and when it began) still lives, and belongs to no other GPU."""
        ...

    def home(self, environment: Mapping[str, str]) -> str | None:
        """Name where the daemon and its servers live, and no client can; None where there is no daemon."""
        ...

    def servers(
        self, environment: Mapping[str, str], home: str, present: Iterable[int], listed: Iterable[int]
    ) -> Mapping[int, int]:
        """Return who of these are servers of that GPU's daemon, and when they began; of no other GPU's.

        Args:
            environment: The daemon's.
            home: Where it lives, or lived; those of all GPUs may live together.
            present: Process IDs on the GPU, as the driver says.
            listed: Process IDs that came out of the pipe directory: that they are its own must be seen elsewhere.
        """
        ...


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


_COMM = PROGRAM[:15]
"""What the kernel calls the daemon, and its servers."""
_STATE, _PARENT, _STARTED = 0, 1, 19
"""Places among what follows the command's name in /proc/PID/stat."""
_LONGEST_PID = 32
_LOOK_EVERY_S = 0.1
_END_WITHIN_S = {signal.SIGTERM: 1.0, signal.SIGKILL: 3.0}
"""A driver takes its time to free what a process has on the GPU."""


class MpsProcesses:
    """Those of this process's PID namespace.

    Args:
        proc: Where the kernel tells of them.
        monotonic: Seconds that only pass.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._proc, self._monotonic, self._sleep = proc, monotonic, sleep

    def began(self, pid: int) -> tuple[int, int] | None:
        """When a daemon or server began, in ticks since boot, and its parent; None where that process is none."""
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
        """Name a process's control group, in the same way whoever looks from another one; None where it has ended.

        From within, in a control group namespace of one's own, it is the root and has no name: it is "-" then.
        Where a path begins hangs on the looker's own group, and some hierarchies may hold nobody (version 1 beside 2),
        so only the pod and the paths' last names count.
        """
        try:
            text = (self._proc / str(pid) / "cgroup").read_text()
        except OSError:
            return None
        return " ".join([pod_of(text) or "-", *sorted({line.rpartition("/")[2] for line in text.splitlines()} - {""})])

    def written(self, directory: Path) -> int | None:
        """Read the process ID that the daemon of a pipe directory wrote there; None while none did.

        Its clients may write there, too: links and pipes are not opened, and the process has to be this one's own child
        by its control group, with this very directory in its environment.
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
        """Return a look for a pipe directory's daemons and servers that we started, written down or not.

        A look returns who is there, and since when. The first one asks of all processes, of which there may be
        thousands; later ones only of those that it found, and of new ones, before they say that nobody is left. Who was
        found is there until it has ended: its environment goes first, and what it has on the GPU later.
        """
        others, ours = set[int](), dict[int, int]()

        def look() -> Mapping[int, int]:
            there = {int(entry.name) for entry in os.scandir(self._proc) if entry.name.isdecimal()}
            found = {pid: at for pid, at in ours.items() if (known := self.began(pid)) is not None and known[0] == at}
            found |= self._among(there - others, directory)
            if others and not found:  # a number may be another process's by now, and a process another program
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
        """End processes, by SIGKILL at last, also those that appear meanwhile.

        Args:
            find: Returns who of them is still there, and since when.

        Raises:
            MpsError: One of them may not be ended, or does not end.
        """
        if not find():
            return
        for number, within_s in _END_WITHIN_S.items():  # one that hangs does not end by the first
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
        """Whether a process is of our own control group, and has this pipe directory in its environment."""
        try:
            is_managed = (self._proc / str(pid) / "cgroup").read_bytes() == (
                self._proc / "self" / "cgroup"
            ).read_bytes()
            its = (self._proc / str(pid) / "environ").read_bytes().split(b"\0") if is_managed else []
        except OSError:
            return False
        return f"CUDA_MPS_PIPE_DIRECTORY={directory}".encode() in its


LONGEST_ANSWER = 1 << 16
"""In bytes: more than the process IDs of all clients that a daemon can have."""
_POLL_EVERY_S = 0.01


def talk(program: str, process: "subprocess.Popen[bytes]", text: str, within_s: float) -> tuple[str, str]:
    """Send a text and return what is printed and what is complained of; raises TimeoutExpired, or MpsError for a flood.

    What a daemon says, one of its clients may say in its place: any bytes, and any number of them. The program's end is
    the end of its answer, whoever else holds what it printed to.
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
"""Beside the pipe directory, where no client can write: the daemon's process ID, and when it began."""
_CAPABILITIES = {"SETGID": 6, "SETUID": 7, "SYS_ADMIN": 21}
"""A daemon runs its server as its client's user, and gets a /dev/shm of its own."""
_PRIVATE_SHM = 'mount --bind "$1" /dev/shm && exec "$2" -d'
"""Gives a daemon a /dev/shm of its own, so that the tenants of two GPUs never see each other's."""


class MpsProgram:
    """Runs the program, found on PATH.

    Args:
        private_shm: Whether daemons get a /dev/shm of their own; takes CAP_SYS_ADMIN.
        within_s: How long an answer may take, in seconds.
        processes: Those that there are; this node's when None.
    """

    def __init__(
        self, *, private_shm: bool = True, within_s: float = 3.0, processes: MpsProcesses | None = None
    ) -> None:
        self._private_shm, self._within_s = private_shm, within_s
        self._processes = processes or MpsProcesses()

    @staticmethod
    def is_installed() -> bool:
        """Whether the node has it: it comes with the driver."""
        return shutil.which(PROGRAM) is not None

    @staticmethod
    def missing(status: Path = Path("/proc/self/status")) -> str:
        """Say what keeps MPS from being offered, and how to get it; empty where nothing does."""
        if not MpsProgram.is_installed():
            return f"{PROGRAM} on PATH; it comes with the driver: mount it, or install cuda-mps"
        for program, package in (("unshare", "util-linux"), ("find", "findutils")):
            if shutil.which(program) is None:
                return f"{program} on PATH; install {package}"
        held = next((line for line in status.read_text().splitlines() if line.startswith("CapEff:")), "CapEff: 0")
        lacking = [name for name, bit in _CAPABILITIES.items() if not int(held.split()[1], 16) >> bit & 1]
        return f"the capabilities {', '.join(lacking)}; add them to the pod carpool-mps" if lacking else ""

    def start(self, environment: Mapping[str, str], shm: Path) -> None:
        """Start a daemon; what an earlier start that was cut short, or this one, leaves without a record is ended."""
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
        except OSError as e:  # the program would wait for ever
            raise MpsError(f"expected an MPS daemon, found no control pipe: {e}") from e
        if stat.S_ISLNK(mode):  # clients write in that directory, and the program would follow it
            raise MpsError("expected an MPS daemon's control pipe, found a link that a client has put there; end it")
        return self._run([PROGRAM], environment, f"{command}\n")

    def is_alive(self, environment: Mapping[str, str]) -> bool:
        """Whether the daemon's process exists."""
        return self._pid(environment) is not None

    def kill(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> None:
        """End the daemon, and those of these servers that are still the same processes."""
        wanted = dict(servers)
        if (known := _recorded(environment)) is not None:
            wanted[known[0]] = known[1]
        self._processes.end(lambda: {pid: at for pid, at in wanted.items() if self.started(pid) == at})

    def started(self, pid: int) -> int | None:
        """When a daemon or server of MPS began, in ticks since boot; None where that process is none."""
        found = self._processes.began(pid)
        return found[0] if found is not None else None

    def living(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> dict[int, int]:
        """Return who of these servers still lives, and is neither another GPU's daemon nor its child.

        Whoever wrote them down may have believed a client.
        """
        others = self._others(environment) if servers else set()
        return {
            pid: at
            for pid, at in servers.items()
            if (known := self._processes.began(pid)) is not None
            and known[0] == at
            and others.isdisjoint((pid, known[1]))
        }

    def home(self, environment: Mapping[str, str]) -> str | None:
        """Name the daemon's control group; None where there is no daemon."""
        pid = self._pid(environment)
        return self._processes.group(pid) if pid is not None else None

    def servers(
        self, environment: Mapping[str, str], home: str, present: Iterable[int], listed: Iterable[int]
    ) -> dict[int, int]:
        """Return who bears the servers' name in that control group and is on the GPU, or its daemon's child."""
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
        """Process ID of the living daemon; its number may belong to another process by now."""
        known = _recorded(environment)
        return known[0] if known is not None and self.started(known[0]) == known[1] else None

    def _record(self, environment: Mapping[str, str]) -> None:
        """Write down who the daemon is, before any client can say something else."""
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
        """Run what leaves a daemon behind, which may print to the same file later: a pipe would end it by then."""
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
            raise MpsError(f"{PROGRAM} ended with {ended.returncode}: {printable(said[:500]) or 'it said nothing'}")

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
            raise MpsError(f"{PROGRAM} ended with {process.returncode}: {printable(said[:500]) or 'it said nothing'}")
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
"""For an earlier request; less than an answer is waited for, so that who asks is told."""
_LONGEST = 4096
_END = "end "
"""Before a GPU's name: its daemon and servers shall be ended."""
_TIDY = "tidy "
"""Before a GPU's name: what clients left shall be removed where no daemon runs."""


class UntidiedError(MpsError):
    """A daemon has stopped, but its host did not remove what clients left in the memory that they shared with it."""


class _AwayError(MpsError):
    """There is no host."""


class _UnknownError(MpsError):
    """It is of an earlier version, and does not know the word."""


class _Answer(msgspec.Struct, frozen=True):
    error: str = ""
    is_understood: bool = False
    """Whether the host knows the word that was said; the first versions know few, and do not say so."""


class HostedMps(Mps):
    """Daemons that another process starts.

    Args:
        commands: Of NVIDIA's program.
        directory: Where each GPU has a directory of its own.
        host: Socket of the process that starts them.
        may_write: As of Mps.
        within_s: How long an answer may take, in seconds.
        tidy_within_s: As of Mps.
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
        """Let a GPU's daemon be started, and see that it answers."""
        self.directory(uuid)  # a name that is no UUID goes no further
        self._tell(uuid, uuid)

    def stop(self, uuid: GpuUuid) -> None:
        """Stop a GPU's daemon; what clients left in its shared memory only its host can remove.

        Raises:
            UntidiedError: The host did not. An earlier request of that GPU may go on, and start a daemon.
            MpsError: As of Mps; so OSError.
        """
        super().stop(uuid)
        try:
            self._tell(uuid, f"{_TIDY}{uuid}")
        except (_AwayError, _UnknownError) as e:  # its daemons have gone with it; or it does so before the next start
            self._log.warning("what mps clients left stays until the gpu's next daemon", gpu=uuid, reason=str(e))
        except MpsError as e:
            raise UntidiedError(
                f"GPU {uuid}: expected what the clients of its MPS daemon left to be removed, found the daemon stopped,"
                f" and of its host: {e}; the agent tries again"
            ) from e

    def end(self, uuid: GpuUuid) -> None:
        """Let a GPU's daemon and its servers be ended."""
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
        """Start or end the daemon of the GPU that is named."""
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
    """Remove the socket of a host that is gone, and nothing else; raises OSError."""
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
    """Starts daemons for whoever may open its socket, which is root alone.

    Args:
        path: Of the socket.
        mps: The daemons.
        within_s: How long one request waits for another of the same GPU, in seconds.

    Raises:
        OSError: The socket cannot be made; something else, or a host that answers, is never replaced.
    """

    daemon_threads = True
    request_queue_size = 128
    """The GPUs of a node may all want their daemons at once."""

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
        """Start a GPU's daemon, or take over the one that runs; or end it, or tidy up after it.

        Args:
            said: What, and of which GPU.
            has_hung_up: Whether nobody waits for the answer any more; asked when it is this one's turn.

        Returns:
            Why not, or an empty text.
        """
        word = next((word for word in (_END, _TIDY) if said.startswith(word)), "")
        uuid = GpuUuid(said.removeprefix(word))
        what, act = {
            _END: ("ended", self._mps.end),
            _TIDY: ("tidied", self._mps.tidy),
        }.get(word, ("runs", self._mps.start))
        try:
            if not self._one_by_one(uuid, act, has_hung_up):
                self._log.info("mps daemon left alone: who asked has hung up", gpu=uuid, wanted=what)
                return ""
        except (DeviceError, OSError) as e:
            self._log.warning(f"mps daemon not {what}", gpu=uuid[:64], error=str(e))
            return str(e)
        self._log.info(f"mps daemon {what}", gpu=uuid)
        return ""

    def _one_by_one(self, uuid: GpuUuid, act: Callable[[GpuUuid], None], has_hung_up: Callable[[], bool]) -> bool:
        self._mps.directory(uuid)  # only names of GPUs get locks
        lock = self._locks.setdefault(uuid, threading.Lock())
        if not lock.acquire(timeout=self._within_s):  # whoever waits for ever has hung up long ago
            raise MpsError(f"GPU {uuid}: an earlier request goes on; look at its daemon on the node")
        try:
            if has_hung_up():
                return False
            act(uuid)
        finally:
            lock.release()
        return True
