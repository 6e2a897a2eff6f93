"""The MPS daemons, over daemons in memory and over a program that stands in for NVIDIA's."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from carpool_core.values import GpuUuid
from carpool_deviceplugin.mps import PID_FILE, Mps, MpsError, MpsStatus, SharedMemory
from carpool_deviceplugin.mps_host import HostedMps, MpsHost
from carpool_deviceplugin.mps_program import PROGRAM, MpsProgram
from carpool_deviceplugin.testing.mps import FakeMpsCommands

GPU = GpuUuid("GPU-8f2c1b7e-0d3a-4c5b-9e6f-1a2b3c4d5e6f")


@pytest.fixture
def commands() -> FakeMpsCommands:
    return FakeMpsCommands()


@pytest.fixture
def mps(commands: FakeMpsCommands, tmp_path: Path) -> Mps:
    return Mps(commands, tmp_path)


def test_starts_once_and_stops_once(mps: Mps, commands: FakeMpsCommands, tmp_path: Path) -> None:
    assert mps.status(GPU) == MpsStatus()
    for _ in range(2):
        mps.start(GPU)
    assert (commands.starts, mps.status(GPU).is_running) == (1, True)
    assert stat.S_IMODE((tmp_path / GPU / "shm").stat().st_mode) == 0o1777
    for _ in range(2):
        mps.stop(GPU)
    assert not mps.status(GPU).is_running


def test_daemons_of_two_gpus_share_nothing(mps: Mps, commands: FakeMpsCommands) -> None:
    other = GpuUuid(GPU.replace("8f", "9f"))
    for gpu in (GPU, other):
        mps.start(gpu)
    first, second = (set(d.environment.items()) for d in commands.daemons.values())
    assert first.isdisjoint(second)


def test_what_a_dead_daemon_left_is_removed(mps: Mps, commands: FakeMpsCommands, tmp_path: Path) -> None:
    mps.start(GPU)
    commands.die(str(tmp_path / GPU / "pipe"))
    assert not mps.status(GPU).is_running
    mps.start(GPU)
    assert (commands.starts, mps.status(GPU).is_running) == (2, True)


def test_clients_and_servers_are_told(mps: Mps, commands: FakeMpsCommands, tmp_path: Path) -> None:
    mps.start(GPU)
    server = commands.connect(str(tmp_path / GPU / "pipe"), 42)
    assert mps.status(GPU) == MpsStatus(True, frozenset({server}), frozenset({42}))
    commands.daemons[str(tmp_path / GPU / "pipe")].is_faulty = True
    assert mps.status(GPU).faulty == {42}


def test_wedged_daemon_is_said_never_doubled_and_ended_in_the_end(mps: Mps, commands, tmp_path: Path) -> None:
    """A daemon that is slow to answer was taken for dead, its pipes were removed, and its clients with them."""
    mps.start(GPU)
    commands.daemons[str(tmp_path / GPU / "pipe")].is_wedged = True
    found = mps.status(GPU)
    assert found.is_running
    assert "the MPS daemon does not answer" in found.problem
    with pytest.raises(MpsError, match="found none"):
        mps.start(GPU)
    assert (tmp_path / GPU / "pipe" / "control").exists()
    mps.stop(GPU)
    assert commands.daemons == {}


@pytest.mark.parametrize("name", ["", "../../etc", "GPU-1", "GPU-8f2c1b7e-0d3a-4c5b-9e6f-1a2b3c4d5e6f/..", "GPU-$(id)"])
def test_only_uuids_become_paths(mps: Mps, name: str) -> None:
    with pytest.raises(MpsError, match="expected a GPU's UUID"):
        mps.start(GpuUuid(name))


def test_full_disk_is_said(commands: FakeMpsCommands, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MpsError, match="expected to make the MPS daemon's directories"):
        Mps(commands, tmp_path / "file").start(GPU)


STAND_IN = f"""#!{sys.executable}
import os, pathlib, sys, time
pipe = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-d"]:
    if not os.environ.get("CUDA_VISIBLE_DEVICES").startswith("GPU-8"):
        sys.exit("no such device")
    if os.fork():
        while not (pipe / "control").exists():
            time.sleep(0.01)
        os._exit(0)
    os.setsid()
    os.closerange(0, 3)
    pathlib.Path("/proc/self/comm").write_text("nvidia-cuda-mps")
    (pipe / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    (pipe / "control").touch()
    while (pipe / "control").exists():
        time.sleep(0.01)
        if (pipe / "connect").exists() and not os.fork():
            (pipe / "server").write_text(str(os.getpid()))
            (pipe / "connect").unlink(missing_ok=True)
            time.sleep(20)
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
    time.sleep(0.5)
else:
    sys.exit(f"Unrecognized command {{command}}")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MpsProgram:
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / PROGRAM
    file.write_text(STAND_IN)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return MpsProgram(private_shm=False, within_s=5.0)


def test_the_program_is_run(program: MpsProgram, tmp_path: Path) -> None:
    mps = Mps(program, tmp_path / "mps")
    assert not mps.status(GPU).is_running
    mps.start(GPU)
    assert mps.status(GPU) == MpsStatus(True), "whatever it says that its server is, there is none"
    mps.stop(GPU)
    assert not mps.status(GPU).is_running


@pytest.fixture
def hosted(program: MpsProgram, tmp_path: Path) -> Iterator[HostedMps]:
    """The agent's side; the other one runs in a thread."""
    host = MpsHost(tmp_path / "host.sock", Mps(program, tmp_path / "mps"))
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield HostedMps(program, tmp_path / "mps", tmp_path / "host.sock")
    host.shutdown()
    thread.join()
    host.server_close()


def test_daemons_are_started_by_their_host_and_stopped_by_the_agent(hosted: HostedMps, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "host.sock").stat().st_mode) == 0o600
    for _ in range(2):
        hosted.start(GPU)
    assert hosted.status(GPU).is_running
    hosted.stop(GPU)
    assert not hosted.status(GPU).is_running


