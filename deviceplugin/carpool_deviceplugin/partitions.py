"""Plan of one GPU: from reservations and actual state to steps. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from carpool_core.resources.node import Reservation
from carpool_core.values import PodUid, SharingMode

from carpool_deviceplugin.gpu import (
    CreateInstance,
    DestroyInstance,
    GpuActual,
    Limits,
    MigInstance,
    SetLimits,
    SetMode,
    StartMps,
    Step,
    StopMps,
)
from carpool_deviceplugin.mig import (
    MigPlan,
    MigRefusal,
    MigTable,
    Profile,
    find_blocking,
    fits_together,
    occupied,
    plan_mig,
)
from carpool_deviceplugin.quoting import quoted


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan for one GPU."""

    steps: tuple[Step, ...] = ()
    ready: tuple[PodUid, ...] = ()
    """Pods whose partition is ready after the steps."""
    waiting: Mapping[PodUid, str] = field(default_factory=dict)
    """Pods that wait for other pods to leave, with the reason."""
    refused: Mapping[PodUid, str] = field(default_factory=dict)
    """Pods whose reservation is refused, with the reason."""


def divide(actual: GpuActual, table: MigTable, granted: Sequence[Reservation]) -> Plan:
    """Plan the MIG instances of a GPU.

    Foreign instances, instances with processes and instances of pods with a reservation stay. The agent's other idle
    instances are reused or destroyed. The granted reservations, by priority, each name a profile of the table.
    """
    settled = _settled(actual.mig_instances, granted)
    staying = [p for p in actual.mig_instances if not p.is_managed or p.is_used or p in settled.values()]
    instances = [p.instance for p in staying]
    leaving = [p.instance for p in staying if p.is_managed and p not in settled.values()]
    users = {p.instance.id: p.users for p in staying}
    taken = occupied(i.placement for i in instances)
    accepted, extra = list[Reservation](), list[Profile]()
    waiting, refused = dict[PodUid, str](), dict[PodUid, str]()
    for wanted in (r for r in granted if r.pod_uid not in settled):
        profiles = [*extra, table.find(wanted.mig_profile or "")]
        missing = Counter(profiles)
        if fits_together(table, taken, missing):
            accepted.append(wanted)
            extra = profiles
        elif awaited := find_blocking(table, instances, leaving, missing):
            names = ", ".join(f"pod {u}" for u in sorted(u for i in awaited for u in users[i.id])) or "an unknown pod"
            waiting[wanted.pod_uid] = (
                f"waits for the processes of {names} to leave its MIG instance of GPU {actual.uuid}"
            )
        else:
            why = " and ".join(map(str, find_blocking(table, instances, instances, missing))) or "too little room"
            refused[wanted.pod_uid] = (
                f"GPU {actual.uuid}: expected room for {', '.join(map(str, profiles))}, found {why} in the way; "
                "reserve a smaller profile or another GPU"
            )
    found = plan_mig(
        table,
        [p.instance for p in actual.mig_instances],
        {i.id for i in instances},
        [*(i.placement.profile for i in instances), *extra],
    )
    if isinstance(found, MigRefusal):
        raise ValueError(f"expected profiles that fit, found that they do not: {found.message}")
    steps = _steps(found, {i.id for i in instances}, settled, accepted)
    return Plan(steps, (*settled, *(r.pod_uid for r in accepted)), waiting, refused)


def _settled(mig_instances: Sequence[MigInstance], granted: Sequence[Reservation]) -> dict[PodUid, MigInstance]:
    """Return the pods' instances: the one created for the pod or, if the record was lost, the one that it uses."""
    settled: dict[PodUid, MigInstance] = {}
    for r in granted:
        fitting = [p for p in mig_instances if p.instance.placement.profile.name == r.mig_profile]
        own = [p for p in fitting if p.is_managed and p.pod_uid == r.pod_uid]
        own = own or [p for p in fitting if r.pod_uid in p.users]  # the agent gave it access
        if own and own[0] not in settled.values():
            settled[r.pod_uid] = own[0]
    return settled


