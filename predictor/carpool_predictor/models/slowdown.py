"""How much tenants of one GPU slow each other down, from what each does when it is alone.

Two questions, answered one after the other: how much longer does a tenant's work on the GPU take beside others, and how
much longer does its whole step take then.

The step. For a share `u` of a step (`gpu_util`) some kernel runs, and the host has the rest. When the GPU's part is
stretched by x, the step takes::

    s = 1 + u * (x - 1)

A host that works ahead hides some of that. Nothing is counted on it: to hide too much is to foretell too little, and
Gavel's four jobs hardly tell how much it is (`evaluation.slowdown.gavel`).

Taking turns (time slicing). Work that comes to the GPU meets its neighbours as they would be without it (the arrival
theorem; exact mean-value analysis, Reiser and Lavenberg 1980)::

    x_i = 1 + sum over j of Q_j(without i)        Q_j = (u_j^k + u_j * (x_j - 1)) / s_j

Q_j is the share of the time for which j is in the way of what comes: for all that it has to wait itself, and for some
of the time in which it would be busy alone. With k = 1 that is all of it, and this the exact solution of a closed
network with one processor-sharing station. Measured pairs lose less than that to neighbours that are half busy.
Shipped is the k by which SM activity follows from utilization, a proxy: kernels of jobs that leave the GPU idle are
short or fill few SMs, and why they are less in the way is not known. Of more than two tenants the recursion over
smaller groups says how they compose, a heuristic unless k = 1. Below DEPTH levels a tenant counts as if it were alone,
which changes nothing up to four tenants.

Side by side (MPS). There is no contention below saturation: co-location was measured to pay while the joint SM
activity stays under 80% (Yousefzadeh-Asl-Miandoab, ITU 2025, chapter 4). Beyond, what exceeds the larger of the
threshold and the tenant's own activity queues up, on whichever of SMs and DRAM is scarcer::

    x_i = 1 + max over sm, dram of max(0, sum of a_j - max(0.8, a_i))

The upper quantile adds f * sum of u_j: the busier the neighbours, the more may go wrong. The factor f is the quantile
of what Gavel's pairs show that had no part in what was fitted. Means over time hide bursts, caches are not modelled,
and thread percentages are not either: a tenant's cap is chosen above its own need. A whole GPU or a MIG instance of
one's own: no slowdown (MIG instances do share some of the chip; not modelled).
"""

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from carpool_core.values import SharingMode
from msgspec import Meta
from numpy.typing import NDArray

from carpool_predictor.features import MalformedError
from carpool_predictor.models.artifacts import load

SM_SATURATION = 0.8
"""Joint SM activity up to which MPS tenants do not disturb each other (ITU 2025: "SMACT <= 80%")."""
DRAM_SATURATION = 0.8
"""Joint DRAM activity up to which they do not; an assumption: streaming kernels reach 80-90% of the peak bandwidth."""
DEPTH = 3
"""Levels of smaller groups that are looked at for one tenant."""
_CELLS = 1 << 14
"""Numbers of an array that one look at many GPUs works on: what fits a processor's cache is quicker."""

Ratios = NDArray[np.floating]
Slowdowns = NDArray[np.float64]


class SlowdownModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was learned."""

    version: str
    holding: Annotated[float, Meta(ge=1, le=10)]
    """k: who keeps the GPU busy for a share u of the time is in the way for about u^k of it, while it need not wait."""
    level: Annotated[float, Meta(gt=0, lt=1)]
    """Share of slowdowns that the upper quantile is meant to hold."""
    turns_factor: Annotated[float, Meta(ge=0, le=100)]
    """f of tenants that take turns: how kernels queue was known in the pairs that this was learned on."""
    side_by_side_factor: Annotated[float, Meta(ge=0, le=100)]
    """f of tenants under MPS: it was not known, so that it is larger; the median that it is added to is MPS's own."""
    provenance: dict[str, str | float | int]
    """What it was learned on."""


def read_model(content: bytes) -> SlowdownModel:
    """Read an artifact.

    Raises:
        MalformedError: It is cut short, changed, or of another version.
    """
    try:
        return msgspec.json.decode(content, type=SlowdownModel)
    except msgspec.DecodeError as e:
        raise MalformedError(f"expected a slowdown model: {e}") from e


@cache
def shipped() -> SlowdownModel:
    """Return the model that the package carries."""
    return load("slowdown.json", read_model)


def slowdowns(
    mode: SharingMode, util: Ratios, sm: Ratios, dram: Ratios, present: NDArray[np.bool_] | None = None
) -> Slowdowns:
    """Predict each tenant's step time beside its neighbours over its step time alone: the median.

    Args:
        mode: How all of these GPUs are shared.
        util: Share of time in which some kernel of the tenant ran when alone, 0..1, shape (gpus, tenants).
        sm: Mean share of SMs with its work when alone, 0..1, same shape.
        dram: Share of memory cycles in use when alone, 0..1, same shape.
        present: Which entries are tenants; the others are ignored, same shape. All are when None.

    Returns:
        Slowdowns of at least 1, shape (gpus, tenants), float64; exactly 1 where no tenant is.
    """
    if mode is SharingMode.TIME_SLICING:
        return _in_turns(util, present)
    if mode is SharingMode.MPS:
        sm_excess = _excess(_masked(sm, present), SM_SATURATION)
        dram_excess = _excess(_masked(dram, present), DRAM_SATURATION)
        return 1.0 + _masked(util, present) * np.maximum(sm_excess, dram_excess)
    return np.ones(np.shape(util))


