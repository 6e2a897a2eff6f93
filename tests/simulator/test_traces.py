"""Traces of others in the simulator: what is read, and that they run to their end."""

import os
from dataclasses import replace

import pytest
from carpool_simulator import philly
from carpool_research.experiments import alibaba
from carpool_simulator.commands import simulate
from carpool_simulator.engine import DEATHS, Simulation
from carpool_simulator.philly import from_trace, read_cluster, read_trace
from carpool_simulator.reports.tables import markdown
from carpool_simulator.strategy import Strategy
from carpool_simulator.sweep import DEFAULT, EXPERIMENTS, Line, figures_of, ours
from carpool_simulator.truth import WorkloadError
from click.testing import CliRunner
from simulated_world import Halved, NoSlowdown

A100 = "NVIDIA A100-SXM4-40GB"
ALONE = Strategy("alone", "exclusive", measure=False)


def ends(outcome):
    return {one.job.name: one.end_s for one in outcome.finished}


PODS = """name,num_gpu,gpu_milli,creation_time,deletion_time
a,1,500,0,100
b,1,400,0,50
c,1,1000,10,30
d,0,0,10,30
"""


@pytest.fixture
def openb(data):
    """Alibaba's trace in small: one node of two GPUs."""
    (data / "traces").mkdir()
    (data / "traces" / alibaba.PODS).write_text(PODS)
    (data / "traces" / alibaba.NODES).write_text("sn,gpu\nn0,2\n")
    return data


def test_fractions_of_alibaba_share_and_whole_gpus_do_not(openb):
    found, (whole, first_fit, *_) = alibaba.alibaba(openb, 0), EXPERIMENTS["alibaba"].published
    assert [one.name for one in found.jobs] == ["a", "b", "c"]
    shared = Simulation(found, first_fit, NoSlowdown()).run()
    assert ends(shared) == {"a": 100.0, "b": 50.0, "c": 30.0}
    alone = Simulation(found, whole, NoSlowdown()).run()
    assert ends(alone)["c"] == 70.0
    figures = figures_of(shared)
    assert figures.gpus_in_use == pytest.approx((100 + 20) / 100)
    assert figures.unused_percent == pytest.approx(100 * (1 - (100 * 0.5 + 50 * 0.4 + 20) / 120), abs=0.01)
    assert figures.memory_percent == pytest.approx(100 * (100 * 0.5 + 50 * 0.4 + 20) / 200, abs=0.01)
    assert figures_of(alone).waiting_min == pytest.approx(40 / 60 / 3)


def test_jobs_that_share_for_long_count_as_slowed(openb):
    found, (whole, first_fit, *_) = alibaba.alibaba(openb, 0), EXPERIMENTS["alibaba"].published
    shared = Simulation(found, first_fit, Halved()).run()
    assert ends(shared) == {"a": 150.0, "b": 100.0, "c": 30.0}, "b shares all its time, a two thirds of it"
    assert figures_of(shared).slowed_percent == pytest.approx(100 / 3), "half as long again is no more than that"
    assert figures_of(Simulation(found, whole, Halved()).run()).slowed_percent == 0


def test_the_same_pods_come_to_few_of_the_nodes(openb):
    lines = "".join(f"n{number},{1 + number % 2}\n" for number in range(2 * alibaba.EVERY))
    (openb / "traces" / alibaba.NODES).write_text(f"sn,gpu\n{lines}")
    one, other = alibaba.alibaba(openb, 0), alibaba.few(openb, 0)
    assert list(other.nodes) == ["n0", f"n{alibaba.EVERY}"]
    assert other.jobs == one.jobs
    assert "Every 200th node only: 2 GPUs, of which 0.9 are asked for on average." in other.assumptions


