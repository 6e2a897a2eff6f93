"""The battery for real GPUs: on a machine that keeps its word every trial passes, elsewhere the right one fails."""

import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pynvml
import pytest
from battery_world import machine, of_first, recording, try_out
from carpool_deviceplugin.check import (
    CONTRACT,
    LOAD,
    Attributed,
    Kind,
    ProcessLoad,
    RealMachine,
    Recording,
    SkippedError,
    Verdict,
    differences,
    processes_make_sense,
    read,
    utilization_makes_sense,
)
from carpool_deviceplugin.commands import node as command
from carpool_deviceplugin.nvlib import Session, load_nvml
from carpool_deviceplugin.testing.check import FakeMachine
from carpool_deviceplugin.testing.gpus import HARDWARE
from carpool_deviceplugin.testing.node import uid
from carpool_deviceplugin.testing.nvml import FakeNvml
from click.testing import CliRunner, Result


def test_every_trial_passes_on_a_machine_that_keeps_its_word(tmp_path: Path) -> None:
    there = machine(tmp_path)
    found = try_out(there)
    assert {o.verdict for name, o in found.items() if name != "mig"} == {Verdict.PASSED}, found
    assert "only with --mig" in found["mig"].said
    assert "2 processes made 20.0, 20.0 steps/s" in found["mps-two"].said
    assert "3 processes made" in found["mps-three"].said
    assert "100%: 0.97, 50%: 0.48, 25%: 0.24" in found["mps-threads"].said
    assert "told after 0 s, with both pods; they ended: RuntimeError" in found["mps-fault"].said
    assert "another daemon answered after" in found["mps-killed"].said
    assert "of 132 SMs" in found["activity"].said
    assert "not beside dmon: nvidia-smi is not on PATH" in found["cost"].said
    assert there.living() == []
    assert there.node.mps.daemons == {}, "the machine is left as it was"
    assert there.devices.actual(there.devices.uuids[0]).mode is None


@pytest.mark.parametrize(
    ("faithless", "trial", "says"),
    [
        (
            {"ignores_limits": True},
            "mps-two",
            "expected it to die of memory at 4,096 MiB, found it alive with 8,792 MiB",
        ),
        ({"kills_neighbours": True}, "mps-three", "expected every process to make steps"),
        ({"ignores_threads": True}, "mps-threads", "expected an SM activity of about each thread percentage"),
        ({"hides_fate": True}, "mps-fault", "expected the agent to name all pods that end together within 10 s"),
        ({"hides_fate": True}, "mps-killed", "expected the agent to name all pods that end together within 10 s"),
        ({"energy_leaks": True}, "energy", "expected power over time to be the counter within 10%"),
        ({"wastes_s": 0.01}, "cost", "expected at most 0.5% of a core, found 1.00%"),
    ],
)
def test_the_right_trial_fails_on_a_machine_that_does_not(tmp_path: Path, faithless, trial: str, says: str) -> None:
    there = machine(tmp_path, **faithless)
    found = try_out(there, trial)[trial]
    assert (found.verdict, says in found.said) == (Verdict.FAILED, True), found
    assert there.living() == [], "what failed is cleaned up, too"


@pytest.mark.parametrize(
    ("kind", "faithless", "trial", "says"),
    [
        ("H100", {"has_no_torch": True}, "mps-two", "it takes PyTorch with CUDA"),
        ("H100", {"has_no_cgroups": True}, "attribution", "it takes a cgroup of the pod: no cgroups here"),
        ("A100-40", {}, "activity", "SM activity is measured on Hopper and newer, or where DCGM's host engine runs"),
        ("T4", {}, "mig", "MIG is switched off"),
    ],
)
def test_what_cannot_be_tried_says_what_it_takes(tmp_path: Path, kind: str, faithless, trial: str, says: str) -> None:
    found = try_out(machine(tmp_path, kind, **faithless), trial, may_divide=True)[trial]
    assert (found.verdict, says in found.said) == (Verdict.SKIPPED, True), found


@pytest.mark.parametrize("kind", ["A100-80", "A30", "H200"])
def test_instances_are_made_and_destroyed_where_that_is_allowed(tmp_path: Path, kind: str) -> None:
    there = machine(tmp_path, kind)
    mig = there.node.nvml.gpus[0].mig
    mig.is_enabled = mig.is_pending = True
    there = FakeMachine(there.node)
    assert try_out(there, "mig", may_divide=True)["mig"].verdict is Verdict.PASSED
    assert mig.instances == {}
    profile = mig.table.profiles[0]
    mig.create(profile.id, 0, profile.memory_slices)
    assert "somebody else's instances" in try_out(there, "mig", may_divide=True)["mig"].said
    assert len(mig.instances) == 1


