"""How busy a GPU truly is with several tenants. Pure.

Lucid measured the GPU utilization of its 676 pairs, too. It is less than what both keep busy alone over their
slowdowns, because the times in which they are busy overlap: taken as if they were independent, the GPU rests where all
rest, it comes out as measured. Nothing was fitted for it; `tests/extender/simulation/test_overlap.py` holds it against
the pairs.
"""

import math
from collections.abc import Sequence

from carpool_core.values import SharingMode

from carpool_extender.simulation.truth.workload import Truth


def utilization(tenants: Sequence[Truth], slowdowns: Sequence[float]) -> float:
    """Return the share of time in which some tenant's kernel runs, 0..1.

    A GPU rests where all rest, each as it would alone: slowed down, a job's kernels take longer, not its pauses. More
    than the work that is done, which their slowdowns tell, nobody is credited with.
    """
    resting = math.prod(1.0 - one.util for one in tenants)
    done = sum(one.util / slowdown for one, slowdown in zip(tenants, slowdowns, strict=True))
    return min(1.0 - resting, done)


def sm_activity(mode: SharingMode, tenants: Sequence[Truth], slowdowns: Sequence[float], busy: float) -> float:
    """Return the share of SMs with work, 0..1.

    Where tenants take turns, one kernel at a time has SMs, so that the time that is busy counts, with as many SMs as
    its owners use while they are. Otherwise their kernels run at once, and what each does adds up.

    Args:
        mode: How they share the GPU.
        tenants: What each does alone.
        slowdowns: Of each.
        busy: Utilization of the GPU, 0..1.
    """
    active = sum(one.sm / slowdown for one, slowdown in zip(tenants, slowdowns, strict=True))
    if mode is SharingMode.TIME_SLICING and active:
        active *= busy / sum(one.util / slowdown for one, slowdown in zip(tenants, slowdowns, strict=True))
    return min(1.0, active)
