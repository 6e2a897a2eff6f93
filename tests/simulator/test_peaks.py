"""Running jobs of which nothing better is known count with their own peaks, in simulations reckoned by hand."""

from dataclasses import replace

import pytest
from carpool_core.values import SharingMode
from carpool_simulator.engine import LOADED_S, Simulation
from simulated_world import CARPOOL, NoSlowdown, ends, job, truth, workload

SETTLES = replace(CARPOOL, name="settles", settles=True)
FIRST_S, LAST_S = LOADED_S + 90.0, LOADED_S + 600.0


def both(strategy, peak_mib, mode=SharingMode.MPS):
    """A job of which nothing is known, and one of 4,000 MiB that comes later, on a GPU of 10,000 MiB."""
    unknown = replace(job("unknown", 2000.0, of=truth(peak_mib, kind="unknown")), prediction=None)
    jobs = workload(unknown, job("later", 50.0, 1.0, of=truth(4000, kind="later")))
    outcome = Simulation(jobs, replace(strategy, mode=mode), NoSlowdown()).run()
    assert outcome.ooms == 0
    return ends(outcome)["later"]


@pytest.mark.parametrize("mode", [SharingMode.MPS, SharingMode.TIME_SLICING])
@pytest.mark.parametrize(
    ("strategy", "peak_mib", "end_s"),
    [
        pytest.param(CARPOOL, 3000, 2050.0, id="alone until its end"),
        pytest.param(SETTLES, 3000, FIRST_S + 50, id="half as much again leaves room"),
        pytest.param(SETTLES, 5000, LAST_S + 50, id="a tenth more leaves room"),
        pytest.param(SETTLES, 5800, 2050.0, id="too little is left"),
        pytest.param(replace(SETTLES, measure=False), 3000, 2050.0, id="nothing is measured"),
    ],
)
def test_others_join_once_the_peak_of_a_lone_job_leaves_them_room(strategy, peak_mib, end_s, mode):
    assert both(strategy, peak_mib, mode) == end_s


def test_the_larger_bound_of_a_first_run_gives_way_too():
    wide = replace(job("first", 2000.0, of=truth(2000, kind="first"), predicted=truth(8000)))
    jobs = workload(wide, job("later", 50.0, 1.0, of=truth(4000, kind="later")))
    assert ends(Simulation(jobs, SETTLES, NoSlowdown()).run())["later"] == FIRST_S + 50
    assert ends(Simulation(jobs, CARPOOL, NoSlowdown()).run())["later"] == 2050.0


def test_a_job_that_died_of_memory_keeps_what_it_was_promised():
    """Its first bound was too low; what it then takes is below what it counts with, and stays so."""
    grows = job("grows", 2000.0, of=truth(5000, kind="grows"), predicted=truth(4000))
    jobs = workload(grows, job("later", 50.0, 3.0 + LOADED_S, of=truth(4300, kind="later")))
    outcome = Simulation(jobs, SETTLES, NoSlowdown()).run()
    assert outcome.ooms == 1
    assert ends(outcome)["later"] > 2000.0


def test_a_tenant_has_not_taken_its_memory_before_it_has_loaded():
    """Its excess over its bound is unknown when the third job arrives, although another's end triggers a pass."""
    grows = job("grows", 500.0, of=truth(5000, kind="grows"), predicted=truth(1000, kind="grows"))
    short, later = job("short", 30.0, of=truth(500, kind="short")), job("later", 100.0, 40.0, of=truth(6000, kind="b"))
    slices = replace(CARPOOL, mode=SharingMode.TIME_SLICING)
    assert Simulation(workload(grows, short, later), slices, NoSlowdown()).run().ooms == 1
    late = replace(later, arrival_s=LOADED_S + 1.0)
    assert Simulation(workload(grows, short, late), slices, NoSlowdown()).run().ooms == 0
