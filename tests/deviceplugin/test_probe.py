"""The step probe: what it counts in trainings, how it starts, and what the agent makes of its reports."""

import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from carpool_core.values import PodUid
from carpool_deviceplugin.probe import ProbeFiles, read_records
from carpool_probe.recorder import FIELDS, RECORD_SIZE, SIZE, header

POD = PodUid("uid-1")
TRAININGS = Path(__file__).parent / "trainings"


class Container:
    """A process environment as in a container with the probe; only the paths are others."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.now = directory, 0.0
        self.probe = ProbeFiles(directory / "probe", lambda: self.now)
        self.probe.install()
        self.probe.access(POD)
        self.file = directory / "probe/pods" / POD
        self.code = directory / "probe/code"
        self.python_path = f"{self.code}/pythonpath:{self.code}/python"  # not a package that is installed here
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory),
            "CARPOOL_PROBE_FILE": str(self.file),
            "PYTHONUSERBASE": str(self.code / "user"),
        }

    def run(self, *arguments: str, python: str = sys.executable, **env: str) -> str:
        done = subprocess.run(
            [python, *arguments],
            env={**self.env, **env},
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def train(self, training: str, *arguments: str) -> list[dict[str, int]]:
        """Run a training in this virtual environment, and return the records of its processes."""
        self.run(str(TRAININGS / training), *arguments, PYTHONPATH=self.python_path)
        return [record._asdict() for record in read_records(self.file).values()]


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


# Trainings


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, int]]:
    """Return by how much each part of the training raised the counters."""
    container = Container(tmp_path_factory.mktemp("plain"))
    found: dict[str, dict[str, int]] = json.loads(
        container.run(str(TRAININGS / "plain.py"), PYTHONPATH=container.python_path)
    )
    return found


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("loader", {"steps": 5, "batches": 5, "samples": 40, "optimizers": 1}),
        ("accumulation", {"steps": 3, "optimizer_steps": 3, "batches": 0}),
        ("gan", {"steps": 6, "optimizer_steps": 12}),
        ("critic", {"steps": 10, "optimizer_steps": 12}),
        ("scaler", {"steps": 3, "optimizer_steps": 3, "skipped_steps": 1}),
        ("compiled", {"steps": 4, "optimizer_steps": 4}),
        ("compiled copy", {"steps": 0, "copies": 0}),
        ("copy", {"steps": 0, "copies": 1}),
        ("checkpoint", {"steps": 0, "checkpoints": 1}),
    ],
)
def test_the_probe_counts_what_a_training_does(
    parts: Mapping[str, Mapping[str, int]], part: str, expected: Mapping[str, int]
) -> None:
    assert {name: parts[part][name] for name in expected} == expected
    for count, nanoseconds in (("batches", "data_ns"), ("checkpoints", "checkpoint_ns"), ("copies", "copy_ns")):
        assert (parts[part][nanoseconds] > 0) == (parts[part][count] > 0)


LIBRARIES = {
    "distributed": {"steps": 12, "checkpoints": 1, "optimizers": 2},  # DDP and FSDP in two processes
    "deepspeed": {"steps": 6, "optimizer_steps": 6},
    "lightning": {"steps": 3, "batches": 6, "samples": 48},
    "accelerate": {"steps": 3, "batches": 6, "samples": 48},
    "transformers": {"steps": 4, "batches": 8, "samples": 16},
}
_NEEDED = {"distributed": "torch", "transformers": "accelerate"}


@pytest.mark.parametrize("library", [name for name in LIBRARIES if importlib.util.find_spec(_NEEDED.get(name, name))])
def test_the_probe_counts_the_steps_of_libraries(container: Container, library: str) -> None:
    """A library that is not installed has no case. Each process has its own record."""
    records = container.train(f"{library}.py", str(container.directory))
    expected = LIBRARIES[library]
    assert [{name: record[name] for name in expected} for record in records] == [expected] * len(records)
    assert len(records) == (2 if library == "distributed" else 1)


def test_other_frameworks_count_steps_with_one_call(container: Container) -> None:
    container.run(
        "-c", "import carpool_probe as p; [p.step(8) for _ in range(3)]", PYTHONPATH=str(container.code / "python")
    )
    (record,) = read_records(container.file).values()
    assert (record.steps, record.samples, record.steps_ns > 0) == (3, 24, True)


def test_a_forked_child_leaves_its_parents_record_alone(container: Container) -> None:
    script = (
        "import carpool_probe as p, os; p.step(); os.fork() or [p.step() for _ in range(9)] and os._exit(0); os.wait()"
    )
    container.run("-c", script, PYTHONPATH=str(container.code / "python"))
    assert sorted(one.steps for one in read_records(container.file).values()) == [1]


# How it starts

SYSTEM = {"python": getattr(sys, "_base_executable", sys.executable)}
"""The interpreter outside of a virtual environment, where user bases count."""
SHOW = "import json, os, sys; print(json.dumps([sys.path, [*sys.modules], os.environ.get('PYTHONUSERBASE')]))"


def started(found: str) -> tuple[list[str], bool, str | None]:
    path, modules, base = json.loads(found)
    return path, "carpool_probe.start" in modules, base


def test_a_user_base_starts_the_probe_and_hides_no_package_of_the_user(container: Container) -> None:
    python = SYSTEM["python"]
    own = Path(container.run("-m", "site", "--user-site", python=python, PYTHONUSERBASE="").strip())
    own.mkdir(parents=True)
    (own / "mine.py").write_text("")
    without, _, _ = started(container.run("-c", SHOW, python=python, PYTHONUSERBASE=""))
    path, is_started, base = started(container.run("-c", "import mine; " + SHOW, python=python))
    assert is_started
    assert base is None, "pip and site of this process use the user's own base"
    assert [p for p in path if not p.startswith(str(container.code))] == without


def test_child_processes_of_a_training_start_the_probe(container: Container) -> None:
    """A launcher such as torchrun imports PyTorch; safetensors, which is hooked as well, stands for it here."""
    library = container.directory / "libraries/safetensors"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("")
    (library / "torch.py").write_text("def save_file(): ...")
    script = f"import safetensors.torch, subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}], check=True)"
    found = container.run("-c", script, python=SYSTEM["python"], PYTHONPATH=str(library.parent))
    assert started(found)[1]


def test_pip_installs_into_the_users_own_base(container: Container) -> None:
    show = "import sysconfig, site; print(sysconfig.get_path('purelib', 'posix_user'), site.getusersitepackages())"
    expected = container.run("-c", show, python=SYSTEM["python"], PYTHONUSERBASE="")
    assert container.run("-c", show, python=SYSTEM["python"]) == expected


@pytest.mark.parametrize("is_switched_on", [True, False])
def test_a_virtual_environment_needs_pythonpath(container: Container, is_switched_on: bool) -> None:
    more = {"PYTHONPATH": str(container.code / "pythonpath")} if is_switched_on else {}
    assert started(container.run("-c", SHOW, **more))[1] == is_switched_on


def test_the_images_own_sitecustomize_runs(container: Container) -> None:
    own = container.directory / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['OWN'] = __file__")
    path = f"{container.code}/pythonpath:{own}"
    found = container.run("-c", "import os; print(os.environ['OWN'])", PYTHONPATH=path)
    assert found.strip() == str(own / "sitecustomize.py")


@pytest.mark.parametrize("flag", ["-I", "-s", "-E", "-S"])
def test_isolated_interpreters_run_without_the_probe(container: Container, flag: str) -> None:
    assert container.run(flag, "-c", "print(1)", python=SYSTEM["python"]) == "1\n"


@pytest.mark.parametrize("content", [b"", b"CARPOOL\0" + struct.pack("=Q", 2) + bytes(SIZE - 16)])
def test_without_a_usable_file_the_training_runs_on(container: Container, content: bytes) -> None:
    container.file.write_bytes(content)
    script = "import carpool_probe as p; [p.step() for _ in range(3)]; print('done')"
    assert container.run("-c", script, PYTHONPATH=str(container.code / "python")) == "done\n"
    assert read_records(container.file) == {}


# What the agent makes of a report


def write(container: Container, number: int = 0, **fields: int) -> None:
    """Write a process's record."""
    values = {"sequence": 2, "started_ns": 1, "updated_ns": 2, **fields}
    with container.file.open("r+b") as file:
        file.seek(RECORD_SIZE * (number + 1))
        file.write(struct.pack(f"={len(FIELDS)}Q", *(values.get(name, 0) for name in FIELDS)))


