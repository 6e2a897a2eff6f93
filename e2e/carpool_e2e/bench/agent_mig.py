"""How long the planner of MIG instances takes: for every pair of what a GPU has and what it should have."""

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid, SharingMode
from carpool_deviceplugin import mig
from carpool_deviceplugin.gpu import GpuActual, Part
from carpool_deviceplugin.mig import Instance, MigTable, Occupied, Placement, Profile
from carpool_deviceplugin.partitions import divide
from carpool_deviceplugin.testing.gpus import A100_40, A100_80, H100_80

TABLES = (A100_40, A100_80, H100_80)
SEED = 7
USED = 0.4
"""How much of what a GPU has is in use, by chance."""
Multiset = frozenset[tuple[Profile, int]]
Layouts = Mapping[Multiset, Sequence[Sequence[Placement]]]


@dataclass(frozen=True, slots=True)
class Slowest:
    """The slowest of some plans."""

    plans: int
    ms: float
    """Processor time."""


@dataclass(frozen=True, slots=True)
class MigTimes:
    """What was measured."""

    pairs: Slowest
    """Of each pair of multisets: one layout of the first, some of it in use."""
    wholly_used: Slowest
    """Of each layout, all of it in use, with each multiset."""
    first: Slowest
    """Of each multiset on an empty GPU, the first plan of a process: nothing is remembered."""
    division: Slowest
    """Seven instances in use, and seven reservations for which there is no place."""


def measure_mig(tell: Callable[[str], None]) -> MigTimes:
    """Measure all of it; takes about a minute."""
    tell("MIG planner: every pair of multisets, every layout in use, first plans, division")
    pairs = [plan_s for table in TABLES for plan_s in _pairs(table)]
    found = layouts_of(A100_40)  # the three have one geometry: what takes longest is done for one of them
    used = [
        _plan_s(A100_40, there, len(there), wanted) for same in found.values() for there in same for wanted in found
    ]
    return MigTimes(_slowest(pairs), _slowest(used), _slowest(_first(found)), _slowest([_division()]))


def layouts_of(table: MigTable) -> Layouts:
    """Return every layout of a GPU, by its multiset of profiles."""
    places = [place for profile in table.profiles for _, place in mig.placements(profile)]
    found: dict[Multiset, list[Sequence[Placement]]] = defaultdict(list)

    def extend(at: int, taken: Occupied, chosen: tuple[Placement, ...]) -> None:
        if at == len(places):
            found[frozenset(Counter(place.profile for place in chosen).items())].append(chosen)
            return
        extend(at + 1, taken, chosen)
        if taken.fits(places[at]):
            extend(at + 1, taken.plus(places[at]), (*chosen, places[at]))

    extend(0, Occupied(), ())
    return found


def _pairs(table: MigTable) -> Iterator[float]:
    draw, found = random.Random(SEED), layouts_of(table)  # noqa: S311  # reproducible, not secret
    for same in found.values():
        for wanted in found:
            there = list(draw.choice(same))
            draw.shuffle(there)
            yield _plan_s(table, there, sum(draw.random() < USED for _ in there), wanted)


def _first(found: Layouts) -> Iterator[float]:
    for wanted in found:
        for remembering in (mig.possibilities, mig.fragmentation, mig.placements, mig.most_together):
            remembering.cache_clear()
        yield _plan_s(A100_40, (), 0, wanted)


def _plan_s(table: MigTable, there: Sequence[Placement], used: int, wanted: Multiset) -> float:
    """Plan once, with so many of what is there in use; seconds."""
    present = [Instance(number, place) for number, place in enumerate(there)]
    profiles = [profile for profile, count in wanted for _ in range(count)]
    return _took_s(lambda: mig.plan_mig(table, present, set(range(used)), profiles))


def _division() -> float:
    profile, gpu = A100_40.find("1g.5gb"), GpuUuid("GPU-1")
    pods = [PodUid(f"uid-{number}") for number in range(14)]
    parts = tuple(
        Part(Instance(number, place), True, pods[number], frozenset({pods[number]}), True)
        for number, (_, place) in enumerate(mig.placements(profile))
    )
    wanted = [
        Reservation(
            pod_uid=pod,
            pod_namespace="default",
            pod_name=pod,
            job_uid=JobUid(pod),
            job_name=pod,
            gpu_uuids=[gpu],
            mode=SharingMode.MIG,
            mig_profile=profile.name,
        )
        for pod in pods
    ]
    return _took_s(lambda: divide(GpuActual(gpu, 1, frozenset(), parts=parts, mig_table=A100_40), A100_40, wanted))


def _took_s(work: Callable[[], object]) -> float:
    began = time.thread_time()  # what others do on the machine meanwhile is not the planner's
    work()
    return time.thread_time() - began


def _slowest(seconds: Iterable[float]) -> Slowest:
    took = list(seconds)
    return Slowest(len(took), 1000 * max(took))
