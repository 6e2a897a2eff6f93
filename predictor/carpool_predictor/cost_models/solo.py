"""What tenants of one GPU would do alone, from what they are measured to do together.

Beside neighbours a job does less in a second than alone, by its slowdown, and the slowdown follows from what all of
them would do alone. So each is looked for whose slowed-down activity is what was measured, by iteration from there.

On a GPU that is used up many answers fit: each tenant gets what the others leave, however much more it would do alone.
The iteration ends at the least of them. Who took it for the truth would have more jobs come to that GPU, which each get
still less, and so on. So there a measure raises what is expected of a tenant, and never lowers it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from carpool_core.values import SharingMode

from carpool_predictor.cost_models.slowdown import SM_SATURATION, slowdowns

USED_UP = SM_SATURATION
"""Share of a GPU, of its time or of its SMs, from which on what its tenants get is what the others leave: from there on
those under MPS disturb each other; of time it is an assumption, with room for monitors that count too little."""
ROUNDS = 20
"""Enough for what is measured on GPUs that are not used up; on others it ends where it is."""


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


def is_used_up(mode: SharingMode, together: Sequence[Activity]) -> bool:
    """Whether tenants of a GPU get what the others leave: those who take turns of its time, the others of its SMs.

    Args:
        mode: How the GPU is shared.
        together: What each is measured to do.
    """
    used = {SharingMode.TIME_SLICING: (one.util for one in together), SharingMode.MPS: (one.sm for one in together)}
    return len(together) > 1 and sum(used.get(mode, ())) >= USED_UP
