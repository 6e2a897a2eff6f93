"""Slowdown of co-located jobs on one GPU, from the activity of each alone.

Step. A kernel runs for a share u of the step (`gpu_util`); the rest is host time. When contention stretches the GPU's
part by x, the step takes::

    s = 1 + u * (x - 1)

Time-slicing. A request finds the other jobs as they would be without it (arrival theorem; exact mean-value analysis,
Reiser and Lavenberg 1980)::

    x_i = 1 + sum over j of Q_j(without i)        Q_j = (u_j^k + u_j * (x_j - 1)) / s_j

Q_j is the share of time that j delays an arriving request. For k = 1 this is the exact solution of a closed network
with one processor-sharing station. The shipped k is the exponent between SM activity and utilization, because measured
pairs lose less than k = 1 predicts. For k > 1 the composition of more than two jobs is a heuristic. Below `DEPTH`
levels of smaller groups a job counts as alone, which changes nothing for up to four jobs.

MPS. There is no contention below saturation: co-location pays while the joint SM activity stays under 80%
(Yousefzadeh-Asl-Miandoab, ITU 2025, chapter 4). The excess queues on the scarcer of SMs and DRAM::

    x_i = 1 + max over sm, dram of max(0, sum of a_j - max(0.8, a_i))

The interval's upper end is s * exp(f * v). Behind MPS v = min(1, sum of the other u_j), and f comes from Gavel's pairs:
the quantile of the error's logarithm for each model, of which the largest counts. Under time-slicing v = 1 beside any
busy job, and the upper end is exp(f) * max(s, fair share): jobs that hide all their host time divide the GPU max-min
fairly. There f is the larger quantile of an H100 and an H200. Not modelled: bursts, caches, thread percentages. Whole
GPUs and MIG instances have no slowdown.
"""

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from carpool_core.resources.node import TenantProfile
from carpool_core.values import SharingMode
from msgspec import Meta
from numpy.typing import NDArray

from carpool_predictor.models.artifacts import decode, load

SM_SATURATION = 0.8
"""Joint SM activity up to which jobs under MPS do not contend (ITU 2025: "SMACT <= 80%")."""
DRAM_SATURATION = 0.8
"""Joint DRAM activity up to which they do not contend. Assumed: streaming kernels reach 80-90% of the peak."""
DEPTH = 3
"""Levels of smaller groups in the mean-value analysis."""
_CELLS = 1 << 14
"""Elements of an array that one pass over many GPUs processes, so that it fits the processor's cache."""

Ratios = NDArray[np.floating]
Slowdowns = NDArray[np.float64]


class SlowdownModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stored model."""

    version: str
    holding: Annotated[float, Meta(ge=1, le=10)]
    """k: a job with utilization u delays arriving requests for about u^k of the time, while it need not wait itself."""
    level: Annotated[float, Meta(gt=0, lt=1)]
    """Share of slowdowns below the interval's upper end: of each GPU (time-slicing) or model (MPS)."""
    models: Annotated[int, Meta(ge=1)]
    """n: behind MPS the level holds for n of n + 1 models, if a new one is like the measured ones."""
    time_slicing_factor: Annotated[float, Meta(ge=0, le=10)]
    """f under time-slicing."""
    mps_factor: Annotated[float, Meta(ge=0, le=10)]
    """f under MPS; larger, because short kernels queue behind long ones."""
    provenance: dict[str, str | float | int]
    """Training data."""


@cache
def shipped() -> SlowdownModel:
    """Return the model in the package."""
    return load("slowdown.json", lambda content: decode(content, SlowdownModel, "a slowdown model"))


def slowdowns(
    mode: SharingMode, util: Ratios, sm: Ratios, dram: Ratios, present: NDArray[np.bool_] | None = None
) -> Slowdowns:
    """Return the median of each tenant's step time with its co-tenants over its step time alone.

    Args:
        mode: Sharing mode of all these GPUs.
        util: Share of time in which a kernel of the tenant runs alone, 0..1, shape (gpus, tenants).
        sm: Mean share of SMs with its work alone, 0..1, same shape.
        dram: Share of memory cycles in use alone, 0..1, same shape.
        present: Mask of the entries that are tenants, same shape; all entries by default.

    Returns:
        Slowdowns of at least 1, shape (gpus, tenants), float64; exactly 1 where the mask is false.
    """
    if mode is SharingMode.TIME_SLICING:
        return _time_slicing(util, present)
    if mode is SharingMode.MPS:
        sm_excess = _excess(_masked(sm, present), SM_SATURATION)
        dram_excess = _excess(_masked(dram, present), DRAM_SATURATION)
        return 1.0 + _masked(util, present) * np.maximum(sm_excess, dram_excess)
    return np.ones(np.shape(util))


