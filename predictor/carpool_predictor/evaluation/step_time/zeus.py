"""Zeus' measurements of ResNet-50 on ImageNet: a convolutional network, on GPUs that nothing was fitted to.

You et al., "Zeus: Understanding and Optimizing GPU Energy Consumption of DNN Training", NSDI '23. Times of whole
epochs, loading and augmenting images included.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from carpool_predictor.evaluation.step_time.neusight import MeasuredGpu
from carpool_predictor.evaluation.tables import amount, number, read_table

COLUMNS = ("network", "batch_size", "time_per_epoch", "power_limit")
_IMAGES = 1_281_167
"""Samples of ImageNet's training set."""

GPUS: dict[str, MeasuredGpu] = {
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
    return [row for gpu in GPUS for row in _read(data / file_of(gpu), gpu)]


def _read(path: Path, gpu: str) -> list[EpochRow]:
    fastest: dict[int, float] = {}

    def read(row: dict[str, str]) -> None:
        if row["network"] == "resnet50":
            batch_size, epoch_s = amount(row, "batch_size"), number(row, "time_per_epoch")
            if epoch_s <= 0:
                raise ValueError(f"expected an epoch of more than 0 seconds, found {row['time_per_epoch']!r}")
            step_s = epoch_s / math.ceil(_IMAGES / batch_size)
            fastest[batch_size] = min(fastest.get(batch_size, math.inf), step_s)

    read_table(path, COLUMNS, read)
    return [EpochRow(gpu, batch_size, step_s) for batch_size, step_s in sorted(fastest.items())]