def read_after(container: Container, seconds: float, **fields: int) -> Any:
    container.now += seconds
    write(container, **fields)
    return container.probe.read(POD)


def test_a_report_has_the_growth_since_the_last_reading(container: Container) -> None:
    assert container.probe.read(POD) is None, "no process reports yet"
    first = read_after(container, 100, steps=10, steps_ns=9_000_000_000)
    assert (first.steps, first.since.steps, first.since.elapsed_s) == (10, 0, 0.0)
    again = read_after(container, 10, steps=15, steps_ns=14_000_000_000, samples=160, data_ns=2_000_000_000)
    assert (again.steps, again.since.steps, again.since.steps_s, again.since.timed_steps) == (15, 5, 5.0, 5)
    assert (again.since.samples, again.since.data_s, again.since.elapsed_s) == (160, 2.0, 10.0)


def test_processes_of_a_pod_count_the_same_steps_once(container: Container) -> None:
    read_after(container, 100, steps=10)
    write(container, 1, steps=10)
    container.probe.read(POD)
    write(container, 1, steps=14, samples=32, data_ns=10**9)
    report = read_after(container, 10, steps=14, samples=32, data_ns=3 * 10**9)
    assert (report.steps, report.since.steps, report.since.samples, report.since.data_s) == (14, 4, 64, 2.0)


