"""From the instances that a GPU has to those that are wanted: the fewest steps that touch nothing in use. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import combinations

from carpool_deviceplugin.mig.layout import (
    Instance,
    Occupied,
    Placement,
    fragmentation,
    occupied,
    possibilities,
)
from carpool_deviceplugin.mig.profiles import MigTable, Profile


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
    in_the_way: tuple[Instance, ...] = ()
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


def _layouts(table: MigTable, taken: Occupied, missing: Counter[Profile]) -> Iterator[tuple[Placement, ...]]:
    """Every way to place what is missing; instances of one profile are not told apart."""
    profiles = [p for p in table.profiles if missing[p]]
    if sum(p.memory_slices * missing[p] for p in profiles) > table.memory_slices - taken.mask.bit_count():
        return iter(())
    return _place(profiles, missing, taken)


def _place(profiles: Sequence[Profile], missing: Counter[Profile], taken: Occupied) -> Iterator[tuple[Placement, ...]]:
    if not profiles:
        yield ()
        return
    profile, rest = profiles[0], profiles[1:]
    free = [p for p in (Placement(profile, start) for start in profile.starts) if taken.fits(p)]
    for chosen in combinations(free, missing[profile]):
        mask = sum(p.mask for p in chosen)
        if mask.bit_count() != profile.memory_slices * len(chosen) or (profile.has_media and len(chosen) > 1):
            continue  # two of them overlap
        after = Occupied(taken.mask | mask, taken.media or profile.has_media)
        for others in _place(rest, missing, after):
            yield (*chosen, *others)


def _rank(
    table: MigTable, taken: Occupied, layout: Sequence[Placement], idle: Set[Placement]
) -> tuple[int, tuple[int, ...], float, tuple[int, ...]]:
    """The smaller the better: instances to create, room lost for large profiles, scatter, and then places."""
    created = sum(placement not in idle for placement in layout)
    after = _after(taken, layout)
    room = tuple(-count for count in possibilities(table, after))
    return (created, room, fragmentation(table, after), tuple(p.start for p in layout))


def _after(taken: Occupied, layout: Iterable[Placement]) -> Occupied:
    for placement in layout:
        taken = taken.plus(placement)
    return taken


def has_room(table: MigTable, taken: Occupied, missing: Counter[Profile]) -> bool:
    """Whether instances of these profiles fit together beside what is taken."""
    return next(_layouts(table, taken, missing), None) is not None


def _refuse(table: MigTable, used: Sequence[Instance], wanted: Sequence[Profile]) -> MigRefusal:
    names = ", ".join(str(p) for p in sorted(wanted, key=table.profiles.index))
    for count in range(1, len(used) + 1):
        for leaving in combinations(used, count):
            staying = [i for i in used if i not in leaving]
            if has_room(table, occupied(i.placement for i in staying), _missing(wanted, staying)):
                whom = " and ".join(str(i) for i in leaving)
                return MigRefusal(
                    f"expected room for {names}, found {whom} in use in the way; wait until it is free, or choose "
                    "profiles that fit beside it",
                    leaving,
                )
    return MigRefusal(
        f"expected profiles that fit on one GPU together, found {names or 'none'}; ask for fewer or smaller ones"
    )
