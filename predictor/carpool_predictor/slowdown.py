"""How much tenants of one GPU slow each other down, from what each does when it is alone.

This is an analytical first model: its shape comes from queueing theory and published facts, and none of its
constants was fitted to measurements. It is meant to be replaced by a learned one behind the same function.

Time slicing (`gpu_util`, the share of time in which some kernel ran). Each tenant alternates between its own work on
the host, for `1 - u` of a step that takes 1 when alone, and the GPU, for `u`. Two exact solutions bound what two
tenants of u = 0.5 do to each other: where times never vary they slip past each other (1.00); where they vary like the
exponential distribution they meet (1.25). Training steps vary, but queue kernels ahead; halfway (1.12) is a smooth
maximum of 1 and the joint busy time, with exponent p = 6::

    g(x) = (1 + x^p)^(1/p)
    s_i  = 1 + min(g(sum of u_j) - g(u_i), u_i * (n - 1))      only time at the GPU stretches, by one turn of each other

It keeps what must hold: a tenant alone is not slowed, nobody is sped up by another or by more work of another, and
utilizations do not add (0.4 and 0.4 are not a GPU that is 0.8 busy). Tenants that never leave the GPU come to n - 0.12
instead of n, and many small tenants beside full ones to more than the whole GPU: a "busy" GPU has gaps, too.
`docs/experiments.md` holds it against 1,352 measured slowdowns.

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
EXPONENT = 6.0
"""Of the smooth maximum for tenants that take turns: halfway between the two exact solutions above; not fitted."""

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
        return np.where(present, _in_turns(_masked(util, present)), 1.0)
    if mode is SharingMode.MPS:
        busy = _masked(util, present)
        sm_excess = _excess(_masked(sm, present), SM_SATURATION)
        dram_excess = _excess(_masked(dram, present), DRAM_SATURATION)
        return 1.0 + busy * np.maximum(sm_excess, dram_excess)
    return np.ones(np.shape(present))


def _masked(values: Ratios, present: NDArray[np.bool_]) -> Ratios:
    """Return ratios in 0..1, shape (gpus, tenants); 0 where nobody is."""
    return np.where(present, np.clip(values, 0.0, 1.0), 0.0).astype(np.float64)


def _in_turns(busy: Ratios) -> Ratios:
    """Slowdowns of tenants that take turns; `busy` has shape (gpus, tenants)."""
    joint = busy.sum(axis=1, keepdims=True)
    others = np.maximum(0, (busy > 0).sum(axis=1, keepdims=True) - 1)
    met: Ratios = 1.0 + np.clip(_softened(joint) - _softened(busy), 0.0, busy * others)
    return met


def _softened(load: Ratios) -> Ratios:
    """Smooth maximum of 1 and a load."""
    result: Ratios = (1.0 + load**EXPONENT) ** (1.0 / EXPONENT)
    return result


def _excess(activity: Ratios, saturation: float) -> Ratios:
    """What of the joint activity finds no room, for each tenant; `activity` has shape (gpus, tenants)."""
    joint = activity.sum(axis=1, keepdims=True)
    excess: Ratios = np.maximum(0.0, joint - np.maximum(saturation, activity))
    return excess
