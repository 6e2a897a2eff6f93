"""Predicted slowdown of the incoming pod and of each co-tenant, against their limits."""

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


class Colocation(NamedTuple):
    """The incoming pod and the tenants of some GPUs; shape (tenants + 1, rows) each, the incoming pod first.

    A GPU with fewer tenants than another has empty places: without activity and with an infinite limit.
    """

    mode: SharingMode | None
    util: Floats
    """GPU utilization alone, 0..1."""
    expected: Floats
    """Median of the predicted slowdown."""
    limit: Floats
    """Largest slowdown that each accepts."""

    def by(self, quantile: Quantile) -> Floats:
        """Return the slowdowns that are compared with the limits."""
        if quantile is Quantile.MEDIAN or self.mode is None:
            return self.expected
        upper: Floats = self.expected + upper_margin(self.mode, self.util.T).T
        return upper


def colocation_on(gpus: GpuTable, pod_request: PodRequest, table: ClassTable, rows: Rows, mode: int) -> Colocation:
    """Predict the slowdowns on some GPUs.

    Args:
        gpus: The GPUs.
        pod_request: The incoming pod.
        table: Its requirements per device class.
        rows: GPUs with tenants; under time-slicing, GPUs with equally many.
        mode: Code of the mode in which they all share.
    """
    name, device_class, tenants = MODES[mode], gpus.device_class.take(rows), int(gpus.count.take(rows).max())

    def joined(incoming: Floats | float, present: Floats) -> Floats:
        # One contiguous row per member: NumPy is several times slower along a short last axis.
        both = np.empty((tenants + 1, rows.size), np.float32)
        both[0], both[1:] = incoming, present.take(rows, axis=0)[:, :tenants].T
        return both

    util = sm = dram = joined(table.util.take(device_class), gpus.util)
    if name is not SharingMode.TIME_SLICING:  # under time-slicing the model uses the utilization only
        sm, dram = joined(table.sm.take(device_class), gpus.sm), joined(table.dram.take(device_class), gpus.dram)
    limit = joined(pod_request.demand.max_slowdown, gpus.max_slowdown)
    expected = np.ones(util.shape) if name is None else slowdowns(name, util.T, sm.T, dram.T).T
    return Colocation(name, util, expected, limit)


class ColocationResult(NamedTuple):
    """Predictions for some GPUs that the incoming pod could join, shape (rows,) each."""

    rows: Rows
    slowdown: Floats | float
    """Expected slowdown of the incoming pod."""
    added_slowdown: Floats
    """Progress that the incoming pod loses, plus what the tenants lose on top of their present loss."""
    own_margin: Floats | float
    """Distance of the incoming pod to its limit; negative beyond."""
    tenants_margin: Floats
    """Least distance of a tenant to its limit; negative beyond."""


def predict_colocations(
    gpus: GpuTable,
    pod_request: PodRequest,
    table: ClassTable,
    rows: Rows,
    mode: NDArray[np.int8],
    quantile: Quantile,
) -> Iterator[ColocationResult]:
    """Predict slowdowns on GPUs that have tenants, in batches of equal mode and number of tenants.

    Args:
        gpus: All GPUs.
        pod_request: The incoming pod.
        table: Its requirements per device class.
        rows: GPUs that have tenants.
        mode: Code of the mode in which they all share, shape (rows,).
        quantile: Slowdown that is compared with the limits.
    """
    for code, name in SHARED:
        mine = rows.take(places(mode == code))
        if not mine.size:
            continue
        if name is SharingMode.MPS and quantile is Quantile.MEDIAN:
            undisturbed = _is_undisturbed(gpus, table, mine)
            easy, mine = mine.take(places(undisturbed)), mine.take(places(~undisturbed))
            own = pod_request.demand.max_slowdown - 1.0
            existing = gpus.existing_slowdown.take(easy)
            yield ColocationResult(easy, 1.0, existing, own, gpus.min_slowdown_limit.take(easy) - 1.0)
        count = gpus.count.take(mine)
        for tenants in np.bincount(count).nonzero()[0].tolist():
            batch = mine.take(places(count == tenants))
            found = colocation_on(gpus, pod_request, table, batch, code)
            own_margin, *others = found.limit - found.by(quantile)
            added = (found.expected - 1.0).sum(axis=0) + gpus.existing_slowdown.take(batch)
            yield ColocationResult(batch, found.expected[0], added, own_margin, reduce(np.minimum, others))


def _is_undisturbed(gpus: GpuTable, table: ClassTable, rows: Rows) -> Bools:
    """Return where the slowdown under MPS is 1 for all, because nothing is saturated; a shortcut for most GPUs."""
    of = gpus.device_class.take(rows)
    sm, dram = gpus.sm_active.take(rows) + table.sm.take(of), gpus.dram_active.take(rows) + table.dram.take(of)
    free: Bools = (sm <= SM_SATURATION) & (dram <= DRAM_SATURATION)
    return free
