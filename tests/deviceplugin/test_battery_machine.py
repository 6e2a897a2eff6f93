"""The real machine of the battery, as far as it goes without a GPU."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from carpool_deviceplugin.node.battery.hardware import LOAD, Attributed, ProcessLoad, RealMachine
from carpool_deviceplugin.node.battery.ports import Kind, SkippedError
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import uid

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
