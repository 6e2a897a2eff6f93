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

    most_sm_active: float | None = None
    """Largest SM activity of the tenants that are there already, all together, 0..1."""
    most_joint_sm_active: float | None = None
    """The same with the newcomer's predicted activity; does not keep anybody from an idle GPU."""
    least_free_mib: int | None = None
    """Least memory that is promised to nobody before the newcomer comes, in MiB."""
    most_jobs: int | None = None
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
        for which, activity in (("", self.most_sm_active), ("joint ", self.most_joint_sm_active)):
            if activity is not None and not 0 < activity <= 1:
                raise SettingsError(f"expected a largest {which}SM activity above 0 and up to 1, found {activity:g}")
        if self.least_free_mib is not None and not 0 <= self.least_free_mib <= MAX_MIB:
            found = f"{self.least_free_mib:,}"
            raise SettingsError(f"expected a least free memory of 0 to {MAX_MIB:,} MiB, found {found}")
        if self.most_jobs is not None and not 1 <= self.most_jobs <= MOST_JOBS:
            raise SettingsError(f"expected 1 to {MOST_JOBS:,} jobs on a GPU at most, found {self.most_jobs:,}")

    def __str__(self) -> str:
        """Write down what is asked, for people."""
        asked = {
            "SM activity ≤ {:g}": self.most_sm_active,
            "joint SM activity ≤ {:g}": self.most_joint_sm_active,
            "free memory ≥ {:,} MiB": self.least_free_mib,
            "at most {} on a GPU": self.most_jobs and f"{self.most_jobs} job{'s' if self.most_jobs > 1 else ''}",
            "limits by the {} quantile": None if self.quantile is Quantile.MEDIAN else self.quantile,
        }
        told = [form.format(value) for form, value in asked.items() if value is not None]
        return ", ".join([*told, *(["every job on a GPU of its own"] if self.alone else [])]) or "none"

    @property
    def ask_anything(self) -> bool:
        """Whether there is a condition that GPUs have to be looked at for."""
        asked = (self.most_sm_active, self.most_joint_sm_active, self.least_free_mib, self.most_jobs)
        return any(one is not None for one in asked)

    def in_exclusive_use(self) -> "AdmissionLimits":
        """Return the same for a policy that gives every job a GPU of its own."""
        return replace(self, most_jobs=1, alone=True)
