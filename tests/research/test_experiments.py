"""Published workloads and their strategies: what is drawn, and what runs on it."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from carpool_core.durations import duration_bucket, duration_s
from carpool_core.values import SharingMode
from carpool_extender.framework.scores import POLICIES
from carpool_extender.queue.order import QueueOrder
from carpool_research.__main__ import main
from carpool_research.experiments import alibaba, document, hotcloud, radrm, runs
from carpool_research.experiments.radrm import fitted, spent, steps_of
from carpool_research.experiments.runs import EXPERIMENTS, Results, runs_of
from carpool_research.experiments.simulation import PublishedWorkload, extended
from carpool_research.experiments.trace_features import TRANSFORMERS
from carpool_research.slowdown import gavel
from carpool_simulator import philly
from carpool_simulator.engine import Simulation
from carpool_simulator.information import InformationModel, Stage
from carpool_simulator.power import Power, Spent
from carpool_simulator.profiles import job_of, step_times
from carpool_simulator.strategy import Strategy
from carpool_simulator.sweep import DEFAULT, FIGURES, LONGEST_FIRST, figures_of
from carpool_simulator.truth import MeasuredPairs, Pool, WorkloadError
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from simulated_world import Halved, NoSlowdown, ends, truth

HOTCLOUD = EXPERIMENTS["hotcloud"]
SMALL = document.SMALL
ALONE = Strategy("alone", "exclusive", measure=False)


def drawn(name, data, *cases):
    """Return the workload of an experiment as assumed, and those of other cases."""
    draws = {one.case: one.draw for one in runs_of(EXPERIMENTS[name])}
    return [draws[case](data, 1) for case in (runs.AS_ASSUMED, *cases)]


def test_hotclouds_jobs_come_evenly_and_are_the_same(published):
    before, after = drawn("hotcloud", published, "jobs come over 10 min")
    assert [one.arrival_s for one in after.jobs] == pytest.approx([600.0 * i / 99 for i in range(100)])
    assert [replace(one, arrival_s=0.0) for one in after.jobs] == list(before.jobs)


def test_rad_rms_tasks_keep_the_sms_more_or_less_busy_and_are_the_same_otherwise(published):
    scales = (0.75, 1.25, 1.5)
    before, *others = (one.jobs for one in drawn("radrm-90", published, *(f"SM activity × {s:g}" for s in scales)))
    for scale, after in zip(scales, others, strict=True):
        assert [one.truth.sm for one in after] == pytest.approx([min(1.0, scale * one.truth.sm) for one in before])
        assert [(one.name, one.arrival_s, one.work_s, one.prediction) for one in after] == [
            (one.name, one.arrival_s, one.work_s, one.prediction) for one in before
        ]


def test_memory_is_lost_in_pieces_in_every_experiment_and_jobs_are_the_same(published):
    shares = (0.05, 0.1)
    for name in SMALL:
        before, *others = drawn(name, published, *(f"{share:.0%} of shared memory fragmented" for share in shares))
        for share, after in zip(shares, others, strict=True):
            assert replace(after, fragmented=before.fragmented, assumptions=before.assumptions) == before
            assert after.fragmented == share


def test_rad_rms_tasks_may_lose_behind_mps_what_gavels_pairs_did(published):
    before, after = drawn("radrm-60", published, radrm.BEHIND_MPS)
    assert replace(after, behind_mps=None, assumptions=before.assumptions) == extended(before, PublishedWorkload)
    (changed,) = set(after.assumptions) - set(before.assumptions)
    assert changed == radrm.ASSUMED
    assert len(after.assumptions) == len(before.assumptions), "in the place of another"
    pool = after.behind_mps
    assert pool.busy.shape == (352, 2)
    assert pool.slowdowns.shape == (352,)
    assert ((pool.busy > 0) & (pool.busy <= 1)).all()
    assert pool.slowdowns.min() >= 1.0
    assert {job[0] for jobs in pool.jobs for job in jobs} == {"v100"}


def test_each_of_gavels_jobs_has_its_own_activity_and_slowdown(published):
    measured, pool = gavel.read(published), radrm.read(published)
    busy = gavel.busy_shares(measured, radrm.HIDING)
    known = [pair for pair in measured.pairs if pair.one in busy and pair.other in busy and pair.one[0] == "v100"]
    assert len(known) == 176
    number, pair = max(enumerate(known), key=lambda one: abs(busy[one[1].one] - busy[one[1].other]))
    one, other = busy[pair.one] ** 1.5, busy[pair.other] ** 1.5
    assert abs(one - other) > 0.5
    assert pool.jobs[2 * number] == (pair.one, pair.other)
    assert pool.busy[2 * number : 2 * number + 2].tolist() == [pytest.approx([one, other]), pytest.approx([other, one])]
    assert pool.slowdowns[2 * number : 2 * number + 2].tolist() == list(pair.slowdowns)


def test_a_simulated_job_is_the_same_measured_one_beside_all_others(published):
    """Measured jobs of equal activity: two suffer by 10%, one by 60%, beside any other."""
    suffers = {"calm": 1.1, "calm too": 1.1, "tender": 1.6}
    jobs = list(itertools.product(suffers, suffers))
    pool = Pool(np.full((len(jobs), 2), 0.3), np.array([suffers[mine] for mine, _ in jobs]), jobs)
    pairs = MeasuredPairs(published / "lucid", behind_mps=pool)
    kinds = "abcdefgh"
    found = {
        kind: {
            pairs.slowdowns(SharingMode.MPS, [truth(kind=kind, sm=0.3), truth(kind=its, sm=0.3)])[0] for its in kinds
        }
        for kind in kinds
    }
    assert all(len(slowdowns) == 1 for slowdowns in found.values())
    assert set.union(*found.values()) == {1.1, 1.6}


def test_only_mps_tenants_have_the_slowdowns_of_other_pairs(published):
    pool = Pool(np.array([[0.2, 0.7]] * 8 + [[0.7, 0.2]] * 8), np.array([1.25] * 8 + [1.75] * 8))
    lucids = MeasuredPairs(published / "lucid")
    pairs = MeasuredPairs(published / "lucid", behind_mps=pool)
    tenants = [truth(kind="a", util=0.2), truth(kind="b", util=0.7)]
    assert pairs.slowdowns(SharingMode.MPS, tenants) == [1.25, 1.75]
    assert lucids.slowdowns(SharingMode.MPS, tenants) != [1.25, 1.75]
    by_turns = [one.slowdowns(SharingMode.TIME_SLICING, tenants) for one in (pairs, lucids)]
    assert by_turns[0] == by_turns[1]


def test_steps_come_from_measured_step_times_and_lengths_from_predicted_ones(published):
    measured_s = step_times(published)
    jobs = hotcloud.hotcloud(published, 0).jobs
    assert [one.steps * measured_s[one.truth.kind] for one in jobs] == pytest.approx(
        [one.work_s for one in jobs], rel=0.02
    )
    predicted_s = {
        one.truth.kind: one.prediction.products[0].step_time_seconds.median for one in jobs if one.prediction
    }
    assert len(predicted_s) == 18
    assert all(1 < measured_s[kind] / step_s < 3.5 for kind, step_s in predicted_s.items())


@pytest.mark.parametrize(
    ("kind", "epochs", "steps"),
    [
        pytest.param("radrm/resnet50/ImageNet/128", 1, 10_010, id="the last batch is not full"),
        pytest.param("radrm/resnet18/cifar100/32", 20, 31_260, id="several epochs"),
        pytest.param("radrm/BERT_base/Wiki/32", 1, None, id="the size of the text is not published"),
    ],
)
def test_steps_of_rad_rm_come_from_the_sizes_of_datasets(kind, epochs, steps):
    assert steps_of(kind, epochs) == steps


WATTS = st.floats(min_value=1.0, max_value=900.0)


@given(
    asleep_w=WATTS,
    idle_w=WATTS,
    more_w=WATTS,
    minutes=st.floats(min_value=1, max_value=1e4),
    in_use=st.floats(0.0, 1.0),
    active=st.floats(0.0, 1.0),
)
def test_what_a_run_took_is_found_again_from_its_energy(asleep_w, idle_w, more_w, minutes, in_use, active):
    power, gpu_s = Power(asleep_w, idle_w, idle_w + more_w), 4 * 60 * minutes
    took = Spent(gpu_s, in_use * gpu_s, active * in_use * gpu_s)
    found = spent(took.energy_j(power) / 1e6, gpu_s, in_use * gpu_s, power)
    assert found[:2] == took[:2]
    assert math.isclose(found.active_s, took.active_s, rel_tol=1e-6, abs_tol=1e-6 * gpu_s)


@given(idle_w=WATTS, more_w=WATTS)
def test_power_is_fitted_to_energies(idle_w, more_w):
    true = Power(idle_w, idle_w, idle_w + more_w)
    runs = {
        "alone": Spent(1000.0, 1000.0, 500.0),
        "shared": Spent(600.0, 550.0, 480.0),
        "badly": Spent(900.0, 800.0, 700.0),
    }
    found = fitted(runs, {name: run.energy_j(true) / 1e6 for name, run in runs.items()})
    assert math.isclose(found.asleep_w, true.asleep_w, abs_tol=0.06)
    assert found.awake_w == found.asleep_w
    assert math.isclose(found.full_w, true.full_w, abs_tol=0.06)


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


def buckets(strategy, jobs):
    information = InformationModel(strategy, 8000)
    return [information.queued(one, Stage(), number).key().duration_bucket for number, one in enumerate(jobs)]


def test_every_strategy_under_carpools_queue_sorts_by_predicted_durations(published):
    """Regression: each step of a job counted as a second, so that the queue was sorted by the number of steps."""
    jobs = HOTCLOUD.draw(published, 0).jobs
    expected = [duration_bucket(duration_s(one.steps, one.prediction, lambda _: True)) for one in jobs]
    variants = {one.name: one for one in runs.variants(HOTCLOUD.default)}
    whole_gpus = runs.under_carpools_queue(HOTCLOUD.published[0])
    assert buckets(variants[LONGEST_FIRST], jobs) == buckets(whole_gpus, jobs) == expected
    assert len(set(expected)) > 5


@pytest.mark.parametrize("name", SMALL)
def test_published_strategies_run_under_their_own_queue_and_under_carpools(name):
    """Order and placement are credited apart: the second line differs in its queue alone."""
    own, ours = (
        [one.strategy for one in runs_of(EXPERIMENTS[name]) if one.group == group]
        for group in (runs.PUBLISHED, runs.QUEUE)
    )
    assert own == list(EXPERIMENTS[name].published)
    for one, other in zip(own, ours, strict=True):
        queue = {"in_order": False, "order": QueueOrder.ALTERNATE}
        placement = "first-fit" if one.policy == "first-fit-decreasing" else one.policy
        assert other == replace(one, policy=placement, **queue)
        assert not POLICIES[other.policy].decreasing


def test_what_philly_runs_as_the_default_differs_from_what_ships_only_in_learning_nothing():
    """Regression: it used predictions of running jobs, where Carpool uses what is measured."""
    assert philly.STRATEGIES[-1] == replace(HOTCLOUD.default, learns=False, learns_slowdowns=False)


def frame(changes, seeds=3):
    """Results in which every strategy takes as long as the baseline, but for named factors."""
    about = runs.About(title="t", jobs=1, seeds=seeds, assumptions=["One."], cpu_s=1.0, made=runs.Provenance())

    def rows(experiment):
        for one in runs_of(experiment):
            for seed in range(seeds):
                factor = changes.get((one.group, one.strategy.name), 1.0) * (1 + seed / 10)
                figures = dict.fromkeys(FIGURES, factor) | {"oom": 0.0, "gpus_in_use": 4.0, "energy_mj": 30 * factor}
                key = {"group": one.group, "case": one.case, "strategy": one.strategy.name, "seed": seed}
                yield {**key, **figures, "makespan_min": 600 * factor}

    return {name: Results(about, pd.DataFrame(rows(one))) for name, one in EXPERIMENTS.items()}


def test_the_document_is_written_from_results_alone_and_the_same_each_time(tmp_path):
    changes = {(runs.CARPOOL, DEFAULT): 0.5, (runs.QUEUE, "proactive"): 0.8}
    for name, results in frame(changes).items():
        results.write(tmp_path, name)
    texts = []
    arguments = ["experiments", "--data", "/nowhere", "--no-run", "--results", str(tmp_path)]
    for _ in range(2):
        result = CliRunner().invoke(main, [*arguments, "--document", str(tmp_path / "x.md")])
        assert result.exit_code == 0, result.output
        texts.append(((tmp_path / "x.md").read_text(), (tmp_path / "images" / "experiments.svg").read_bytes()))
    assert texts[0] == texts[1]
    text = texts[0][0]
    assert "|HotCloud, makespan|-33.6%|-40%|-50.0±0.0%|yes|" in text
    assert "|HotCloud, mean utilization|+61.5%|+75%|-50.0±0.0%|**no**|" in text
    assert "|proactive|+0.0±0.0%|-20.0±0.0%|" in text
    assert "$" not in text
    assert len(text.split()) < 4000


def test_incomplete_results_are_refused_with_what_is_missing(tmp_path):
    with pytest.raises(WorkloadError, match="expected results of hotcloud"):
        Results.read(tmp_path, "hotcloud")
    frame({})["hotcloud"].write(tmp_path, "hotcloud")
    path = tmp_path / "hotcloud.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(WorkloadError, match=r"hotcloud\.csv: expected 3 seeds of each strategy, found .*: 2"):
        Results.read(tmp_path, "hotcloud")


def test_changes_have_the_standard_error_of_a_ratio_of_means():
    change = document.Change(pd.Series([90.0, 110.0]), pd.Series([100.0, 100.0]))
    assert (change.mean, change.error) == (pytest.approx(0.0), pytest.approx(10.0))
    assert str(document.Change(pd.Series([50.0]), pd.Series([100.0]))) == "-50.0%"


def test_experiments_run_in_several_processes_with_the_same_results(published):
    one = replace(HOTCLOUD, published=HOTCLOUD.published[:1])
    heard = []
    found = [runs.run(one, published, (runs.QUEUE,), 1, workers, heard.append) for workers in (1, 2)]
    assert found[0].rows.equals(found[1].rows)
    assert found[0].rows["strategy"].tolist() == ["slot-based"] * 2
    assert len(heard) == 4


def test_unknown_experiments_and_missing_measurements_are_refused(tmp_path):
    for arguments, sentence in ((["--only", "x"], "as experiment, found x"), (["--only", "hotcloud"], "Lucid's")):
        result = CliRunner().invoke(
            main, ["experiments", "--data", str(tmp_path), "--results", str(tmp_path), *arguments]
        )
        assert result.exit_code == 2
        assert sentence in " ".join(result.output.split())


def test_kinds_are_predicted_at_the_batch_size_in_their_name() -> None:
    """Regression: the store answered for BERT-large with a batch of 16, so that no A100 could hold it."""
    for kind in TRANSFORMERS:
        found = job_of(kind)
        assert found is not None
        assert found.training.batch_size == int(kind.rpartition("/")[2])
