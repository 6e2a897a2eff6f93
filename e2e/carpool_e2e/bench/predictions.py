"""Speed of predictions: from the feature store, for a file of rows, and of models that are traced."""

import json
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median

from carpool_core.products import PRODUCTS, GpuProduct, find_product
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer
from carpool_predictor.catalog import store
from carpool_predictor.predict import predict

from carpool_e2e.bench.measure import Figure, Section
from carpool_e2e.cluster import carpool_command
from carpool_e2e.errors import HarnessError

ROWS, REPEATS, TRACE_REPEATS = 20_000, 300, 3
TRACED = {"timm/resnet50": 3.0, "transformers/bert-base-uncased": 3.0, "transformers/gpt2-xl": 25.0}
"""Models that are traced, and the longest that they may take, in seconds."""
MODEL, GPU = "timm/resnet50", "A100-SXM4-40GB"


def measure(report: Callable[[str], None]) -> Section:
    """Measure in this process and through the command; no cluster is needed."""
    figures = [
        Figure("a prediction from stored features, one GPU product", 1e3 * _stored_s([find_product(GPU)]), "ms", 2),
        Figure(f"a prediction from stored features, all {len(PRODUCTS)} products", 1e3 * _stored_s(PRODUCTS), "ms"),
        Figure("`carpool predict` of a stored model", median(_predict_s(MODEL, 64) for _ in range(5)), "s"),
        Figure(f"`carpool predict --rows` with {ROWS:,} rows", _rows_a_second(), "rows/s", at_least=2_000),
    ]
    for name, longest_s in TRACED.items():
        # The store has no features of this batch size; tensors without data are the same work at any size.
        took_s = median(_predict_s(name, 1024) for _ in range(TRACE_REPEATS))
        figures.append(Figure(f"`carpool predict {name}`, traced", took_s, "s", longest_s))
    peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    figures.append(Figure("memory of the largest trace", peak_gib, "GiB", 2))
    for figure in figures:
        report(f"{figure.what}: {figure}")
    text = "Medians where something is repeated. A command's time includes the start of Python and the imports."
    return Section("Predictions", text, figures)


def _stored_s(gpus: Sequence[GpuProduct]) -> float:
    """Return the median time to look a model up and predict it, in seconds."""
    model, training = CatalogModel(name=MODEL), Training(batch_size=64, optimizer=Optimizer.SGD_MOMENTUM)
    took_s = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        features = store.features(model, training)
        if features is None:
            raise HarnessError(f"expected {MODEL} in the feature store, found it missing")
        predict(features, training, gpus)
        took_s.append(time.perf_counter() - began)
    return median(took_s)


def _predict_s(model: str, batch_size: int) -> float:
    command = ["predict", model, "--batch-size", str(batch_size), "--optimizer", "sgd-momentum", "--gpu", GPU, "--json"]
    return _command_s(*command)


def _command_s(*arguments: str) -> float:
    began = time.perf_counter()
    subprocess.run([carpool_command(), *arguments], check=True, capture_output=True)
    return time.perf_counter() - began


def _rows_a_second() -> float:
    with tempfile.TemporaryDirectory() as folder:
        rows, out = Path(folder) / "rows.jsonl", Path(folder) / "predictions.jsonl"
        write_rows(rows, ROWS)
        took_s = _command_s("predict", "--rows", str(rows), "--out", str(out))
        statuses = {json.loads(line)["status"] for line in out.read_text().splitlines()}
    if statuses != {"ok"}:
        raise HarnessError(f"expected a prediction of every row, found {', '.join(sorted(statuses))}")
    return ROWS / took_s


def write_rows(path: Path, count: int) -> None:
    """Write rows of every stored model, with changing batch sizes, optimizers and products."""
    combinations = product((p.name for p in PRODUCTS), (8, 16, 32, 64, 128), ("sgd", "sgd-momentum", "adam", "adamw"))
    cases = zip(cycle(store.shipped().document.entries), cycle([*combinations]), strict=False)
    with path.open("w") as file:
        for number, (name, (gpu, batch_size, optimizer)) in enumerate(islice(cases, count)):
            training = {"batchSize": batch_size, "optimizer": optimizer}
            file.write(json.dumps({"id": number, "catalog": {"name": name}, "training": training, "gpu": gpu}) + "\n")
