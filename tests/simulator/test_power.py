import math

import hypothesis.strategies as st
from carpool_research.experiments import radrm
from carpool_simulator.power import Power, Spent, fitted, spent
from carpool_simulator.reports import energies
from carpool_simulator.strategy import Strategy
from carpool_simulator.sweep import DEFAULT, FIGURES, Figures, Line
from hypothesis import given

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
def test_energies_tell_what_gpus_draw(idle_w, more_w):
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


def _line(name: str, minutes: float, active: float, gpus: int, in_use: float, power: Power) -> Line:
    """Return a line whose SMs were all active for so many of its minutes."""
    mj = Spent(60 * gpus * minutes, 60 * in_use * minutes, 60 * gpus * active).energy_j(power) / 1e6
    figures = dict.fromkeys(FIGURES, 0.0) | {"makespan_min": minutes, "energy_mj": mj, "gpus_in_use": in_use}
    return Line(Strategy(name, "exclusive"), [Figures(**figures)])


def _lines(*, faster: float) -> list[Line]:
    def line(name: str, minutes: float, active: float) -> Line:
        return _line(name, minutes, active, radrm.GPUS, radrm.GPUS, radrm.POWER)

    return [
        line("exclusive", 900.0, 425.0),
        line("round-robin, streams", 825.0, 440.0),
        line("round-robin", 690.0, 440.0),
        line("MAGM, 80%, 2 GB", 600.0, 430.0),
        line(DEFAULT, 600.0 / faster, 430.0),
    ]


def test_the_fit_goes_by_others_policies_alone_and_is_shown_beside_what_is_used():
    told, faster = ("\n".join(energies.table(_lines(faster=by))) for by in (1.0, 1.5))
    [fit] = [line for line in told.splitlines() if " gives " in line]
    assert fit in faster.splitlines()
    assert f"{radrm.POWER} (used)" in told
    [row] = [line for line in told.splitlines() if line.startswith(f"| {DEFAULT}")]
    assert row.count("MJ") == 8
    assert row.split("|")[2].strip() == ""  # nobody published Carpool's
    [magm] = [line for line in told.splitlines() if line.startswith("| MAGM")]
    assert magm.split("|")[2].strip() == "28.78 MJ (-13.3%)"


def test_hotclouds_energy_is_told_with_gpus_that_draw_no_more_with_a_job_than_asleep_too():
    def line(name: str, minutes: float, in_use: float) -> Line:
        return _line(name, minutes, 60.0, 12, in_use, Power(20, 98, 301))  # each did the same work

    told, _ = energies.of_hotcloud([line("slot-based", 300.0, 12.0), line(DEFAULT, 200.0, 6.0)])
    first, ours = (12 * 60 * (20 * minutes + (350 - 20) * 60) / 1e6 for minutes in (300, 200))
    assert (
        f"slot-based would take {first:.2f} MJ, and Carpool {ours:.2f} MJ ({100 * (ours / first - 1):+.1f}%)." in told
    )
    assert energies.of_hotcloud([line("slot-based", 300.0, 12.0)]) == []


def test_nothing_is_said_where_a_published_policy_did_not_run():
    assert energies.table(_lines(faster=1.0)[:2]) == []