def test_more_than_there_is_is_drawn_by_the_seed_and_never_ends(openb):
    drawn = [alibaba.full(openb, seed) for seed in (0, 0, 1)]
    kinds = [[(job.name, job.truth.kind) for job in one.jobs] for one in drawn]
    assert kinds[0] == kinds[1]
    assert sum(job.truth.util for job in drawn[0].jobs) >= alibaba.INFLATED * 2
    outcome = Simulation(drawn[0], EXPERIMENTS["alibaba-full"].published[1], NoSlowdown()).run()
    figures = figures_of(outcome)
    assert (figures.makespan_min, outcome.span_s) == (0.0, alibaba.WATCHED_S)
    assert figures.unplaced > 0
    assert figures.memory_percent <= 100
    assert figures == figures_of(Simulation(drawn[1], EXPERIMENTS["alibaba-full"].published[1], NoSlowdown()).run())


@pytest.mark.parametrize(
    ("pods", "nodes", "sentence"),
    [
        (PODS, "sn\nn0\n", "expected the columns sn, gpu; add gpu"),
        (PODS, "sn,gpu\nn0,two\n", "line 2: expected a number of GPUs"),
        (PODS, "sn,gpu\n", "expected at least one GPU, found none"),
        (PODS.replace("500", "1500"), "sn,gpu\nn0,2\n", "line 2: .* 1500 thousandths of a GPU"),
        (PODS.replace("0,100", "0,soon"), "sn,gpu\nn0,2\n", "line 2: expected GPUs, thousandths, and two times"),
        (PODS.splitlines()[0], "sn,gpu\nn0,2\n", "expected at least one pod with a GPU, found none"),
    ],
)
def test_a_bad_trace_of_alibabas_is_refused(openb, pods, nodes, sentence):
    (openb / "traces" / alibaba.PODS).write_text(pods)
    (openb / "traces" / alibaba.NODES).write_text(nodes)
    with pytest.raises(WorkloadError, match=sentence):
        alibaba.alibaba(openb, 0)


TRACE = "timestamp,duration,num_gpus\n2017-10-09 07:00:10,60,1\n2017-10-09 07:00:00,30,3\n"


def test_a_trace_is_sorted_which_is_said_and_large_jobs_become_gangs(data):
    path = data / "t.csv"
    path.write_text(TRACE)
    assert [one.at_s for one in read_trace(path).jobs] == [0.0, 10.0]
    (data / "c.yaml").write_text(f"nodes: [{{count: 2, product: {A100}, gpus: 2}}]")
    found = from_trace(data, path, read_cluster(data / "c.yaml"), 0)
    assert [(one.gpus, one.workers) for one in found.jobs] == [(2, 2), (1, 1)]
    assert found.notes == ["1 line came after a later one; all were sorted."]


def test_every_line_after_a_later_one_counts_not_only_the_first(data):
    """Regression: only lines earlier than the one directly before them counted."""
    path = data / "t.csv"
    path.write_text("timestamp,duration,num_gpus\n" + "".join(f"{at_s},1,1\n" for at_s in (9, 1, 2, 9, 3, 10)))
    assert read_trace(path).unsorted == 3


def test_times_without_a_zone_are_utc_wherever_it_runs(data, monkeypatch):
    """Regression: a change to summer time in the zone of whoever ran it moved jobs by an hour."""
    path = data / "t.csv"
    path.write_text("timestamp,duration,num_gpus\n2017-11-05 00:30:00,1,1\n2017-11-05T03:30:00+00:00,1,1\n")
    monkeypatch.setitem(os.environ, "TZ", "America/Los_Angeles")
    assert [one.at_s for one in read_trace(path).jobs] == [0.0, 10800.0]


def test_a_job_beyond_the_whole_cluster_is_counted_and_never_tried(data):
    path = data / "t.csv"
    path.write_text("timestamp,duration,num_gpus\n0,60,5\n1,60,1\n")
    (data / "c.yaml").write_text(f"nodes: [{{count: 2, product: {A100}, gpus: 2}}]")
    found = from_trace(data, path, read_cluster(data / "c.yaml"), 0)
    assert found.notes == ["Never placed: 1 job of more GPUs than the 4 that there are."]
    outcome = Simulation(found, replace(ALONE, in_order=True), NoSlowdown()).run()
    assert (outcome.unplaced, ends(outcome)) == (1, {"job-1": 61.0})


