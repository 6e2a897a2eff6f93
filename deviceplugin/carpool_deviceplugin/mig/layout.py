"""Instances on one GPU, what still fits beside them, and how scattered what is free is."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from carpool_deviceplugin.mig.profiles import MigTable, Profile


@dataclass(frozen=True, slots=True)
class Placement:
    """A profile at a place: what an instance is apart from its identity."""

    profile: Profile
    start: int
    """First memory slice."""

    @property
    def mask(self) -> int:
        """Its memory slices, as bits."""
        return self.profile.mask(self.start)

    def __str__(self) -> str:
        end = self.start + self.profile.memory_slices - 1
        where = f"slice {self.start}" if end == self.start else f"slices {self.start}-{end}"
        return f"{self.profile} on memory {where}"


@dataclass(frozen=True, slots=True)
class Instance:
    """A GPU instance that exists."""

    id: int
    """NVML's GPU instance ID."""
    placement: Placement

    def __str__(self) -> str:
        return f"instance {self.id} ({self.placement})"


@dataclass(frozen=True, slots=True)
class Occupied:
    """What instances take of a GPU together."""

    mask: int = 0
    """Memory slices, as bits."""
    media: bool = False
    """Whether the media extensions are taken."""

    def fits(self, placement: Placement) -> bool:
        """Whether an instance could be created there."""
        return not self.mask & placement.mask and not (self.media and placement.profile.has_media)

    def plus(self, placement: Placement) -> "Occupied":
        """Take what an instance takes."""
        return Occupied(self.mask | placement.mask, self.media or placement.profile.has_media)


def occupied(placements: Iterable[Placement]) -> Occupied:
    """What these instances take together. Raises ValueError where two of them overlap."""
    taken = Occupied()
    for placement in placements:
        if not taken.fits(placement):
            raise ValueError(f"expected instances that do not overlap, found {placement} on what another one has")
        taken = taken.plus(placement)
    return taken


@lru_cache(maxsize=256)
def placements(profile: Profile) -> tuple[tuple[int, Placement], ...]:
    """Return where a profile's instances may stand, from the left, each after its memory slices as bits."""
    return tuple((profile.mask(start), Placement(profile, start)) for start in profile.starts)


def room_for(profile: Profile, taken: Occupied) -> int:
    """How many instances of one profile can still be created side by side.

    Placements of one profile have one size, so taking the first that fits, from the left, gives the most of them.
    """
    if profile.has_media and taken.media:
        return 0
    count, mask = 0, taken.mask
    for bits, _ in placements(profile):
        if not mask & bits:
            mask, count = mask | bits, count + 1
            if profile.has_media:
                break  # there is one set of those engines
    return count


@lru_cache(maxsize=8192)
def possibilities(table: MigTable, taken: Occupied) -> tuple[int, ...]:
    """For each profile, largest first, how many can still be created: the larger the better, compared in order."""
    return tuple(room_for(profile, taken) for profile in table.profiles)


@lru_cache(maxsize=8192)
def fragmentation(table: MigTable, taken: Occupied) -> float:
    """How much of what is free cannot be had because it lies scattered, 0..1.

    For each profile that would fit by the number of free slices alone: the share of instances that cannot be placed
    where they lie now, weighted by the profile's size. 0: every profile can be created as often as its size allows on a
    GPU with as many free slices in one place; 1: nothing can be created although slices are free.
    """
    free = table.memory_slices - taken.mask.bit_count()
    lost = weight = 0.0
    most = most_together(table, free, media=taken.media)
    for profile, best, room in zip(table.profiles, most, possibilities(table, taken), strict=True):
        if best:
            weight += profile.memory_slices
            lost += profile.memory_slices * max(0.0, 1 - room / best)
    return lost / weight if weight else 0.0


@lru_cache(maxsize=256)
def most_together(table: MigTable, free: int, *, media: bool) -> tuple[int, ...]:
    """For each profile, how many can be created where so many free slices lie at one end of the GPU, the better end."""
    left = ((1 << free) - 1) ^ ((1 << table.memory_slices) - 1)
    right = (1 << (table.memory_slices - free)) - 1  # placements are not symmetric
    ends = (possibilities(table, Occupied(left, media)), possibilities(table, Occupied(right, media)))
    return tuple(map(max, *ends))
