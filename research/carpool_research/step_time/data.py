"""Reads NeuSight's and Zeus' measurements, and computes the operators of NeuSight's models by arithmetic.

Lee et al., "Forecasting GPU Performance for Deep Learning Training and Inference", ASPLOS '25. Transformers of
Hugging Face in eager mode and FP32 without TF32. A time covers forward, or forward and backward, without optimizer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from carpool_predictor.features import StepCost

from carpool_research.tables import amount, number, read_table

FILE = Path("neusight", "e2e_labels_flat.csv")
COLUMNS = ("gpu", "model", "mode", "seqlen", "batch", "variant", "e2e_ms")
_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class MeasuredGpu:
    """A GPU's specification, by its datasheet."""

    fp32_tflops: float
    memory_bandwidth_gb_s: float


GPUS: dict[str, MeasuredGpu] = {
    "Tesla_P4": MeasuredGpu(5.5, 192),
    "Tesla_P100-PCIE-16GB": MeasuredGpu(9.3, 732),
    "Tesla_V100-PCIE-32GB": MeasuredGpu(14.1, 900),
    "Tesla_T4": MeasuredGpu(8.1, 320),
    "NVIDIA_A100-PCIE-40GB": MeasuredGpu(19.5, 1555),
    "NVIDIA_A100_80GB_PCIe": MeasuredGpu(19.5, 1935),
    "NVIDIA_H100_80GB_HBM3": MeasuredGpu(66.9, 3352),
    "NVIDIA_L4": MeasuredGpu(30.3, 300),
}
"""NVIDIA's GPUs in the data; AMD's use matrix cores for FP32 and are omitted."""

TRAINING_GPUS = ("Tesla_P4", "Tesla_P100-PCIE-16GB", "Tesla_V100-PCIE-32GB", "Tesla_T4", "NVIDIA_A100-PCIE-40GB")
"""GPUs that NeuSight trains on; it holds the others out."""


class Shape(NamedTuple):
    """A transformer's published sizes."""

    width: int
    heads: int
    hidden: int
    vocabulary: int
    layers: int
    kind: str


MODELS: dict[str, Shape] = {
    "bert_large": Shape(1024, 16, 4096, 30522, 24, "bert"),
    "gpt2_large": Shape(1280, 20, 5120, 50257, 36, "gpt"),
    # GPT-3's own table is inconsistent: width 2048, and 24 heads of 128. The times fit 24 · 128 = 3072.
    "gpt3_xl": Shape(3072, 24, 12288, 50257, 24, "gpt"),
    "gpt3_27": Shape(2560, 32, 10240, 50257, 32, "gpt"),
    "opt_13": Shape(2048, 32, 8192, 50272, 24, "opt"),
}
INFERRED = "gpt3_xl"
"""The model whose width was inferred from the times; the card also has figures without it."""


class Product(NamedTuple):
    """Matrix products (batch, rows, columns, inner), `times` times."""

    times: int
    batch: int
    rows: int
    columns: int
    inner: int

    @property
    def flops(self) -> float:
        """FLOPs of one."""
        return 2.0 * self.batch * self.rows * self.columns * self.inner

    @property
    def bytes(self) -> float:
        """Bytes that one reads and writes."""
        inner = self.rows * self.inner + self.inner * self.columns
        return float(_ELEMENT_BYTES * self.batch * (inner + self.rows * self.columns))


