"""What becomes of a newcomer and tenants where they meet: predicted slowdowns beside the limits that jobs accept."""

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import numpy as np
from carpool_core.values import SharingMode
from carpool_predictor.models.slowdown import DRAM_SATURATION, SM_SATURATION, slowdowns, upper_margin
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import MODES, SHARED, Bools, Floats, GpuTable, Rows, places
from carpool_extender.cache.pod_request import ClassTable, PodRequest
from carpool_extender.framework.admission_limits import Quantile

MANY = 256
"""GPUs from which on those with more tenants than a pair are looked at by themselves: the others are most of them."""
PAIR = 2


class Colocation(NamedTuple):
    """A newcomer, who comes first, and the tenants of some GPUs, shape (tenants + 1, rows) each.

    Where a GPU has fewer tenants than another, the others are nobody: they do nothing and accept everything.
    """

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
        more: Floats = self.expected + upper_margin(self.mode, self.util.T).T
        return more


def colocation_on(columns: GpuTable, pod_request: PodRequest, facts: ClassTable, rows: Rows, mode: int) -> Colocation:
    """Predict what would become of everybody.

    Args:
        columns: The GPUs.
        pod_request: The newcomer.
        facts: What it is on each class of devices.
        rows: GPUs with tenants; where turns are taken, equally many.
        mode: Code of the mode in which they would all share.
    """
    name, of, tenants = MODES[mode], columns.device_class.take(rows), int(columns.count.take(rows).max())

    def joined(newcomer: Floats | float, of_tenants: Floats) -> Floats:
        # One after the other over all GPUs: along an axis of a few entries everything takes several times as long.
        both = np.empty((tenants + 1, rows.size), np.float32)
        both[0], both[1:] = newcomer, of_tenants.take(rows, axis=0)[:, :tenants].T
        return both

    util = sm = dram = joined(facts.util.take(of), columns.util)
    if name is not SharingMode.TIME_SLICING:  # where turns are taken, utilization tells all that counts
        sm, dram = joined(facts.sm.take(of), columns.sm), joined(facts.dram.take(of), columns.dram)
    limit = joined(pod_request.demand.max_slowdown, columns.max_slowdown)
    expected = np.ones(util.shape) if name is None else slowdowns(name, util.T, sm.T, dram.T).T
    return Colocation(name, util, expected, limit)


class Meeting(NamedTuple):
    """What would become of everybody on some GPUs that a newcomer could join, shape (rows,) each."""

    rows: Rows
    newcomer: Floats | float
    """The newcomer's slowdown."""
    added: Floats
    """What the newcomer loses, and all tenants lose on top of what they lose already."""
    own: Floats | float
    """Room to the newcomer's limit; negative beyond."""
    others: Floats
    """The least room of a tenant to its own."""


def predict_colocations(
    columns: GpuTable,
    pod_request: PodRequest,
    facts: ClassTable,
    rows: Rows,
    mode: NDArray[np.int8],
    quantile: Quantile,
) -> Iterator[Meeting]:
    """Predict slowdowns on GPUs that have tenants, mode by mode.

    Args:
        columns: The GPUs.
        pod_request: The newcomer.
        facts: What it is on each class of devices.
        rows: The GPUs in question.
        mode: Code of the mode in which they would all share, shape (rows,).
        quantile: Which slowdown is held against a limit.
    """
    for code, name in SHARED:
        mine = _where(rows, mode == code)
        if not mine.size:
            continue
        if name is SharingMode.MPS and quantile is Quantile.MEDIAN:
            free = _undisturbed(columns, facts, mine)
            easy, mine = _where(mine, free), _where(mine, ~free)
            own = pod_request.demand.max_slowdown - 1.0
            yield Meeting(easy, 1.0, columns.before.take(easy), own, columns.min_slowdown_limit.take(easy) - 1.0)
        for part in _parts(columns, mine, name):
            crowd = colocation_on(columns, pod_request, facts, part, code)
            own, *others = crowd.limit - crowd.by(quantile)
            added = (crowd.expected - 1.0).sum(axis=0) + columns.before.take(part)
            yield Meeting(part, crowd.expected[0], added, own, reduce(np.minimum, others))


def _parts(columns: GpuTable, rows: Rows, mode: SharingMode) -> Iterator[Rows]:
    """Part GPUs by how many tenants they have.

    Where turns are taken, equally many at a time, because the model counts who meets whom. Under MPS whoever is nobody
    disturbs nobody; so there it is a matter of work only, of which each part brings some.
    """
    count = columns.count.take(rows)
    if mode is SharingMode.TIME_SLICING:
        for tenants in np.bincount(count).nonzero()[0].tolist():
            yield _where(rows, count == tenants)
    elif rows.size < MANY:
        if rows.size:
            yield rows
    else:
        is_few = count <= PAIR
        yield from (part for part in (_where(rows, is_few), _where(rows, ~is_few)) if part.size)


def _where(rows: Rows, which: Bools) -> Rows:
    # To pick by numbers takes a fraction of the time that it takes to pick by a mask without a pattern.
    return rows.take(places(which))


def _undisturbed(columns: GpuTable, facts: ClassTable, rows: Rows) -> Bools:
    """Where nobody would be disturbed under MPS: tenants do not meet below saturation.

    So it is on most GPUs, and what their tenants do together says so in a fraction of the time that `crowd_on` takes.
    """
    of = columns.device_class.take(rows)
    sm, dram = columns.sm_active.take(rows) + facts.sm.take(of), columns.dram_active.take(rows) + facts.dram.take(of)
    free: Bools = (sm <= SM_SATURATION) & (dram <= DRAM_SATURATION)
    return free
