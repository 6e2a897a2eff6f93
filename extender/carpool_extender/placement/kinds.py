"""Which of the GPUs that failed the same check can be told of in one sentence, and whether it holds for each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carpool_extender.placement.checks import Check, Verdict
from carpool_extender.placement.margins import missed
from carpool_extender.state.view import NOBODY, Bools, Columns, Rows

DIGITS = 2
"""Behind the point, of numbers in sentences."""


def kinds(verdict: Verdict, check: Check, rows: Rows) -> Sequence[Bools]:
    """Split GPUs that failed the same check by what a sentence would say of them; masks over `rows`."""
    if not rows.size:
        return []
    columns = verdict.view.columns
    keys: NDArray[np.integer] = np.zeros(rows.size, np.int64)
    if check is Check.SLOWDOWN:
        keys = verdict.found.is_newcomer[rows].astype(np.int64)
    elif check is Check.HEALTH:
        keys = np.array([verdict.view.hindered[row].kind for row in rows.tolist()])
    elif check is Check.TENANCY:  # another namespace's, or another user's of the same one
        keys = columns.landlord[rows] == verdict.view.namespaces.get(verdict.applicant.demand.namespace, NOBODY)
    elif check is Check.MODE:
        keys = columns.mode[rows]
    elif check is Check.SUITABLE:
        keys = columns.device_class[rows]
    return [keys == key for key in np.flatnonzero(np.bincount(keys))]


def standing(verdict: Verdict, check: Check, rows: Rows, closest: int) -> str:
    """Say how the GPU that came closest stands for all that failed the same check.

    Returns:
        What to put before the sentence about it: nothing where it holds for each, "at best" where what it tells is a
        number that is worse of the others, "for example" where others have something else.
    """
    if rows.size == 1:
        return ""
    columns = verdict.view.columns
    if check is Check.HEALTH:
        said = verdict.view.hindered[closest].reason
        return _EXAMPLE if any(verdict.view.hindered[row].reason != said for row in rows.tolist()) else ""
    if check is Check.TENANCY:
        return _EXAMPLE if _differ(columns.landlord[rows]) else ""
    if check is Check.SLOTS:
        if _differ(columns.mig_slices[rows]) or _differ(columns.mig_gb[rows]):
            return _EXAMPLE
        return _BEST if _differ(columns.count[rows]) else ""
    if check is Check.CONDITION:
        sm = verdict.applicant.columns(verdict.view.classes).sm[columns.device_class[rows]]
        told = missed(verdict.conditions, columns.take(rows), sm)
        if not any(map(_differ, told)):
            return ""
        return _BEST if len(told) == 1 else _EXAMPLE
    return _BEST if check is Check.SLOWDOWN and _suffer_apart(verdict, rows) else ""


_BEST, _EXAMPLE = "at best ", "for example "


def _differ(numbers: NDArray[Any]) -> bool:
    return bool(np.ptp(np.round(numbers, DIGITS)))


def _suffer_apart(verdict: Verdict, rows: Rows) -> bool:
    if _differ(verdict.margins(Check.SLOWDOWN, rows)):
        return True
    if verdict.found.is_newcomer[rows[0]]:
        return False
    columns = verdict.view.columns
    first = _jobs(columns, int(rows[0]))
    return any(_jobs(columns, row) != first for row in rows.tolist())


def _jobs(columns: Columns, row: int) -> list[str]:
    return [str(tenant) for tenant in columns.tenants[row]]
