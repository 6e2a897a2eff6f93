"""Strategies of a simulation: a placement policy, its information about jobs, and its queue discipline."""

from dataclasses import dataclass
from enum import StrEnum

from carpool_core.resources.node import STEADY_S
from carpool_core.values import SharingMode, WhenSlowed
from carpool_extender.framework.filters import NO_LIMITS, AdmissionLimits
from carpool_extender.queue.order import QueueOrder


class Knowledge(StrEnum):
    """Information about jobs that decisions use."""

    NOTHING = "nothing"
    """None about the incoming job; of tenants the measurements of a monitor."""
    PREDICTED = "predicted"
    """The shipped predictor's output; of a measured tenant its measured activity."""
    TRUTH = "truth"
    """The truth: an oracle."""


ANY_SLOWDOWN = 10.0
"""The largest `maxSlowdown`; it restricts nothing."""


@dataclass(frozen=True)
class Strategy:
    """A strategy: one line of a table."""

    name: str
    policy: str
    knowledge: Knowledge = Knowledge.NOTHING
    mode: SharingMode = SharingMode.MPS
    """Sharing mode of shared GPUs."""
    max_slowdown: float = ANY_SLOWDOWN
    """Limit of every job."""
    conditions: AdmissionLimits = NO_LIMITS
    in_order: bool = False
    """Whether all jobs wait for the first one; otherwise the queue backfills."""
    measure: bool = True
    """Whether measured activity of tenants replaces predicted activity."""
    learns: bool = False
    """Whether runs and out-of-memory deaths calibrate later predictions."""
    strict: bool = True
    """With learning: whether jobs run alone on a stack of which nothing was measured yet."""
    learns_slowdowns: bool = False
    """With learning: whether measured slowdowns of pairs correct later ones, too."""
    order: QueueOrder = QueueOrder.ARRIVAL
    """Order of the queue, as the chart's `queueOrder`. Decreasing policies have their own order."""
    settles: bool = False
    """Whether a job that never ran counts with its own memory peak once that was measured."""
    when_slowed: WhenSlowed = WhenSlowed.STAY
    """`sharing.whenSlowed` of every job; needs `learns_slowdowns`."""
    steady_s: float = STEADY_S
    """Time for which a peak must be stable before it counts as the job's, in seconds."""
