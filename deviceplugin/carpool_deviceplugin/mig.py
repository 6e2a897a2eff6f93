"""MIG profiles, instances and plans of one GPU. Pure: profiles and placements come from the driver."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import combinations

from carpool_deviceplugin.quoting import quoted


@dataclass(frozen=True)
class Profile:
    """A kind of GPU instance."""

    name: str
    """Such as `3g.20gb` or `1g.5gb+me`."""
    id: int
    """NVML's GPU instance profile ID on this product, as `nvidia-smi mig -lgip` prints it."""
    compute_slices: int
    memory_slices: int
    """Number of adjacent memory slices of an instance."""
    starts: tuple[int, ...]
    """First memory slice of each possible placement, in ascending order."""
    memory_mib: int
    """Memory of an instance, in MiB, as NVIDIA rounds it."""
    sm_count: int
    has_media: bool = False
    """Whether an instance takes the GPU's one set of JPEG and optical-flow engines (`+me`)."""

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def placements(self) -> tuple["Placement", ...]:
        """The possible placements in ascending order."""
        return tuple(Placement(self, start) for start in self.starts)


@dataclass(frozen=True, eq=False)
class MigTable:
    """The MIG profiles of a GPU. Compared by identity, so that it can be a key of caches."""

    memory_slices: int
    profiles: tuple[Profile, ...]
    """Largest first; with media extensions after the same profile without."""

    @cached_property
    def by_name(self) -> Mapping[str, Profile]:
        """The profiles by name."""
        return {p.name: p for p in self.profiles}

    def find(self, name: str) -> Profile:
        """Return a profile; raises UnknownProfileError."""
        try:
            return self.by_name[name]
        except KeyError:
            raise UnknownProfileError(
                f"expected a MIG profile out of {', '.join(self.by_name) or 'none'}, found {quoted(name)}; name one of "
                "those"
            ) from None


class UnknownProfileError(ValueError):
    """This GPU has no such MIG profile; the message lists its profiles."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A profile and its place on the GPU."""

    profile: Profile
    start: int
    """First memory slice."""

    @property
    def mask(self) -> int:
        """Its memory slices, as bits."""
        return ((1 << self.profile.memory_slices) - 1) << self.start

    def __str__(self) -> str:
        end = self.start + self.profile.memory_slices - 1
        where = f"slice {self.start}" if end == self.start else f"slices {self.start}-{end}"
        return f"{self.profile} on memory {where}"


@dataclass(frozen=True, slots=True)
class Instance:
    """An existing GPU instance."""

    id: int
    """NVML's GPU instance ID."""
    placement: Placement

    def __str__(self) -> str:
        return f"instance {self.id} ({self.placement})"


@dataclass(frozen=True, slots=True)
class MigDevice:
    """The MIG device of a GPU instance, which a container uses."""

    uuid: str
    """`MIG-…`."""
    gpu_instance_id: int
    compute_instance_id: int


@dataclass(frozen=True, slots=True)
class OccupiedSlices:
    """The part of a GPU that instances occupy."""

    mask: int = 0
    """Memory slices, as bits."""
    media: bool = False
    """Whether the media extensions are taken."""

    def fits(self, placement: Placement) -> bool:
        """Whether an instance could be created there."""
        return not self.mask & placement.mask and not (self.media and placement.profile.has_media)

    def plus(self, placement: Placement) -> "OccupiedSlices":
        """Add an instance."""
        return OccupiedSlices(self.mask | placement.mask, self.media or placement.profile.has_media)


def occupied(placements: Iterable[Placement]) -> OccupiedSlices:
    """Return the slices of these instances; raises ValueError if two of them overlap."""
    taken = OccupiedSlices()
    for placement in placements:
        if not taken.fits(placement):
            raise ValueError(f"expected instances that do not overlap, found {placement} on what another one has")
        taken = taken.plus(placement)
    return taken


def free_counts(table: MigTable, taken: OccupiedSlices) -> tuple[int, ...]:
    """Return for each profile, largest first, how many instances can still be created side by side."""
    return tuple(_count_free(profile, taken) for profile in table.profiles)


def _count_free(profile: Profile, taken: OccupiedSlices) -> int:
    # All placements of a profile have one size, so the first ones that fit are the most.
    count = 0
    for placement in profile.placements:
        if taken.fits(placement):
            taken, count = taken.plus(placement), count + 1
    return count


