"""From how a GPU is to how its reservations want it: the shortest list of steps, for one GPU at a time. Pure."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from carpool_core.resources.node import Reservation
from carpool_core.values import PodUid, SharingMode

from carpool_deviceplugin.gpu import GpuActual, Limits, SetLimits, SetMode, StartMps, Step, StopMps


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do about one GPU."""

    steps: tuple[Step, ...] = ()
    ready: tuple[PodUid, ...] = ()
    """Pods whose share exists once the steps are done."""
    waiting: Mapping[PodUid, str] | None = None
    """Pods that must wait for others to leave, and for whom."""
    refused: Mapping[PodUid, str] | None = None
    """Pods whose reservation cannot be honoured, and why."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing remains to be done or waited for."""
        return not self.steps and not self.waiting


def plan(actual: GpuActual, reservations: Iterable[Reservation], held: Set[PodUid] = frozenset()) -> Plan:
    """Plan the steps for one GPU.

    Whoever is on the GPU, or was promised it, comes before whoever reserved later; nothing is ever taken from them. The
    mode changes only while no process is on the GPU.

    Args:
        actual: How the GPU is.
        reservations: Those that name this GPU.
        held: Pods whose share was reported ready.
    """
    granted, refused = _grant(actual, reservations, held)
    leaving = actual.tenants - {r.pod_uid for r in granted}
    if not granted:
        return Plan(steps=() if leaving else _leave(actual), refused=refused)
    mode = granted[0].mode
    is_changing = actual.mode is not mode
    if leaving or (is_changing and actual.tenants):
        staying = {r.pod_uid for r in granted if not is_changing and r.pod_uid in held | actual.tenants}
        whom = ", ".join(sorted(leaving or actual.tenants))
        reason = f"waits for the processes of pod {whom} to leave GPU {actual.uuid}"
        return Plan(
            steps=_limits(actual, [r for r in granted if r.pod_uid in staying]) if mode is SharingMode.MPS else (),
            ready=tuple(r.pod_uid for r in granted if r.pod_uid in staying),
            waiting={r.pod_uid: reason for r in granted if r.pod_uid not in staying},
            refused=refused,
        )
    steps = (*_leave(actual, keep=mode), *_enter(actual, granted)) if is_changing else _enter(actual, granted)
    return Plan(steps=steps, ready=tuple(r.pod_uid for r in granted), refused=refused)


def way_back(done: Sequence[Step], before: GpuActual) -> tuple[Step, ...]:
    """Return the steps that undo `done`, which began at `before`."""
    return tuple(step for taken in reversed(done) for step in _undo(taken, before))


def _undo(step: Step, before: GpuActual) -> tuple[Step, ...]:
    match step:
        case SetMode():
            return (SetMode(before.mode),)
        case StartMps():
            return () if before.mps_daemon else (StopMps(),)
        case StopMps():
            limits = tuple(SetLimits(pod, limits) for pod, limits in before.limits.items())
            return (StartMps(), *limits) if before.mps_daemon else ()
        case SetLimits(pod_uid):
            return (SetLimits(pod_uid, before.limits.get(pod_uid)),)


def _grant(
    actual: GpuActual, reservations: Iterable[Reservation], held: Set[PodUid]
) -> tuple[list[Reservation], dict[PodUid, str]]:
    def rank(r: Reservation) -> tuple[bool, bool, str, str]:
        return (r.pod_uid not in actual.tenants, r.pod_uid not in held, r.reserved_at, r.pod_uid)

    granted: list[Reservation] = []
    refused: dict[PodUid, str] = {}
    for reservation in sorted(reservations, key=rank):
        is_there = reservation.pod_uid in held | actual.tenants
        reason = "" if is_there else actual.problem
        reason = reason or _impossible(actual, reservation) or _conflict(actual, reservation, granted)
        if reason:
            refused[reservation.pod_uid] = reason
        else:
            granted.append(reservation)
    return granted, refused


def _impossible(actual: GpuActual, wanted: Reservation) -> str:
    """Why this reservation could not be honoured on an empty GPU either."""
    if wanted.mode not in actual.modes:
        can = ", ".join(sorted(actual.modes))
        return f"GPU {actual.uuid}: expected a mode out of {can}, found {wanted.mode}; reserve another mode"
    if wanted.memory_limit_mib is not None and wanted.memory_limit_mib > actual.usable_mib:
        return (
            f"GPU {actual.uuid}: expected a limit of at most {actual.usable_mib:,} MiB, found "
            f"{wanted.memory_limit_mib:,} MiB; reserve a larger GPU"
        )
    if wanted.mode is SharingMode.MPS and len(wanted.gpu_uuids) > 1:
        return (
            f"expected one GPU with MPS, found {len(wanted.gpu_uuids)}; each GPU has an MPS daemon of its own and a "
            "process reaches only one: reserve the GPUs Exclusive or TimeSlicing"
        )
    return ""


def _conflict(actual: GpuActual, wanted: Reservation, granted: Sequence[Reservation]) -> str:
    """Why this reservation does not go with those before it."""
    if not granted:
        return ""
    first = granted[0]
    who = f"{first.pod_namespace}/{first.pod_name}"
    if first.mode is not wanted.mode or first.mode is SharingMode.EXCLUSIVE:
        return (
            f"GPU {actual.uuid}: is {first.mode} for {who}, found a reservation for {wanted.mode}; reserve another GPU"
        )
    if first.mode is not SharingMode.MPS:
        return ""
    if first.pod_namespace != wanted.pod_namespace:
        return (
            f"GPU {actual.uuid}: its MPS daemon serves namespace {first.pod_namespace}, found {wanted.pod_namespace}; "
            "namespaces never share a daemon: reserve another GPU"
        )
    promised = sum(r.memory_limit_mib or 0 for r in granted)
    free = actual.usable_mib - promised
    if (wanted.memory_limit_mib or 0) > free:
        return (
            f"GPU {actual.uuid}: has {free:,} of {actual.usable_mib:,} MiB that are not promised, found a limit of "
            f"{wanted.memory_limit_mib or 0:,} MiB; reserve another GPU"
        )
    return ""


def _leave(actual: GpuActual, keep: SharingMode | None = None) -> tuple[Step, ...]:
    """Steps out of the present mode, to idle unless another mode follows at once."""
    steps: tuple[Step, ...] = ()
    if actual.mps_daemon or actual.limits:
        steps = (StopMps(),)
    if keep is None and actual.mode is not None:
        steps = (*steps, SetMode(None))
    return steps


def _enter(actual: GpuActual, granted: Sequence[Reservation]) -> tuple[Step, ...]:
    mode = granted[0].mode
    is_changing = actual.mode is not mode
    steps: list[Step] = [SetMode(mode)] if is_changing else []
    if mode is SharingMode.MPS:
        if is_changing or not actual.mps_daemon:
            steps.append(StartMps())
        steps += _limits(actual, granted, from_nothing=is_changing)
    return tuple(steps)


def _limits(actual: GpuActual, granted: Sequence[Reservation], from_nothing: bool = False) -> tuple[Step, ...]:
    now = {} if from_nothing else dict(actual.limits)
    wanted = {r.pod_uid: Limits(r.memory_limit_mib, r.thread_percentage) for r in granted}
    gone = [pod for pod in now if pod not in wanted and pod not in actual.tenants]
    changed = [pod for pod, limits in wanted.items() if now.get(pod) != limits]
    return (*(SetLimits(pod, None) for pod in gone), *(SetLimits(pod, wanted[pod]) for pod in changed))
