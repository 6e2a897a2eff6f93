"""What RAD-RM's GPUs draw: two constants, fitted to the energies that were published of others' policies. Pure.

Power is idle + (limit - idle) · SM activity. Of a DGX Station A100 neither constant is published, but the energy of
whole runs is. Of each policy the simulator knows for how long it took and how much it kept the SMs busy, so that
published energies tell both constants by least squares. Carpool's own runs take no part in that.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Power(NamedTuple):
    """What a GPU draws, in W."""

    idle_w: float
    """With no SM active."""
    limit_w: float
    """With all SMs active."""

    def __str__(self) -> str:
        return f"{self.idle_w:g}-{self.limit_w:g} W"


class Spent(NamedTuple):
    """What a run took of GPUs."""

    gpu_s: float
    """Time of all GPUs together, in seconds."""
    active_s: float
    """Integral of their SM activity over it, in seconds."""

    def energy_mj(self, power: Power) -> float:
        """Return the energy of the run where each GPU draws so much."""
        return (power.idle_w * self.gpu_s + (power.limit_w - power.idle_w) * self.active_s) / 1e6


def spent(energy_mj: float, makespan_min: float, gpus: int, power: Power) -> Spent:
    """Return what a run took, from the energy that it was reckoned to need.

    Args:
        energy_mj: Energy of the run.
        makespan_min: Its length.
        gpus: Of the cluster; the idle ones draw power, too.
        power: What each GPU drew when the energy was reckoned.
    """
    gpu_s = 60 * makespan_min * gpus
    return Spent(gpu_s, (1e6 * energy_mj - power.idle_w * gpu_s) / (power.limit_w - power.idle_w))


def fitted(runs: Mapping[str, Spent], published_mj: Mapping[str, float]) -> Power:
    """Fit both constants by least squares of relative errors.

    Args:
        runs: What policies took here, by name.
        published_mj: Energies of at least two of them.
    """
    rows = [(runs[name].gpu_s, runs[name].active_s, 1e6 * mj) for name, mj in published_mj.items()]
    terms = np.array([[gpu_s / joules, active_s / joules] for gpu_s, active_s, joules in rows])
    (idle_w, more_w), *_ = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)
    return Power(round(float(idle_w), 1), round(float(idle_w + more_w), 1))
