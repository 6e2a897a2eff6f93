"""NVIDIA's program, as a program: run, read, and believed only where no client could have said it."""

import os
import secrets
import signal
import socket
import stat
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from carpool_core.values import GpuUuid, PartitionState, SharingMode
from carpool_deviceplugin.app import real_devices
from carpool_deviceplugin.device_state import GpuWorker
from carpool_deviceplugin.gpu import SetMode, StartMps
from carpool_deviceplugin.mps import (
    PID_FILE,
    PROGRAM,
    RECORD,
    HostedMps,
    Mps,
    MpsError,
    MpsProgram,
    MpsStatus,
    SharedMemory,
    UntidiedError,
)
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Inline, Node
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import Intervals
from mps_world import GPU, LONG_S, hosting, lives, make_deep, pid_of, server_of


def test_the_program_is_run(program: MpsProgram, tmp_path: Path) -> None:
    mps = Mps(program, tmp_path / "mps")
    assert not mps.status(GPU).is_running
    mps.start(GPU)
    assert mps.status(GPU) == MpsStatus(True), "whatever it says that its server is, there is none"
    mps.stop(GPU)
    assert not mps.status(GPU).is_running


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


def test_program_that_is_absent_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"{PROGRAM} on PATH" in MpsProgram.missing()
    with pytest.raises(MpsError, match=f"expected {PROGRAM} on PATH, found none"):
        Mps(MpsProgram(), tmp_path / "mps").start(GPU)


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


def test_a_daemon_that_holds_what_it_printed_to_may_print_more(program: MpsProgram, tmp_path: Path) -> None:
    """Regression: it was waited for, and when that was mended it ended by the first word after its start."""
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


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("hangs", "to start within"),
        ("refuses", "ended with 1"),
        ("silent", "expected the MPS daemon's process ID"),
        ("stays", "expected to write"),
    ],
)
def test_a_start_that_fails_leaves_no_daemon(program: MpsProgram, tmp_path: Path, how: str, says: str) -> None:
    """Regression: it went on, known to nobody, and the next one was started beside it."""
    mps = Mps(MpsProgram(private_shm=False, within_s=4), tmp_path / "mps")
    (there := mps.directory(GPU)).mkdir(parents=True)
    (there / "how").write_text(how)
    if how == "stays":
        (there / RECORD / "in").mkdir(parents=True)  # nothing can be written in its place
    with pytest.raises(MpsError, match=says):
        mps.start(GPU)
    assert not lives(int((there / "began").read_text()))


def test_a_start_that_was_cut_short_leaves_no_daemon(program: MpsProgram, tmp_path: Path) -> None:
    """Whoever started it was killed before it was written down; another GPU's is none of its business."""
    mps, other = Mps(program, tmp_path / "mps"), GpuUuid(GPU.replace("5e6f", "5e70"))
    for gpu in (GPU, other):
        mps.directory(gpu).mkdir(parents=True)
        (mps.directory(gpu) / "how").write_text("outlives its pipe")
        mps.start(gpu)
        (mps.directory(gpu) / RECORD).unlink()
    first, others = (int((mps.directory(gpu) / "began").read_text()) for gpu in (GPU, other))
    assert not mps.is_running(GPU)
    (mps.directory(GPU) / "how").write_text("")
    mps.start(GPU)
    assert (lives(first), lives(others), mps.is_running(GPU)) == (False, True, True)
    mps.stop(GPU)
    os.kill(others, signal.SIGKILL)


def test_a_link_in_place_of_the_control_pipe_is_not_followed(program: MpsProgram, tmp_path: Path) -> None:
    mps = Mps(program, tmp_path / "mps")
    mps.start(GPU)
    control = tmp_path / "mps" / GPU / "pipe" / "control"
    (tmp_path / "away").hardlink_to(control)
    (tmp_path / "link").symlink_to(tmp_path / "away")
    (tmp_path / "link").replace(control)  # at once: the daemon ends where it finds nothing
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
    make_deep(shm)
    (tmp_path / GPU / "log" / "server.log").write_text("a lot")
    mps.stop(GPU)
    assert [*(tmp_path / GPU / "memory").iterdir(), *(tmp_path / GPU / "log").iterdir()] == []
    assert kept.read_text() == "of somebody else"


