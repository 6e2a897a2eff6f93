"""The canary: a CUDA program that shows what a container got."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from agent_world import World, reservation
from carpool_core.values import SharingMode
from carpool_deviceplugin.canary import Answers, device_files, run_client
from carpool_deviceplugin.cdi import environment
from carpool_deviceplugin.check import Report, run_canary, store_canary
from carpool_deviceplugin.commands import node as command
from carpool_deviceplugin.gpu import Access, Mount
from carpool_deviceplugin.health import boot_id
from carpool_deviceplugin.preflight import Outcome, Verdict
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, running, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import Intervals
from carpool_e2e.binaries import cache_root
from click.testing import CliRunner
from debian import download
from documents import commands
from msgspec.structs import replace

HERE = Path(__file__).parent
GPU, OTHER = (f"GPU-{d * 8}-{d * 4}-{d * 4}-{d * 4}-{d * 12}" for d in "12")


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in for CUDA's driver."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("cuda")
    source, built = HERE / "cuda" / "libcuda.c", folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", built, source], check=True)
    return folder


def container(mode: SharingMode = SharingMode.MPS) -> dict[str, str]:
    """The environment that the agent gives a container with a memory limit."""
    reserved = reservation("a", GPU, mode=mode, memory_limit_mib=2048)
    return environment(reserved, {GPU: Access({}, (), mps_pipe=Mount("/node", "/run/carpool/mps"))})


@pytest.mark.parametrize(
    ("broken", "mode", "code", "expected"),
    [
        ("", SharingMode.MPS, 0, f"passed canary-gpus {GPU}; passed canary-mps a client inside MPS; "
         "passed canary-memory 1 MiB, and 2,049 MiB refused for lack of memory"),
        ("takes-more", SharingMode.TIME_SLICING, 0, f"passed canary-gpus {GPU}"),
        ("two-gpus", SharingMode.EXCLUSIVE, 1, f"FAILED canary-gpus {GPU}, {OTHER}; needed: {GPU}"),
        ("old-driver", SharingMode.MPS, 0, "unknown canary-mps CUDA does not say whether a client is inside MPS; "
         "needed: driver 545 or newer, whose CUDA does; what to do: update the driver; passed canary-memory"),
        ("outside", SharingMode.MPS, 1, "FAILED canary-mps one outside, to which no limit applies"),
        ("no-limit", SharingMode.MPS, 1, "FAILED canary-memory CUDA's results 0 and 0; needed: 1 MiB, and 2,049"),
        ("no-gpu", SharingMode.MPS, 1,
         "FAILED canary cuInit failed: CUDA_ERROR_NO_DEVICE (100); needed: a CUDA context"),
    ],
    ids=["mps", "time-slicing", "two-gpus", "old-driver", "outside-mps", "no-limit", "no-gpu"],
)  # fmt: skip
def test_a_container_says_what_it_got(libcuda: Path, broken: str, mode: SharingMode, code: int, expected: str) -> None:
    """Where no MPS keeps the limit, the canary does not take that much: it would be missing for co-tenants."""
    given = {**container(mode), "LD_LIBRARY_PATH": str(libcuda), "CANARY": broken}
    found = CliRunner(env=given).invoke(command, ["canary"])
    assert (found.exit_code, expected in "; ".join(" ".join(line.split()) for line in found.output.splitlines())) == (
        code,
        True,
    ), found.output


@pytest.mark.parametrize(("files", "code"), [(["nvidia0"], 0), (["nvidia0", "nvidia1"], 1)], ids=["its-own", "all"])
def test_more_device_files_than_gpus_fail_under_mps(libcuda: Path, monkeypatch, files: list[str], code: int) -> None:
    """Regression: the daemon's CUDA_VISIBLE_DEVICES hid them, so that a container with all GPUs passed."""
    monkeypatch.setattr("carpool_deviceplugin.commands.device_files", lambda: files)
    found = CliRunner(env={**container(), "LD_LIBRARY_PATH": str(libcuda)}).invoke(command, ["canary"])
    assert (found.exit_code, "device files nvidia0, nvidia1\n" in found.output) == (code, bool(code)), found.output


