"""How long a job takes alone on the GPUs that it may have here, and how that is told."""

from collections.abc import Mapping
from statistics import fmean

from carpool_core.demand import Demand, unsuitable
from carpool_core.lengths import lengths_s
from carpool_core.lengths import told as duration
from carpool_core.products import hardware_name
from carpool_core.resources.job import GpuTrainingJob

from carpool_operator.state.inventory import Inventory

_ALIKE = 1.1
"""By which factor lengths on several products may differ and still be told as one: a step time is predicted no better.
"""


def lengths_of(job: GpuTrainingJob, demand: Demand, inventory: Inventory) -> dict[str, float]:
    """Return how long a job takes alone on each product that it may have here, in seconds; empty if unknown."""
    return lengths_s(job.spec.training.steps, demand.prediction, _suitable(demand, inventory).__contains__)


def _suitable(demand: Demand, inventory: Inventory) -> set[str]:
    kinds = {kind for node in inventory for kind, _ in node}
    return {hardware_name(kind.product) for kind in kinds if unsuitable(demand, kind) is None}


def told(steps: int, lengths: Mapping[str, float]) -> str:
    """Say how long a job takes, and on which products least and most where they differ.

    Args:
        steps: Of its training.
        lengths: Seconds that it takes alone, by product; at least one.
    """
    fast, slow = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
    least, most = lengths[fast], lengths[slow]
    about = f"{duration(least)} ({fast}) to {duration(most)} ({slow})"
    if most <= _ALIKE * least:
        about = duration(fmean(lengths.values()))
    return f"{steps:,} {'step takes' if steps == 1 else 'steps take'} about {about} alone"
