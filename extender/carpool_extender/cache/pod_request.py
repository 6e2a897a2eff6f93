"""The request of a pod, and for each device class its memory, the sharing mode it gets, and what MPS enforces in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b

import msgspec
import numpy as np
from carpool_core.demand import Demand, unsuitable_reason
from carpool_core.kube.nodes import NodeConstraints
from carpool_core.products import DeviceClass
from carpool_core.resources.node import TenantProfile
from carpool_core.resources.prediction import LearnedColocation, ProductPrediction
from carpool_core.values import JobUid, RequestedMode, SharingMode, Tenancy
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import (
    CODES,
    MODES,
    NO_MODE,
    MigProfile,
    mig_capacity,
    mig_slices,
    needed_mib,
    smallest_mig_profile,
)

EXCLUSIVE, TIME_SLICING, MPS, MIG = (
    CODES[mode] for mode in (SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS, SharingMode.MIG)
)

THREAD_STEP = 5
"""Thread percentages are rounded up to multiples of this; finer than one SM of most GPUs makes no difference."""

REMEMBERED = 8
"""Collections of classes of devices for which an applicant remembers what it worked out."""


@dataclass(frozen=True, slots=True)
class ClassRequirements:
    """Requirements of a demand on one class of devices."""

    reason: str | None
    """Reason why even an empty GPU of this class is unsuitable; None if it is suitable."""
    too_small: bool
    """Whether that reason is only that the job's memory does not fit."""
    profile: TenantProfile
    thread_percentage: int
    """Share of the SMs that the job fills while it computes, rounded up: an MPS limit that does not slow it."""
    mig: MigProfile | None
    """MIG instance that it would get; None where no profile holds it."""
    unenforced_mib: int | None
    """Memory that counts for it if no limit is enforced, as with time-slicing; None if it is unknown."""

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
    """(classes, 4) Memory and compute slices of its MIG instance, and of the whole GPU; zeros where there is none."""
    need_mib: NDArray[np.int64]
    """Upper bound of the job's memory; the GPU's usable memory where unknown."""
    unenforced_mib: NDArray[np.int64]
    """The same where nothing enforces it."""
    util: NDArray[np.float32]
    sm: NDArray[np.float32]
    dram: NDArray[np.float32]
    comparable: NDArray[np.bool_]
    """Whether the job's step time alone is known."""
    may_not_fit: NDArray[np.bool_]
    """Whether it is tried alone although its bound exceeds the GPU's usable memory."""
    colocations: Sequence[Sequence[LearnedColocation]] = ()
    """What was learned about co-tenants, by class; empty without any."""


@dataclass(frozen=True, eq=False)
class PodRequest:
    """One worker's demand; keep it as long as the demand stays the same, because it remembers what it worked out."""

    demand: Demand
    policy: str | None = None
    """The job's own choice of a policy, where the site allows one."""
    workers: int = 1
    """Workers of the job, and so the most of its pods that may have reservations at a time."""
    user: int | None = None
    """User of the node that the worker runs as; None if its spec does not set one."""
    may_use_measured_peak: bool = False
    """Whether it may count with its own peak once that was measured, where it never ran before."""
    steps: int | None = None
    """Training steps of the job; None if it declares none."""
    constraints: NodeConstraints = field(default_factory=NodeConstraints)
    """Which nodes it accepts."""
    _requirements: dict[DeviceClass, ClassRequirements] = field(default_factory=dict)
    _columns: list[tuple[tuple[DeviceClass, ...], ClassTable]] = field(default_factory=list)

    def is_as(self, other: "PodRequest") -> bool:
        """Whether another asks for the same, for the same job."""
        names = ("demand", "policy", "workers", "user", "may_use_measured_peak", "steps", "constraints")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @cached_property
    def shape(self) -> bytes:
        """Digest of all that a decision depends on, but not who asks: demands of equal shape fit the same places."""
        anonymous = replace(self.demand, job_uid=JobUid(""), job_name="")
        return blake2b(
            msgspec.json.encode((anonymous, self.policy, self.user, self.may_use_measured_peak, self.constraints)),
            digest_size=16,
        ).digest()

    def requirements(self, kind: DeviceClass) -> ClassRequirements:
        """Return the requirements on a class of devices."""
        found = self._requirements.get(kind)
        if found is None:
            found = self._requirements[kind] = _requirements_on(self.demand, kind, self.may_use_measured_peak)
        return found

    def class_table(self, classes: Sequence[DeviceClass]) -> ClassTable:
        """Collect the facts about several classes as arrays."""
        key = tuple(classes)
        for known, found in self._columns:
            if known == key:  # mostly the first; comparing a few objects is cheaper than a hash of their fields
                return found
        if len(self._columns) >= REMEMBERED:  # kinds of GPUs come and go
            self._columns.clear()
            self._requirements.clear()
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
        predicted = [self.demand.prediction_on(kind.product) for kind in classes]
        learned = [[] if one is None else one.colocations for one in predicted]
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
            comparable=np.array([fact.profile.comparable for fact in facts], np.bool_),
            may_not_fit=np.array(
                [
                    not fact.is_known and one is not None and one.memory.upper_mib > kind.usable_mib
                    for fact, one, kind in zip(facts, predicted, classes, strict=True)
                ],
                np.bool_,
            ),
            colocations=learned if any(learned) else (),
        )


