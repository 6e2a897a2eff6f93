"""How simulated neighbours slow each other down, and what power they draw.

This is the device's own nature, for the scheduler to predict and never to look up. A step of `step_time_s` alone keeps
the GPU busy for the share `gpu_util` of it; only that share stretches beside neighbours, the rest is the host's work.

Time-slicing (and several processes of the one tenant of an Exclusive GPU): contexts take turns. The GPU is one
processor-sharing station in a closed queueing network with one customer for each process and the hosts as delay
stations; Schweitzer's approximation of mean value analysis gives the number of processes found there (P. Schweitzer,
"Approximate analysis of multiclass closed networks of queues", 1979). A switch between contexts costs `SWITCH_COST` of
a slice.

MPS: kernels run side by side. Tenants stretch once the SMs or the memory bandwidth that they want together are more
than there is (the bottleneck bound of operational analysis: Denning and Buzen, 1978), and always a little through the
shared L2 cache and DRAM (`CACHE_COST`). An active-thread percentage stretches kernels that would fill more SMs than it
allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SWITCH_COST = 0.03
CACHE_COST = 0.12
SM_POWER_SHARE = 0.7
"""Of the power between idle and the limit, what full SMs draw; full DRAM draws the rest."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a tenant does to a GPU when it runs alone. All ratios 0..1, means over a step."""

    gpu_util: float = 0.0
    """Share of the time in which a kernel runs."""
    sm_active: float = 0.0
    """Share of SM-time with work."""
    dram_active: float = 0.0
    """Share of the memory bandwidth in use."""


def contention(mode: str, mine: Activity, others: Sequence[Activity], threads: float = 1.0) -> float:
    """Return the time of a step beside others over its time alone, at least 1.

    Args:
        mode: `Exclusive`, `TimeSlicing` or `MPS`.
        mine: The tenant whose step it is.
        others: Everybody else with work on the GPU at present.
        threads: Share of the SMs that MPS lets this tenant use, 0..1.
    """
    if mode == "MPS":
        return _side_by_side(mine, others, threads)
    return _turns([mine, *others]) if others else 1.0


def _turns(tenants: Sequence[Activity]) -> float:
    """Schweitzer's fixed point: `tenants[0]`'s slowdown."""
    stretch = [1.0] * len(tenants)
    for _ in range(50):
        there = [t.gpu_util * s / (t.gpu_util * s + 1 - t.gpu_util) for t, s in zip(tenants, stretch, strict=True)]
        stretch = [1 + (1 + SWITCH_COST) * (sum(there) - own) for own in there]
    return 1 + tenants[0].gpu_util * (stretch[0] - 1)


def _side_by_side(mine: Activity, others: Sequence[Activity], threads: float) -> float:
    wanted_sm = mine.sm_active + sum(other.sm_active for other in others)
    wanted_dram = mine.dram_active + sum(other.dram_active for other in others)
    saturation = max(1.0, wanted_sm, wanted_dram)
    cache = 1 + CACHE_COST * (wanted_dram - mine.dram_active)
    filled = mine.sm_active / mine.gpu_util if mine.gpu_util else 0.0
    stretch = max(saturation * cache, filled / threads)
    return max(1 + mine.gpu_util * (stretch - 1), saturation if others else 1.0)


def dynamic_power_w(activity: Activity, *, idle_w: float, limit_w: float) -> float:
    """Power above idle that this activity draws, in W: linear in SM and DRAM activity, up to the limit."""
    drive = SM_POWER_SHARE * activity.sm_active + (1 - SM_POWER_SHARE) * activity.dram_active
    return (limit_w - idle_w) * min(1.0, drive)
