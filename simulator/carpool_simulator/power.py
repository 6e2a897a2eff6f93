"""Power of GPUs, and the energy of a run.

A GPU without a job draws its idle power. A GPU with jobs draws awake + (full - awake) · SM activity.
"""

from typing import NamedTuple

from carpool_core.products import GpuProduct


class Power(NamedTuple):
    """Power of a GPU, in W."""

    asleep_w: float
    """Without a job."""
    awake_w: float
    """With a job, at SM activity 0."""
    full_w: float
    """At SM activity 1."""

    def __str__(self) -> str:
        awake = f"{self.awake_w:g}-{self.full_w:g} W"
        return awake if self.asleep_w == self.awake_w else f"{awake}, asleep {self.asleep_w:g} W"


class Spent(NamedTuple):
    """GPU time of a run."""

    gpu_s: float
    """Time of all GPUs together, in seconds."""
    in_use_s: float
    """Part of it with jobs."""
    active_s: float
    """Integral of SM activity over it, in seconds."""

    def energy_j(self, power: Power) -> float:
        """Return the energy of the run if each GPU has this power."""
        asleep_s = self.gpu_s - self.in_use_s
        return (
            power.asleep_w * asleep_s + power.awake_w * self.in_use_s + (power.full_w - power.awake_w) * self.active_s
        )


class Shares(NamedTuple):
    """Shares of a GPU's power limit."""

    awake: float
    """With a job, at SM activity 0."""
    full: float
    """At SM activity 1."""

    def of(self, limit_w: float, asleep_w: float) -> Power:
        """Return the power of a GPU with this power limit and this idle power, in W."""
        return Power(asleep_w, round(self.awake * limit_w, 1), round(self.full * limit_w, 1))


ZEUS = {
    "6.0": Shares(awake=0.21, full=0.67),
    "7.0": Shares(awake=0.16, full=0.90),
    "7.5": Shares(awake=0.25, full=0.93),
    "8.6": Shares(awake=0.28, full=0.86),
}
"""Shares by compute capability (P100, V100, RTX 6000, A40), computed by `carpool_research.gpu_power`."""
MEAN = Shares(awake=0.23, full=0.84)
"""Mean of the four, for other compute capabilities."""


def power_of(product: GpuProduct) -> Power:
    """Return the power of a product; its idle power is the datasheet's."""
    shares = ZEUS.get(product.compute_capability, MEAN)
    return shares.of(product.power_limit_w, product.idle_power_w)
