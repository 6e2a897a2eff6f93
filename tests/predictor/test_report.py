"""Memory parts, largest batches and the layout of reports."""

import io
import re

import pytest
from carpool_core.products import PRODUCTS, GpuProduct, find_product
from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
from carpool_core.resources.job import Training
from carpool_core.values import MIB, Optimizer
from carpool_predictor.predict import (
    CUBLAS_MIB,
    BatchFinder,
    PredictionContext,
    parts_of,
    prepare,
    usable_mib,
    usable_of_profile_mib,
)
from carpool_predictor.report import as_json, as_text, report_on
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

A100 = find_product("A100-SXM4-40GB")


def job(
    optimizer: Optimizer = Optimizer.ADAMW,
    batch: int = 64,
    weights_mib: int = 100,
    activation_mib: int = 50,
    traced: tuple[int, int] = (32, 64),
) -> PredictionContext:
    """A model whose peak is weights, gradients, optimizer state and activations."""
    state = {Optimizer.SGD: 0, Optimizer.SGD_MOMENTUM: 1, Optimizer.RMSPROP: 1, Optimizer.ADAMW: 2}[optimizer]
    steps = [
        TracedStep(
            batch_size=b,
            peak_bytes=MIB * (weights_mib * (2 + state) + activation_mib * b),
            activation_bytes=MIB * activation_mib * b,
            flops=2e10 * b,
            bytes_moved=1e9 * b,
            kernels=500,
        )
        for b in traced
    ]
    count = weights_mib * MIB // 4
    features = ModelFeatures(
        parameters=count, trainable_parameters=count, parameter_bytes=weights_mib * MIB, optimizer=optimizer,
        layers=LayerCounts(convolution=53, linear=1), steps=steps,
    )  # fmt: skip
    found = prepare(features, Training(batch_size=batch, optimizer=optimizer))
    assert isinstance(found, PredictionContext)
    return found


@pytest.mark.parametrize("batch", [16, 32, 48, 64, 256])
@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.SGD_MOMENTUM, Optimizer.RMSPROP, Optimizer.ADAMW])
def test_parts_equal_those_of_the_step(optimizer: Optimizer, batch: int) -> None:
    asked = job(optimizer, batch)
    memory = asked.memory_on(A100)
    parts = parts_of(asked, A100, memory)
    state = {Optimizer.SGD: 0, Optimizer.ADAMW: 200}.get(optimizer, 100)
    assert parts.weights_mib == 100
    assert parts.gradients_mib == pytest.approx(100)
    assert parts.optimizer_mib == pytest.approx(state)
    assert parts.activations_mib == pytest.approx(50 * batch)


@settings(deadline=None)  # wall-clock time varies on a shared machine
@given(
    st.sampled_from([Optimizer.SGD, Optimizer.ADAMW]), st.integers(4, 512), st.integers(1, 5000), st.integers(0, 200),
    st.sampled_from(PRODUCTS),
)  # fmt: skip
def test_parts_are_never_negative_and_add_up(
    optimizer: Optimizer, batch: int, weights: int, activation: int, product: GpuProduct
) -> None:
    asked = job(optimizer, batch, weights, activation)
    memory = asked.memory_on(product)
    parts = parts_of(asked, product, memory)
    values = [getattr(parts, name) for name in parts.__slots__]
    assert min(values) >= 0
    assert sum(values) == memory.median_mib


def test_only_what_the_step_explains_is_workspace() -> None:
    """Regression: the constant of the calibration was shown as 1.3 GiB of workspace of a model without convolutions."""
    asked = job()
    parts = parts_of(asked, A100, asked.memory_on(A100))
    fragments_mib = (asked.cost.reserved_bytes - asked.cost.peak_bytes) / MIB
    assert parts.workspace_mib == pytest.approx(fragments_mib + CUBLAS_MIB, abs=1)
    assert parts.other_mib > 500


def test_gradients_that_are_not_alive_at_the_peak_are_not_counted() -> None:
    steps = [
        TracedStep(
            batch_size=b, peak_bytes=MIB * (300 + 50 * b), activation_bytes=MIB * 50 * b, flops=1e10, bytes_moved=1e9,
            kernels=9,
        )
        for b in (32, 64)
    ]  # fmt: skip
    features = ModelFeatures(
        parameters=10, trainable_parameters=10, parameter_bytes=100 * MIB, layers=LayerCounts(linear=1), steps=steps
    )
    found = prepare(features, Training(batch_size=64))
    assert isinstance(found, PredictionContext)
    assert parts_of(found, A100, found.memory_on(A100)).gradients_mib == 0


@pytest.mark.parametrize("gpu", ["A100-SXM4-40GB", "Tesla T4", "H200"])
def test_the_largest_batch_fits_and_one_more_does_not(gpu: str) -> None:
    product = find_product(gpu)
    found = BatchFinder(job(activation_mib=400)).within(product, usable_mib(product))
    assert not found.limited_by_trace
    assert found.batch_size is not None
    fitting, larger = (job(batch=found.batch_size + more, activation_mib=400) for more in (0, 1))
    assert fitting.memory_on(product).upper_mib <= usable_mib(product) < larger.memory_on(product).upper_mib


