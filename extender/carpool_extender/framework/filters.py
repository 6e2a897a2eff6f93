"""Filters: whether the incoming pod may have each GPU, evaluated for all GPUs at once.

Each check is one object with its mask, its margin and its message. Refusals, explanations and advice use these. The
site's admission limits and the predicted slowdowns of co-located pods are two of them.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import reduce
from itertools import combinations
from typing import Any, ClassVar, NamedTuple

import numpy as np
from carpool_core.demand import Demand
from carpool_core.resources.node import MAX_MIB
from carpool_core.resources.prediction import ANY_FAMILY, OF_JOB, LearnedColocation, family_of
from carpool_core.settings import SettingsError, setting
from carpool_core.values import RequestedMode, SharingMode, Tenancy, pluralize
from carpool_predictor.calibration.colocation import MAX_RATIO, PAIR, RUN_FACTOR
from carpool_predictor.models.slowdown import DRAM_SATURATION, SM_SATURATION, slowdowns, upper_end, upper_factor
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import (
    MIXED,
    MODES,
    NO_MODE,
    NO_TENANT,
    SHARED,
    Bools,
    Floats,
    GpuTable,
    Rows,
    Snapshot,
    mig_capacity,
    places,
    some,
)
from carpool_extender.cache.pod_request import (
    EXCLUSIVE,
    MIG,
    MPS,
    TIME_SLICING,
    ClassRequirements,
    ClassTable,
    PodRequest,
    choose_modes,
    unbounded_reason,
)

SLACK = 1e-6
"""Tolerance for rounding where an amount meets its limit."""
PASSED, NO_GPU = -1, 100
"""In `FilterResults.failed`: every check passed; the row has no GPU."""
_UNDECIDED = 99
"""Above the number of every check."""
DIGITS = 2
"""Decimals of numbers in messages."""
MAX_JOBS = 1024
"""The API server accepts at most this many reservations on one node."""
MAX_DIGITS = 6
"""Decimals of a slowdown if fewer would show it as equal to its limit."""
_DIGEST = re.compile("[0-9a-f]{16}")
"""Family of a model without a name."""
BEST, EXAMPLE = "at best ", "for example "
"""Qualifiers of a message about several GPUs."""


class Quantile(StrEnum):
    """The predicted slowdown that is compared with the limits of jobs."""

    MEDIAN = "median"
    """The expected slowdown: about half of all slowdowns exceed it."""
    UPPER = "upper"
    """A bound that most slowdowns stay below: fewer jobs share, and fewer exceed their limit."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits of the site on GPUs, and its settings for them. The ledger's promises hold regardless."""

    max_sm_active: float | None = setting(
        None, flag="--most-sm-active", help="Largest SM activity (0..1) of a GPU's present tenants; no limit if empty."
    )
    max_joint_sm_active: float | None = setting(
        None,
        flag="--most-joint-sm-active",
        help="Largest SM activity (0..1) of a GPU's tenants and the new job together; no limit if empty.",
    )
    min_free_mib: int | None = setting(
        None,
        flag="--least-free-mib",
        help="Smallest unreserved memory of a GPU before it takes another job, in MiB; no limit if empty.",
    )
    max_jobs: int | None = setting(
        None, flag="--most-jobs", help="Largest number of jobs on one GPU; if empty, its number of slots."
    )
    quantile: Quantile = setting(
        Quantile.MEDIAN,
        flag="--slowdown-quantile",
        help="Predicted slowdown that is compared with maxSlowdown. median: the expected one; half of the cases exceed "
        "it. upper: one that few cases exceed; fewer jobs share a GPU, and with MPS hardly any at the default limit "
        "of 1.5.",
    )
    exclusive: ClassVar[bool] = False
    """Whether every job gets a GPU of its own."""

    def __post_init__(self) -> None:
        """Reject limits that no GPU can meet.

        Raises:
            SettingsError: A limit is out of range; the message names the expected range.
        """
        for which, activity in (("", self.max_sm_active), ("joint ", self.max_joint_sm_active)):
            if activity is not None and not 0 < activity <= 1:
                raise SettingsError(f"expected a largest {which}SM activity above 0 and up to 1, found {activity:g}")
        if self.min_free_mib is not None and not 0 <= self.min_free_mib <= MAX_MIB:
            raise SettingsError(f"expected a least free memory of 0 to {MAX_MIB:,} MiB, found {self.min_free_mib:,}")
        if self.max_jobs is not None and not 1 <= self.max_jobs <= MAX_JOBS:
            raise SettingsError(f"expected 1 to {MAX_JOBS:,} jobs on a GPU at most, found {self.max_jobs:,}")

    def __str__(self) -> str:
        """Return the limits for people, such as `SM activity ≤ 0.80`; `none` without any."""
        parts = [f"{limit.label} {'≥' if limit.is_minimum else '≤'} {limit.form(value)}" for limit, value in self.set()]
        if self.quantile is not Quantile.MEDIAN:
            parts.append(f"slowdown limits by the {self.quantile} quantile")
        return ", ".join([*parts, *(["every job on a GPU of its own"] if self.exclusive else [])]) or "none"

    def set(self) -> "list[tuple[Limit, float]]":
        """Return the numeric limits that the site has set, each with its value."""
        values = [(limit, getattr(self, limit.field)) for limit in NUMERIC_LIMITS]
        return [(limit, value) for limit, value in values if value is not None]

    def with_exclusive_gpus(self) -> "AdmissionLimits":
        """Return these limits for a policy that gives every job a GPU of its own."""
        return _ExclusiveGpus(self.max_sm_active, self.max_joint_sm_active, self.min_free_mib, 1, self.quantile)


class _ExclusiveGpus(AdmissionLimits):
    """Limits of a policy that gives every job a GPU of its own."""

    exclusive = True


