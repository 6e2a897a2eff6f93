"""What somebody who simulates a trace of their own is told about it."""

import pytest
from carpool_extender.simulation.command import simulate
from carpool_extender.simulation.reports import tables
from click.testing import CliRunner


@pytest.fixture
def own(data):
    """Eleven jobs that come at once to two GPUs; the first of them stands last."""
    lines = [*(f"{at_s},600,1" for at_s in range(1, 11)), "0,600,1"]
    (data / "t.csv").write_text("\n".join(["timestamp,duration,num_gpus", *lines, ""]))
    (data / "c.yaml").write_text("nodes: [{product: NVIDIA GeForce RTX 3090, gpus: 2}]")
    return data


def run(own, *arguments):
    """Return what is said on the screen, and the document."""
    files = ["--trace", str(own / "t.csv"), "--cluster", str(own / "c.yaml"), "--no-pictures"]
    result = CliRunner().invoke(simulate, ["--data", str(own), "--out", str(own / "out"), *files, *arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split()), (own / "out" / "trace.md").read_text()


def test_where_nothing_is_learned_and_jobs_are_slowed_it_is_said_that_a_cluster_would_learn(own):
    """Regression: most jobs were slowed beyond their limit, and nothing told that on a cluster fewer would be."""
    said, written = run(own)
    assert "slowed beyond 1.5" in said
    assert tables.UNLEARNED in said
    assert written.endswith(f"\n\n{tables.UNLEARNED}\n\n")


@pytest.mark.parametrize("arguments", [["--learn"], ["--policy", "exclusive"]], ids=["learned", "nobody slowed"])
def test_nothing_is_said_of_learning_where_it_is_done_or_would_change_nothing(own, arguments):
    said, written = run(own, *arguments)
    assert tables.UNLEARNED not in said
    assert tables.UNLEARNED not in written
