"""The MPS control program, run as a process, and the host of the daemons."""

import os
import secrets
import signal
import socket
import stat
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from carpool_core.values import GpuUuid, PartitionState, SharingMode
from carpool_deviceplugin.app import real_devices
from carpool_deviceplugin.device_state import GpuWorker
from carpool_deviceplugin.gpu import SetMode, StartMps
from carpool_deviceplugin.mps import PROGRAM, Daemon, HostedMps, Mps, MpsError, MpsProgram, MpsStatus, SharedMemory
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Inline, Node
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import Intervals
from mps_world import GPU, LONG_S, hosting, lives, make_deep, pid_of, server_of


@pytest.mark.parametrize(
    ("effective", "message"),
    [
        ("000001ffffffffff", ""),
        ("0000000000200000", "expected the capabilities SETGID, SETUID, found none of them; add them"),
        ("0000000000000000", "expected the capabilities SETGID, SETUID, SYS_ADMIN, found none of them; add them"),
    ],
)
def test_missing_capabilities_are_named(program: MpsProgram, tmp_path: Path, effective: str, message: str) -> None:
    (tmp_path / "status").write_text(f"Name:\tpython\nCapEff:\t{effective}\n")
    found = program.problem(tmp_path / "status")
    assert found.startswith(message)
    assert bool(found) == bool(message)


def test_absent_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"expected {PROGRAM} on PATH, found none" in MpsProgram.problem()
    with pytest.raises(MpsError, match=f"expected {PROGRAM} on PATH, found none"):
        Mps(MpsProgram(), tmp_path / "mps").start(GPU)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["hangs", "ignores SIGTERM"])
def test_silent_daemon_is_reported_in_time_and_killed(program: MpsProgram, tmp_path: Path, is_stopped: bool) -> None:
    Mps(program, tmp_path / "mps").start(GPU)
    (tmp_path / "mps" / GPU / "pipe" / "wedged").touch()
    if is_stopped:
        os.kill(pid_of(tmp_path / "mps"), signal.SIGSTOP)
    quick = Mps(MpsProgram(private_shm=False, within_s=0.2), tmp_path / "mps")
    began = time.monotonic()
    assert "does not answer" in quick.status(GPU).problem
    assert time.monotonic() - began < 30
    quick.stop(GPU)
    assert not quick.status(GPU).is_running


def test_daemon_may_print_after_its_start(program: MpsProgram, tmp_path: Path) -> None:
    """Regression: its open output delayed the start, and a closed one ended the daemon."""
    file = tmp_path / "bin" / PROGRAM
    prints = "print('a warning', flush=True)"
    text = file.read_text().replace("    os.closerange(0, 3)\n", f"    {prints}\n")
    file.write_text(text.replace("        if (pipe / ", f"        {prints}\n        if (pipe / "))
    assert file.read_text().count(prints) > 1
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    time.sleep(0.2)
    assert mps.status(GPU).is_running
    mps.stop(GPU)


def test_daemon_finds_libcuda_as_the_agent(
    program: MpsProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: without LD_LIBRARY_PATH daemons of driver 580 ended on nodes that need it (GKE COS)."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    environment = Path(f"/proc/{pid_of(tmp_path / 'mps')}/environ").read_bytes().split(b"\0")
    assert b"LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in environment
    mps.stop(GPU)


FORGED = {
    "long": 'sys.stdout.write("9" * 5000 + "\\nSERVER")',
    "bytes": 'sys.stdout.buffer.write(b"\\xff\\x00\\nSERVER")',
    "digits": 'sys.stdout.buffer.write("\u0967\\n\u00b2\\n12345678\\n-1\\nSERVER".encode())',
    "a-sentence": 'sys.stdout.write("Server 42 not found\\nSERVER")',
    "endless": 'while True: sys.stdout.write("7" * 4096 + " ")',
}


@pytest.mark.parametrize(("name", "answer"), FORGED.items(), ids=FORGED)
def test_forged_answer_is_parsed_or_cut(program: MpsProgram, tmp_path: Path, name: str, answer: str) -> None:
    """Regression: a number of 5,000 digits or a byte 0xff ended the agent, and an endless answer filled its memory."""
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    server = server_of(mps.daemon(GPU).pipe)
    file = tmp_path / "bin" / PROGRAM
    file.write_text(f"#!{sys.executable}\nimport sys\nsys.stdin.read()\n{answer.replace('SERVER', str(server))}\n")
    found = mps.status(GPU)
    if name == "endless":
        assert (found.is_silent, "at most 65,536 bytes, found more" in found.problem) == (True, True)
    else:
        assert found == MpsStatus(True, frozenset({server}), frozenset({server}))
    mps.end(GPU)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("hangs", "to start within"),
        ("refuses", "ended with 1: expected at most 87 bytes"),
        ("stays", "expected to write"),
    ],
)
def test_failed_start_leaves_no_daemon(program: MpsProgram, tmp_path: Path, how: str, message: str) -> None:
    """Regression: an unrecorded daemon stayed, and the next one was started beside it."""
    mps = Mps(MpsProgram(private_shm=False, within_s=4), tmp_path / "mps")
    (there := mps.daemon(GPU).directory).mkdir(parents=True)
    (there / "how").write_text(how)
    if how == "stays":
        (there / "daemon" / "in").mkdir(parents=True)  # nothing can be written in its place
    with pytest.raises(MpsError, match=message):
        mps.start(GPU)
    assert not lives(int((there / "began").read_text()))