@dataclass(frozen=True, slots=True)
class Limit:
    """One numeric limit: the amount that a GPU has, and its texts."""

    field: str
    """Attribute of `AdmissionLimits`."""
    label: str
    form: Callable[[float], str]
    """Formats an amount."""
    amount: Callable[[GpuTable, Floats], NDArray[Any]]
    """Returns the amount of each GPU, given the SM activity of the incoming pod; shape (gpus,)."""
    is_minimum: bool = False
    exempts_idle: bool = False
    """Whether idle GPUs always meet it."""

    def margin(self, value: float, gpus: GpuTable, incoming_sm: Floats) -> NDArray[np.float64]:
        """Return the distance to the limit as a share of it; negative where it is missed. Shape (gpus,)."""
        room = (value - self.amount(gpus, incoming_sm)) * (-1 if self.is_minimum else 1) / (value or 1)
        margin: NDArray[np.float64] = np.where(gpus.count > 0, room, 1.0) if self.exempts_idle else room
        return margin

    def excess(self, value: float, gpus: GpuTable, incoming_sm: Floats) -> NDArray[Any]:
        """Return the amount of each GPU that misses the limit, and the limit itself for the others."""
        amount, clip = self.amount(gpus, incoming_sm), np.minimum if self.is_minimum else np.maximum
        clipped: NDArray[Any] = clip(amount, value)
        return np.where(gpus.count > 0, clipped, value) if self.exempts_idle else clipped

    def refusal(self, value: float, amount: float) -> str:
        """Return why a GPU misses the limit."""
        return f"{self.label} {self.form(amount)}, the site's limit is {self.form(value)}"

    def headroom(self, value: float, amount: float) -> str:
        """Return how far a GPU is from the limit."""
        return f"{self.label} {self.form(amount)} of at {'least' if self.is_minimum else 'most'} {self.form(value)}"


NUMERIC_LIMITS = (
    Limit("max_sm_active", "SM activity", "{:.2f}".format, lambda gpus, _: gpus.sm_active),
    Limit(
        "max_joint_sm_active",
        "joint SM activity",
        "{:.2f}".format,
        lambda gpus, incoming: gpus.sm_active + incoming,
        exempts_idle=True,
    ),
    Limit("min_free_mib", "free memory", "{:,.0f} MiB".format, lambda gpus, _: gpus.free_mib, is_minimum=True),
    Limit("max_jobs", "jobs on a GPU", "{:.0f}".format, lambda gpus, _: gpus.count + 1),
)

NO_LIMITS = AdmissionLimits()


class Colocation(NamedTuple):
    """The incoming pod and the tenants of some GPUs; shape (tenants + 1, rows) each, the incoming pod first.

    A GPU with fewer tenants than another has empty places: without activity and with an infinite limit.
    """

    mode: SharingMode | None
    util: Floats
    """GPU utilization alone, 0..1."""
    expected: Floats
    """Median of the predicted slowdown."""
    shipped: Floats
    """The same without what was learned."""
    is_trial: Bools
    """Whether the slowdowns of all would be measured, shape (rows,)."""
    limit: Floats
    """Largest slowdown that each accepts."""
    width: Floats
    """Share of the interval that is left after measured runs of the pair, 0..1; 1 where none was measured, 0 where the
    same jobs were."""

    def compared(self, quantile: Quantile, demand: Demand) -> Floats:
        """Return the slowdowns that are compared with the limits: the upper ends if the incoming job was moved.

        A job that would leave at once may try a new pair, even if others turned out worse than the shipped model. It
        joins a group by the upper end of one more run. Where a slowdown would not be measured, the upper ends count.
        """
        found = self.by(Quantile.UPPER if demand.moves or demand.tries else quantile)
        if not demand.tries or quantile is not Quantile.MEDIAN:
            return found
        tried = self.shipped if len(self.util) == PAIR else self.expected * RUN_FACTOR
        return np.where(self.is_trial & (self.width > 0), tried, found)

    def by(self, quantile: Quantile) -> Floats:
        """Return the medians or the upper ends; where the same jobs were measured always the upper ends."""
        is_equal = self.width == 0
        if self.mode is None or (quantile is Quantile.MEDIAN and not is_equal.any()):
            return self.expected
        measured: Floats = self.expected * upper_factor(self.mode, self.util.T).T ** self.width * RUN_FACTOR
        if quantile is Quantile.MEDIAN:
            return np.where(is_equal, measured, self.expected)
        other = upper_end(self.mode, self.expected.T, self.util.T).T
        return np.where(self.width < 1, measured, other)


def colocation_on(gpus: GpuTable, pod_request: PodRequest, table: ClassTable, rows: Rows, mode: int) -> Colocation:
    """Predict the slowdowns on some GPUs.

    `mode` is the code of the mode in which they all share. Under time-slicing they have equally many tenants.
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
    width: Floats = np.ones(util.shape)
    expected = shipped = width if name is None else slowdowns(name, util.T, sm.T, dram.T).T
    present = np.arange(tenants) < gpus.count.take(rows)[:, None]
    measured = (gpus.comparable.take(rows, axis=0)[:, :tenants] | ~present).all(axis=1)
    is_trial = table.comparable.take(device_class) & measured & present.any(axis=1)
    if table.colocations and tenants and name is not None:
        facts = _facts(gpus.family.take(rows, axis=0)[:, :tenants], device_class, table.colocations, name)
        expected, width = _corrected(name, facts, np.array([util, sm, dram]), expected), _widths(facts)
    return Colocation(name, util, expected, shipped, is_trial, limit, width)


class TenantFacts(NamedTuple):
    """What was learned about the tenants of some GPUs and the incoming pod; shape (tenants, rows) each.

    Logarithms of factors to predicted slowdowns, as in `LearnedColocation`.
    """

    is_known: Floats
    """1 where something was learned, else 0."""
    own: Floats
    """c0 of the incoming pod's slowdown beside the tenant."""
    other: Floats
    """c0 of the tenant's slowdown beside the incoming pod."""
    c1: Floats
    c2: Floats
    sensitivity: Floats
    pressure: Floats
    own_width: Floats
    other_width: Floats