def test_what_the_host_refuses_is_said(hosted: HostedMps, tmp_path: Path) -> None:
    with pytest.raises(MpsError, match="ended with 1: no such device"):
        hosted.start(GpuUuid(GPU.replace("8f", "9f")))
    with pytest.raises(MpsError, match="expected a GPU's UUID"):
        hosted.start(GpuUuid("../../etc"))
    with socket.socket(socket.AF_UNIX) as anybody:
        anybody.connect(str(tmp_path / "host.sock"))
        anybody.sendall(b"../../etc; reboot\n")
        assert b"expected a GPU's UUID" in anybody.recv(4096)


def test_host_that_is_away_is_said(program: MpsProgram, tmp_path: Path) -> None:
    with pytest.raises(MpsError, match=r"expected the MPS daemons' host at .*; look at the pod carpool-mps"):
        HostedMps(program, tmp_path / "mps", tmp_path / "nowhere.sock").start(GPU)


@pytest.mark.parametrize(
    ("effective", "says"),
    [
        ("000001ffffffffff", ""),
        ("0000000000200000", "the capabilities SETGID, SETUID; add them"),
        ("0000000000000000", "the capabilities SETGID, SETUID, SYS_ADMIN; add them"),
    ],
)
def test_mps_is_offered_where_it_can_be_run(program: MpsProgram, tmp_path: Path, effective: str, says: str) -> None:
    (tmp_path / "status").write_text(f"Name:\tpython\nCapEff:\t{effective}\n")
    found = program.missing(tmp_path / "status")
    assert found.startswith(says)
    assert bool(found) == bool(says)


def test_program_that_refuses_is_quoted(program: MpsProgram, tmp_path: Path) -> None:
    with pytest.raises(MpsError, match=f"{PROGRAM} ended with 1: no such device"):
        Mps(program, tmp_path / "mps").start(GpuUuid(GPU.replace("8f", "9f")))


def test_program_that_hangs_is_left(program: MpsProgram, tmp_path: Path) -> None:
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    (tmp_path / "mps" / GPU / "pipe" / "wedged").touch()
    quick = Mps(MpsProgram(private_shm=False, within_s=0.2), tmp_path / "mps")
    began = time.monotonic()
    assert "does not answer" in quick.status(GPU).problem
    assert time.monotonic() - began < 5
    quick.stop(GPU)
    assert not quick.status(GPU).is_running


