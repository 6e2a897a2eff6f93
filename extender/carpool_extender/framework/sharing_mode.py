"""The sharing mode that a GPU would have with the incoming pod, and what is counted and enforced in it."""

import msgspec
import numpy as np
from carpool_core.demand import Demand
from carpool_core.resources.node import TenantProfile
from carpool_core.values import RequestedMode, SharingMode, Tenancy
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import CODES, MODES, NO_MODE
from carpool_extender.cache.pod_request import ClassRequirements, ClassTable, PodRequest

EXCLUSIVE, TIME_SLICING, MPS, MIG = (
    CODES[mode] for mode in (SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS, SharingMode.MIG)
)


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
    """Return why a job counts as a whole GPU on a product.

    Args:
        demand: Demand of the job.
        product: Product on which its memory has no bound.
        until_measured: Whether its own measured peak replaces that later.
    """
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

    Args:
        mode: The mode.
        demand: Demand of the incoming pod.
        is_first: Whether the GPU was idle.
        exclusive: Whether the policy gives every job a GPU of its own.
        unbounded: Why the job's memory has no bound on this GPU; None if it has one.
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
