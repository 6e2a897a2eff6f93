"""Strategies that are told a piece of the truth, or whose assumptions are otherwise."""

from dataclasses import replace

from carpool_simulator.engine import Simulation
from carpool_simulator.strategy import Piece
from simulated_world import CARPOOL, NoSlowdown, ends, job, truth, workload


def test_the_truth_about_memory_prevents_what_a_wrong_bound_causes():
    small = truth(1000, kind="a")
    jobs = workload(job("a", of=truth(1400, kind="a"), told=small))
    outcome = Simulation(jobs, replace(CARPOOL, told=frozenset({Piece.MEMORY})), NoSlowdown()).run()
    assert outcome.ooms == 0


def test_the_truth_about_activity_takes_the_place_of_prediction_and_measure():
    """Both are predicted to fill the GPU, which they do not."""
    idle, busy = truth(util=0.1, kind="a"), truth(util=1.0, kind="a")
    jobs = workload(*(job(f"j{i}", of=idle, told=busy) for i in range(2)))
    never = replace(CARPOOL, measure=False)
    assert max(ends(Simulation(jobs, never, NoSlowdown()).run()).values()) == 200.0
    told = replace(CARPOOL, told=frozenset({Piece.ACTIVITY}))
    assert set(ends(Simulation(jobs, told, NoSlowdown()).run()).values()) == {100.0}


def test_the_truth_about_slowdowns_keeps_limits_and_finds_the_gpu_where_least_is_lost():
    class Bad(NoSlowdown):
        """Whoever is beside "bad" takes four times as long; the others do not notice each other."""

        def slowdowns(self, mode, tenants):
            return [4.0 if len(tenants) > 1 and any(t.kind == "bad" for t in tenants) else 1.0] * len(tenants)

    told = replace(CARPOOL, told=frozenset({Piece.SLOWDOWNS}))
    jobs = [job("bad"), *(job(f"j{i}") for i in range(3))]
    assert set(ends(Simulation(workload(*jobs, gpus=2), told, Bad()).run()).values()) == {100.0}
    apart = ends(Simulation(workload(*jobs), told, Bad()).run())
    assert apart == {"bad": 100.0, "j0": 200.0, "j1": 200.0, "j2": 200.0}
    assert max(ends(Simulation(workload(*jobs), CARPOOL, Bad()).run()).values()) > 200.0


def test_the_truth_about_durations_puts_the_longest_first():
    jobs = workload(*(job(f"j{i}", 100.0 * (i + 1), of=truth(util=1.0)) for i in range(3)))
    known = replace(CARPOOL, told=frozenset({Piece.DURATIONS}))
    assert ends(Simulation(jobs, CARPOOL, NoSlowdown()).run()) == {"j0": 100.0, "j1": 300.0, "j2": 600.0}
    assert ends(Simulation(jobs, known, NoSlowdown()).run()) == {"j2": 300.0, "j1": 500.0, "j0": 600.0}


def test_job_of_another_mode_waits_for_the_change_once():
    slow = replace(CARPOOL, mode_change_s=7.0)
    jobs = workload(job("a"), job("b", arrival_s=10.0), job("c", arrival_s=500.0))
    assert ends(Simulation(jobs, slow, NoSlowdown()).run()) == {"a": 107.0, "b": 110.0, "c": 600.0}