def _steps(
    found: MigPlan, staying: Set[int], settled: Mapping[PodUid, MigInstance], accepted: Sequence[Reservation]
) -> tuple[Step, ...]:
    """Give the free instances, idle ones first, to the accepted pods; record again what was lost."""
    free = [i.placement for i in found.kept if i.id not in staying]
    free += found.created
    created = list[CreateInstance]()
    for placement in free:
        pod = next(
            r.pod_uid
            for r in accepted
            if r.mig_profile == placement.profile.name and r.pod_uid not in {c.pod_uid for c in created}
        )
        created.append(CreateInstance(placement, pod))
    lost = [CreateInstance(p.instance.placement, uid) for uid, p in settled.items() if p.pod_uid != uid]
    return (*(DestroyInstance(i.placement) for i in found.destroyed), *lost, *created)


def plan(
    actual: GpuActual,
    reservations: Iterable[Reservation],
    held: Set[PodUid] = frozenset(),
    peaks: Mapping[PodUid, int] | None = None,
) -> Plan:
    """Plan the steps for one GPU.

    Pods on the GPU and `held` ones, which were reported ready, come first and lose nothing; then the earlier
    reservation wins. The mode changes only while no process is on the GPU. MIG instances change independently of each
    other. `peaks` has the measured peak memory of each pod on the GPU, in MiB.
    """
    granted, refused = _grant(actual, reservations, held, peaks or {})
    leaving = actual.tenants - {r.pod_uid for r in granted}
    if not granted:
        return Plan(steps=_tidied(actual) if leaving else _leave(actual), refused=refused)
    mode = granted[0].mode
    is_changing = actual.mode is not mode
    if mode is SharingMode.MIG and not (is_changing and actual.tenants):
        return _divided(actual, granted, refused)
    if leaving or (is_changing and actual.tenants):
        staying = {r.pod_uid for r in granted if not is_changing and r.pod_uid in held | actual.tenants}
        pods = ", ".join(sorted(leaving or actual.tenants))
        reason = f"waits for the processes of pod {pods} to leave GPU {actual.uuid}"
        return Plan(
            steps=_limits(actual, [r for r in granted if r.pod_uid in staying]) if mode is SharingMode.MPS else (),
            ready=tuple(r.pod_uid for r in granted if r.pod_uid in staying),
            waiting={r.pod_uid: reason for r in granted if r.pod_uid not in staying},
            refused=refused,
        )
    steps = (*_leave(actual, keep=mode), *_enter(actual, granted)) if is_changing else _enter(actual, granted)
    return Plan(steps=steps, ready=tuple(r.pod_uid for r in granted), refused=refused)


def _divided(actual: GpuActual, granted: Sequence[Reservation], refused: Mapping[PodUid, str]) -> Plan:
    if actual.mig_table is None or actual.mig_manager:
        return Plan(ready=tuple(r.pod_uid for r in granted), refused=refused)  # only pods with an instance were granted
    found = divide(actual, actual.mig_table, granted)
    into = () if actual.mode is SharingMode.MIG else (*_leave(actual, keep=SharingMode.MIG), SetMode(SharingMode.MIG))
    return replace(found, steps=(*into, *found.steps), refused={**refused, **found.refused})


def _tidied(actual: GpuActual) -> tuple[Step, ...]:
    """Return the steps that destroy idle MIG instances while other pods are still leaving."""
    if actual.mode is not SharingMode.MIG or actual.mig_table is None or actual.mig_manager:
        return ()
    return divide(actual, actual.mig_table, ()).steps