def test_jobs_that_no_gpu_of_the_cluster_holds_are_told_of(data):
    solo = data / "lucid" / "solo_rtx3090.csv"
    solo.write_text(solo.read_text().replace("2000", "20000"))
    (data / "t.csv").write_text(TRACE)
    (data / "c.yaml").write_text("nodes: [{count: 2, product: Tesla T4, gpus: 2}]")
    found = from_trace(data, data / "t.csv", read_cluster(data / "c.yaml"), 0)
    assert found.notes[1] == (
        "Die of memory until they are given up: 2 jobs that need more than the 15,104 MiB of any GPU."
    )
    found = replace(found, jobs=[replace(one, work_s=600.0) for one in found.jobs])
    outcome = Simulation(found, ALONE, NoSlowdown()).run()
    assert (outcome.unplaced, outcome.ooms, outcome.finished) == (2, 2 * DEATHS, [])


def test_predictions_are_for_the_commonest_product_and_it_is_said_of_the_others(data):
    (data / "t.csv").write_text("timestamp,duration,num_gpus\n0,60,1\n")
    (data / "c.yaml").write_text("nodes: [{count: 2, product: Tesla T4, gpus: 2}, {product: NVIDIA A10, gpus: 1}]")
    found = from_trace(data, data / "t.csv", read_cluster(data / "c.yaml"), 0)
    assert found.jobs[0].prediction.products[0].product == "Tesla T4"
    assert found.notes == ["Predictions are for Tesla T4; on NVIDIA A10 every job runs alone."]
    assert "Nodes: 2 of 2 Tesla T4, 1 of 1 NVIDIA A10" in found.assumptions[-2]


def test_strategies_that_predict_learn_from_a_trace_where_that_is_asked_for(data):
    (data / "t.csv").write_text("timestamp,duration,num_gpus\n0,60,1\n")
    (data / "c.yaml").write_text("nodes: [{product: Tesla T4, gpus: 1}]")
    nodes = read_cluster(data / "c.yaml")
    usual, learned = (from_trace(data, data / "t.csv", nodes, 0, is_learned=one) for one in (False, True))
    assert [one.learns for one in philly.learning(philly.STRATEGIES)] == [False, True]
    assert philly.UNLEARNED in usual.assumptions
    assert philly.LEARNED in learned.assumptions
    assert learned.jobs[0].asked is not None
    assert learned.jobs[0].truth.product == "Tesla T4", "what is learned is of the product that is asked about"


def run(data, *arguments):
    return CliRunner().invoke(simulate, ["--data", str(data), "--out", str(data / "out"), *arguments])


def test_the_command_writes_tables_and_pictures(data):
    (data / "t.csv").write_text(TRACE)
    (data / "c.yaml").write_text("nodes: [{product: NVIDIA GeForce RTX 3090, gpus: 4}]")
    files = ["--trace", str(data / "t.csv"), "--cluster", str(data / "c.yaml")]
    result = run(
        data, *files, "--seeds", "2", "--policy", "exclusive,energy", "--fragmentation", "0.05", "--most-jobs", "2"
    )
    assert result.exit_code == 0, result.output
    assert "1 line came after a later one" in result.output
    assert {path.name for path in (data / "out").iterdir()} >= {"trace.md", "trace.csv", "trace-cdf.png"}
    table = (data / "out" / "trace.md").read_text()
    assert "| strategy | makespan min | change | waiting min | change | completion min |" in table
    assert "| energy |" in table
    assert "Several tenants of a GPU lose 5% of its memory in pieces" in table
    assert "- Preconditions: at most 2 jobs on a GPU." in table