def _facts(
    families: NDArray[np.object_],
    classes: NDArray[np.intp],
    learned: Sequence[Sequence[LearnedColocation]],
    mode: SharingMode,
) -> TenantFacts:
    """Return what was learned about tenants, by their families and jobs.

    Args:
        families: Family or job of each tenant; empty if unknown. Shape (rows, tenants).
        classes: Class of each GPU, shape (rows,).
        learned: What was learned about the incoming pod, by class.
        mode: Mode in which the GPUs are shared.
    """
    names = families.T.ravel().tolist()
    codes = {family: code for code, family in enumerate(dict.fromkeys(names))}
    code = np.fromiter(map(codes.__getitem__, names), np.intp, len(names)).reshape(families.shape[::-1])
    found = np.empty((len(TenantFacts._fields), *code.shape))
    for of in set(classes.tolist()):
        here = places(classes == of)
        entries = {one.family: one for one in learned[of] if one.mode is mode}
        each = np.array([_facts_of(entries, family) for family in codes]).T
        found[:, :, here] = each[:, code[:, here]]
    return TenantFacts(*found)


def _facts_of(learned: Mapping[str, LearnedColocation], family: str) -> Sequence[float]:
    """Return the fields of `TenantFacts` for one family or job."""
    one = (learned.get(family) or learned.get(family_of(family)) or learned.get(ANY_FAMILY)) if family else None
    if one is None:
        return 0, 0, 0, 0, 0, 0, 0, 1, 1
    c0, c1, c2 = one.own
    return 1, c0, one.other[0], c1, c2, one.sensitivity, one.pressure, one.own_width, one.other_width


def _corrected(mode: SharingMode, facts: TenantFacts, activity: Floats, expected: Floats) -> Floats:
    """Correct the slowdowns on some GPUs by what was learned about the incoming pod and each tenant.

    Slowdowns of pairs are learned. In a group, what each pair has more or less than predicted adds up.

    Args:
        mode: Mode in which the GPUs are shared.
        facts: What was learned.
        activity: Utilization, SM and DRAM activity of each alone, 0..1, shape (3, tenants + 1, rows).
        expected: Predicted slowdowns, shape (tenants + 1, rows).
    """
    util, corrected = activity[0], np.array(expected, np.float64)
    for i, j in combinations(range(len(util)), 2):
        tenant, of = j - 1, i - 1  # places among the tenants; the incoming pod has none
        if i == 0:
            c0, is_known = (facts.own[tenant], facts.other[tenant]), facts.is_known[tenant]
        else:
            c0 = facts.sensitivity[of] + facts.pressure[tenant], facts.sensitivity[tenant] + facts.pressure[of]
            is_known = facts.is_known[of] * facts.is_known[tenant]
        pair = slowdowns(mode, *(one[[i, j]].T for one in activity)).T
        for place, base, own, beside in ((0, c0[0], i, j), (1, c0[1], j, i)):
            log = base + facts.c1[tenant] * util[own] + facts.c2[tenant] * util[beside]
            corrected[own] += is_known * pair[place] * np.expm1(np.clip(log, -MAX_RATIO, MAX_RATIO))
    return np.maximum(corrected, 1.0)


