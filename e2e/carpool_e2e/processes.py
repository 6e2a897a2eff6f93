"""Starting, watching and killing the processes of a cluster."""

import fcntl
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console

from carpool_e2e.errors import HarnessError, StartError, log_tail

MARK = "CARPOOL_E2E_STATE"
"""Environment variable that every process of a cluster carries; its value is the cluster's state directory."""

CGROUP_ROOT = Path("/sys/fs/cgroup")
KUBELET_CONTROLLERS = frozenset({"cpu", "cpuset", "hugetlb", "memory", "pids"})
"""Controllers that a kubelet requires of its cgroup root on cgroup v2."""

LINKS = Path("/sys/class/net")

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Folder in which a pod finds the credentials of its ServiceAccount."""

_WITH_CREDENTIALS = 'mkdir -p "$2" && mount --bind "$1" "$2" && shift 2 && exec "$@"'


def marked_processes(state: Path) -> list[int]:
    """Return the processes that belong to a state directory, and their descendants that kept the environment."""
    wanted = f"{MARK}={state}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except (OSError, ProcessLookupError):
            continue  # ended meanwhile, or not ours to read
        if wanted in environ.split(b"\0"):
            found.append(int(entry.name))
    return found


def end_processes(state: Path, timeout_s: float = 20.0) -> None:
    """Kill every process of a state directory, and wait until all are gone.

    All at once: an API server that outlives its etcd would linger on its port for a minute.

    Raises:
        HarnessError: Some process does not end.
    """
    deadline = time.monotonic() + timeout_s
    while pids := marked_processes(state):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # a descendant, or of an earlier harness: its own parent reaps it
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            raise HarnessError(f"processes {pids} of {state} did not end within {timeout_s:.0f} s of SIGKILL")
        time.sleep(0.05)


def link_name(prefix: str, index: int) -> str:
    """Return the name of the host's end of a node's link."""
    return f"{prefix}-n{index}"


def remove_links(prefix: str) -> None:
    """Remove the network links whose name begins with `PREFIX-`.

    Raises:
        HarnessError: A link stays.
    """
    for link in sorted(LINKS.glob(f"{prefix}-n*")):
        try:
            done = subprocess.run(["ip", "link", "delete", link.name], check=False, capture_output=True, text=True)
        except OSError as error:
            raise HarnessError(f"the network link {link.name} cannot be removed: `ip` does not run: {error}") from error
        # A link goes with its namespace, too, which may have ended just now.
        if done.returncode != 0 and link.exists():
            raise HarnessError(f"the network link {link.name} cannot be removed: {done.stderr.strip()}")


def hierarchies() -> list[Path]:
    """Return the mounted cgroup hierarchies that a kubelet uses: one on cgroup v2, one for each controller on v1."""
    if (CGROUP_ROOT / "cgroup.controllers").exists():
        return [CGROUP_ROOT]
    if not CGROUP_ROOT.exists():
        return []
    # `unified` carries no controllers on a hybrid machine.
    return [d for d in sorted(CGROUP_ROOT.iterdir()) if d.is_dir() and not d.is_symlink() and d.name != "unified"]


def create_cgroups(name: str) -> None:
    """Create a cgroup of that name in every hierarchy, with the root's CPUs and memory nodes on cgroup v1.

    Raises:
        HarnessError: On cgroup v2 a controller that a kubelet insists on cannot be handed down.
    """
    for hierarchy in hierarchies():
        _hand_down_controllers(hierarchy)
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for key in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / key).exists():
                (group / key).write_text((hierarchy / key).read_text())


def _hand_down_controllers(unified: Path) -> None:
    handed_down = unified / "cgroup.subtree_control"
    if not handed_down.exists():
        return  # cgroup v1
    available = set((unified / "cgroup.controllers").read_text().split())
    for controller in sorted(KUBELET_CONTROLLERS & available - set(handed_down.read_text().split())):
        try:
            handed_down.write_text(f"+{controller}")
        except OSError as error:
            raise HarnessError(
                f"{handed_down}: expected to hand down the controller {controller}, found {error}; a kubelet needs it; "
                "in a container, run it in the host's cgroup namespace (--cgroupns=host)"
            ) from error


def remove_cgroups(prefix: str, within_s: float = 5.0) -> None:
    """Remove the cgroups whose name begins with `PREFIX-`, and kill what is still in them.

    Raises:
        HarnessError: A cgroup stays.
    """
    for group in [g for root in {*hierarchies(), CGROUP_ROOT / "unified"} for g in root.glob(f"{prefix}-*")]:
        for directory in [*sorted(group.rglob("*/"), key=lambda d: -len(d.parts)), group]:
            _remove_cgroup(directory, within_s)


def _remove_cgroup(directory: Path, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise HarnessError(
                    f"the cgroup {directory} cannot be removed within {within_s:.0f} s: {error}"
                ) from error
            _kill_all_of(directory)
            time.sleep(0.1)
        else:
            return


def _kill_all_of(cgroup: Path) -> None:
    try:
        pids = (cgroup / "cgroup.procs").read_text().split()
    except OSError:
        return  # the cgroup is gone, or its removal reports the error
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(int(pid), signal.SIGKILL)


_POLL_S = 0.05
_CONTINUED_EACH_S = 0.2


@dataclass
class Process:
    """One process, which can be killed and started again."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    namespaces_of: int | None = None
    """Process whose mount, PID and network namespaces it enters; None to stay in the harness's own."""
    credentials: Path | None = None
    """Folder that it finds at `SERVICE_ACCOUNT`, in a mount namespace of its own; None for no such folder."""
    popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def full_command(self) -> list[str]:
        """Its command, by way of nsenter or unshare where it lives in namespaces of its own."""
        if self.credentials is not None:
            mounting = ["unshare", "--mount", "sh", "-c", _WITH_CREDENTIALS, "sh"]
            return [*mounting, str(self.credentials), SERVICE_ACCOUNT, *self.command]
        if self.namespaces_of is None:
            return [*self.command]
        return ["nsenter", "-t", str(self.namespaces_of), "-m", "-p", "-n", "--", *self.command]

    def script(self) -> str:
        """Return a shell script that starts it as `start` does, for users of a kept cluster."""
        environment = (shlex.quote(f"{key}={value}") for key, value in self.environment.items())
        return (
            f"#!/bin/sh\n# Starts {self.name} again, as it was started.\n"
            f"env -i {' '.join(environment)} \\\n  setsid {shlex.join(self.full_command)} \\\n"
            f"  </dev/null >>{shlex.quote(str(self.log))} 2>&1 &\n"
        )

    def start(self) -> None:
        """Start it, with output appended to its log."""
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.full_command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for the harness, which then ends the cluster in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process, in the harness's PID namespace; nsenter's child where it lives in namespaces of its own."""
        if self.popen is None:
            raise StartError(f"{self.name} was never started")
        if self.namespaces_of is None:
            return self.popen.pid
        return wait_for(f"the child of {self.name}'s nsenter", lambda: first_child(self.popen.pid if self.popen else 0))

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self.popen is not None and self.popen.poll() is None

    def kill(self, number: int = signal.SIGKILL, timeout_s: float = 20.0) -> None:
        """Send a signal and wait for the end."""
        if self.popen is None or not self.running:
            return
        os.kill(self.pid, number)
        deadline = time.monotonic() + timeout_s
        while self.running:
            # nsenter stops itself some time after its child did, and a stopped one does not notice that that has ended.
            os.kill(self.popen.pid, signal.SIGCONT)
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(_CONTINUED_EACH_S)
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.full_command, timeout_s)

    def pause(self) -> None:
        """Stop it with SIGSTOP; `resume` continues it."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue it after `pause`."""
        if self.popen is None or not self.running:
            return
        os.kill(self.pid, signal.SIGCONT)
        os.kill(self.popen.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until it is ready.

        Raises:
            StartError: It ended, or was not ready in time; the message ends with its log.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.running:
                code = self.popen.returncode if self.popen else None
                raise StartError(f"{self.name} ended with {code} before it was ready\n{log_tail(self.log)}")
            if time.monotonic() > deadline:
                raise StartError(f"{self.name} was not ready within {timeout_s:.0f} s\n{log_tail(self.log)}")
            time.sleep(_POLL_S)


def first_child(pid: int) -> int | None:
    """Return a process's first child; None where it has none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return None
    return int(children[0]) if children else None


def wait_for(what: str, get: Callable[[], int | None], timeout_s: float = 10.0) -> int:
    """Wait until there is something.

    Raises:
        StartError: There was nothing in time.
    """
    deadline = time.monotonic() + timeout_s
    while (found := get()) is None:
        if time.monotonic() > deadline:
            raise StartError(f"expected {what} within {timeout_s:.0f} s, found none")
        time.sleep(_POLL_S)
    return found


@dataclass
class ProcessTable:
    """Every process that a cluster started, by name."""

    state: Path
    """The cluster's state directory."""
    search_path: str
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def logs(self) -> Path:
        """Folder of all logs."""
        return self.state / "log"

    @property
    def scripts(self) -> Path:
        """Folder of scripts, each of which starts a process again."""
        return self.state / "start"

    def script(self, name: str) -> Path:
        """Return the script that starts a process again."""
        return self.scripts / name

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process: little of the harness's own, so that runs are equal."""
        kept = {key: os.environ[key] for key in ("HOME", "LANG", "LD_LIBRARY_PATH") if key in os.environ}
        return {**kept, "PATH": self.search_path, MARK: str(self.state), **extra}

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        namespaces_of: int | None = None,
        credentials: Path | None = None,
    ) -> Process:
        """Start a process under a name of its own."""
        self.logs.mkdir(exist_ok=True)
        log, whole = self.logs / f"{name}.log", self.environment(environment or {})
        process = Process(name, command, whole, log, namespaces_of, credentials)
        self.scripts.mkdir(exist_ok=True)
        self.script(name).write_text(process.script())
        self.script(name).chmod(0o700)
        process.start()
        self.processes[name] = process
        return process

    def __getitem__(self, name: str) -> Process:
        """Return a process by name, such as `operator`, `extender` or `agent-a100`."""
        return self.processes[name]

    def reap(self) -> None:
        """Wait for the processes, which were killed."""
        for process in self.processes.values():
            if process.popen is not None:
                process.popen.wait()


