"""The fit behind the shipped calibration, on data made to measure and on the published rows."""

import random
from pathlib import Path

import pytest
from carpool_core.resources.features import ModelFeatures, TracedStep
from carpool_core.values import MIB
from carpool_predictor.calibration import (
    DataError,
    Pair,
    Row,
    calibrate,
    clean,
    conformal_factor,
    fit_line,
    read_rows,
    split_families,
)
from carpool_predictor.memory import shipped


def test_line_is_found_through_outliers() -> None:
    rng = random.Random(7)  # noqa: S311
    pairs = [Pair(x, (1.1 * x + 1800) * rng.gauss(1, 0.02)) for x in range(200, 20000, 100)]
    pairs += [Pair(x, 3 * x + 9000) for x in range(200, 20000, 1500)]
    slope, intercept = fit_line(pairs)
    assert slope == pytest.approx(1.1, rel=0.02)
    assert intercept == pytest.approx(1800, rel=0.05)


def test_factor_covers_its_share() -> None:
    ratios = [1 + i / 1000 for i in range(1000)]
    factor = conformal_factor(ratios, 0.95)
    assert 0.95 <= sum(r <= factor for r in ratios) / len(ratios) <= 0.952


def test_factor_is_never_under_one() -> None:
    assert conformal_factor([0.5, 0.6], 0.95) == 1


def test_families_are_split_without_loss_and_reproducibly() -> None:
    parts = split_families("abcdefg", 3, seed=1)
    assert frozenset.union(*parts) == frozenset("abcdefg")
    assert sum(map(len, parts)) == 7
    assert parts == split_families("gfedcba", 3, seed=1)


def runs(model: str, *peaks: float) -> list[Row]:
    return [Row(model, "f", 8 * 2**i, peak) for i, peak in enumerate(peaks)]


@pytest.mark.parametrize(
    ("peaks", "kept"),
    [
        pytest.param((2000, 3000, 5000), 3, id="healthy"),
        pytest.param((13867, 20353, 33625, 5863, 5863), 3, id="died from 64 on (deit3_huge)"),
        pytest.param((15859, 15879), 0, id="dead from the start, and not quite equal (samvit_base_patch16)"),
        pytest.param((14000, 27000, 40363), 2, id="at the GPU's capacity: censored (resnet200d)"),
        pytest.param((5000,), 0, id="one run tells nothing"),
    ],
)
def test_cleaning_drops_dead_runs(peaks: tuple[float, ...], kept: int) -> None:
    assert clean(runs("m", *peaks)) == runs("m", *peaks)[:kept]


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("timm_model,batch_size\nresnet50,8\n")
    with pytest.raises(DataError, match="max_gpu_memory_mib, timm_module"):
        read_rows(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.csv"):
        read_rows(tmp_path / "absent.csv")


def test_calibration_is_reproducible_and_recovers_the_line() -> None:
    rng = random.Random(3)  # noqa: S311
    rows, traced = [], {}
    for number in range(40):
        name = f"m{number}"
        size = rng.randint(10, 400)
        steps = [
            TracedStep(batch_size=b, peak_bytes=size * b * MIB, activation_bytes=0, flops=0, bytes_moved=0, kernels=1)
            for b in (8, 16)
        ]
        traced[name] = ModelFeatures(parameters=1, trainable_parameters=1, parameter_bytes=4, steps=steps)
        rows += [
            Row(name, f"family{number % 10}", b, (1.2 * size * b + 1500) * rng.gauss(1, 0.03)) for b in (8, 16, 32)
        ]
    fitted = calibrate(rows, traced, version="t", seed=5)
    assert fitted == calibrate(rows, traced, version="t", seed=5)
    assert fitted.slope == pytest.approx(1.2, rel=0.03)
    assert 1 <= fitted.upper_factor < 1.15


@pytest.mark.parametrize("name", ["held_out_median_error", "held_out_coverage", "held_out_worst_family_coverage"])
def test_model_card_repeats_the_shipped_figures(name: str) -> None:
    card = Path(__file__).parents[2].joinpath("docs/model-cards/memory.md").read_text()
    calibration = shipped()
    assert f"{100 * float(calibration.provenance[name]):.2f}%" in card
    assert f"{calibration.slope} · simulated + {calibration.intercept_mib} MiB" in card
    assert f"upper = {calibration.upper_factor} · median" in card
    assert calibration.version in card


def test_published_rows_are_cleaned_as_the_card_says(published: Path) -> None:
    rows = read_rows(published / "gpumemnet" / "timm_a100_40gb.csv")
    assert len(rows) == shipped().provenance["rows"]
    assert len(clean(rows)) == shipped().provenance["rows_after_cleaning"]