def _widths(facts: TenantFacts) -> Floats:
    """Return the share of each interval that is left, shape (tenants + 1, rows).

    Beside several tenants it is 0 if the same jobs ran beside each of them, and else 1: only pairs are measured.
    """
    if len(facts.own_width) == 1:
        return np.concatenate([facts.own_width, facts.other_width])
    is_equal = ((facts.own_width == 0) & (facts.other_width == 0)).all(axis=0)
    widths: Floats = np.where(is_equal, 0.0, np.ones((len(facts.own_width) + 1, 1)))
    return widths


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

    `rows` are GPUs that have tenants, and `mode` is the code of the mode in which each is shared, shape (rows,).
    """
    for code, name in SHARED:
        mine = rows.take(places(mode == code))
        if not mine.size:
            continue
        by_median = quantile is Quantile.MEDIAN and not (pod_request.demand.moves or pod_request.demand.tries)
        if name is SharingMode.MPS and by_median and not table.colocations:
            undisturbed = _is_undisturbed(gpus, table, mine)
            easy, mine = mine.take(places(undisturbed)), mine.take(places(~undisturbed))
            own = pod_request.demand.max_slowdown - 1.0
            existing = gpus.existing_slowdown.take(easy)
            yield ColocationResult(easy, 1.0, existing, own, gpus.min_slowdown_limit.take(easy) - 1.0)
        count = gpus.count.take(mine)
        for tenants in np.bincount(count).nonzero()[0].tolist():
            batch = mine.take(places(count == tenants))
            found = colocation_on(gpus, pod_request, table, batch, code)
            own_margin, *others = found.limit - found.compared(quantile, pod_request.demand)
            added = (found.expected - 1.0).sum(axis=0) + gpus.existing_slowdown.take(batch)
            yield ColocationResult(batch, found.expected[0], added, own_margin, reduce(np.minimum, others))


def _is_undisturbed(gpus: GpuTable, table: ClassTable, rows: Rows) -> Bools:
    """Return where the slowdown under MPS is 1 for all, because nothing is saturated; a shortcut for most GPUs."""
    of = gpus.device_class.take(rows)
    sm, dram = gpus.sm_active.take(rows) + table.sm.take(of), gpus.dram_active.take(rows) + table.dram.take(of)
    free: Bools = (sm <= SM_SATURATION) & (dram <= DRAM_SATURATION)
    return free


@dataclass(slots=True, eq=False)
class FilterResults:
    """Results of the checks, shape (gpus,) each."""

    failed: NDArray[np.int8]
    """Number in `CHECKS` of the first check that failed; PASSED, or NO_GPU."""
    mode: NDArray[np.int8]
    """Code of the mode that the GPU would have."""
    slowdown: NDArray[np.float64]
    """Expected slowdown of the incoming pod; 1 where a check failed or the GPU is idle."""
    added_slowdown: NDArray[np.float64]
    """Progress that the incoming pod loses, plus what the tenants lose on top of their present loss; 0 likewise."""
    slowdown_margin: NDArray[np.float64]
    """Distance to its limit of the member that is closest to it; negative beyond."""
    incoming_is_closest: Bools
    """Whether that member is the incoming pod."""

    def put(self, rows: Rows, others: "FilterResults") -> None:
        """Overwrite some rows."""
        for column in fields(self):
            getattr(self, column.name)[rows] = getattr(others, column.name)

    def resized(self, gpus: int) -> "FilterResults":
        """Return a copy with more rows; the new ones have to be evaluated."""
        return FilterResults(*[np.resize(getattr(self, column.name), gpus) for column in fields(self)])


class MemberSlowdown(NamedTuple):
    """Predicted slowdown of the incoming pod or of a tenant on one GPU."""

    tenant: int
    """Index of the tenant; -1 is the incoming pod."""
    slowdown: float
    """Slowdown that is compared with the limit."""
    expected: float
    """Median of the slowdown."""
    limit: float


class ModeTable(NamedTuple):
    """Mode and memory of the incoming pod per device class and present mode, shape (classes, modes)."""

    class_table: ClassTable
    mode: NDArray[np.int8]
    """Code of the mode that the GPU would have."""
    need_mib: NDArray[np.int64]
    """Memory that is counted for the incoming pod, in MiB."""


@dataclass(slots=True, eq=False)
class Evaluation:
    """One request on one snapshot, with the results of all checks."""

    snapshot: Snapshot
    pod_request: PodRequest
    slots: int
    """Most tenants of one GPU."""
    limits: AdmissionLimits
    results: FilterResults
    _mode_table: ModeTable | None = None

    @property
    def mode_table(self) -> ModeTable:
        """Modes by device class and present mode; computed again when the device classes change."""
        cached, class_table = self._mode_table, self.pod_request.class_table(self.snapshot.classes)
        if cached is None or cached.class_table is not class_table:
            mode = choose_modes(self.pod_request, class_table, exclusive=self.limits.exclusive)
            need_mib = np.where(
                mode == TIME_SLICING, class_table.unenforced_mib[:, None], class_table.need_mib[:, None]
            )
            cached = self._mode_table = ModeTable(class_table, mode, need_mib)
        return cached

    @property
    def class_table(self) -> ClassTable:
        """Requirements of the incoming pod per device class."""
        return self.mode_table.class_table

    @property
    def ok(self) -> Bools:
        """Whether every check passed, shape (gpus,)."""
        passed: Bools = self.results.failed == PASSED
        return passed

    def need_mib(self, rows: Rows | None) -> NDArray[np.int64]:
        """Return the memory that is counted for the incoming pod on some GPUs; on all if None."""
        return self.mode_table.need_mib.take(some(self.snapshot.gpus.class_mode, rows))

    def left_mib(self, rows: Rows | None) -> NDArray[np.int64]:
        """Return the memory left over on some GPUs, on all if None; negative where it does not fit."""
        need_mib = self.need_mib(rows)
        return np.subtract(some(self.snapshot.gpus.free_mib, rows), need_mib, out=need_mib)

    def too_small(self, rows: Rows) -> Bools:
        """Return where the memory of an empty GPU is the only thing that does not suit."""
        small: Bools = self.class_table.too_small[self.snapshot.gpus.device_class[rows]]
        return small

    def could_ever(self) -> Bools:
        """Return where an empty and healthy GPU would pass, shape (gpus,)."""
        gpus = self.snapshot.gpus
        able: Bools = gpus.alive & self.class_table.suitable[gpus.device_class]
        return able if (least := self.limits.min_free_mib) is None else able & (gpus.usable_mib >= least)

    def could_when_empty(self) -> Bools:
        """Return where an empty GPU would pass that is healthy, and on a node that the pod accepts, shape (gpus,)."""
        able: Bools = self.could_ever() & ~self.snapshot.gpus.unavailable & (self.results.failed != NODE.number)
        return able

    def node_and_mode(self, rows: Rows) -> Rows:
        """Return a number that GPUs share if one worker could have them together: node and mode; shape (rows,)."""
        numbers: Rows = self.snapshot.gpus.node[rows].astype(np.intp) * len(MODES) + self.results.mode[rows]
        return numbers

    def requirements(self, row: int) -> ClassRequirements:
        """Return the requirements of the incoming pod on the device class of one GPU."""
        return self.pod_request.requirements(self.snapshot.classes[int(self.snapshot.gpus.device_class[row])])

    def members(self, row: int) -> list[MemberSlowdown]:
        """Predict the slowdowns on a GPU that has tenants: of the incoming pod first, then of each tenant."""
        mode = int(self.results.mode[row])
        found = colocation_on(self.snapshot.gpus, self.pod_request, self.class_table, np.array([row]), mode)
        numbers = (found.compared(self.limits.quantile, self.pod_request.demand), found.expected, found.limit)
        each = zip(*(of[:, 0].tolist() for of in numbers), strict=True)
        return [MemberSlowdown(tenant, *of) for tenant, of in enumerate(each, start=-1)]

    def closest(self, row: int) -> MemberSlowdown:
        """Return the member that is closest to its limit on one GPU."""
        own, *others = self.members(row)
        return min(*others, own, key=lambda one: one.limit - one.slowdown)

    def upper_slowdown(self, row: int) -> float:
        """Return the upper quantile of the incoming pod's slowdown on a GPU that it fits on."""
        mode = int(self.results.mode[row])
        found = colocation_on(self.snapshot.gpus, self.pod_request, self.class_table, np.array([row]), mode)
        return float(found.by(Quantile.UPPER)[0, 0])

    def basis(self, row: int) -> str:
        """Return where the slowdowns on a GPU with tenants come from, unless they are the shipped model's."""
        gpus, mode = self.snapshot.gpus, MODES[int(self.results.mode[row])]
        learned = self.class_table.colocations[int(gpus.device_class[row])] if self.class_table.colocations else ()
        here = [one for one in learned if one.mode is mode]
        runs = {one.family: one.runs for one in here if one.runs}
        tenants = dict(zip(gpus.family[row, : gpus.count[row]].tolist(), gpus.tenants[row], strict=True))
        names = {one if one in runs else family_of(one): str(of) for one, of in tenants.items() if one}
        if measured := sorted(names.keys() & runs.keys()):
            shown = [f"jobs like {names[one]}" if OF_JOB in one or _DIGEST.fullmatch(one) else one for one in measured]
            each = zip(measured, shown, strict=True)
            return ", ".join(f"from {pluralize(runs[one], 'measured run')} beside {of}" for one, of in each)
        return "corrected by measured runs of other pairs" if names and here else ""