def test_interrupted_start_leaves_no_daemon(program: MpsProgram, tmp_path: Path) -> None:
    """The starter was killed before it recorded the daemon; another GPU's daemon stays."""
    mps, other = Mps(program, tmp_path / "mps"), GpuUuid(GPU.replace("5e6f", "5e70"))
    for gpu in (GPU, other):
        mps.daemon(gpu).directory.mkdir(parents=True)
        (mps.daemon(gpu).directory / "how").write_text("outlives its pipe")
        mps.start(gpu)
        mps.daemon(gpu).record.unlink()
    first, others = (int((mps.daemon(gpu).directory / "began").read_text()) for gpu in (GPU, other))
    assert not mps.is_running(GPU)
    (mps.daemon(GPU).directory / "how").write_text("")
    mps.start(GPU)
    assert (lives(first), lives(others), mps.is_running(GPU)) == (False, True, True)
    mps.stop(GPU)
    os.kill(others, signal.SIGKILL)


def test_link_in_place_of_the_control_pipe_is_not_followed(program: MpsProgram, tmp_path: Path) -> None:
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    control = tmp_path / "mps" / GPU / "pipe" / "control"
    (tmp_path / "away").hardlink_to(control)
    (tmp_path / "link").symlink_to(tmp_path / "away")
    (tmp_path / "link").replace(control)  # at once: the daemon ends where it finds nothing
    assert "found a link that a client has put there" in mps.status(GPU).problem
    mps.stop(GPU)
    assert not mps.is_running(GPU)


