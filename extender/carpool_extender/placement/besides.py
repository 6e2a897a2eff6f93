"""All that is to be said of a single GPU: every check that fails there, not only the first. Pure."""

import numpy as np

from carpool_extender.placement.checks import SLACK, Check, Verdict, failures
from carpool_extender.placement.refusal import full_reason, outcome

_DECIDED = frozenset((Check.SUITABLE, Check.MODE))
"""Where one of these fails, nothing can be said of memory and slowdown: both hang on how the job would be there."""


def in_full(verdict: Verdict, row: int) -> str:
    """Say what became of one GPU: every check that fails there, or that the job fits."""
    besides = [full_reason(verdict, row, check) for check in failing_besides(verdict, row)]
    return "; besides, ".join([outcome(verdict, row), *besides])


def failing_besides(verdict: Verdict, row: int) -> list[Check]:
    """Return the checks that fail on a GPU, in their order, but for the first; none where all pass."""
    first = int(verdict.found.failed[row])
    if first < 0:
        return []
    found = {
        check
        for check, fails in failures(verdict, verdict.view.columns.take(np.array([row])))
        if fails is not None and bool(fails[0])
    }
    openings, kind = verdict.openings, int(verdict.view.columns.kind[row])
    kept_out = int(openings.kept_out.take(kind))
    if kept_out in _DECIDED:
        found = (found | {Check(kept_out)}) - {Check.MEMORY}
    elif verdict.view.columns.count[row]:
        closest = verdict.closest(row)
        found |= {Check.SLOWDOWN} if closest.limit - closest.slowdown < -SLACK else set()
    return sorted(found - {Check(first)})
