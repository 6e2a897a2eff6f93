"""Whether a newcomer may join each GPU: all checks over all GPUs at once."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from carpool_core.values import Tenancy
from carpool_predictor.models.slowdown import upper_margin
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import (
    MODES,
    NO_MODE,
    NO_TENANT,
    Bools,
    Floats,
    GpuTable,
    Rows,
    Snapshot,
    places,
    some,
)
from carpool_extender.cache.pod_request import ClassTable, PodRequest
from carpool_extender.framework.admission_limits import AdmissionLimits
from carpool_extender.framework.colocation import colocation_on, predict_colocations
from carpool_extender.framework.sharing_mode import MIG, MPS, TIME_SLICING, proposals


def serves_another(columns: GpuTable, user: int | None) -> Bools | None:
    """Where an MPS server serves another user: the newcomer would wait in CUDA until all its clients have ended.

    Args:
        columns: Some GPUs.
        user: As whom the newcomer runs; None where nobody knows. Its node's agent keeps it waiting then, if it must.

    Returns:
        A mask, shape (gpus,); None where the newcomer is in nobody's way.
    """
    if user is None:
        return None
    others: Bools = (columns.user != NO_TENANT) & (columns.user != user)
    return others


def limits_margin(conditions: AdmissionLimits, columns: GpuTable, newcomer: Floats) -> NDArray[np.float64]:
    """The share by which the tightest of the site's preconditions is met or missed."""
    active, free = columns.sm_active, columns.free_mib
    margin = np.ones(len(free))
    if conditions.max_sm_active is not None:
        margin = np.minimum(margin, (conditions.max_sm_active - active) / conditions.max_sm_active)
    if (joint := conditions.max_joint_sm_active) is not None:
        room = (joint - active - newcomer) / joint
        margin = np.where(columns.count > 0, np.minimum(margin, room), margin)
    if conditions.min_free_mib:
        margin = np.minimum(margin, (free - conditions.min_free_mib) / conditions.min_free_mib)
    if conditions.max_jobs is not None:
        margin = np.minimum(margin, (conditions.max_jobs - 1.0 - columns.count) / conditions.max_jobs)
    return margin


def shortfall(conditions: AdmissionLimits, columns: GpuTable, newcomer: Floats) -> list[NDArray[Any]]:
    """What GPUs have of each thing that the site asks for, shape (gpus,) each; as much as it asks where that is met."""
    active, found = columns.sm_active, list[NDArray[Any]]()
    if (most := conditions.max_sm_active) is not None:
        found.append(np.maximum(active, most))
    if (joint := conditions.max_joint_sm_active) is not None:
        found.append(np.where(columns.count > 0, np.maximum(active + newcomer, joint), joint))
    if (least := conditions.min_free_mib) is not None:
        found.append(np.minimum(columns.free_mib, least))
    if (jobs := conditions.max_jobs) is not None:
        found.append(np.maximum(columns.count, jobs - 1))
    return found


NO_LIMITS = AdmissionLimits()
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


PASSED, NO_GPU = -1, 100
"""In `FilterResults.failed`: every check passed; no GPU has this row."""
_NONE = 99
"""Beyond every check."""


@dataclass(slots=True, eq=False)
class FilterResults:
    """What the checks found of each GPU, shape (gpus,) each."""

    failed: NDArray[np.int8]
    """The first check that failed; PASSED, or NO_GPU."""
    mode: NDArray[np.int8]
    """Code of the mode that the GPU would have."""
    slowdown: NDArray[np.float64]
    """Predicted slowdown of the newcomer; 1 where an earlier check failed or nobody else is there."""
    added_slowdown: NDArray[np.float64]
    """What the newcomer loses, and all its neighbours lose on top of what they lose already; 0 likewise."""
    slowdown_margin: NDArray[np.float64]
    """Room to its limit of whoever is closest to it, negative beyond."""
    incoming_is_closest: Bools
    """Whether that is the newcomer."""

    def put(self, rows: Rows, others: "FilterResults") -> None:
        """Write what was found of some rows again."""
        for column in fields(self):
            getattr(self, column.name)[rows] = getattr(others, column.name)

    def of(self, rows: Rows) -> "FilterResults":
        """Return copies of what was found of some rows."""
        return FilterResults(*[getattr(self, column.name)[rows] for column in fields(self)])

    def resized(self, gpus: int) -> "FilterResults":
        """Return a copy with more rows; what stands in them is to be found yet."""
        return FilterResults(*[np.resize(getattr(self, column.name), gpus) for column in fields(self)])


class Closest(NamedTuple):
    """What would become of one of a GPU's tenants, or the newcomer: mostly of who is closest to its limit."""

    tenant: int
    """Its place among the tenants; -1 is the newcomer."""
    slowdown: float
    """What its limit is held against."""
    expected: float
    """The median of that."""
    limit: float


class Openings(NamedTuple):
    """What can be made of GPUs for a newcomer, by their class and the mode that they are in, shape (classes, modes)."""

    facts: ClassTable
    """From which that follows."""
    mode: NDArray[np.int8]
    """Code of the mode that they would have."""
    kept_out: NDArray[np.int8]
    """The first check that fails of all of them; _NONE where it depends on the GPU."""
    need_mib: NDArray[np.int64]
    """Memory that the newcomer is counted with."""


