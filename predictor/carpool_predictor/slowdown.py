"""How much tenants of one GPU slow each other down, from what each does when it is alone.

Two questions, answered one after the other: how much longer does a tenant's work on the GPU take beside others, and how
much longer does its whole step take then.

The step. For a share `u` of a step (`gpu_util`) some kernel runs; the host's part hides behind the GPU's, but not
wholly. Both together take a power mean, 1 = (h^p + u^p)^(1/p): p = 1 would be one after the other, p = infinity
whichever is longer. When the GPU's part is stretched by x::

    s = (1 - u^p + (u * x)^p)^(1/p)

The exponent p is learned on Gavel's solo throughputs, from how a step grows with its batch (`slowdown_gavel`).

Taking turns (time slicing). The GPU serves whoever is there in turns; whoever comes meets its neighbours as they would
be without it (the arrival theorem; exact mean-value analysis, Reiser and Lavenberg 1980)::

    x_i = 1 + sum over j of Q_j(without i)        Q_j = u_j * x_j / s_j, the share of j's step that it is at the GPU

Of two, Q_j is u_j. Of more, the recursion over smaller groups says how they compose; below DEPTH levels a tenant
counts as if it were alone, which is exact up to four tenants. With p = 1 this is the exact solution of a closed network
with one processor-sharing station, and the GPU is never more than busy.

Side by side (MPS). There is no contention below saturation: co-location was measured to pay while the joint SM
activity stays under 80% (Yousefzadeh-Asl-Miandoab, ITU 2025, chapter 4). Beyond, what exceeds the larger of the
threshold and the tenant's own activity queues up, on whichever of SMs and DRAM is scarcer::

    x_i = 1 + max over sm, dram of max(0, sum of a_j - max(0.8, a_i))

The upper quantile adds k * sum of u_j: the busier the neighbours, the more may go wrong. The factor k is the quantile
of what Gavel's pairs show that had no part in what was fitted. Means over time hide bursts, caches are not modelled,
and thread percentages are not either: a tenant's cap is chosen above its own need. A whole GPU or a MIG instance of
one's own: no slowdown (MIG instances do share some of the chip; not modelled).
"""

from functools import cache
from importlib import resources
from typing import Annotated

import msgspec
import numpy as np
from carpool_core.values import SharingMode
from msgspec import Meta
from numpy.typing import NDArray

SM_SATURATION = 0.8
"""Joint SM activity up to which MPS tenants do not disturb each other (ITU 2025: "SMACT <= 80%")."""
DRAM_SATURATION = 0.8
"""Joint DRAM activity up to which they do not; an assumption: streaming kernels reach 80-90% of the peak bandwidth."""
DEPTH = 3
"""Levels of smaller groups that are looked at for one tenant."""
CUBE = 3.0

Ratios = NDArray[np.floating]
Slowdowns = NDArray[np.float64]


class SlowdownModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was learned. `carpool train` writes it."""

    version: str
    exponent: Annotated[float, Meta(ge=1, le=50)]
    """p: how well a job's host hides behind its GPU; 1 not at all."""
    level: Annotated[float, Meta(gt=0, lt=1)]
    """Share of slowdowns that the upper quantile is meant to hold."""
    turns_factor: Annotated[float, Meta(ge=0, le=100)]
    """k of tenants that take turns: how kernels queue was known in the pairs that this was learned on."""
    side_by_side_factor: Annotated[float, Meta(ge=0, le=100)]
    """k of tenants under MPS: it was not known, so that it is larger."""
    provenance: dict[str, str | float | int]
    """What it was learned on."""


@cache
def shipped() -> SlowdownModel:
    """Return the model that the package carries."""
    return msgspec.json.decode(
        resources.files("carpool_predictor").joinpath("artifacts/slowdown.json").read_bytes(), type=SlowdownModel
    )


def slowdowns(mode: SharingMode, util: Ratios, sm: Ratios, dram: Ratios, present: NDArray[np.bool_]) -> Slowdowns:
    """Predict each tenant's step time beside its neighbours over its step time alone: the median.

    Args:
        mode: How all of these GPUs are shared.
        util: Share of time in which some kernel of the tenant ran when alone, 0..1, shape (gpus, tenants).
        sm: Mean share of SMs with its work when alone, 0..1, same shape.
        dram: Share of memory cycles in use when alone, 0..1, same shape.
        present: Which entries are tenants; the others are ignored, same shape.

    Returns:
        Slowdowns of at least 1, shape (gpus, tenants), float64; exactly 1 where no tenant is.
    """
    exponent = shipped().exponent
    if mode is SharingMode.TIME_SLICING:
        return _in_turns(util, present, exponent)
    if mode is SharingMode.MPS:
        sm_excess = _excess(_masked(sm, present), SM_SATURATION)
        dram_excess = _excess(_masked(dram, present), DRAM_SATURATION)
        return stretched(_masked(util, present), 1.0 + np.maximum(sm_excess, dram_excess), exponent)
    return np.ones(np.shape(present))


