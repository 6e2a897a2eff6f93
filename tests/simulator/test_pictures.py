"""Figures of simulated runs: titles, distinguishable lines and bars, and no figure of an earlier run."""

import pytest
from carpool_simulator.commands import simulate
from carpool_simulator.engine import Finished
from carpool_simulator.pictures import draw, gantt, lanes
from carpool_simulator.sweep import named, sweep
from click.testing import CliRunner
from simulated_world import CARPOOL, job, workload

NONE_FREE = ("--policy", "best-fit", "--least-free-mib", "999999999")


@pytest.fixture
def line(data):
    """One job of a kind after the other on one GPU."""
    jobs = [job("a"), job("b")]
    return sweep(lambda _: workload(*jobs), named("exclusive", CARPOOL), 1, data, lambda _: None)[0]


def simulated(data, *arguments):
    return CliRunner().invoke(simulate, ["--data", str(data), "--out", str(data / "out"), "--seeds", "1", *arguments])


def ran_kinds(number, data):
    jobs = [job(f"kind-{one:02}") for one in range(number)]
    run = sweep(lambda _: workload(*jobs), named("exclusive", CARPOOL), 1, data, lambda _: None)[0]
    return gantt("x", "exclusive", run.example)


def test_gantt_chart_has_a_legend_of_the_kinds(data):
    """Regression: colours had no legend."""
    figure = ran_kinds(20, data)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [f"kind-{one:02}" for one in range(20)]
    bars = figure.axes[0].collections  # one after the other, as their kinds are sorted
    shown = [square.get_facecolor() for square in legend.get_patches()]
    assert shown == [tuple(bar.get_facecolor()[0]) for bar in bars]
    assert len(set(shown)) == 20


def test_gantt_chart_with_more_kinds_than_colours_has_no_legend(data):
    assert not ran_kinds(21, data).legends


@pytest.mark.parametrize("pictures", ["--pictures", "--no-pictures"])
def test_command_removes_figures_of_an_earlier_run(data, pictures):
    (data / "t.csv").write_text("timestamp,duration,num_gpus\n0,60,1\n")
    (data / "out").mkdir()
    others = {"trace-few-cdf.png", "other-gantt-0.png"}
    for name in {"trace-gantt-energy.png", *others}:
        (data / "out" / name).write_text("")
    result = simulated(data, "--trace", str(data / "t.csv"), "--policy", "exclusive", pictures)
    assert result.exit_code == 0, result.output
    left = {path.name for path in (data / "out").iterdir()}
    assert left >= others, "figures of other workloads stay"
    assert "trace-gantt-energy.png" not in left


def test_run_without_a_placed_job_fails_and_draws_nothing(data):
    """Regression: it drew empty figures with warnings and exit code 0."""
    (data / "t.csv").write_text("timestamp,duration,num_gpus\n0,60,1\n0,60,1\n")
    result = simulated(data, "--trace", str(data / "t.csv"), *NONE_FREE)
    assert result.exit_code == 1, result.output
    output = " ".join(result.output.split())
    assert "best-fit: makespan 0 min, 0.0 OOM, never placed 2 of 2 jobs" in output
    assert (
        "expected a GPU for at least one of 2 jobs, found none that meets the conditions "
        "(free memory ≥ 999,999,999 MiB) under any strategy"
    ) in output
    assert not list((data / "out").glob("*.png"))
    assert "| never placed |" in (data / "out" / "trace.md").read_text()


def test_jobs_that_share_a_gpu_have_different_lanes():
    def ran(name, start_s, end_s, *gpus):
        return Finished(job(name), start_s, end_s, gpus, 0, end_s - start_s)

    bars = lanes([ran("c", 10.0, 20.0, "g"), ran("a", 0.0, 10.0, "g", "h"), ran("b", 5.0, 15.0, "g")])
    assert [(bar.job.job.name, bar.gpu, bar.lane) for bar in bars] == [
        ("a", "g", 0),
        ("a", "h", 0),
        ("b", "g", 1),
        ("c", "g", 0),
    ]


def test_gantt_charts_cover_the_baseline_and_carpool(data, tmp_path):
    """Regression: the last line was drawn, in most tables an oracle."""
    lines = sweep(lambda _: workload(job("a")), named("exclusive,least-slowdown,energy", CARPOOL), 1, data, print)
    drawn = draw(tmp_path, "x", lines)
    assert [path.name for path in drawn] == [
        "x-utilization.png",
        "x-cdf.png",
        "x-gantt-exclusive.png",
        "x-gantt-least-slowdown.png",
    ]
    assert [path.name for path in draw(tmp_path, "x", lines[::2])][2:] == [
        "x-gantt-exclusive.png",
        "x-gantt-energy.png",
    ]