FLOOD = 'import sys\nwhile True: sys.stdout.write("7" * 4096 + " ")\n'


@pytest.mark.parametrize(
    "answer",
    [
        'sys.stdout.write("9" * 5000 + " SERVER")',
        'sys.stdout.buffer.write(b"\\xff\\x00 SERVER")',
        'sys.stdout.buffer.write("\u0967 \u00b2 12345678 -1 SERVER".encode())',
    ],
    ids=["long", "bytes", "digits"],
)
def test_any_answer_is_read(program: MpsProgram, tmp_path: Path, answer: str) -> None:
    """Regression: it may be a client's; a number of 5,000 digits or a byte 0xff ended the agent, again and again."""
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    server = server_of(mps.pipe(GPU))
    file = tmp_path / "bin" / PROGRAM
    told = answer.replace("SERVER", str(server))
    file.write_text(f"#!{sys.executable}\nimport sys\nsys.stdin.read()\n{told}\n")
    found = mps.status(GPU)
    assert found == MpsStatus(True, frozenset({server}), frozenset({server}))
    mps.end(GPU)


def test_an_answer_without_an_end_is_not_gathered(program: MpsProgram, tmp_path: Path) -> None:
    """Regression: it took the agent's memory."""
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    (tmp_path / "bin" / PROGRAM).write_text(f"#!{sys.executable}\n{FLOOD}")
    found = mps.status(GPU)
    assert (found.is_silent, "at most 65,536 bytes, found more" in found.problem) == (True, True)
    mps.end(GPU)


def pid_of(directory: Path) -> int:
    return int((directory / GPU / "daemon").read_text().split()[0])


@pytest.mark.parametrize("how", ["link", "pipe", "directory", "number"])
def test_what_a_client_writes_about_the_daemon_is_not_believed(program: MpsProgram, tmp_path: Path, how: str) -> None:
    """Regression: a link to /dev/zero took the agent's memory, a pipe its threads, a number another GPU's daemon."""
    mps, other = Mps(program, tmp_path / "mps"), GpuUuid(GPU.replace("5e6f", "5e70"))
    mps.start(GPU)
    mps.start(other)
    (file := tmp_path / "mps" / GPU / "pipe" / PID_FILE).unlink()
    match how:
        case "link":
            file.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(file)
        case "directory":
            file.mkdir()
        case "number":
            file.write_text((tmp_path / "mps" / other / "pipe" / PID_FILE).read_text())
    assert mps.is_running(GPU)
    mps.stop(GPU)
    assert (mps.is_running(GPU), mps.is_running(other)) == (False, True)
    mps.end(GPU)
    assert mps.is_running(other)
    mps.stop(other)


