"""Traces of others in the simulator: what is read, and that they run to their end."""

import os
from dataclasses import replace

import pytest
from carpool_extender.framework.filters import AdmissionLimits
from carpool_extender.framework.scores import POLICIES
from carpool_simulator import philly, report
from carpool_simulator.commands import simulate
from carpool_simulator.engine import DEATHS, Simulation
from carpool_simulator.philly import from_trace, read_cluster, read_trace
from carpool_simulator.progress import Provenance
from carpool_simulator.strategy import Strategy
from carpool_simulator.sweep import named, sweep
from click.testing import CliRunner
from simulated_world import ALONE as ALONE_IN_ORDER
from simulated_world import CARPOOL, NoSlowdown, ends, job, truth, workload

A100 = "NVIDIA A100-SXM4-40GB"
ALONE = Strategy("alone", "exclusive", measure=False)


HEAD = "timestamp,duration,num_gpus\n"
TRACE = f"{HEAD}2017-10-09 07:00:10,60,1\n2017-10-09 07:00:00,30,3\n"


def loaded(data, lines, nodes, **options):
    """The workload of a trace with these lines, on a cluster of these nodes."""
    (data / "t.csv").write_text(lines)
    (data / "c.yaml").write_text(f"nodes: [{nodes}]")
    return from_trace(data, data / "t.csv", read_cluster(data / "c.yaml"), 0, **options)


def test_a_trace_is_sorted_which_is_said_and_large_jobs_become_gangs(data):
    found = loaded(data, TRACE, f"{{count: 2, product: {A100}, gpus: 2}}")
    assert [one.at_s for one in read_trace(data / "t.csv").jobs] == [0.0, 10.0]
    assert [(one.gpus, one.workers) for one in found.jobs] == [(2, 2), (1, 1)]
    assert found.notes == ["1 line came after a later one; all were sorted."]
    (data / "t.csv").write_text(HEAD + "".join(f"{at_s},1,1\n" for at_s in (9, 1, 2, 9, 3, 10)))
    assert read_trace(data / "t.csv").unsorted == 3, "not only lines earlier than the one directly before them"


def test_times_without_a_zone_are_utc_wherever_it_runs(data, monkeypatch):
    """Regression: a change to summer time in the zone of the machine that ran it moved jobs by an hour."""
    path = data / "t.csv"
    path.write_text("timestamp,duration,num_gpus\n2017-11-05 00:30:00,1,1\n2017-11-05T03:30:00+00:00,1,1\n")
    monkeypatch.setitem(os.environ, "TZ", "America/Los_Angeles")
    assert [one.at_s for one in read_trace(path).jobs] == [0.0, 10800.0]


def test_a_job_beyond_the_whole_cluster_is_counted_and_never_tried(data):
    found = loaded(data, f"{HEAD}0,60,5\n1,60,1\n", f"{{count: 2, product: {A100}, gpus: 2}}")
    assert found.notes == ["Never placed: 1 job of more GPUs than the 4 that there are."]
    outcome = Simulation(found, replace(ALONE, in_order=True), NoSlowdown()).run()
    assert (outcome.unplaced, ends(outcome)) == (1, {"job-1": 61.0})


def test_jobs_that_no_gpu_of_the_cluster_holds_are_counted(data):
    solo = data / "lucid" / "solo_rtx3090.csv"
    solo.write_text(solo.read_text().replace("2000", "20000"))
    found = loaded(data, TRACE, "{count: 2, product: Tesla T4, gpus: 2}")
    assert found.notes[1] == ("Out of memory until abandoned: 2 jobs that need more than the 15,104 MiB of any GPU.")
    found = replace(found, jobs=[replace(one, work_s=600.0) for one in found.jobs])
    outcome = Simulation(found, ALONE, NoSlowdown()).run()
    assert (outcome.unplaced, outcome.ooms, outcome.finished) == (2, 2 * DEATHS, [])


def test_predictions_are_for_the_commonest_product_and_it_is_said_of_the_others(data):
    nodes = "{count: 2, product: Tesla T4, gpus: 2}, {product: NVIDIA A10, gpus: 1}"
    found = loaded(data, f"{HEAD}0,60,1\n", nodes)
    assert found.jobs[0].prediction.products[0].product == "Tesla T4"
    assert found.notes == ["Predictions are for Tesla T4; on NVIDIA A10 every job runs alone."]
    assert "Nodes: 2 of 2 Tesla T4, 1 of 1 NVIDIA A10" in found.assumptions[-2]


