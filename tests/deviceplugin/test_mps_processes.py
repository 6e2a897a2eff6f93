"""Which processes may be ended as those of MPS, and how it is said that one does not end."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from carpool_deviceplugin.mps.port import PROGRAM, MpsError
from carpool_deviceplugin.mps.processes import MpsProcesses
from carpool_deviceplugin.mps.program import MpsProgram
from mps_world import GPU, server

OWN, FOREIGN = "0::/carpool-mps\n", "0::/kubepods/besteffort/pod00000000-0000-4000-8000-000000000001/cri-1\n"


@pytest.fixture
def show(tmp_path: Path) -> Callable[[int, str], Path]:
    """Show a process in a tree of /proc in which its control group is chosen; the rest is its own."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(OWN)

    def of(pid: int, cgroup: str) -> Path:
        (its := tmp_path / "proc" / str(pid)).mkdir()
        (its / "cgroup").write_text(cgroup)
        for name in ("stat", "environ"):
            (its / name).symlink_to(f"/proc/{pid}/{name}")
        return tmp_path / "proc"

    return of


def test_a_process_of_another_control_group_is_never_ended(show: Callable[[int, str], Path], tmp_path: Path) -> None:
    """A pod chooses the names and the environment of its processes; which group they are in it does not choose."""
    pipe = tmp_path / "pipe"
    with server(pipe) as own, server(pipe) as named, server(tmp_path / "other") as of_another_gpu:
        for process, group in ((own, OWN), (named, FOREIGN), (of_another_gpu, OWN)):
            proc = show(process.pid, group)
        processes = MpsProcesses(proc)
        assert processes.of_directory(pipe)().keys() == {own.pid}
        processes.end(processes.of_directory(pipe))
        assert own.wait(10) == -signal.SIGTERM
        assert (named.poll(), of_another_gpu.poll()) == (None, None)


def test_later_looks_ask_of_new_processes_and_of_those_that_were_found(
    show: Callable[[int, str], Path], tmp_path: Path
) -> None:
    """Regression: each look asked of all, a hundred times a second while one did not end."""
    pipe = tmp_path / "pipe"
    with server(pipe) as first, server(pipe) as second, server(pipe) as third:
        for process, group in ((first, OWN), (second, FOREIGN)):
            proc = show(process.pid, group)
        look = MpsProcesses(proc).of_directory(pipe)
        assert look().keys() == {first.pid}
        (proc / str(second.pid) / "cgroup").write_text(OWN)
        show(third.pid, OWN)
        assert look().keys() == {first.pid, third.pid}, "the second one is passed over"
        for ended in (first, third):
            ended.kill()
            ended.wait()
        assert look().keys() == {second.pid}, "before it says that nobody is left, it asks of all"


def test_who_was_found_is_there_until_it_has_ended(show: Callable[[int, str], Path], tmp_path: Path) -> None:
    """Regression: while a process ends, its environment is gone, and what it has on the GPU is not."""
    pipe = tmp_path / "pipe"
    with server(pipe) as process:
        proc = show(process.pid, OWN)
        look = MpsProcesses(proc).of_directory(pipe)
        assert look().keys() == {process.pid}
        environment = proc / str(process.pid) / "environ"
        environment.unlink()
        environment.touch()
        assert look().keys() == {process.pid}
        process.kill()
        process.wait()
        assert not look()


class Seconds:
    """Time that passes where somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def gone() -> int:
    """The number of a process that has ended, and was waited for."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_a_process_that_the_driver_holds_is_said(gone: int) -> None:
    seconds = Seconds()
    with pytest.raises(MpsError, match=f"expected MPS processes to end when they are killed, found {gone} still there"):
        MpsProcesses(monotonic=seconds.monotonic, sleep=seconds.sleep).end(lambda: {gone: 1})
    assert 4 <= seconds.now < 4.3, "one second for the first signal, three for the second"


def test_what_a_start_that_failed_leaves_is_said_beside_why(
    program: MpsProgram, tmp_path: Path, gone: int, show: Callable[[int, str], Path]
) -> None:
    """The daemon that it leaves is one that the driver holds."""
    (proc := show(gone, OWN)).rename(tmp_path / "later")
    (its := tmp_path / "later" / str(gone)).joinpath("stat").unlink()
    (its / "environ").unlink()
    pipe, shm = tmp_path / GPU / "pipe", tmp_path / GPU / "shm"
    (its / "stat").write_text(f"{gone} (nvidia-cuda-mps) D " + " ".join(["0"] * 30))
    (its / "environ").write_text(f"A=b\0CUDA_MPS_PIPE_DIRECTORY={pipe}\0")
    proc.mkdir()
    (tmp_path / "bin" / PROGRAM).write_text(f"#!/bin/sh\nmv {tmp_path}/later/* {proc}\necho no such device\nexit 1\n")
    seconds = Seconds()
    processes = MpsProcesses(proc, seconds.monotonic, seconds.sleep)
    for directory in (pipe, shm):
        directory.mkdir(parents=True)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path)}
    with pytest.raises(MpsError, match=f"ended with 1: no such device; moreover .* found {gone} still there"):
        MpsProgram(private_shm=False, processes=processes).start(environment, shm)
