"""What would be if all GPUs were empty and healthy: whether a job could ever run on those that there are."""

import numpy as np
from numpy.typing import NDArray

from carpool_extender.placement.checks import Verdict
from carpool_extender.placement.modes import EXCLUSIVE, MIG
from carpool_extender.placement.refusal import counted
from carpool_extender.state.view import NO_MODE


def never_fits(verdict: Verdict, slots: int, workers: int) -> str | None:
    """Say why so many workers could not even run on empty GPUs; None where nothing known forbids it.

    Args:
        verdict: Of one of them.
        slots: Most tenants of one GPU.
        workers: How many there are.
    """
    gpus, columns = verdict.applicant.demand.gpus, verdict.view.columns
    able = np.flatnonzero(verdict.could_ever())
    able = able[_of_classes(verdict, slots).take(columns.device_class.take(able)) > 0]
    most = int(np.bincount(columns.node[able], minlength=1).max())
    if most and most < gpus:
        return f"needs {gpus} suitable GPUs on one node, the best node has {most}"
    if not most:
        return "no node has GPUs that would do, even if they were empty"
    if (room := workers_ever(verdict, slots)) < workers:
        return f"needs places for {counted(workers, 'worker')} at once, and empty GPUs would have {room:,} at most"
    return None


def workers_ever(verdict: Verdict, slots: int) -> int:
    """Say for how many workers there would be room at most: how they get along is left out, and health."""
    columns, gpus = verdict.view.columns, verdict.applicant.demand.gpus
    able = np.flatnonzero(verdict.could_ever())
    each = _of_classes(verdict, slots).take(columns.device_class.take(able))
    if gpus == 1:
        return int(each.sum())
    nodes, has_room = columns.node.take(able), each > 0
    on_node = np.where(np.bincount(nodes, has_room) >= gpus, np.bincount(nodes, each) // gpus, 0)
    return int(on_node.sum())


def _of_classes(verdict: Verdict, slots: int) -> NDArray[np.int64]:
    """Say how many workers a GPU of each class takes at most, in whichever mode takes most, shape (classes,)."""
    openings, most_jobs = verdict.openings, verdict.conditions.most_jobs
    usable = np.array([kind.usable_mib for kind in verdict.view.classes], np.int64)[:, None]
    held = usable // np.maximum(openings.need_mib, 1)
    of_mig = openings.facts.mig.astype(np.int64)
    instances = (of_mig[:, 2:] // np.maximum(of_mig[:, :2], 1)).min(axis=1)[:, None]
    most = np.where(openings.mode == MIG, instances, held)
    most = np.clip(most, 1, slots if most_jobs is None else min(slots, most_jobs))  # one: they are suitable
    most = np.where(openings.mode == EXCLUSIVE, 1, most)
    result: NDArray[np.int64] = np.where(openings.mode == NO_MODE, 0, most).max(axis=1, initial=0)
    return result