MAX_SLOTS = 64
KEPT = "kept"
"""File in a slot's directory that makes the next start leave it alone."""


def default_root() -> Path:
    """Return where slots live: the same for every run of a user, and short, because a unix socket's path is limited."""
    return Path(f"/tmp/carpool-{os.getuid()}")


@dataclass(frozen=True)
class Slot:
    """A numbered state directory whose lock this process holds."""

    root: Path
    number: int
    lock_fd: int

    @property
    def directory(self) -> Path:
        """Where the cluster keeps its state."""
        return self.root / str(self.number)

    @property
    def name(self) -> str:
        """Prefix of links and cgroups; unique on the machine."""
        return slot_name(self.root, self.number)

    @property
    def kept(self) -> bool:
        """Whether the next start leaves it alone."""
        return (self.directory / KEPT).exists()

    def keep(self) -> None:
        """Let the cluster outlive this process, until `clean`."""
        (self.directory / KEPT).touch()

    def empty(self) -> None:
        """End everything that belongs to this slot and remove its directory.

        Raises:
            HarnessError: Something stays, and with it the directory, so that the slot is not taken.
        """
        removals: list[Callable[[], None]] = [
            partial(end_processes, self.directory),
            partial(remove_links, self.name),
            partial(remove_cgroups, self.name),
        ]
        failures = []
        for remove in removals:
            try:
                remove()
            except HarnessError as error:
                failures.append(str(error))
        if failures:
            raise HarnessError("; ".join(failures))
        _remove_tree(self.directory)

    def release(self) -> None:
        """Release the lock, and remove its file unless the slot is still in use."""
        if not self.directory.exists():
            lock_file(self.root, self.number).unlink(missing_ok=True)
        os.close(self.lock_fd)


