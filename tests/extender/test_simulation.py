"""The simulator: truth from measured pairs, decisions from the extender, out-of-memory, gangs, bad input."""

from dataclasses import replace

import pytest
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, SharingMode
from carpool_extender.policies import POLICIES
from carpool_extender.simulation import document, results
from carpool_extender.simulation.alibaba import alibaba
from carpool_extender.simulation.command import simulate
from carpool_extender.simulation.contest import EXPERIMENTS, Figures, Line, contest, figures_of, named, ours
from carpool_extender.simulation.engine import OOM_AFTER_S, Simulation
from carpool_extender.simulation.failures import with_failures
from carpool_extender.simulation.knowing import exactly
from carpool_extender.simulation.pairs import MeasuredPairs
from carpool_extender.simulation.philly import from_trace, read_cluster
from carpool_extender.simulation.philly_times import read_trace
from carpool_extender.simulation.report import markdown
from carpool_extender.simulation.strategy import Knowledge, Strategy
from carpool_extender.simulation.trace_features import input_of
from carpool_extender.simulation.workload import Failure, SimJob, Truth, Workload, WorkloadError
from click.testing import CliRunner

A100 = "NVIDIA A100-SXM4-40GB"
SOLO = "model,dataset,batchsize,amp,speed,gpu_util,gmem_util,gmem,label\n" + "".join(
    f"{model},D,32,0,100,{util},10,2000,0\n"
    for model, util in (("ResNet18", 40), ("MobileNetV2", 60), ("EfficientNet", 20))
)
PAIRS = (
    "model1,dataset1,gpu_num1,batchsize1,amp1,speed1,model2,dataset2,gpu_num2,batchsize2,amp2,speed2,gpu_util,gmem_util,"
    "gmem\n" + 5 * "ResNet18,D,1,32,0,0.8,MobileNetV2,D,1,32,0,0.5,90,20,4000\n"
)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "lucid"
    folder.mkdir()
    (folder / "solo_rtx3090.csv").write_text(SOLO)
    (folder / "colocate_rtx3090.csv").write_text(PAIRS)
    return tmp_path


class NoSlowdown:
    def slowdowns(self, mode, tenants):
        return [1.0] * len(tenants)


class Halved:
    def slowdowns(self, mode, tenants):
        return [float(len(tenants))] * len(tenants)


def truth(memory_mib=1000, util=0.2, **changes):
    fields = {"kind": "k", "sm": util, "dram": 0.1, "product": A100}
    return Truth(memory_mib=memory_mib, util=util, **(fields | changes))


def job(name, work_s=100.0, arrival_s=0.0, of=None, **changes):
    of = of or truth(kind=name)
    return SimJob(name, arrival_s, work_s, 1, of, exactly(changes.pop("told", of), None), **changes)


def workload(*jobs, gpus=1, memory_mib=10_000):
    modes = [SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS]
    devices = [
        Device(uuid=GpuUuid(f"GPU-{i}"), index=i, product=A100, memory_mib=memory_mib, modes=modes) for i in range(gpus)
    ]
    return Workload("test", "test", jobs, {"n": devices}, ())


CARPOOL = Strategy("carpool", "least-slowdown", Knowledge.PREDICTED, max_slowdown=1.5)
ALONE = Strategy("alone", "exclusive", mode=SharingMode.EXCLUSIVE, in_order=True)


def ends(outcome):
    return {one.job.name: one.end_s for one in outcome.finished}


def test_jobs_share_where_it_costs_nothing_and_queue_where_gpus_are_whole():
    jobs = workload(job("a"), job("b", 50.0))
    assert ends(Simulation(jobs, CARPOOL, NoSlowdown()).run()) == {"a": 100.0, "b": 50.0}
    assert ends(Simulation(jobs, ALONE, NoSlowdown()).run()) == {"a": 100.0, "b": 150.0}


def test_the_truth_stretches_what_was_decided_without_it():
    outcome = Simulation(workload(job("a"), job("b", 50.0)), CARPOOL, Halved()).run()
    assert ends(outcome) == {"b": 100.0, "a": 150.0}
    found = figures_of(outcome)
    assert found.makespan_min == pytest.approx(2.5)
    assert found.utilization_percent == pytest.approx(100 * (100 * 0.2 + 50 * 0.2) / 150)