def test_strategies_that_predict_learn_from_a_trace_where_that_is_asked_for(data):
    nodes = "{product: Tesla T4, gpus: 1}"
    usual, learned = (loaded(data, f"{HEAD}0,60,1\n", nodes, is_learned=one) for one in (False, True))
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
    assert "GPUs with several tenants lose 5% of their memory to fragmentation" in table
    assert "- Conditions: jobs on a GPU ≤ 2." in table


def test_own_trace_is_run_once_by_default(data):
    (data / "t.csv").write_text(TRACE)
    result = run(data, "--trace", str(data / "t.csv"), "--policy", "exclusive")
    assert result.exit_code == 0, result.output
    assert "no Gantt chart: there are more than 24 GPUs" in result.output
    text = (data / "out" / "trace.md").read_text()
    assert "One run, so the spread is unknown; changes are against the first line." in text
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


REFUSED = [
    ([], 2, "Missing option '--trace'"),
    (["--trace", "/nowhere/t.csv"], 2, "found: No such file or directory; check the path of --trace"),
    (["--policy", "fast"], 2, "policy 'fast' is unknown; choose one of"),
    (["--policies", "MAGM"], 2, "most-available-memory (MAGM)"),
    (["--policies", "all,energy"], 2, "expected all alone, or names of policies, found all,e"),
    (["--policies", "energy, published"], 2, "expected published alone, or names of policies"),
    (["--fragmentation", "nan"], 2, "expected a --fragmentation from 0 to below 1, found nan"),
    (["--policies", "all", "--most-jobs", "0"], 2, "expected 1 to 1,024 jobs on a GPU at most, found 0"),
    (["--most-jobs", "2"], 2, "have their own: jobs on a GPU ≤ 2"),
    (["--data", "/nowhere"], 2, "found no file; set CARPOOL_DATA"),
    (["--out", "/proc/nowhere"], 2, "check --out"),
]


@pytest.mark.parametrize(("arguments", "code", "sentence"), REFUSED)
def test_the_command_refuses_what_it_cannot_do(data, arguments, code, sentence):
    (data / "t.csv").write_text(TRACE)
    trace = [] if "--trace" in arguments or not arguments else ["--trace", str(data / "t.csv")]
    result = run(data, *trace, *arguments)
    assert result.exit_code == code
    assert sentence in " ".join(result.output.split())


def test_tables_show_mean_spread_and_change(data, tmp_path):
    heard = []
    results = sweep(lambda seed: workload(job("a"), job("b")), [ALONE_IN_ORDER, CARPOOL], 2, data, heard.append)
    table = report.markdown(results)
    assert table[0].startswith("| strategy | makespan min | change | utilization % | change |")
    assert "| slowed beyond 1.5 times, % of jobs |" in table[0]
    assert table[2].startswith("| alone | 3.3 ± 0.0 |")
    assert table[3].startswith("| carpool | 3.3 ± 0.0 | +0.0% |")
    assert len(heard) == 2
    report.write(tmp_path, "x", workload(job("a")), results, Provenance())
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 5
    assert (
        report.markdown(results, ["gpus_in_use", "unplaced"])[0] == "| strategy | GPUs in use | change | never placed |"
    )


def test_progress_of_each_run_and_a_summary_of_each_strategy_are_reported(data):
    messages, watched = [], []
    jobs = workload(*(job(f"j{i}", of=truth(util=0.9, kind="lucid/ResNet18/32/0")) for i in range(4)))
    lines = [ALONE_IN_ORDER, replace(CARPOOL, max_slowdown=9.0)]
    sweep(lambda _: jobs, lines, 2, data, messages.append, watched.append)
    assert watched[:4] == [f"alone, run 1 of 2: {done}%" for done in (25, 50, 75, 100)]
    assert watched[-1] == "carpool, run 2 of 2: 100%"
    assert messages[0].endswith("0.0 OOM")
    assert messages[1].endswith("0.0 OOM, 100% slowed beyond 1.5")


def test_policies_by_name_use_what_carpool_knows_and_whole_gpus_come_first():
    """Regression: they learned and measured nothing, so that of HotCloud's jobs a third died under the default."""
    by_name = {one.name: one for one in named("all", CARPOOL)}
    assert next(iter(by_name)) == "exclusive"
    assert by_name.keys() == POLICIES.keys()
    assert replace(by_name[CARPOOL.policy], name=CARPOOL.name) == CARPOOL
    asked = AdmissionLimits(max_jobs=2)
    assert [(one.policy, one.conditions) for one in named("energy, best-fit,energy", CARPOOL, asked)] == [
        ("energy", asked),
        ("best-fit", asked),
    ]