def _openings(pod_request: PodRequest, facts: ClassTable, *, alone: bool) -> Openings:
    mode = proposals(pod_request, facts, alone=alone)
    kept_out = np.where(mode == NO_MODE, np.int8(Check.MODE), np.int8(_NONE))
    kept_out[~facts.suitable] = Check.SUITABLE
    need_mib = np.where(mode == TIME_SLICING, facts.unenforced_mib[:, None], facts.need_mib[:, None])
    return Openings(facts, mode, kept_out, need_mib)


@dataclass(slots=True, eq=False)
class Evaluation:
    """What all checks found about one applicant."""

    snapshot: Snapshot
    pod_request: PodRequest
    slots: int
    """Most tenants of one GPU."""
    limits: AdmissionLimits
    """What the site asks of a GPU besides."""
    results: FilterResults
    _known_openings: Openings | None = None

    @property
    def openings(self) -> Openings:
        """What can be made of GPUs; worked out once for all changes of them, as long as their classes stay the same."""
        known, facts = self._known_openings, self._facts
        if known is None or known.facts is not facts:
            known = self._known_openings = _openings(self.pod_request, facts, alone=self.limits.alone)
        return known

    @property
    def ok(self) -> Bools:
        """(gpus,) Whether every check passed."""
        passed: Bools = self.results.failed == PASSED
        return passed

    def need_mib(self, rows: Rows | None) -> NDArray[np.int64]:
        """Memory that the newcomer is counted with on some GPUs; on all where None."""
        return self.openings.need_mib.take(some(self.snapshot.gpus.kind, rows))

    def left_mib(self, rows: Rows | None) -> NDArray[np.int64]:
        """Memory that would be left over on some GPUs, on all where None; negative where it is too little."""
        need_mib = self.need_mib(rows)
        return np.subtract(some(self.snapshot.gpus.free_mib, rows), need_mib, out=need_mib)

    def too_small(self, rows: Rows) -> Bools:
        """Whether some GPUs are only too small for the newcomer, even when empty."""
        small: Bools = self._facts.too_small[self.snapshot.gpus.device_class[rows]]
        return small

    def could_ever(self) -> Bools:
        """(gpus,) Whether a GPU would do if it were empty and healthy: also for what the site asks to be free."""
        columns = self.snapshot.gpus
        able: Bools = columns.alive & self._facts.suitable[columns.device_class]
        return able if (least := self.limits.min_free_mib) is None else able & (columns.usable_mib >= least)

    def closest(self, row: int) -> Closest:
        """Work out who would be closest to its limit on one GPU."""
        own, *others = self.met(row)
        return min(*others, own, key=lambda one: one.limit - one.slowdown)

    def met(self, row: int) -> list[Closest]:
        """Work out what would become of the newcomer, who comes first, and of each tenant of a GPU that has some."""
        crowd = colocation_on(
            self.snapshot.gpus, self.pod_request, self._facts, np.array([row]), int(self.results.mode[row])
        )
        numbers = (crowd.by(self.limits.quantile), crowd.expected, crowd.limit)
        each = zip(*(of[:, 0].tolist() for of in numbers), strict=True)
        return [Closest(tenant, *of) for tenant, of in enumerate(each, start=-1)]

    def upper(self, row: int) -> float:
        """Work out the upper quantile of the newcomer's slowdown on one GPU that it could join, or have alone."""
        columns, mode = self.snapshot.gpus, MODES[int(self.results.mode[row])]
        busy = np.append(columns.util[row, : columns.count[row]], 0.0)[None, :]
        more = 0.0 if mode is None else float(upper_margin(mode, busy, np.ones(busy.shape, np.bool_))[0, -1])
        return float(self.results.slowdown[row]) + more

    def margins(self, check: Check, rows: Rows) -> Floats:
        """Room left in a check's own unit on some GPUs; negative where it failed."""
        columns = self.snapshot.gpus
        if check is Check.SLOWDOWN:
            return self.results.slowdown_margin[rows]
        if check is Check.MEMORY or (check is Check.SUITABLE and bool(self.too_small(rows).all())):
            return self.left_mib(rows).astype(np.float64)
        if check is Check.SLOTS:
            room = self.slots - columns.count[rows] - 1.0
            return np.where(room < 0, room, np.where(self.results.failed[rows] == check, -1.0, room))
        if check is Check.CONDITION:
            of = self._facts.sm[columns.device_class[rows]]
            return limits_margin(self.limits, columns.take(rows), of)
        return np.where(self.results.failed[rows] == check, -1.0, 0.0)

    @property
    def _facts(self) -> ClassTable:
        return self.pod_request.class_table(self.snapshot.classes)