def upper_slowdowns(mode: SharingMode, util: Ratios, sm: Ratios, dram: Ratios, present: NDArray[np.bool_]) -> Slowdowns:
    """Predict the upper quantile of what `slowdowns` predicts the median of; the level stands in the model."""
    median = slowdowns(mode, util, sm, dram, present)
    if mode not in (SharingMode.TIME_SLICING, SharingMode.MPS):
        return median
    model, busy = shipped(), _masked(util, present)
    factor = model.turns_factor if mode is SharingMode.TIME_SLICING else model.side_by_side_factor
    return np.where(present, median + factor * (busy.sum(axis=1, keepdims=True) - busy), 1.0)


def stretched(busy: Ratios, stretch: Ratios | float, exponent: float) -> Slowdowns:
    """Return the slowdown of a step whose busy share `u` is stretched by `x`: (1 - u^p + (u x)^p)^(1/p)."""
    if exponent == CUBE:
        longer = busy * stretch
        cubed: Slowdowns = np.cbrt(1.0 - busy * busy * busy + longer * longer * longer)
        return np.maximum(1.0, cubed)
    return np.maximum(1.0, (1.0 - busy**exponent + (busy * stretch) ** exponent) ** (1.0 / exponent))


def _masked(values: Ratios, present: NDArray[np.bool_]) -> Slowdowns:
    """Return ratios in 0..1, shape (gpus, tenants); 0 where nobody is."""
    return np.where(present, np.clip(values, 0.0, 1.0), 0.0).astype(np.float64)


def _in_turns(util: Ratios, present: NDArray[np.bool_], exponent: float) -> Slowdowns:
    """Slowdowns of tenants that take turns: equally many tenants at a time, so that few cost little."""
    if present.all():
        return Turns(np.clip(util, 0.0, 1.0).astype(np.float64), exponent).slowdowns()
    result = np.ones(np.shape(present))
    count = present.sum(axis=1)
    for tenants in np.unique(count[count > 1]).tolist():
        rows = np.flatnonzero(count == tenants)
        here = np.zeros(present.shape, np.bool_)
        here[rows] = present[rows]
        busy = np.clip(util[here], 0.0, 1.0).astype(np.float64).reshape(rows.size, tenants)
        result[here] = Turns(busy, exponent).slowdowns().ravel()
    return result


class Turns:
    """The mean-value analysis of GPUs with equally many tenants.

    Args:
        busy: Busy shares alone, 0..1, shape (gpus, tenants).
        exponent: p.
        depth: Levels of smaller groups that are looked at.
    """

    def __init__(self, busy: Slowdowns, exponent: float, depth: int = DEPTH) -> None:
        self._busy, self._exponent, self._depth = busy, exponent, depth
        self._known: dict[tuple[int, frozenset[int]], Slowdowns] = {}

    def slowdowns(self) -> Slowdowns:
        """Return each tenant's slowdown, shape (gpus, tenants)."""
        every = range(self._busy.shape[1])
        nobody = frozenset[int]()
        return np.stack([self._stretched(i, self._stretch(i, nobody)) for i in every], axis=1)

    def _stretch(self, tenant: int, away: frozenset[int]) -> Slowdowns:
        """How much longer a tenant's work on the GPU takes when some others are away, shape (gpus,)."""
        gone = away | {tenant}
        total = np.ones(self._busy.shape[0])
        for other in range(self._busy.shape[1]):
            if other not in gone:
                total += self._at_gpu(other, gone)
        return total

    def _at_gpu(self, tenant: int, away: frozenset[int]) -> Slowdowns:
        """Share of a tenant's step in which it is at the GPU when some others are away, shape (gpus,)."""
        if len(away) >= self._depth or len(away) + 1 == self._busy.shape[1]:
            return self._busy[:, tenant]
        found = self._known.get((tenant, away))
        if found is None:
            stretch = self._stretch(tenant, away)
            found = self._busy[:, tenant] * stretch / self._stretched(tenant, stretch)
            self._known[tenant, away] = found
        return found

    def _stretched(self, tenant: int, stretch: Slowdowns) -> Slowdowns:
        return stretched(self._busy[:, tenant], stretch, self._exponent)


def _excess(activity: Slowdowns, saturation: float) -> Slowdowns:
    """What of the joint activity finds no room, for each tenant; `activity` has shape (gpus, tenants)."""
    joint = activity.sum(axis=1, keepdims=True)
    excess: Slowdowns = np.maximum(0.0, joint - np.maximum(saturation, activity))
    return excess
