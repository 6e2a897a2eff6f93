import math

import hypothesis.strategies as st
from carpool_extender.simulation import energies, radrm
from carpool_extender.simulation.contest import DEFAULT, FIGURES, Figures, Line
from carpool_extender.simulation.power import Power, Spent, fitted, spent
from carpool_extender.simulation.strategy import Strategy
from hypothesis import given

WATTS = st.floats(min_value=1.0, max_value=900.0)


@given(idle_w=WATTS, more_w=WATTS, minutes=st.floats(min_value=1, max_value=1e4), active=st.floats(0.0, 1.0))
def test_what_a_run_took_is_found_again_from_its_energy(idle_w, more_w, minutes, active):
    power = Power(idle_w, idle_w + more_w)
    took = Spent(4 * 60 * minutes, active * 4 * 60 * minutes)
    found = spent(took.energy_mj(power), minutes, 4, power)
    assert math.isclose(found.gpu_s, took.gpu_s)
    assert math.isclose(found.active_s, took.active_s, rel_tol=1e-6, abs_tol=1e-6 * took.gpu_s)


@given(idle_w=WATTS, more_w=WATTS)
def test_energies_tell_what_gpus_draw(idle_w, more_w):
    true = Power(idle_w, idle_w + more_w)
    runs = {"alone": Spent(1000.0, 500.0), "shared": Spent(600.0, 480.0), "badly": Spent(900.0, 700.0)}
    found = fitted(runs, {name: run.energy_mj(true) for name, run in runs.items()})
    assert math.isclose(found.idle_w, true.idle_w, abs_tol=0.06)
    assert math.isclose(found.limit_w, true.limit_w, abs_tol=0.06)


def _lines(*, faster: float) -> list[Line]:
    def line(name: str, minutes: float, active: float) -> Line:
        mj = Spent(240 * minutes, 240 * active).energy_mj(radrm.POWER)
        figures = dict.fromkeys(FIGURES, 0.0) | {"makespan_min": minutes, "energy_mj": mj}
        return Line(Strategy(name, "exclusive"), [Figures(**figures)])

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


def test_hotclouds_energy_is_told_with_gpus_that_are_awake_only_while_they_have_a_job():
    def line(name: str, minutes: float, in_use: float) -> Line:
        active_s = 12 * 3600.0  # the same work
        mj = Spent(60 * minutes * 12, active_s).energy_mj(Power(20, 350))
        figures = dict.fromkeys(FIGURES, 0.0) | {"makespan_min": minutes, "energy_mj": mj, "gpus_in_use": in_use}
        return Line(Strategy(name, "exclusive"), [Figures(**figures)])

    told, _ = energies.of_hotcloud([line("slot-based", 300.0, 12.0), line(DEFAULT, 200.0, 6.0)])
    first = 12 * (300 * 60 * 80.5 + 3600 * (294 - 80.5)) / 1e6
    ours = (6 * 200 * 60 * (80.5 + 20) + 12 * 3600 * (294 - 80.5)) / 1e6
    assert f"slot-based takes {first:.2f} MJ, and Carpool {ours:.2f} MJ ({100 * (ours / first - 1):+.1f}%)." in told
    assert energies.of_hotcloud([line("slot-based", 300.0, 12.0)]) == []


def test_nothing_is_said_where_a_published_policy_did_not_run():
    assert energies.table(_lines(faster=1.0)[:2]) == []
