"""What GPUs draw, what runs took of them, and RAD-RM's two constants, fitted to published energies. Pure.

A GPU without a job sleeps; one with a job draws awake + (full - awake) · SM activity. Of a DGX Station A100 nothing is
published but the energy of whole runs. Of each policy the simulator knows for how long it took and how much it kept the
SMs busy, so that published energies tell two constants by least squares: they cannot tell GPUs that sleep from those
that have a job and do nothing. Carpool's own runs take no part in that.
"""

from typing import NamedTuple

from carpool_core.products import GpuProduct


class Power(NamedTuple):
    """What a GPU draws, in W."""

    asleep_w: float
    """Without any job."""
    awake_w: float
    """With a job, and no SM active."""
    full_w: float
    """With all SMs active."""

    def __str__(self) -> str:
        awake = f"{self.awake_w:g}-{self.full_w:g} W"
        return awake if self.asleep_w == self.awake_w else f"{awake}, asleep {self.asleep_w:g} W"


class Spent(NamedTuple):
    """What a run took of GPUs."""

    gpu_s: float
    """Time of all GPUs together, in seconds."""
    in_use_s: float
    """The part of it in which they had jobs."""
    active_s: float
    """Integral of their SM activity over it, in seconds."""

    def energy_j(self, power: Power) -> float:
        """Return the energy of the run where each GPU draws so much."""
        asleep_s = self.gpu_s - self.in_use_s
        return (
            power.asleep_w * asleep_s + power.awake_w * self.in_use_s + (power.full_w - power.awake_w) * self.active_s
        )


class Shares(NamedTuple):
    """Shares of a GPU's power limit."""

    awake: float
    """With a job that does nothing at the time."""
    full: float
    """With all SMs active."""

    def of(self, limit_w: float, asleep_w: float) -> Power:
        """Return what a GPU draws whose limit is so many W, and which draws so many without a job."""
        return Power(asleep_w, round(self.awake * limit_w, 1), round(self.full * limit_w, 1))


ZEUS = {
    "6.0": Shares(awake=0.21, full=0.67),
    "7.0": Shares(awake=0.16, full=0.90),
    "7.5": Shares(awake=0.25, full=0.93),
    "8.6": Shares(awake=0.28, full=0.86),
}
"""As `carpool_research.gpu_power` finds them, by compute capability: P100, V100, RTX 6000, A40."""
MEAN = Shares(awake=0.23, full=0.84)
"""Of the four, for GPUs of other capabilities."""


def power_of(product: GpuProduct) -> Power:
    """Return what a GPU draws where nothing is known of it but its product; its idle power is the datasheet's."""
    shares = ZEUS.get(product.compute_capability, MEAN)
    return shares.of(product.power_limit_w, product.idle_power_w)