def test_the_device_files_are_those_of_gpus(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert device_files(tmp_path) == ["nvidia0", "nvidia12"]


def test_a_container_without_gpus_or_driver_is_one_sentence(tmp_path: Path) -> None:
    found = CliRunner().invoke(command, ["canary"])
    assert (found.exit_code, "expected a container with GPUs of Carpool, found none" in found.output) == (2, True)
    found = CliRunner(env={**container(), "LD_LIBRARY_PATH": str(tmp_path)}).invoke(command, ["canary"])
    assert (found.exit_code, "\nskipped  canary " in found.output) == (2, True), found.output


def test_the_check_runs_a_client_with_a_limit_in_a_daemon(tmp_path: Path) -> None:
    """The client gets the daemon's pipes and shared memory, and the daemon has ended afterwards."""
    node = Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path)
    devices = node.devices()
    (gpu,) = devices.uuids

    def client(given: Mapping[str, str], shm: str) -> Answers:
        assert given["CUDA_MPS_PIPE_DIRECTORY"] in node.mps.daemons
        assert given["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2048M"
        assert "CUDA_VISIBLE_DEVICES" not in given, "the daemon's own decides what a client sees"
        assert Path(shm).is_dir()
        return Answers(uuids=[gpu], inside_mps=True, beyond=2)

    rows = {row.name: row.verdict.value for row in run_canary(devices, gpu, client)}
    assert rows == dict.fromkeys(("canary-gpus", "canary-mps", "canary-memory"), "passed")
    assert node.mps.daemons == {}
    node.nvml.gpus[0].mig.is_enabled = node.nvml.gpus[0].mig.is_pending = True
    (row,) = run_canary(devices, gpu, client)
    assert (row.verdict.value, "the GPU has no mode MPS" in row.found) == ("skipped", True)


@pytest.mark.parametrize(("gpu", "code"), [(GPU, 0), (OTHER, 1)], ids=["its-gpu", "another-gpu"])
def test_the_check_has_the_rows_of_the_canary_if_it_is_allowed(
    tmp_path: Path, libcuda: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, code: int
) -> None:
    node = Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path)
    node.nvml.gpus[0].uuid = gpu
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libcuda))
    monkeypatch.setenv("CARPOOL_STATE_DIR", str(tmp_path / "agent"))
    (unshare := tmp_path / "unshare").write_text('#!/bin/sh\nshift 5 && exec "$@"\n')  # the real one needs root
    unshare.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    without, allowed, later = (
        CliRunner().invoke(command, ["check", *more], obj=node.devices())
        for more in (["--only", "contract"], ["--only", "contract", "--canary"], [])
    )
    assert ("canary" in without.output, without.exit_code) == (False, 0)
    rows = [line.split()[:2] for line in allowed.output.splitlines() if "canary" in line]
    verdicts = ["FAILED" if code else "passed", "passed", "passed"]
    assert rows == [[one, f"canary-{name}"] for one, name in zip(verdicts, ("gpus", "mps", "memory"), strict=True)]
    assert allowed.exit_code == code
    assert [line.split()[:2] for line in later.output.splitlines() if " canary-" in line] == rows, "of the last one"


async def test_the_condition_has_the_rows_of_the_last_canary(tmp_path: Path) -> None:
    """They count until a boot, or with another driver or GPU; a canary that did not run replaces none."""
    world = World(tmp_path, Intervals(preflight_s=1.0))
    devices, directory = world.node.devices(), world.agent.settings.state_dir
    report = Report(carpool="1", checked_at="2026-01-01T00:00:00Z", boot=boot_id(), driver=devices.driver)

    def keep(verdict: Verdict, **changes: str) -> None:
        row = Outcome(name="canary-mps", verdict=verdict, found="one outside", needed="a client inside MPS")
        store_canary(directory, replace(replace(report, gpu=devices.uuids[0]), **changes), [row])

    def message() -> str:
        return next((c.message for c in world.status.conditions if c.type == "Preflight"), "")

    async with running(world.agent):
        await until(lambda: re.search(r"skipped: .*\bcanary\b", message()))
        for changes in ({}, {"driver": "1.0"}, {}, {"boot": "another"}, {}, {"gpu": "GPU-1"}):
            keep(Verdict.FAILED, **changes)
            failed = "FAILED canary-mps: expected a client inside MPS, found one outside, at 2026-01-01T00:00:00Z."
            await until(lambda: (failed in message()) == (not changes))  # noqa: B023  # called in this iteration
        keep(Verdict.PASSED)
        keep(Verdict.SKIPPED)
        await until(lambda: re.search(r"passed: .*\bcanary-mps\b", message()))
        (directory / "canary.json").write_bytes(b'{"carpool": "\xff"}')
        await until(lambda: re.search(r"skipped: .*\bcanary\b", message()))


