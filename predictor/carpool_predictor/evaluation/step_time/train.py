"""Fits the step-time model and writes it, for `carpool train`. Needs the extra `train`."""

from pathlib import Path

import msgspec

from carpool_predictor.evaluation.step_time.fit import model_of
from carpool_predictor.evaluation.step_time.neusight import read_models


def train_step_time(data: Path, out: Path) -> Path:
    """Write `step_time.json` below `out`; the same data give the same bytes.

    Raises:
        DataError: A file or a column is missing.
    """
    rows, _ = read_models(data)
    path = out / "step_time.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(model_of(rows)) + b"\n")
    return path
