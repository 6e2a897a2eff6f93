"""What `make bench` measures of the agent, as far as it takes no time: that it measures anything at all."""

from pathlib import Path

import pytest
from carpool_e2e.bench import agent


def test_daemons_of_the_stand_in_are_ready_within_a_second(tmp_path: Path) -> None:
    took = agent.mps_ready(tmp_path / "daemons")
    assert len(took) == agent.DAEMONS
    assert 0 < max(took) < 1


def test_percentile_is_in_milliseconds() -> None:
    assert agent.p99([0.001] * 999 + [5.0]) == pytest.approx(1.0)
    assert agent.p99([i / 1000 for i in range(1001)]) == pytest.approx(990, abs=1)