def _requirements_on(demand: Demand, kind: DeviceClass, may_use_measured_peak: bool) -> ClassRequirements:
    reason = unsuitable_reason(demand, kind)
    profile = demand.profile_on(kind.product)
    if may_use_measured_peak and _is_provisional(demand, kind.product):
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
    return max(bound_mib, min(predicted.memory.bound_mib(SharingMode.TIME_SLICING), kind.usable_mib))


def _is_provisional(demand: Demand, product: str) -> bool:
    """Return whether the measured peak of a job may replace its reserved memory.

    A limit that the user set stays. So does a bound from earlier runs of the job, which is as good as the peak. After
    an out-of-memory death no measured peak counts.
    """
    if demand.memory_limit_mib is not None:
        return False
    predicted = demand.prediction_on(product)
    return predicted is None or not predicted.memory.learned_runs


def _instance(facts: ClassRequirements, kind: DeviceClass) -> tuple[int, int, int, int]:
    taken = (0, 0) if facts.mig is None else mig_slices(facts.mig, kind.mig_profiles)
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


def choose_modes(pod_request: PodRequest, table: ClassTable, *, exclusive: bool = False) -> NDArray[np.int8]:
    """Choose the mode of a GPU by its device class and its present mode.

    - Present tenants keep their mode, and nothing joins an exclusive tenant.
    - On an idle GPU, `Auto` is exclusive for a job of unknown memory. If its own peak may replace the bound later,
      it is a mode that others can join.
    - A job that shares with other namespaces gets a MIG instance that leaves room for others: hardware isolates them.
    - Other jobs get MPS, which limits memory. They get time-slicing where the device has no MPS, or the job has several
      GPUs: each GPU has its own MPS daemon, and a process reaches only one.

    Args:
        pod_request: The incoming pod.
        table: Its requirements per device class.
        exclusive: Whether the policy gives every job a GPU of its own; `Auto` is exclusive then.

    Returns:
        Codes of modes, NO_MODE where none is possible; shape (classes, modes).
    """
    wanted = pod_request.demand.mode
    if exclusive and wanted is RequestedMode.AUTO:
        wanted = RequestedMode.EXCLUSIVE
    if wanted is RequestedMode.AUTO:
        modes = np.where(table.known[:, None] & table.can, np.arange(len(MODES)), NO_MODE)
        idle = _on_idle(table, pod_request.demand.tenancy)
    else:
        code = CODES[SharingMode(wanted.value)]
        idle = np.where(table.can[:, code], code, NO_MODE)
        modes = np.full(table.can.shape, NO_MODE)
        modes[:, code] = idle
    modes[:, EXCLUSIVE] = NO_MODE
    modes[:, NO_MODE] = idle
    return modes.astype(np.int8)


