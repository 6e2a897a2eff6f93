"""The simulator: truth from measured pairs, decisions from the extender, out-of-memory, gangs, bad input."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, SharingMode
from carpool_extender.policies import POLICIES
from carpool_extender.simulation import document, results
from carpool_extender.simulation.contest import (
    EXPERIMENTS,
    FIGURES,
    UNCOUNTED,
    Figures,
    Line,
    attributed,
    contest,
    figures_of,
    named,
    ours,
)
from carpool_extender.simulation.engine import DEATHS, OOM_AFTER_S, Simulation
from carpool_extender.simulation.failures import with_failures
from carpool_extender.simulation.features import job_of, prediction_of
from carpool_extender.simulation.pairs import MeasuredPairs
from carpool_extender.simulation.provenance import Provenance, commit_of
from carpool_extender.simulation.report import markdown
from carpool_extender.simulation.strategy import Knowledge, Strategy
from carpool_extender.simulation.trace_features import input_of
from carpool_extender.simulation.workload import Failure, SimJob, WorkloadError
from msgspec import structs
from simulated_world import A100, ALONE, CARPOOL, LEARNS, Halved, NoSlowdown, ends, job, truth, workload


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


def test_memory_in_pieces_kills_who_would_have_fitted_beside_others_and_nobody_alone():
    jobs = workload(job("a", of=truth(4900)), job("b", of=truth(4900)))
    assert Simulation(jobs, CARPOOL, NoSlowdown()).run().ooms == 0
    pieces = Simulation(replace(jobs, fragmented=0.05), CARPOOL, NoSlowdown()).run()
    assert pieces.ooms == 1
    assert len(pieces.finished) == 2
    alone = workload(job("a", of=truth(9900)))
    assert Simulation(replace(alone, fragmented=0.05), CARPOOL, NoSlowdown()).run().ooms == 0


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


@pytest.mark.parametrize(
    "hopeless",
    [job("gang", workers=3), replace(job("wide"), gpus=2)],
    ids=["too few GPUs", "too few on each node"],
)
def test_a_job_that_can_never_run_does_not_stretch_the_time_that_is_looked_at(hopeless):
    """Regression: failures after the last job's end counted as time in which the GPUs stood idle."""
    late = [Failure(GpuUuid("GPU-0"), at_s=1000.0, lasts_s=10.0)]
    jobs = workload(job("a", 10.0, of=truth(util=0.5)), hopeless, gpus=2)
    first, second = jobs.nodes["n"]
    jobs = replace(jobs, nodes={"n": [first], "m": [second]}, failures=late)
    for strategy in (CARPOOL, replace(CARPOOL, measure=True)):
        outcome = Simulation(jobs, strategy, NoSlowdown()).run()
        assert ends(outcome) == {"a": 10.0}
        assert outcome.unplaced == 1
        assert outcome.span_s == outcome.utilization[-1][0] == 10.0
        assert figures_of(outcome).utilization_percent == pytest.approx(25.0)


@pytest.mark.parametrize("strategy", [CARPOOL, LEARNS, ALONE, Strategy("blind", "round-robin")], ids=lambda s: s.name)
def test_a_job_that_needs_more_memory_than_any_gpu_has_dies_until_it_is_given_up(strategy):
    """Regression: it was tried again without end; then the engine dropped it by a truth that no strategy knows."""
    huge = job("huge", of=truth(10_001, kind="huge"), told=truth(1_000, kind="huge"))
    outcome = Simulation(workload(huge, job("a", 100.0, 1000.0)), strategy, NoSlowdown()).run()
    assert (outcome.unplaced, outcome.ooms, ends(outcome)) == (1, DEATHS, {"a": 1100.0})


@pytest.mark.parametrize(
    ("trusted", "ended"),
    [
        pytest.param(False, {"large": 100.0, "a": 200.0}, id="alone, as its median fits"),
        pytest.param(True, {"a": 100.0}, id="refused, as its median does not"),
    ],
)
@pytest.mark.parametrize("strategy", [CARPOOL, LEARNS], ids=lambda s: s.name)
def test_a_bound_beyond_the_gpu_is_the_predictors_and_placements_to_judge(strategy, trusted, ended):
    """Regression: here such a job ran alone in any case, while a cluster refused it where its median did not fit."""
    large = job("large", of=truth(9_000, kind="large"), told=truth(10_001, kind="large"))
    one = large.prediction.products[0]
    memory = structs.replace(one.memory, trusted=trusted)
    prediction = structs.replace(large.prediction, products=[structs.replace(one, memory=memory)])
    jobs = workload(replace(large, prediction=prediction), job("a", 100.0))
    outcome = Simulation(jobs, strategy, NoSlowdown()).run()
    assert (ends(outcome), outcome.ooms, outcome.unplaced) == (ended, 0, 2 - len(ended))


