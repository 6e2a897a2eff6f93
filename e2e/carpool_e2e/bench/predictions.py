"""How quickly predictions come: from the feature store one by one and many at once, and from models that are traced."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median

from carpool_core.products import PRODUCTS, GpuProduct, find_product
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer
from carpool_predictor.catalog import store
from carpool_predictor.predict import predict

from carpool_e2e.bench.measure import circumstances

CARPOOL = str(Path(sys.executable).with_name("carpool"))
ROWS = 20_000
REPEATS = 300
TRACED = (("timm/resnet50", 3.0), ("transformers/bert-base-uncased", 3.0), ("transformers/gpt2-xl", 25.0))
"""Models that are traced, and the most seconds that they may take."""
TRACE_REPEATS = 3
WARM = """
import sys, time
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_predictor.tracing.models import model_recipe, trace_recipe

def traced():
    model = ModelSource(catalog=CatalogModel(name=sys.argv[1]))
    begin = time.perf_counter()
    trace_recipe(model_recipe(model), Training(batch_size=8))
    return time.perf_counter() - begin

traced()
print(traced())
"""
"""Prints the seconds of a second trace."""
FEWEST_ROWS_PER_S = 2000.0
MOST_GIB = 2.0
TARGET_MODEL, TARGET_GPU = "timm/resnet50", "A100-SXM4-40GB"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report."""

    what: str
    value: float
    unit: str
    target: str
    is_kept: bool | None

    def __str__(self) -> str:
        return f"{self.value:,.0f} {self.unit}" if self.value >= 100 else f"{self.value:.3g} {self.unit}"


def measure(tell: Callable[[str], None]) -> list[Figure]:
    """Measure everything; no cluster is needed."""
    traced = [figure for name, most_s in TRACED for figure in _traced(name, most_s)]
    found = [*_cached(), _started(), _rows(), _imported(), *traced, _resident()]
    for figure in found:
        tell(f"{figure.what}: {figure}")
    return found


def _some_model() -> tuple[CatalogModel, Training]:
    known = store.shipped().names()
    name = TARGET_MODEL if TARGET_MODEL in known else known[0]
    return CatalogModel(name=name), Training(batch_size=64, optimizer=Optimizer.SGD_MOMENTUM)


def _cached() -> list[Figure]:
    """Time the lookup and the prediction in a process that has loaded both, as the operator's."""
    model, training = _some_model()
    figures = []
    for what, gpus, most in (("one GPU product", [find_product(TARGET_GPU)], 2.0), ("all products", PRODUCTS, None)):
        took_ms = 1e3 * median(_answered(model, training, gpus) for _ in range(REPEATS))
        label = f"a prediction from stored features, {what} ({len(gpus)})"
        figures.append(Figure(label, took_ms, "ms", f"≤ {most:g}" if most else "", took_ms <= most if most else None))
    return figures


def _answered(model: CatalogModel, training: Training, gpus: Sequence[GpuProduct]) -> float:
    """Look a model up and predict it; returns seconds."""
    begin = time.perf_counter()
    features = store.features(model, training)
    if features is None:
        raise ValueError(f"expected {model.name} in the feature store, found it missing")
    predict(features, training, gpus)
    return time.perf_counter() - begin


def _started() -> Figure:
    """Time the command from its start to its end."""
    model, training = _some_model()
    command = [CARPOOL, "predict", model.name, "--optimizer", training.optimizer.value, "--gpu", TARGET_GPU, "--json"]

    _seconds(command)
    return Figure(
        "`carpool predict` of a stored model, process and all", median(_seconds(command) for _ in range(5)), "s", "",
        None,
    )  # fmt: skip


def _rows() -> Figure:
    """Time a file of rows through the command, its processes' start included."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "rows.jsonl", Path(folder) / "predictions.jsonl"
        write_rows(asked, ROWS)
        took_s = _seconds([CARPOOL, "predict", "--rows", asked, "--out", answered])
        statuses = {json.loads(line)["status"] for line in answered.read_text().splitlines()}
    if statuses != {"ok"}:
        raise ValueError(f"expected every row to be answered, found {', '.join(sorted(statuses))}")
    rate = ROWS / took_s
    return Figure(
        f"rows a second through `carpool predict --rows` ({ROWS:,} rows)", rate, "rows/s",
        f"≥ {FEWEST_ROWS_PER_S:,.0f}", rate >= FEWEST_ROWS_PER_S,
    )  # fmt: skip


def write_rows(path: Path, count: int) -> None:
    """Write rows that go through every stored model, with changing batch sizes, optimizers and products."""
    optimizers = ("sgd", "sgd-momentum", "adam", "adamw")
    combinations = product((p.name for p in PRODUCTS), (8, 16, 32, 64, 128), optimizers)
    cases = zip(cycle(store.shipped().names()), cycle(list(combinations)), strict=False)
    with path.open("w") as file:
        for number, (name, (gpu, batch, optimizer)) in enumerate(islice(cases, count)):
            training = {"batchSize": batch, "optimizer": optimizer}
            row = {"id": number, "catalog": {"name": name}, "training": training, "gpu": gpu}
            file.write(json.dumps(row) + "\n")


def _imported() -> Figure:
    """Time what any tracer waits for first: how quick this machine is at present."""
    command = [sys.executable, "-c", "import torch"]
    took_s = median(_seconds(command) for _ in range(TRACE_REPEATS))
    return Figure("for comparison: `python -c 'import torch'`, all of PyTorch", took_s, "s", "", None)


def _traced(name: str, most_s: float) -> list[Figure]:
    """Time a model that is traced: for a user who waits for the command, and in a process that has traced before."""
    # Where the store does not reach to; tensors without data are the same work at any size.
    command = [CARPOOL, "predict", name, "--batch-size", "1024", "--gpu", TARGET_GPU, "--json"]
    took_s = median(_seconds(command) for _ in range(TRACE_REPEATS))
    warm = subprocess.run([sys.executable, "-W", "ignore", "-c", WARM, name], check=True, capture_output=True)
    return [
        Figure(
            f"`carpool predict {name}`, traced, PyTorch's import included", took_s, "s", f"≤ {most_s:g}",
            took_s <= most_s,
        ),
        Figure("of that, the trace in a process that has everything imported", float(warm.stdout), "s", "", None),
    ]  # fmt: skip


def _seconds(command: Sequence[str | Path]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def _resident() -> Figure:
    """Return the resident memory of the largest of the processes that were waited for: those that traced."""
    peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return Figure("memory of the largest trace", peak_gib, "GiB", f"≤ {MOST_GIB:g}", peak_gib <= MOST_GIB)


def section(figures: list[Figure]) -> list[str]:
    """Write the report's section."""
    kept = {True: "kept", False: "missed", None: ""}
    return [
        "## Predictions",
        "",
        "On all processors for the file of rows, on one for the others; medians where something is repeated.",
        circumstances(),
        "",
        "| | found | asked for | |",
        "|---|---|---|---|",
        *(f"| {f.what} | {f} | {f.target} | {kept[f.is_kept]} |" for f in figures),
        "",
    ]


def replaced(content: str, section: list[str]) -> str:
    """Put a section in place of the one with the same heading, or at the end."""
    parts = ("\n" + content).split("\n## ")
    heading = section[0].removeprefix("## ")
    kept = [part for part in parts if part.partition("\n")[0] != heading]
    written = "\n".join(section).removeprefix("## ")
    at = next((i for i, part in enumerate(parts) if part.partition("\n")[0] == heading), len(kept))
    return "\n## ".join(part.rstrip("\n") + "\n" for part in [*kept[:at], written, *kept[at:]]).removeprefix("\n")
