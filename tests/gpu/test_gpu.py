"""The agent on a GPU: `pytest -m gpu tests/gpu` runs these trials on hardware, other runs on a machine in memory.

The GPU must be idle and its node drained. Trials with processes need PyTorch with CUDA; CARPOOL_GPU_PYTHON names an
interpreter that has it. CARPOOL_GPU chooses a GPU by index.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from carpool_deviceplugin.check import FailedError, SkippedError
from carpool_deviceplugin.testing.node import uid
from gpu_fake import fake
from gpu_machine import LOAD, ProcessLoad, Trial
from gpu_trials import TRIALS


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRIALS)
def test_hardware(hardware: Trial, name: str) -> None:
    try:
        print(TRIALS[name](hardware))
    except SkippedError as e:
        pytest.skip(str(e))


MEASURED = {
    "mps-two": "2 processes made 20.0, 20.0 steps/s",
    "mps-three": "3 processes made",
    "mps-threads": "100%: 0.97, 50%: 0.48, 25%: 0.24",
    "mps-fault": "after 5 s, with both pods; they ended: AcceleratorError",
    "mps-assert": "its neighbour made 20.0 steps/s",
    "mps-killed": "another daemon answered after",
    "activity": "of 132 SMs",
    "cost": "not beside dmon: nvidia-smi is not on PATH",
}


@pytest.mark.parametrize("name", TRIALS)
def test_a_machine_that_keeps_its_promises_passes(tmp_path: Path, name: str) -> None:
    trial = fake(tmp_path)
    assert MEASURED.get(name, "") in TRIALS[name](trial)
    assert trial.machine.living() == []
    assert trial.machine.node.mps.daemons == {}, "the machine is left as it was"
    assert trial.machine.devices.actual(trial.gpu).mode is None


@pytest.mark.parametrize(
    ("faithless", "trial", "message"),
    [
        (
            {"ignores_limits": True},
            "mps-two",
            "expected it to die of memory at 4,096 MiB, found it alive with 8,792 MiB",
        ),
        ({"kills_neighbours": True}, "mps-three", "expected every process to make steps"),
        ({"ignores_threads": True}, "mps-threads", "expected an SM activity of about each thread percentage"),
        ({"hides_fate": True}, "mps-fault", "expected the agent to name all pods that end together within 10 s"),
        ({"spreads_assertions": True}, "mps-assert", "expected the neighbour to go on"),
        ({"hides_fate": True}, "mps-killed", "expected the agent to name all pods that end together within 10 s"),
        ({"energy_leaks": True}, "energy", "expected power over time to be the counter within 10%"),
        ({"wastes_s": 0.01}, "cost", "expected at most 0.5% of a core, found 1.00%"),
    ],
)
def test_a_machine_that_breaks_a_promise_fails(tmp_path: Path, faithless, trial: str, message: str) -> None:
    there = fake(tmp_path, **faithless)
    with pytest.raises(FailedError) as failure:
        TRIALS[trial](there)
    assert message in str(failure.value)
    assert there.machine.living() == [], "a failed trial cleans up"


def test_a_missing_requirement_is_named(tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="SM activity is measured on Hopper and newer, or where DCGM's host engine"):
        TRIALS["activity"](fake(tmp_path, "A100-40"))


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
        load.fail_assertion()
        load._process.wait(60)
        assert "IndexError: index 1099511627776 is out of bounds" in (load.ended() or "it lives")
        load.take(1)  # no process reads it any more
    finally:
        load.stop()
