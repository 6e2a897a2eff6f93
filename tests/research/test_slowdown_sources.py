"""The shipped slowdown model on folders of measured pairs, and the replay of pairs that are learned."""

import csv
from pathlib import Path

import numpy as np
import pytest
from carpool_core.values import SharingMode
from carpool_predictor.models.slowdown import slowdowns
from carpool_predictor.profiler.session import COLUMNS
from carpool_research.__main__ import evaluate
from carpool_research.slowdown import profiled
from carpool_research.slowdown.online import Occasion, replay
from click.testing import CliRunner

BUSY = {"a": 80.0, "b": 50.0, "c": 20.0}
"""Utilization alone in percent by model."""


def job(model: str) -> str:
    return f"timm/{model}|8|sgd-momentum|fp32"


def row(mode: str, model: str, partner: str = "", **values: object) -> dict[str, object]:
    run = {"model": f"timm/{model}", "batch_size": 8, "optimizer": "sgd-momentum", "precision": "fp32"}
    return run | {"mode": mode, "status": "ok", "partners": partner, "product": "GPU"} | values


def expected(mode: SharingMode, mine: str, other: str) -> float:
    """Return the slowdown by the shipped model; SM activity is nine tenths of the utilization."""
    util = np.array([[BUSY[mine], BUSY[other]]]) / 100
    return float(slowdowns(mode, util, 0.9 * util, np.zeros((1, 2)))[0, 0])


def write_profile(path: Path) -> None:
    """Write jobs alone, pairs that equal the shipped model in both modes, three jobs, and rows that do not count."""
    rows = []
    for mode in (SharingMode.TIME_SLICING, SharingMode.MPS):
        name = "mps" if mode is SharingMode.MPS else "time-slicing"
        rows += [row(name, m, gpu_util_percent=util, sm_active_ratio=0.009 * util) for m, util in BUSY.items()]
        rows += [row(name, m, job(o), slowdown=expected(mode, m, o)) for m, o in ("ab", "ba", "ac", "ca")]
    rows.append(row("mps", "a", f"{job('b')}+{job('c')}", slowdown=9.0))
    rows.append(row("mps", "a", job("unknown"), slowdown=9.0))
    rows.append(row("mps", "a", job("b"), status="failed"))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def test_the_profilers_pairs_are_judged_without_other_files(tmp_path: Path) -> None:
    write_profile(tmp_path / "rows.csv")
    assert {name: len(rows.speed) for name, rows in profiled.read(tmp_path).items()} == {
        "GPU, mps": 4,
        "GPU, mps, 3 jobs": 1,
        "GPU, time-slicing": 4,
    }
    arguments = ["--data", str(tmp_path), "--suite", "slowdown", "--frozen", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(evaluate, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.stderr
    lines = [line.split("│") for line in result.output.splitlines() if "│" in line]
    found = {cells[1].strip(): float(cells[2].replace(",", "")) for cells in lines}
    for source in ("GPU, mps", "GPU, time-slicing"):
        assert found[f"{source}: error of speed, shipped"] == 0
        assert found[f"{source}: below the upper end, %"] == 100
    assert found["GPU, time-slicing: error of speed, no slowdown"] > 0.05
    assert not (tmp_path / "out").exists()


def test_a_folder_without_pairs_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(evaluate, ["--data", str(tmp_path), "--suite", "slowdown", "--frozen"])
    assert result.exit_code == 2
    assert "expected measured pairs" in result.stderr


def test_right_warnings_count_at_the_warning_that_finds_three_quarters() -> None:
    measured = np.array([2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    predicted = np.array([1.9, 1.8, 1.7, 1.0, 1.75, 1.0, 1.0])
    assert profiled.right_percent(predicted, measured) == pytest.approx(75)  # 1.7 finds three of four, one is wrong
    assert np.isnan(profiled.right_percent(predicted, np.ones(7)))


@pytest.mark.parametrize("mode", [SharingMode.TIME_SLICING, SharingMode.MPS])
def test_a_replayed_pair_is_predicted_before_it_is_learned(mode: SharingMode) -> None:
    """One pair of jobs runs at half of its speed each time: the first prediction is the shipped model's."""
    one = Occasion("GPU", mode, ("a", "b"), (0.5, 0.3), (0.5, 0.5))
    found = list(replay([one] * 20, seed=0))
    assert [outcome.earlier for outcome in found] == [run for run in range(20) for _ in range(2)]
    assert [outcome.error == pytest.approx(outcome.prior_error) for outcome in found[:4]] == [True, True, False, False]
    assert max(outcome.error for outcome in found[-2:]) < 0.1 * min(outcome.prior_error for outcome in found)