def empty_results(gpus: int) -> FilterResults:
    """Return findings of rows that no GPU has."""
    return FilterResults(
        failed=np.full(gpus, NO_GPU, np.int8),
        mode=np.zeros(gpus, np.int8),
        slowdown=np.ones(gpus),
        added_slowdown=np.zeros(gpus),
        slowdown_margin=np.zeros(gpus),
        incoming_is_closest=np.zeros(gpus, np.bool_),
    )


def run_filters(asked: Evaluation, columns: GpuTable) -> FilterResults:
    """Run all checks on some GPUs.

    Args:
        asked: Who asks, and for what; what it found before does not matter.
        columns: The GPUs.
    """
    pod_request, conditions = asked.pod_request, asked.limits
    facts, table, kept_out, _ = asked.openings
    # What is known for each class and each mode that there is has only to be looked up for each GPU.
    gpus, mode = len(columns.kind), table.take(columns.kind)
    failed = _first(failures(asked, columns), kept_out.take(columns.kind))
    failed[~columns.alive] = NO_GPU
    found = FilterResults(
        failed=failed,
        mode=mode,
        slowdown=np.ones(gpus),
        added_slowdown=np.zeros(gpus),
        slowdown_margin=np.full(gpus, pod_request.demand.max_slowdown - 1.0),
        incoming_is_closest=np.ones(gpus, np.bool_),
    )
    there = places((failed == PASSED) & (columns.count > 0))
    for met in predict_colocations(columns, pod_request, facts, there, mode.take(there), conditions.quantile):
        found.slowdown[met.rows], found.added_slowdown[met.rows] = met.newcomer, met.added
        margin = np.minimum(met.own, met.others)
        found.slowdown_margin[met.rows], found.incoming_is_closest[met.rows] = margin, met.own < met.others
        failed[met.rows.take(places(margin < -SLACK))] = Check.SLOWDOWN
    return found


def failures(asked: Evaluation, columns: GpuTable) -> tuple[tuple[Check, Bools | None], ...]:
    """Return checks and where each of them fails, but for what all GPUs of a class have in common, and slowdowns."""
    facts, table, _, need_mib = asked.openings
    of, mode = columns.device_class, table.take(columns.kind)
    return (
        (Check.CONDITION, _condition_fails(asked.limits, columns, facts.sm, of)),
        (Check.MEMORY, columns.free_mib < need_mib.take(columns.kind)),
        (Check.SLOTS, (columns.count >= asked.slots) | lacks_instances(columns, facts.mig, mode)),
        (Check.TENANCY, serves_another(columns, asked.pod_request.user)),
        (Check.TENANCY, _strangers(asked.snapshot, columns, asked.pod_request, mode)),
        (Check.HEALTH, columns.unavailable),
    )


def _first(failures: Iterable[tuple[Check, Bools | None]], failed: NDArray[np.int8]) -> NDArray[np.int8]:
    """Return the first check that failed on each GPU; PASSED where none did.

    Args:
        failures: Checks, and where each failed.
        failed: What is known to have failed before; _NONE where that is nothing.
    """
    # Numbers are compared and nothing is picked by masks: where those have no pattern, they take several times as long.
    for check, fails in failures:
        if fails is not None and fails.any():
            np.minimum(failed, _NONE - fails.view(np.int8) * np.int8(_NONE - check), out=failed)
    first: NDArray[np.int8] = failed - (failed == _NONE).view(np.int8) * np.int8(_NONE - PASSED)
    return first


def lacks_instances(columns: GpuTable, mig: NDArray[np.int16], mode: NDArray[np.int8]) -> Bools:
    """Where a MIG instance would be wanted and has no room beside the others, shape (gpus,).

    Room in numbers is not yet room at a place: the agent knows, and GPUs that could not be prepared are left alone.
    """
    lacking: Bools = mode == MIG
    if lacking.any():  # seldom, and gathering the rest takes a tenth of all checks
        asked = mig[columns.device_class]
        beyond = (columns.mig_gb + asked[:, 0] > asked[:, 2]) | (columns.mig_slices + asked[:, 1] > asked[:, 3])
        lacking &= beyond
    return lacking


def _condition_fails(conditions: AdmissionLimits, columns: GpuTable, sm: Floats, of: Rows) -> Bools | None:
    """Where a precondition of the site is not met; None where there is none."""
    if not conditions.any_set:
        return None
    fails: Bools = limits_margin(conditions, columns, sm[of]) < -SLACK
    return fails


def _strangers(snapshot: Snapshot, columns: GpuTable, pod_request: PodRequest, mode: NDArray[np.int8]) -> Bools:
    """Where somebody is unwilling: both sides must share; and one MPS server never serves two namespaces."""
    own = snapshot.namespaces.get(pod_request.demand.namespace, NO_TENANT)
    among: Bools = (columns.count > 0) & (columns.tenant_namespace != own)
    if pod_request.demand.tenancy is not Tenancy.CLUSTER:
        return among
    rows = places(among)
    stranger = (columns.namespace[rows] != own) & (columns.namespace[rows] != NO_TENANT)
    keeps_apart = (stranger & ~columns.cluster_tenancy[rows]).any(axis=1)
    among[rows] = keeps_apart | (stranger.any(axis=1) & (mode[rows] == MPS))
    return among