@pytest.mark.parametrize("how", ["link", "pipe", "stranger", "other"])
def test_a_number_that_is_not_the_daemons_is_not_written_down(
    program: MpsProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    other = Mps(program, tmp_path / "others")
    other.start(GPU)
    file = tmp_path / "mps" / GPU / "pipe" / PID_FILE
    make = {"link": "ln -s /dev/zero", "pipe": "mkfifo", "stranger": f"echo {os.getpid()} >", "other": ""}[how]
    make = make or f"echo {pid_of(tmp_path / 'others')} >"
    script = f'#!/bin/sh\n[ "$1" = -d ] && {make} "{file}"\n'
    (tmp_path / "bin" / PROGRAM).write_text(script)
    with pytest.raises(MpsError, match="expected the MPS daemon's process ID"):
        Mps(MpsProgram(private_shm=False, within_s=0.2), tmp_path / "mps").start(GPU)
    other.end(GPU)
    assert not other.is_running(GPU)


def test_a_link_in_place_of_the_control_pipe_is_not_followed(program: MpsProgram, tmp_path: Path) -> None:
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    (tmp_path / "mps" / GPU / "pipe" / "control").rename(tmp_path / "away")
    (tmp_path / "mps" / GPU / "pipe" / "control").symlink_to(tmp_path / "away")
    assert "found a link that a client has put there" in mps.status(GPU).problem
    mps.stop(GPU)
    assert not mps.is_running(GPU)


def test_a_daemon_that_ignores_being_asked_to_end_is_ended(program: MpsProgram, tmp_path: Path) -> None:
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    (tmp_path / "mps" / GPU / "pipe" / "wedged").touch()
    os.kill(pid_of(tmp_path / "mps"), signal.SIGSTOP)
    Mps(MpsProgram(private_shm=False, within_s=0.2), tmp_path / "mps").stop(GPU)
    assert not mps.is_running(GPU)


def test_a_process_that_may_not_be_ended_is_said(
    program: MpsProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: under AppArmor the error ended the whole agent, and each one after it."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    with monkeypatch.context() as forbidding:
        forbidding.setattr(os, "kill", refuse)
        with pytest.raises(MpsError, match=r"expected to end process \d+ of MPS, found .*not permitted"):
            mps.end(GPU)
    mps.end(GPU)
    assert not mps.is_running(GPU)


SERVER = 'import pathlib, time; pathlib.Path("/proc/self/comm").write_text("nvidia-cuda-mps"); print(flush=True)'


def test_a_server_that_outlives_its_daemon_is_known_and_ended(program: MpsProgram, tmp_path: Path) -> None:
    script = (tmp_path / "bin" / PROGRAM).read_text()
    with subprocess.Popen([sys.executable, "-c", f"{SERVER}; time.sleep(20)"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        (tmp_path / "bin" / PROGRAM).write_text(script.replace("700", str(server.pid)))
        mps = Mps(program, tmp_path / "mps")
        mps.start(GPU)
        assert mps.status(GPU) == MpsStatus(True), "that it is named says nothing"
        assert mps.status(GPU, [server.pid]) == MpsStatus(True, frozenset({server.pid}), frozenset({42}))
        os.kill(pid_of(tmp_path / "mps"), signal.SIGKILL)
        while mps.is_running(GPU):
            time.sleep(0.01)
        assert Mps(program, tmp_path / "mps").status(GPU) == MpsStatus(servers=frozenset({server.pid}))
        mps.stop(GPU)
        assert server.wait(5) == -signal.SIGTERM
        assert mps.status(GPU) == MpsStatus()


@pytest.mark.parametrize("how", ["hangs", "has died"])
def test_a_server_that_was_never_told_of_is_known_by_its_name_and_group(
    program: MpsProgram, tmp_path: Path, how: str
) -> None:
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    mps.status(GPU)  # the daemon was seen once
    with (
        subprocess.Popen([sys.executable, "-c", f"{SERVER}; time.sleep(20)"], stdout=subprocess.PIPE) as server,
        subprocess.Popen(["sleep", "20"]) as client,
    ):
        assert server.stdout is not None
        server.stdout.readline()
        if how == "hangs":
            (tmp_path / "mps" / GPU / "pipe" / "wedged").touch()
        else:
            os.kill(pid_of(tmp_path / "mps"), signal.SIGKILL)
            while mps.is_running(GPU):
                time.sleep(0.01)
        quick = Mps(MpsProgram(private_shm=False, within_s=0.2), tmp_path / "mps")
        assert quick.status(GPU, [server.pid, client.pid]).servers == {server.pid}
        quick.stop(GPU)
        assert server.wait(5) == -signal.SIGTERM
        assert client.poll() is None, "nobody else is ended"
        client.kill()
    assert not mps.is_running(GPU)


def test_a_number_that_another_process_has_by_now_is_left_alone(program: MpsProgram, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", f"{SERVER}; time.sleep(20)"], stdout=subprocess.PIPE) as another:
        assert another.stdout is not None
        another.stdout.readline()
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
    with subprocess.Popen([sys.executable, "-c", f"{SERVER}; time.sleep(20)"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        onlooker = Mps(program, tmp_path / "mps", may_write=False)
        assert server.pid in onlooker.status(GPU, [server.pid]).servers
        server.kill()
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
    with subprocess.Popen([sys.executable, "-c", f"{SERVER}; time.sleep(20)"], stdout=subprocess.PIPE) as named:
        assert named.stdout is not None
        named.stdout.readline()
        assert mps.status(GPU, [named.pid]).servers == set()
        named.kill()


def server_of(pipe: Path) -> int:
    """Let a client come, as it were, and return the server that the daemon starts."""
    (pipe / "connect").touch()
    while (pipe / "connect").exists() or not (pipe / "server").exists():
        time.sleep(0.01)
    return int((pipe / "server").read_text())


@pytest.mark.parametrize("is_alive", [True, False], ids=["alive", "dead"])
def test_another_gpus_daemon_and_servers_are_nobodys_servers_here(
    program: MpsProgram, tmp_path: Path, is_alive: bool
) -> None:
    """Regression: a client that answered in its daemon's place had another namespace's daemon and servers ended."""
    mps, other = Mps(program, tmp_path / "mps"), GpuUuid(GPU.replace("5e6f", "5e70"))
    mps.start(GPU)
    mps.start(other)
    own, theirs = server_of(mps.pipe(GPU)), server_of(mps.pipe(other))
    daemon = int((tmp_path / "mps" / other / "daemon").read_text().split()[0])
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


def test_a_daemon_that_hangs_is_ended_by_its_host(hosted: HostedMps, tmp_path: Path) -> None:
    """The agent may have no right to, under AppArmor."""
    hosted.start(GPU)
    hosted.end(GPU)
    assert not hosted.is_running(GPU)
    with pytest.raises(MpsError, match="expected a GPU's UUID"):
        hosted.end(GpuUuid("../../etc"))


def test_all_gpus_of_a_node_get_their_daemons_at_once(hosted: HostedMps, tmp_path: Path) -> None:
    """Regression: of eight one found no room in the host's queue."""
    gpus = [GpuUuid(f"GPU-8f2c1b7e-0d3a-4c5b-9e6f-1a2b3c4d5e{number:02x}") for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(hosted.start, gpus))
    assert all(map(hosted.is_running, gpus))
    for gpu in gpus:
        hosted.end(gpu)
    assert not any(map(hosted.is_running, gpus))


def test_what_clients_left_is_removed_when_the_daemon_stops(mps: Mps, tmp_path: Path) -> None:
    """Regression: it stayed on the node's disk for ever."""
    mps.start(GPU)
    (kept := tmp_path / "kept").write_text("of somebody else")
    shm = tmp_path / GPU / "shm"
    (shm / "big").write_bytes(bytes(1000))
    (shm / "deep" / "er").mkdir(parents=True)
    (shm / "deep" / "er" / "file").touch()
    (shm / "link").symlink_to(tmp_path)
    (shm / "to").symlink_to(kept)
    (tmp_path / GPU / "log" / "server.log").write_text("a lot")
    mps.stop(GPU)
    assert [*(tmp_path / GPU / "memory").iterdir(), *(tmp_path / GPU / "log").iterdir()] == []
    assert kept.read_text() == "of somebody else"


def make_deep(directory: Path) -> None:
    """Make directories in each other, more than are removed."""
    at = os.open(directory, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=at)
        inner = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)


@pytest.fixture
def shared(tmp_path: Path) -> SharedMemory:
    """A file system that the daemons' host sees elsewhere than the node."""
    (tmp_path / "here").mkdir()
    return SharedMemory(tmp_path / "here", Path("/var/lib/kubelet/pods/uid/volumes/kubernetes.io~empty-dir/shm"))


def test_daemon_and_clients_share_memory_where_its_host_has_some(
    commands: FakeMpsCommands, tmp_path: Path, shared: SharedMemory
) -> None:
    """Regression: it was the node's disk, without a limit."""
    host, agent = Mps(commands, tmp_path / "mps", shared), Mps(commands, tmp_path / "mps")
    assert agent.shm(GPU) == tmp_path / "mps" / GPU / "shm", "no daemon yet"
    host.start(GPU)
    shm = commands.daemons[str(agent.pipe(GPU))].shm
    assert shm.parent == shared.here / GPU
    assert stat.S_IMODE(shm.stat().st_mode) == 0o1777
    assert agent.shm(GPU) == shared.on_node / GPU / shm.name, "what the agent brings into containers"
    (shm / "segment").write_bytes(bytes(1000))
    agent.stop(GPU)
    host.end(GPU)
    assert list((shared.here / GPU).iterdir()) == []


def test_another_host_takes_its_place_with_memory_of_its_own(
    commands: FakeMpsCommands, tmp_path: Path, shared: SharedMemory
) -> None:
    """Its pod is another one, and so is the directory; a host of before, or after, may have none."""
    mps = tmp_path / "mps"
    hosts = [
        Mps(commands, mps),
        Mps(commands, mps, shared),
        Mps(commands, mps, replace(shared, on_node=Path("/other"))),
    ]
    found = []
    for host in (*hosts, hosts[0]):
        host.start(GPU)
        found.append(host.shm(GPU).parent)
        commands.die(str(host.pipe(GPU)))
    assert found == [mps / GPU / "memory", shared.on_node / GPU, Path("/other") / GPU, mps / GPU / "memory"]
    assert (mps / GPU / "shm").is_dir()


@pytest.mark.parametrize("has_memory", [True, False])
def test_memory_of_an_earlier_version_makes_room(
    commands: FakeMpsCommands, tmp_path: Path, shared: SharedMemory, has_memory: bool
) -> None:
    """Regression: where its clients had left something, no link could take its place, and no daemon started."""
    (place := tmp_path / "mps" / GPU / "shm").mkdir(parents=True)
    (place / "segment").write_bytes(bytes(1000))
    mps = Mps(commands, tmp_path / "mps", shared if has_memory else None)
    mps.start(GPU)
    assert (place.is_symlink(), mps.is_running(GPU)) == (True, True)
    assert not list(place.parent.glob(".old.*"))


def test_what_cannot_be_removed_is_not_in_the_next_daemons_memory(
    commands: FakeMpsCommands, mps: Mps, tmp_path: Path
) -> None:
    """Regression: what clients had closed in a directory of another user was brought into the next namespace's pods."""
    mps.start(GPU)
    first = mps.shm(GPU)
    make_deep(first)
    mps.stop(GPU)
    mps.start(GPU)
    assert list(first.iterdir()), "deeper than is removed"
    assert mps.shm(GPU) != first
    assert list(commands.daemons[str(mps.pipe(GPU))].shm.iterdir()) == []
    subprocess.run(["rm", "-rf", str(first)], check=True)


def test_what_a_dead_daemons_clients_left_is_removed(commands: FakeMpsCommands, mps: Mps, tmp_path: Path) -> None:
    """What it wrote in its log stays: it may say why."""
    mps.start(GPU)
    (tmp_path / GPU / "shm" / "big").write_bytes(bytes(1000))
    (tmp_path / GPU / "log" / "server.log").write_text("why")
    commands.die(str(mps.pipe(GPU)))
    mps.start(GPU)
    assert list((tmp_path / GPU / "shm").iterdir()) == []
    assert (tmp_path / GPU / "log" / "server.log").read_text() == "why"


@pytest.mark.parametrize("how", ["directory", "link", "deep"])
def test_what_clients_put_where_they_met_a_daemon_is_gone_before_the_next(
    commands: FakeMpsCommands, mps: Mps, tmp_path: Path, how: str
) -> None:
    """Regression: a directory in the control pipe's place kept every later daemon away, and links stayed for it."""
    mps.start(GPU)
    (kept := tmp_path / "kept").write_text("of somebody else")
    pipe = mps.pipe(GPU)
    match how:
        case "directory":
            (pipe / "control").unlink()
            (pipe / "control" / "in").mkdir(parents=True)
        case "link":
            (pipe / "log").symlink_to(kept)
        case "deep":
            make_deep(pipe)
    commands.die(str(pipe))
    mps.start(GPU)
    assert [path.name for path in pipe.iterdir()] == ["control"], "the new one's"
    assert (pipe / "control").is_file()
    assert kept.read_text() == "of somebody else"
    subprocess.run(["rm", "-rf", *map(str, pipe.parent.glob(".old.*"))], check=True)


def test_a_stopped_daemons_host_is_told_so(program: MpsProgram, tmp_path: Path, shared: SharedMemory) -> None:
    """The agent sees nothing of the memory."""
    host = MpsHost(tmp_path / "host.sock", Mps(program, tmp_path / "mps", shared))
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    agent = HostedMps(program, tmp_path / "mps", tmp_path / "host.sock")
    try:
        agent.start(GPU)
        (shared.here / GPU / agent.shm(GPU).name / "segment").touch()
        agent.stop(GPU)
        assert list((shared.here / GPU).iterdir()) == []
        agent.start(GPU)
    finally:
        host.shutdown()
        thread.join()
        host.server_close()
    agent.stop(GPU)  # a host that is gone has taken the memory with it
    assert not agent.is_running(GPU)


class Slow(FakeMpsCommands):
    """Daemons that take as long to end as they are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ending, self.may_end = threading.Event(), threading.Event()
        self.ends = 0

    def kill(self, environment: Mapping[str, str], servers: Mapping[int, int]) -> None:
        self.ends += 1
        self.is_ending.set()
        assert self.may_end.wait(10)
        super().kill(environment, servers)


def ask(path: Path, what: str) -> socket.socket:
    asking = socket.socket(socket.AF_UNIX)
    asking.settimeout(10)
    asking.connect(str(path))
    asking.sendall(f"{what}\n".encode())
    return asking


def test_who_has_hung_up_is_not_obeyed(tmp_path: Path) -> None:
    """Regression: requests of an agent that had given up queued at a host, and ended a daemon under a new client."""
    commands = Slow()
    host = MpsHost(tmp_path / "host.sock", Mps(commands, tmp_path / "mps"))
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with ask(tmp_path / "host.sock", GPU) as starting:
            assert starting.recv(4096) == b'{"error":""}\n'
        with ask(tmp_path / "host.sock", f"end {GPU}") as first:
            assert commands.is_ending.wait(10)
            for what in (GPU, f"end {GPU}", GPU):
                ask(tmp_path / "host.sock", what).close()
            commands.may_end.set()
            assert first.recv(4096) == b'{"error":""}\n'
        with ask(tmp_path / "host.sock", f"tidy {GPU}") as last:
            assert last.recv(4096) == b'{"error":""}\n'
    finally:
        host.shutdown()
        thread.join()
        host.server_close()
    assert (commands.starts, commands.ends, commands.daemons) == (1, 1, {})


def test_a_clean_stop_ends_nobody(tmp_path: Path) -> None:
    """Regression: it had the host kill whatever was there by then."""
    commands = Slow()
    host = MpsHost(tmp_path / "host.sock", Mps(commands, tmp_path / "mps"))
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    agent = HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock")
    try:
        agent.start(GPU)
        agent.stop(GPU)
        agent.start(GPU)
        with ask(tmp_path / "host.sock", f"tidy {GPU}") as stale:
            assert stale.recv(4096) == b'{"error":""}\n'
        assert agent.is_running(GPU)
        assert agent.shm(GPU).is_dir(), "nothing is removed under a daemon"
    finally:
        host.shutdown()
        thread.join()
        host.server_close()
    assert (commands.starts, commands.ends) == (2, 0)


def test_a_host_that_does_not_answer_is_said_after_a_stop(commands: FakeMpsCommands, tmp_path: Path) -> None:
    """Regression: it was taken for done."""
    Mps(commands, tmp_path / "mps").start(GPU)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "host.sock"))
        silent.listen()
        agent = HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock", within_s=0.05)
        with pytest.raises(MpsError, match="timed out"):
            agent.stop(GPU)
    assert not agent.is_running(GPU)


def test_a_host_of_an_earlier_version_does_not_tidy_up(commands: FakeMpsCommands, tmp_path: Path) -> None:
    Mps(commands, tmp_path / "mps").start(GPU)
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(tmp_path / "host.sock"))
        earlier.listen()

        def refuse() -> None:
            with earlier.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b'{"error":"expected a GPU\'s UUID"}\n')

        thread = threading.Thread(target=refuse)
        thread.start()
        HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock").stop(GPU)
        thread.join()
    assert commands.daemons == {}


def test_program_that_is_absent_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"{PROGRAM} on PATH" in MpsProgram.missing()
    with pytest.raises(MpsError, match=f"expected {PROGRAM} on PATH, found none"):
        Mps(MpsProgram(), tmp_path / "mps").start(GPU)