def pair_slowdown(mode: SharingMode, own: TenantProfile, other: TenantProfile) -> float:
    """Return the median for a tenant beside another one."""
    ratios = [(one.gpu_util_percent / 100, one.sm_active_ratio, one.dram_active_ratio) for one in (own, other)]
    util, sm, dram = np.array(ratios).T[:, None, :]
    return float(slowdowns(mode, util, sm, dram)[0, 0])


def upper_factor(mode: SharingMode, util: Ratios, present: NDArray[np.bool_] | None = None) -> Slowdowns:
    """Return exp(f * v), shape (gpus, tenants); 1 where the mask is false.

    The arguments are those of `slowdowns`.
    """
    model = shipped()
    factors = {SharingMode.TIME_SLICING: model.time_slicing_factor, SharingMode.MPS: model.mps_factor}
    busy = _masked(util, present)
    others = busy.sum(axis=1, keepdims=True) - busy
    v = np.minimum(1.0, others) if mode is SharingMode.MPS else others > 0
    factor: Slowdowns = np.exp(factors.get(mode, 0.0) * v)
    return factor if present is None else np.where(present, factor, 1.0)


def upper_end(mode: SharingMode, median: Ratios, util: Ratios, present: NDArray[np.bool_] | None = None) -> Slowdowns:
    """Return the upper end of the interval of `median`, shape (gpus, tenants), for pairs that were not measured.

    The other arguments are those of `slowdowns`.
    """
    if mode is SharingMode.TIME_SLICING:
        median = np.maximum(median, fair_share(_masked(util, present)))
    found: Slowdowns = median * upper_factor(mode, util, present)
    return found


def fair_share(busy: Slowdowns) -> Slowdowns:
    """Return the slowdowns of tenants that divide their GPU's time max-min fairly, shape (gpus, tenants).

    `busy` is the share of time that each uses alone, 0..1, same shape; 0 without a tenant.
    """
    if not busy.size:
        return np.ones(busy.shape)
    ordered = np.sort(busy, axis=1)
    before = ordered.cumsum(axis=1) - ordered
    # Jobs that want less than an equal division leave it to the others; the level is the most that one job gets.
    level = ((1.0 - before) / np.arange(busy.shape[1], 0, -1)).max(axis=1, keepdims=True)
    found: Slowdowns = np.maximum(1.0, busy / level)
    return found


def _ratios(values: Ratios) -> Slowdowns:
    """Return the values clipped to 0..1."""
    found: Slowdowns = np.maximum(values, 0.0, dtype=np.float64)
    return np.minimum(found, 1.0, out=found)


def _masked(values: Ratios, present: NDArray[np.bool_] | None) -> Slowdowns:
    """Return ratios clipped to 0..1, shape (gpus, tenants); 0 where the mask is false."""
    found = _ratios(values)
    if present is not None and not present.all():
        found[~present] = 0.0
    return found


def _time_slicing(util: Ratios, present: NDArray[np.bool_] | None) -> Slowdowns:
    """Return slowdowns under time-slicing; GPUs with equally many tenants are computed together."""
    exponent = shipped().holding
    if present is None or present.all():
        return MeanValueAnalysis(_ratios(util), exponent).slowdowns()
    result = np.ones(np.shape(present))
    count = present.sum(axis=1)
    for tenants in np.unique(count[count > 1]).tolist():
        rows = np.flatnonzero(count == tenants)
        here = np.zeros(present.shape, np.bool_)
        here[rows] = present[rows]
        busy = _ratios(util[here]).reshape(rows.size, tenants)
        result[here] = MeanValueAnalysis(busy, exponent).slowdowns().ravel()
    return result


class _Level(NamedTuple):
    """All choices of a fixed number of absent tenants and one present tenant."""

    tenant: NDArray[np.intp]
    """(choices,) The present tenant."""
    others: NDArray[np.intp]
    """(choices, others) Each other present tenant with this one absent too, as its index in the next level."""