def test_an_oracle_never_tries_what_no_gpu_holds():
    oracle = replace(CARPOOL, knowledge=Knowledge.TRUTH)
    outcome = Simulation(workload(job("huge", of=truth(10_001)), job("a")), oracle, NoSlowdown()).run()
    assert (outcome.unplaced, outcome.ooms, ends(outcome)) == (1, 0, {"a": 100.0})


def test_a_job_that_only_ever_gets_a_gpu_too_small_for_it_is_given_up():
    """Regression: it was given the first GPU without end, though the other one was larger."""
    jobs = workload(job("large", 100.0, of=truth(9_000), told=truth(1_000)), gpus=2)
    first, second = jobs.nodes["n"]
    jobs = replace(jobs, nodes={"n": [structs.replace(first, memory_mib=5_000), second]})
    outcome = Simulation(jobs, replace(CARPOOL, policy="first-fit"), NoSlowdown()).run()
    assert (outcome.unplaced, outcome.ooms, ends(outcome)) == (1, DEATHS, {})
    assert outcome.span_s == DEATHS * OOM_AFTER_S


def test_failures_overlap_without_reviving_a_gpu_too_early():
    failures = [Failure(GpuUuid("GPU-0"), 50.0, 100.0), Failure(GpuUuid("GPU-0"), 60.0, 10.0)]
    outcome = Simulation(replace(workload(job("a")), failures=failures), CARPOOL, NoSlowdown()).run()
    assert ends(outcome) == {"a": 250.0}


def test_failures_are_drawn_by_the_seed():
    jobs = workload(job("a", 36_000.0))
    assert with_failures(jobs, 1.0, 3).failures == with_failures(jobs, 1.0, 3).failures
    assert with_failures(jobs, 1.0, 3).failures != with_failures(jobs, 1.0, 4).failures
    assert "fails every 1 hours" in with_failures(jobs, 1.0, 3).assumptions[-1]


RESNET = "radrm/resnet18/cifar100/64"


def traced(name, over=1.0, at_s=0.0, work_s=1000.0, kind=RESNET, product=A100, **changes):
    """A job whose features were traced, and which truly takes so many times the bound that is predicted."""
    prediction = prediction_of(kind, product)
    memory = round(over * prediction.products[0].memory.upper_mib)
    of = truth(memory, 0.1, kind=kind, model=kind.rpartition("/")[0], product=product)
    return SimJob(name, at_s, work_s, 1, of, prediction, asked=job_of(kind), **changes)


def test_what_ran_tells_of_the_next_of_its_kind():
    jobs = workload(*(traced(f"j{i}", 1.2, 2000.0 * i) for i in range(3)))
    assert Simulation(jobs, CARPOOL, NoSlowdown()).run().ooms == 3
    assert Simulation(jobs, LEARNS, NoSlowdown()).run().ooms == 1


def test_nothing_is_revealed_before_it_ran():
    """Both come at once: neither knows of the other; the third knows of both."""
    jobs = workload(traced("a", 1.2), traced("b", 1.2), traced("c", 1.2, 2000.0))
    assert Simulation(jobs, LEARNS, NoSlowdown()).run().ooms == 2


def test_jobs_run_alone_where_nothing_was_measured_until_some_were():
    names = ("resnet18", "resnet34", "efficientnet_b0", "mobilenetv3_small", "resnet18")
    kinds = [f"radrm/{name}/cifar100/32" for name in names]
    jobs = [traced(f"j{i}", 0.8, 200.0 * i, kind=kind, product="Tesla T4") for i, kind in enumerate(kinds)]
    at_work = replace(workload(*jobs), nodes=t4_nodes(4))
    shares = ends(Simulation(at_work, replace(LEARNS, strict=False), NoSlowdown()).run())
    assert shares == {f"j{i}": 200.0 * i + 1000.0 for i in range(5)}
    learned = Simulation(at_work, LEARNS, NoSlowdown()).run()
    assert ends(learned) == shares, "the last two share a GPU, because three jobs were measured by then"
    few = replace(at_work, nodes=t4_nodes(2), jobs=at_work.jobs[:3])
    assert ends(Simulation(few, LEARNS, NoSlowdown()).run())["j2"] == 2000.0, "nobody joins those that run alone"
    assert ends(Simulation(few, replace(LEARNS, strict=False), NoSlowdown()).run())["j2"] == 1400.0


def t4_nodes(gpus):
    modes = [SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS]
    return {
        "n": [
            Device(uuid=GpuUuid(f"GPU-{i}"), index=i, product="Tesla T4", memory_mib=15_360, modes=modes)
            for i in range(gpus)
        ]
    }


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


