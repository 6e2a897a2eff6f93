"""Starting, watching and killing the processes of a cluster."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from carpool_e2e.errors import StartError, log_tail
from carpool_e2e.residue import MARK

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
    popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def full_command(self) -> list[str]:
        """Its command, by way of nsenter where it lives in namespaces of its own."""
        if self.namespaces_of is None:
            return [*self.command]
        return ["nsenter", "-t", str(self.namespaces_of), "-m", "-p", "-n", "--", *self.command]

    def script(self) -> str:
        """Return a shell script that starts it as `start` does, for whoever uses a cluster that was kept."""
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
        """Stop it in its tracks, to be continued by `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on, where it was paused."""
        if self.popen is None or not self.running:
            return
        os.kill(self.pid, signal.SIGCONT)
        os.kill(self.popen.pid, signal.SIGCONT)

    def restart(self, number: int = signal.SIGKILL) -> None:
        """End it with a signal and start it again."""
        self.kill(number)
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
        """Return the environment of a process: little of the harness's own, so that runs are alike."""
        kept = {key: os.environ[key] for key in ("HOME", "LANG", "LD_LIBRARY_PATH") if key in os.environ}
        return {**kept, "PATH": self.search_path, MARK: str(self.state), **extra}

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        namespaces_of: int | None = None,
    ) -> Process:
        """Start a process under a name of its own."""
        self.logs.mkdir(exist_ok=True)
        process = Process(name, command, self.environment(environment or {}), self.logs / f"{name}.log", namespaces_of)
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
        """Wait for the processes, which somebody has killed."""
        for process in self.processes.values():
            if process.popen is not None:
                process.popen.wait()
