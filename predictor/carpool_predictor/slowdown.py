"""How much tenants of one GPU slow each other down, from what each does when it is alone.

This is an analytical first model: its shape comes from queueing theory and published facts, and none of its
constants was fitted to measurements. It is meant to be replaced by a learned one behind the same function.

Time slicing (`gpu_util`, the share of time in which some kernel ran). Each tenant alternates between its own work on
the host, for `1 - u` of a step that takes 1 when alone, and the GPU, for `u`. The GPU serves whoever is there in turns:
a closed network with one processor-sharing station, solved by Bard's approximate mean-value analysis
(Y. Bard, "Some extensions to multiclass queueing network analysis", 1979)::

    R_i = u_i * (1 + sum over j != i of Q_j)      time at the GPU in one step
    Q_j = R_j / (1 - u_j + R_j)                   share of j's step in which it is at the GPU
    s_i = 1 - u_i + R_i                           slowdown

It keeps what must hold: tenants that never leave the GPU share it evenly (n of them: s = n); utilizations do not add
(0.4 and 0.4 are not a GPU that is 0.8 busy), and the GPU is never more than busy (sum of u_i / s_i <= 1). It is
pessimistic by construction: two tenants of u = 0.5 come to 1.31, the exact solution for exponential times is 1.25.

MPS (`sm_active`, the mean share of SMs with work; `dram_active`, the share of memory cycles in use). Kernels run
side by side, so that there is no contention below saturation: co-location was measured to pay while the joint SM
activity stays under 80% (Yousefzadeh-Asl-Miandoab, ITU 2025, chapter 4). Beyond, what exceeds the larger of the
threshold and the tenant's own activity queues up, on whichever of SMs and DRAM is scarcer, and only the time at the GPU
stretches::

    excess_i = max(0, sum of x_j - max(0.8, x_i))     for x = sm, and for x = dram
    s_i = 1 + u_i * max(excess_sm_i, excess_dram_i)

Means over time hide bursts, caches are not modelled, and thread percentages are not either: a tenant's cap is chosen
above its own need.

A whole GPU or a MIG instance of one's own: no slowdown (MIG instances do share some of the chip; not modelled).
"""

import numpy as np
from carpool_core.values import SharingMode
from numpy.typing import NDArray

SM_SATURATION = 0.8
"""Joint SM activity up to which MPS tenants do not disturb each other (ITU 2025: "SMACT <= 80%")."""
DRAM_SATURATION = 0.8
"""Joint DRAM activity up to which they do not; an assumption: streaming kernels reach 80-90% of the peak bandwidth."""
ITERATIONS = 24
"""Fixed, not until convergence: a GPU's result must not depend on which other GPUs are in the batch."""
TINY = np.finfo(np.float64).tiny
"""Keeps 0 / 0 at 0."""

Ratios = NDArray[np.floating]


def slowdowns(mode: SharingMode, util: Ratios, sm: Ratios, dram: Ratios, present: NDArray[np.bool_]) -> Ratios:
    """Predict each tenant's step time beside its neighbours over its step time alone.

    Args:
        mode: How all of these GPUs are shared.
        util: Share of time in which some kernel of the tenant ran when alone, 0..1, shape (gpus, tenants).
        sm: Mean share of SMs with its work when alone, 0..1, same shape.
        dram: Share of memory cycles in use when alone, 0..1, same shape.
        present: Which entries are tenants; the others are ignored, same shape.

    Returns:
        Slowdowns of at least 1, shape (gpus, tenants), float64; exactly 1 where no tenant is.
    """
    if mode is SharingMode.TIME_SLICING:
        return _in_turns(_masked(util, present))
    if mode is SharingMode.MPS:
        busy = _masked(util, present)
        sm_excess = _excess(_masked(sm, present), SM_SATURATION)
        dram_excess = _excess(_masked(dram, present), DRAM_SATURATION)
        return 1.0 + busy * np.maximum(sm_excess, dram_excess)
    return np.ones(np.shape(present))


def _masked(values: Ratios, present: NDArray[np.bool_]) -> Ratios:
    """Return ratios in 0..1, shape (gpus, tenants); 0 where nobody is."""
    # In columns: sums over the few tenants of many GPUs are fifteen times as quick that way.
    return np.asfortranarray(np.where(present, np.clip(values, 0.0, 1.0), 0.0), np.float64)


def _in_turns(busy: Ratios) -> Ratios:
    """Slowdowns of tenants that take turns; `busy` has shape (gpus, tenants).

    The map from Q to Q is increasing in Q and in every u, and starts below its fixed point, so that each iterate is
    monotone as well.
    """
    at_gpu = busy
    stay = busy
    for _ in range(ITERATIONS):
        others = at_gpu.sum(axis=1, keepdims=True) - at_gpu
        stay = busy * (1.0 + others)
        at_gpu = stay / np.maximum(1.0 - busy + stay, TINY)
    return 1.0 - busy + np.maximum(stay, busy)


def _excess(activity: Ratios, saturation: float) -> Ratios:
    """What of the joint activity finds no room, for each tenant; `activity` has shape (gpus, tenants)."""
    joint = activity.sum(axis=1, keepdims=True)
    excess: Ratios = np.maximum(0.0, joint - np.maximum(saturation, activity))
    return excess