def test_process_that_may_not_be_killed_is_named(
    program: MpsProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: under AppArmor the error ended the whole agent."""

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


def test_leftovers_of_clients_are_deleted_when_the_daemon_stops(mps: Mps, tmp_path: Path) -> None:
    """Regression: they stayed on the node's disk."""
    mps.start(GPU)
    (kept := tmp_path / "kept").write_text("foreign")
    shm = tmp_path / GPU / "shm"
    (shm / "big").write_bytes(bytes(1000))
    (shm / "deep" / "er").mkdir(parents=True)
    (shm / "deep" / "er" / "file").touch()
    (shm / "link").symlink_to(tmp_path)
    (shm / "to").symlink_to(kept)
    make_deep(shm)
    (tmp_path / GPU / "log" / "server.log").write_text("a lot")
    mps.stop(GPU)
    assert [*(tmp_path / GPU / "memory").iterdir(), *(tmp_path / GPU / "log").iterdir()] == []
    assert kept.read_text() == "foreign"


def test_deleting_many_files_needs_little_memory(mps: Mps) -> None:
    """Regression: all names were listed first, so a client could exhaust the memory of the daemons' host."""
    mps.start(GPU)
    shm = mps.daemon(GPU).shm
    (shm / "in").mkdir()
    for number in range(2000):
        (shm / f"{number:0>200}").touch()
        (shm / "in" / f"{number:0>200}").touch()
    tracemalloc.start()
    mps.stop(GPU)
    took = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not shm.exists()
    assert took < 100_000, "an eighth of their names"


@pytest.fixture
def shared(tmp_path: Path) -> SharedMemory:
    """A file system at another path in the daemons' host than on the node."""
    (tmp_path / "here").mkdir()
    return SharedMemory(tmp_path / "here", Path("/var/lib/kubelet/pods/uid/volumes/kubernetes.io~empty-dir/shm"))


def test_daemon_and_clients_use_the_shared_file_system(
    commands: FakeMpsCommands, tmp_path: Path, shared: SharedMemory
) -> None:
    """Regression: shared memory was on the node's disk, without a limit."""
    host = Mps(commands, tmp_path / "mps", shared, clean_within_s=LONG_S)
    agent = Mps(commands, tmp_path / "mps")
    assert agent.daemon(GPU).shm == tmp_path / "mps" / GPU / "shm", "no daemon yet"
    host.start(GPU)
    shm = commands.daemons[str(agent.daemon(GPU).pipe)].shm
    assert shm.parent == shared.here / GPU
    assert stat.S_IMODE(shm.stat().st_mode) == 0o1777
    assert agent.daemon(GPU).shm == shared.on_node / GPU / shm.name, "what the agent brings into containers"
    (shm / "segment").write_bytes(bytes(1000))
    agent.stop(GPU)
    host.end(GPU)
    assert list((shared.here / GPU).iterdir()) == []


def test_next_host_uses_its_own_shared_file_system(
    commands: FakeMpsCommands, tmp_path: Path, shared: SharedMemory
) -> None:
    mps = tmp_path / "mps"
    found = []
    for memory in (None, shared, replace(shared, on_node=Path("/other")), None):
        host = Mps(commands, mps, memory)
        host.start(GPU)
        found.append(host.daemon(GPU).shm.parent)
        commands.die(str(host.daemon(GPU).pipe))
    assert found == [mps / GPU / "memory", shared.on_node / GPU, Path("/other") / GPU, mps / GPU / "memory"]
    assert (mps / GPU / "shm").is_dir()


def test_next_daemon_never_sees_undeletable_leftovers(
    commands: FakeMpsCommands, mps: Mps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: closed directories of a client were mounted into the next namespace's pods."""
    mps.start(GPU)
    first = mps.daemon(GPU).shm
    (first / "segment").touch()
    with monkeypatch.context() as nothing_is_removed:
        nothing_is_removed.setenv("PATH", "")
        mps.stop(GPU)
        mps.start(GPU)
    assert [path.name for path in first.iterdir()] == ["segment"]
    assert mps.daemon(GPU).shm != first
    assert list(commands.daemons[str(mps.daemon(GPU).pipe)].shm.iterdir()) == []
    mps.stop(GPU)
    assert not first.exists(), "but later"


def test_leftovers_of_a_dead_daemon_are_deleted(commands: FakeMpsCommands, mps: Mps, tmp_path: Path) -> None:
    """Its log stays: it may contain the reason."""
    mps.start(GPU)
    (tmp_path / GPU / "shm" / "big").write_bytes(bytes(1000))
    (tmp_path / GPU / "log" / "server.log").write_text("why")
    commands.die(str(mps.daemon(GPU).pipe))
    mps.start(GPU)
    assert list((tmp_path / GPU / "shm").iterdir()) == []
    assert (tmp_path / GPU / "log" / "server.log").read_text() == "why"


@pytest.mark.parametrize("how", ["directory", "link", "deep"])
def test_next_daemon_starts_in_an_empty_pipe_directory(
    commands: FakeMpsCommands, mps: Mps, tmp_path: Path, how: str
) -> None:
    """Regression: a client's directory in the place of the control pipe stopped every later daemon."""
    mps.start(GPU)
    (kept := tmp_path / "kept").write_text("foreign")
    pipe = mps.daemon(GPU).pipe
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
    assert [path.name for path in pipe.iterdir()] == ["control"], "that of the new daemon"
    assert (pipe / "control").is_file()
    assert kept.read_text() == "foreign"
    assert not list(pipe.parent.glob(".old.*"))


def test_host_deletes_the_shared_memory_of_a_stopped_daemon_and_an_absent_one_is_logged(
    program: MpsProgram, tmp_path: Path, shared: SharedMemory
) -> None:
    """The agent does not see the shared memory."""
    agent = HostedMps(program, tmp_path / "mps", tmp_path / "host.sock", within_s=LONG_S)
    with hosting(tmp_path / "host.sock", Mps(program, tmp_path / "mps", shared, clean_within_s=LONG_S)):
        agent.start(GPU)
        (shared.here / GPU / agent.daemon(GPU).shm.name / "segment").touch()
        agent.stop(GPU)
        assert list((shared.here / GPU).iterdir()) == []
        agent.start(GPU)
    with structlog.testing.capture_logs() as logs:
        agent.stop(GPU)  # a host that is gone has taken the memory with it
    assert not agent.is_running(GPU)
    assert [line["event"] for line in logs] == ["files of mps clients stay until the next daemon starts"]


def test_cleanup_has_a_time_limit(program: MpsProgram, tmp_path: Path) -> None:
    """Regression: a client could leave so much that later requests timed out."""
    (finder := tmp_path / "bin" / "find").write_text("#!/bin/sh\nexec sleep 60\n")
    finder.chmod(0o755)
    mps = Mps(program, tmp_path / "mps")
    for _ in range(2):
        mps.start(GPU)
        (mps.daemon(GPU).shm / "left").touch()
        (mps.daemon(GPU).directory / "log" / "left").touch()
        began = time.monotonic()
        mps.stop(GPU)
        assert time.monotonic() - began < 30, "it would last 60 s"
    assert not mps.is_running(GPU)
    for _ in range(300):
        put_away_in(mps.daemon(GPU).directory)
    began = time.monotonic()
    mps.sweep()
    assert time.monotonic() - began < 30


def put_away_in(directory: Path) -> Path:
    """Leftovers of an earlier stop."""
    (old := directory / f".old.{secrets.token_hex(8)}").mkdir(parents=True)
    (old / "in").mkdir()
    (old / "in" / "left").touch()
    (old / "link").symlink_to(directory)
    return old


def test_starting_agent_deletes_leftovers_of_earlier_stops(
    program: MpsProgram, commands: FakeMpsCommands, tmp_path: Path
) -> None:
    """Links are not followed, and a living daemon keeps its files."""
    settings = AgentSettings(state_dir=tmp_path, cdi_dir=tmp_path / "cdi", mps_host=str(tmp_path / "host.sock"))
    mps = Mps(commands, tmp_path / "mps")
    mps.start(GPU)
    here = mps.daemon(GPU).directory
    old, elsewhere = put_away_in(here), put_away_in(tmp_path / "mps" / "foreign")
    (tmp_path / "mps" / GPU.replace("8f", "9f")).symlink_to(elsewhere.parent)
    before = sorted(here.iterdir())
    real_devices(settings, FakeNvml(["T4"]), may_write=False)
    assert sorted(here.iterdir()) == before, "inspection removes nothing"
    for _ in range(30):  # on a busy machine the time limit may allow nothing
        if old.exists():
            real_devices(settings, FakeNvml(["T4"]))
    assert sorted(here.iterdir()) == [path for path in before if path != old]
    assert [path.name for path in mps.daemon(GPU).pipe.iterdir()] == ["control"]
    assert (elsewhere / "in" / "left").exists()


@pytest.fixture
def hosted(program: MpsProgram, tmp_path: Path) -> Iterator[HostedMps]:
    """The agent's side; the host runs in a thread."""
    with hosting(tmp_path / "host.sock", Mps(program, tmp_path / "mps")):
        yield HostedMps(program, tmp_path / "mps", tmp_path / "host.sock")


def test_host_starts_and_kills_daemons_and_the_agent_stops_them(hosted: HostedMps, tmp_path: Path) -> None:
    """AppArmor may deny the agent to kill."""
    assert stat.S_IMODE((tmp_path / "host.sock").stat().st_mode) == 0o600
    for _ in range(2):
        hosted.start(GPU)
    assert hosted.status(GPU).is_running
    hosted.stop(GPU)
    assert not hosted.status(GPU).is_running
    hosted.start(GPU)
    hosted.end(GPU)
    assert not hosted.is_running(GPU)


def test_errors_of_the_host_are_quoted(hosted: HostedMps, tmp_path: Path) -> None:
    with pytest.raises(MpsError, match="ended with 1: no such device"):
        hosted.start(GpuUuid(GPU.replace("8f", "9f")))
    with pytest.raises(MpsError, match="expected a GPU's UUID"):
        hosted.end(GpuUuid("../../etc"))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "host.sock"))
        client.sendall(b"../../etc; reboot\n")
        assert b"expected a GPU's UUID" in client.recv(4096)


