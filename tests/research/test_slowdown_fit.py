"""Fits of the slowdown model to synthetic measurements."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from carpool_core.values import SharingMode
from carpool_predictor.models.slowdown import SlowdownModel, fair_share, shipped, slowdowns
from carpool_research.slowdown import candidates, fit, gavel, profiled
from carpool_research.slowdown.fit import train_slowdown
from carpool_research.slowdown.gavel import LeftOutErrors


def write_gavel(tmp_path):
    """Write three jobs whose steps are power means with exponent 3, and pairs with equal kernels."""
    step = {}
    for job, (host, each) in {"A": (1.0, 0.02), "B": (2.0, 0.01), "C": (0.5, 0.05)}.items():
        for batch in (8, 16, 32, 64, 128):
            gpu = each * batch + 0.1
            step[job, batch] = ((host**3 + gpu**3) ** (1 / 3), gpu)
    lines = [
        "file,gpu,job_a,bs_a,ngpu_a,job_b,bs_b,ngpu_b,iso_tput_a_steps_s,iso_tput_b_steps_s,coloc_tput_a,coloc_tput_b"
    ]
    for (one, size), (step_a, gpu_a) in step.items():
        for (other, its), (step_b, gpu_b) in step.items():
            slow = 1 + gpu_a / step_a * gpu_b / step_b
            speeds = f"{1 / step_a},{1 / step_b},{1 / step_a / slow},{1 / step_b / slow}"
            lines.append(f"oracle_throughputs.json,v100,{one},{size},1,{other},{its},1,{speeds}")
    lines.append("oracle_throughputs.json,v100,A,8,1,B,8,1,1,1,0,0")
    (tmp_path / "gavel").mkdir()
    (tmp_path / "gavel" / "gavel_throughputs_flat.csv").write_text("\n".join(lines))


def write_gpumemnet(tmp_path):
    """Write many MLPs with SM activity u^1.4, a few CNNs with u^1.6, and invalid runs."""
    (tmp_path / "gpumemnet").mkdir()
    names = ",".join(fit.COLUMNS)
    mlps = [f"{percent},{(percent / 100) ** 1.4},{(percent / 100) ** 1.1}" for percent in range(100)]
    (tmp_path / "gpumemnet" / "mlp_a100_40gb.csv").write_text("\n".join([names, *mlps]))
    cnns = [f"{percent},{(percent / 100) ** 1.6},{percent / 100},SUCCESSFUL" for percent in range(30, 70, 4)]
    faulty = ["50,-1,0.5,SUCCESSFUL", "-1,0.5,0.5,SUCCESSFUL", "50,0.5,-1,SUCCESSFUL", "50,1,1,OOM_CRASH"]
    (tmp_path / "gpumemnet" / "cnn_a100_40gb.csv").write_text("\n".join([f"{names},Status", *cnns, *faulty]))


def test_training_recovers_the_parameters_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(gavel, "EXPONENTS", (1.0, 2.0, 3.0, 4.0))
    write_gavel(tmp_path)
    write_gpumemnet(tmp_path)
    model = msgspec.json.decode(train_slowdown(tmp_path, tmp_path / "out").read_bytes(), type=SlowdownModel)
    assert model.holding == 1.6  # kinds have equal weight, and the CNNs are half busy, where k matters most
    assert model.models == 3
    names = ("holding_runs", "step_exponent", "step_curves", "pairs", "slowdowns")
    assert [model.provenance[name] for name in names] == [110, 3.0, 3, 15 * 16 / 2, 125]


def test_the_ends_under_time_slicing_hold_their_level_on_each_own_gpu():
    """The upper end covers jobs that hide all their host time, of pairs and threes."""
    runs = profiled.read(profiled.MEASUREMENTS)
    turns = {name: rows for name, rows in runs.items() if not rows.is_mps.any()}
    assert {rows.busy.shape[1] for rows in turns.values()} == {2, 3}
    for product in {name.split(",")[0] for name in turns}:
        of = [rows for name, rows in turns.items() if name.startswith(product)]
        held = np.hstack([rows.speed * candidates.shipped_upper(rows) >= 1 for rows in of])
        assert held.mean() >= shipped().level
        fair = np.hstack([candidates.shipped_upper(rows) >= fair_share(rows.busy)[:, 0] for rows in of])
        assert fair.all()


def test_a_factor_is_the_largest_of_the_models_quantiles():
    """One model of many rows does not hide the errors of another."""
    models = np.array([["calm", "calm"]] * 90 + [["wild", "wild"]] * 10)
    errors = np.where(models == "wild", 0.4, 0.1) * np.repeat(np.linspace(0, 1, 100), 2).reshape(100, 2)
    assert gavel.factor(errors, models, 0.9) == pytest.approx(np.quantile(errors[90:], 0.9), abs=0.01)
    assert gavel.factor(-errors - 0.1, models, 0.9) == 0.0  # an end does not cross the median


def test_errors_behind_mps_count_over_the_neighbours_busy_share():
    whole = np.full((3, 2), 2.0)
    pairs = gavel.BehindMps(whole, np.ones((3, 2)), whole / 4, np.full((3, 2), "A"))
    assert pairs.log_errors == pytest.approx(2 * np.log(whole))


def test_pairs_are_predicted_by_the_shipped_formulas(tmp_path):
    write_gavel(tmp_path)
    read = gavel.read(tmp_path)
    k = shipped().holding
    found = gavel.behind_mps(read, 3.0, k)
    busy = found.neighbour_busy[:, ::-1]
    assert found.predicted == pytest.approx(slowdowns(SharingMode.MPS, busy, busy**k, np.zeros(busy.shape)))


def test_each_kind_of_training_has_its_own_exponent(tmp_path):
    write_gpumemnet(tmp_path)
    runs = fit.read(tmp_path)
    assert {kind: fit.best_exponent([of]) for kind, of in runs.items()} == {"mlp": 1.4, "cnn": 1.6}
    assert fit.best_exponent([runs["mlp"]], fit.engine_active) == 1.1


def test_a_difference_of_exponents_has_a_standard_error_over_jobs():
    least = LeftOutErrors({"A": 0.01, "B": 0.02})
    assert LeftOutErrors({"A": 0.03, "B": 0.06}).beyond(least) == pytest.approx((0.03, 0.01))


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        pytest.param({1.0: (0.07, 0.02), 1.5: (0.02, 0.03), 3.0: (0.02, 0.02)}, 1.5, id="within noise of the best"),
        pytest.param({1.0: (0.04, 0.04), 1.5: (0.03, 0.03), 3.0: (0.02, 0.02)}, 3.0, id="worse on every job"),
        pytest.param({1.0: (0.02, 0.02), 1.5: (0.03, 0.03), 3.0: (0.04, 0.04)}, 1.0, id="the best is the smallest"),
    ],
)
def test_the_smallest_exponent_within_one_standard_error_is_taken(errors, expected):
    of_jobs = {exponent: LeftOutErrors(dict(zip("AB", one, strict=True))) for exponent, one in errors.items()}
    assert gavel.most_cautious(of_jobs) == expected


def test_the_card_names_the_shipped_interval():
    card = Path(__file__).parents[2].joinpath("docs/model-cards/slowdown.md").read_text()
    model = shipped()
    assert f"exp({model.time_slicing_factor:g}) times the larger of median and fair share (time-slicing)" in card
    assert f"exp({model.mps_factor:g} v) times the median (MPS)" in card
    assert f"{100 * model.models / (model.models + 1):.0f}% of new models" in card
