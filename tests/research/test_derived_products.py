"""Memory of GPUs that are left out of the product table, against every peak that others published."""

import csv
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from carpool_core.products import DeviceClass, GpuProduct, nvml_table, product_of
from carpool_core.resources.job import Training
from carpool_core.values import Precision
from carpool_predictor.catalog import store
from carpool_predictor.predict import predict
from carpool_research.measured import cases, read
from carpool_research.memory.fit import FILE, PRODUCT, clean, read_rows

BY_SMS = {46: "NVIDIA GeForce RTX 3070", 40: "Tesla T4", 80: "Tesla V100-SXM2-16GB", 82: "NVIDIA GeForce RTX 3090"}
"""SchedTune's GPUs by their number of SMs; its K80 is older than any that PyTorch supports."""
FILES = {
    "schedtune/model_stats.csv": ("batchsize", "peak mem usage", None),
    "lucid/solo_rtx3090.csv": ("batchsize", "gmem", "NVIDIA GeForce RTX 3090"),
    "radrm/tasks.csv": ("batch_size", "gpu_memory_mb", PRODUCT),
}
"""Columns of batch and peak in MiB, and the GPU. Only torchvision's models on ImageNet are compared.

Lucid's models on CIFAR-10 are its own, for images of 32 x 32, which no catalog has."""


def derived(name: str) -> GpuProduct:
    gpu = next(one for one in nvml_table().gpus if one.name == name)
    found = product_of(DeviceClass(f"New {name}", gpu.memory_mib, 0, gpu.capability, (), figures=gpu.figures))
    assert found is not None
    return found


def measurements(data: Path) -> Iterator[tuple[str, str, str, Training, float]]:
    """Yield source, GPU, model, training and peak in MiB."""
    for file, (batch, peak, only_gpu) in FILES.items():
        for row in csv.DictReader((data / file).read_text().splitlines()):
            gpu = only_gpu or BY_SMS.get(int(row["SM count"]))
            if gpu is not None and row.get("dataset", "ImageNet") == "ImageNet":
                precision = Precision.FP16_MIXED if row.get("amp") == "1" else Precision.FP32
                training = Training(batch_size=int(row[batch]), precision=precision)
                yield file, gpu, f"torchvision/{row['model'].lower()}", training, float(row[peak])
    for run in clean(read_rows(data / FILE)):
        yield "gpumemnet", PRODUCT, f"timm/{run.model}", Training(batch_size=run.batch_size), run.peak_mib


def own() -> Iterator[tuple[str, str, str, Training, float]]:
    """Yield the same of this project's jobs alone on an H100 and an H200."""
    for case in cases(read())["process"]:
        yield case.gpu, case.gpu, case.model.name, case.training, case.memory_mib


def test_bounds_of_derived_products_hold(published: Path) -> None:
    """Eight of GPUMemNet's rows exceed it by workspaces of cuDNN, as they do the bound of the A100 itself.

    The model was fitted on GPUMemNet's A100. No row of the other products was used.
    """
    held, rows = Counter[str](), Counter[str]()
    for source, gpu, model, training, peak_mib in chain(measurements(published), own()):
        features = store.features(store.CatalogModel(name=model), training)
        if features is not None:  # the catalog has other Inceptions than RAD-RM's
            prediction = predict(features, training, [derived(gpu)])
            assert prediction.reason == "DerivedProduct"
            rows[source] += 1
            held[source] += peak_mib <= prediction.products[0].memory.upper_mib
    assert list(rows.values()) == [192, 6, 12, 3207, 72, 134]
    assert held == rows | {"gpumemnet": 3199}
