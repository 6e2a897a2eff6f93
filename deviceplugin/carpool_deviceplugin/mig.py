"""MIG profiles and where their instances may stand, as a GPU says itself."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations

from carpool_deviceplugin.quoting import quoted


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of GPU instance."""

    name: str
    """Such as `3g.20gb` or `1g.5gb+me`."""
    id: int
    """NVML's GPU instance profile ID on these products, as `nvidia-smi mig -lgip` prints it."""
    compute_slices: int
    memory_slices: int
    """How many neighbouring memory slices an instance takes."""
    starts: tuple[int, ...]
    """First memory slice of each possible placement."""
    memory_mib: int
    """What tenants see of it, in MiB, to the nearest that NVIDIA prints."""
    sm_count: int
    has_media: bool = False
    """Whether it takes the GPU's one set of JPEG and optical-flow engines (`+me`)."""

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def mask(self, start: int) -> int:
        """Memory slices of an instance that stands at `start`, as bits."""
        return ((1 << self.memory_slices) - 1) << start


@dataclass(frozen=True, eq=False)
class MigTable:
    """What one kind of GPU can be divided into. Compared by identity, so that what is computed of it can be kept."""

    memory_slices: int
    profiles: tuple[Profile, ...]
    """Largest first, those with media extensions after those without."""

    @cached_property
    def by_name(self) -> Mapping[str, Profile]:
        """The profiles by their names."""
        return {p.name: p for p in self.profiles}

    def find(self, name: str) -> Profile:
        """Find a profile; raises UnknownProfileError with the choices."""
        try:
            return self.by_name[name]
        except KeyError:
            raise UnknownProfileError(
                f"expected a MIG profile out of {', '.join(self.by_name) or 'none'}, found {quoted(name)}; name one of "
                "those"
            ) from None


class UnknownProfileError(ValueError):
    """This GPU has no such MIG profile; the message lists those that it has."""


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
class OccupiedSlices:
    """What instances take of a GPU together."""

    mask: int = 0
    """Memory slices, as bits."""
    media: bool = False
    """Whether the media extensions are taken."""

    def fits(self, placement: Placement) -> bool:
        """Whether an instance could be created there."""
        return not self.mask & placement.mask and not (self.media and placement.profile.has_media)

    def plus(self, placement: Placement) -> "OccupiedSlices":
        """Take what an instance takes."""
        return OccupiedSlices(self.mask | placement.mask, self.media or placement.profile.has_media)


def occupied(placements: Iterable[Placement]) -> OccupiedSlices:
    """What these instances take together. Raises ValueError where two of them overlap."""
    taken = OccupiedSlices()
    for placement in placements:
        if not taken.fits(placement):
            raise ValueError(f"expected instances that do not overlap, found {placement} on what another one has")
        taken = taken.plus(placement)
    return taken


@lru_cache(maxsize=256)
def placements(profile: Profile) -> tuple[tuple[int, Placement], ...]:
    """Return where a profile's instances may stand, from the left, each after its memory slices as bits."""
    return tuple((profile.mask(start), Placement(profile, start)) for start in profile.starts)


def count_fitting(profile: Profile, taken: OccupiedSlices) -> int:
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
def free_counts(table: MigTable, taken: OccupiedSlices) -> tuple[int, ...]:
    """For each profile, largest first, how many can still be created: the larger the better, compared in order."""
    return tuple(count_fitting(profile, taken) for profile in table.profiles)


@lru_cache(maxsize=8192)
def fragmentation(table: MigTable, taken: OccupiedSlices) -> float:
    """How much of what is free cannot be had because it lies scattered, 0..1.

    For each profile that would fit by the number of free slices alone: the share of instances that cannot be placed
    where they lie now, weighted by the profile's size. 0: every profile can be created as often as its size allows on a
    GPU with as many free slices in one place; 1: nothing can be created although slices are free.
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
    """For each profile, how many can be created where so many free slices lie at one end of the GPU, the better end."""
    left = ((1 << free) - 1) ^ ((1 << table.memory_slices) - 1)
    right = (1 << (table.memory_slices - free)) - 1  # placements are not symmetric
    ends = (free_counts(table, OccupiedSlices(left, media)), free_counts(table, OccupiedSlices(right, media)))
    return tuple(map(max, *ends))


_MOST_NAMED = 8
"""Profiles in a sentence: more than fit on any GPU."""


@dataclass(frozen=True, slots=True)
class Destroy:
    """Destroy an instance that nobody uses, its compute instances first."""

    instance: Instance

    def __str__(self) -> str:
        return f"destroy {self.instance}"


@dataclass(frozen=True, slots=True)
class Create:
    """Create an instance, and one compute instance that takes all of it."""

    placement: Placement

    def __str__(self) -> str:
        return f"create {self.placement}"


MigStep = Destroy | Create


@dataclass(frozen=True, slots=True)
class MigPlan:
    """How to get there. The steps in this order never overlap, with explicit placements and without."""

    steps: tuple[MigStep, ...]
    kept: tuple[Instance, ...]
    """Instances that stay: those in use, and idle ones that are wanted where they are."""
    fragmentation: float
    """Of what is free afterwards, 0..1."""


@dataclass(frozen=True, slots=True)
class MigRefusal:
    """There is no way, and why."""

    message: str
    blocking: tuple[Instance, ...] = ()
    """The fewest instances in use that would have to end; empty where the profiles do not fit an empty GPU either."""


def plan_mig(
    table: MigTable, present: Sequence[Instance], in_use: Set[int], wanted: Iterable[Profile]
) -> MigPlan | MigRefusal:
    """Plan one GPU's instances.

    What is in use stays, and counts for a wanted profile of its kind. What is idle and not wanted is destroyed. Of the
    plans with the fewest steps the one is chosen that leaves room for the largest profiles, then the least scattered.

    Args:
        table: What the GPU can be divided into.
        present: Its instances.
        in_use: IDs of those with a process or a promise.
        wanted: Profiles of all instances that there should be, repeated for several.
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
    """Largest first: so they also fit where an old driver chooses the places itself."""
    return sorted(layout, key=lambda p: (table.profiles.index(p.profile), p.start))


def _layouts(table: MigTable, taken: OccupiedSlices, missing: Counter[Profile]) -> Iterator[tuple[Placement, ...]]:
    """Every way to place what is missing; instances of one profile are not told apart."""
    return _placed(table, taken.mask, taken.media, [missing[p] for p in table.profiles])


def _placed(table: MigTable, taken: int, media: bool, counts: Sequence[int]) -> Iterator[tuple[Placement, ...]]:
    """Every way to place so many of each profile beside what is taken, as bits; of fewer than none there is nothing."""
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
    """The smaller the better: instances to create, room lost for large profiles, scatter, and then places."""
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
    """Whether instances of these profiles fit together beside what is taken."""
    return next(_layouts(table, taken, missing), None) is not None


def _refuse(table: MigTable, used: Sequence[Instance], wanted: Sequence[Profile]) -> MigRefusal:
    names = ", ".join(str(p) for p in sorted(wanted, key=table.profiles.index)[:_MOST_NAMED])
    names += f" and {len(wanted) - _MOST_NAMED:,} more" if len(wanted) > _MOST_NAMED else ""
    if fits_together(table, OccupiedSlices(), Counter(wanted)):  # otherwise whoever leaves would leave in vain
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
    """Return the fewest instances without which what is wanted fits; it fits where all leave.

    Seven instances can leave in 127 ways, so each of them is only bits and counts.
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
