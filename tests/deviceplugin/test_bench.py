"""What `make bench` measures of the agent, as far as it takes no time: that it measures anything at all."""

from pathlib import Path

import pytest
from carpool_deviceplugin.cdi.nvidia import NvidiaCdi
from carpool_deviceplugin.testing.mig_tables import A100_40
from carpool_e2e.bench import agent
from carpool_e2e.bench.agent_mig import MigTimes, Slowest, layouts_of
from carpool_e2e.bench.agent_report import agent_section
from carpool_e2e.bench.agentprocess import Spent, describe_to_containers
from carpool_e2e.bench.predictions import replaced


def test_daemons_of_the_stand_in_get_ready(tmp_path: Path) -> None:
    """How quickly is the benchmark's: here the machine may be busy."""
    took = agent.mps_ready(tmp_path / "daemons")
    assert len(took) == agent.DAEMONS


def test_percentile_is_in_milliseconds() -> None:
    assert agent.p99([0.001] * 999 + [5.0]) == pytest.approx(1.0)
    assert agent.p99([i / 1000 for i in range(1001)]) == pytest.approx(990, abs=1)


def test_the_section_says_what_is_kept_and_what_is_missed() -> None:
    cost = agent.Cost(
        core_percent=0.34,
        fakes_percent=0.2,
        resident_mib=81,
        scrape_p99_ms=50,
        prestart_p99_ms=9,
        mps_ready_s=0.03,
        mig=MigTimes(Slowest(300, 1.0), Slowest(200, 10.5), Slowest(128, 2.0), Slowest(1, 0.5)),
        load=1.5,
    )
    lines = agent_section(cost)
    rows = [line.split("|") for line in lines if line.endswith(("kept |", "missed |"))]
    verdicts = {row[1].strip().partition(",")[0]: row[4].strip() for row in rows if "MIG planner" not in row[1]}
    assert [row[4].strip() for row in rows if "MIG planner" in row[1]] == ["kept", "missed", "kept"]
    assert verdicts == {
        "processor time": "kept",
        "resident memory": "missed",
        "scrape": "kept",
        "PreStartContainer": "kept",
        "MPS daemon ready": "kept",
        "MIG division with seven instances in use and seven reservations too many": "kept",
    }
    assert "load was 1.5" in " ".join(lines)
    again = replaced(replaced("# Benchmarks\n", lines), agent_section(cost))
    assert again.count(lines[0]) == 1


def test_every_layout_is_planned_for() -> None:
    """As many as the planner's own tests find, by another way."""
    found = layouts_of(A100_40)
    assert (sum(map(len, found.values())), len(found)) == (2319, 128)


def test_what_the_fakes_spend_is_shown() -> None:
    spent = Spent()
    spent.seconds += 2.5
    ((sample,),) = [metric.samples for metric in spent.collect()]
    assert (sample.name, sample.value) == (agent.SPENT, 2.5)


def test_containers_are_told_every_gpu(tmp_path: Path) -> None:
    describe_to_containers(tmp_path / "cdi", ["GPU-0", "GPU-1"])
    found = NvidiaCdi([tmp_path / "cdi"]).find("GPU-1")
    assert found is not None
    assert found.device["deviceNodes"][0] == {"path": "/dev/nvidia1"}
