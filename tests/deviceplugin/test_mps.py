"""The MPS daemons, over daemons in memory."""

import stat
from pathlib import Path

import pytest
from carpool_core.values import GpuUuid
from carpool_deviceplugin.mps.daemons import Mps, MpsStatus
from carpool_deviceplugin.mps.port import MpsError
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from mps_world import GPU


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
