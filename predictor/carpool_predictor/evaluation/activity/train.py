"""Fits the activity model and writes it, for `carpool train`. Needs the extra `train`."""

from pathlib import Path

import msgspec

from carpool_predictor.evaluation.activity.fit import fit
from carpool_predictor.evaluation.activity.rows import clean, read_rows
from carpool_predictor.evaluation.gpumemnet import KINDS

SEED = 0


def train_activity(data: Path, out: Path) -> Path:
    """Write `activity.json` below `out`; the same data and seed give the same bytes.

    Raises:
        DataError: A file or a column is missing.
    """
    rows = [row for kind in KINDS for row in clean(read_rows(data, kind))]
    path = out / "activity.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(fit(rows, SEED)) + b"\n")
    return path
