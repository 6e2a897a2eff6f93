"""Places and times: truth from measured pairs, decisions from the extender, gangs, monitors, every policy."""

from dataclasses import replace

import pytest
from carpool_core.values import SharingMode
from carpool_extender.framework.filters import AdmissionLimits
from carpool_extender.framework.scores import POLICIES
from carpool_simulator.engine import Simulation
from carpool_simulator.sweep import figures_of, named
from carpool_simulator.truth import MeasuredPairs
from simulated_world import ALONE, CARPOOL, Halved, NoSlowdown, ends, job, truth, workload


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


def test_a_gang_starts_together_on_different_gpus_or_waits():
    jobs = workload(job("a", 50.0), job("gang", workers=2), gpus=2)
    assert ends(Simulation(jobs, ALONE, NoSlowdown()).run()) == {"a": 50.0, "gang": 150.0}
    two = Simulation(workload(job("gang", workers=2), gpus=2), CARPOOL, NoSlowdown()).run()
    assert len(set(two.finished[0].gpus)) == 2
    assert Simulation(workload(job("gang", workers=3), gpus=2), CARPOOL, NoSlowdown()).run().unplaced == 1


def test_a_job_of_several_gpus_is_as_slow_as_on_the_slowest():
    wide, beside = replace(job("wide"), gpus=2), job("beside", 1000.0)
    outcome = Simulation(workload(wide, beside, gpus=2), replace(CARPOOL, max_slowdown=9.0), Halved()).run()
    assert ends(outcome)["wide"] == 200.0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_finishes_everything_and_repeats_itself(policy):
    jobs = workload(
        *(job(f"j{i}", 10.0 * (i + 1), 5.0 * i, truth(2000, 0.1 * (i % 5), kind=f"j{i}")) for i in range(12))
    )
    (strategy,) = named(policy, CARPOOL)
    one, two = (Simulation(jobs, strategy, Halved()).run() for _ in range(2))
    assert ends(one) == ends(two)
    assert len(one.finished) == 12
    assert one.ooms == one.unplaced == 0


def test_a_precondition_holds_in_a_simulation_too():
    jobs = workload(job("a"), job("b"))
    (strategy,) = named("least-slowdown", CARPOOL, AdmissionLimits(max_jobs=1))
    assert ends(Simulation(jobs, strategy, NoSlowdown()).run()) == {"a": 100.0, "b": 200.0}


def test_pairs_have_their_measured_slowdowns_and_no_gpu_is_exceeded(data):
    pairs = MeasuredPairs(data / "lucid")
    one, two = truth(util=0.4, kind="lucid/ResNet18/32/0"), truth(util=0.6, kind="lucid/MobileNetV2/32/0")
    assert pairs.slowdowns(SharingMode.TIME_SLICING, [one, two]) == pytest.approx([1.25, 2.0])
    assert pairs.slowdowns(SharingMode.EXCLUSIVE, [one, two]) == [1.0, 1.0]
    busy = truth(util=0.9, kind="lucid/ResNet18/32/0"), truth(util=0.9, kind="lucid/MobileNetV2/32/0")
    assert pairs.slowdowns(SharingMode.TIME_SLICING, busy) == pytest.approx([1.25, 2.0])  # 117% by busy shares
    idle = truth(util=0.0, kind="idle")
    of_three = pairs.slowdowns(SharingMode.TIME_SLICING, [*busy, idle])
    assert sum(one.util / s for one, s in zip(busy, of_three, strict=False)) <= 0.9 / 1.25 + 0.9 / 2.0 + 1e-9
    full = truth(util=1.0)
    found = pairs.slowdowns(SharingMode.MPS, [full, full, full])
    two = pairs.slowdowns(SharingMode.MPS, [full, full])
    assert sum(1 / s for s in found) <= max(1.0, sum(1 / s for s in two)) + 1e-9
