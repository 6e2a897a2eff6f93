"""NVIDIA's `nvidia-cuda-mps-control`, as a program."""

import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from carpool_deviceplugin.mps.port import PID_FILE, PROGRAM, MpsError
from carpool_deviceplugin.mps.processes import MpsProcesses
from carpool_deviceplugin.mps.talking import LONGEST_ANSWER, talk
from carpool_deviceplugin.quoting import printable

RECORD = "daemon"
"""Beside the pipe directory, where no client can write: the daemon's process ID, and when it began."""
_LOOK_EVERY_S = 0.01
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
            time.sleep(_LOOK_EVERY_S)
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