def test_a_process_that_takes_over_a_record_counts_from_zero(container: Container) -> None:
    read_after(container, 100, steps=10)
    report = read_after(container, 10, started_ns=101 * 10**9, updated_ns=105 * 10**9, steps=3, steps_ns=2 * 10**9)
    assert (report.steps, report.since.steps, report.since.timed_steps) == (3, 3, 2)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"steps": 9, "samples": 1}, id="fewer-steps-than-before"),
        pytest.param({"steps": 2**63}, id="more-steps-than-time-allows"),
        pytest.param({"steps": 11, "steps_ns": 200 * 10**9}, id="steps-longer-than-the-process-lives"),
        pytest.param({"steps": 11, "updated_ns": 2**62}, id="a-time-in-the-future"),
        pytest.param({"steps": 11, "started_ns": 3}, id="a-start-after-the-last-change"),
        pytest.param({"steps": 11, "data_ns": 200 * 10**9}, id="a-wait-longer-than-the-process-lives"),
        pytest.param({"steps": 11, "sequence": 3}, id="a-record-that-never-stops-changing"),
    ],
)
def test_an_impossible_report_is_ignored(container: Container, fields: dict[str, int]) -> None:
    read_after(container, 100, steps=10)
    assert read_after(container, 1, **fields) is None


def test_a_file_that_a_container_enlarged_is_cut_and_one_of_another_format_ignored(container: Container) -> None:
    write(container, steps=1)
    with container.file.open("ab") as file:
        file.write(bytes(10_000))
    assert read_records(container.file)[0].steps == 1
    assert container.file.stat().st_size == SIZE
    container.file.write_bytes(bytes(SIZE))
    assert read_records(container.file) == {}


def test_files_of_ended_pods_are_removed_and_strange_names_get_none(container: Container) -> None:
    assert container.file.read_bytes() == header().ljust(SIZE, b"\0")
    assert container.file.stat().st_mode & 0o777 == 0o666
    container.probe.access(PodUid("uid-2"))
    container.probe.keep({PodUid("uid-2")})
    assert [one.name for one in container.file.parent.iterdir()] == ["uid-2"]
    assert container.probe.access(PodUid("../../etc")) == ({}, [])


def test_a_reading_of_a_running_process_is_credible(container: Container) -> None:
    script = "import carpool_probe as p, time; [(time.sleep(0.001), p.step()) for _ in range(50)]"
    container.run("-c", script, PYTHONPATH=str(container.code / "python"))
    container.now = time.monotonic()
    report = container.probe.read(POD)
    assert report is not None
    assert report.steps == 50
