"""GPUMemNet's files of trainings whose activity was measured: where they lie, and which runs ended well."""

from collections.abc import Mapping
from pathlib import Path

KINDS = ("mlp", "cnn")


def file_of(kind: str) -> Path:
    """Return the file of the MLPs or the CNNs, below the data folder."""
    return Path("gpumemnet", f"{kind}_a100_40gb.csv")


def ended_well(row: Mapping[str, str]) -> bool:
    """Whether a run did not end out of memory; of MLPs only those were published that did not."""
    return row.get("Status", "SUCCESSFUL") == "SUCCESSFUL"
