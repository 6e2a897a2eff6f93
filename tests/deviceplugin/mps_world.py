"""A substitute for NVIDIA's program, processes that look like its servers, and the daemons' host in a thread."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from carpool_core.values import GpuUuid
from carpool_deviceplugin.mps import Mps, MpsHost

LONG_S = 60.0
"""For what the test does not time: a busy machine needs longer than tenants are kept waiting."""
GPU = GpuUuid("GPU-8f2c1b7e-0d3a-4c5b-9e6f-1a2b3c4d5e6f")
STAND_IN = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
pipe = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
how = (pipe.parent / "how").read_text() if (pipe.parent / "how").exists() else ""
if sys.argv[1:] == ["-d"]:
    if not os.environ.get("CUDA_VISIBLE_DEVICES").startswith("GPU-8"):
        sys.exit("no such device")
    if os.fork():
        while how == "hangs" or not (pipe / "control").exists():
            time.sleep(0.01)
        os._exit(how == "refuses")
    os.setsid()
    if how == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.closerange(0, 3)
    pathlib.Path("/proc/self/comm").write_text("nvidia-cuda-mps")
    (pipe.parent / "began").write_text(str(os.getpid()))
    (pipe / "control").touch()
    began = time.monotonic()
    while time.monotonic() - began < (600 if (pipe / "control").exists() else 20 if how else 0):
        time.sleep(0.01)
        if (pipe / "connect").exists() and not os.fork():
            (pipe / "server").write_text(str(os.getpid()))
            (pipe / "connect").unlink(missing_ok=True)
            time.sleep(20)
    time.sleep(0.2)  # NVIDIA's program answers `quit` before the daemon's process has ended
    os._exit(0)
command = sys.stdin.read().strip()
if (pipe / "wedged").exists():
    time.sleep(60)
if command == "get_server_list":
    print((pipe / "listed").read_text() if (pipe / "listed").exists() else 700)
elif command.startswith("get_client_list"):
    print(42)
elif command.startswith("get_server_status"):
    print("ACTIVE")
elif command.startswith("quit"):
    (pipe / "control").unlink()
else:
    sys.exit(f"Unrecognized command {{command}}")
"""
"""A file `how` beside the pipe names what fails at its start; such a daemon outlives its pipe.

None outlives for long a test run that was killed."""


_SERVER = 'import pathlib, time; pathlib.Path("/proc/self/comm").write_text("nvidia-cuda-mps"); print(flush=True)'


@contextmanager
def server(pipe: Path | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that bears the name of MPS servers, and has a daemon's pipe directory in its environment."""
    environment = {**os.environ, **({} if pipe is None else {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)})}
    with subprocess.Popen(
        [sys.executable, "-c", f"{_SERVER}; time.sleep(20)"], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def hosting(socket: Path, mps: Mps, within_s: float = 8.0) -> Iterator[None]:
    """The daemons' host, in a thread."""
    host = MpsHost(socket, mps, within_s=within_s)
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        host.shutdown()
        thread.join()
        host.server_close()


def pid_of(directory: Path, gpu: GpuUuid = GPU) -> int:
    return int((directory / gpu / "daemon").read_text().split()[0])


def lives(pid: int) -> bool:
    """Whether a process lives, according to the kernel."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def server_of(pipe: Path) -> int:
    """Let a client come, as it were, and return the server that the daemon starts."""
    (pipe / "connect").touch()
    while (pipe / "connect").exists() or not (pipe / "server").exists():
        time.sleep(0.01)
    return int((pipe / "server").read_text())


def make_deep(directory: Path) -> None:
    """Make directories in each other, more than are removed."""
    at = os.open(directory, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=at)
        inner = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
