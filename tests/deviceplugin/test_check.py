"""`carpool node check`: the NVML contract, and the command."""

import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pynvml
import pytest
from carpool_deviceplugin.check import (
    CONTRACT,
    FailedError,
    Report,
    check_contract,
    check_identity,
    check_processes,
    check_utilization,
)
from carpool_deviceplugin.commands import node as command
from carpool_deviceplugin.nvlib import Session
from carpool_deviceplugin.preflight import Host
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, uid
from carpool_deviceplugin.testing.nvml import FakeNvml
from click.testing import CliRunner, Result
from node_world import verdicts


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The /proc of a node on which nothing fails."""
    (proc := tmp_path / "host" / "2").mkdir(parents=True)
    (proc / "comm").write_text("kthreadd\n")
    monkeypatch.setattr(Host, "find", lambda: Host(None, proc.parent))
    for name in ("STATE", "CDI", "DEVICE_PLUGIN"):
        monkeypatch.setenv(f"CARPOOL_{name}_DIR", str(tmp_path))
    return proc.parent


def make_node(directory: Path, kind: str = "H100") -> Node:
    return Node(FakeNvml([kind]), FakeMpsCommands(), directory)


def run(node: Node, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["check", *arguments], obj=node.devices())


def test_check_reports_node_and_gpu_and_leaves_the_gpu_as_it_was(tmp_path: Path) -> None:
    node, out = make_node(tmp_path), tmp_path / "h100.json"
    found = run(node, "--out", str(out))
    assert found.exit_code == 0, found.output
    first, header, *_ = found.output.splitlines()
    assert first.startswith("NVIDIA H100 80GB HBM3, driver 580.95.05  GPU-")
    assert header.split() == ["STATE", "CHECK", "FOUND"]
    rows = verdicts(found.output)
    assert (rows["cdi"], rows["mps-program"]) == ("missing", "passed")
    assert [rows[name] for name in ("sm-activity", "contract", "mps", "mig")] == ["passed"] * 3 + ["skipped"]
    assert "\n                           what to do: write it: nvidia-ctk cdi generate" in found.output
    assert node.mps.daemons == {}
    written = msgspec.json.decode(out.read_bytes(), type=Report)
    assert [o.name for o in written.outcomes][-3:] == ["contract", "mps", "mig"]
    assert (written.product, written.driver) == ("NVIDIA H100 80GB HBM3", "580.95.05")


@pytest.mark.parametrize("kind", ["A100-80", "A30", "H200"])
def test_mig_instances_are_created_and_destroyed_where_allowed(tmp_path: Path, kind: str) -> None:
    node = make_node(tmp_path, kind)
    mig = node.nvml.gpus[0].mig
    mig.is_enabled = mig.is_pending = True
    assert "passed   mig" in run(node, "--only", "mig", "--mig").output
    assert mig.instances == {}
    profile = mig.table.profiles[0]
    mig.create(profile.id, 0, profile.memory_slices)
    assert "already has MIG instances" in run(node, "--only", "mig", "--mig").output
    assert len(mig.instances) == 1


def test_a_failed_check_exits_with_1(tmp_path: Path, host: Path) -> None:
    node = make_node(tmp_path)
    node.nvml.gpus[0].temperature_c = 200
    found = run(node, "--only", "contract")
    assert (found.exit_code, "FAILED   contract" in found.output) == (1, True)
    assert "what to do: update the driver" in found.output
    (host / "2/comm").write_text("sleep\n")
    node.start(0, 42, "x")
    found = run(node)
    assert (found.exit_code, verdicts(found.output)["host-pids"]) == (1, "FAILED"), "though the GPU was not checked"


@pytest.mark.parametrize(
    ("simulated", "arguments", "expected"),
    [
        ("T4:2", ["--gpu", "1"], ""),
        (
            "T4:2",
            ["--gpu", "2"],
            "expected the index of a GPU that can be read (0, 1), its UUID, or that of a MIG device on it, found",
        ),
        ("T4:2", ["--canary"], "--canary: expected a real GPU, found simulated ones; leave it out"),
        ("T4:2", ["--only", "mig", "--mig"], "--only, --mig: expected a real GPU, found simulated ones; leave it out"),
        ("T4:two", [], "found 'T4:two'; write it as in"),
        ("Banana", [], "CARPOOL_SIMULATED_GPUS: GPU product 'Banana' is unknown; known products: "),
    ],
)
def test_simulated_gpus_use_or_refuse_each_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: str, arguments: list[str], expected: str
) -> None:
    """Regression: options were ignored, and an unknown product was a traceback."""
    monkeypatch.setenv("CARPOOL_SIMULATED_GPUS", simulated)
    found = CliRunner().invoke(command, ["check", "--out", str(tmp_path / "found.json"), *arguments])
    assert (found.exit_code, expected in found.output) == (2 if expected else 0, True), found.output
    if not expected:
        written = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=Report)
        assert found.output.startswith(f"Simulated Tesla T4  {written.gpu}\nSTATE ")
        assert {outcome.name: outcome.verdict for outcome in written.outcomes} == verdicts(found.output)
        assert verdicts(found.output)["gpus"] == "passed"


@pytest.mark.parametrize(
    ("arguments", "pod", "expected"),
    [
        ([], "x", f"expected a healthy and idle GPU, found pods ['{uid('x')}']; drain it first"),
        ([], None, "expected a healthy and idle GPU, found process 42"),
        (
            ["--gpu", "3"],
            "",
            "expected the index of a GPU that can be read (0), its UUID, or that of a MIG device on it, found '3'",
        ),
        (["--only", "x"], "", "'x' is not one of 'contract', 'mps', 'mig'"),
        (["--out", "/nowhere/x.json"], "", "found No such file or directory; name a file in an existing directory"),
        (["--out", "/dev/full"], "", "--out: expected to write to '/dev/full', found No space left on device; free"),
    ],
)
def test_unusable_input_is_one_sentence(tmp_path: Path, arguments: list[str], pod: str | None, expected: str) -> None:
    node = make_node(tmp_path)
    if pod != "":
        node.start(0, 42, pod)
    found = run(node, *arguments)
    assert (found.exit_code, expected in found.output) == (2, True), found.output


@pytest.mark.parametrize("pod", ["x", None], ids=["pod", "foreign process"])
def test_a_busy_gpu_does_not_hide_the_rows_of_the_node(tmp_path: Path, pod: str | None) -> None:
    """Regression: a node whose GPUs were in use had no table, nor a report."""
    node, out = make_node(tmp_path), tmp_path / "report.json"
    node.start(0, 42, pod)
    found = run(node, "--out", str(out), "--canary")
    names = {outcome.name for outcome in msgspec.json.decode(out.read_bytes(), type=Report).outcomes}
    assert (found.exit_code, {"driver", "compute-mode", "processes"} <= names) == (2, True), found.output
    assert not names & {"contract", "mps", "canary"}
    assert all(name in found.output for name in names)


def test_a_lost_gpu_leaves_a_gap_in_the_indices(tmp_path: Path) -> None:
    """Regression: `--gpu 1` was the second GPU that can be read, and the contract failed with all fields of a GPU."""
    node = Node(FakeNvml(["H100", "H100", "T4"]), FakeMpsCommands(), tmp_path)
    node.nvml.gpus[1].is_lost = True
    found = run(node, "--gpu", "2", "--only", "contract")
    assert (found.exit_code, found.output.startswith("Tesla T4, driver")) == (0, True), found.output
    assert "warning" not in found.output, "the table has a row for it"
    found = run(node, "--gpu", "1")
    expected = (
        "that can be read (0, 2), its UUID, or that of a MIG device on it, found '1'; GPU #1: nvmlDeviceGetHandleBy"
    )
    assert (found.exit_code, expected in found.output) == (2, True), found.output
    node.nvml.gpus[2].index = 0
    broken, *_ = check_identity(node.devices().session)
    assert broken == "expected GPUs in the order of their indices, each index once, found 0, 0"


def test_without_a_driver_the_name_of_the_gpu_is_still_read() -> None:
    """Regression: any name was accepted."""
    for gpu, found in (("foo", "--gpu: expected the index or UUID of a GPU, found 'foo'"), ("1", "FAILED   driver")):
        result = CliRunner().invoke(command, ["check", "--gpu", gpu])
        assert found in result.output, result.output
        assert (verdicts(result.output).get("driver") == "FAILED") == (gpu == "1")


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["--only", "mig", "--mig"], {"driver": "FAILED", "mig": "skipped"}),
        (["--only", "contract", "--canary"], {"driver": "FAILED", "contract": "skipped", "canary": "skipped"}),
    ],
)
def test_without_a_driver_each_requested_check_has_a_row(arguments: list[str], rows: dict[str, str]) -> None:
    """Regression: the rows of the node followed, and none of the check that was asked for."""
    found = CliRunner().invoke(command, ["check", *arguments])
    assert (found.exit_code, verdicts(found.output)) == (1, rows), found.output
    found = CliRunner().invoke(command, ["check", *arguments[2:]])
    assert {"mps-program", arguments[2].strip("-")} <= verdicts(found.output).keys(), found.output


def test_exit_code_2_if_every_check_was_skipped(tmp_path: Path) -> None:
    found = run(make_node(tmp_path), "--only", "mig")
    assert (found.exit_code, found.output.splitlines()[-1]) == (2, "1 skipped")
    found = run(make_node(tmp_path, "T4"), "--only", "mig", "--only", "contract", "--mig")
    assert (found.exit_code, found.output.splitlines()[-1]) == (0, "1 passed, 1 skipped")
    assert "MIG is off" in found.output


def test_no_temporary_directory_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    found = run(make_node(tmp_path))
    assert (found.exit_code, "set TMPDIR to a writable one" in found.output) == (2, True), found.output


def test_the_contract_finds_a_driver_that_breaks_it(tmp_path: Path) -> None:
    node = make_node(tmp_path)
    gpu = node.nvml.gpus[0]
    gpu.temperature_c = 200
    gpu.hardware = replace(gpu.hardware, reserved_mib=60_000, power_limit_w=0)
    session = node.devices().session
    broken = {rule.__name__: list(rule(session)) for rule in CONTRACT}
    assert {name for name, found in broken.items() if found} == {"check_identity", "check_telemetry"}
    assert (
        "GPU 0: expected less than a quarter of the memory reserved, found 60,000 of 81,559 MiB"
        in broken["check_identity"]
    )
    assert "GPU 0: expected a power limit from 5 to 5,000 W, found 0.0 W" in broken["check_identity"]
    assert broken["check_telemetry"][-1] == "GPU 0: expected a temperature from -20 to 130 C, found 200 C"


def test_thousands_of_deviations_are_counted(tmp_path: Path) -> None:
    """Regression: a sentence of 84,095 characters."""
    node = make_node(tmp_path)
    for pid in range(2**23, 2**23 + 3000):
        node.nvml.start(0, pid, 1)
    devices = node.devices()
    with pytest.raises(FailedError) as failure:
        check_contract(devices, devices.uuids[0])
    message = str(failure.value)
    assert message.startswith("GPU 0: expected a process ID, found 8388608; ")
    assert message.endswith("; and 2,990 more")
    assert len(message) < 2000


def opened(library: FakeNvml) -> Session:
    session = Session(library)
    session.open()
    return session


NOW_S = 1_700_000_000.0


class Sampled(FakeNvml):
    """Returns these utilization samples; None: not supported."""

    def __init__(self, samples: list[tuple[int, int, int]] | None) -> None:
        super().__init__(["T4"])
        self._samples = samples

    def nvmlDeviceGetProcessUtilization(self, handle: object, since_us: int) -> list:  # noqa: N802  # NVIDIA's name
        if self._samples is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [
            pynvml.c_nvmlProcessUtilizationSample_t(pid=pid, timeStamp=at_us, smUtil=sm)
            for pid, at_us, sm in self._samples
        ]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([(42, 1_699_999_999_000_000, 50), (43, 1_699_999_999_000_000, 100)], ""),
        ([], ""),
        ([(0, 0, 65535)], ""),
        ([(2**31, 1_699_999_999_000_000, 50)], "expected a process ID, found 2147483648"),
        ([(42, 1_699_999_999_000_000, 150)], "expected 0 to 100% of the SMs, found 150%"),
        ([(42, 1_700_000_003_000_000, 50)], "not in the future, found 1700000003000000"),
        ([(42, 1_699_999_999_000, 50)], "expected microseconds since 1970"),
        ([(42, 1_699_999_999_000_000_000, 50)], "expected microseconds since 1970"),
        ([(42, 90_000_000, 50)], "expected microseconds since 1970"),
        ([(42, 1_699_999_999_000_000, 50)] * 2, "expected one sample of each process, found 1 more"),
        (None, ""),
    ],
    ids=[
        "fine", "none", "unfilled", "pid", "beyond", "future", "milliseconds", "nanoseconds", "since-boot", "twice",
        "silent",
    ],
)  # fmt: skip
def test_the_contract_checks_utilization_samples(samples: list[tuple[int, int, int]] | None, expected: str) -> None:
    found = list(check_utilization(opened(Sampled(samples)), lambda: NOW_S))
    assert [expected in one for one in found] == [True] * bool(expected), found


@pytest.mark.parametrize(
    ("pid", "memory_mib", "instance", "expected"),
    [(2**23, 1, None, "a process ID"), (42, 20_000, None, "at most the GPU"), (42, 1, 3, "a MIG instance only")],
)
def test_the_contract_checks_processes(pid: int, memory_mib: int, instance: int | None, expected: str) -> None:
    fake = FakeNvml(["T4"])
    fake.start(0, pid, memory_mib, instance=instance)
    (found,) = check_processes(opened(fake))
    assert f"expected {expected}" in found


def test_the_contract_finds_duplicate_processes() -> None:
    fake = FakeNvml(["T4"])
    fake.start(0, 42, 1)
    fake.gpus[0].processes[43] = fake.gpus[0].processes[42]
    (found,) = check_processes(opened(fake))
    assert found.endswith("expected each process once, found 1 duplicates, such as (42, None)")