def lock_file(root: Path, number: int) -> Path:
    """Return the file whose lock marks a slot as in use."""
    return root / f"{number}.lock"


def slot_name(root: Path, number: int) -> str:
    """Return the prefix of a slot's links and cgroups; at most 8 characters, because a link's name has at most 15."""
    return f"cp{number}" if root == default_root() else f"cq{number}"


def acquire(root: Path | None = None, console: Console | None = None) -> Slot:
    """Take a free slot, after emptying every slot that a dead harness left behind.

    A slot that cannot be emptied is reported on the console and stays taken.

    Args:
        root: Where slots live.
        console: Where it is reported what cannot be removed.

    Raises:
        HarnessError: All slots are in use.
    """
    root = root or default_root()
    _prepare(root)
    _, failures = _sweep(root, also_kept=False)
    for failure in failures:
        (console or Console(stderr=True)).print(f"Another slot is used: {failure}", highlight=False, soft_wrap=True)
    for number in range(MAX_SLOTS):
        slot = _try_lock(root, number)
        if slot is None:
            continue
        if not slot.directory.exists():
            slot.directory.mkdir(mode=0o700)
            return slot
        slot.release()
    raise HarnessError(f"all {MAX_SLOTS} clusters under {root} are in use; stop one, or run `make demo-clean`")


