"""The queue by predicted lengths, by the steps that jobs say they have: the longest first, or by turns."""

from dataclasses import replace

import pytest
from carpool_core.durations import duration_bucket
from carpool_extender.queue.order import QueueOrder
from carpool_simulator.engine import Simulation
from carpool_simulator.information import InformationModel, Stage
from carpool_simulator.strategy import Piece
from simulated_world import CARPOOL, NoSlowdown, job, truth, workload

FULL = truth(6000)
"""Two of them do not fit on one GPU."""
LONGEST_FIRST = replace(CARPOOL, order=QueueOrder.LONGEST_FIRST)
BY_TURNS = replace(CARPOOL, order=QueueOrder.ALTERNATE)
DAY = 86_400


def order(*jobs, strategy=LONGEST_FIRST):
    outcome = Simulation(workload(*jobs), strategy, NoSlowdown()).run()
    return [one.job.name for one in outcome.finished]


def test_of_those_that_wait_the_one_of_the_most_steps_starts_first_whatever_it_truly_takes():
    jobs = [
        job("running", 50.0, of=FULL, steps=1),
        job("short", 500.0, of=FULL, steps=1_000),
        job("long", 5.0, of=FULL, steps=1_000_000),
        job("middling", 50.0, of=FULL, steps=30_000),
    ]
    assert order(*jobs) == ["long", "middling", "short", "running"]
    assert order(*jobs, strategy=CARPOOL) == ["running", "short", "long", "middling"]


def test_of_those_that_came_together_the_longest_and_the_shortest_take_turns():
    told = {"c": 3600, "a": 60, "e": DAY, "b": 600, "d": 10 * 3600}
    jobs = [job(name, of=FULL, steps=steps) for name, steps in told.items()]
    assert order(*jobs, strategy=BY_TURNS) == ["e", "a", "d", "b", "c"]
    apart = [job(one.name, of=truth(6000, kind=one.name), steps=one.steps) for one in jobs]
    assert order(*apart, strategy=BY_TURNS) == ["e", "a", "d", "b", "c"], "of kinds that are decided one by one, too"


def test_true_durations_and_policies_that_start_with_the_largest_sort_the_queue_alone():
    jobs = [job("a", 10.0, of=FULL, steps=DAY), job("b", 30.0, of=FULL, steps=60), job("c", 20.0, of=FULL)]
    assert order(*jobs, strategy=replace(BY_TURNS, told=frozenset({Piece.DURATIONS}))) == ["b", "c", "a"]
    jobs = [job(name, of=truth(6000, util), steps=steps) for name, util, steps in (("a", 0.2, DAY), ("b", 0.9, 10))]
    assert order(*jobs, strategy=replace(BY_TURNS, policy="first-fit-decreasing")) == ["b", "a"]
    assert order(*jobs, strategy=BY_TURNS) == ["a", "b"]


def buckets(strategy, jobs, seed=0):
    information = InformationModel(strategy, 8000, seed)
    return [information.queued(one, Stage(), number).key().duration_bucket for number, one in enumerate(jobs)]


def test_predictions_that_are_off_have_wrong_step_times_too():
    jobs = [job(f"j{i}", steps=3600) for i in range(200)]
    assert set(buckets(BY_TURNS, jobs)) == {duration_bucket(3600.0)}
    found = {error: buckets(replace(BY_TURNS, error=error), jobs) for error in (0.1, 0.5)}
    small, large = (sum(abs(one - duration_bucket(3600.0)) for one in found[error]) for error in (0.1, 0.5))
    assert 0 < small < large


def test_a_share_of_the_jobs_says_no_steps_and_counts_as_an_hour():
    jobs = [job(f"j{i}", steps=60) for i in range(400)]
    found = buckets(replace(BY_TURNS, silent_share=0.5), jobs)
    assert set(found) == {duration_bucket(60.0), duration_bucket(None)}
    assert 160 < found.count(duration_bucket(None)) < 240
    assert found == buckets(replace(BY_TURNS, silent_share=0.5), jobs)
    assert found != buckets(replace(BY_TURNS, silent_share=0.5), jobs, seed=1)
    assert set(buckets(replace(BY_TURNS, silent_share=1.0), jobs)) == {duration_bucket(None)}


def test_steps_that_jobs_say_are_off_by_factors_around_one():
    jobs = [job(f"j{i}", steps=3600) for i in range(400)]
    off = replace(BY_TURNS, steps_error=0.7)
    found = sorted(buckets(off, jobs))
    assert found == sorted(buckets(off, jobs)) != sorted(buckets(off, jobs, seed=1))
    assert found[200] == pytest.approx(duration_bucket(3600.0), abs=1)
    assert found[64] <= duration_bucket(3600.0) - 1 <= duration_bucket(3600.0) + 1 <= found[-64], (
        "one in six is off by a factor of two"
    )
    assert buckets(off, [job("no steps")]) == [duration_bucket(None)]
    assert buckets(off, [job("one step", steps=1)]) == [duration_bucket(1.0)], "never none at all"