def upper_slowdowns(
    mode: SharingMode, util: Ratios, sm: Ratios, dram: Ratios, present: NDArray[np.bool_] | None = None
) -> Slowdowns:
    """Predict the upper quantile of what `slowdowns` predicts the median of; the level stands in the model."""
    return slowdowns(mode, util, sm, dram, present) + upper_margin(mode, util, present)


def upper_margin(mode: SharingMode, util: Ratios, present: NDArray[np.bool_] | None = None) -> Slowdowns:
    """Return how far the upper quantile lies above the median, shape (gpus, tenants); 0 where no tenant is.

    Args:
        mode: How all of these GPUs are shared.
        util: Share of time in which some kernel of the tenant ran when alone, 0..1, shape (gpus, tenants).
        present: Which entries are tenants; the others are ignored, same shape. All are when None.
    """
    if mode not in (SharingMode.TIME_SLICING, SharingMode.MPS):
        return np.zeros(np.shape(util))
    model, busy = shipped(), _masked(util, present)
    factor = model.turns_factor if mode is SharingMode.TIME_SLICING else model.side_by_side_factor
    above: Slowdowns = factor * (busy.sum(axis=1, keepdims=True) - busy)
    return above if present is None else np.where(present, above, 0.0)


def _ratios(values: Ratios) -> Slowdowns:
    """Return the values, those beyond 0..1 brought back to it."""
    found: Slowdowns = np.maximum(values, 0.0, dtype=np.float64)
    return np.minimum(found, 1.0, out=found)


def _masked(values: Ratios, present: NDArray[np.bool_] | None) -> Slowdowns:
    """Return ratios in 0..1, shape (gpus, tenants); 0 where nobody is."""
    found = _ratios(values)
    if present is not None and not present.all():
        found[~present] = 0.0
    return found


def _in_turns(util: Ratios, present: NDArray[np.bool_] | None) -> Slowdowns:
    """Slowdowns of tenants that take turns: equally many tenants at a time, so that few cost little."""
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
    """Every choice of equally many tenants that are away and of one that is there."""

    tenant: NDArray[np.intp]
    """(choices,) The one that is there."""
    others: NDArray[np.intp]
    """(choices, others) Each other one that is there, when that one is away, too: by its place in the next level."""


@cache
def _levels(tenants: int, depth: int) -> tuple[_Level, ...]:
    """Return the levels from nobody away to `depth` away, or all but one."""
    every = range(tenants)
    choices = [
        [(one, frozenset(away)) for away in combinations(every, size) for one in every if one not in away]
        for size in range(min(depth, tenants - 1) + 1)
    ]
    places = [{choice: place for place, choice in enumerate(level)} for level in [*choices[1:], []]]
    return tuple(
        _Level(
            tenant=np.array([one for one, _ in level], np.intp),
            others=np.array([[at[o, away | {one}] for o in every if (o, away | {one}) in at] for one, away in level]),
        )
        for level, at in zip(choices, places, strict=True)
    )


class MeanValueAnalysis:
    """The mean-value analysis of GPUs with equally many tenants.

    Args:
        busy: Share of time in which a kernel of the tenant runs when alone, 0..1, shape (gpus, tenants).
        exponent: k.
        depth: Levels of smaller groups that are looked at.
    """

    def __init__(self, busy: Slowdowns, exponent: float, depth: int = DEPTH) -> None:
        self._busy: Slowdowns = busy.T
        self._holding: Slowdowns = self._busy**exponent
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
        """Slowdowns of some GPUs, from the smallest groups up; shape (tenants, gpus), as `busy`."""
        busy, holding = self._busy[:, gpus], self._holding[:, gpus]
        slowdown, in_the_way = np.ones(busy.shape), holding.take(self._levels[-1].tenant, axis=0)
        for level in reversed(self._levels[:-1]):
            first, *others = level.others.T
            wait = in_the_way.take(first, axis=0)
            for other in others:
                wait += in_the_way.take(other, axis=0)
            wait *= busy.take(level.tenant, axis=0)
            slowdown = 1.0 + wait
            if level is not self._levels[0]:
                in_the_way = (holding.take(level.tenant, axis=0) + wait) / slowdown
        return slowdown


def _excess(activity: Slowdowns, saturation: float) -> Slowdowns:
    """What of the joint activity finds no room, for each tenant; `activity` has shape (gpus, tenants)."""
    joint = activity.sum(axis=1, keepdims=True)
    excess: Slowdowns = np.maximum(0.0, joint - np.maximum(saturation, activity))
    return excess


SATURATION = SM_SATURATION
"""Share of a GPU, of its time or of its SMs, from which on what its tenants get is what the others leave: from there on
those under MPS disturb each other; of time it is an assumption, with room for monitors that count too little."""
ROUNDS = 20
"""Enough for what is measured on GPUs that are not used up; on others it ends where it is."""


class TenantActivity(NamedTuple):
    """What one tenant does, each 0..1."""

    util: float
    """Share of time in which a kernel of it runs."""
    sm: float
    """Mean share of SMs with its work."""
    dram: float
    """Share of memory cycles in use; as predicted alone, because no agent measures it."""


def solo_activity(mode: SharingMode, together: Sequence[TenantActivity]) -> list[TenantActivity]:
    """Estimate what each tenant of a GPU would do without the others.

    Args:
        mode: How the GPU is shared.
        together: What each was measured to do, over the same time.
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
    """Whether tenants of a GPU get what the others leave: those who take turns of its time, the others of its SMs.

    Args:
        mode: How the GPU is shared.
        together: What each is measured to do.
    """
    used = {SharingMode.TIME_SLICING: (one.util for one in together), SharingMode.MPS: (one.sm for one in together)}
    return len(together) > 1 and sum(used.get(mode, ())) >= SATURATION
