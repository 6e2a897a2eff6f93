"""Published strategies and what may happen on their clusters: monitors, first runs alone, estimators, failing GPUs."""

from dataclasses import replace

import pytest
from carpool_core.values import GpuUuid
from carpool_research.experiments.simulation import (
    Estimate,
    EstimatedJob,
    Failure,
    PublishedSimulation,
    PublishedStrategy,
    PublishedWorkload,
    extended,
)
from carpool_simulator.strategy import Knowledge
from carpool_simulator.sweep import figures_of
from simulated_world import CARPOOL, NoSlowdown, ends, job, truth, workload


def failing(jobs, failures):
    return extended(jobs, PublishedWorkload, failures=failures)


def test_a_gpu_that_fails_takes_its_jobs_with_it_and_comes_back():
    failures = [Failure(GpuUuid("GPU-0"), at_s=50.0, lasts_s=10.0)]
    simulation = PublishedSimulation(failing(workload(job("a"), job("b")), failures), CARPOOL, NoSlowdown())
    outcome = simulation.run()
    assert simulation.killed == 2
    assert outcome.ooms == 0
    assert ends(outcome) == {"a": 160.0, "b": 160.0}


@pytest.mark.parametrize(
    "hopeless", [job("gang", workers=3), replace(job("wide"), gpus=2)], ids=["too few GPUs", "too few on each node"]
)
def test_a_job_that_can_never_run_does_not_stretch_the_time_that_is_looked_at(hopeless):
    """Regression: failures after the last job's end counted as time in which the GPUs stood idle."""
    late = [Failure(GpuUuid("GPU-0"), at_s=1000.0, lasts_s=10.0)]
    jobs = workload(job("a", 10.0, of=truth(util=0.5)), hopeless, gpus=2)
    first, second = jobs.nodes["n"]
    jobs = failing(replace(jobs, nodes={"n": [first], "m": [second]}), late)
    for strategy in (CARPOOL, replace(CARPOOL, measure=True)):
        outcome = PublishedSimulation(jobs, strategy, NoSlowdown()).run()
        assert ends(outcome) == {"a": 10.0}
        assert outcome.unplaced == 1
        assert outcome.span_s == outcome.utilization[-1][0] == 10.0
        assert figures_of(outcome).utilization_percent == pytest.approx(25.0)


def test_failures_overlap_without_reviving_a_gpu_too_early():
    failures = [Failure(GpuUuid("GPU-0"), 50.0, 100.0), Failure(GpuUuid("GPU-0"), 60.0, 10.0)]
    outcome = PublishedSimulation(failing(workload(job("a")), failures), CARPOOL, NoSlowdown()).run()
    assert ends(outcome) == {"a": 250.0}


@pytest.mark.parametrize(
    ("memory_mib", "ooms"),
    [
        pytest.param(1000, 1, id="too little: both share, and the second dies"),
        pytest.param(5000, 0, id="no limit: what counts for a choice is not enforced, and monitors see the first"),
        pytest.param(9000, 0, id="enough: the second waits"),
        pytest.param(90_000, 0, id="more than any GPU has: the whole GPU"),
    ],
)
def test_an_estimate_decides_which_gpu_a_job_gets(memory_mib, ooms):
    blind = PublishedStrategy("e", "most-available-memory", in_order=True, measure=False, estimator="e")
    estimates = {"e": Estimate(memory_mib)}
    jobs = [extended(job(name, of=truth(5500, kind=name)), EstimatedJob, estimates=estimates) for name in "ab"]
    found = PublishedSimulation(workload(*jobs), blind, NoSlowdown()).run()
    assert (found.ooms, len(found.finished)) == (ooms, 2)


def test_a_monitor_that_must_see_the_newcomer_keeps_others_out():
    waits = PublishedStrategy("waits", "most-available-memory", settle_s=90.0)
    outcome = PublishedSimulation(workload(job("a"), job("b")), waits, NoSlowdown()).run()
    assert ends(outcome) == {"a": 100.0, "b": 190.0}


def test_reactive_loses_the_minute_in_which_a_job_is_alone():
    reactive = PublishedStrategy("reactive", "first-fit", Knowledge.TRUTH, profile_s=60.0)
    outcome = PublishedSimulation(workload(job("a")), reactive, NoSlowdown()).run()
    assert ends(outcome) == {"a": 160.0}


def test_change_of_mode_delays_the_first_job_of_the_mode():
    slow = extended(CARPOOL, PublishedStrategy, mode_change_s=7.0)
    jobs = workload(job("a"), job("b", arrival_s=10.0), job("c", arrival_s=500.0))
    assert ends(PublishedSimulation(jobs, slow, NoSlowdown()).run()) == {"a": 107.0, "b": 110.0, "c": 600.0}