def _grant(
    actual: GpuActual, reservations: Iterable[Reservation], held: Set[PodUid], peaks: Mapping[PodUid, int]
) -> tuple[list[Reservation], dict[PodUid, str]]:
    def rank(r: Reservation) -> tuple[bool, bool, str, str]:
        return (r.pod_uid not in actual.tenants, r.pod_uid not in held, r.reserved_at, r.pod_uid)

    granted: list[Reservation] = []
    refused: dict[PodUid, str] = {}
    for reservation in sorted(reservations, key=rank):
        is_there = reservation.pod_uid in held | actual.tenants
        reason = "" if is_there else actual.problem
        reason = reason or _impossible(actual, reservation, is_there=is_there)
        reason = reason or _conflict(actual, reservation, granted)
        if not (is_there and _is_as_it_was(actual, reservation)):
            reason = reason or _overcommitted(actual, reservation, granted, peaks)
        if reason:
            refused[reservation.pod_uid] = reason
        else:
            granted.append(reservation)
    return granted, refused


def _impossible(actual: GpuActual, wanted: Reservation, *, is_there: bool) -> str:
    """Return why the reservation does not fit on an empty GPU; empty if it fits."""
    if wanted.mode not in actual.modes and not (is_there and wanted.mode is actual.mode):
        can = ", ".join(sorted(actual.modes)) or "none"
        why = f" ({actual.mig_manager})" if wanted.mode is SharingMode.MIG and actual.mig_manager else ""
        return f"GPU {actual.uuid}: expected a mode out of {can}, found {wanted.mode}{why}; reserve another mode"
    if wanted.mode in (SharingMode.MPS, SharingMode.MIG) and len(wanted.gpu_uuids) > 1:
        one = "MPS daemon" if wanted.mode is SharingMode.MPS else "MIG instance"
        return (
            f"expected one GPU with {wanted.mode}, found {len(wanted.gpu_uuids)}; a process reaches only one {one}, "
            "which has one GPU: reserve the GPUs Exclusive or TimeSlicing"
        )
    if wanted.mode is SharingMode.MIG:
        return _impossible_instance(actual, wanted)
    if wanted.memory_limit_mib is not None and wanted.memory_limit_mib > actual.usable_mib:
        return (
            f"GPU {actual.uuid}: expected a limit of at most {actual.usable_mib:,} MiB, found "
            f"{wanted.memory_limit_mib:,} MiB; reserve a larger GPU"
        )
    return ""


def _impossible_instance(actual: GpuActual, wanted: Reservation) -> str:
    profiles = actual.mig_table.by_name if actual.mig_table else {}
    profile = profiles.get(wanted.mig_profile or "")
    if profile is None:
        return (
            f"GPU {actual.uuid}: expected migProfile out of {', '.join(profiles) or 'none'}, found "
            f"{quoted(wanted.mig_profile or '')}; reserve one of those"
        )
    if (wanted.memory_limit_mib or 0) > profile.memory_mib:
        return (
            f"GPU {actual.uuid}: expected a limit of at most the {profile.memory_mib:,} MiB of {profile}, found "
            f"{wanted.memory_limit_mib:,} MiB; reserve a larger profile"
        )
    return ""


def _conflict(actual: GpuActual, wanted: Reservation, granted: Sequence[Reservation]) -> str:
    """Return why the reservation conflicts with granted ones; empty if it does not."""
    if not granted:
        return ""
    first = granted[0]
    who = f"{first.pod_namespace}/{first.pod_name}"
    if first.mode is not wanted.mode or first.mode is SharingMode.EXCLUSIVE:
        return (
            f"GPU {actual.uuid}: is {first.mode} for {who}, found a reservation for {wanted.mode}; reserve another GPU"
        )
    if first.mode is SharingMode.MPS and first.tenancy_domain != wanted.tenancy_domain:
        return (
            f"GPU {actual.uuid}: its MPS daemon serves {first.tenancy_domain}, found {wanted.tenancy_domain}; "
            "they never share a daemon: reserve another GPU"
        )
    return ""


def _is_as_it_was(actual: GpuActual, wanted: Reservation) -> bool:
    """Whether an admitted pod's memory limit is unchanged."""
    known = actual.limits.get(wanted.pod_uid)
    return known is None or known.memory_mib == wanted.memory_limit_mib