class Check(ABC):
    """One condition that a GPU must meet."""

    number: ClassVar[int]
    """Place in `CHECKS`: of several that fail, a refusal names the first."""
    needs_mode = False
    """Whether the check does not apply to a GPU that is unsuitable or has no possible mode."""

    @property
    def name(self) -> str:
        """Name in metrics, such as `memory`."""
        return type(self).__name__.removesuffix("Check").lower()

    @abstractmethod
    def mask(self, evaluation: Evaluation, gpus: GpuTable, mode: NDArray[np.int8]) -> Bools | None:
        """Return where the check fails, shape (gpus,); None where it fails nowhere.

        Args:
            evaluation: The request; its results are not read.
            gpus: The GPUs to check.
            mode: Code of the mode that each would have.
        """

    @abstractmethod
    def message(self, evaluation: Evaluation, row: int) -> str:
        """Return why the check fails on one GPU: what was found, and by how much it misses."""

    def margin(self, evaluation: Evaluation, rows: Rows) -> Floats:
        """Return the room left in the check's own unit, shape (rows,); negative where it failed."""
        return np.where(evaluation.results.failed[rows] == self.number, -1.0, 0.0)

    def headroom(self, evaluation: Evaluation, row: int) -> list[str]:
        """Return how far a GPU that passes is from the check's limits, where the site sets them."""
        return []

    def group_keys(self, evaluation: Evaluation, rows: Rows) -> NDArray[Any]:
        """Return small integers that are equal for GPUs whose messages differ in numbers only, shape (rows,)."""
        return np.zeros(rows.size, np.int64)

    def qualifier(self, evaluation: Evaluation, rows: Rows, closest: int) -> str:
        """Return how the message about the closest GPU applies to a group that failed the check.

        Returns:
            An empty string if it holds for all; BEST if the numbers of others are worse; EXAMPLE if they differ.
        """
        return ""

    def group_message(self, evaluation: Evaluation, rows: Rows, closest: int) -> str:
        """Return one message for a group of GPUs; `closest` is the GPU with the largest margin."""
        qualifier = "" if rows.size == 1 else self.qualifier(evaluation, rows, closest)
        return qualifier + self.message(evaluation, closest)


def _differ(numbers: NDArray[Any]) -> bool:
    """Return whether numbers differ as they are printed."""
    return bool(np.ptp(np.round(numbers, DIGITS)))


class HealthCheck(Check):
    """The GPU is healthy, its node reports, and its data are consistent."""

    number = 0

    def mask(self, evaluation: Evaluation, gpus: GpuTable, mode: NDArray[np.int8]) -> Bools | None:
        return gpus.unavailable

    def message(self, evaluation: Evaluation, row: int) -> str:
        return evaluation.snapshot.unavailable[row].reason

    def group_keys(self, evaluation: Evaluation, rows: Rows) -> NDArray[Any]:
        return np.array([evaluation.snapshot.unavailable[row].kind for row in rows.tolist()])

    def qualifier(self, evaluation: Evaluation, rows: Rows, closest: int) -> str:
        reasons = {evaluation.snapshot.unavailable[row].reason for row in rows.tolist()}
        return EXAMPLE if len(reasons) > 1 else ""


class NodeCheck(Check):
    """The pod accepts the GPU's node: it tolerates the taints and the cordon, and its node selectors match."""

    number = 2

    def mask(self, evaluation: Evaluation, gpus: GpuTable, mode: NDArray[np.int8]) -> Bools | None:
        refusing = evaluation.snapshot.refusing_nodes(evaluation.pod_request.constraints)
        return refusing.take(gpus.node) if refusing.any() else None

    def message(self, evaluation: Evaluation, row: int) -> str:
        snapshot = evaluation.snapshot
        node = snapshot.kube_nodes[snapshot.node_names[int(snapshot.gpus.node[row])]]
        return evaluation.pod_request.constraints.refusal(node) or "its node is excluded"

    def group_keys(self, evaluation: Evaluation, rows: Rows) -> NDArray[Any]:
        _, first, of = np.unique(evaluation.snapshot.gpus.node[rows], return_index=True, return_inverse=True)
        messages = [self.message(evaluation, int(row)) for row in rows[first]]
        keys: NDArray[Any] = np.unique(messages, return_inverse=True)[1][of]
        return keys


class SuitabilityCheck(Check):
    """An empty GPU of this class would hold the pod: product, compute capability, total memory."""

    number = 1
    wrong_product = "wrong product"

    def mask(self, evaluation: Evaluation, gpus: GpuTable, mode: NDArray[np.int8]) -> Bools | None:
        suitable = evaluation.class_table.suitable
        return None if suitable.all() else ~suitable.take(gpus.device_class)

    def margin(self, evaluation: Evaluation, rows: Rows) -> Floats:
        if evaluation.too_small(rows).all():
            return evaluation.left_mib(rows).astype(np.float64)
        return super().margin(evaluation, rows)

    def message(self, evaluation: Evaluation, row: int) -> str:
        return evaluation.requirements(row).reason or "unsuitable"

    def group_keys(self, evaluation: Evaluation, rows: Rows) -> NDArray[Any]:
        return evaluation.snapshot.gpus.device_class[rows]

    def group_message(self, evaluation: Evaluation, rows: Rows, closest: int) -> str:
        reason = self.message(evaluation, closest)
        return self.wrong_product if reason.startswith(self.wrong_product) else reason


