"""Learns the slowdown model and writes it, for `carpool train`. Needs the extra `train`."""

from pathlib import Path

import msgspec

from carpool_predictor.evaluation.slowdown import gavel, holding
from carpool_predictor.models.slowdown import SlowdownModel

VERSION = "2026.11.3"
LEVEL = 0.9


def learn(data: Path) -> SlowdownModel:
    """Learn all that is shipped; the same data gives the same numbers.

    Raises:
        DataError: A file or a column is missing.
    """
    runs, measured = holding.read(data), gavel.read(data)
    k = holding.best_exponent(list(runs.values()))
    hiding = gavel.most_cautious(gavel.errors_by_exponent(measured))
    held_out = gavel.queueing(measured, hiding, k)
    in_turns, side_by_side = gavel.factors(held_out, LEVEL)
    return SlowdownModel(
        version=VERSION,
        holding=k,
        level=LEVEL,
        turns_factor=in_turns,
        side_by_side_factor=side_by_side,
        provenance={
            "holding": "itu-rad/GPUMemNet, MLPs and CNNs (A100)",
            "holding_runs": sum(len(of.busy) for of in runs.values()),
            "factors": "stanford-futuredata/gavel, oracle throughputs (K80, P100, V100), single-GPU jobs",
            "jobs": len(measured.step_s),
            "step_curves": len(gavel.families(measured)),
            "step_exponent": hiding,
            "pairs": len(held_out.measured),
        },
    )


def train_slowdown(data: Path, out: Path) -> Path:
    """Write `slowdown.json` below `out`; the same data gives the same bytes.

    Raises:
        DataError: A file or a column is missing.
    """
    path = out / "slowdown.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(learn(data)) + b"\n")
    return path