def test_absent_host_is_named(program: MpsProgram, tmp_path: Path) -> None:
    with pytest.raises(MpsError, match=r"expected the MPS daemons' host at .*; check the pod carpool-mps"):
        HostedMps(program, tmp_path / "mps", tmp_path / "nowhere.sock").start(GPU)


def test_all_gpus_of_a_node_start_daemons_at_once(hosted: HostedMps, tmp_path: Path) -> None:
    """Regression: the host's queue had no room for the eighth request."""
    gpus = [GpuUuid(f"GPU-8f2c1b7e-0d3a-4c5b-9e6f-1a2b3c4d5e{number:02x}") for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(hosted.start, gpus))
    assert all(map(hosted.is_running, gpus))
    for gpu in gpus:
        hosted.end(gpu)
    assert not any(map(hosted.is_running, gpus))


DONE = b'{"error":""}\n'


class Slow(FakeMpsCommands):
    """Daemons that end when `may_end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ending, self.may_end = threading.Event(), threading.Event()
        self.ends = 0

    def kill(self, daemon: Daemon) -> None:
        self.ends += 1
        self.is_ending.set()
        assert self.may_end.wait(10)
        super().kill(daemon)


def ask(path: Path, what: str) -> socket.socket:
    asking = socket.socket(socket.AF_UNIX)
    asking.settimeout(10)
    asking.connect(str(path))
    asking.sendall(f"{what}\n".encode())
    return asking


def test_request_of_a_disconnected_client_is_dropped(tmp_path: Path) -> None:
    """Regression: requests of an agent that had timed out queued at the host, and ended a daemon with clients."""
    commands = Slow()
    with hosting(tmp_path / "host.sock", Mps(commands, tmp_path / "mps")):
        with ask(tmp_path / "host.sock", GPU) as starting:
            assert starting.recv(4096) == DONE
        with ask(tmp_path / "host.sock", f"end {GPU}") as first:
            assert commands.is_ending.wait(10)
            for what in (GPU, f"end {GPU}", GPU):
                ask(tmp_path / "host.sock", what).close()
            commands.may_end.set()
            assert first.recv(4096) == DONE
        with ask(tmp_path / "host.sock", f"tidy {GPU}") as last:
            assert last.recv(4096) == DONE
    assert (commands.starts, commands.ends, commands.daemons) == (1, 1, {})


def test_request_that_never_ends_blocks_no_others(tmp_path: Path) -> None:
    """Regression: each later request kept a thread."""
    commands, path = Slow(), tmp_path / "host.sock"
    with hosting(path, Mps(commands, tmp_path / "mps"), within_s=0.05), ask(path, f"end {GPU}") as first:
        assert commands.is_ending.wait(10)
        with ask(path, GPU) as second:
            assert b"an earlier request goes on" in second.recv(4096)
        commands.may_end.set()
        assert first.recv(4096) == DONE
        with ask(path, GPU) as third:
            assert third.recv(4096) == DONE


def test_clean_stop_kills_no_process(tmp_path: Path) -> None:
    """Regression: a late request killed the next daemon."""
    commands = Slow()
    agent = HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock")
    with hosting(tmp_path / "host.sock", Mps(commands, tmp_path / "mps")):
        agent.start(GPU)
        agent.stop(GPU)
        agent.start(GPU)
        with ask(tmp_path / "host.sock", f"tidy {GPU}") as stale:
            assert stale.recv(4096) == DONE
        assert agent.is_running(GPU)
        assert agent.daemon(GPU).shm.is_dir(), "files of a running daemon stay"
    assert (commands.starts, commands.ends) == (2, 0)


def hosted_gpu(commands: FakeMpsCommands, directory: Path) -> tuple[Node, NvmlDevices, GpuWorker]:
    """A GPU whose MPS daemon runs in the daemons' host."""
    node = Node(FakeNvml(["H100"]), commands, directory, mps_host=directory / "host.sock")
    devices = node.devices()
    return node, devices, GpuWorker(devices.uuids[0], devices, lambda: None, Intervals(), caller=Inline())


