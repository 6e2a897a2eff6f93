"""Learns the slowdown model and writes it, for `carpool train`. Needs the extra `train`."""

from pathlib import Path

import msgspec

from carpool_predictor.evaluation.slowdown.gavel import learn, read


def train_slowdown(data: Path, out: Path) -> Path:
    """Write `slowdown.json` below `out`; the same data gives the same bytes.

    Raises:
        DataError: A file or a column is missing.
    """
    path = out / "slowdown.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(learn(read(data))) + b"\n")
    return path
