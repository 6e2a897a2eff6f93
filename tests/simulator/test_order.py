"""The queue by predicted lengths, by the steps that jobs say they have: the longest first, or by turns."""

from dataclasses import replace

from carpool_extender.queue.order import WINDOW_S, QueueOrder
from carpool_simulator.engine import Simulation
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


def test_job_without_steps_counts_as_an_hour():
    jobs = [job("minutes", of=FULL, steps=300), job("unknown", of=FULL), job("day", of=FULL, steps=86_400)]
    assert order(*jobs) == ["day", "unknown", "minutes"]


def test_of_those_that_came_together_the_longest_and_the_shortest_take_turns():
    told = {"c": 3600, "a": 60, "e": DAY, "b": 600, "d": 10 * 3600}
    jobs = [job(name, of=FULL, steps=steps) for name, steps in told.items()]
    assert order(*jobs, strategy=BY_TURNS) == ["e", "a", "d", "b", "c"]
    apart = [job(one.name, of=truth(6000, kind=one.name), steps=one.steps) for one in jobs]
    assert order(*apart, strategy=BY_TURNS) == ["e", "a", "d", "b", "c"], "of kinds that are decided one by one, too"


def test_windows_of_arrival_are_served_one_after_the_other():
    jobs = [
        job("running", 2 * WINDOW_S, of=FULL, steps=60),
        job("short", of=FULL, arrival_s=1.0, steps=60),
        job("long", of=FULL, arrival_s=WINDOW_S - 1, steps=3600),
        job("later, short", of=FULL, arrival_s=WINDOW_S, steps=60),
        job("later, middling", of=FULL, arrival_s=WINDOW_S + 1, steps=3600),
        job("later, long", of=FULL, arrival_s=WINDOW_S + 2, steps=DAY),
    ]
    expected = ["running", "short", "long", "later, short", "later, long", "later, middling"]
    assert order(*jobs, strategy=BY_TURNS) == expected, "the end changes with everybody who starts"


def test_policies_that_start_with_the_largest_sort_the_queue_alone():
    jobs = [job(name, of=truth(6000, util), steps=steps) for name, util, steps in (("a", 0.2, DAY), ("b", 0.9, 10))]
    assert order(*jobs, strategy=replace(BY_TURNS, policy="first-fit-decreasing")) == ["b", "a"]
    assert order(*jobs, strategy=BY_TURNS) == ["a", "b"]
