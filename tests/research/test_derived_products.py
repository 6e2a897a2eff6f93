"""Memory of GPUs that are left out of the product table, against every peak that others published."""

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from carpool_core.products import DeviceClass, GpuProduct, product_of
from carpool_core.resources.job import Training
from carpool_core.resources.node import NvmlFigures
from carpool_core.values import Precision
from carpool_predictor.catalog import store
from carpool_predictor.predict import predict
from carpool_research.memory.fit import FILE, PRODUCT, clean, read_rows

GPUS = json.loads((Path(__file__).parents[1] / "crds" / "nvidia_gpus.json").read_text())["gpus"]
SCHEDTUNE = {46: "NVIDIA GeForce RTX 3070", 40: "Tesla T4", 80: "Tesla V100-SXM2-16GB", 82: "NVIDIA GeForce RTX 3090"}
"""SchedTune's GPUs by their number of SMs; its K80 is older than any that PyTorch supports."""
IMAGENET = {"mobilenet_v2", "resnet50", "efficientnet_b0", "vgg16"}
"""Models whose name leaves no choice."""


def derived(name: str) -> GpuProduct:
    gpu = next(one for one in GPUS if one["name"] == name)
    figures = msgspec.convert(gpu["figures"], NvmlFigures)
    found = product_of(DeviceClass(f"New {name}", gpu["memoryMib"], 0, gpu["capability"], (), figures=figures))
    assert found is not None
    return found


def table(path: Path) -> Iterator[dict[str, str]]:
    yield from csv.DictReader(path.read_text().splitlines())


def measurements(data: Path) -> Iterator[tuple[str, str, str, int, Precision, float]]:
    """Yield source, GPU, model, batch, precision and peak in MiB."""
    for row in table(data / "schedtune" / "model_stats.csv"):
        if (gpu := SCHEDTUNE.get(int(row["SM count"]))) is not None:
            batch, peak_mib = int(row["batchsize"]), float(row["peak mem usage"])
            yield "schedtune", gpu, f"torchvision/{row['model']}", batch, Precision.FP32, peak_mib
    for row in table(data / "lucid" / "solo_rtx3090.csv"):
        if row["dataset"] == "ImageNet":
            precision = Precision.FP16_MIXED if row["amp"] == "1" else Precision.FP32
            batch, peak_mib = int(row["batchsize"]), float(row["gmem"])
            yield "lucid", "NVIDIA GeForce RTX 3090", "torchvision/resnet50", batch, precision, peak_mib
    for row in table(data / "radrm" / "tasks.csv"):
        if row["dataset"] == "ImageNet" and row["model"] in IMAGENET:
            batch, peak_mib = int(row["batch_size"]), float(row["gpu_memory_mb"])
            yield "radrm", PRODUCT, f"torchvision/{row['model']}", batch, Precision.FP32, peak_mib
    for run in clean(read_rows(data / FILE)):
        yield "gpumemnet", PRODUCT, f"timm/{run.model}", run.batch_size, Precision.FP32, run.peak_mib


def test_bounds_of_derived_products_hold(published: Path) -> None:
    """Seven of GPUMemNet's rows exceed it by workspaces of cuDNN, as they do the bound of the A100 itself."""
    held, rows = Counter[str](), Counter[str]()
    for source, gpu, model, batch_size, precision, peak_mib in measurements(published):
        training = Training(batch_size=batch_size, precision=precision)
        features = store.features(store.CatalogModel(name=model), training)
        assert features is not None, model
        prediction = predict(features, training, [derived(gpu)])
        assert prediction.reason == "DerivedProduct"
        rows[source] += 1
        held[source] += peak_mib <= prediction.products[0].memory.upper_mib
    assert rows == {"schedtune": 192, "lucid": 6, "radrm": 12, "gpumemnet": 3207}
    assert held == rows | {"gpumemnet": 3200}
