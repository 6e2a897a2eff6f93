"""Learns the slowdown model and writes it, for `carpool train`. Needs the extra `train`."""

from pathlib import Path

import msgspec

from carpool_predictor.cost_models.slowdown import SlowdownModel
from carpool_predictor.evaluation.slowdown import gavel, holding, steps
from carpool_predictor.evaluation.slowdown.queueing import Weighted, factors

VERSION = "2026.11.4"
LEVEL = 0.9


def learn(data: Path) -> SlowdownModel:
    """Learn all that is shipped; the same data gives the same numbers.

    Raises:
        DataError: A file or a column is missing.
    """
    runs, measured = holding.read(data), gavel.read(data)
    k = holding.best_exponent(list(runs.values()))
    exponent = steps.best_exponent(steps.errors_by_exponent(measured))
    pairs = Weighted.of(measured, exponent, k)
    in_turns, side_by_side = factors(pairs.foretell_held_out(), LEVEL)
    return SlowdownModel(
        version=VERSION,
        demand=round(min(1.0, pairs.fit().demand), 3),
        holding=k,
        level=LEVEL,
        turns_factor=in_turns,
        side_by_side_factor=side_by_side,
        provenance={
            "holding": "itu-rad/GPUMemNet, MLPs and CNNs (A100)",
            "holding_runs": sum(len(of.busy) for of in runs.values()),
            "demand_and_factors": "stanford-futuredata/gavel, oracle throughputs, single-GPU jobs (K80, P100, V100)",
            "jobs": len(measured.step_s),
            "step_curves": len(steps.families(measured)),
            "step_exponent": exponent,
            "pairs": len(pairs.pairs),
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
