"""Which sharing mode a GPU would have with the newcomer on it."""

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


JOINABLE = frozenset((SharingMode.MPS, SharingMode.TIME_SLICING))
"""Modes in which others may join a tenant, and nothing but what is counted keeps them apart."""


def proposals(pod_request: PodRequest, facts: ClassTable, *, alone: bool = False) -> NDArray[np.int8]:
    """Choose the mode that a GPU of each class would have, by the mode that it is in; code 0 where none is possible.

    The mode of the tenants that are there is a constraint: nobody is moved to another mode while running, and beside an
    exclusive tenant there is no place. On an idle GPU, `Auto` takes the whole GPU for a job of which nothing is known,
    because its memory has no bound; where it may count with its own peak later, in a mode in which others can join it
    then. A job that shares with other namespaces gets a MIG instance where that leaves room
    for somebody else: strangers are kept apart by hardware, and never meet behind one MPS daemon. The others get MPS
    where it can be had (it limits memory, and was measured the best almost everywhere), and turns where it cannot: the
    device cannot, or the job has several GPUs, each of which has an MPS daemon of its own while a process reaches only
    one. Whoever asks for isolation asks for MIG.

    Where the policy gives every job a GPU of its own (`alone`), `Auto` is exclusive.

    Returns:
        Codes of modes, shape (classes, modes).
    """
    wanted = pod_request.demand.mode
    if alone and wanted is RequestedMode.AUTO:
        wanted = RequestedMode.EXCLUSIVE
    if wanted is RequestedMode.AUTO:
        table = np.where(facts.known[:, None] & facts.can, np.arange(len(MODES)), NO_MODE)
        first = _first_choice(facts, pod_request.demand.tenancy)
    else:
        code = CODES[SharingMode(wanted.value)]
        first = np.where(facts.can[:, code], code, NO_MODE)
        table = np.full(facts.can.shape, NO_MODE)
        table[:, code] = first
    table[:, EXCLUSIVE] = NO_MODE
    table[:, NO_MODE] = first
    return table.astype(np.int8)


def _first_choice(facts: ClassTable, tenancy: Tenancy) -> NDArray[np.int8]:
    """Mode of an idle GPU of each class for a job that leaves it open, shape (classes,)."""
    alone = np.where(facts.can[:, EXCLUSIVE], EXCLUSIVE, NO_MODE)
    turns = np.where(facts.can[:, TIME_SLICING], TIME_SLICING, alone)
    shared = np.where(facts.can[:, MPS], MPS, turns)
    if tenancy is Tenancy.CLUSTER:
        taken, whole = facts.mig[:, 1], facts.mig[:, 3]
        shared = np.where(facts.can[:, MIG] & (taken < whole), MIG, shared)
    joinable = np.where(facts.provisional, np.where(facts.can[:, MPS], MPS, turns), alone)
    return np.where(facts.known, shared, joinable).astype(np.int8)


def unbounded(demand: Demand, product: str, *, settles: bool = False) -> str:
    """Say why a job counts with the whole of a GPU, of a product on which its memory has no bound.

    Args:
        demand: Who asks.
        product: Of the GPU.
        settles: Whether that ends once its own peak was measured.
    """
    because = _unbounded(demand, product)
    return f"{because} until its own peak was measured" if settles else because


def _unbounded(demand: Demand, product: str) -> str:
    predicted = demand.prediction_on(product)
    if predicted is None:
        return "nothing is known of its memory, so it counts with the whole GPU"
    if predicted.memory.is_refuted:
        whose = "earlier runs of this model (other jobs' too)"
        return f"{whose} died of memory on such GPUs, or took nearly all, so it counts with the whole GPU"
    return "too little was measured on such GPUs to rely on its prediction, so it counts with the whole GPU"


def why(mode: SharingMode, demand: Demand, *, is_first: bool, alone: bool, boundless: str | None) -> str:
    """Say in a few words why a GPU has this mode.

    Args:
        mode: The mode.
        demand: Who gets it.
        is_first: Whether the GPU was idle.
        alone: Whether the policy gives every job a GPU of its own.
        boundless: Why the job's memory has no bound on this GPU; None where it has one.
    """
    if demand.mode is not RequestedMode.AUTO:
        return "as the job asks"
    if not is_first:
        return "as its tenants have it"
    if alone:
        return "as the policy gives every job a GPU of its own"
    if boundless and mode is not SharingMode.EXCLUSIVE:
        return f"so that others can join it later: {boundless}"
    if mode is SharingMode.MIG:
        return "as other namespaces may join, each in an instance of its own"
    if mode is SharingMode.EXCLUSIVE:
        return f"as {boundless}" if boundless else "as the device can do nothing else"
    if mode is SharingMode.TIME_SLICING:
        several = "as a process of several GPUs reaches only one MPS daemon"
        return several if demand.gpus > 1 else "as the device has no MPS"
    return "as memory is limited and kernels run side by side"


def counting(facts: ClassRequirements, mode: SharingMode) -> TenantProfile:
    """Return what a decision counts with; where nobody can join anyway, or hardware sets the bound, that stays."""
    profile = facts.profile
    if mode is SharingMode.TIME_SLICING:
        return msgspec.structs.replace(profile, memory_mib=facts.unenforced_mib)
    if mode in JOINABLE or not profile.provisional:
        return profile
    return msgspec.structs.replace(profile, provisional=False)


def memory_limit_mib(mode: SharingMode, facts: ClassRequirements) -> int | None:
    """Limit that MPS enforces, in MiB: what the decision counted with. The other modes have nothing to enforce it."""
    memory = facts.profile.memory_mib
    return memory if mode is SharingMode.MPS and memory else None


def thread_limit(mode: SharingMode, facts: ClassRequirements, *, is_first: bool) -> int | None:
    """MPS active thread percentage.

    It is fixed when a process starts, so a limit chosen for an empty GPU would idle SMs for as long as the job is
    alone, and gain nothing: later neighbours are admitted by its predicted activity, not by its limit. So the first
    tenant gets 100. Whoever comes to others is held to what it was predicted to fill, because that is what their
    slowdown was computed from.
    """
    if mode is not SharingMode.MPS:
        return None
    return 100 if is_first else facts.thread_percentage
