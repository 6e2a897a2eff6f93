"""What tenants of one GPU would do alone, from what they are measured to do together.

Beside neighbours a job does less in a second than alone, by its slowdown, and the slowdown follows from what all of
them would do alone. So each is looked for whose slowed-down activity is what was measured, by iteration from there.
Where a GPU is saturated many answers fit, and the slowdown model's errors come in; what is found is an estimate.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from carpool_core.values import SharingMode

from carpool_predictor.cost_models.slowdown import slowdowns

ROUNDS = 20
"""Enough for what is measured on GPUs that are not saturated; on others it ends where it is."""


class Activity(NamedTuple):
    """What one tenant does, each 0..1."""

    util: float
    """Share of time in which a kernel of it runs."""
    sm: float
    """Mean share of SMs with its work."""
    dram: float
    """Share of memory cycles in use; as predicted alone, because no agent measures it."""


def alone(mode: SharingMode, together: Sequence[Activity]) -> list[Activity]:
    """Estimate what each tenant of a GPU would do without the others.

    Args:
        mode: How the GPU is shared.
        together: What each was measured to do, over the same time.
    """
    measured = np.array(together, np.float64).reshape(-1, 3)
    found = measured.copy()
    every = np.ones((1, len(together)), np.bool_)
    for _ in range(ROUNDS):
        util, sm, dram = found.T[:, None, :]
        by = slowdowns(mode, util, sm, dram, every)[0]
        found[:, :2] = np.minimum(1.0, measured[:, :2] * by[:, None])
    return [Activity(*row) for row in found.tolist()]
