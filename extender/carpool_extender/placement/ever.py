"""What would be if all GPUs were empty and healthy: whether a job could ever run on those that there are."""

import numpy as np

from carpool_extender.placement.checks import Verdict
from carpool_extender.placement.modes import EXCLUSIVE
from carpool_extender.placement.refusal import counted
from carpool_extender.state.view import NO_MODE


def never_fits(verdict: Verdict, slots: int, workers: int) -> str | None:
    """Say why so many workers could not even run on empty GPUs; None where nothing known forbids it.

    Args:
        verdict: Of one of them.
        slots: Most tenants of one GPU.
        workers: How many there are.
    """
    gpus, able = verdict.applicant.demand.gpus, verdict.could_ever()
    most = int(np.bincount(verdict.view.columns.node[able], minlength=1).max())
    if not most:
        return "no node has GPUs that would do, even if they were empty"
    if most < gpus:
        return f"needs {gpus} suitable GPUs on one node, the best node has {most}"
    if (room := workers_ever(verdict, slots)) < workers:
        return f"needs places for {counted(workers, 'worker')} at once, and empty GPUs would have {room:,}"
    return None


def workers_ever(verdict: Verdict, slots: int) -> int:
    """Say for how many workers there is memory and places if all GPUs are empty and healthy, whatever else is so."""
    columns, gpus, openings = verdict.view.columns, verdict.applicant.demand.gpus, verdict.openings
    able = np.flatnonzero(verdict.could_ever())
    need_mib = openings.need_mib[:, NO_MODE].take(columns.device_class.take(able))
    is_alone = (openings.mode[:, NO_MODE] == EXCLUSIVE).take(columns.device_class.take(able))
    each = np.where(is_alone, 1, np.minimum(columns.usable_mib.take(able) // need_mib, slots))
    if gpus == 1:
        return int(each.sum())
    nodes = columns.node.take(able)
    on_node = np.where(np.bincount(nodes) >= gpus, np.bincount(nodes, each) // gpus, 0)
    return int(on_node.sum())
