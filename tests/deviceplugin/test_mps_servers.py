"""Which processes are an MPS daemon's servers: nobody's word counts but the driver's and the kernel's."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from carpool_core.values import GpuUuid
from carpool_deviceplugin.mps.daemons import Mps, MpsStatus
from carpool_deviceplugin.mps.port import PROGRAM
from carpool_deviceplugin.mps.program import MpsProgram
from mps_world import GPU, pid_of, server, server_of


def test_a_server_that_outlives_its_daemon_is_known_and_ended(program: MpsProgram, tmp_path: Path) -> None:
    script = (tmp_path / "bin" / PROGRAM).read_text()
    with server() as its_server:
        (tmp_path / "bin" / PROGRAM).write_text(script.replace("700", str(its_server.pid)))
        mps = Mps(program, tmp_path / "mps")
        mps.start(GPU)
        assert mps.status(GPU) == MpsStatus(True), "that it is named says nothing"
        assert mps.status(GPU, [its_server.pid]) == MpsStatus(True, frozenset({its_server.pid}), frozenset({42}))
        os.kill(pid_of(tmp_path / "mps"), signal.SIGKILL)
        while mps.is_running(GPU):
            time.sleep(0.01)
        assert Mps(program, tmp_path / "mps").status(GPU) == MpsStatus(servers=frozenset({its_server.pid}))
        mps.stop(GPU)
        assert its_server.wait(5) == -signal.SIGTERM
        assert mps.status(GPU) == MpsStatus()


@pytest.mark.parametrize("how", ["hangs", "has died"])
def test_a_server_that_was_never_told_of_is_known_by_its_name_and_group(
    program: MpsProgram, tmp_path: Path, how: str
) -> None:
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    mps.status(GPU)  # the daemon was seen once
    with (
        server() as its_server,
        subprocess.Popen(["sleep", "20"]) as client,
    ):
        if how == "hangs":
            (tmp_path / "mps" / GPU / "pipe" / "wedged").touch()
        else:
            os.kill(pid_of(tmp_path / "mps"), signal.SIGKILL)
            while mps.is_running(GPU):
                time.sleep(0.01)
        quick = Mps(MpsProgram(private_shm=False, within_s=0.2), tmp_path / "mps")
        assert quick.status(GPU, [its_server.pid, client.pid]).servers == {its_server.pid}
        quick.stop(GPU)
        assert its_server.wait(5) == -signal.SIGTERM
        assert client.poll() is None, "nobody else is ended"
        client.kill()
    assert not mps.is_running(GPU)


def test_a_number_that_another_process_has_by_now_is_left_alone(program: MpsProgram, tmp_path: Path) -> None:
    with server() as another:
        began = program.started(another.pid)
        assert began is not None
        environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipe")}
        (tmp_path / "daemon").write_text(f"{another.pid} {began - 1}")
        program.kill(environment, {another.pid: began - 1})
        assert another.poll() is None
        (tmp_path / "daemon").unlink()
        program.kill(environment, {another.pid: began})
        assert another.wait(5) == -signal.SIGTERM


def test_who_only_looks_at_daemons_writes_nothing(program: MpsProgram, tmp_path: Path) -> None:
    """Regression: `carpool node inspect` wrote beside a living agent."""
    Mps(program, tmp_path / "mps").start(GPU)
    before = sorted((tmp_path / "mps" / GPU).iterdir())
    with server() as its_server:
        onlooker = Mps(program, tmp_path / "mps", may_write=False)
        assert its_server.pid in onlooker.status(GPU, [its_server.pid]).servers
        its_server.kill()
    assert sorted((tmp_path / "mps" / GPU).iterdir()) == before
    onlooker.stop(GPU)


def test_a_process_of_another_group_is_no_server_whatever_its_name(program: MpsProgram, tmp_path: Path) -> None:
    """A pod gives its processes the names that it likes; they must not vanish from the GPU's tenants."""
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    mps.status(GPU)
    home = tmp_path / "mps" / GPU / "home"
    assert home.read_text()
    os.kill(pid_of(tmp_path / "mps"), signal.SIGKILL)
    while mps.is_running(GPU):
        time.sleep(0.01)
    home.write_text("00000000-0000-4000-8000-000000000001 cri-containerd-1.scope")
    with server() as named:
        assert mps.status(GPU, [named.pid]).servers == set()
        named.kill()


@pytest.mark.parametrize("is_alive", [True, False], ids=["alive", "dead"])
def test_another_gpus_daemon_and_servers_are_nobodys_servers_here(
    program: MpsProgram, tmp_path: Path, is_alive: bool
) -> None:
    """Regression: a client that answered in its daemon's place had another namespace's daemon and servers ended."""
    mps, other = Mps(program, tmp_path / "mps"), GpuUuid(GPU.replace("5e6f", "5e70"))
    mps.start(GPU)
    mps.start(other)
    own, theirs = server_of(mps.pipe(GPU)), server_of(mps.pipe(other))
    daemon = pid_of(tmp_path / "mps", other)
    (mps.pipe(GPU) / "listed").write_text(f"{daemon}\n{theirs}\n{own}\n")
    if not is_alive:
        os.kill(daemon, signal.SIGKILL)
        while mps.is_running(other):
            time.sleep(0.01)
    assert mps.status(GPU).servers == {own}
    assert mps.status(GPU, [own]).servers == {own}
    if is_alive:
        assert mps.status(GPU, [daemon, theirs]).servers == {own}, "whatever is said of where they are"
    mps.end(GPU)
    assert (mps.is_running(other), program.started(own)) == (is_alive, None)
    assert program.started(theirs) is not None
    program.kill({"CUDA_MPS_PIPE_DIRECTORY": str(mps.pipe(other))}, {theirs: program.started(theirs) or 0})


def test_another_gpus_servers_that_an_earlier_version_took_for_ours_are_left_alone(
    program: MpsProgram, tmp_path: Path
) -> None:
    """It believed a client, and wrote them down; an agent of this version begins with what it finds."""
    mps, other = Mps(program, tmp_path / "mps"), GpuUuid(GPU.replace("5e6f", "5e70"))
    mps.start(GPU)
    mps.start(other)
    own, theirs = server_of(mps.pipe(GPU)), server_of(mps.pipe(other))
    taken = {pid: program.started(pid) for pid in (own, theirs, pid_of(tmp_path / "mps", other))}
    (servers := tmp_path / "mps" / GPU / "servers").write_text("".join(f"{pid} {at}\n" for pid, at in taken.items()))
    assert mps.status(GPU).servers == {own}
    mps.end(GPU)
    assert (mps.is_running(other), program.started(own), program.started(theirs)) == (True, None, taken[theirs])
    mps.status(GPU)
    assert servers.read_text() == "", "nor is it believed once that daemon has died"
    mps.end(other)
    program.kill({"CUDA_MPS_PIPE_DIRECTORY": str(mps.pipe(other))}, {theirs: taken[theirs] or 0})
