"""What becomes of tenants and a newcomer where they meet: predicted slowdowns beside the limits that jobs accept."""

from typing import NamedTuple

import numpy as np
from carpool_core.values import SharingMode
from carpool_predictor.slowdown import allowance, slowdowns

from carpool_extender.applicant import Applicant, ClassColumns
from carpool_extender.conditions import Quantile
from carpool_extender.view import MODES, Columns, Floats, Rows


class Crowd(NamedTuple):
    """Tenants and a newcomer, who comes last, on GPUs of equally many tenants, shape (rows, tenants + 1) each."""

    mode: SharingMode | None
    util: Floats
    """GPU utilization alone, 0..1."""
    expected: Floats
    """The median of each slowdown."""
    limit: Floats
    """Slowdown that each accepts."""

    def by(self, quantile: Quantile) -> Floats:
        """Return the slowdowns that limits are held against."""
        if quantile is Quantile.MEDIAN or self.mode is None:
            return self.expected
        return self.expected + allowance(self.mode, self.util, np.ones(self.util.shape, np.bool_))


def crowd_on(columns: Columns, applicant: Applicant, facts: ClassColumns, rows: Rows, mode: int) -> Crowd:
    """Predict what would become of everybody.

    Args:
        columns: The GPUs.
        applicant: The newcomer.
        facts: What it is on each class of devices.
        rows: GPUs that have equally many tenants, at least one.
        mode: Code of the mode in which they would all share.
    """
    of, tenants = columns.device_class[rows], int(columns.count[rows[0]])
    shape = (tenants + 1, rows.size)

    def joined(of_tenants: Floats, newcomer: Floats) -> Floats:
        both = np.empty(shape, np.float32)
        both[:tenants], both[tenants] = of_tenants[rows, :tenants].T, newcomer
        return both.T

    util, sm, dram = (
        joined(columns.util, facts.util[of]),
        joined(columns.sm, facts.sm[of]),
        joined(columns.dram, facts.dram[of]),
    )
    limit = joined(columns.max_slowdown, np.full(rows.size, applicant.demand.max_slowdown, np.float32))
    name = MODES[mode]
    expected = np.ones(limit.shape)
    if name is not None:
        expected = slowdowns(name, util, sm, dram, np.ones(shape, np.bool_).T)
    return Crowd(name, util, expected, limit)
