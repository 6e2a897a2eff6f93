"""Who decides in a simulation: a policy, what it is told of the jobs, and how its queue works."""

from dataclasses import dataclass
from enum import StrEnum

from carpool_core.values import SharingMode
from carpool_extender.framework.admission_limits import AdmissionLimits
from carpool_extender.framework.filters import NO_LIMITS
from carpool_extender.queue.order import QueueOrder
from carpool_predictor.calibration.observe import STEADY_S


class Knowledge(StrEnum):
    """What a decision is told of jobs."""

    NOTHING = "nothing"
    """Of the newcomer nothing; of tenants what a monitor sees."""
    PREDICTED = "predicted"
    """What the shipped predictor says of each; once a tenant is measured, its activity as measured."""
    TRUTH = "truth"
    """Everything: an oracle."""


class Piece(StrEnum):
    """One piece of the truth, which a decision may be told in the place of what it would know."""

    MEMORY = "memory"
    ACTIVITY = "activity"
    SLOWDOWNS = "slowdowns"
    DURATIONS = "durations"
    """How long each job runs alone: the longest of those that wait comes first."""


ANY_SLOWDOWN = 10.0
"""The largest limit that a job may say; it asks nothing."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One line of a table."""

    name: str
    policy: str
    knowledge: Knowledge = Knowledge.NOTHING
    mode: SharingMode = SharingMode.MPS
    """How GPUs are shared where they are."""
    max_slowdown: float = ANY_SLOWDOWN
    """What every job accepts."""
    conditions: AdmissionLimits = NO_LIMITS
    settle_s: float = 0.0
    """After a placement a GPU takes nobody else for so long, in seconds: its monitor must see the newcomer first."""
    in_order: bool = False
    """Whether the queue waits for its first job."""
    profile_s: float = 0.0
    """A newcomer is alone on its GPU for so long, in seconds, before anybody may join: the reactive way to know it."""
    by_utilization: bool = False
    """Whether GPU utilization takes the place of SM activity, as where only the former was known."""
    measure: bool = True
    """Whether the activity of running tenants is taken as measured rather than as predicted."""
    learns: bool = False
    """Whether what ran, or died of memory, calibrates the predictions of later jobs."""
    strict: bool = True
    """Where it learns: whether jobs run alone on a stack of which nothing was measured yet."""
    order: QueueOrder = QueueOrder.ARRIVAL
    """How waiting jobs are sorted, by the lengths that are predicted of them, as with the chart's `queueOrder`. A
    policy that starts with the largest has its own order, and so has who is told true durations."""
    silent_share: float = 0.0
    """Share of the jobs that do not say how many steps they have, 0..1; of which jobs is drawn, for ablations."""
    steps_error: float = 0.0
    """Factor-wise error of the steps that jobs say (standard deviation of the logarithm), for ablations."""
    settles: bool = False
    """Whether a job that never ran counts with its own peak once that was measured, so that others may join it."""
    published: str = ""
    """What the source says of this line."""
    error: float = 0.0
    """Factor-wise error put on top of predictions (standard deviation of the logarithm), for ablations."""
    abstain: bool = False
    """Whether the predictor abstains from every job, for ablations."""
    told: frozenset[Piece] = frozenset()
    """What is known as it truly is, to find out what not knowing it costs."""
    steady_s: float = STEADY_S
    """How long a peak has stood still when it is taken for the job's, in seconds."""
    mode_change_s: float = 0.0
    """Time that the first job in another mode loses while its GPU is prepared, in seconds."""
