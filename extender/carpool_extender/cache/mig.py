"""MIG profiles as a placement counts with them: how much of a GPU an instance takes. Where, the agent plans."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_NAME = re.compile(r"(?P<slices>[1-9][0-9]?)g\.(?P<gb>[1-9][0-9]{0,3})gb")
MIB_OF_A_GB = 890
"""Memory that an instance surely has for each GB of its profile's name, in MiB: the least of all GPUs is 896 (H200)."""


class Profile(NamedTuple):
    """An instance; profiles with media engines or of compute instances are left to whoever asks for them by hand."""

    gb: int
    slices: int
    name: str

    @property
    def memory_mib(self) -> int:
        """Memory that it surely has, in MiB."""
        return self.gb * MIB_OF_A_GB


def profile_of(name: str | None) -> Profile | None:
    """Read a profile's name, such as `2g.10gb`; None where it is none that is placed."""
    found = _NAME.fullmatch(name or "")
    return None if found is None else Profile(int(found["gb"]), int(found["slices"]), name or "")


def known(names: Iterable[str]) -> list[Profile]:
    """Return the profiles of a GPU that are placed, the smallest first."""
    return sorted(found for name in names if (found := profile_of(name)) is not None)


def smallest(names: Iterable[str], need_mib: int | None, sm_active: float) -> Profile | None:
    """Choose the smallest profile that holds a job and slows it no more than it must.

    Args:
        names: The GPU's profiles.
        need_mib: Upper bound of the job's memory; the largest profile where it is unknown.
        sm_active: Share of the whole GPU's SMs that the job fills, 0..1.
    """
    profiles = known(names)
    if not profiles or need_mib is None:
        return profiles[-1] if profiles else None
    most = max(profile.slices for profile in profiles)
    large = [profile for profile in profiles if profile.memory_mib >= need_mib]
    wide = [profile for profile in large if profile.slices >= sm_active * most]
    return next(iter([*wide, *large[-1:]]), None)


def whole(names: Sequence[str]) -> tuple[int, int]:
    """Return how many GB and slices the instances of a GPU have together."""
    profiles = known(names)
    return max((p.gb for p in profiles), default=0), max((p.slices for p in profiles), default=0)
