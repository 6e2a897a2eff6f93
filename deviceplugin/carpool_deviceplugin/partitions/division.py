"""From MIG reservations on one GPU to instances: which are kept, made and destroyed, and for whom. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from carpool_core.resources.node import Reservation
from carpool_core.values import PodUid

from carpool_deviceplugin.devices.gpu import CreateInstance, DestroyInstance, GpuActual, Part, Step
from carpool_deviceplugin.mig.layout import Placement, occupied
from carpool_deviceplugin.mig.planner import Create, Destroy, MigPlan, MigRefusal, has_room, plan_mig
from carpool_deviceplugin.mig.profiles import MigTable, Profile


@dataclass(frozen=True, slots=True)
class Division:
    """What to do about the instances of one GPU."""

    steps: tuple[Step, ...]
    ready: tuple[PodUid, ...]
    """Pods that have their instance once the steps are done."""
    waiting: dict[PodUid, str]
    """Pods whose instance fits once others have left, and for whom they wait."""
    refused: dict[PodUid, str]
    """Pods whose instance does not fit, and what is in the way."""


def divide(actual: GpuActual, table: MigTable, granted: Sequence[Reservation]) -> Division:
    """Plan the instances of a GPU.

    Instances of others, those with a process and those of pods with a reservation stay. Idle ones of ours are used
    again or destroyed.

    Args:
        actual: How the GPU is.
        table: What it can be divided into.
        granted: Reservations in mode MIG, those that come first in front; each names a profile of the table.
    """
    settled = _settled(actual.parts, granted)
    staying = [p for p in actual.parts if not p.is_ours or p.is_used or p in settled.values()]
    taken = [p.instance.placement.profile for p in staying]
    accepted: list[Reservation] = []
    waiting: dict[PodUid, str] = {}
    refused: dict[PodUid, str] = {}
    plan = _planned(table, actual.parts, staying, taken)
    for wanted in (r for r in granted if r.pod_uid not in settled):
        profiles = [*taken, *(_profile(table, r) for r in (*accepted, wanted))]
        extra = profiles[len(taken) :]
        if has_room(table, occupied(p.instance.placement for p in staying), Counter(extra)):
            plan = _planned(table, actual.parts, staying, profiles)
            accepted.append(wanted)
            continue
        leaving = [p for p in staying if p.is_ours and p not in settled.values()]
        if awaited := _obstacles(table, staying, leaving, extra):
            whom = ", ".join(f"pod {u}" for u in sorted(u for p in awaited for u in p.users)) or "nobody known"
            waiting[wanted.pod_uid] = (
                f"waits for the processes of {whom} to leave its MIG instance of GPU {actual.uuid}"
            )
            continue
        why = " and ".join(str(p.instance) for p in _obstacles(table, staying, staying, extra)) or "too little room"
        refused[wanted.pod_uid] = (
            f"GPU {actual.uuid}: expected room for {', '.join(map(str, extra))}, found {why} in the way; reserve a "
            "smaller profile or another GPU"
        )
    steps = _steps(actual, plan, staying, settled, accepted)
    return Division(steps, (*settled, *(r.pod_uid for r in accepted)), waiting, refused)


def _settled(parts: Sequence[Part], granted: Sequence[Reservation]) -> dict[PodUid, Part]:
    """Who has an instance: the one that was made for it, or, where that was forgotten, the one that it uses."""
    settled: dict[PodUid, Part] = {}
    for r in granted:
        fitting = [p for p in parts if p.instance.placement.profile.name == r.mig_profile]
        own = [p for p in fitting if p.is_ours and p.pod_uid == r.pod_uid]
        own = own or [p for p in fitting if r.pod_uid in p.users]  # only the agent let it in there
        if own and own[0] not in settled.values():
            settled[r.pod_uid] = own[0]
    return settled


def _planned(table: MigTable, parts: Sequence[Part], staying: Sequence[Part], wanted: Sequence[Profile]) -> MigPlan:
    """Plan what is known to fit."""
    found = plan_mig(table, [p.instance for p in parts], {p.instance.id for p in staying}, wanted)
    if isinstance(found, MigRefusal):
        raise ValueError(f"expected what fits, found that it does not: {found.message}")
    return found


def _profile(table: MigTable, reservation: Reservation) -> Profile:
    return table.find(reservation.mig_profile or "")


def _obstacles(
    table: MigTable, staying: Sequence[Part], may_go: Sequence[Part], extra: Sequence[Profile]
) -> tuple[Part, ...]:
    """The fewest of `may_go` without which there would be room; empty where that is not enough."""
    for count in range(1, len(may_go) + 1):
        for going in combinations(may_go, count):
            left = occupied(p.instance.placement for p in staying if p not in going)
            if has_room(table, left, Counter(extra)):
                return going
    return ()


def _steps(
    actual: GpuActual,
    plan: MigPlan,
    staying: Sequence[Part],
    settled: dict[PodUid, Part],
    accepted: Sequence[Reservation],
) -> tuple[Step, ...]:
    kept = {i.id for i in plan.kept} - {p.instance.id for p in staying}
    free: list[Placement] = [p.instance.placement for p in actual.parts if p.instance.id in kept]
    free += [s.placement for s in plan.steps if isinstance(s, Create)]
    given: dict[Placement, PodUid] = {}
    for r in accepted:
        place = next(p for p in free if p not in given and p.profile.name == r.mig_profile)
        given[place] = r.pod_uid
    forgotten = [(p, uid) for uid, p in settled.items() if p.pod_uid != uid]
    return (
        *(DestroyInstance(s.instance.placement) for s in plan.steps if isinstance(s, Destroy)),
        *(CreateInstance(p.instance.placement, uid) for p, uid in forgotten),
        *(CreateInstance(place, given[place]) for place in free if place in given),
    )