class ModeCheck(Check):
    """The GPU can have a sharing mode that suits the pod and the present tenants."""

    number = 3

    def mask(self, evaluation: Evaluation, gpus: GpuTable, mode: NDArray[np.int8]) -> Bools | None:
        no_mode: Bools = mode == NO_MODE
        return no_mode

    def message(self, evaluation: Evaluation, row: int) -> str:
        demand, gpus = evaluation.pod_request.demand, evaluation.snapshot.gpus
        present, required = MODES[int(gpus.mode[row])], evaluation.requirements(row)
        if present is None:
            return "its agent can prepare no sharing mode for this job"
        if present is SharingMode.EXCLUSIVE:
            return f"used exclusively by {gpus.tenants[row][0]}"
        if evaluation.limits.exclusive:
            return "in use, and the policy gives every job a GPU of its own"
        if demand.mode is RequestedMode.EXCLUSIVE:
            return "in use, and the job wants a GPU of its own"
        if demand.mode is not RequestedMode.AUTO:
            return f"shared by {present}, and the job wants {demand.mode}"
        if demand.gpus > 1:
            reached = "MIG instance" if present is SharingMode.MIG else "MPS daemon"
            return f"shared by {present}, and a process of several GPUs reaches only one {reached}"
        if not required.is_known:
            return f"in use, and the job must be alone: {unbounded_reason(demand, evaluation.snapshot.product(row))}"
        if present is SharingMode.MIG:
            return f"divided by MIG, and no instance holds {required.profile.memory_mib or 0:,} MiB"
        return f"shared by {present}, which its agent does not offer to other jobs"

    def group_keys(self, evaluation: Evaluation, rows: Rows) -> NDArray[Any]:
        return evaluation.snapshot.gpus.mode[rows]

    def group_message(self, evaluation: Evaluation, rows: Rows, closest: int) -> str:
        if evaluation.snapshot.gpus.mode[closest] == EXCLUSIVE and rows.size > 1:
            return "used exclusively"
        return self.message(evaluation, closest)


class TenancyCheck(Check):
    """Both sides accept the other's tenancy domain, and the MPS server serves the pod's domain and user."""

    number = 4

    def mask(self, evaluation: Evaluation, gpus: GpuTable, mode: NDArray[np.int8]) -> Bools | None:
        user, foreign = evaluation.pod_request.user, self._foreign_tenants(evaluation, gpus, mode)
        if user is None:  # unknown: the node's agent delays the pod if necessary
            return foreign
        # CUDA blocks a client of another user until all clients of the MPS server have ended.
        fails: Bools = foreign | ((gpus.user != NO_TENANT) & (gpus.user != user))
        return fails

    def _foreign_tenants(self, evaluation: Evaluation, gpus: GpuTable, mode: NDArray[np.int8]) -> Bools:
        demand = evaluation.pod_request.demand
        own = evaluation.snapshot.namespaces.get(demand.tenancy_domain, NO_TENANT)
        fails: Bools = (gpus.count > 0) & (gpus.tenant_namespace != own)
        if demand.tenancy is not Tenancy.CLUSTER:
            return fails
        rows = places(fails)
        is_foreign = (gpus.namespace[rows] != own) & (gpus.namespace[rows] != NO_TENANT)
        unwilling = (is_foreign & ~gpus.cluster_tenancy[rows]).any(axis=1)
        fails[rows] = unwilling | (is_foreign.any(axis=1) & (mode[rows] == MPS))
        return fails

    def message(self, evaluation: Evaluation, row: int) -> str:
        gpus, indices = evaluation.snapshot.gpus, evaluation.snapshot.namespaces
        present = set(gpus.namespace[row].tolist())
        own = evaluation.pod_request.demand.tenancy_domain
        others = sorted(domain for domain, index in indices.items() if index in present and domain != own)
        if not others:
            user = int(gpus.user[row])
            served = "several users" if user == MIXED else f"user {user}"
            return f"its MPS server serves {served}, and the job runs as user {evaluation.pod_request.user}"
        if MODES[int(evaluation.results.mode[row])] is SharingMode.MPS:
            return f"its MPS server belongs to {', '.join(others)}"
        return f"used from {', '.join(others)}, and not all are willing to share across namespaces"

    def group_keys(self, evaluation: Evaluation, rows: Rows) -> NDArray[Any]:
        own = evaluation.snapshot.namespaces.get(evaluation.pod_request.demand.tenancy_domain, NO_TENANT)
        same: Bools = evaluation.snapshot.gpus.tenant_namespace[rows] == own
        return same

    def qualifier(self, evaluation: Evaluation, rows: Rows, closest: int) -> str:
        return EXAMPLE if _differ(evaluation.snapshot.gpus.tenant_namespace[rows]) else ""