def test_what_clients_left_takes_no_memory_to_remove(mps: Mps) -> None:
    """Regression: all was listed first, and a client could leave as much as it took to end the daemons of all."""
    mps.start(GPU)
    shm = mps.shm(GPU)
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
    """A file system that the daemons' host sees elsewhere than the node."""
    (tmp_path / "here").mkdir()
    return SharedMemory(tmp_path / "here", Path("/var/lib/kubelet/pods/uid/volumes/kubernetes.io~empty-dir/shm"))


def test_daemon_and_clients_share_memory_where_its_host_has_some(
    commands: FakeMpsCommands, tmp_path: Path, shared: SharedMemory
) -> None:
    """Regression: it was the node's disk, without a limit."""
    host = Mps(commands, tmp_path / "mps", shared, tidy_within_s=LONG_S)
    agent = Mps(commands, tmp_path / "mps")
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
    mps = Mps(commands, tmp_path / "mps", shared if has_memory else None, tidy_within_s=LONG_S)
    mps.start(GPU)
    assert (place.is_symlink(), mps.is_running(GPU)) == (True, True)
    assert not list(place.parent.glob(".old.*"))


def test_what_cannot_be_removed_is_not_in_the_next_daemons_memory(
    commands: FakeMpsCommands, mps: Mps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: what clients had closed in a directory of another user was brought into the next namespace's pods."""
    mps.start(GPU)
    first = mps.shm(GPU)
    (first / "segment").touch()
    with monkeypatch.context() as nothing_is_removed:
        nothing_is_removed.setenv("PATH", "")
        mps.stop(GPU)
        mps.start(GPU)
    assert [path.name for path in first.iterdir()] == ["segment"]
    assert mps.shm(GPU) != first
    assert list(commands.daemons[str(mps.pipe(GPU))].shm.iterdir()) == []
    mps.stop(GPU)
    assert not first.exists(), "but later"


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
    assert not list(pipe.parent.glob(".old.*"))


def test_a_stopped_daemons_host_is_told_so(program: MpsProgram, tmp_path: Path, shared: SharedMemory) -> None:
    """The agent sees nothing of the memory."""
    agent = HostedMps(program, tmp_path / "mps", tmp_path / "host.sock", within_s=LONG_S)
    with hosting(tmp_path / "host.sock", Mps(program, tmp_path / "mps", shared, tidy_within_s=LONG_S)):
        agent.start(GPU)
        (shared.here / GPU / agent.shm(GPU).name / "segment").touch()
        agent.stop(GPU)
        assert list((shared.here / GPU).iterdir()) == []
        agent.start(GPU)
    agent.stop(GPU)  # a host that is gone has taken the memory with it
    assert not agent.is_running(GPU)


def test_what_takes_long_to_remove_keeps_nobody_waiting(program: MpsProgram, tmp_path: Path) -> None:
    """Regression: a client could leave so much that no later daemon was started in time, nor an earlier one ended."""
    (finder := tmp_path / "bin" / "find").write_text("#!/bin/sh\nexec sleep 60\n")
    finder.chmod(0o755)
    mps = Mps(program, tmp_path / "mps")
    for _ in range(2):
        mps.start(GPU)
        (mps.shm(GPU) / "left").touch()
        (mps.directory(GPU) / "log" / "left").touch()
        began = time.monotonic()
        mps.stop(GPU)
        assert time.monotonic() - began < 6, "an answer is waited for for 8 s"
    assert not mps.is_running(GPU)


def put_away_in(directory: Path) -> Path:
    """What an earlier stop could not remove."""
    (old := directory / f".old.{secrets.token_hex(8)}").mkdir(parents=True)
    (old / "in").mkdir()
    (old / "in" / "left").touch()
    (old / "link").symlink_to(directory)
    return old


def test_what_could_not_be_removed_is_removed_after_a_later_stop(mps: Mps) -> None:
    """Regression: it stayed for the node's administrator."""
    mps.start(GPU)
    first, second = (put_away_in(mps.directory(GPU)) for _ in range(2))
    mps.stop(GPU)
    assert (first.exists(), second.exists()) == (False, False)


def test_an_agent_that_starts_removes_what_could_not_be(
    program: MpsProgram, commands: FakeMpsCommands, tmp_path: Path
) -> None:
    """Links are not followed, and nothing else is touched: of a living daemon neither."""
    settings = AgentSettings(state_dir=tmp_path, cdi_dir=tmp_path / "cdi", mps_host=str(tmp_path / "host.sock"))
    mps = Mps(commands, tmp_path / "mps")
    mps.start(GPU)
    here = mps.directory(GPU)
    old, elsewhere = put_away_in(here), put_away_in(tmp_path / "mps" / "of-somebody-else")
    (here / f".old.{'0' * 16}").symlink_to(mps.pipe(GPU))
    (here / ".old.kept").mkdir()
    (tmp_path / "mps" / GPU.replace("8f", "9f")).symlink_to(elsewhere.parent)
    before = sorted(here.iterdir())
    real_devices(settings, FakeNvml(["T4"]), may_write=False)
    assert sorted(here.iterdir()) == before, "who only looks removes nothing"
    for _ in range(30):  # as much of it as a moment allows, which on a busy machine may be nothing
        if old.exists():
            real_devices(settings, FakeNvml(["T4"]))
    assert sorted(here.iterdir()) == [path for path in before if path != old]
    assert [path.name for path in mps.pipe(GPU).iterdir()] == ["control"]
    assert (elsewhere / "in" / "left").exists()


def test_an_agent_that_starts_does_not_wait_for_it(program: MpsProgram, tmp_path: Path) -> None:
    (finder := tmp_path / "bin" / "find").write_text("#!/bin/sh\nexec sleep 60\n")
    finder.chmod(0o755)
    mps = Mps(program, tmp_path / "mps")
    for _ in range(300):
        put_away_in(mps.directory(GPU))
    began = time.monotonic()
    mps.sweep()
    assert time.monotonic() - began < 5


@pytest.fixture
def hosted(program: MpsProgram, tmp_path: Path) -> Iterator[HostedMps]:
    """The agent's side; the other one runs in a thread."""
    with hosting(tmp_path / "host.sock", Mps(program, tmp_path / "mps")):
        yield HostedMps(program, tmp_path / "mps", tmp_path / "host.sock")


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


DONE = b'{"error":"","is_understood":true}\n'


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


def test_a_request_that_never_ends_holds_no_others(tmp_path: Path) -> None:
    """Regression: each of them kept a thread for ever."""
    commands, path = Slow(), tmp_path / "host.sock"
    with hosting(path, Mps(commands, tmp_path / "mps"), within_s=0.05), ask(path, f"end {GPU}") as first:
        assert commands.is_ending.wait(10)
        with ask(path, GPU) as second:
            assert b"an earlier request goes on" in second.recv(4096)
        commands.may_end.set()
        assert first.recv(4096) == DONE
        with ask(path, GPU) as third:
            assert third.recv(4096) == DONE


def test_a_clean_stop_ends_nobody(tmp_path: Path) -> None:
    """Regression: it had the host kill whatever was there by then."""
    commands = Slow()
    agent = HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock")
    with hosting(tmp_path / "host.sock", Mps(commands, tmp_path / "mps")):
        agent.start(GPU)
        agent.stop(GPU)
        agent.start(GPU)
        with ask(tmp_path / "host.sock", f"tidy {GPU}") as stale:
            assert stale.recv(4096) == DONE
        assert agent.is_running(GPU)
        assert agent.shm(GPU).is_dir(), "nothing is removed under a daemon"
    assert (commands.starts, commands.ends) == (2, 0)


def test_a_host_that_does_not_answer_is_said_after_a_stop(commands: FakeMpsCommands, tmp_path: Path) -> None:
    """Regression: it was taken for done."""
    Mps(commands, tmp_path / "mps").start(GPU)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "host.sock"))
        silent.listen()
        agent = HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock", within_s=0.05)
        with pytest.raises(UntidiedError, match=r"found the daemon stopped, and of its host: .*timed out"):
            agent.stop(GPU)
    assert not agent.is_running(GPU)