def run(there: FakeMachine, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["battery", *arguments], obj=there)


def test_the_command_tells_each_trial_and_writes_a_fixture(tmp_path: Path) -> None:
    out = tmp_path / "h100.json"
    found = run(machine(tmp_path), "--only", "contract", "--only", "mps-two", "--out", str(out))
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[0].startswith("NVIDIA H100 80GB HBM3, driver 580.95.05  GPU-")
    assert [line.split()[:2] for line in lines[1:3]] == [["passed", "contract"], ["passed", "mps-two"]]
    written = read(out)
    assert [o.name for o in written.outcomes] == ["contract", "mps-two"]
    assert differences(written.nvml, recording("H100")) == []


def test_a_failed_trial_ends_the_command_with_1(tmp_path: Path) -> None:
    found = run(machine(tmp_path, ignores_limits=True), "--only", "mps-two")
    assert (found.exit_code, "FAILED   mps-two" in found.output) == (1, True)


def in_use(there: FakeMachine) -> None:
    there.node.start(0, 42, "x")


def sick(there: FakeMachine) -> None:
    there.devices.actual(there.devices.uuids[0])
    there.node.nvml.raise_xid(0, 95)


@pytest.mark.parametrize(
    ("arguments", "spoil", "says"),
    [
        ([], in_use, f"found pods ['{uid('x')}']; the battery starts and kills processes there"),
        ([], sick, "expected one that is well and that nobody uses, found XID 95"),
        (["--gpu", "3"], None, "expected a GPU from 0 to 0, its UUID, or that of a MIG device on it, found '3'"),
        (["--only", "mps"], None, "'mps' is not one of 'contract', 'activity'"),
        (
            ["--out", "/nowhere/x.json"],
            None,
            "--out: expected to write to '/nowhere/x.json', found No such file or directory; give a file in ",
        ),
        (["--out", "/dev/full"], None, "--out: expected to write to '/dev/full', found No space left on device; free"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(tmp_path: Path, arguments: list[str], spoil, says: str) -> None:
    there = machine(tmp_path)
    if spoil is not None:
        spoil(there)
    found = run(there, *arguments)
    assert (found.exit_code, says in found.output) == (2, True), found.output


def test_where_nothing_could_be_tried_the_command_ends_with_2(tmp_path: Path) -> None:
    found = run(machine(tmp_path), "--only", "mig")  # without --mig
    assert (found.exit_code, found.output.splitlines()[-1]) == (2, "0 passed, 0 failed, 1 skipped")
    found = run(machine(tmp_path), "--only", "mig", "--only", "contract")
    assert (found.exit_code, found.output.splitlines()[-1]) == (0, "1 passed, 0 failed, 1 skipped")


def test_without_a_directory_to_write_to_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    found = run(machine(tmp_path))
    assert (found.exit_code, "set TMPDIR to a writable one" in found.output) == (2, True), found.output


def test_an_interpreter_that_is_not_there_is_told_before_all_else() -> None:
    found = CliRunner().invoke(command, ["battery", "--python", "/nowhere"])
    assert (found.exit_code, "--python: expected an interpreter" in found.output) == (2, True), found.output


RECORDED = [
    *(pytest.param(path, id=path.stem) for path in sorted((Path(__file__).parent / "hardware").glob("*.json"))),
    pytest.param(None, id="installed", marks=pytest.mark.gpu),
]


def test_the_contract_finds_a_driver_that_breaks_it(tmp_path: Path) -> None:
    there = machine(tmp_path)
    gpu = there.node.nvml.gpus[0]
    gpu.temperature_c = 200
    gpu.hardware = replace(gpu.hardware, reserved_mib=60_000, power_limit_w=0)
    session = there.devices.session
    broken = {rule.__name__: list(rule(session)) for rule in CONTRACT}
    assert {name for name, found in broken.items() if found} == {"identity_makes_sense", "telemetry_makes_sense"}
    assert "expected less than a quarter of it reserved" in broken["identity_makes_sense"][0]
    assert "expected a power limit from 5 to 5,000 W" in broken["identity_makes_sense"][1]
    assert "expected a temperature from -20 to 130 C" in "".join(broken["telemetry_makes_sense"])
    assert "expected less than a quarter" in try_out(there, "contract")["contract"].said


def test_what_is_otherwise_of_thousands_is_counted(tmp_path: Path) -> None:
    """Regression: a sentence of 84,095 characters."""
    there = machine(tmp_path)
    for pid in range(2**23, 2**23 + 3000):
        there.node.nvml.start(0, pid, 1)
    said = try_out(there, "contract")["contract"].said
    assert said.startswith("expected a process ID, found RunningProcess(pid=8388608, ")
    assert said.endswith("; and 2,990 more")
    assert len(said) < 2000


NOW_S = 1_700_000_000.0


class Otherwise(FakeNvml):
    """What processes did is told in another way."""

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
    ("samples", "says"),
    [
        ([(42, 1_699_999_999_000_000, 50), (43, 1_699_999_999_000_000, 100)], ""),
        ([], ""),
        ([(0, 0, 65535)], ""),
        ([(2**31, 1_699_999_999_000_000, 50)], "expected a process ID, found (2147483648"),
        ([(42, 1_699_999_999_000_000, 150)], "expected 0 to 100% of the SMs, found (42, 1699999999000000, 150)"),
        ([(42, 1_700_000_003_000_000, 50)], "and none to come, found (42, 1700000003000000"),
        ([(42, 1_699_999_999_000, 50)], "expected microseconds since 1970"),
        ([(42, 1_699_999_999_000_000_000, 50)], "expected microseconds since 1970"),
        ([(42, 90_000_000, 50)], "expected microseconds since 1970"),
        ([(42, 1_699_999_999_000_000, 50)] * 2, "expected each process once at each moment"),
        (None, ""),
    ],
    ids=[
        "fine", "nobody", "unfilled", "pid", "beyond", "future", "milliseconds", "nanoseconds", "since-boot", "twice",
        "silent",
    ],
)  # fmt: skip
def test_the_contract_looks_at_what_processes_did(samples: list[tuple[int, int, int]] | None, says: str) -> None:
    session = Session(Otherwise(samples))
    session.open()
    found = list(utilization_makes_sense(session, lambda: NOW_S))
    assert [says in one for one in found] == [True] * bool(says), found


@pytest.mark.parametrize(
    ("pid", "memory_mib", "instance", "says"),
    [(2**23, 1, None, "a process ID"), (42, 20_000, None, "no more memory"), (42, 1, 3, "an instance only")],
)
def test_the_contract_looks_at_processes(pid: int, memory_mib: int, instance: int | None, says: str) -> None:
    fake = FakeNvml(["T4"])
    fake.start(0, pid, memory_mib, instance=instance)
    session = Session(fake)
    session.open()
    (found,) = processes_make_sense(session)
    assert f"expected {says}" in found


class Repeating(FakeNvml):
    """Each process is told twice."""

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list:  # noqa: N802  # NVIDIA's name
        return 2 * super().nvmlDeviceGetComputeRunningProcesses(handle)


def test_the_contract_finds_processes_that_are_told_twice() -> None:
    fake = Repeating(["T4"])
    session = Session(fake)
    session.open()
    fake.start(0, 42, 1)
    (found,) = processes_make_sense(session)
    assert "expected each process once, found 1 of 2 that were told before: RunningProcess(pid=42, " in found
    assert "…" not in found
    for pid in range(100, 3000):
        fake.start(0, pid, 1)
    (found,) = processes_make_sense(session)
    assert "found 2,901 of 5,802 that were told before: " in found
    assert ("pid=101," in found, "pid=102," in found, found.endswith(" …")) == (True, False, True)


@pytest.mark.parametrize("path", RECORDED)
def test_the_fake_answers_as_hardware_did(path: Path | None) -> None:
    """Nothing was recorded yet: until then only a machine with a GPU can say."""
    recorded = of_first(load_nvml()) if path is None else read(path).nvml
    fakes = [kind for kind, hardware in HARDWARE.items() if hardware.product == recorded.product]
    assert fakes, f"there is no fake of {recorded.product}: add it to carpool_deviceplugin.testing.gpus"
    assert differences(recorded, recording(fakes[0])) == []


@pytest.mark.parametrize("kind", [*HARDWARE])
def test_recordings_outlive_their_file(kind: str) -> None:
    made = recording(kind)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Recording) == made
    assert differences(made, recording(kind)) == []
    assert made.codes["an unknown UUID"] == pynvml.NVML_ERROR_NOT_FOUND
    assert made.codes["XIDs where there are none"] == pynvml.NVML_ERROR_TIMEOUT


def test_what_a_fake_answers_otherwise_is_named() -> None:
    real = recording("A100-40")
    profile = msgspec.structs.replace(real.mig[2], starts=[0], sm_count=1)
    other = msgspec.structs.replace(
        real,
        memory_mib=1,
        reserved_mib=real.reserved_mib + 65,
        mig=[*real.mig[:2], profile, *real.mig[4:]],
        codes={**real.codes, "MIG mode": 3, "energy": 0},
    )
    found = "\n".join(differences(real, other))
    assert "memory_mib: recorded 40960, found 1" in found
    assert "reserved_mib: recorded 624, found 689" in found
    assert "MIG profile 3g.20gb: recorded" in found
    assert "MIG profile 2g.10gb: recorded" in found
    assert "MIG mode: recorded success, found Not Supported (3)" in found
    assert "energy" not in found
    near = msgspec.structs.replace(real, reserved_mib=real.reserved_mib + 64, driver="600.1", power_limit_w=275.0)
    assert differences(real, near) == [], "drivers and boards vary in these"


SPEAKS = """
import json, sys
print("a library's word")
print(json.dumps({"steps": 3}), flush=True)
for line in sys.stdin:
    if line.startswith("take"):
        print(json.dumps({"steps": 4, "ended": "out of memory"}), flush=True)
        sys.exit(1)
    if line.startswith("fault"):
        sys.exit("CUDA error: an illegal memory access")
    if line.startswith("stop"):
        sys.exit(0)
"""


@pytest.fixture
def load(tmp_path: Path):
    made = ProcessLoad([sys.executable, "-c", SPEAKS], {}, uid("a"))
    yield made
    made.stop()


def has_begun(load: ProcessLoad) -> None:
    while load.steps() != 3:
        assert load.ended() is None
        load._reader.join(0.01)


def has_ended(load: ProcessLoad) -> str | None:
    load._process.wait(60)
    return load.ended()


def test_a_process_tells_its_steps_and_its_end(load: ProcessLoad) -> None:
    has_begun(load)
    load.take(1)
    assert (has_ended(load), load.steps()) == ("out of memory", 4)
    load.take(1)  # nobody hears it any more


def test_a_process_that_dies_is_quoted(load: ProcessLoad) -> None:
    load.fault()
    assert has_ended(load) == "code 1: CUDA error: an illegal memory access"


def real(tmp_path: Path, python: str = sys.executable) -> RealMachine:
    return RealMachine(FakeNvml(["H100"]), tmp_path, python=python, cgroups=tmp_path / "cgroup")


def test_an_interpreter_that_does_not_do_is_named(tmp_path: Path) -> None:
    there = real(tmp_path, python=str(tmp_path / "python"))
    with pytest.raises(SkippedError, match=r"it takes PyTorch with CUDA in .*python"):
        there.start(there.devices.uuids[0], Kind.TRAIN, "a", {})


def test_a_process_is_put_into_its_pods_cgroup(tmp_path: Path, load: ProcessLoad) -> None:
    there = real(tmp_path)
    assert there.in_cgroup(load) == "nobody put it there"
    (tmp_path / "cgroup" / "carpool-battery").mkdir(parents=True)
    assert there._moved(load) == ""
    assert (tmp_path / "cgroup/carpool-battery" / f"pod{uid('a')}" / "cgroup.procs").read_text() == f"{load.pid}\n"
    nowhere = RealMachine(FakeNvml(["H100"]), tmp_path / "x", cgroups=Path("/proc/nowhere"))
    assert "run it as root on a node with cgroups of version 2" in nowhere._moved(load)


def test_processes_of_the_battery_belong_to_its_pods(load: ProcessLoad) -> None:
    processes = Attributed()
    assert processes.find(load.pid).pod_uid is None
    processes.pods[load.pid] = uid("a")
    assert processes.find(load.pid).pod_uid == uid("a")


def test_the_program_trains_takes_memory_and_dies_alone() -> None:
    """Without a GPU on the processor, in an interpreter that finds PyTorch and nothing of Carpool."""
    torch_is_at = str(Path(next(iter(find_spec("torch").submodule_search_locations))).parent)
    code = f"import sys; sys.path.insert(0, {torch_is_at!r}); import runpy; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    load = ProcessLoad([sys.executable, "-I", "-S", "-c", code, str(LOAD), "train", "cpu"], {}, uid("a"))
    try:
        while load.steps() < 2:
            assert load.ended() is None, load.ended()
            load._reader.join(0.01)
        load.take(1)
        load.fault()
        assert "IndexError: index 1099511627776 is out of bounds" in (has_ended(load) or "it lives")
    finally:
        load.stop()
