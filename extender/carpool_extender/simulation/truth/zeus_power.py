"""What GPUs draw at work, by the measurements of Zeus (You et al., NSDI '23), as shares of their power limits.

Zeus measured the mean power of whole trainings on four kinds of GPUs, and how long an epoch took. How busy the GPU was
stands nowhere; but ShuffleNet's epochs become several times shorter as its batch grows, until the GPU is full. So its
throughput over the largest that it reaches stands for activity, and a line through its watts says two things: that
power grows with activity as a line does (r² 0.90 to 0.99), and what a GPU draws that has a job and does nothing. What
it draws when it is full the network says that draws the most.

The simulator's GPUs draw by the GPU of their own compute capability, where one was measured, else by the mean of the
four. An RTX 3090, which all experiments but RAD-RM have, draws by the A40, which has the same chip; the policy `energy`
goes by the other three (`carpool_extender.framework.scores`), so that what decides never saw what is true there. Of one
of those three, in somebody's own cluster, it has seen a third.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from carpool_core.products import GpuProduct
from carpool_predictor.evaluation.step_time.zeus import GPUS, file_of
from carpool_predictor.evaluation.tables import number, read_table

from carpool_extender.simulation.truth.power import Power

COLUMNS = ("network", "batch_size", "optimizer", "power_limit", "time_per_epoch", "average_power")
SCALED = "shufflenetv2"
"""The network whose batches fill a GPU by and by."""


class Shares(NamedTuple):
    """Shares of a GPU's power limit."""

    awake: float
    """With a job that does nothing at the time."""
    full: float
    """With all SMs active."""

    def of(self, limit_w: float, asleep_w: float) -> Power:
        """Return what a GPU draws whose limit is so many W, and which draws so many without a job."""
        return Power(asleep_w, round(self.awake * limit_w, 1), round(self.full * limit_w, 1))


ZEUS = {
    "6.0": Shares(awake=0.21, full=0.67),
    "7.0": Shares(awake=0.16, full=0.90),
    "7.5": Shares(awake=0.25, full=0.93),
    "8.6": Shares(awake=0.28, full=0.86),
}
"""As `measured` finds them, by compute capability: of the P100, the V100, the RTX 6000 and the A40."""
MEAN = Shares(awake=0.23, full=0.84)
"""Of the four, for GPUs of other capabilities."""


def power_of(product: GpuProduct) -> Power:
    """Return what a GPU draws where nothing is known of it but its product; its idle power is the datasheet's."""
    shares = ZEUS.get(product.compute_capability, MEAN)
    return shares.of(product.power_limit_w, product.idle_power_w)


class Training(NamedTuple):
    """A training at the largest power limit of its GPU."""

    network: str
    optimizer: str
    epoch_s: float
    share: float
    """Mean power over the limit."""


def measured(data: Path) -> dict[str, Shares]:
    """Work the shares of each GPU, by its name in `zeus.GPUS`, out of Zeus' tables.

    Raises:
        DataError: A table is missing, or cannot be read.
    """
    return {gpu: shares_of(_read(data / file_of(gpu))) for gpu in GPUS}


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
