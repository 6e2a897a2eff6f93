"""Strategies whose predictions are wrong, missing, or replaced by the truth."""

from dataclasses import replace

import pytest
from carpool_core.durations import duration_bucket
from carpool_extender.testing import prediction
from carpool_research.experiments.ablations import AblatedInformation, Piece, ablate, simulate, steps_of
from carpool_simulator.information import Stage
from carpool_simulator.sweep import figures_of
from simulated_world import CARPOOL, NoSlowdown, ends, job, truth, workload


def test_true_memory_prevents_deaths_by_a_wrong_bound():
    small = truth(1000, kind="a")
    jobs = workload(job("a", of=truth(1400, kind="a"), predicted=small))
    outcome = simulate(jobs, ablate(CARPOOL, oracle=frozenset({Piece.MEMORY})), NoSlowdown())
    assert outcome.ooms == 0


def test_true_activity_replaces_prediction_and_measurement():
    """Both jobs are predicted to fill the GPU, wrongly."""
    idle, busy = truth(util=0.1, kind="a"), truth(util=1.0, kind="a")
    jobs = workload(*(job(f"j{i}", of=idle, predicted=busy) for i in range(2)))
    never = replace(CARPOOL, measure=False)
    assert max(ends(simulate(jobs, never, NoSlowdown())).values()) == 200.0
    exact = ablate(CARPOOL, oracle=frozenset({Piece.ACTIVITY}))
    assert set(ends(simulate(jobs, exact, NoSlowdown())).values()) == {100.0}


def test_true_slowdowns_decide_about_limits_and_placement():
    class Bad(NoSlowdown):
        """Jobs beside "bad" take four times as long; other jobs do not slow each other."""

        def slowdowns(self, mode, tenants):
            return [4.0 if len(tenants) > 1 and any(t.kind == "bad" for t in tenants) else 1.0] * len(tenants)

    exact = ablate(CARPOOL, oracle=frozenset({Piece.SLOWDOWNS}))
    jobs = [job("bad"), *(job(f"j{i}") for i in range(3))]
    assert set(ends(simulate(workload(*jobs, gpus=2), exact, Bad())).values()) == {100.0}
    apart = ends(simulate(workload(*jobs), exact, Bad()))
    assert apart == {"bad": 100.0, "j0": 200.0, "j1": 200.0, "j2": 200.0}
    assert max(ends(simulate(workload(*jobs), CARPOOL, Bad())).values()) > 200.0


def test_true_durations_start_the_longest_first():
    jobs = workload(*(job(f"j{i}", 100.0 * (i + 1), of=truth(util=1.0)) for i in range(3)))
    known = ablate(CARPOOL, oracle=frozenset({Piece.DURATIONS}))
    assert ends(simulate(jobs, CARPOOL, NoSlowdown())) == {"j0": 100.0, "j1": 300.0, "j2": 600.0}
    assert ends(simulate(jobs, known, NoSlowdown())) == {"j2": 300.0, "j1": 500.0, "j0": 600.0}


def test_wrong_and_missing_predictions_change_decisions():
    jobs = workload(*(job(f"j{i}") for i in range(4)))
    predicted = replace(CARPOOL, learns=False, settles=False)
    abstains = simulate(jobs, ablate(predicted, abstain=True), NoSlowdown())
    assert figures_of(abstains).makespan_min == pytest.approx(400 / 60)
    assert len(simulate(jobs, ablate(predicted, error=1.0), NoSlowdown(), seed=1).finished) == 4


def test_errors_keep_the_ratio_of_the_bounds():
    one = replace(job("a"), prediction=prediction(memory_mib=4080, unenforced_mib=5200))
    information = AblatedInformation(ablate(CARPOOL, error=0.1), 40960, seed=1)
    memory = information.pod_request(one, Stage()).demand.prediction.products[0].memory
    assert memory.upper_mib != 4080
    assert memory.upper_unenforced_mib == pytest.approx(memory.upper_mib * 5200 / 4080, rel=0.001)


def buckets(jobs, seed=0, **changes):
    strategy = ablate(CARPOOL, **changes)
    information = AblatedInformation(strategy, 8000, seed=seed)
    declared = [replace(one, steps=steps_of(one, strategy, seed)) for one in jobs]
    return [information.queued(one, Stage(), number).key().duration_bucket for number, one in enumerate(declared)]


def test_wrong_predictions_have_wrong_step_times():
    jobs = [job(f"j{i}", steps=3600) for i in range(200)]
    assert set(buckets(jobs)) == {duration_bucket(3600.0)}
    found = {error: buckets(jobs, error=error) for error in (0.1, 0.5)}
    small, large = (sum(abs(one - duration_bucket(3600.0)) for one in found[error]) for error in (0.1, 0.5))
    assert 0 < small < large


def test_a_share_of_the_jobs_declares_no_steps():
    jobs = [job(f"j{i}", steps=60) for i in range(400)]
    found = buckets(jobs, silent_share=0.5)
    assert set(found) == {duration_bucket(60.0), duration_bucket(None)}
    assert 160 < found.count(duration_bucket(None)) < 240
    assert found == buckets(jobs, silent_share=0.5)
    assert found != buckets(jobs, seed=1, silent_share=0.5)
    assert set(buckets(jobs, silent_share=1.0)) == {duration_bucket(None)}


def test_wrong_declared_steps_have_factors_around_one():
    jobs = [job(f"j{i}", steps=3600) for i in range(400)]
    found = sorted(buckets(jobs, steps_error=0.7))
    assert found == sorted(buckets(jobs, steps_error=0.7)) != sorted(buckets(jobs, seed=1, steps_error=0.7))
    assert found[200] == pytest.approx(duration_bucket(3600.0), abs=1)
    assert found[64] <= duration_bucket(3600.0) - 1 <= duration_bucket(3600.0) + 1 <= found[-64], (
        "one in six is off by a factor of two"
    )
    assert buckets([job("no steps")], steps_error=0.7) == [duration_bucket(None)]
    assert buckets([job("one step", steps=1)], steps_error=0.7) == [duration_bucket(1.0)], "at least one"
