"""All that is to be said of a single GPU: what fails there, not only the first check, or by how much all pass. Pure.

Of two reasons within one check, and of a GPU that is both of a wrong product and in an exclusive tenant's use, one is
told.
"""

import numpy as np

from carpool_extender.placement.checks import SLACK, Check, Verdict, failures
from carpool_extender.placement.modes import EXCLUSIVE, MIG
from carpool_extender.placement.refusal import full_reason, outcome
from carpool_extender.state.mig import whole

_DECIDED = frozenset((Check.SUITABLE, Check.MODE))
"""Where one of these fails, nothing can be said of memory and slowdown: both hang on how the job would be there."""


def in_full(verdict: Verdict, row: int) -> str:
    """Say what became of one GPU: every check that fails there, or that the job fits and what room each leaves."""
    if int(verdict.found.failed[row]) < 0:
        return "; ".join([outcome(verdict, row), *([", ".join(room)] if (room := rooms(verdict, row)) else [])])
    besides = [full_reason(verdict, row, check) for check in failing_besides(verdict, row)]
    return "; besides, ".join([outcome(verdict, row), *besides])


def rooms(verdict: Verdict, row: int) -> list[str]:
    """Say of a GPU that the job fits on how far it is from the limits that the site sets: tenants and preconditions.

    A job that has the GPU to itself is no nearer to any number of tenants than another.
    """
    asked, columns, told = verdict.conditions, verdict.view.columns, []
    mode, jobs = int(verdict.found.mode[row]), int(columns.count[row])
    kind = verdict.view.classes[int(columns.device_class[row])]
    if mode != EXCLUSIVE:
        most = verdict.slots if asked.most_jobs is None else min(verdict.slots, asked.most_jobs)
        told.append(f"tenant {jobs + 1} of at most {most}")
    if mode == MIG and (instance := verdict.applicant.facts(kind).mig) is not None:
        (gb, slices), taken = whole(kind.mig_profiles), (int(columns.mig_gb[row]), int(columns.mig_slices[row]))
        told.append(f"{instance.name} beside {taken[1]} of {slices} slices and {taken[0]} of {gb} GB taken")
    active = float(columns.sm_active[row])
    if asked.most_sm_active is not None:
        told.append(f"SM activity {active:.2f} of at most {asked.most_sm_active:.2f}")
    if asked.most_joint_sm_active is not None and jobs:
        joint = active + verdict.applicant.facts(kind).profile.sm_active_ratio
        told.append(f"joint SM activity {joint:.2f} of at most {asked.most_joint_sm_active:.2f}")
    if asked.least_free_mib:
        told.append(f"{int(columns.free_mib[row]):,} MiB free before it, at least {asked.least_free_mib:,} asked for")
    return told


def failing_besides(verdict: Verdict, row: int) -> list[Check]:
    """Return the checks that fail on a GPU, in their order, but for the first; none where all pass."""
    first = int(verdict.found.failed[row])
    if first < 0:
        return []
    openings, kind = verdict.openings, int(verdict.view.columns.kind[row])
    kept_out = int(openings.kept_out.take(kind))
    found = {
        check
        for check, fails in failures(verdict, verdict.view.columns.take(np.array([row])))
        if fails is not None and bool(fails[0])
    }
    if kept_out == Check.SUITABLE and verdict.conditions.most_joint_sm_active is not None:
        found -= {Check.CONDITION}  # what it would do there is not known
    if kept_out in _DECIDED:
        found = (found | {Check(kept_out)}) - {Check.MEMORY}
    elif verdict.view.columns.count[row]:
        closest = verdict.closest(row)
        found |= {Check.SLOWDOWN} if closest.limit - closest.slowdown < -SLACK else set()
    return sorted(found - {Check(first)})
