"""NVIDIA's `nvidia-cuda-mps-control`, as a program."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from carpool_deviceplugin.mps import PID_FILE, MpsError

PROGRAM = "nvidia-cuda-mps-control"
_CAPABILITIES = {"SETGID": 6, "SETUID": 7, "SYS_ADMIN": 21}
"""A daemon runs its server as its client's user, and gets a /dev/shm of its own."""
_PRIVATE_SHM = 'mount --bind "$1" /dev/shm && exec "$2" -d'
"""Gives a daemon a /dev/shm of its own, so that the tenants of two GPUs never see each other's."""


class MpsProgram:
    """Runs the program, found on PATH.

    Args:
        private_shm: Whether daemons get a /dev/shm of their own; takes CAP_SYS_ADMIN.
        within_s: How long an answer may take, in seconds.
    """

    def __init__(self, *, private_shm: bool = True, within_s: float = 3.0) -> None:
        self._private_shm, self._within_s = private_shm, within_s

    @staticmethod
    def is_installed() -> bool:
        """Whether the node has it: it comes with the driver."""
        return shutil.which(PROGRAM) is not None

    @staticmethod
    def missing(status: Path = Path("/proc/self/status")) -> str:
        """Say what keeps MPS from being offered, and how to get it; empty where nothing does."""
        if not MpsProgram.is_installed():
            return f"{PROGRAM} on PATH; it comes with the driver: mount it, or install cuda-mps"
        if shutil.which("unshare") is None:
            return "unshare on PATH; install util-linux"
        held = next((line for line in status.read_text().splitlines() if line.startswith("CapEff:")), "CapEff: 0")
        lacking = [name for name, bit in _CAPABILITIES.items() if not int(held.split()[1], 16) >> bit & 1]
        return f"the capabilities {', '.join(lacking)}; add them to the pod carpool-mps" if lacking else ""

    def start(self, environment: Mapping[str, str], shm: Path) -> None:
        """Start a daemon."""
        program = shutil.which(PROGRAM)
        if program is None:
            raise MpsError(f"expected {PROGRAM} on PATH, found none; it comes with NVIDIA's driver, mount it")
        command = [program, "-d"]
        if self._private_shm:
            command = ["unshare", "--mount", "sh", "-c", _PRIVATE_SHM, "mps", str(shm), program]
        self._run(command, environment, "")

    def ask(self, environment: Mapping[str, str], command: str) -> str:
        """Send a command to a daemon."""
        if not (Path(environment["CUDA_MPS_PIPE_DIRECTORY"]) / "control").exists():
            raise MpsError("expected an MPS daemon, found no control pipe")  # the program would wait for ever
        return self._run([PROGRAM], environment, f"{command}\n")

    def is_alive(self, environment: Mapping[str, str]) -> bool:
        """Whether the daemon's process exists."""
        return self._pid(environment) is not None

    def kill(self, environment: Mapping[str, str]) -> None:
        """End the daemon, and its servers with it."""
        pid = self._pid(environment)
        if pid is None:
            return
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        end = time.monotonic() + self._within_s
        while self._pid(environment) is not None and time.monotonic() < end:
            time.sleep(0.05)

    @staticmethod
    def _pid(environment: Mapping[str, str]) -> int | None:
        """Process ID of the living daemon; its number may belong to another process by now."""
        try:
            pid = int((Path(environment["CUDA_MPS_PIPE_DIRECTORY"]) / PID_FILE).read_text())
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError, IndexError):
            return None
        return pid if name and PROGRAM.startswith(name) and state != "Z" else None

    def _run(self, command: list[str], environment: Mapping[str, str], text: str) -> str:
        try:
            done = subprocess.run(
                command,
                env={"PATH": os.environ.get("PATH", ""), **environment},
                input=text,
                capture_output=True,
                text=True,
                timeout=self._within_s,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as e:
            raise MpsError(f"expected an answer of {PROGRAM} within {self._within_s:g} s, found none") from e
        except OSError as e:
            raise MpsError(f"expected to run {command[0]}, found {e}") from e
        said = (done.stdout + done.stderr).strip()
        if done.returncode or "Cannot find MPS control daemon" in said:
            raise MpsError(f"{PROGRAM} ended with {done.returncode}: {said[:500] or 'it said nothing'}")
        return done.stdout
