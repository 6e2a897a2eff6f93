"""Whether a newcomer may join each GPU: all checks over all GPUs at once."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from carpool_core.values import SharingMode, Tenancy
from carpool_predictor.slowdown import slowdowns
from numpy.typing import NDArray

from carpool_extender.applicant import Applicant, ClassColumns
from carpool_extender.conditions import Conditions
from carpool_extender.modes import EXCLUSIVE, MPS, TIME_SLICING, proposed
from carpool_extender.view import NO_MODE, Bools, Floats, View

NO_CONDITIONS = Conditions()
SLACK = 1e-6
"""Room for rounding when a predicted slowdown meets its limit."""


class Check(IntEnum):
    """The checks, in the order in which they are told; the first that fails is the reason."""

    HEALTH = 0
    SUITABLE = 1
    MODE = 2
    TENANCY = 3
    SLOTS = 4
    MEMORY = 5
    CONDITION = 6
    SLOWDOWN = 7


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What one check found."""

    ok: Bools
    """(gpus,)"""
    margin: Floats
    """(gpus,) Room left in the check's own unit; negative where it failed."""


@dataclass(frozen=True, slots=True, eq=False)
class Interference:
    """Predicted slowdowns with the newcomer there. Exactly 1 and 0 where an earlier check failed or nobody else is."""

    newcomer: NDArray[np.float64]
    """(gpus,) Slowdown of the newcomer."""
    added: NDArray[np.float64]
    """(gpus,) What the newcomer loses, and all its neighbours lose on top of what they lose already."""
    worst: NDArray[np.int64]
    """(gpus,) Who is closest to its limit, or furthest beyond: index of a tenant; -1 is the newcomer."""
    worst_slowdown: NDArray[np.float64]
    """(gpus,) That one's slowdown."""
    margin: NDArray[np.float64]
    """(gpus,) That one's limit less its slowdown."""


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What all checks found about one applicant."""

    view: View
    applicant: Applicant
    slots: int
    """Most tenants of one GPU."""
    conditions: Conditions
    """What the site asks of a GPU besides."""
    mode: NDArray[np.int8]
    """(gpus,) Code of the mode that the GPU would have."""
    need_mib: NDArray[np.int64]
    """(gpus,) Memory that the newcomer is counted with."""
    free_mib: NDArray[np.int64]
    """(gpus,) Memory that is not promised to anybody, never negative."""
    sm_active: NDArray[np.float64]
    """(gpus,) SM activity of the tenants that are there, all together; may exceed 1."""
    outcomes: dict[Check, Outcome]
    interference: Interference
    ok: Bools
    """(gpus,) Whether every check passed."""
    failed: NDArray[np.int8]
    """(gpus,) The first check that failed; -1 where all passed."""
    too_small: Bools
    """(gpus,) Whether the GPU is only too small for the newcomer, even when empty."""


def examine(view: View, applicant: Applicant, slots: int, conditions: Conditions = NO_CONDITIONS) -> Verdict:
    """Run all checks of an applicant on all GPUs of a view.

    Args:
        view: The GPUs.
        applicant: Who asks.
        slots: Most tenants of one GPU.
        conditions: What the site asks of a GPU besides.
    """
    columns, facts = view.columns, applicant.columns(view.classes)
    of = columns.device_class
    mode = proposed(view, applicant, facts, alone=conditions.alone)
    free = _free(view)
    need = facts.need_mib[of]
    sm_active = np.where(columns.present, columns.sm, 0.0).sum(axis=1, dtype=np.float64)
    outcomes = {
        Check.HEALTH: _yes_no(view.healthy()),
        Check.SUITABLE: _suitable(facts, view, need),
        Check.MODE: _yes_no(mode != NO_MODE),
        Check.TENANCY: _tenancy(view, applicant, mode),
        Check.SLOTS: _at_least_zero(slots - columns.count.astype(np.float64) - 1),
        Check.MEMORY: _at_least_zero((free - need).astype(np.float64)),
        Check.CONDITION: _conditions(conditions, view, free, sm_active, facts.sm[of]),
    }
    so_far = columns.alive & np.logical_and.reduce([outcome.ok for outcome in outcomes.values()])
    interference = _interference(view, applicant, facts, mode, so_far & (columns.count > 0))
    outcomes[Check.SLOWDOWN] = Outcome(interference.margin >= -SLACK, interference.margin)
    passed = np.stack([outcomes[check].ok for check in Check])
    ok = so_far & passed[Check.SLOWDOWN]
    return Verdict(
        view=view,
        applicant=applicant,
        slots=slots,
        conditions=conditions,
        mode=mode,
        need_mib=need,
        free_mib=free,
        sm_active=sm_active,
        outcomes=outcomes,
        interference=interference,
        ok=ok,
        failed=np.where(passed.all(axis=0), -1, np.argmin(passed, axis=0)).astype(np.int8),
        too_small=facts.too_small[of],
    )


def _conditions(
    conditions: Conditions, view: View, free: NDArray[np.int64], sm_active: NDArray[np.float64], newcomer: Floats
) -> Outcome:
    """The site's preconditions; the margin is the share by which the tightest is met or missed."""
    margin = np.ones(len(free))
    if conditions.most_sm_active is not None:
        margin = np.minimum(margin, (conditions.most_sm_active - sm_active) / conditions.most_sm_active)
    if (joint := conditions.most_joint_sm_active) is not None:
        room = (joint - sm_active - newcomer) / joint
        margin = np.where(view.columns.count > 0, np.minimum(margin, room), margin)
    if conditions.least_free_mib:
        margin = np.minimum(margin, (free - conditions.least_free_mib) / conditions.least_free_mib)
    if conditions.most_jobs is not None:
        margin = np.minimum(margin, (conditions.most_jobs - 1.0 - view.columns.count) / conditions.most_jobs)
    return Outcome(margin >= -SLACK, margin)


