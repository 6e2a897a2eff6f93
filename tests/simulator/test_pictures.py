"""Figures of simulated runs: titles, distinguishable lines and bars, and no figure of an earlier run."""

import pytest
from carpool_simulator.commands import simulate
from carpool_simulator.engine import Finished
from carpool_simulator.pictures import MOST_TOGETHER, completion, draw, gantt, lanes, remove, utilization
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


@pytest.mark.parametrize("picture", [utilization, completion])
def test_of_many_strategies_each_has_a_chart_with_the_first_and_all_others_behind(line, picture):
    """Regression: eleven policies lay on top of each other."""
    names = ["exclusive", *(f"policy-{number}" for number in range(1, MOST_TOGETHER + 1))]
    figure = picture("x", [(name, line.example) for name in names])
    labelled = [[one.get_label() for one in axes.get_lines() if one.get_label() in names] for axes in figure.axes]
    assert labelled == [["exclusive", name] for name in names[1:]]
    for axes in figure.axes:
        *behind, first, own = axes.get_lines()
        assert len(behind) == MOST_TOGETHER
        assert own.get_linewidth() > first.get_linewidth()
        assert first.get_color() != own.get_color()
        assert len({one.get_color() for one in behind} - {first.get_color(), own.get_color()}) == 1


def ran_kinds(number, data):
    jobs = [job(f"kind-{one:02}") for one in range(number)]
    run = sweep(lambda _: workload(*jobs), named("exclusive", CARPOOL), 1, data, lambda _: None)[0]
    return gantt("x", "exclusive", run.example)


def test_gantt_chart_has_a_legend_of_kinds(data):
    """Regression: nobody could tell which colour was which kind."""
    figure = ran_kinds(20, data)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [f"kind-{one:02}" for one in range(20)]
    bars = figure.axes[0].collections  # one after the other, as their kinds are sorted
    told = [square.get_facecolor() for square in legend.get_patches()]
    assert told == [tuple(bar.get_facecolor()[0]) for bar in bars]
    assert len(set(told)) == 20
    assert figure.axes[0].get_xlabel() == "minutes; a colour is a kind of job"


def test_of_more_kinds_than_colours_there_is_no_legend_and_it_is_said_that_they_begin_again(data):
    figure = ran_kinds(21, data)
    assert not figure.legends
    assert figure.axes[0].get_xlabel() == (
        "minutes; a colour is a kind of job, of which there are 21: beyond 20 the colours begin again"
    )


def test_pictures_of_an_earlier_run_go_and_those_of_other_workloads_stay(tmp_path):
    ours, others = {"x-cdf.png", "x-utilization.png", "x-gantt-0.png"}, {"x-few-cdf.png", "x.md", "y-gantt-0.png"}
    for name in ours | others:
        (tmp_path / name).write_text("")
    remove(tmp_path, "x")
    assert {path.name for path in tmp_path.iterdir()} == others


@pytest.mark.parametrize("pictures", ["--pictures", "--no-pictures"])
def test_the_command_leaves_no_picture_of_an_earlier_run(data, pictures):
    (data / "t.csv").write_text("timestamp,duration,num_gpus\n0,60,1\n")
    (data / "out").mkdir()
    (data / "out" / "trace-gantt-energy.png").write_text("")
    result = simulated(data, "--trace", str(data / "t.csv"), "--policy", "exclusive", pictures)
    assert result.exit_code == 0, result.output
    assert not (data / "out" / "trace-gantt-energy.png").exists()


def test_where_nothing_was_ever_placed_there_is_a_sentence_and_no_picture(data):
    """Regression: it told of a makespan of 0 minutes, drew empty pictures with warnings, and ended well."""
    (data / "t.csv").write_text("timestamp,duration,num_gpus\n0,60,1\n0,60,1\n")
    result = simulated(data, "--trace", str(data / "t.csv"), *NONE_FREE)
    assert result.exit_code == 1, result.output
    told = " ".join(result.output.split())
    assert "best-fit: makespan 0 min, 0.0 OOM, never placed 2 of 2 jobs" in told
    assert (
        "expected a GPU for at least one of 2 jobs, found none that meets the conditions "
        "(free memory ≥ 999,999,999 MiB) under any strategy"
    ) in told
    assert not list((data / "out").glob("*.png"))
    assert "| never placed |" in (data / "out" / "trace.md").read_text()


def test_a_line_says_how_many_were_never_placed_of_how_many(data):
    told = []
    jobs = [job("a"), job("b", workers=9)]
    lines = sweep(lambda _: workload(*jobs), named("exclusive", CARPOOL), 2, data, told.append)
    assert told[0].endswith("0.0 OOM, never placed 1 of 2 jobs")
    assert lines[0].has_placed


def test_co_tenants_have_different_lanes():
    def ran(name, start_s, end_s, *gpus):
        return Finished(job(name), start_s, end_s, gpus, 0)

    bars = lanes([ran("c", 10.0, 20.0, "g"), ran("a", 0.0, 10.0, "g", "h"), ran("b", 5.0, 15.0, "g")])
    assert [(bar.job.job.name, bar.gpu, bar.lane) for bar in bars] == [
        ("a", "g", 0),
        ("a", "h", 0),
        ("b", "g", 1),
        ("c", "g", 0),
    ]


def test_gantt_charts_cover_the_baseline_and_the_default_policy(data, tmp_path):
    """Regression: the last line was drawn, an oracle's in most tables."""
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