def test_batches_beyond_the_trace_are_marked() -> None:
    small = BatchFinder(job(activation_mib=1)).within(A100, usable_mib(A100))
    assert (small.batch_size, str(small)) == (512, "512 or more")
    huge = BatchFinder(job(weights_mib=30_000)).within(A100, usable_mib(A100))
    assert (huge.batch_size, str(huge)) == (0, "none")


def test_a_small_batch_beyond_the_trace_is_not_refused() -> None:
    """Regression: the report for a batch of 20,000 claimed that no batch fits."""
    report = report_on("m", job(batch=20_000, traced=(10_000, 20_000), activation_mib=300), [A100])
    assert str(report.products[0].largest) == "fewer than 1,250"
    alone = "does not fit NVIDIA A100-SXM4-40GB, no smaller batch alone is known to fit"
    assert f"batch 20,000 {alone}" in report.prediction.message
    (answer,) = as_json(report)["products"]
    assert answer["largest_batch"] == {"batch_size": None, "limited_by_trace": True, "fewer_than": 1250}


def test_the_message_names_a_job_that_fits_nowhere() -> None:
    wide = report_on("m", job(batch=512, activation_mib=1000), PRODUCTS)
    assert "by its bound, batch 512 fits none of these GPU products, at most " in wide.prediction.message
    largest = max(product.largest.batch_size or 0 for product in wide.products)
    assert wide.prediction.fitting_batch == largest > 0
    assert report_on("m", job(), PRODUCTS).prediction.fitting_batch is None
    assert "fits none" not in report_on("m", job(), PRODUCTS).prediction.message


def test_the_report_names_the_gpus_that_a_job_may_not_fit() -> None:
    """Regression: a job whose bound was twice a GPU's memory was tried there, and only a last line said so."""
    console = Console(width=300, record=True, file=io.StringIO())
    report = report_on("m", job(batch=64, weights_mib=20_000, activation_mib=100), [A100, *PRODUCTS[1:3]])
    console.print(as_text("a title", report))
    first, second, *_ = [line for line in console.export_text().splitlines() if "not fit " in line]
    happens = "it gets such a GPU alone, and is refused that product once it ran out of memory there"
    assert first == f"may not fit A100-SXM4-80GB, A100 80GB PCIe: {happens}"
    assert second == "does not fit A100-SXM4-40GB: it is refused there"
    assert report.prediction.message.startswith("may not fit NVIDIA A100-SXM4-80GB (median ")
    fitting = report_on("m", job(), PRODUCTS)
    console.print(as_text("a title", fitting))
    assert "not fit" not in console.export_text()


def test_a_bound_between_what_jobs_can_use_and_all_memory_is_tried() -> None:
    """Regression: ResNet-50 at batch 32 was said to be refused on GPUs of 8 GiB, where it gets one alone."""
    gpu = find_product("GeForce RTX 2080")
    weights_mib = next(
        size
        for size in range(100, 5000, 20)
        if job(weights_mib=size).on(gpu, is_strict=True).prediction.memory.upper_mib > usable_mib(gpu)
    )
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(as_text("a title", report_on("m", job(weights_mib=weights_mib), [gpu])))
    printed = console.export_text()
    assert "may not fit RTX 2080: it gets such a GPU alone" in printed
    assert "refused there" not in printed


@pytest.mark.parametrize(
    ("gpu", "profile", "listed_mib"),
    [
        pytest.param("A100-SXM4-40GB", "1g.5gb", 4864, id="smallest of an A100"),
        pytest.param("A100-SXM4-40GB", "3g.20gb", 19968, id="half of an A100"),
        pytest.param("A30", "2g.12gb", 11968, id="half of an A30"),
        pytest.param("H200", "1g.18gb", 16384, id="smallest of an H200"),
        pytest.param("H200", "7g.141gb", 143360, id="all of an H200"),
    ],
)
def test_usable_memory_of_a_mig_instance_is_not_overestimated(gpu: str, profile: str, listed_mib: int) -> None:
    usable = usable_of_profile_mib(find_product(gpu), profile)
    assert 0.9 * listed_mib < usable <= listed_mib


@pytest.mark.parametrize(
    ("gpu", "is_told"), [pytest.param("A100-SXM4-40GB", False, id="measured"), pytest.param("A30", True, id="another")]
)
def test_the_message_names_unmeasured_activity(gpu: str, is_told: bool) -> None:
    report = report_on("m", job(), [find_product(gpu)])
    assert ("its interval elsewhere is assumed" in report.prediction.message) is is_told
    (product,) = as_json(report)["products"]
    assert product["inside_training"]["activity"] is not is_told


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
    console.print(as_text("m", report))
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
def test_a_profile_and_its_batch_share_a_line(columns: int) -> None:
    text = shown(250, 1000, 1_000_000, 1e3, columns)
    instances = text[text.index("profile=batch") :].splitlines()[2:]
    for product in PRODUCTS:
        for profile in product.mig_profiles:
            assert any(re.search(rf"\b{re.escape(profile)}=\S+", line) for line in instances)
    for line in instances:
        assert not line.rstrip().endswith("=")


def test_huge_numbers_are_rounded() -> None:
    text = shown(5e10, 10**12, 16, 1e15)
    assert "3.8e6" in text
    assert ">976" in text