@cache
def _levels(tenants: int, depth: int) -> tuple[_Level, ...]:
    """Return the levels from none absent to `depth` absent, or all but one."""
    every = range(tenants)
    choices = [
        [(one, frozenset(absent)) for absent in combinations(every, size) for one in every if one not in absent]
        for size in range(min(depth, tenants - 1) + 1)
    ]
    places = [{choice: place for place, choice in enumerate(level)} for level in [*choices[1:], []]]
    return tuple(
        _Level(
            tenant=np.array([one for one, _ in level], np.intp),
            others=np.array(
                [[at[o, absent | {one}] for o in every if (o, absent | {one}) in at] for one, absent in level]
            ),
        )
        for level, at in zip(choices, places, strict=True)
    )


class MeanValueAnalysis:
    """Mean-value analysis of GPUs with equally many tenants, after Reiser and Lavenberg (1980).

    `busy` is the share of time in which a kernel of the tenant runs alone, 0..1, shape (gpus, tenants), and `holding`
    is k.
    """

    def __init__(self, busy: Slowdowns, holding: float, depth: int = DEPTH) -> None:
        self._busy: Slowdowns = busy.T
        self._delaying: Slowdowns = self._busy**holding
        self._levels = _levels(busy.shape[1], depth) if busy.size else ()

    def slowdowns(self) -> Slowdowns:
        """Return each tenant's slowdown, shape (gpus, tenants)."""
        if not self._levels:
            return np.ones(self._busy.T.shape)
        gpus = self._busy.shape[1]
        at_once = max(1, _CELLS // max(len(level.tenant) for level in self._levels))
        parts = [self._of(slice(first, first + at_once)) for first in range(0, gpus, at_once)]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).T

    def _of(self, gpus: slice) -> Slowdowns:
        """Return slowdowns of some GPUs, computed from the smallest groups up, shape (tenants, gpus)."""
        busy, delaying = self._busy[:, gpus], self._delaying[:, gpus]
        slowdown, queue = np.ones(busy.shape), delaying.take(self._levels[-1].tenant, axis=0)
        for level in reversed(self._levels[:-1]):
            first, *others = level.others.T
            wait = queue.take(first, axis=0)
            for other in others:
                wait += queue.take(other, axis=0)
            wait *= busy.take(level.tenant, axis=0)
            slowdown = 1.0 + wait
            if level is not self._levels[0]:
                queue = (delaying.take(level.tenant, axis=0) + wait) / slowdown
        return slowdown


def _excess(activity: Slowdowns, saturation: float) -> Slowdowns:
    """Return the joint activity beyond saturation, shape (gpus, tenants)."""
    joint = activity.sum(axis=1, keepdims=True)
    excess: Slowdowns = np.maximum(0.0, joint - np.maximum(saturation, activity))
    return excess


SATURATION = SM_SATURATION
"""Joint share of a GPU's time or SMs from which a tenant gets only what the others leave. Assumed for time."""
ROUNDS = 20
"""Iterations of the fixed point; enough on GPUs that are not saturated."""


class TenantActivity(NamedTuple):
    """Activity of one tenant, each 0..1."""

    util: float
    """Share of time in which one of its kernels runs."""
    sm: float
    """Mean share of SMs with its work."""
    dram: float
    """Share of memory cycles in use; the prediction, because no agent measures it."""


def solo_activity(mode: SharingMode, together: Sequence[TenantActivity]) -> list[TenantActivity]:
    """Estimate the activity of each tenant alone from the activity measured together, over the same time.

    Fixed-point iteration: alone = min(1, measured · slowdown(alone)). On a saturated GPU many solutions exist and the
    iteration ends at the smallest, so that callers may use it there only to raise an estimate.
    """
    measured = np.array(together, np.float64).reshape(-1, 3)
    found = measured.copy()
    every = np.ones((1, len(together)), np.bool_)
    for _ in range(ROUNDS):
        util, sm, dram = found.T[:, None, :]
        by = slowdowns(mode, util, sm, dram, every)[0]
        found[:, :2] = np.minimum(1.0, measured[:, :2] * by[:, None])
    return [TenantActivity(*row) for row in found.tolist()]


def is_saturated(mode: SharingMode, together: Sequence[TenantActivity]) -> bool:
    """Whether a tenant gets only what the others leave: of time under time-slicing, of SMs under MPS."""
    used = {SharingMode.TIME_SLICING: (one.util for one in together), SharingMode.MPS: (one.sm for one in together)}
    return len(together) > 1 and sum(used.get(mode, ())) >= SATURATION