def test_a_job_beyond_its_limit_dies_is_raised_and_succeeds():
    small = truth(1000, kind="a")
    outcome = Simulation(workload(job("a", of=truth(1400, kind="a"), told=small)), CARPOOL, NoSlowdown()).run()
    assert outcome.ooms == 1
    assert ends(outcome) == {"a": OOM_AFTER_S + 100.0}


def test_whoever_allocates_last_dies_where_nothing_limits_memory_and_recovers_alone():
    blind = Strategy("blind", "round-robin")
    outcome = Simulation(workload(job("a", of=truth(6000)), job("b", of=truth(6000))), blind, NoSlowdown()).run()
    assert outcome.ooms == 1
    assert ends(outcome) == {"a": 100.0, "b": 200.0}


def test_a_gang_starts_together_on_different_gpus_or_waits():
    jobs = workload(job("a", 50.0), job("gang", workers=2), gpus=2)
    assert ends(Simulation(jobs, ALONE, NoSlowdown()).run()) == {"a": 50.0, "gang": 150.0}
    two = Simulation(workload(job("gang", workers=2), gpus=2), CARPOOL, NoSlowdown()).run()
    assert len(set(two.finished[0].gpus)) == 2
    assert Simulation(workload(job("gang", workers=3), gpus=2), CARPOOL, NoSlowdown()).run().unplaced == 1


def test_a_monitor_that_must_see_the_newcomer_keeps_others_out():
    waits = Strategy("waits", "most-available-memory", settle_s=90.0)
    outcome = Simulation(workload(job("a"), job("b")), waits, NoSlowdown()).run()
    assert ends(outcome) == {"a": 100.0, "b": 190.0}


def test_reactive_loses_the_minute_in_which_a_job_is_alone():
    reactive = Strategy("reactive", "first-fit", Knowledge.TRUTH, profile_s=60.0)
    outcome = Simulation(workload(job("a")), reactive, NoSlowdown()).run()
    assert ends(outcome) == {"a": 160.0}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_finishes_everything_and_repeats_itself(policy):
    jobs = workload(
        *(job(f"j{i}", 10.0 * (i + 1), 5.0 * i, truth(2000, 0.1 * (i % 5), kind=f"j{i}")) for i in range(12))
    )
    strategy = named(policy, SharingMode.MPS)[0]
    one, two = (Simulation(jobs, strategy, Halved(), seed=3).run() for _ in range(2))
    assert ends(one) == ends(two)
    assert len(one.finished) == 12
    assert one.ooms == one.unplaced == 0


def test_wrong_and_missing_predictions_change_what_is_decided(data):
    jobs = workload(*(job(f"j{i}") for i in range(4)))
    abstains = Strategy("x", "least-slowdown", Knowledge.PREDICTED, max_slowdown=1.5, abstain=True)
    assert figures_of(Simulation(jobs, abstains, NoSlowdown()).run()).makespan_min == pytest.approx(400 / 60)
    off = Strategy("x", "least-slowdown", Knowledge.PREDICTED, max_slowdown=1.5, error=1.0)
    assert len(Simulation(jobs, off, NoSlowdown(), seed=1).run().finished) == 4


def test_pairs_meet_their_own_measurement_and_nobody_exceeds_the_gpu(data):
    pairs = MeasuredPairs(data / "lucid")
    one, two = truth(util=0.4, kind="lucid/ResNet18/32/0"), truth(util=0.6, kind="lucid/MobileNetV2/32/0")
    assert pairs.slowdowns(SharingMode.TIME_SLICING, [one, two]) == pytest.approx([1.25, 2.0])
    assert pairs.slowdowns(SharingMode.EXCLUSIVE, [one, two]) == [1.0, 1.0]
    full = truth(util=1.0)
    found = pairs.slowdowns(SharingMode.MPS, [full, full, full])
    assert sum(1 / s for s in found) <= 1 + 1e-9


def test_a_gpu_that_fails_takes_its_jobs_with_it_and_comes_back():
    jobs = replace(workload(job("a"), job("b")), failures=[Failure(GpuUuid("GPU-0"), at_s=50.0, lasts_s=10.0)])
    outcome = Simulation(jobs, CARPOOL, NoSlowdown()).run()
    assert outcome.killed == 2
    assert outcome.ooms == 0
    assert ends(outcome) == {"a": 160.0, "b": 160.0}


