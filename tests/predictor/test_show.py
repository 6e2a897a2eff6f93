"""How predictions look in a terminal of 80 columns, whatever was asked."""

import io
import re

import pytest
from carpool_core.products import PRODUCTS
from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
from carpool_core.resources.job import Training
from carpool_predictor.predict import prepare
from carpool_predictor.report import as_text, report_on
from rich.console import Console

NAMES = [product.name.removeprefix("NVIDIA ").removeprefix("GeForce ") for product in PRODUCTS]


def shown(
    sample_bytes: float, parameters: int, batch: int, flops: float, columns: int = 80, *, steps: int | None = None
) -> str:
    traced = [
        TracedStep(
            batch_size=b, peak_bytes=int(sample_bytes * b) + 16 * parameters, activation_bytes=int(sample_bytes * b),
            flops=flops * b, bytes_moved=flops * b / 100, kernels=500,
        )
        for b in (max(1, batch // 2), batch)
    ]  # fmt: skip
    features = ModelFeatures(
        parameters=parameters, trainable_parameters=parameters, parameter_bytes=4 * parameters,
        layers=LayerCounts(linear=1), steps=traced,
    )  # fmt: skip
    report = report_on("m", prepare(features, Training(batch_size=batch, steps=steps)), PRODUCTS)
    console = Console(file=io.StringIO(), width=columns)
    console.print(as_text("m", report, width=columns))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param((250, 1000, 1_000_000, 1e3), id="batches of millions"),
        pytest.param((1e9, 20_000, 1_000_000, 1e3), id="none known to fit"),
        pytest.param((5e10, 10**12, 16, 1e15), id="terabytes of each part"),
        pytest.param((9e8, 10**6, 1_000_000, 1e15), id="as much as is ever predicted, for years"),
        pytest.param((6e9, 15_000_000_000, 128, 1e12), id="just below what is shortened"),
    ],
)
@pytest.mark.parametrize("steps", [None, 1, 10**12])
def test_nothing_is_cut_or_broken_in_80_columns(asked: tuple[float, int, int, float], steps: int | None) -> None:
    """Regression: batches of millions, and memory of terabytes, ended in an ellipsis."""
    text = shown(*asked, steps=steps)
    assert "…" not in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    for name in NAMES:
        assert sum(line.strip().startswith(f"{name} ") for line in lines) >= 3, "a line in each table"
    heads = [number for number, line in enumerate(lines) if line.lstrip().startswith("GPU ")]
    for head in heads[:3]:
        rows = lines[head + 2 : head + 2 + len(NAMES)]
        assert [row.strip().startswith(f"{name} ") for row, name in zip(rows, NAMES, strict=True)] == [True] * len(
            NAMES
        )


@pytest.mark.parametrize("columns", range(72, 81))
def test_a_profile_and_its_batch_stand_on_one_line(columns: int) -> None:
    text = shown(250, 1000, 1_000_000, 1e3, columns)
    instances = text[text.index("profile: batch") :].splitlines()[2:]
    for product in PRODUCTS:
        for profile in product.mig_profiles:
            assert any(re.search(rf"\b{re.escape(profile)}: \S+", line) for line in instances)
    for line in instances:
        assert not line.rstrip().endswith(":")


def test_numbers_that_no_gpu_has_are_rounded() -> None:
    text = shown(5e10, 10**12, 16, 1e15)
    assert "3.8e6" in text
    assert ">976" in text
