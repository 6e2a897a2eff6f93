"""Queue orders in a simulation: longest first and alternate, by the lengths that declared steps give."""

from dataclasses import replace

from carpool_extender.queue.order import QueueOrder
from carpool_simulator.engine import Simulation
from simulated_world import CARPOOL, NoSlowdown, ends, job, truth, workload

FULL = truth(6000)
"""Two of them do not fit on one GPU."""
LONGEST_FIRST = replace(CARPOOL, order=QueueOrder.LONGEST_FIRST)
ALTERNATE = replace(CARPOOL, order=QueueOrder.ALTERNATE)
DAY = 86_400


def order(*jobs, strategy=LONGEST_FIRST):
    outcome = Simulation(workload(*jobs), strategy, NoSlowdown()).run()
    return [one.job.name for one in outcome.finished]


def test_longest_first_sorts_by_declared_steps_and_not_by_true_durations():
    """A job that declares no steps counts as an hour."""
    jobs = [
        job("running", 50.0, of=FULL, steps=1),
        job("short", 500.0, of=FULL, steps=1_000),
        job("long", 5.0, of=FULL, steps=1_000_000),
        job("unknown", 60.0, of=FULL),
        job("middling", 50.0, of=FULL, steps=30_000),
    ]
    assert order(*jobs) == ["long", "middling", "unknown", "short", "running"]
    assert order(*jobs, strategy=CARPOOL) == ["running", "short", "long", "unknown", "middling"]


def test_alternate_starts_the_longest_and_the_shortest_job_in_turn():
    steps_of = {"c": 3600, "a": 60, "e": DAY, "b": 600, "d": 10 * 3600}
    jobs = [job(name, of=FULL, steps=steps) for name, steps in steps_of.items()]
    assert order(*jobs, strategy=ALTERNATE) == ["e", "a", "d", "b", "c"]
    apart = [job(one.name, of=truth(6000, kind=one.name), steps=one.steps) for one in jobs]
    assert order(*apart, strategy=ALTERNATE) == ["e", "a", "d", "b", "c"], "also for jobs of different shapes"


def test_decreasing_policies_ignore_the_queue_order():
    jobs = [job(name, of=truth(6000, util), steps=steps) for name, util, steps in (("a", 0.2, DAY), ("b", 0.9, 10))]
    assert order(*jobs, strategy=replace(ALTERNATE, policy="first-fit-decreasing")) == ["b", "a"]
    assert order(*jobs, strategy=ALTERNATE) == ["a", "b"]


def test_backfill_uses_the_end_by_the_measured_step_time():
    """It is predicted to end after 2,000 s: a job that ends after 1,100 s would delay no other then."""
    large = {"of": truth(9000, kind="large")}
    wide = replace(job("wide", 100.0, 1.0, steps=100, **large), gpus=2)
    jobs = [
        job("first", 1000.0, steps=2000, **large),
        job("other", 300.0, steps=300, **large),
        wide,
        job("late", 700.0, 400.0, steps=700, **large),
    ]
    for measure, expected in ((True, {"wide": 1100, "late": 1800}), (False, {"wide": 1200, "late": 1100})):
        outcome = Simulation(workload(*jobs, gpus=2), replace(CARPOOL, measure=measure), NoSlowdown()).run()
        assert ends(outcome) == {"first": 1000, "other": 300, **expected}
