"""What the clients of one MPS daemon leave: gone before the next one, in memory and where they met it."""

import secrets
import stat
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from carpool_deviceplugin.app import real_devices
from carpool_deviceplugin.mps.daemons import Mps, SharedMemory
from carpool_deviceplugin.mps.host import HostedMps
from carpool_deviceplugin.mps.program import MpsProgram
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from mps_world import GPU, LONG_S, hosting, make_deep


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
