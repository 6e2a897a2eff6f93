"""What somebody who simulates a trace of their own is told about it."""

from dataclasses import replace

import pytest
from carpool_extender.queue.order import QueueOrder
from carpool_simulator import report
from carpool_simulator.commands import simulate
from carpool_simulator.philly import SILENT, TELLING, from_trace, read_cluster
from carpool_simulator.sweep import ARRIVAL, DEFAULT, LONGEST_FIRST
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
    assert report.UNLEARNED in said
    assert written.endswith(f"\n\n{report.UNLEARNED}\n\n")


@pytest.mark.parametrize("arguments", [["--learn"], ["--policy", "exclusive"]], ids=["learned", "nobody slowed"])
def test_nothing_is_said_of_learning_where_it_is_done_or_would_change_nothing(own, arguments):
    said, written = run(own, *arguments)
    assert report.UNLEARNED not in said
    assert report.UNLEARNED not in written


@pytest.mark.parametrize(
    ("order", "sentence", "line"),
    [
        (
            "Alternate",
            "alternate (`settings.queueOrder: Alternate`, the default). A job that declares no steps",
            DEFAULT,
        ),
        ("Arrival", "orders jobs by arrival (`settings.queueOrder: Arrival`).", ARRIVAL),
        (
            "LongestFirst",
            "longest job first (`settings.queueOrder: LongestFirst`). A job that declares no steps",
            LONGEST_FIRST,
        ),
    ],
)
def test_a_table_of_an_own_trace_says_in_which_order_its_queue_was(own, order, sentence, line):
    for arguments, named in (([], line), (["--policies", "exclusive,best-fit"], "best-fit")):
        _, written = run(own, "--queue-order", order, *arguments)
        told = written.split("\n\n")[1]
        assert sentence in told
        assert told.count("settings.queueOrder") == 1
        assert f"| {named} |" in written


def test_jobs_that_say_their_steps_come_in_the_order_that_is_asked_for_and_silent_ones_as_they_came(own):
    """Regression: no order could be tried, and nothing told that jobs of a trace say no steps."""
    lines = [f"{900 * number},{3600 * hours},1" for number, hours in enumerate((1, 90, 3, 45, 10, 20))]
    (own / "t.csv").write_text("\n".join(["timestamp,duration,num_gpus", "0,9e4,1", "0,9e4,1", *lines, ""]))

    def rows(order, *arguments):
        _, written = run(own, "--policies", "exclusive", "--queue-order", order, *arguments)
        assert (f"- {TELLING}" in written, f"- {SILENT}" in written) == (bool(arguments), not arguments)
        return next(row for row in written.splitlines() if row.startswith("| exclusive |"))

    orders = [one.value for one in QueueOrder]
    assert len({rows(order) for order in orders}) == 1
    assert rows("Arrival", "--steps") == rows("Arrival")
    assert rows("LongestFirst", "--steps") != rows("Arrival")


def test_jobs_say_as_many_steps_as_their_durations_come_to(own):
    nodes = read_cluster(own / "c.yaml")
    silent, telling = (from_trace(own, own / "t.csv", nodes, 0, says_steps=one) for one in (False, True))
    assert {one.steps for one in silent.jobs} == {None}
    assert [one.steps for one in telling.jobs] == [round(600 / (32 / 100))] * 11, "32 samples a step, 100 a second"
    assert [replace(one, steps=None) for one in telling.jobs] == silent.jobs, "else it is the same trace"
