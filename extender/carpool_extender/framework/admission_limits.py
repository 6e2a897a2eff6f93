"""Admission limits: what the site demands of a GPU before its policy scores it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from carpool_core.resources.node import MAX_MIB
from carpool_core.settings import SettingsError
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import Floats, GpuTable

MAX_JOBS = 1024
"""The API server accepts at most this many reservations on one node."""


class Quantile(StrEnum):
    """The predicted slowdown that is compared with the limits of jobs."""

    MEDIAN = "median"
    """The expected slowdown: about half of all slowdowns exceed it."""
    UPPER = "upper"
    """A bound that most slowdowns stay below: fewer jobs share, and fewer exceed their limit."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits of the site on GPUs; None sets no limit. The ledger's promises hold regardless."""

    max_sm_active: float | None = None
    """SM activity of the present tenants together, 0..1."""
    max_joint_sm_active: float | None = None
    """SM activity of the present tenants and the incoming pod together, 0..1; idle GPUs are exempt."""
    min_free_mib: int | None = None
    """Unreserved memory before the incoming pod joins, in MiB."""
    max_jobs: int | None = None
    """Tenants, the incoming pod included."""
    exclusive: bool = False
    """Whether every job gets a GPU of its own."""
    quantile: Quantile = Quantile.MEDIAN
    """Predicted slowdown that is compared with the limits of jobs."""

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
        values = [(limit, getattr(self, limit.field)) for limit in LIMITS]
        return [(limit, value) for limit, value in values if value is not None]

    def with_exclusive_gpus(self) -> "AdmissionLimits":
        """Return these limits for a policy that gives every job a GPU of its own."""
        return replace(self, max_jobs=1, exclusive=True)


@dataclass(frozen=True, slots=True)
class Limit:
    """One numeric limit: the amount that a GPU has, and its words."""

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


LIMITS = (
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
