"""By how much GPUs meet what the site asks of them besides the promises."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from carpool_extender.placement.conditions import Conditions
from carpool_extender.state.view import Columns, Floats


def condition_margin(conditions: Conditions, columns: Columns, newcomer: Floats) -> NDArray[np.float64]:
    """The share by which the tightest of the site's preconditions is met or missed."""
    active, free = columns.sm_active, columns.free_mib
    margin = np.ones(len(free))
    if conditions.most_sm_active is not None:
        margin = np.minimum(margin, (conditions.most_sm_active - active) / conditions.most_sm_active)
    if (joint := conditions.most_joint_sm_active) is not None:
        room = (joint - active - newcomer) / joint
        margin = np.where(columns.count > 0, np.minimum(margin, room), margin)
    if conditions.least_free_mib:
        margin = np.minimum(margin, (free - conditions.least_free_mib) / conditions.least_free_mib)
    if conditions.most_jobs is not None:
        margin = np.minimum(margin, (conditions.most_jobs - 1.0 - columns.count) / conditions.most_jobs)
    return margin


def missed(conditions: Conditions, columns: Columns, newcomer: Floats) -> list[NDArray[Any]]:
    """What GPUs have of each thing that the site asks for, shape (gpus,) each; as much as it asks where that is met."""
    active, found = columns.sm_active, list[NDArray[Any]]()
    if (most := conditions.most_sm_active) is not None:
        found.append(np.maximum(active, most))
    if (joint := conditions.most_joint_sm_active) is not None:
        found.append(np.where(columns.count > 0, np.maximum(active + newcomer, joint), joint))
    if (least := conditions.least_free_mib) is not None:
        found.append(np.minimum(columns.free_mib, least))
    if (jobs := conditions.most_jobs) is not None:
        found.append(np.maximum(columns.count, jobs - 1))
    return found
