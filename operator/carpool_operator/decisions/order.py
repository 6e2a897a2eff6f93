"""Where a job's pods stand among those that wait: behind longer jobs, where the site wants the longest first.

kube-scheduler sorts its queue by priority, then by time. So the site has a PriorityClass for each rung of the ladder of
lengths (`carpool_core.lengths`), and pods get the one of their job's.
"""

import re
from collections.abc import Mapping
from statistics import fmean

from carpool_core.demand import Demand, unsuitable
from carpool_core.lengths import length_s, lengths_s, rung
from carpool_core.lengths import told as duration
from carpool_core.products import hardware_name
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.settings import SettingsError

from carpool_operator.state.inventory import Inventory
from carpool_operator.state.snapshot import Snapshot

_PREFIX = re.compile(r"[a-z0-9][a-z0-9.-]{0,200}")
"""Of names that the API server takes."""

_OWN = ("priorityClassName", "priority", "preemptionPolicy")
"""With one of them a template says itself where its pods stand, and the API server lets no class say otherwise."""

_ALIKE = 1.1
"""By which factor lengths on several products may differ and still be told as one: a step time is predicted no better.
"""


def checked(prefix: str) -> str:
    """Return a prefix of the classes' names, or nothing where there is none.

    Raises:
        SettingsError: No PriorityClass could be called so.
    """
    if prefix and not _PREFIX.fullmatch(prefix):
        raise SettingsError(
            "CARPOOL_LENGTH_CLASSES: expected the beginning of the PriorityClasses' names (lower-case letters, digits, "
            f"- and .), such as carpool-length-, found {prefix!r}"
        )
    return prefix


def length_of(job: GpuTrainingJob, demand: Demand, inventory: Inventory) -> float | None:
    """Return the mean of `lengths_of`, in seconds; None where that is unknown."""
    return length_s(job.spec.training.steps, demand.prediction, _suitable(demand, inventory).__contains__)


def lengths_of(job: GpuTrainingJob, demand: Demand, inventory: Inventory) -> dict[str, float]:
    """Return how long a job takes alone on each product that it may have here, in seconds; empty if unknown."""
    return lengths_s(job.spec.training.steps, demand.prediction, _suitable(demand, inventory).__contains__)


def _suitable(demand: Demand, inventory: Inventory) -> set[str]:
    kinds = {kind for node in inventory for kind, _ in node}
    return {hardware_name(kind.product) for kind in kinds if unsuitable(demand, kind) is None}


def class_of(snapshot: Snapshot, demand: Demand) -> str | None:
    """Return the PriorityClass that a job's pods get, from a template without errors (see `template_error`).

    Returns:
        None where the order of arrival holds, or the template has its own say.
    """
    prefix, template = snapshot.length_classes, snapshot.job.spec.template
    if not prefix or any(template["spec"].get(field) not in (None, "") for field in _OWN):
        return None
    return f"{prefix}{rung(length_of(snapshot.job, demand, snapshot.inventory)):02}"


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