async def test_refused_cleanup_is_reported_and_retried(tmp_path: Path, reserve) -> None:
    """Regression: it counted as done, though an earlier request might still start a daemon."""
    commands, path = Slow(), tmp_path / "host.sock"
    worker = hosted_gpu(commands, tmp_path)[2]
    gpu = worker.uuid
    with hosting(path, Mps(commands, tmp_path / "mps", clean_within_s=LONG_S), within_s=0.05):
        worker.want([reserve("a", gpu, mode=SharingMode.MPS, memory_limit_mib=5000)])
        assert await worker.once()
        worker.want([reserve("b", gpu, mode=SharingMode.EXCLUSIVE)])
        with ask(path, f"end {gpu}") as earlier:
            assert commands.is_ending.wait(10)
            assert not await worker.once()
            (partition,) = worker.partitions.values()
            assert partition.state is PartitionState.FAILED
            assert "expected what the clients of its MPS daemon left to be removed" in partition.message
            assert "an earlier request goes on" in partition.message
            commands.may_end.set()
            assert earlier.recv(4096) == DONE
        assert await worker.once()
        (partition,) = worker.partitions.values()
        assert (partition.state, commands.daemons) == (PartitionState.READY, {})
        assert list((tmp_path / "mps" / gpu / "memory").iterdir()) == []


