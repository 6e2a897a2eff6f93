"""Multi-Instance GPU: profiles, placements, fragmentation, and the plan from one set of instances to another. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations

from carpool_deviceplugin.quoting import quoted


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of GPU instance."""

    name: str
    """Such as `3g.20gb` or `1g.5gb+me`."""
    id: int
    """NVML's GPU instance profile ID on these products, as `nvidia-smi mig -lgip` prints it."""
    compute_slices: int
    memory_slices: int
    """Number of adjacent memory slices of an instance."""
    starts: tuple[int, ...]
    """First memory slice of each possible placement."""
    memory_mib: int
    """Memory visible to tenants, in MiB, rounded as NVIDIA prints it."""
    sm_count: int
    has_media: bool = False
    """Whether it uses the GPU's single set of JPEG and optical-flow engines (`+me`)."""

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def mask(self, start: int) -> int:
        """Return the memory slices of an instance at `start`, as bits."""
        return ((1 << self.memory_slices) - 1) << start


@dataclass(frozen=True, eq=False)
class MigTable:
    """MIG profiles of one kind of GPU. Compared by identity, so that results can be cached."""

    memory_slices: int
    profiles: tuple[Profile, ...]
    """Largest first, those with media extensions after those without."""

    @cached_property
    def by_name(self) -> Mapping[str, Profile]:
        """The profiles by their names."""
        return {p.name: p for p in self.profiles}

    def find(self, name: str) -> Profile:
        """Return a profile; raises UnknownProfileError with the choices."""
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
    """A profile at a position."""

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
    """An existing GPU instance."""

    id: int
    """NVML's GPU instance ID."""
    placement: Placement

    def __str__(self) -> str:
        return f"instance {self.id} ({self.placement})"


@dataclass(frozen=True, slots=True)
class OccupiedSlices:
    """Resources that instances occupy together."""

    mask: int = 0
    """Memory slices, as bits."""
    media: bool = False
    """Whether the media extensions are in use."""

    def fits(self, placement: Placement) -> bool:
        """Return whether an instance could be created there."""
        return not self.mask & placement.mask and not (self.media and placement.profile.has_media)

    def plus(self, placement: Placement) -> "OccupiedSlices":
        """Return the resources with one more instance."""
        return OccupiedSlices(self.mask | placement.mask, self.media or placement.profile.has_media)


def occupied(placements: Iterable[Placement]) -> OccupiedSlices:
    """Return the resources that these instances occupy. Raises ValueError if two of them overlap."""
    taken = OccupiedSlices()
    for placement in placements:
        if not taken.fits(placement):
            raise ValueError(f"expected instances that do not overlap, found {placement} on what another one has")
        taken = taken.plus(placement)
    return taken


@lru_cache(maxsize=256)
def placements(profile: Profile) -> tuple[tuple[int, Placement], ...]:
    """Return a profile's placements from the left, each with its memory slices as bits."""
    return tuple((profile.mask(start), Placement(profile, start)) for start in profile.starts)


