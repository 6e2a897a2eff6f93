"""One battery over NVIDIA's MPS control daemon and its fake."""

import gzip
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from carpool_core.values import GpuUuid
from carpool_deviceplugin.mps import PROGRAM, Daemon, Mps, MpsCommands, MpsError, MpsProgram, MpsStatus, program_version
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_e2e.binaries import cache_root
from debian import download
from mps_world import GPU

OTHER = GpuUuid("GPU-8f2c1b7e-0d3a-4c5b-9e6f-1a2b3c4d5e70")
ANSWERS = {
    "get_server_list": "",
    "get_client_list 99": "Server 99 not found\n",
    "get_server_status 99": "Server 99 not found\n",
    "get_server_status": "A server PID is required\n",
    "bogus": 'Unknown command "bogus"\n',
}
"""Answers of a daemon that has had no client."""


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.vendor)])
def commands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MpsCommands:
    if request.param == "fake":
        return FakeMpsCommands()
    if not (folder := cache_root(os.environ) / "nvidia-cuda-mps").exists():
        download("nvidia-cuda-mps", folder)
    monkeypatch.setenv("PATH", f"{folder / 'usr' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert shutil.which(PROGRAM)
    return MpsProgram()


@pytest.fixture
def mps(commands: MpsCommands) -> Iterator[Mps]:
    with tempfile.TemporaryDirectory() as directory:  # a short path: the daemon's sockets are in it
        yield (mps := Mps(commands, Path(directory)))
        mps.end(GPU)


@pytest.mark.vendor
@pytest.mark.parametrize("commands", ["real"], indirect=True)
def test_one_daemon_takes_limits_of_several_gpus_and_keeps_no_other_away(mps: Mps, commands: MpsCommands) -> None:
    """Decision 59: one daemon could serve several GPUs, but nothing keeps the daemons of one GPU apart."""
    assert isinstance(commands, MpsProgram)
    several = Daemon(GpuUuid(f"{GPU},{OTHER}"), mps.daemon(OTHER).directory)

    def limits() -> list[str]:
        return [commands.ask(several, f"get_default_device_pinned_mem_limit {n}").strip() for n in (0, 1)]

    mps.start(GPU)
    for directory in (several.pipe, several.log):
        directory.mkdir(parents=True)
    commands.start(several, several.directory)
    try:
        assert commands.is_alive(mps.daemon(GPU))
        for number in (0, 1):
            commands.ask(several, f"set_default_device_pinned_mem_limit {number} {number + 1}G")
        assert limits() == ["1G", "2G"]
        assert commands.ask(several, f"set_default_device_pinned_mem_limit {OTHER} 3G") == ""
        assert limits() == ["", "2G"], "ordinal 0 lost its limit"
    finally:
        commands.kill(several)


@pytest.mark.vendor
@pytest.mark.parametrize("commands", ["real"], indirect=True)
def test_a_path_that_is_too_long_for_sockets_is_named(commands: MpsCommands) -> None:
    """Regression: a daemon in a test's long directory ended with 1 and no output."""
    with tempfile.TemporaryDirectory() as short:
        around = len(f"{short}//{GPU}/pipe")
        fits, too_long = (Mps(commands, Path(short) / ("x" * (length - around))) for length in (87, 88))
        fits.start(GPU)
        fits.end(GPU)
        with pytest.raises(MpsError, match=r"ended with 1: expected at most 87 bytes .*, found 88; choose"):
            too_long.start(GPU)


@pytest.mark.vendor
@pytest.mark.parametrize("commands", ["real"], indirect=True)
def test_the_programs_version_is_that_of_its_package(commands: MpsCommands) -> None:
    """No command or option of it prints one."""
    assert isinstance(commands, MpsProgram)
    folder = cache_root(os.environ) / "nvidia-cuda-mps" / "usr/share/doc/nvidia-cuda-mps"
    with gzip.open(folder / "changelog.Debian.gz", "rt") as changelog:
        assert f" ({program_version()}-" in changelog.readline()


def test_a_control_daemon_answers_as_the_agent_expects(mps: Mps, commands: MpsCommands) -> None:
    daemon = mps.daemon(GPU)
    mps.start(GPU)
    assert mps.is_running(GPU)
    assert {command: commands.ask(daemon, command) for command in ANSWERS} == ANSWERS
    assert mps.status(GPU) == MpsStatus(True, frozenset())
    mps.start(GPU)  # adopts the running one
    mps.stop(GPU)
    assert not mps.is_running(GPU)
    with pytest.raises(MpsError):
        commands.ask(daemon, "get_server_list")
    mps.start(GPU)
    commands.kill(daemon)
    assert mps.status(GPU) == MpsStatus(False, frozenset())
