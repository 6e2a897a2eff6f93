"""Which processes may be ended as those of MPS, and how it is said that one does not end."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from carpool_deviceplugin.mps_processes import PROC, end, of_directory
from mps_world import server

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
            (its / name).symlink_to(PROC / str(pid) / name)
        return tmp_path / "proc"

    return of


def test_a_process_of_another_control_group_is_never_ended(show: Callable[[int, str], Path], tmp_path: Path) -> None:
    """A pod chooses the names and the environment of its processes; which group they are in it does not choose."""
    pipe = tmp_path / "pipe"
    with server(pipe) as own, server(pipe) as named, server(tmp_path / "other") as of_another_gpu:
        for process, group in ((own, OWN), (named, FOREIGN), (of_another_gpu, OWN)):
            proc = show(process.pid, group)
        assert of_directory(pipe, proc).keys() == {own.pid}
        end(lambda: of_directory(pipe, proc))
        assert own.wait(10) == -signal.SIGTERM
        assert (named.poll(), of_another_gpu.poll()) == (None, None)