def test_failures_overlap_without_reviving_a_gpu_too_early():
    failures = [Failure(GpuUuid("GPU-0"), 50.0, 100.0), Failure(GpuUuid("GPU-0"), 60.0, 10.0)]
    outcome = Simulation(replace(workload(job("a")), failures=failures), CARPOOL, NoSlowdown()).run()
    assert ends(outcome) == {"a": 250.0}


def test_failures_are_drawn_by_the_seed():
    jobs = workload(job("a", 36_000.0))
    assert with_failures(jobs, 1.0, 3).failures == with_failures(jobs, 1.0, 3).failures
    assert with_failures(jobs, 1.0, 3).failures != with_failures(jobs, 1.0, 4).failures
    assert "fails every 1 hours" in with_failures(jobs, 1.0, 3).assumptions[-1]


def test_what_ran_tells_of_the_next_of_its_kind():
    told = truth(1000, kind="k")
    jobs = workload(*(job(f"j{i}", 100.0, 200.0 * i, truth(1400, kind="k"), told=told) for i in range(3)))
    assert Simulation(jobs, CARPOOL, NoSlowdown()).run().ooms == 3
    assert Simulation(jobs, replace(CARPOOL, remembers=True), NoSlowdown()).run().ooms == 1


def test_what_ran_tells_how_far_other_bounds_are_exceeded():
    of = {name: truth(1400, kind=name) for name in "ab"}
    jobs = workload(*(job(n, 100.0, 300.0 * i, of[n], told=truth(1000)) for i, n in enumerate(of)))
    assert Simulation(jobs, replace(CARPOOL, remembers=True), NoSlowdown()).run().ooms == 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("radrm/Xception/ImageNet/64", ("3,299,299", 1000)),
        ("radrm/vgg16/ImageNet/64", ("3,224,224", 1000)),
        ("radrm/resnet18/cifar100/32", ("3,32,32", 100)),
        ("lucid/ResNet18/64/1", ("3,32,32", 10)),
    ],
)
def test_models_are_traced_on_the_samples_of_their_data(kind, expected):
    assert input_of(kind) == expected


PODS = """name,num_gpu,gpu_milli,creation_time,deletion_time
a,1,500,0,100
b,1,400,0,50
c,1,1000,10,30
d,0,0,10,30
"""


def test_fractions_of_alibaba_share_and_whole_gpus_do_not(data):
    (data / "traces").mkdir()
    (data / "traces" / "openb_pod_list_default.csv").write_text(PODS)
    (data / "traces" / "openb_node_list_gpu_node.csv").write_text("sn,gpu\nn0,2\n")
    found = alibaba(data, 0)
    assert [one.name for one in found.jobs] == ["a", "b", "c"]
    fractions = Simulation(found, EXPERIMENTS["alibaba"].published[1], NoSlowdown()).run()
    assert ends(fractions) == {"a": 100.0, "b": 50.0, "c": 30.0}
    whole = Simulation(found, EXPERIMENTS["alibaba"].published[0], NoSlowdown()).run()
    assert ends(whole)["c"] == 70.0
    (data / "traces" / "openb_node_list_gpu_node.csv").write_text("sn\nn0\n")
    with pytest.raises(WorkloadError, match="add gpu"):
        alibaba(data, 0)