def test_the_document_is_written_from_results_alone(tmp_path):
    def line(strategy, **figures):
        every = dict.fromkeys(FIGURES, 0.0) | figures
        return Line(strategy, [Figures(**every)])

    base = {"makespan_min": 100.0, "utilization_percent": 40.0, "completion_min": 50.0, "oom": 0.0, "energy_mj": 10.0}
    experiment = EXPERIMENTS["hotcloud"]
    carpool, *_, oracle, _ = ours(experiment.mode)
    lines = [
        line(experiment.published[0], **base),
        line(carpool, **(base | {"makespan_min": 60.0, "utilization_percent": 60.0, "oom": 2.0})),
        line(oracle, **(base | {"makespan_min": 50.0})),
    ]
    then = Provenance(when="2026-01-31 12:00", version="1.0, commit abc")
    results.write(tmp_path, "hotcloud", workload(job("a")), lines, then)
    document.write(tmp_path, tmp_path / "experiments.md")
    text = (tmp_path / "experiments.md").read_text()
    assert "| HotCloud, makespan | -33.6% | -40.0% | -40.0% | yes |" in text
    assert "| HotCloud, mean utilization | +61.5% | +75.0% | +50.0% | **no** |" in text
    assert "| HotCloud, out of memory | 0 | 0 | 2.0 | **no** |" in text
    assert "| hotcloud | +20.0% |" in text
    told = [
        line(one, **(base | {"makespan_min": 60.0 - 6 * number}))
        for number, one in enumerate(attributed(experiment.mode))
    ]
    assert "Results of 2026-01-31 12:00, 1.0, commit abc." in text
    assert "not all of one version" not in text
    older = ["with true memory"]
    results.write(tmp_path, "hotcloud" + results.ATTRIBUTED, workload(job("a")), told, Provenance(), older)
    document.write(tmp_path, tmp_path / "experiments.md")
    text = (tmp_path / "experiments.md").read_text()
    assert "single pieces: true durations, the longest first -30.0%, true slowdowns -20.0%, true activity" in text
    assert "hotcloud, out of memory (2.0): slot-based (0.0)." in text
    assert "not all of one version" in text
    assert "| hotcloud-attribution | time not noted | version not noted |" in text
    assert "hotcloud, utilization" not in text
    assert text.count("Of an older version, and to be read with care: with true memory.") == 1
    (tmp_path / "hotcloud.json").write_text("{}")
    with pytest.raises(WorkloadError, match="expected results of this version"):
        document.write(tmp_path, tmp_path / "experiments.md")
    with pytest.raises(WorkloadError, match="found none; run"):
        document.write(tmp_path / "nowhere", tmp_path / "experiments.md")


def test_the_document_compares_seed_by_seed(tmp_path):
    default, *others = ours(EXPERIMENTS["hotcloud"].mode)
    uncounted = next(one for one in others if one.name == UNCOUNTED)

    def line(strategy, *makespans):
        return Line(strategy, [Figures(**(dict.fromkeys(FIGURES, 1.0) | {"makespan_min": m})) for m in makespans])

    lines = [line(default, 90.0, 170.0), line(uncounted, 100.0, 200.0)]
    results.write(tmp_path, "hotcloud", workload(job("a")), lines, Provenance())
    document.write(tmp_path, tmp_path / "experiments.md")
    assert "| hotcloud | -20.00 ± 10.00 | +0.00 ± 0.00 | +0.00 ± 0.00 |" in (tmp_path / "experiments.md").read_text()


def test_tables_tell_mean_spread_and_change(data, tmp_path):
    told = []
    lines = contest(lambda seed: workload(job("a"), job("b")), [ALONE, CARPOOL], 2, data, told.append)
    table = markdown(lines)
    assert table[2].startswith("| alone | 3.3 ± 0.0 |")
    assert table[3].startswith("| carpool | 3.3 ± 0.0 | +0.0% |")
    assert len(told) == 2
    results.write_csv(tmp_path / "x.csv", lines)
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 5


def test_a_commit_is_told_of_a_checkout_and_of_nothing_else(tmp_path):
    assert commit_of(tmp_path / "x.py") == ""
    assert commit_of(Path("/nowhere/x.py")) == ""
    git = shutil.which("git")
    if git is None:
        pytest.skip("there is no git here")
    for arguments in (["init", "-q"], ["add", "."]):
        (tmp_path / "x.py").write_text("")
        subprocess.run([git, *arguments], cwd=tmp_path, check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([git, *who, "commit", "-q", "-m", "x"], cwd=tmp_path, check=True)
    commit = commit_of(tmp_path / "x.py")
    assert len(commit) >= 7
    assert commit_of(tmp_path / "y.py") == "", "a file that it does not hold"
    (tmp_path / "x.py").write_text("1")
    assert commit_of(tmp_path / "x.py") == f"{commit}-dirty"
