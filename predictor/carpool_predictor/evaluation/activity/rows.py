"""GPUMemNet's measurements of activity: reading, and which rows count."""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from carpool_core.resources.features import LayerCounts

from carpool_predictor.catalog.notation import work_of
from carpool_predictor.evaluation.gpumemnet import ended_well, file_of
from carpool_predictor.evaluation.tables import amount, number, read_table
from carpool_predictor.features import StepWork

PRODUCT = "NVIDIA A100-SXM4-40GB"
COLUMNS = ("Filename", "Activations-Params", "Batch Size", "Avg GPUTL", "Avg SMACT", "Avg SMOCC")
_NOTHING = StepWork(1, 0.0, 0.0, 0.0, 1.0, LayerCounts())


@dataclass(frozen=True, slots=True)
class ActivityRow:
    """One measured training run, alone on an A100."""

    kind: str
    """`mlp` or `cnn`."""
    architecture: str
    """Such as `pyramid`; what is held out together with the kind."""
    work: StepWork
    gpu_util_percent: float
    """Mean over the run; below 0 where it was not recorded."""
    sm_active_ratio: float
    sm_occupancy_ratio: float
    succeeded: bool
    """Whether the run did not end out of memory."""
    listed: bool
    """Whether its layers were recorded: a run that died at once has none."""

    @property
    def group(self) -> str:
        """What is held out together."""
        return f"{self.kind}/{self.architecture}"

    @property
    def measured(self) -> bool:
        """Whether activity was recorded at all."""
        return self.gpu_util_percent >= 0


def read_rows(data: Path, kind: str) -> list[ActivityRow]:
    """Read the MLPs or the CNNs.

    Args:
        data: Folder that holds `gpumemnet/`.
        kind: `mlp` or `cnn`.

    Raises:
        DataError: The file or a column is missing, or a row cannot be read.
    """
    return read_table(data / file_of(kind), COLUMNS, lambda row: _read(kind, row))


def _read(kind: str, row: dict[str, str]) -> ActivityRow:
    name = row["Filename"]
    layers = ast.literal_eval(row["Activations-Params"])
    batch_size = amount(row, "Batch Size")
    return ActivityRow(
        kind=kind,
        architecture=_word(name, "arch"),
        work=work_of(layers, batch_size, _shape(kind, name)) if layers else _NOTHING,
        gpu_util_percent=number(row, "Avg GPUTL"),
        sm_active_ratio=number(row, "Avg SMACT"),
        sm_occupancy_ratio=number(row, "Avg SMOCC"),
        succeeded=ended_well(row),
        listed=bool(layers),
    )


def _shape(kind: str, name: str) -> tuple[int, ...]:
    if kind == "mlp":
        return (int(_word(name, "input")),)
    size = int(_word(name, "input_size"))
    return (int(_word(name, "input_channels")), size, size)


def _word(name: str, key: str) -> str:
    found = re.search(rf"(?:^|_){key}:([a-z]+|\d+)", name)
    if found is None:
        raise ValueError(f"the name {name!r} lacks {key}:")
    return found.group(1)


def clean(rows: Iterable[ActivityRow]) -> list[ActivityRow]:
    """Keep the runs that trained: measured, not out of memory, with layers recorded."""
    return [row for row in rows if row.measured and row.succeeded and row.listed]
