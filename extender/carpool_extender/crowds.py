"""What becomes of a newcomer and tenants where they meet: predicted slowdowns beside the limits that jobs accept."""

from typing import NamedTuple

import numpy as np
from carpool_core.values import SharingMode
from carpool_predictor.slowdown import allowance, slowdowns
from numpy.typing import NDArray

from carpool_extender.applicant import Applicant, ClassColumns
from carpool_extender.conditions import Quantile
from carpool_extender.view import MODES, Bools, Columns, Floats, Rows


class Crowd(NamedTuple):
    """A newcomer, who comes first, and the tenants of some GPUs, shape (most tenants + 1, rows) each."""

    mode: SharingMode | None
    present: Bools
    """Where somebody is: GPUs have fewer tenants than others."""
    util: Floats
    """GPU utilization alone, 0..1."""
    expected: Floats
    """The median of each slowdown; 1 where nobody is."""
    limit: Floats
    """Slowdown that each accepts; infinite where nobody is."""

    def by(self, quantile: Quantile) -> Floats:
        """Return the slowdowns that limits are held against."""
        if quantile is Quantile.MEDIAN or self.mode is None:
            return self.expected
        more: Floats = self.expected + allowance(self.mode, self.util.T, self.present.T).T
        return more


def crowd_on(columns: Columns, applicant: Applicant, facts: ClassColumns, rows: Rows, mode: int) -> Crowd:
    """Predict what would become of everybody.

    Args:
        columns: The GPUs.
        applicant: The newcomer.
        facts: What it is on each class of devices.
        rows: GPUs that have tenants.
        mode: Code of the mode in which they would all share.
    """
    name, of, count = MODES[mode], columns.device_class[rows], columns.count[rows]
    most = int(count.max())
    present = np.arange(-1, most)[:, None] < count

    def joined(newcomer: Floats | float, of_tenants: Floats) -> Floats:
        # One after the other over all GPUs: along an axis of a few entries everything takes several times as long.
        both = np.empty(present.shape, np.float32)
        both[0], both[1:] = newcomer, of_tenants.take(rows, axis=0)[:, :most].T
        return both

    util = joined(facts.util[of], columns.util)
    limit = np.where(present, joined(applicant.demand.max_slowdown, columns.max_slowdown), np.inf)
    expected = np.ones(present.shape)
    if name is SharingMode.TIME_SLICING:
        _take_turns(util, count, expected)
    elif name is not None:
        sm, dram = joined(facts.sm[of], columns.sm), joined(facts.dram[of], columns.dram)
        expected = slowdowns(name, util.T, sm.T, dram.T, present.T).T
    return Crowd(name, present, util, expected, limit)


def _take_turns(util: Floats, count: NDArray[np.integer], expected: Floats) -> None:
    """Write the slowdowns of those that take turns: equally many at a time; nothing but utilization counts."""
    for tenants in np.flatnonzero(np.bincount(count)).tolist():
        alike = np.flatnonzero(count == tenants)
        busy = util[: tenants + 1].take(alike, axis=1).T
        every = np.ones(busy.shape, np.bool_)
        expected[: tenants + 1, alike] = slowdowns(SharingMode.TIME_SLICING, busy, busy, busy, every).T
