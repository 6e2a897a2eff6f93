"""A job that asks for GPUs, with all that can be worked out once for each class of devices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b

import msgspec
import numpy as np
from carpool_core.demand import Demand, unsuitable_reason
from carpool_core.products import DeviceClass
from carpool_core.resources.node import TenantProfile
from carpool_core.resources.prediction import ProductPrediction
from carpool_core.values import JobUid, RequestedMode, SharingMode
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import CODES, MigProfile, mig_capacity, needed_mib, smallest_mig_profile

THREAD_STEP = 5
"""Thread percentages are rounded up to multiples of this; finer than one SM of most GPUs makes no difference."""

REMEMBERED = 8
"""Collections of classes of devices for which an applicant remembers what it worked out."""


@dataclass(frozen=True, slots=True)
class ClassRequirements:
    """What a demand means on one class of devices."""

    reason: str | None
    """Why even an empty GPU of this class would not do; None where it would."""
    too_small: bool
    """Whether that reason is only that the job's memory does not fit."""
    profile: TenantProfile
    thread_percentage: int
    """Share of the SMs that the job fills while it computes, rounded up: an MPS limit that does not slow it."""
    mig: MigProfile | None
    """MIG instance that it would get; None where no profile holds it."""
    unenforced_mib: int | None
    """Memory that counts for it where nothing enforces that, as by turns; None where it is unknown."""

    @property
    def needs_more_unenforced(self) -> bool:
        """Whether more counts for it where nothing enforces a bound."""
        return self.unenforced_mib != self.profile.memory_mib

    @property
    def is_known(self) -> bool:
        """Whether the job's memory is known here, so that it can share."""
        return self.profile.memory_mib is not None


@dataclass(frozen=True, slots=True, eq=False)
class ClassTable:
    """`ClassRequirements` as arrays of shape (classes,)."""

    suitable: NDArray[np.bool_]
    too_small: NDArray[np.bool_]
    known: NDArray[np.bool_]
    provisional: NDArray[np.bool_]
    """Whether what counts of its memory is to count only until its own peak was measured."""
    can: NDArray[np.bool_]
    """(classes, modes) Whether the agent can prepare a mode for such a job, by the mode's code; MIG where an instance
    would hold it."""
    mig: NDArray[np.int16]
    """(classes, 4) GB and slices of its MIG instance, and of the whole GPU's; zeros where there is none."""
    need_mib: NDArray[np.int64]
    """Upper bound of the job's memory; the GPU's usable memory where unknown."""
    unenforced_mib: NDArray[np.int64]
    """The same where nothing enforces it."""
    util: NDArray[np.float32]
    sm: NDArray[np.float32]
    dram: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class PodRequest:
    """One worker's demand; keep it as long as the demand stays the same, because it remembers what it worked out."""

    demand: Demand
    policy: str | None = None
    """The job's own choice of a policy, where the site allows one."""
    workers: int = 1
    """Workers of the job, and so the most of its pods that may have reservations at a time."""
    user: int | None = None
    """User of the node that the worker runs as; None where its spec does not say."""
    may_use_measured_peak: bool = False
    """Whether it may count with its own peak once that was measured, where it never ran before."""
    created_at: str = ""
    """When the job was created, RFC 3339; empty where nobody says."""
    steps: int | None = None
    """How many steps its training has; None where nobody says."""
    _facts: dict[DeviceClass, ClassRequirements] = field(default_factory=dict)
    _columns: list[tuple[tuple[DeviceClass, ...], ClassTable]] = field(default_factory=list)

    def is_as(self, other: "PodRequest") -> bool:
        """Whether another asks for the same, for the same job."""
        mine, its = (
            (of.demand, of.policy, of.workers, of.user, of.may_use_measured_peak, of.steps) for of in (self, other)
        )
        return mine == its

    @cached_property
    def shape(self) -> bytes:
        """Digest of all that a decision depends on, but not who asks: demands of equal shape fit the same places."""
        anybody = replace(self.demand, job_uid=JobUid(""), job_name="")
        return blake2b(
            msgspec.json.encode((anybody, self.policy, self.user, self.may_use_measured_peak)), digest_size=16
        ).digest()

    def requirements(self, kind: DeviceClass) -> ClassRequirements:
        """Say what the demand means on a class of devices."""
        found = self._facts.get(kind)
        if found is None:
            found = self._facts[kind] = _facts_on(self.demand, kind, settles=self.may_use_measured_peak)
        return found

    def class_table(self, classes: Sequence[DeviceClass]) -> ClassTable:
        """Collect the facts about several classes as arrays."""
        key = tuple(classes)
        for known, found in self._columns:
            if known == key:  # as mostly the first: a few objects compared, where a hash goes through all that they say
                return found
        if len(self._columns) >= REMEMBERED:  # kinds of GPUs come and go
            self._columns.clear()
            self._facts.clear()
        self._columns.append((key, self._collect(key)))
        return self._columns[-1][1]

    def _collect(self, classes: Sequence[DeviceClass]) -> ClassTable:
        facts = [self.requirements(kind) for kind in classes]
        can = np.zeros((len(classes), len(CODES) + 1), np.bool_)
        for row, kind in enumerate(classes):
            can[row, [CODES[mode] for mode in kind.modes]] = True
        can[:, CODES[SharingMode.MIG]] &= np.array([fact.mig is not None for fact in facts], np.bool_)
        if self.demand.gpus > 1:
            # One daemon for each GPU, and a process reaches only one; nor does it reach more than one instance.
            can[:, [CODES[SharingMode.MPS], CODES[SharingMode.MIG]]] = False
        pairs = zip(facts, classes, strict=True)
        need = [
            (needed_mib(fact.profile.memory_mib, kind.usable_mib), needed_mib(fact.unenforced_mib, kind.usable_mib))
            for fact, kind in pairs
        ]
        need_mib, unenforced_mib = np.array(need, np.int64).reshape(-1, 2).T.copy()
        return ClassTable(
            suitable=np.array([fact.reason is None for fact in facts], np.bool_),
            too_small=np.array([fact.too_small for fact in facts], np.bool_),
            known=np.array([fact.is_known for fact in facts], np.bool_),
            provisional=np.array([fact.profile.provisional for fact in facts], np.bool_),
            can=can,
            mig=np.array([_instance(fact, kind) for fact, kind in zip(facts, classes, strict=True)], np.int16).reshape(
                -1, 4
            ),
            need_mib=need_mib,
            unenforced_mib=unenforced_mib,
            util=np.array([fact.profile.gpu_util_percent / 100 for fact in facts], np.float32),
            sm=np.array([fact.profile.sm_active_ratio for fact in facts], np.float32),
            dram=np.array([fact.profile.dram_active_ratio for fact in facts], np.float32),
        )