def clean(root: Path | None = None) -> list[int]:
    """Empty every slot whose harness has ended, the kept ones too, and return their numbers.

    Raises:
        HarnessError: Some could not be emptied; the others were.
    """
    root = root or default_root()
    if not root.exists():
        return []
    _prepare(root)
    swept, failures = _sweep(root, also_kept=True)
    if failures:
        raise HarnessError("\n".join(failures))
    return swept


def _sweep(root: Path, *, also_kept: bool) -> tuple[list[int], list[str]]:
    """Return the numbers of emptied slots, and the errors of the others."""
    swept, failures = [], []
    for number in sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdigit()):
        slot = _try_lock(root, number)
        if slot is None:
            continue
        if also_kept or not slot.kept:
            try:
                slot.empty()
                swept.append(number)
            except HarnessError as error:
                failures.append(f"{slot.directory} cannot be emptied: {error}")
        slot.release()
    return swept, failures


def _prepare(root: Path) -> None:
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise HarnessError(f"{root} must be a directory of user {os.getuid()}, found something else there: remove it")


def _try_lock(root: Path, number: int) -> Slot | None:
    path = lock_file(root, number)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:
            return Slot(root, number, lock)
        os.close(lock)  # its holder removed the file; another process may have made a new one


def _remove_tree(directory: Path) -> None:
    # A namespace lets go of its mounts a moment after its last process has ended.
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)
    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise HarnessError(f"the directory {directory} cannot be removed: {error}") from error


_FIRST = 21000
_PER_SLOT = 100


@dataclass(frozen=True)
class Ports:
    """Ports on the loopback address."""

    etcd: int
    etcd_peer: int
    apiserver: int
    controller_manager: int
    scheduler: int
    extender: int
    extender_metrics: int
    operator_metrics: int
    board: int


def is_free(port: int) -> bool:
    """Whether nothing listens on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def choose(slot: int) -> Ports:
    """Choose the free ports of a slot's range; below the ephemeral ports, which the kernel gives to any program."""
    first = _FIRST + slot * _PER_SLOT
    free = (port for port in range(first, first + _PER_SLOT) if is_free(port))
    return Ports(*(next(free) for _ in fields(Ports)))


LIKE_CTRL_C = (signal.SIGTERM, signal.SIGHUP)
"""Signals whose default action would end the harness at once, and leave its cluster running."""

_HANDLED = (signal.SIGINT, *LIKE_CTRL_C)


def as_by_ctrl_c() -> None:
    """Have the first of `LIKE_CTRL_C` and Ctrl-C raise KeyboardInterrupt in the main thread.

    Those that follow do nothing, but for a second Ctrl-C. What nohup ignores stays ignored.
    """
    for number in _HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # `timeout` signals the whole group, make passes signals on, and CI sends SIGTERM some seconds after SIGINT: the
    # second signal must not disturb the removal of the cluster.
    # A function and not SIG_IGN, because new processes would inherit that.
    for each in _HANDLED:
        if signal.getsignal(each) is _interrupt:
            signal.signal(each, _already)
    if number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)
    raise KeyboardInterrupt(signal.Signals(number).name)


def _already(number: int, frame: FrameType | None) -> None:
    """Do nothing: the cluster is being removed. A second Ctrl-C ends the harness at once."""
    if number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)