def test_a_state_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    node = Node(FakeNvml(["H100"]), FakeMpsCommands(), tmp_path)
    row = Outcome(name="canary-mps", verdict=Verdict.PASSED, found="a client inside MPS")
    monkeypatch.setattr("carpool_deviceplugin.commands.run_canary", lambda *_: [row])
    monkeypatch.setenv("CARPOOL_STATE_DIR", "/dev/null")
    found = CliRunner().invoke(command, ["check", "--only", "mps", "--canary"], obj=node.devices())
    sentence = "expected to write to '/dev/null', found Not a directory; the agent's GpuNode does not get the rows of"
    assert (found.exit_code, sentence in found.output, "passed   canary-mps" in found.output) == (0, True, True)


def test_a_client_that_hangs_or_dies_is_a_failed_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert run_client({}).error == "the client ended with 1: no output"
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert "No such file" in run_client({}).error
    (slow := tmp_path / "slow").write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(slow))
    monkeypatch.setattr("carpool_deviceplugin.canary._WITHIN_S", 0.2)
    assert run_client({}).error == "no answer within 0.2 s"


@pytest.mark.vendor
@pytest.mark.parametrize("mode", [SharingMode.MPS, SharingMode.TIME_SLICING])
def test_nvidias_driver_without_a_gpu_is_a_failed_row(mode: SharingMode) -> None:
    if not (folder := cache_root(os.environ) / "libcuda1").exists():
        download("libcuda1", folder)
    (library,) = {path.parent for path in folder.rglob("libcuda.so.1")}
    given = {**container(mode), "LD_LIBRARY_PATH": str(library)}
    control = Path("/dev/nvidiactl")
    had_driver = control.exists()
    found = CliRunner(env=given).invoke(command, ["canary"])
    if not had_driver:
        control.unlink(missing_ok=True)  # the library creates it as root
    assert found.exit_code == 1, found.output
    assert "FAILED   canary            cuInit failed: CUDA_ERROR" in found.output


CANARIES = dict.fromkeys(one for _, one in commands() if re.match("carpool node check .*--canary$", one))


@pytest.mark.vendor
@pytest.mark.parametrize("documented", CANARIES)
def test_a_documented_canary_runs_in_nvidias_daemon(libcuda: Path, documented: str) -> None:
    """MPS is NVIDIA's own. NVML and CUDA are stand-ins, which see different GPUs; the node's own rows are its own."""
    if not (daemon := cache_root(os.environ) / "nvidia-cuda-mps").exists():
        download("nvidia-cuda-mps", daemon)
    nvml = HERE / "nvml" / "libnvidia-ml.c"
    with tempfile.TemporaryDirectory() as folder:  # a short path: the daemon's sockets are in it
        subprocess.run(["cc", "-shared", "-fPIC", "-o", f"{folder}/libnvidia-ml.so.1", nvml], check=True)
        paths = dict.fromkeys(("HOME", "CARPOOL_STATE_DIR", "CARPOOL_CDI_DIR"), folder)
        programs = [str(Path(sys.executable).parent), str(daemon / "usr" / "bin"), os.environ["PATH"]]
        given = {**os.environ, **paths, "LD_LIBRARY_PATH": f"{folder}:{libcuda}", "STAND_IN_IDLE": "1"}
        given["PATH"] = os.pathsep.join(programs)
        done = subprocess.run(["bash", "-c", documented], env=given, capture_output=True, text=True, check=False)
    rows = {row[1]: row[0] for row in map(str.split, done.stdout.splitlines()) if len(row) > 1}
    passed = dict.fromkeys(("mps", "canary-mps", "canary-memory"), "passed")
    assert {name: rows.get(name) for name in (*passed, "canary-gpus")} == passed | {"canary-gpus": "FAILED"}, done
    assert done.returncode == 1