async def test_refused_kill_is_reported_and_retried(commands: FakeMpsCommands, tmp_path: Path, reserve) -> None:
    """No pod gets the GPU beside a server of a dead daemon."""
    node, devices, worker = hosted_gpu(commands, tmp_path)
    gpu = worker.uuid
    with hosting(tmp_path / "host.sock", Mps(commands, tmp_path / "mps", clean_within_s=LONG_S)):
        worker.want([reserve("a", gpu, mode=SharingMode.MPS, memory_limit_mib=5000)])
        assert await worker.once()
        server = commands.connect(pipe := str(tmp_path / "mps" / gpu / "pipe"), 42)
        node.start(0, server, "carpool-mps")
        devices.actual(gpu)
        commands.die(pipe)
        commands.refuse_kill = f"expected to end process {server} of MPS, found Operation not permitted"
        worker.want([reserve("b", gpu, mode=SharingMode.EXCLUSIVE)])
        assert not await worker.once()
        (partition,) = worker.partitions.values()
        assert partition.state is PartitionState.FAILED
        assert f"stop MPS failed: expected to end process {server}" in partition.message
        assert commands.has_server(server)
        commands.refuse_kill = ""
        assert await worker.once()
        (partition,) = worker.partitions.values()
        assert (partition.state, commands.has_server(server)) == (PartitionState.READY, False)


async def test_refused_cleanup_is_retried_without_reservations(tmp_path: Path, shared: SharedMemory) -> None:
    """Regression: without limits in the GPU's file no later reconciliation continued the stop."""
    commands, path = Slow(), tmp_path / "host.sock"
    commands.refuse_kill = "it may not be ended"
    _, devices, worker = hosted_gpu(commands, tmp_path)
    gpu = worker.uuid
    host = Mps(commands, tmp_path / "mps", shared, clean_within_s=LONG_S)
    with hosting(path, host, within_s=0.05):
        for step in (SetMode(SharingMode.MPS), StartMps()):  # the agent dies before it sets limits
            devices.apply(gpu, step)
        (shared.here / gpu / host.daemon(gpu).shm.name / "left").touch()
        with ask(path, f"end {gpu}") as earlier:
            assert commands.is_ending.wait(10)
            assert not await worker.once()
            assert not devices.actual(gpu).mps_daemon
            commands.may_end.set()
            assert b"it may not be ended" in earlier.recv(4096)
        assert len(list((shared.here / gpu).iterdir())) == 1
        assert await worker.once()
    assert list((shared.here / gpu).iterdir()) == []
    assert devices.actual(gpu).mode is None