class SlotsCheck(Check):
    """The GPU has a free slot, and room for the MIG instance among the others."""

    number = 5

    def mask(self, evaluation: Evaluation, gpus: GpuTable, mode: NDArray[np.int8]) -> Bools | None:
        fails: Bools = gpus.count >= evaluation.slots
        if (of_mig := mode == MIG).any():  # the agent checks the placement of instances, too
            asked = evaluation.class_table.mig[gpus.device_class]
            has_memory = gpus.mig_memory_slices + asked[:, 0] <= asked[:, 2]
            has_compute = gpus.mig_compute_slices + asked[:, 1] <= asked[:, 3]
            fails |= of_mig & ~(has_memory & has_compute)
        return fails

    def margin(self, evaluation: Evaluation, rows: Rows) -> Floats:
        room = evaluation.slots - evaluation.snapshot.gpus.count[rows] - 1.0
        return np.where((room >= 0) & (evaluation.results.failed[rows] == self.number), -1.0, room)

    def message(self, evaluation: Evaluation, row: int) -> str:
        tenants = int(evaluation.snapshot.gpus.count[row])
        if tenants >= evaluation.slots:
            return f"has {pluralize(tenants, 'tenant')}, the most allowed is {evaluation.slots}"
        instance = evaluation.requirements(row).mig
        name = instance.name if instance else "none"
        return f"its MIG instances take {self._taken(evaluation, row)}, which leave no room for {name}"

    def headroom(self, evaluation: Evaluation, row: int) -> list[str]:
        mode, parts = int(evaluation.results.mode[row]), []
        if mode != EXCLUSIVE:
            most = min(evaluation.slots, evaluation.limits.max_jobs or evaluation.slots)
            parts.append(f"tenant {int(evaluation.snapshot.gpus.count[row]) + 1} of at most {most}")
        if mode == MIG and (instance := evaluation.requirements(row).mig) is not None:
            parts.append(f"{instance.name} beside {self._taken(evaluation, row)} taken")
        return parts

    def _taken(self, evaluation: Evaluation, row: int) -> str:
        gpus = evaluation.snapshot.gpus
        memory, compute = mig_capacity(evaluation.snapshot.classes[int(gpus.device_class[row])].mig_profiles)
        taken, memory_taken = int(gpus.mig_compute_slices[row]), int(gpus.mig_memory_slices[row])
        return f"{taken} of {compute} compute slices and {memory_taken} of {memory} memory slices"

    def qualifier(self, evaluation: Evaluation, rows: Rows, closest: int) -> str:
        gpus = evaluation.snapshot.gpus
        if _differ(gpus.mig_compute_slices[rows]) or _differ(gpus.mig_memory_slices[rows]):
            return EXAMPLE
        return BEST if _differ(gpus.count[rows]) else ""


class MemoryCheck(Check):
    """The unreserved memory holds the pod's memory bound."""

    number = 6
    needs_mode = True

    def mask(self, evaluation: Evaluation, gpus: GpuTable, mode: NDArray[np.int8]) -> Bools | None:
        fails: Bools = gpus.free_mib < evaluation.mode_table.need_mib.take(gpus.class_mode)
        return fails

    def margin(self, evaluation: Evaluation, rows: Rows) -> Floats:
        return evaluation.left_mib(rows).astype(np.float64)

    def message(self, evaluation: Evaluation, row: int) -> str:
        need, free = int(evaluation.need_mib(np.array([row]))[0]), int(evaluation.snapshot.gpus.free_mib[row])
        is_shared_in_time = MODES[int(evaluation.results.mode[row])] is SharingMode.TIME_SLICING
        wider = is_shared_in_time and evaluation.requirements(row).needs_more_unenforced
        why = " for a first run by time-slicing" if wider else ""
        return f"needs {need:,} MiB{why}, has {free:,} MiB free ({need - free:,} MiB short)"


class LimitsCheck(Check):
    """The GPU meets the site's admission limits."""

    number = 7

    def mask(self, evaluation: Evaluation, gpus: GpuTable, mode: NDArray[np.int8]) -> Bools | None:
        if not (limits := evaluation.limits.set()):
            return None
        incoming_sm, fails = evaluation.class_table.sm[gpus.device_class], np.zeros(len(gpus.alive), np.bool_)
        for limit, value in limits:
            fails |= limit.margin(value, gpus, incoming_sm) < -SLACK
        return fails

    def margin(self, evaluation: Evaluation, rows: Rows) -> Floats:
        gpus, incoming_sm = self._take(evaluation, rows)
        margins = [limit.margin(value, gpus, incoming_sm) for limit, value in evaluation.limits.set()]
        return np.min(margins, axis=0) if margins else np.ones(rows.size)

    def message(self, evaluation: Evaluation, row: int) -> str:
        gpus, incoming_sm = self._take(evaluation, np.array([row]))
        return " and ".join(
            limit.refusal(value, float(limit.amount(gpus, incoming_sm)[0]))
            for limit, value in evaluation.limits.set()
            if limit.margin(value, gpus, incoming_sm)[0] < -SLACK
        )

    def headroom(self, evaluation: Evaluation, row: int) -> list[str]:
        gpus, incoming_sm = self._take(evaluation, np.array([row]))
        return [
            limit.headroom(value, float(limit.amount(gpus, incoming_sm)[0]))
            for limit, value in evaluation.limits.set()
            if limit.field != "max_jobs"  # the slots name the tenants
            and not (limit.exempts_idle and not gpus.count[0])
        ]

    def qualifier(self, evaluation: Evaluation, rows: Rows, closest: int) -> str:
        gpus, incoming_sm = self._take(evaluation, rows)
        limits = evaluation.limits.set()
        if not any(_differ(limit.excess(value, gpus, incoming_sm)) for limit, value in limits):
            return ""
        return BEST if len(limits) == 1 else EXAMPLE

    def _take(self, evaluation: Evaluation, rows: Rows) -> tuple[GpuTable, Floats]:
        gpus = evaluation.snapshot.gpus.take(rows)
        return gpus, evaluation.class_table.sm[gpus.device_class]