class Pass(NamedTuple):
    """Element-wise kernels, `times` times, with their elements and accesses per element."""

    times: int
    elements: int
    touches: float

    @property
    def bytes(self) -> float:
        """Bytes that one reads and writes."""
        return _ELEMENT_BYTES * self.elements * self.touches


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One measured step."""

    gpu: str
    model: str
    training: bool
    batch_size: int
    time_s: float
    products: tuple[Product, ...]
    passes: tuple[Pass, ...]

    @property
    def cost(self) -> StepCost:
        """Return the sum of all kernels, as the tracer counts; memory is 0. A test compares the two."""
        kernels: list[Product | Pass] = [*self.products, *self.passes]
        return StepCost(
            peak_bytes=0.0,
            reserved_bytes=0.0,
            flops=sum(p.times * p.flops for p in self.products),
            bytes_moved=sum(k.times * k.bytes for k in kernels),
            kernels=float(sum(k.times for k in kernels)),
        )


def read_models(data: Path) -> tuple[list[ModelRow], int]:
    """Return the measured steps to evaluate, and the number of omitted ones.

    AMD's GPUs, several GPUs, compiled models, mixtures of experts (without shapes in the data) and times of 0 are
    omitted.

    Raises:
        DataError: The file or a column is missing, or a row cannot be read.
    """
    found = read_table(data / FILE, COLUMNS, _row)
    rows = [row for row in found if row is not None]
    return rows, len(found) - len(rows)


def _row(row: dict[str, str]) -> ModelRow | None:
    """Return the measured step of a row, or None to omit it."""
    time_s = number(row, "e2e_ms") / 1e3
    batch_size, length = amount(row, "batch"), amount(row, "seqlen")
    if row["gpu"] not in GPUS or row["model"] not in MODELS or row["variant"] or time_s <= 0:
        return None
    training = row["mode"] == "train"
    products, passes = operators(MODELS[row["model"]], batch_size, length, training=training)
    return ModelRow(row["gpu"], row["model"], training, batch_size, time_s, products, passes)


def operators(
    shape: Shape, batch_size: int, length: int, *, training: bool
) -> tuple[tuple[Product, ...], tuple[Pass, ...]]:
    """Return the kernels of one step of `length` tokens a sample: forward, and backward when training."""
    products = list(_products(shape, batch_size, length, training=training))
    passes = list(_passes(shape, batch_size, length, training=training))
    if training:
        backward = [p for forward in products for p in _gradients(forward)]
        logits = Pass(3, batch_size * length * shape.vocabulary, 3)
        passes += [Pass(p.times, p.elements, 1.5 * p.touches) for p in passes] + [logits]
        products += backward
    return tuple(products), tuple(passes)


def _products(shape: Shape, batch_size: int, length: int, *, training: bool) -> Iterator[Product]:
    tokens, width, layers = batch_size * length, shape.width, shape.layers
    heads, head = batch_size * shape.heads, width // shape.heads
    if shape.kind == "gpt":
        yield Product(layers, 1, tokens, 3 * width, width)
    else:
        yield Product(3 * layers, 1, tokens, width, width)
    yield Product(layers, heads, length, length, head)
    yield Product(layers, heads, length, head, length)
    yield Product(layers, 1, tokens, width, width)
    yield Product(layers, 1, tokens, shape.hidden, width)
    yield Product(layers, 1, tokens, width, shape.hidden)
    if shape.kind != "bert" or training:
        yield Product(1, 1, tokens, shape.vocabulary, width)
    if shape.kind == "bert" and training:
        yield Product(1, 1, tokens, width, width)


def _gradients(p: Product) -> tuple[Product, Product]:
    return (
        Product(p.times, p.batch, p.rows, p.inner, p.columns),
        Product(p.times, p.batch, p.inner, p.columns, p.rows),
    )


def _passes(shape: Shape, batch_size: int, length: int, *, training: bool) -> Iterator[Pass]:
    tokens, layers = batch_size * length, shape.layers
    scores, stream, hidden = batch_size * shape.heads * length**2, tokens * shape.width, tokens * shape.hidden
    # Scores are scaled, masked and normalised; heads are transposed; two residual sums; two layer norms.
    yield Pass(2 * layers, scores, 2)
    yield Pass(layers, scores, 3 if shape.kind == "gpt" else 2)
    yield Pass(4 * layers, stream, 2)
    yield Pass(2 * layers, stream, 3)
    yield Pass(2 * layers, stream, 2)
    if training:
        yield Pass(layers, scores, 2.25)
        yield Pass(2 * layers, stream, 2.25)
    if shape.kind == "gpt":
        # Its GELU has eight operators, two of them with two inputs.
        yield Pass(6 * layers, hidden, 2)
        yield Pass(2 * layers, hidden, 3)
    else:
        yield Pass(layers, hidden, 2)


ZEUS_COLUMNS = ("network", "batch_size", "time_per_epoch", "power_limit")
_IMAGES = 1_281_167
"""Samples of ImageNet's training set."""

ZEUS_GPUS: dict[str, MeasuredGpu] = {
    "a40": MeasuredGpu(37.4, 696),
    "p100": MeasuredGpu(9.3, 732),
    "rtx6000": MeasuredGpu(16.3, 672),
    "v100": MeasuredGpu(14.1, 900),
}
"""By their datasheets, PCIe variants; NVIDIA quotes them without tensor cores."""


@dataclass(frozen=True, slots=True)
class EpochRow:
    """ResNet-50's mean step at one batch size, under the power limit that was fastest."""

    gpu: str
    batch_size: int
    time_s: float


def file_of(gpu: str) -> Path:
    """Return the file of a GPU's measurements, below the data folder."""
    return Path("zeus", f"summary_power_{gpu}.csv")


def read_epochs(data: Path) -> list[EpochRow]:
    """Read ResNet-50's steps.

    Raises:
        DataError: A file or a column is missing, or a row cannot be read.
    """
    return [row for gpu in ZEUS_GPUS for row in _read(data / file_of(gpu), gpu)]


def _read(path: Path, gpu: str) -> list[EpochRow]:
    fastest: dict[int, float] = {}

    def read(row: dict[str, str]) -> None:
        if row["network"] == "resnet50":
            batch_size, epoch_s = amount(row, "batch_size"), number(row, "time_per_epoch")
            if epoch_s <= 0:
                raise ValueError(f"expected an epoch of more than 0 seconds, found {row['time_per_epoch']!r}")
            step_s = epoch_s / math.ceil(_IMAGES / batch_size)
            fastest[batch_size] = min(fastest.get(batch_size, math.inf), step_s)

    read_table(path, ZEUS_COLUMNS, read)
    return [EpochRow(gpu, batch_size, step_s) for batch_size, step_s in sorted(fastest.items())]
