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


def tell_apart(verdict: Verdict, check: Check, rows: Rows) -> bool:
    """Whether a sentence about one of several GPUs that failed the same check would be another one about others."""
    if rows.size == 1:
        return False
    columns = verdict.view.columns
    told: list[NDArray[Any]] = []
    if check is Check.SLOWDOWN:
        told = [verdict.margins(check, rows)]
    elif check is Check.SLOTS:
        told = [columns.count[rows], columns.mig_slices[rows], columns.mig_gb[rows]]
    elif check is Check.CONDITION:
        sm = verdict.applicant.columns(verdict.view.classes).sm[columns.device_class[rows]]
        told = missed(verdict.conditions, columns.take(rows), sm)
    if any(np.ptp(np.round(numbers, DIGITS)) for numbers in told):
        return True
    if check is not Check.SLOWDOWN or verdict.found.is_newcomer[rows[0]]:
        return False
    first = _jobs(columns, int(rows[0]))
    return any(_jobs(columns, row) != first for row in rows.tolist())


def _jobs(columns: Columns, row: int) -> list[str]:
    return [str(tenant) for tenant in columns.tenants[row]]