async def test_a_stop_that_its_host_refuses_is_reported_and_tried_again(tmp_path: Path, reserve) -> None:
    """Regression: it was taken for done, though an earlier request might still start a daemon."""
    commands, path = Slow(), tmp_path / "host.sock"
    node = Node(FakeNvml(["H100"]), commands, tmp_path, mps_host=path)
    devices = node.devices()
    gpu = devices.uuids[0]
    worker = GpuWorker(gpu, devices, lambda: None, Intervals(), caller=Inline())
    with hosting(path, Mps(commands, tmp_path / "mps", tidy_within_s=LONG_S), within_s=0.05):
        worker.want([reserve("a", gpu, mode=SharingMode.MPS, memory_limit_mib=5000)])
        assert await worker.once()
        worker.want([reserve("b", gpu, mode=SharingMode.EXCLUSIVE)])
        with ask(path, f"end {gpu}") as earlier:
            assert commands.is_ending.wait(10)
            assert not await worker.once()
            (outcome,) = worker.outcomes.values()
            assert outcome.state is PartitionState.FAILED
            assert "expected what the clients of its MPS daemon left to be removed" in outcome.message
            assert "an earlier request goes on" in outcome.message
            commands.may_end.set()
            assert earlier.recv(4096) == DONE
        assert await worker.once()
        (outcome,) = worker.outcomes.values()
        assert (outcome.state, commands.daemons) == (PartitionState.READY, {})
        assert list((tmp_path / "mps" / gpu / "memory").iterdir()) == []


