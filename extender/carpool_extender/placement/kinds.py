"""Which of the GPUs that failed the same check can be told of in one sentence."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from carpool_extender.placement.checks import Check, Verdict
from carpool_extender.state.view import NOBODY, Bools, Rows


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
