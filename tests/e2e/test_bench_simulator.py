"""The simulator's benchmark: what it runs, and what it says."""

import re
from pathlib import Path

import pytest
from carpool_e2e.bench.simulator import TRACE, Measured, measure, simulator_section
from carpool_e2e.errors import HarnessError
from carpool_simulator.testing import write_lucid


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Measurements and a trace of three jobs."""
    write_lucid(tmp_path)
    (tmp_path / TRACE).parent.mkdir()
    (tmp_path / TRACE).write_text("timestamp,duration,num_gpus\n0,60,1\n5,60,16\n9,60,1\n")
    return tmp_path


def test_a_whole_run_is_measured_in_a_process_of_its_own(data: Path) -> None:
    told: list[str] = []
    found = measure(data, told.append)
    assert found.jobs == 3
    assert found.processor_s > 0
    assert 20 < found.memory_mib < 1000
    assert told[0].startswith("philly_sia.csv: 3 jobs, 2,490 GPUs: ")
    assert any(line.startswith("| least-slowdown |") for line in found.table)
    assert re.fullmatch(
        r"The machine's load was \d+\.\d at the end(; .* with raised priority: .* waited)?\.", found.circumstances
    )


def test_what_failed_is_told(data: Path) -> None:
    (data / TRACE).write_text("timestamp,duration\n")
    with pytest.raises(HarnessError, match="add num_gpus"):
        measure(data, print)


@pytest.mark.parametrize(("elapsed_s", "outcome"), [(120.0, "kept"), (120.1, "missed")])
def test_a_run_that_takes_too_long_is_called_so(elapsed_s: float, outcome: str) -> None:
    section = simulator_section(Measured("title", 1000, elapsed_s, 50.0, 99.0, ["| table |"], "It rained."))
    assert f"| time | {elapsed_s:.1f} s | ≤ 120 s, aimed at 30 s | {outcome} |" in section
    assert "| jobs a second of processor time | 20 | | |" in section
    assert "| table |" in section
    assert "It rained." in section
