"""Preconditions: what a GPU must be like before a policy looks at it at all."""

from dataclasses import dataclass, replace
from enum import StrEnum

from carpool_core.resources.node import MAX_MIB
from carpool_core.settings import SettingsError

MOST_JOBS = 1024
"""Reservations that the API server accepts of one node: no GPU has more jobs."""


class Quantile(StrEnum):
    """Which of the predicted slowdowns the limits of jobs are held against."""

    MEDIAN = "median"
    """As much as is to be expected: about every other slowdown is larger than it was predicted."""
    UPPER = "upper"
    """As much as most stay below: fewer jobs share, and fewer are slowed beyond their limit."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What the site asks of a GPU besides the promises, which always hold. None asks nothing."""

    max_sm_active: float | None = None
    """Largest SM activity of the tenants that are there already, all together, 0..1."""
    max_joint_sm_active: float | None = None
    """The same with the newcomer's predicted activity; does not keep anybody from an idle GPU."""
    min_free_mib: int | None = None
    """Least memory that is promised to nobody before the newcomer comes, in MiB."""
    max_jobs: int | None = None
    """Most tenants, the newcomer among them."""
    alone: bool = False
    """Whether every job gets a GPU of its own, whatever is known of it."""
    quantile: Quantile = Quantile.MEDIAN
    """Which predicted slowdown each tenant's limit is held against."""

    def __post_init__(self) -> None:
        """Refuse what no GPU could meet.

        Raises:
            SettingsError: A condition is impossible; the sentence says what was expected.
        """
        for which, activity in (("", self.max_sm_active), ("joint ", self.max_joint_sm_active)):
            if activity is not None and not 0 < activity <= 1:
                raise SettingsError(f"expected a largest {which}SM activity above 0 and up to 1, found {activity:g}")
        if self.min_free_mib is not None and not 0 <= self.min_free_mib <= MAX_MIB:
            found = f"{self.min_free_mib:,}"
            raise SettingsError(f"expected a least free memory of 0 to {MAX_MIB:,} MiB, found {found}")
        if self.max_jobs is not None and not 1 <= self.max_jobs <= MOST_JOBS:
            raise SettingsError(f"expected 1 to {MOST_JOBS:,} jobs on a GPU at most, found {self.max_jobs:,}")

    def __str__(self) -> str:
        """Write down what is asked, for people."""
        asked = {
            "SM activity ≤ {:g}": self.max_sm_active,
            "joint SM activity ≤ {:g}": self.max_joint_sm_active,
            "free memory ≥ {:,} MiB": self.min_free_mib,
            "at most {} on a GPU": self.max_jobs and f"{self.max_jobs} job{'s' if self.max_jobs > 1 else ''}",
            "limits by the {} quantile": None if self.quantile is Quantile.MEDIAN else self.quantile,
        }
        told = [form.format(value) for form, value in asked.items() if value is not None]
        return ", ".join([*told, *(["every job on a GPU of its own"] if self.alone else [])]) or "none"

    @property
    def any_set(self) -> bool:
        """Whether there is a condition that GPUs have to be looked at for."""
        asked = (self.max_sm_active, self.max_joint_sm_active, self.min_free_mib, self.max_jobs)
        return any(one is not None for one in asked)

    def with_exclusive_gpus(self) -> "AdmissionLimits":
        """Return the same for a policy that gives every job a GPU of its own."""
        return replace(self, max_jobs=1, alone=True)
