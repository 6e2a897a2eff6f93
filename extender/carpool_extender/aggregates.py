"""What is worked out once for each GPU that changes, so that no decision has to go through its tenants."""

import numpy as np
from carpool_core.values import SharingMode
from carpool_predictor.slowdown import slowdowns

from carpool_extender.view import CODES, NOBODY, SEVERAL, Columns, Rows

EXCLUSIVE = CODES[SharingMode.EXCLUSIVE]
SHARED = ((CODES[SharingMode.TIME_SLICING], SharingMode.TIME_SLICING), (CODES[SharingMode.MPS], SharingMode.MPS))
"""Modes in which tenants slow each other down, by code."""


def work_out(columns: Columns, rows: Rows) -> None:
    """Fill in the aggregates of some rows.

    Args:
        columns: They are written.
        rows: Which, shape (rows,).
    """
    promised = columns.memory_mib[rows].sum(axis=1)
    free = np.maximum(0, columns.usable_mib[rows] - promised)
    columns.free_mib[rows] = np.where(columns.mode[rows] == EXCLUSIVE, 0, free)
    columns.sm_active[rows] = columns.sm[rows].sum(axis=1, dtype=np.float64)
    columns.dram_active[rows] = columns.dram[rows].sum(axis=1, dtype=np.float64)
    count, namespace = columns.count[rows], columns.namespace[rows]
    first, nobody = namespace[:, :1], np.arange(namespace.shape[1]) >= count[:, None]
    alike = ((namespace == first) | nobody).all(axis=1)
    columns.patience[rows] = np.where(nobody, np.inf, columns.max_slowdown[rows]).min(axis=1, initial=np.inf)
    columns.landlord[rows] = np.where(count == 0, NOBODY, np.where(alike, first[:, 0], SEVERAL))
    columns.slowdowns[rows] = count
    for code, mode in SHARED:
        mine = rows[(columns.mode[rows] == code) & (count > 1)]
        for tenants in np.flatnonzero(np.bincount(columns.count[mine])).tolist():
            part = mine[columns.count[mine] == tenants]
            util, sm, dram = (a[part, :tenants] for a in (columns.util, columns.sm, columns.dram))
            every = np.ones(util.shape, np.bool_)
            columns.slowdowns[part] = slowdowns(mode, util, sm, dram, every).sum(axis=1)