async def test_what_its_host_may_not_end_is_reported_and_tried_again(
    commands: FakeMpsCommands, tmp_path: Path, reserve
) -> None:
    """Nobody is let onto the GPU beside a server of a daemon that has died."""
    node = Node(FakeNvml(["H100"]), commands, tmp_path, mps_host=tmp_path / "host.sock")
    devices = node.devices()
    gpu = devices.uuids[0]
    worker = GpuWorker(gpu, devices, lambda: None, Intervals(), caller=Inline())
    with hosting(tmp_path / "host.sock", Mps(commands, tmp_path / "mps", tidy_within_s=LONG_S)):
        worker.want([reserve("a", gpu, mode=SharingMode.MPS, memory_limit_mib=5000)])
        assert await worker.once()
        server = commands.connect(pipe := str(tmp_path / "mps" / gpu / "pipe"), 42)
        node.start(0, server, "carpool-mps")
        devices.actual(gpu)
        commands.die(pipe)
        commands.refuse_kill = f"expected to end process {server} of MPS, found Operation not permitted"
        worker.want([reserve("b", gpu, mode=SharingMode.EXCLUSIVE)])
        assert not await worker.once()
        (outcome,) = worker.outcomes.values()
        assert outcome.state is PartitionState.FAILED
        assert f"stop MPS failed: expected to end process {server}" in outcome.message
        assert commands.started(server) == server
        commands.refuse_kill = ""
        assert await worker.once()
        (outcome,) = worker.outcomes.values()
        assert (outcome.state, commands.started(server)) == (PartitionState.READY, None)


async def test_what_clients_left_is_removed_where_nothing_tells_of_them_any_more(tmp_path: Path) -> None:
    """Regression: without limits in the GPU's file no later look went on with a stop whose host had refused."""
    commands, path = Slow(), tmp_path / "host.sock"
    commands.refuse_kill = "it may not be ended"  # so the earlier request does not come to removing anything
    shared = SharedMemory(tmp_path / "here", Path("/var/lib/kubelet/pods/uid/volumes/kubernetes.io~empty-dir/shm"))
    node = Node(FakeNvml(["H100"]), commands, tmp_path, mps_host=path)
    devices = node.devices()
    gpu = devices.uuids[0]
    worker = GpuWorker(gpu, devices, lambda: None, Intervals(), caller=Inline())
    host = Mps(commands, tmp_path / "mps", shared, tidy_within_s=LONG_S)
    with hosting(path, host, within_s=0.05):
        for step in (SetMode(SharingMode.MPS), StartMps()):  # and the agent dies before it sets limits
            devices.apply(gpu, step)
        (shared.here / gpu / host.shm(gpu).name / "left").touch()
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


def test_a_host_that_is_away_after_a_stop_is_said(commands: FakeMpsCommands, tmp_path: Path) -> None:
    """Its daemons have ended with it, and the next one begins with memory of its own: only the log needs to tell."""
    Mps(commands, tmp_path / "mps").start(GPU)
    with structlog.testing.capture_logs() as said:
        HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock").stop(GPU)
    assert commands.daemons == {}
    assert [(line["event"], line["gpu"]) for line in said] == [
        ("files of mps clients stay until the next daemon starts", GPU)
    ]


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
        with structlog.testing.capture_logs() as said:
            HostedMps(commands, tmp_path / "mps", tmp_path / "host.sock").stop(GPU)
        thread.join()
    assert commands.daemons == {}
    assert [line["reason"] for line in said] == ["expected a GPU's UUID"]
