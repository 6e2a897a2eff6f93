"""Measured peaks of timm models: reading them, and telling runs that died from runs that were measured."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from carpool_predictor.evaluation.tables import read_table

FILE = Path("gpumemnet", "timm_a100_40gb.csv")
"""GPUMemNet's timm measurements, below the data folder."""
COLUMNS = ("timm_model", "timm_module", "batch_size", "max_gpu_memory_mib", "faketensor_mib")
PRODUCT = "NVIDIA A100-SXM4-40GB"
CAPACITY_MIB = 40960
CENSORED_SHARE = 0.94
"""A peak above this share of the GPU's memory is out of memory waiting to happen: censored, not a label."""
MIN_GROWTH = 1.02
"""Doubling the batch raises even the smallest model's peak by more than this."""
MIN_PACE = 0.5
"""Memory is nearly affine in the batch, so that each doubling adds twice what the one before added. A run that adds
less than this share of what the one before added had no room left."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run."""

    model: str
    family: str
    batch_size: int
    peak_mib: float
    fake_tensor_mib: float = 0.0
    """What PyTorch's FakeTensor mode estimated, as published beside the measurement."""


def read_rows(path: Path) -> list[Row]:
    """Read GPUMemNet's timm measurements.

    Raises:
        DataError: The file or a column is missing, or a row cannot be read.
    """
    return read_table(path, COLUMNS, _row)


def _row(record: dict[str, str]) -> Row:
    model, family, batch_size, peak, fake = (record[column] for column in COLUMNS)
    row = Row(model, family, int(batch_size), float(peak), float(fake or 0))
    if row.batch_size < 1 or not 0 < row.peak_mib < math.inf:
        raise ValueError(f"expected a batch size and a peak above 0, found {batch_size} and {peak}")
    return row


def clean(rows: Iterable[Row]) -> list[Row]:
    """Drop runs that died: memory grows with the batch, so a model's rows count until they first fail to keep pace.

    A model with no growing pair is dropped whole (its first run may be the dead one), and so are peaks at the GPU's
    capacity, which are censored. The simulation plays no part in this.
    """
    kept: list[Row] = []
    by_model: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_model[row.model].append(row)
    for runs in by_model.values():
        runs.sort(key=lambda row: row.batch_size)
        alive, pace = runs[:1], 0.0
        for run in runs[1:]:
            before, added = alive[-1], run.peak_mib - alive[-1].peak_mib
            grown = run.peak_mib > MIN_GROWTH * before.peak_mib and added > MIN_PACE * pace
            if not grown or run.peak_mib > CENSORED_SHARE * CAPACITY_MIB:
                break
            pace = added
            alive.append(run)
        kept += alive if len(alive) > 1 else []
    return kept
