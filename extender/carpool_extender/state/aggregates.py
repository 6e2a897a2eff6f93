"""What is worked out once for each GPU that changes, so that no decision has to go through its tenants."""

import numpy as np
from carpool_core.values import SharingMode
from carpool_predictor.cost_models.slowdown import slowdowns

from carpool_extender.state.view import CODES, MODES, NOBODY, SEVERAL, Columns, Rows

EXCLUSIVE = CODES[SharingMode.EXCLUSIVE]
SHARED = ((CODES[SharingMode.TIME_SLICING], SharingMode.TIME_SLICING), (CODES[SharingMode.MPS], SharingMode.MPS))
"""Modes in which tenants slow each other down, by code."""


def work_out(columns: Columns, rows: Rows) -> None:
    """Fill in the aggregates of some rows.

    Args:
        columns: They are written.
        rows: Which, shape (rows,).
    """
    promised = np.add.reduce(columns.memory_mib.take(rows, axis=0), axis=1)
    how, count, namespace = columns.mode[rows], columns.count[rows], columns.namespace.take(rows, axis=0)
    columns.kind[rows] = columns.device_class[rows] * len(MODES) + how
    free = np.maximum(0, columns.usable_mib[rows] - promised)
    columns.free_mib[rows] = np.where(how == EXCLUSIVE, 0, free)
    columns.sm_active[rows] = np.add.reduce(columns.sm.take(rows, axis=0), axis=1, dtype=np.float64)
    columns.dram_active[rows] = np.add.reduce(columns.dram.take(rows, axis=0), axis=1, dtype=np.float64)
    first, nobody = namespace[:, 0], np.arange(namespace.shape[1]) >= count[:, None]
    columns.patience[rows] = np.minimum.reduce(columns.max_slowdown.take(rows, axis=0), axis=1)
    columns.landlord[rows] = np.where(count == 0, NOBODY, first)
    columns.before[rows] = 0.0
    several = count > 1
    if not several.any():
        return
    is_mixed = np.logical_or.reduce((namespace != first[:, None]) & ~nobody, axis=1)
    columns.landlord[rows[is_mixed]] = SEVERAL
    for code, mode in SHARED:
        mine = rows[(how == code) & several]
        for tenants in np.flatnonzero(np.bincount(columns.count[mine])).tolist():
            part = mine[columns.count[mine] == tenants]
            util, sm, dram = (a[part, :tenants] for a in (columns.util, columns.sm, columns.dram))
            columns.before[part] = tenants - slowdowns(mode, util, sm, dram).sum(axis=1)
