"""Fit and evaluation of the activity model on synthetic rows."""

import csv
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from carpool_core.values import Precision
from carpool_research.activity import baselines
from carpool_research.activity.baselines import judge
from carpool_research.activity.fit import (
    SIZES,
    ActivityRow,
    bins_of,
    chosen_inside,
    clean,
    fit,
    fit_booster,
    forest_of,
    held_out,
    matrix,
    read_rows,
    values,
    weights_of,
)
from carpool_research.activity.report import real_figures
from carpool_research.tables import DataError

COLUMNS = ["Filename", "Activations-Params", "Batch Size", "Avg GPUTL", "Avg SMACT", "Avg SMOCC", "Status"]


def write(data: Path, kind: str, rows: list[list[object]]) -> Path:
    folder = data / "gpumemnet"
    folder.mkdir(exist_ok=True)
    with (folder / f"{kind}_a100_40gb.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    return data


def mlp(width: int, batch: int, arch: str, util: float, status: str = "SUCCESSFUL") -> list[object]:
    layers = [("linear", width, width * (width + 1)), ("ReLU", width, 0), ("linear", 10, 10 * (width + 1))]
    name = f"input:{width}_output:10_arch:{arch}_batch:{batch}.out"
    return [name, layers, batch, util, util / 120, util / 300, status]


def synthetic(data: Path) -> list[ActivityRow]:
    rng = np.random.default_rng(1)
    rows = []
    for i in range(120):
        width, batch = int(rng.integers(16, 4000)), int(rng.integers(4, 1000))
        util = min(5 + width * batch / 40_000, 99.0) + float(rng.normal(0, 0.3))
        rows.append(mlp(width, batch, ["wide", "deep", "round"][i % 3], util))
    return read_rows(write(data, "mlp", rows), "mlp")


def test_the_same_rows_and_seed_give_the_same_bytes(tmp_path: Path) -> None:
    rows = synthetic(tmp_path)
    assert msgspec.json.encode(fit(rows, 3)) == msgspec.json.encode(fit(rows, 3))


def test_plain_lists_predict_what_lightgbm_predicts(tmp_path: Path) -> None:
    rows = synthetic(tmp_path)
    x, y = matrix(rows), values(rows, "gpu_util_percent")
    booster = fit_booster(x, y, weights_of(rows), 0)
    forest = forest_of(booster, 1.0)
    forest.check(x.shape[1])
    assert [forest.predict(row) for row in x.tolist()] == pytest.approx(booster.predict(x), abs=0.01)


def test_rows_of_an_architecture_do_not_help_to_predict_it(tmp_path: Path) -> None:
    rows = synthetic(tmp_path)
    before = held_out(rows, "gpu_util_percent", 0)
    spoiled = [replace(row, gpu_util_percent=1.0) if row.architecture == "deep" else row for row in rows]
    after = held_out(spoiled, "gpu_util_percent", 0)
    deep = np.array([r.architecture == "deep" for r in rows])
    assert np.array_equal(before.predicted[deep], after.predicted[deep])
    assert not np.array_equal(before.predicted[~deep], after.predicted[~deep])


def test_bins_cover_their_own_rows() -> None:
    rng = np.random.default_rng(0)
    predicted = rng.uniform(0, 100, 2000)
    measured = predicted + rng.normal(0, 1 + predicted / 20)
    bins = bins_of(predicted, measured)
    ends = np.array([bins.around(float(value)) for value in predicted])
    assert 0.88 < ((measured >= ends[:, 0]) & (measured <= ends[:, 1])).mean() < 0.93


def test_dead_runs_are_dropped(tmp_path: Path) -> None:
    dead = ["input:5_output:10_arch:wide_batch:4.out", [], 4, 0.0, 0.0, 0.0, "SUCCESSFUL"]
    rows = [mlp(64, 8, "wide", 50), mlp(64, 8, "wide", -1), mlp(64, 8, "wide", 50, "OOM_CRASH"), dead]
    assert len(clean(read_rows(write(tmp_path, "mlp", rows), "mlp"))) == 1


def test_an_unreadable_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.csv:2: cannot read the row"):
        read_rows(write(tmp_path, "cnn", [mlp(64, 8, "wide", 50)]), "cnn")


def test_the_protocol_ranks_a_forest_above_a_constant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        name: replace(one, grid={key: values[:1] for key, values in one.grid.items()})
        for name, one in baselines.REGRESSORS.items()
    }
    monkeypatch.setattr(baselines, "REGRESSORS", small | {"linear": baselines.REGRESSORS["linear"]})
    rows = synthetic(tmp_path)
    scores = baselines.random_split(rows, 0)
    assert list(scores) == list(baselines.REGRESSORS)
    assert scores["random forest"].rmsle < scores["constant"].rmsle
    assert baselines.rmsle(np.array([np.e - 1]), np.array([0.0])) == pytest.approx(1.0)


def test_a_size_chosen_inside_a_fold_ignores_the_held_out_rows(tmp_path: Path) -> None:
    rows = synthetic(tmp_path)
    predicted, sizes = chosen_inside(rows, "gpu_util_percent", 0)
    assert len(sizes) == 3
    assert set(sizes) <= set(SIZES)
    assert np.abs(predicted - values(rows, "gpu_util_percent")).mean() < 10
    changed = [replace(row, gpu_util_percent=1.0) if row.architecture == "deep" else row for row in rows]
    again, _ = chosen_inside(changed, "gpu_util_percent", 0)
    held = np.array([row.architecture == "deep" for row in rows])
    assert np.array_equal(again[held], predicted[held])


def test_real_networks_are_evaluated_only(tmp_path: Path) -> None:
    folder = tmp_path / "lucid"
    folder.mkdir()
    (folder / "solo_rtx3090.csv").write_text("model,batchsize,amp,gpu_util\nResNet18,64,0,80.5\nPPO,64,0,10\n")
    (row,) = judge(tmp_path)
    assert (row.model, row.batch_size, row.precision, row.measured) == ("ResNet18", 64, Precision.FP32, 80.5)
    assert 0 <= row.lower <= row.predicted <= row.upper <= 100
    error, *_ = real_figures([row])
    assert error.value == pytest.approx(abs(row.predicted - 80.5), abs=0.01)


@pytest.mark.parametrize(
    ("content", "word"),
    [(None, "no such file"), ("model\nResNet18\n", "lacks the columns"),
     ("model,batchsize,amp,gpu_util\nResNet18,many,0,1\n", "cannot read the row")],
    ids=["absent", "columns", "row"],
)  # fmt: skip
def test_invalid_rows_of_real_networks_are_refused(content: str | None, word: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "lucid").mkdir()
        (tmp_path / "lucid" / "solo_rtx3090.csv").write_text(content)
    with pytest.raises(DataError, match=word):
        judge(tmp_path)
