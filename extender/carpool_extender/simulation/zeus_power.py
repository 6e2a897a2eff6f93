"""What GPUs draw at work, by the measurements of Zeus (You et al., NSDI '23), as shares of their power limits.

Zeus measured the mean power of whole trainings on four kinds of GPUs, and how long an epoch took. How busy the GPU was
stands nowhere; but ShuffleNet's epochs become several times shorter as its batch grows, until the GPU is full. So its
throughput over the largest that it reaches stands for activity, and a line through its watts says two things: that
power grows with activity as a line does (r² 0.90 to 0.99), and what a GPU draws that has a job and does nothing. What
it draws when it is full the network says that draws the most.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from carpool_predictor.tables import number, read_table
from carpool_predictor.zeus import GPUS, file_of

from carpool_extender.simulation.power import Power

COLUMNS = ("network", "batch_size", "optimizer", "power_limit", "time_per_epoch", "average_power")
SCALED = "shufflenetv2"
"""The network whose batches fill a GPU by and by."""


class Shares(NamedTuple):
    """Shares of a GPU's power limit."""

    awake: float
    """With a job that does nothing at the time."""
    full: float
    """With all SMs active."""

    def of(self, limit_w: float) -> Power:
        """Return what a GPU with a job draws whose limit is so many W."""
        return Power(round(self.awake * limit_w, 1), round(self.full * limit_w, 1))


ZEUS = Shares(awake=0.23, full=0.84)
"""Means of the four GPUs, as `measured` finds them; single ones 0.16 to 0.28, and 0.67 to 0.93."""


class Training(NamedTuple):
    """A training at the largest power limit of its GPU."""

    network: str
    optimizer: str
    epoch_s: float
    share: float
    """Mean power over the limit."""


def measured(data: Path) -> list[Shares]:
    """Work the shares of each GPU out of Zeus' tables.

    Raises:
        DataError: A table is missing, or cannot be read.
    """
    return [shares_of(_read(data / file_of(gpu))) for gpu in GPUS]


def shares_of(runs: Sequence[Training]) -> Shares:
    """Work out the shares of one GPU.

    Args:
        runs: All of its trainings, those of `SCALED` among them at several batches.
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
