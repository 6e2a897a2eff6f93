"""Jobs that run out of memory, and jobs that no GPU can hold."""

from dataclasses import replace

import pytest
from carpool_simulator.engine import DEATHS, LOADED_S, Simulation
from carpool_simulator.strategy import Knowledge, Strategy
from msgspec import structs
from simulated_world import ALONE, CARPOOL, LEARNS, NoSlowdown, ends, job, truth, workload


def test_a_job_beyond_its_limit_dies_is_raised_and_succeeds():
    small = truth(1000, kind="a")
    outcome = Simulation(workload(job("a", of=truth(1400, kind="a"), predicted=small)), CARPOOL, NoSlowdown()).run()
    assert outcome.ooms == 1
    assert ends(outcome) == {"a": LOADED_S + 100.0}


def test_last_to_allocate_dies_without_memory_limits_and_recovers_alone():
    blind = Strategy("blind", "round-robin")
    outcome = Simulation(workload(job("a", of=truth(6000)), job("b", of=truth(6000))), blind, NoSlowdown()).run()
    assert outcome.ooms == 1
    assert ends(outcome) == {"a": 100.0, "b": 200.0}


def test_fragmented_memory_kills_co_tenants_and_no_job_alone():
    jobs = workload(job("a", of=truth(4900)), job("b", of=truth(4900)))
    assert Simulation(jobs, CARPOOL, NoSlowdown()).run().ooms == 0
    pieces = Simulation(replace(jobs, fragmented=0.05), CARPOOL, NoSlowdown()).run()
    assert pieces.ooms == 1
    assert len(pieces.finished) == 2
    alone = workload(job("a", of=truth(9900)))
    assert Simulation(replace(alone, fragmented=0.05), CARPOOL, NoSlowdown()).run().ooms == 0


@pytest.mark.parametrize("strategy", [CARPOOL, LEARNS, ALONE, Strategy("blind", "round-robin")], ids=lambda s: s.name)
def test_a_job_that_needs_more_memory_than_any_gpu_has_dies_until_it_is_given_up(strategy):
    """Regression: it was tried again without end; then the engine dropped it by a truth that no strategy knows."""
    huge = job("huge", of=truth(10_001, kind="huge"), predicted=truth(1_000, kind="huge"))
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
    large = job("large", of=truth(9_000, kind="large"), predicted=truth(10_001, kind="large"))
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
    jobs = workload(job("large", 100.0, of=truth(9_000), predicted=truth(1_000)), gpus=2)
    first, second = jobs.nodes["n"]
    jobs = replace(jobs, nodes={"n": [structs.replace(first, memory_mib=5_000), second]})
    outcome = Simulation(jobs, replace(CARPOOL, policy="first-fit"), NoSlowdown()).run()
    assert (outcome.unplaced, outcome.ooms, ends(outcome)) == (1, DEATHS, {})
    assert outcome.span_s == DEATHS * LOADED_S