def test_the_document_is_written_from_results_alone(tmp_path):
    def line(strategy, **figures):
        every = dict.fromkeys(("running_s", "killed", "unplaced"), 0.0) | figures
        return Line(strategy, [Figures(**every)])

    base = {"makespan_min": 100.0, "utilization_percent": 40.0, "completion_min": 50.0, "oom": 0.0, "energy_mj": 10.0}
    experiment = EXPERIMENTS["hotcloud"]
    carpool, *_, oracle, _ = ours(experiment.mode)
    lines = [
        line(experiment.published[0], **base),
        line(carpool, **(base | {"makespan_min": 60.0, "utilization_percent": 60.0, "oom": 2.0})),
        line(oracle, **(base | {"makespan_min": 50.0})),
    ]
    results.write(tmp_path, "hotcloud", workload(job("a")), lines)
    document.write(tmp_path, tmp_path / "experiments.md")
    text = (tmp_path / "experiments.md").read_text()
    assert "| HotCloud, makespan | -33.6% | -40.0% | -40.0% | yes |" in text
    assert "| HotCloud, mean utilization | +61.5% | +75.0% | +50.0% | **no** |" in text
    assert "| HotCloud, out of memory | 0 | 0 | 2.0 | **no** |" in text
    assert "| hotcloud | +20.0% |" in text
    assert "hotcloud, out of memory (2.0): slot-based (0.0)." in text
    (tmp_path / "hotcloud.json").write_text("{}")
    with pytest.raises(WorkloadError, match="expected results of this version"):
        document.write(tmp_path, tmp_path / "experiments.md")
    with pytest.raises(WorkloadError, match="found none; run"):
        document.write(tmp_path / "nowhere", tmp_path / "experiments.md")


def test_tables_tell_mean_spread_and_change(data, tmp_path):
    told = []
    lines = contest(lambda seed: workload(job("a"), job("b")), [ALONE, CARPOOL], 2, data, told.append)
    table = markdown(lines)
    assert table[2].startswith("| alone | 3.3 ± 0.0 |")
    assert table[3].startswith("| carpool | 3.3 ± 0.0 | +0.0% |")
    assert len(told) == 2
    results.write_csv(tmp_path / "x.csv", lines)
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 5


TRACE = "timestamp,duration,num_gpus\n2017-10-09 07:00:10,60,1\n2017-10-09 07:00:00,30,3\n"


def test_a_trace_is_sorted_and_large_jobs_become_gangs(data):
    path = data / "t.csv"
    path.write_text(TRACE)
    assert [one.at_s for one in read_trace(path)] == [0.0, 10.0]
    (data / "c.yaml").write_text(f"nodes: [{{count: 2, product: {A100}, gpus: 2}}]")
    nodes = read_cluster(data / "c.yaml")
    found = from_trace(data, path, nodes, 0)
    assert [(one.gpus, one.workers) for one in found.jobs] == [(2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "timestamp,duration\n1,2\n",
            "expected the columns timestamp, duration, num_gpus, found timestamp, duration; add",
        ),
        (
            "timestamp,duration,num_gpus\n1,-2,1\n",
            "line 2: expected a duration of 0 s or more on 1 GPU or more, found -2 s",
        ),
        ("timestamp,duration,num_gpus\nx,2,1\n", "line 2: expected a time, seconds and a number of GPUs"),
        ("timestamp,duration,num_gpus\n", "expected at least one job, found none"),
        (None, "found no file; set CARPOOL_DATA"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path, text, sentence):
    path = tmp_path / "t.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(WorkloadError, match=sentence):
        read_trace(path)


@pytest.mark.parametrize("text", ["nodes: [{product: Voodoo}]", "nodes: []", "gpus: 3", "nodes: ["])
def test_a_bad_cluster_file_shows_what_was_expected(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(WorkloadError, match="expected"):
        read_cluster(path)


def test_the_command_writes_tables_and_pictures(data):
    (data / "t.csv").write_text(TRACE)
    (data / "c.yaml").write_text("nodes: [{product: NVIDIA GeForce RTX 3090, gpus: 4}]")
    arguments = ["--trace", str(data / "t.csv"), "--cluster", str(data / "c.yaml"), "--data", str(data), "--seeds", "2"]
    result = CliRunner().invoke(simulate, [*arguments, "--out", str(data / "out"), "--policy", "exclusive,energy"])
    assert result.exit_code == 0, result.output
    assert {path.name for path in (data / "out").iterdir()} >= {"trace.md", "trace.csv", "trace-cdf.png"}
    assert "| energy |" in (data / "out" / "trace.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "expected either --workload or --trace, found both or neither"),
        (["--workload", "hotcloud", "--policy", "fast"], "policy 'fast' is unknown; choose one of"),
        (["--workload", "hotcloud", "--data", "/nowhere"], "found no file; set CARPOOL_DATA"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(data, arguments, sentence):
    result = CliRunner().invoke(simulate, ["--data", str(data), "--out", str(data / "out"), *arguments])
    assert result.exit_code == 1
    assert sentence in result.output