class SlowdownCheck(Check):
    """No member's predicted slowdown exceeds its limit. `run_filters` predicts it where all other checks pass."""

    number = 8
    needs_mode = True

    def mask(self, evaluation: Evaluation, gpus: GpuTable, mode: NDArray[np.int8]) -> Bools | None:
        margin = np.ones(len(gpus.alive))
        occupied = places((gpus.count > 0) & (mode != NO_MODE) & gpus.alive)
        table, quantile = evaluation.class_table, evaluation.limits.quantile
        for found in predict_colocations(gpus, evaluation.pod_request, table, occupied, mode.take(occupied), quantile):
            margin[found.rows] = np.minimum(found.own_margin, found.tenants_margin)
        fails: Bools = margin < -SLACK
        return fails

    def margin(self, evaluation: Evaluation, rows: Rows) -> Floats:
        return evaluation.results.slowdown_margin[rows]

    def message(self, evaluation: Evaluation, row: int) -> str:
        closest = evaluation.closest(row)
        return f"{self._effect(evaluation, row, closest)} ({self.beyond(closest.slowdown - closest.limit)} beyond)"

    def group_message(self, evaluation: Evaluation, rows: Rows, closest: int) -> str:
        qualifier = "" if rows.size == 1 else self.qualifier(evaluation, rows, closest)
        return qualifier + self._effect(evaluation, closest, evaluation.closest(closest))

    def _effect(self, evaluation: Evaluation, row: int, closest: MemberSlowdown) -> str:
        found, limit = distinct(closest.slowdown, closest.limit)
        expected = "" if closest.slowdown == closest.expected else f", expected {closest.expected:.2f}"
        verb = "could" if expected else "would"
        if closest.tenant < 0:
            return f"{verb} run {found} times as long there{expected}, accepts {limit}"
        tenant = evaluation.snapshot.gpus.tenants[row][closest.tenant]
        return f"{verb} slow {tenant} to {found} of {limit}{expected}"

    @staticmethod
    def beyond(margin: float) -> str:
        """Return by how much a slowdown exceeds its limit."""
        return distinct(margin, 0.0)[0]

    def group_keys(self, evaluation: Evaluation, rows: Rows) -> NDArray[Any]:
        return evaluation.results.incoming_is_closest[rows]

    def qualifier(self, evaluation: Evaluation, rows: Rows, closest: int) -> str:
        if _differ(self.margin(evaluation, rows)):
            return BEST
        if evaluation.results.incoming_is_closest[rows[0]]:
            return ""
        tenants = evaluation.snapshot.gpus.tenants
        jobs = {tuple(map(str, tenants[row])) for row in rows.tolist()}
        return BEST if len(jobs) > 1 else ""


def distinct(found: float, limit: float) -> tuple[str, str]:
    """Return two numbers with as many decimals, two at least, as show that they differ."""
    digits = next((n for n in range(DIGITS, MAX_DIGITS) if f"{found:.{n}f}" != f"{limit:.{n}f}"), MAX_DIGITS)
    return f"{found:.{digits}f}", f"{limit:.{digits}f}"


HEALTH, SUITABILITY, NODE, MODE, TENANCY = HealthCheck(), SuitabilityCheck(), NodeCheck(), ModeCheck(), TenancyCheck()
SLOTS, MEMORY, LIMITS, SLOWDOWN = SlotsCheck(), MemoryCheck(), LimitsCheck(), SlowdownCheck()
CHECKS: Sequence[Check] = (HEALTH, SUITABILITY, NODE, MODE, TENANCY, SLOTS, MEMORY, LIMITS, SLOWDOWN)
"""In the order in which refusals name them."""


def empty_results(gpus: int) -> FilterResults:
    """Return results of rows without GPUs."""
    return FilterResults(
        failed=np.full(gpus, NO_GPU, np.int8),
        mode=np.zeros(gpus, np.int8),
        slowdown=np.ones(gpus),
        added_slowdown=np.zeros(gpus),
        slowdown_margin=np.zeros(gpus),
        incoming_is_closest=np.zeros(gpus, np.bool_),
    )


def run_filters(evaluation: Evaluation, gpus: GpuTable) -> FilterResults:
    """Run all checks on some GPUs. The present results of the evaluation are not read."""
    pod_request, (class_table, modes, _), count = evaluation.pod_request, evaluation.mode_table, len(gpus.alive)
    mode, failed = modes.take(gpus.class_mode), np.full(count, _UNDECIDED, np.int8)
    for check in CHECKS:
        if check is not SLOWDOWN and (fails := check.mask(evaluation, gpus, mode)) is not None and fails.any():
            # Arithmetic, because assignment by a mask without a pattern takes several times as long.
            np.minimum(failed, _UNDECIDED - fails.view(np.int8) * np.int8(_UNDECIDED - check.number), out=failed)
    failed -= (failed == _UNDECIDED).view(np.int8) * np.int8(_UNDECIDED - PASSED)
    failed[~gpus.alive] = NO_GPU
    results = FilterResults(
        failed=failed,
        mode=mode,
        slowdown=np.ones(count),
        added_slowdown=np.zeros(count),
        slowdown_margin=np.full(count, pod_request.demand.max_slowdown - 1.0),
        incoming_is_closest=np.ones(count, np.bool_),
    )
    shared, quantile = places((failed == PASSED) & (gpus.count > 0)), evaluation.limits.quantile
    for found in predict_colocations(gpus, pod_request, class_table, shared, mode.take(shared), quantile):
        results.slowdown[found.rows], results.added_slowdown[found.rows] = found.slowdown, found.added_slowdown
        margin = np.minimum(found.own_margin, found.tenants_margin)
        results.slowdown_margin[found.rows] = margin
        results.incoming_is_closest[found.rows] = found.own_margin < found.tenants_margin
        failed[found.rows.take(places(margin < -SLACK))] = SLOWDOWN.number
    return results


def other_failures(evaluation: Evaluation, row: int) -> list[Check]:
    """Return the checks that fail on a GPU besides the first one, in their order; empty if all pass."""
    first = int(evaluation.results.failed[row])
    if first < 0:
        return []
    gpus = evaluation.snapshot.gpus.take(np.array([row]))
    mode = evaluation.mode_table.mode.take(gpus.class_mode)
    failing = [
        check for check in CHECKS if (fails := check.mask(evaluation, gpus, mode)) is not None and bool(fails[0])
    ]
    if SUITABILITY in failing or MODE in failing:
        failing = [check for check in failing if not check.needs_mode]
    if SUITABILITY in failing and evaluation.limits.max_joint_sm_active is not None:
        failing = [check for check in failing if check is not LIMITS]  # its activity there is unknown
    return [check for check in failing if check.number != first]