@dataclass(frozen=True, slots=True)
class MigPlan:
    """Changes that lead to the wanted instances. In this order they never overlap."""

    destroyed: tuple[Instance, ...]
    """Idle instances to destroy first."""
    created: tuple[Placement, ...]
    """Instances to create then, each with one compute instance that takes all of it."""
    kept: tuple[Instance, ...]
    """Instances that stay: those in use, and idle ones that are wanted where they are."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.destroyed or self.created)


@dataclass(frozen=True, slots=True)
class MigRefusal:
    """The wanted instances do not fit."""

    message: str
    blocking: tuple[Instance, ...] = ()
    """The fewest instances in use that would have to end; empty if the profiles do not fit an empty GPU either."""


_MAX_NAMED = 8
"""Maximum number of profiles in a message; no GPU has more instances."""


def plan_mig(
    table: MigTable, present: Sequence[Instance], in_use: Set[int], wanted: Iterable[Profile]
) -> MigPlan | MigRefusal:
    """Plan the instances of a GPU with the fewest steps.

    Instances in use, with a process or a reservation, stay and count for a wanted profile of their kind. Idle instances
    that are not wanted are destroyed. Of the plans with the fewest steps the one is chosen that keeps room for the
    largest profiles.
    """
    wanted = list(wanted)
    used = [i for i in present if i.id in in_use]
    idle = {i.placement: i for i in present if i.id not in in_use}
    taken = occupied(i.placement for i in used)

    def rank(layout: Sequence[Placement]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        room = tuple(-count for count in free_counts(table, reduce(OccupiedSlices.plus, layout, taken)))
        return sum(p not in idle for p in layout), room, tuple(p.start for p in layout)

    missing = Counter(wanted) - Counter(i.placement.profile for i in used)
    layout = min(_layouts(table, taken, missing), key=rank, default=None)
    if layout is None:
        return _refuse(table, used, wanted)
    # Largest first: so they also fit where an old driver chooses the placements itself.
    created = sorted(set(layout) - idle.keys(), key=lambda p: (table.profiles.index(p.profile), p.start))
    destroyed = tuple(i for placement, i in idle.items() if placement not in layout)
    kept = tuple(i for i in present if i not in destroyed)
    return MigPlan(destroyed, tuple(created), kept)


def _layouts(table: MigTable, taken: OccupiedSlices, missing: Mapping[Profile, int]) -> Iterator[tuple[Placement, ...]]:
    """Yield every way to place so many instances of each profile beside the taken slices."""
    counts = [(p, missing[p]) for p in table.profiles if missing.get(p, 0) > 0]
    if sum(p.memory_slices * count for p, count in counts) > table.memory_slices - taken.mask.bit_count():
        return iter(())
    return _place(counts, taken)


def _place(counts: Sequence[tuple[Profile, int]], taken: OccupiedSlices) -> Iterator[tuple[Placement, ...]]:
    if not counts:
        yield ()
        return
    profile, count = counts[0]
    for chosen in combinations(filter(taken.fits, profile.placements), count):
        room = taken
        for placement in chosen:
            if not room.fits(placement):
                break
            room = room.plus(placement)
        else:
            yield from ((*chosen, *others) for others in _place(counts[1:], room))


def fits_together(table: MigTable, taken: OccupiedSlices, missing: Mapping[Profile, int]) -> bool:
    """Whether so many instances of each profile fit beside the taken slices."""
    return next(_layouts(table, taken, missing), None) is not None


def find_blocking(
    table: MigTable,
    used: Sequence[Instance],
    may_leave: Sequence[Instance],
    missing: Mapping[Profile, int],
    *,
    are_replaced: bool = False,
) -> tuple[Instance, ...]:
    """Return the fewest instances that must leave to make room; empty if the room does not suffice without them all.

    Args:
        table: MIG profiles of the GPU.
        used: Instances that stay.
        may_leave: Those of them that may leave.
        missing: How many instances of each profile are wanted besides `used`; negative if fewer are wanted.
        are_replaced: Whether an instance that leaves counted for a wanted profile, so that another one is needed.
    """
    for count in range(1, len(may_leave) + 1):
        for leaving in combinations(may_leave, count):
            taken = occupied(i.placement for i in used if i not in leaving)
            needed = dict(missing)
            for instance in leaving if are_replaced else ():
                needed[instance.placement.profile] = needed.get(instance.placement.profile, 0) + 1
            if fits_together(table, taken, needed):
                return leaving
    return ()


def _refuse(table: MigTable, used: Sequence[Instance], wanted: Sequence[Profile]) -> MigRefusal:
    names = ", ".join(str(p) for p in sorted(wanted, key=table.profiles.index)[:_MAX_NAMED])
    names += f" and {len(wanted) - _MAX_NAMED:,} more" if len(wanted) > _MAX_NAMED else ""
    if not fits_together(table, OccupiedSlices(), Counter(wanted)):
        return MigRefusal(
            f"expected profiles that fit on one GPU together, found {names or 'none'}; ask for fewer or smaller ones"
        )
    missing = Counter(wanted)
    missing.subtract(i.placement.profile for i in used)
    blocking = find_blocking(table, used, used, missing, are_replaced=True)
    return MigRefusal(
        f"expected room for {names}, found {' and '.join(map(str, blocking))} in use in the way; wait until it is "
        "free, or choose profiles that fit beside it",
        blocking,
    )