def count_fitting(profile: Profile, taken: OccupiedSlices) -> int:
    """Return how many instances of one profile can still be created together.

    Placements of one profile have one size, so a greedy choice from the left is optimal.
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
def free_counts(table: MigTable, taken: OccupiedSlices) -> tuple[int, ...]:
    """Return how many instances of each profile, largest first, can still be created. Larger tuples are better."""
    return tuple(count_fitting(profile, taken) for profile in table.profiles)


@lru_cache(maxsize=8192)
def fragmentation(table: MigTable, taken: OccupiedSlices) -> float:
    """Return how much free capacity is unusable because it is scattered, 0..1.

    For each profile that would fit by the number of free slices: the share of instances that cannot be placed now,
    weighted
    by the profile's size. 0: every profile fits as often as on a GPU with as many contiguous free slices. 1: slices are
    free, but
    no instance can be created.
    """
    free = table.memory_slices - taken.mask.bit_count()
    lost = weight = 0.0
    most = max_contiguous_counts(table, free, media=taken.media)
    for profile, best, room in zip(table.profiles, most, free_counts(table, taken), strict=True):
        if best:
            weight += profile.memory_slices
            lost += profile.memory_slices * max(0.0, 1 - room / best)
    return lost / weight if weight else 0.0


@lru_cache(maxsize=256)
def max_contiguous_counts(table: MigTable, free: int, *, media: bool) -> tuple[int, ...]:
    """Return how many instances of each profile fit into so many free slices at the better end of the GPU."""
    left = ((1 << free) - 1) ^ ((1 << table.memory_slices) - 1)
    right = (1 << (table.memory_slices - free)) - 1  # placements are not symmetric
    ends = (free_counts(table, OccupiedSlices(left, media)), free_counts(table, OccupiedSlices(right, media)))
    return tuple(map(max, *ends))


_MOST_NAMED = 8
"""Maximum of profiles in a message; more than fit on any GPU."""


@dataclass(frozen=True, slots=True)
class Destroy:
    """Destroy an idle instance, after its compute instances."""

    instance: Instance

    def __str__(self) -> str:
        return f"destroy {self.instance}"


@dataclass(frozen=True, slots=True)
class Create:
    """Create an instance with one compute instance that spans it."""

    placement: Placement

    def __str__(self) -> str:
        return f"create {self.placement}"


MigStep = Destroy | Create


@dataclass(frozen=True, slots=True)
class MigPlan:
    """Steps to the wanted instances. In this order they never overlap."""

    steps: tuple[MigStep, ...]
    kept: tuple[Instance, ...]
    """Instances that stay: those in use, and idle ones that are wanted at their placement."""
    fragmentation: float
    """Fragmentation afterwards, 0..1."""


@dataclass(frozen=True, slots=True)
class MigRefusal:
    """The wanted instances are infeasible."""

    message: str
    blocking: tuple[Instance, ...] = ()
    """A smallest set of instances in use that would have to end; empty if the profiles do not fit an empty GPU."""


def plan_mig(
    table: MigTable, present: Sequence[Instance], in_use: Set[int], wanted: Iterable[Profile]
) -> MigPlan | MigRefusal:
    """Plan one GPU's instances.

    Instances in use stay, and count for a wanted profile of their kind. Idle instances that are not wanted are
    destroyed. Among
    plans with the fewest steps, the planner prefers room for the largest profiles, then low fragmentation.

    Args:
        table: The GPU's profiles.
        present: Its instances.
        in_use: IDs of instances with a process or a reservation.
        wanted: Profiles of all instances that should exist, with repetitions.
    """
    wanted = list(wanted)
    used = [i for i in present if i.id in in_use]
    idle = [i for i in present if i.id not in in_use]
    missing = _missing(wanted, used)
    taken = occupied(i.placement for i in used)
    idle_at = {i.placement: i for i in idle}
    layouts = _layouts(table, taken, missing)
    best = min(layouts, key=lambda layout: _rank(table, taken, layout, idle_at.keys()), default=None)
    if best is None:
        return _refuse(table, used, wanted)
    kept_idle = {idle_at[p].id for p in best if p in idle_at}
    steps: list[MigStep] = [Destroy(i) for i in idle if i.id not in kept_idle]
    steps += [Create(p) for p in _in_order(table, best) if p not in idle_at]
    kept = tuple(i for i in present if i.id in in_use or i.id in kept_idle)
    return MigPlan(tuple(steps), kept, fragmentation(table, _after(taken, best)))


def _missing(wanted: Iterable[Profile], used: Iterable[Instance]) -> Counter[Profile]:
    return Counter(wanted) - Counter(i.placement.profile for i in used)


def _in_order(table: MigTable, layout: Iterable[Placement]) -> list[Placement]:
    """Largest first: this order also works with drivers that choose placements themselves."""
    return sorted(layout, key=lambda p: (table.profiles.index(p.profile), p.start))


def _layouts(table: MigTable, taken: OccupiedSlices, missing: Counter[Profile]) -> Iterator[tuple[Placement, ...]]:
    """Yield every placement of the missing instances; instances of one profile are interchangeable."""
    return _placed(table, taken.mask, taken.media, [missing[p] for p in table.profiles])


def _placed(table: MigTable, taken: int, media: bool, counts: Sequence[int]) -> Iterator[tuple[Placement, ...]]:
    """Yield every placement of these counts of profiles beside occupied slices (bits)."""
    missing = [(p, count) for p, count in zip(table.profiles, counts, strict=True) if count > 0]
    if sum(p.memory_slices * count for p, count in missing) > table.memory_slices - taken.bit_count():
        return iter(())
    return _place(missing, taken, media)


def _place(missing: Sequence[tuple[Profile, int]], taken: int, media: bool) -> Iterator[tuple[Placement, ...]]:
    if not missing:
        yield ()
        return
    profile, count = missing[0]
    if profile.has_media and (media or count > 1):
        return
    free = [place for place in placements(profile) if not taken & place[0]]
    for chosen in combinations(free, count):
        mask = sum(bits for bits, _ in chosen)
        if mask.bit_count() != profile.memory_slices * count:
            continue  # two of them overlap
        for others in _place(missing[1:], taken | mask, media or profile.has_media):
            yield (*(place for _, place in chosen), *others)


def _rank(
    table: MigTable, taken: OccupiedSlices, layout: Sequence[Placement], idle: Set[Placement]
) -> tuple[int, tuple[int, ...], float, tuple[int, ...]]:
    """Return the sort key of a layout: instances to create, lost room for large profiles, fragmentation, positions."""
    created = sum(placement not in idle for placement in layout)
    after = _after(taken, layout)
    room = tuple(-count for count in free_counts(table, after))
    return (created, room, fragmentation(table, after), tuple(p.start for p in layout))


def _after(taken: OccupiedSlices, layout: Iterable[Placement]) -> OccupiedSlices:
    mask, media = taken.mask, taken.media
    for placement in layout:
        mask, media = mask | placement.mask, media or placement.profile.has_media
    return OccupiedSlices(mask, media)


def fits_together(table: MigTable, taken: OccupiedSlices, missing: Counter[Profile]) -> bool:
    """Return whether instances of these profiles fit together beside occupied slices."""
    return next(_layouts(table, taken, missing), None) is not None


def _refuse(table: MigTable, used: Sequence[Instance], wanted: Sequence[Profile]) -> MigRefusal:
    names = ", ".join(str(p) for p in sorted(wanted, key=table.profiles.index)[:_MOST_NAMED])
    names += f" and {len(wanted) - _MOST_NAMED:,} more" if len(wanted) > _MOST_NAMED else ""
    if fits_together(table, OccupiedSlices(), Counter(wanted)):  # otherwise no end of an instance would help
        leaving = _fewest_in_the_way(table, used, wanted)
        whom = " and ".join(str(i) for i in leaving)
        return MigRefusal(
            f"expected room for {names}, found {whom} in use in the way; wait until it is free, or choose profiles "
            "that fit beside it",
            leaving,
        )
    return MigRefusal(
        f"expected profiles that fit on one GPU together, found {names or 'none'}; ask for fewer or smaller ones"
    )


def _fewest_in_the_way(table: MigTable, used: Sequence[Instance], wanted: Sequence[Profile]) -> tuple[Instance, ...]:
    """Return a smallest set of instances whose end makes the wanted profiles fit.

    Seven instances have at most 127 subsets, so this works on bits and counts.
    """
    index = [table.profiles.index(i.placement.profile) for i in used]
    bits, media = [i.placement.mask for i in used], [i.placement.profile.has_media for i in used]
    missing = [0] * len(table.profiles)
    for profile in wanted:
        missing[table.profiles.index(profile)] += 1
    for at in index:
        missing[at] -= 1
    taken, has_media = sum(bits), any(media)
    for count in range(1, len(used)):
        for leaving in combinations(range(len(used)), count):
            counts = missing.copy()
            for number in leaving:
                counts[index[number]] += 1
            stays = taken - sum(bits[number] for number in leaving)
            is_media_taken = has_media and not any(media[number] for number in leaving)
            if next(_placed(table, stays, is_media_taken, counts), None) is not None:
                return tuple(used[number] for number in leaving)
    return tuple(used)