def _overcommitted(
    actual: GpuActual, wanted: Reservation, granted: Sequence[Reservation], peaks: Mapping[PodUid, int]
) -> str:
    """Return why memory is too small beside the granted reservations; empty if it suffices.

    Limits of those who are there may exceed the GPU: the scheduler lets others in beside a measured peak.
    """
    if not granted or wanted.mode is not SharingMode.MPS:
        return ""
    counts = _counted_mib(wanted, peaks)
    free = actual.usable_mib - sum(_counted_mib(r, peaks) for r in granted)
    if counts > free:
        return (
            f"GPU {actual.uuid}: has {free:,} of {actual.usable_mib:,} MiB that are not promised, found a limit of "
            f"{counts:,} MiB; reserve another GPU"
        )
    return ""


def _counted_mib(reservation: Reservation, peaks: Mapping[PodUid, int]) -> int:
    """Return the memory to count for a reservation, in MiB: its measured peak while it holds, otherwise its limit."""
    measured = reservation.tenant.measured_mib
    if measured is not None and peaks.get(reservation.pod_uid, 0) <= measured:
        return measured
    return reservation.memory_limit_mib or 0


def _leave(actual: GpuActual, keep: SharingMode | None = None) -> tuple[Step, ...]:
    """Return the steps that leave the present mode; to idle if `keep` is None."""
    steps: tuple[Step, ...] = ()
    if actual.mps_daemon or actual.mps_servers_left or actual.mps_cleanup_pending or actual.limits:
        steps = (StopMps(),)
    if keep is not SharingMode.MIG and not actual.mig_manager:
        steps += tuple(
            DestroyInstance(p.instance.placement) for p in actual.mig_instances if p.is_managed and not p.is_used
        )
    if keep is None and actual.mode is not None:
        steps = (*steps, SetMode(None))
    return steps


def _enter(actual: GpuActual, granted: Sequence[Reservation]) -> tuple[Step, ...]:
    mode = granted[0].mode
    is_changing = actual.mode is not mode
    is_mps = mode is SharingMode.MPS
    is_left = actual.mps_daemon or actual.mps_servers_left or actual.mps_cleanup_pending
    is_useless = _is_of_no_use(actual, granted) if is_mps else is_left
    is_ending = is_useless and not is_changing and not actual.tenants  # `_leave` stops it if the mode changes
    steps: list[Step] = [SetMode(mode)] if is_changing else [StopMps()] if is_ending else []
    if is_mps:
        if is_changing or is_ending or not (actual.mps_daemon or actual.tenants):
            steps.append(StartMps())  # never beside clients: a new daemon would end a dead daemon's server
        steps += _limits(actual, granted, from_nothing=is_changing or is_ending)
    return tuple(steps)


def _is_of_no_use(actual: GpuActual, granted: Sequence[Reservation]) -> bool:
    """Whether a new MPS daemon must replace the present or former one when the GPU has no processes.

    A daemon that hangs is replaced, and one that served only other pods: their files and ending containers must not
    reach the new pods.
    """
    is_of_others = actual.limits.keys().isdisjoint(r.pod_uid for r in granted)
    return actual.mps_hung or (is_of_others and bool(actual.mps_daemon or actual.limits))


def _limits(actual: GpuActual, granted: Sequence[Reservation], from_nothing: bool = False) -> tuple[Step, ...]:
    now = {} if from_nothing else dict(actual.limits)
    wanted = {r.pod_uid: Limits(r.memory_limit_mib, r.thread_percentage) for r in granted}
    gone = [pod for pod in now if pod not in wanted and pod not in actual.tenants]
    changed = [pod for pod, limits in wanted.items() if now.get(pod) != limits]
    return (*(SetLimits(pod, None) for pod in gone), *(SetLimits(pod, wanted[pod]) for pod in changed))
