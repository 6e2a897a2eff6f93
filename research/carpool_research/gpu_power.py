"""Power of idle and full GPUs as shares of their power limit, measured by Zeus (You et al., NSDI '23).

Zeus published mean power and epoch time of whole trainings on four GPUs, but no activity. ShuffleNet's epochs become
shorter with its batch until the GPU is full, so its throughput over the largest one approximates activity. A line
through its power over activity (r² 0.90 to 0.99) gives the idle share. The network with the most power gives the full
share.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from carpool_simulator.power import Shares

from carpool_research.step_time.data import ZEUS_GPUS, file_of
from carpool_research.tables import number, read_table

COLUMNS = ("network", "batch_size", "optimizer", "power_limit", "time_per_epoch", "average_power")
SCALED = "shufflenetv2"
"""The network whose larger batches fill a GPU."""


class Training(NamedTuple):
    """A training at the largest power limit of its GPU."""

    network: str
    optimizer: str
    epoch_s: float
    share: float
    """Mean power over the limit."""


def measured(data: Path) -> dict[str, Shares]:
    """Return the shares of each GPU of `ZEUS_GPUS`.

    Raises:
        DataError: A table is missing, or cannot be read.
    """
    return {gpu: shares_of(_read(data / file_of(gpu))) for gpu in ZEUS_GPUS}


def shares_of(runs: Sequence[Training]) -> Shares:
    """Return the shares of one GPU.

    Args:
        runs: All of its trainings, with those of `SCALED` at several batches.
    """
    scaled = [run for run in runs if run.network == SCALED]
    fastest_s = {one.optimizer: min(r.epoch_s for r in scaled if r.optimizer == one.optimizer) for one in scaled}
    activity = [fastest_s[run.optimizer] / run.epoch_s for run in scaled]
    _, awake = np.polyfit(activity, [run.share for run in scaled], 1)
    by_network = defaultdict(list)
    for run in runs:
        by_network[run.network].append(run.share)
    return Shares(float(awake), max(map(fmean, by_network.values())))


def _read(path: Path) -> list[Training]:
    rows = read_table(path, COLUMNS, lambda row: (row, number(row, "power_limit"), number(row, "average_power")))
    limit_w = max(limit for _, limit, _ in rows)
    return [
        Training(row["network"], row["optimizer"], number(row, "time_per_epoch"), power_w / limit_w)
        for row, limit, power_w in rows
        if limit == limit_w
    ]