def _on_idle(table: ClassTable, tenancy: Tenancy) -> NDArray[np.int8]:
    """Return the mode that `Auto` gives an idle GPU of each class, shape (classes,)."""
    alone = np.where(table.can[:, EXCLUSIVE], EXCLUSIVE, NO_MODE)
    sliced = np.where(table.can[:, TIME_SLICING], TIME_SLICING, alone)
    joinable = np.where(table.can[:, MPS], MPS, sliced)
    shared = joinable
    if tenancy is Tenancy.CLUSTER:
        asked_slices, all_slices = table.mig[:, 1], table.mig[:, 3]
        shared = np.where(table.can[:, MIG] & (asked_slices < all_slices), MIG, shared)
    unknown = np.where(table.provisional, joinable, alone)
    return np.where(table.known, shared, unknown).astype(np.int8)


def unbounded_reason(demand: Demand, product: str, *, until_measured: bool = False) -> str:
    """Return why a job counts as a whole GPU on a product; `until_measured`: its own measured peak replaces that."""
    predicted = demand.prediction_on(product)
    if predicted is None:
        reason = "nothing is known of its memory, so it counts with the whole GPU"
    elif predicted.memory.is_refuted:
        reason = (
            "earlier runs of this model (other jobs' too) died of memory on such GPUs, or took nearly all, "
            "so it counts with the whole GPU"
        )
    else:
        reason = "too little was measured on such GPUs to rely on its prediction, so it counts with the whole GPU"
    return f"{reason} until its own peak was measured" if until_measured else reason


def mode_reason(mode: SharingMode, demand: Demand, *, is_first: bool, exclusive: bool, unbounded: str | None) -> str:
    """Return in a few words why a GPU has this mode.

    `is_first` is whether the GPU was idle, `exclusive` whether the policy gives every job a GPU of its own, and
    `unbounded` why the job's memory has no bound on this GPU; None if it has one.
    """
    if demand.mode is not RequestedMode.AUTO:
        return "as the job asks"
    if not is_first:
        return "as its tenants have it"
    if exclusive:
        return "as the policy gives every job a GPU of its own"
    if unbounded and mode is not SharingMode.EXCLUSIVE:
        return f"so that others can join it later: {unbounded}"
    if mode is SharingMode.MIG:
        return "as other namespaces may join, each in an instance of its own"
    if mode is SharingMode.EXCLUSIVE:
        return f"as {unbounded}" if unbounded else "as the device supports no sharing"
    if mode is SharingMode.TIME_SLICING:
        several = "as a process of several GPUs reaches only one MPS daemon"
        return several if demand.gpus > 1 else "as the device has no MPS"
    return "as memory is limited and kernels run side by side"


def tenant_profile(required: ClassRequirements, mode: SharingMode) -> TenantProfile:
    """Return what the reservation counts for the pod.

    Under time-slicing nothing enforces a bound, so more may count. A bound is final if no other pod can join, or
    if hardware enforces it.
    """
    profile = required.profile
    if mode is SharingMode.TIME_SLICING:
        return msgspec.structs.replace(profile, memory_mib=required.unenforced_mib)
    if mode is SharingMode.MPS or not profile.provisional:
        return profile
    return msgspec.structs.replace(profile, provisional=False)


def memory_limit_mib(mode: SharingMode, required: ClassRequirements) -> int | None:
    """Return the limit that MPS enforces, in MiB; None in the other modes, which enforce none."""
    memory = required.profile.memory_mib
    return memory if mode is SharingMode.MPS and memory else None


def thread_limit(mode: SharingMode, required: ClassRequirements, *, is_first: bool) -> int | None:
    """Return the MPS active thread percentage; None in other modes.

    A process keeps the limit that it starts with. The first tenant gets 100: a lower limit would idle SMs while it is
    alone. A pod that joins others is limited to its predicted share, from which their slowdown was predicted.
    """
    if mode is not SharingMode.MPS:
        return None
    return 100 if is_first else required.thread_percentage