def _facts_on(demand: Demand, kind: DeviceClass, *, settles: bool) -> ClassRequirements:
    reason = unsuitable_reason(demand, kind)
    profile = demand.profile_on(kind.product)
    if settles and _is_provisional(demand, kind.product):
        profile = msgspec.structs.replace(profile, provisional=True)
    instance = smallest_mig_profile(kind.mig_profiles, profile.memory_mib, profile.sm_active_ratio)
    without_memory = replace(demand, memory_limit_mib=None, prediction=None)
    too_small = reason is not None and unsuitable_reason(without_memory, kind) is None
    if reason is None and demand.mode is RequestedMode.MIG and instance is None:
        there = ", ".join(kind.mig_profiles) or "none"
        reason = f"no MIG profile holds {profile.memory_mib or 0:,} MiB, there are {there}"
    return ClassRequirements(
        reason=reason,
        too_small=too_small,
        profile=profile,
        thread_percentage=thread_percentage(demand.prediction_on(kind.product)),
        mig=instance,
        unenforced_mib=_unenforced_mib(demand, kind, profile.memory_mib),
    )


def _unenforced_mib(demand: Demand, kind: DeviceClass, bound_mib: int | None) -> int | None:
    """Return what counts where nothing enforces a bound: of a prediction more, up to all that such a GPU has."""
    predicted = demand.prediction_on(kind.product)
    if bound_mib is None or predicted is None or demand.memory_limit_mib is not None:
        return bound_mib
    return max(bound_mib, min(predicted.memory.bound_mib(SharingMode.TIME_SLICING, demand.gpus), kind.usable_mib))


def _is_provisional(demand: Demand, product: str) -> bool:
    """Whether what counts of a job's memory may give way to its own peak: nobody else's word is better than that.

    Not the user's own number, which is a promise. Not what earlier runs of it were measured to take, which is as good;
    and of one that died of memory nothing that it takes is believed to be all.
    """
    if demand.memory_limit_mib is not None:
        return False
    predicted = demand.prediction_on(product)
    return predicted is None or not predicted.memory.learned_runs


def _instance(facts: ClassRequirements, kind: DeviceClass) -> tuple[int, int, int, int]:
    taken = (0, 0) if facts.mig is None else (facts.mig.gb, facts.mig.slices)
    return (*taken, *mig_capacity(kind.mig_profiles))


def thread_percentage(predicted: ProductPrediction | None) -> int:
    """Share of the SMs that a job needs so that the limit itself does not slow it, in percent, 5..100.

    SM activity is a mean over all time, the computing and the waiting. While the job computes it fills
    `sm_active / gpu_util` of the SMs; the upper quantile of the one over the lower quantile of the other is rounded
    up, so that the limit is never below the prediction.
    """
    if predicted is None:
        return 100
    busy = min(1.0, max(0.01, predicted.activity.gpu_util_percent.lower / 100))
    filled = max(predicted.activity.sm_active_ratio.upper, predicted.activity.sm_active_ratio.median) / busy
    steps = math.ceil(round(100 * filled / THREAD_STEP, 6))
    return min(100, max(THREAD_STEP, steps * THREAD_STEP))