def test_a_trace_of_ones_own_is_run_once_unless_more_is_asked_for(data):
    (data / "t.csv").write_text(TRACE)
    result = run(data, "--trace", str(data / "t.csv"), "--policy", "exclusive")
    assert result.exit_code == 0, result.output
    assert "no chart of who ran where: there are more than 24 GPUs" in result.output
    text = (data / "out" / "trace.md").read_text()
    assert "One run, so that no spread is known; changes are against the first line." in text
    assert "±" not in text


@pytest.mark.parametrize(
    "lines", [["0,1e9,1"] * 300, ["0,10,1", "1e300,10,1"], ["0,10,1", "1e12,10,1"]], ids=["together", "apart", "late"]
)
def test_a_trace_beyond_the_calendar_is_refused_in_a_sentence(data, lines):
    """Regression: each line was looked at, but not what they come to together."""
    (data / "t.csv").write_text("\n".join(["timestamp,duration,num_gpus", *lines, ""]))
    (data / "c.yaml").write_text("nodes: [{product: NVIDIA GeForce RTX 3090, gpus: 1}]")
    files = ["--trace", str(data / "t.csv"), "--cluster", str(data / "c.yaml"), "--no-pictures"]
    result = run(data, *files, "--policy", "exclusive")
    assert result.exit_code == 2, result.output
    assert "expected a simulation to end before the year 10000" in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_table_shows_the_figures_that_it_is_asked_for(openb):
    outcome = Simulation(alibaba.full(openb, 0), ALONE, NoSlowdown()).run()
    line = Line(ALONE, [figures_of(outcome)])
    assert markdown([line], ["gpus_in_use", "unused_percent", "unplaced"])[0] == (
        "| strategy | GPUs in use | change | unused on these % | never placed |"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "expected either --workload or --trace, found neither"),
        (["--workload", "hotcloud", "--trace", "t.csv"], "expected either --workload or --trace, found both"),
        (["--workload", "hotcloud", "--policy", "energy", "--policies", "all"], "which mean the same, found both"),
        (["--trace", "/nowhere/t.csv"], "found no file; look at the path that --trace names"),
        (["--workload", "hotcloud", "--policy", "fast"], "policy 'fast' is unknown; choose one of"),
        (["--workload", "hotcloud", "--policies", "MAGM"], "most-available-memory (MAGM)"),
        (
            ["--workload", "hotcloud", "--policies", "all,energy"],
            "expected all alone, or names of policies, found all,e",
        ),
        (
            ["--workload", "hotcloud", "--policies", "energy, published"],
            "expected published alone, or names of policies",
        ),
        (
            ["--workload", "hotcloud", "--fragmentation", "nan"],
            "expected a --fragmentation from 0 to below 1, found nan",
        ),
        (["--trace", "/dev/null"], "found what is no regular file; look at the path that --trace names"),
        (["--workload", "hotcloud", "--cluster", "c.yaml"], "expected --cluster beside --trace only"),
        (
            ["--workload", "hotcloud", "--policies", "all", "--most-jobs", "0"],
            "expected 1 to 1,024 jobs on a GPU at most, found 0",
        ),
        (["--workload", "hotcloud", "--most-jobs", "2"], "have their own: at most 2 jobs on a GPU"),
        (["--workload", "hotcloud", "--data", "/nowhere"], "found no file; set CARPOOL_DATA"),
        (["--workload", "hotcloud", "--out", "/proc/nowhere"], "look at --out and --document"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(data, arguments, sentence):
    result = run(data, *arguments)
    assert result.exit_code == 2
    assert sentence in result.output


def test_what_philly_runs_as_the_default_differs_from_what_ships_only_in_learning_nothing():
    """Regression: it went by predictions of what runs, where Carpool goes by what is measured."""
    philly, hotcloud = (EXPERIMENTS[name] for name in ("philly", "hotcloud"))
    shipped = next(one for one in ours(hotcloud.mode) if one.name == DEFAULT)
    assert next(one for one in philly.published if one.name == DEFAULT) == replace(shipped, learns=False)