def _suitable(facts: ClassColumns, view: View, need: NDArray[np.int64]) -> Outcome:
    """Static suitability; its margin is memory, or -1 where something else than memory is wrong."""
    of = view.columns.device_class
    by_memory = (facts.suitable | facts.too_small)[of]
    return Outcome(facts.suitable[of], np.where(by_memory, view.columns.usable_mib - need, -1).astype(np.float64))


def _yes_no(ok: Bools) -> Outcome:
    return Outcome(ok, np.where(ok, 0.0, -1.0))


def _at_least_zero(margin: NDArray[np.float64]) -> Outcome:
    return Outcome(margin >= 0, margin)


def _free(view: View) -> NDArray[np.int64]:
    """Memory that nobody was promised, in MiB, shape (gpus,): none beside an exclusive tenant."""
    columns = view.columns
    promised = np.where(columns.present, columns.memory_mib, 0).sum(axis=1)
    free = np.maximum(0, columns.usable_mib - promised)
    return np.where(columns.mode == EXCLUSIVE, 0, free).astype(np.int64)


def _tenancy(view: View, applicant: Applicant, mode: NDArray[np.int8]) -> Outcome:
    """Both sides must be willing; and one MPS server never serves two namespaces."""
    columns = view.columns
    own = view.namespaces.get(applicant.demand.namespace, -1)
    stranger = columns.present & (columns.namespace != own)
    if applicant.demand.tenancy is Tenancy.CLUSTER:
        unwilling = stranger & (~columns.cluster_tenancy | (mode == MPS)[:, None])
    else:
        unwilling = stranger
    return _at_least_zero(-unwilling.sum(axis=1).astype(np.float64))


def _interference(
    view: View, applicant: Applicant, facts: ClassColumns, mode: NDArray[np.int8], shared: Bools
) -> Interference:
    """Predict slowdowns on the GPUs where `shared` holds, shape (gpus,)."""
    gpus = len(mode)
    result = Interference(
        newcomer=np.ones(gpus),
        added=np.zeros(gpus),
        worst=np.full(gpus, -1, np.int64),
        worst_slowdown=np.ones(gpus),
        margin=np.full(gpus, applicant.demand.max_slowdown - 1.0),
    )
    for code, name in ((TIME_SLICING, SharingMode.TIME_SLICING), (MPS, SharingMode.MPS)):
        rows = np.flatnonzero(shared & (mode == code))
        if rows.size:
            _predict(view, applicant, facts, rows=rows, mode=name, result=result)
    return result


def _predict(
    view: View,
    applicant: Applicant,
    facts: ClassColumns,
    *,
    rows: NDArray[np.intp],
    mode: SharingMode,
    result: Interference,
) -> None:
    """Fill the slowdowns of some rows in; the newcomer stands in the last column of each array."""
    columns = view.columns
    of = columns.device_class[rows]

    def joined(tenants: Floats, newcomer: Floats) -> Floats:
        return np.column_stack((tenants[rows], newcomer))

    present = np.column_stack((columns.present[rows], np.ones(rows.size, np.bool_)))
    util = joined(columns.util, facts.util[of])
    sm, dram = joined(columns.sm, facts.sm[of]), joined(columns.dram, facts.dram[of])
    limit = joined(columns.max_slowdown, np.full(rows.size, applicant.demand.max_slowdown))
    after = slowdowns(mode, util, sm, dram, present)
    present_before = present.copy()
    present_before[:, -1] = False
    before = slowdowns(mode, util, sm, dram, present_before)
    margin = np.where(present, limit - after, np.inf)
    worst = np.argmin(margin, axis=1)
    every = np.arange(rows.size)
    result.newcomer[rows] = after[:, -1]
    result.added[rows] = (after - before).sum(axis=1)
    result.worst[rows] = np.where(worst == after.shape[1] - 1, -1, worst)
    result.worst_slowdown[rows] = after[every, worst]
    result.margin[rows] = margin[every, worst]
