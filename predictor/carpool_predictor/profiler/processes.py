"""Training processes of the profiler, and the MPS daemon that some of them run behind."""

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO

import msgspec

from carpool_predictor.profiler.ports import Failed, Reply, Workload

WORKER = (sys.executable, "-W", "ignore", "-m", "carpool_predictor.profiler.worker")
MPS_CONTROL = "nvidia-cuda-mps-control"
_ENDING_S = 10.0

_REPLIES = msgspec.json.Decoder(Reply)


class WorkerProcess:
    """One process; started early, so that it has imported PyTorch when its task comes.

    Args:
        command: What to start.
    """

    def __init__(self, command: tuple[str, ...] = WORKER) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (`stop` closes it)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid

    def give(self, workload: Workload, environment: dict[str, str]) -> None:
        """Hand over the task."""
        self._send({"workload": msgspec.to_builtins(workload), "environment": environment})

    def run(self, seconds: float) -> None:
        """Begin to train for so long."""
        self._send({"seconds": seconds})

    def _send(self, message: object) -> None:
        if self._process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):  # it died; `reply` says so
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def reply(self) -> Reply | None:
        """Return what it said next, or how it died."""
        try:
            reply: Reply = _REPLIES.decode(self._lines.get_nowait())
            return reply
        except queue.Empty:
            if self._process.poll() is None or self._reader.is_alive():
                return None
            return Failed(f"the process ended with code {self._process.returncode}: {self._last_error()}")

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    def stop(self) -> None:
        """End it, and wait until its memory is free."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._reader.join(_ENDING_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


class Refused:
    """Stands in for a process that could not be started."""

    pid = 0

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def run(self, seconds: float) -> None:
        """There is nothing to run."""

    def reply(self) -> Reply | None:
        """Say why."""
        return Failed(self._reason)

    def stop(self) -> None:
        """There is nothing to stop."""


class MpsDaemon:
    """An MPS daemon of the profiler's own.

    Args:
        directory: Holds its pipe and log.
        gpu: UUID of the GPU.
        program: NVIDIA's program.
    """

    def __init__(self, directory: Path, gpu: str, program: str = MPS_CONTROL) -> None:
        self._program = program
        self._environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(directory / "log"),
            "CUDA_VISIBLE_DEVICES": gpu,
        }
        self._running = False

    def environment(self) -> dict[str, str]:
        """Start the daemon where it does not run yet; return what its clients need.

        Raises:
            OSError: It cannot be started; the message says why.
        """
        if not self._running:
            for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
                Path(self._environment[name]).mkdir(parents=True, exist_ok=True)
            try:
                self._tell(["-d"])
            except (OSError, subprocess.SubprocessError) as e:
                raise OSError(f"expected {self._program} to start, as NVIDIA's driver brings it: {e}") from e
            self._running = True
        return {"CUDA_MPS_PIPE_DIRECTORY": self._environment["CUDA_MPS_PIPE_DIRECTORY"]}

    def stop(self) -> None:
        """End the daemon."""
        if self._running:
            self._tell([], b"quit\n")
            self._running = False

    def _tell(self, arguments: list[str], text: bytes = b"") -> None:
        subprocess.run(
            [self._program, *arguments],
            input=text,
            env={**os.environ, **self._environment},
            check=True,
            capture_output=True,
            timeout=_ENDING_S,
        )
