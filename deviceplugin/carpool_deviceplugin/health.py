"""Whether new work may go to a GPU: what happened to it, by kind, and when it is well again. Pure."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import msgspec
import pynvml
import structlog
from carpool_core.values import GpuUuid

from carpool_deviceplugin.nvlib import (
    DriverGoneError,
    GpuLostError,
    Handle,
    NvmlError,
    Session,
    Telemetry,
    TelemetryCache,
)

_QUIET_S = 60.0
"""How long nothing may happen before a GPU counts as well again."""
_LONGEST_QUIET_S = 3600.0
_MEMORY_S = 3600.0
"""Relapses within this time double the quiet that is asked for."""
_HOT_S = 30.0
"""A hardware slowdown for heat that lasts so long is not just a peak."""
_STUCK_S = 600.0
"""A GPU that says it computes and draws no more than with nobody on it, for so long, is stuck."""


class XidClass(StrEnum):
    """What an XID says of the GPU. Source: NVIDIA, "XID Errors", column of recommended actions."""

    APPLICATION = "Application"
    """The program's own fault: the GPU is fine."""
    RECOVERABLE = "Recoverable"
    """The GPU goes on, after a while in which nothing else happens."""
    FATAL = "Fatal"
    """The GPU must be reset or replaced before it may be used again."""


_APPLICATION = (13, 31, 43, 45, 68, 69, 109)
_FATAL = (48, 61, 62, 64, 74, 79, 95, 110, 119, 120, 121, 136, 140, 143)
XIDS: Mapping[int, XidClass] = {
    **dict.fromkeys(_APPLICATION, XidClass.APPLICATION),
    **dict.fromkeys(_FATAL, XidClass.FATAL),
}
"""Those with a class of their own; all others are recoverable: unknown is not harmless."""

_MEANING = {
    13: "graphics engine exception",
    31: "memory page fault",
    43: "stopped processing",
    45: "preemptive cleanup",
    48: "double-bit ECC error",
    62: "micro-controller halted",
    63: "row remapping recorded",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP does not answer",
    120: "GSP error",
    154: "recovery action changed",
}


def xid_class(xid: int) -> XidClass:
    """Return what an XID says of the GPU."""
    return XIDS.get(xid, XidClass.RECOVERABLE)


def describe_xid(xid: int) -> str:
    """Such as `XID 79 (fallen off the bus)`."""
    return f"XID {xid}" + (f" ({_MEANING[xid]})" if xid in _MEANING else "")


@dataclass(frozen=True, slots=True)
class Signals:
    """What was seen of a GPU since the last look. None where it cannot be said."""

    xids: Sequence[int] = ()
    lost: str = ""
    """Why it cannot be read; empty where it can."""
    was_reset: bool = False
    """It, or the driver, began anew."""
    ecc_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    is_hot: bool | None = None
    """The hardware slows down for heat."""
    is_motionless: bool | None = None
    """It says that it computes, and draws no more power than with nobody on it."""


@dataclass(frozen=True, slots=True)
class Health:
    """A GPU's health, and what it takes to be well again."""

    problem: str = ""
    """Why no new work may go there; empty where it may."""
    until: float | None = None
    """Well again at this time if nothing else happens; None: only after a reset."""
    falls: tuple[float, ...] = ()
    """When it fell sick, within the last hour."""
    is_lost: bool = False
    """It could not be read when it was last looked at: that it can be again is a new beginning."""
    hot_since: float | None = None
    motionless_since: float | None = None
    ecc_uncorrectable: int | None = None


def next_health(health: Health, seen: Signals, now: float) -> Health:
    """Take in what was seen.

    Args:
        health: As it was.
        seen: Since then.
        now: Monotonic time, in seconds.
    """
    hot_since = _since(health.hot_since, now) if seen.is_hot else None
    motionless_since = _since(health.motionless_since, now) if seen.is_motionless else None
    before, ecc = health.ecc_uncorrectable, seen.ecc_uncorrectable
    health = replace(
        health,
        hot_since=hot_since,
        motionless_since=motionless_since,
        ecc_uncorrectable=before if ecc is None else ecc,
        falls=tuple(t for t in health.falls if now - t < _MEMORY_S),
    )
    began_anew = seen.was_reset or health.is_lost
    health = replace(health, is_lost=bool(seen.lost))
    if began_anew and health.problem and health.until is None and not seen.lost:
        health = replace(health, until=now + _quiet_s(health))
    fatal = _fatal(seen)
    if fatal:
        return _sick(health, fatal, None, now)
    passing = _passing(seen, before, health, now)
    if passing:
        if health.problem and health.until is None:
            return health  # what takes a reset is not outdone by what passes
        return _sick(health, passing, now + _quiet_s(health), now)
    if health.problem and health.until is not None and now >= health.until:
        return replace(health, problem="", until=None)
    return health


def _since(known: float | None, now: float) -> float:
    return now if known is None else known


def _sick(health: Health, problem: str, until: float | None, now: float) -> Health:
    falls = health.falls if health.problem else (*health.falls, now)
    return replace(health, problem=problem, until=until, falls=falls)


def _quiet_s(health: Health) -> float:
    """The quiet that is asked for: a minute, doubled with each relapse."""
    return min(_LONGEST_QUIET_S, _QUIET_S * 2.0 ** max(0, len(health.falls) - (1 if health.problem else 0)))


def _fatal(seen: Signals) -> str:
    if seen.lost:
        return seen.lost
    for xid in seen.xids:
        if xid_class(xid) is XidClass.FATAL:
            return f"{describe_xid(xid)}: drain the GPU and reset it (nvidia-smi --gpu-reset)"
    if seen.remap_failed:
        return "a row of its memory could not be remapped: replace the GPU"
    return ""


def _passing(seen: Signals, ecc_before: int | None, health: Health, now: float) -> str:
    for xid in seen.xids:
        if xid_class(xid) is XidClass.RECOVERABLE:
            return f"{describe_xid(xid)}: no new work until it has been quiet for a while"
    if ecc_before is not None and seen.ecc_uncorrectable is not None and seen.ecc_uncorrectable > ecc_before:
        return f"{seen.ecc_uncorrectable - ecc_before} uncorrectable ECC errors: no new work until it has been quiet"
    if seen.remap_pending:
        return "a row of its memory waits to be remapped: drain the GPU and reset it (nvidia-smi --gpu-reset)"
    if health.hot_since is not None and now - health.hot_since >= _HOT_S:
        return f"it has slowed down for heat for more than {_HOT_S:.0f} s: look at its cooling"
    if health.motionless_since is not None and now - health.motionless_since >= _STUCK_S:
        return (
            f"it is stuck: it says that it computes, and has drawn idle power for more than {_STUCK_S:.0f} s: end its "
            "processes, and reset it (nvidia-smi --gpu-reset) where that does not help"
        )
    return ""


_MOST = 256
"""XIDs taken at one look: a storm of them is no reason to look no further."""


@dataclass
class _Gpu:
    """What was registered for one GPU: a set of its own, so that an event is never another GPU's."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    events: Handle | None = None
    opening: int = -1
    """Of the driver, when the set was made."""
    is_registered: bool = False
    is_reported: bool = False
    """Whether the driver reports the GPU's XIDs."""
    seen: list[int] = field(default_factory=list)


class XidWatch:
    """Collects the XIDs of some GPUs; thread-safe."""

    def __init__(self, session: Session, uuids: Sequence[GpuUuid]) -> None:
        self._session = session
        self._gpus = {uuid: _Gpu() for uuid in uuids}

    def seen(self, uuid: GpuUuid) -> list[int]:
        """Return the XIDs of a GPU since this was last asked of it; raises NvmlError."""
        gpu = self._gpus[uuid]
        with gpu.lock:
            self._register(uuid, gpu)
            self._collect(gpu)
            found, gpu.seen = gpu.seen, []
            return found

    def forget(self, uuid: GpuUuid) -> None:
        """Register a GPU's events again at the next look: it was reset."""
        gpu = self._gpus[uuid]
        with gpu.lock:
            gpu.is_registered = False

    def is_watched(self, uuid: GpuUuid) -> bool:
        """Whether the driver reports this GPU's XIDs."""
        return self._gpus[uuid].is_reported

    def _register(self, uuid: GpuUuid, gpu: _Gpu) -> None:
        session, library = self._session, self._session.library
        if gpu.opening != session.generation:
            opening = session.generation
            gpu.events, gpu.opening = session.call(uuid, library.nvmlEventSetCreate), opening
            gpu.is_registered = False
        if not gpu.is_registered:
            gpu.is_reported = self._can_report(uuid, gpu) or gpu.is_reported
            gpu.is_registered = True

    def _can_report(self, uuid: GpuUuid, gpu: _Gpu) -> bool:
        session, kind = self._session, pynvml.nvmlEventTypeXidCriticalError
        try:
            session.call(uuid, session.library.nvmlDeviceRegisterEvents, session.handle(uuid), kind, gpu.events)
        except NvmlError as e:
            if e.code == pynvml.NVML_ERROR_NOT_SUPPORTED:
                return False
            raise
        return True

    def _collect(self, gpu: _Gpu) -> None:
        session, library = self._session, self._session.library
        for _ in range(_MOST):
            try:
                event = session.call("", library.nvmlEventSetWait, gpu.events, 0)
            except NvmlError as e:
                if e.code in (pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_GPU_IS_LOST):
                    return  # nothing more; a GPU that is lost is told by its own reading
                raise
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                gpu.seen = [*gpu.seen, event.eventData][-_MOST:]


_HOT = pynvml.nvmlClocksEventReasonHwThermalSlowdown
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KEPT_WITHIN_S = 30.0
"""What goes on happening moves the end of a quiet with each look; it is not written each time."""


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    boot: str
    """Of the node: its clock begins anew with each, and what takes a reset has had one."""
    health: Health
    energy_mj: int | None = None
    """The GPU's counter at that time: one that has fallen since began anew."""


class HealthMonitor:
    """Looks after the health of a node's GPUs.

    Args:
        session: The open library.
        uuids: The GPUs.
        glances: Their telemetry.
        directory: Where each GPU's health is kept.
        monotonic: Seconds since the node began.
        may_write: Whether it is kept; otherwise only what an agent kept is read.
        boot_id: Names the node's present life.
    """

    def __init__(
        self,
        session: Session,
        uuids: Sequence[GpuUuid],
        glances: TelemetryCache,
        directory: Path,
        monotonic: Callable[[], float],
        *,
        may_write: bool = True,
        boot_id: Path = _BOOT_ID,
    ) -> None:
        self._session, self._glances = session, glances
        self._monotonic, self._directory, self._may_write = monotonic, directory, may_write
        self._boot = boot_id.read_text().strip() if boot_id.exists() else ""
        self._energy_mj: dict[GpuUuid, int | None] = {}
        self._health = {uuid: self._kept(uuid) for uuid in uuids}
        self._written = dict(self._health)
        self._openings = dict.fromkeys(uuids, session.generation)
        self._xids = XidWatch(session, uuids)
        self._struck: set[GpuUuid] = set()
        self._last_xid: dict[GpuUuid, int] = {}
        self._idle_w: dict[GpuUuid, float] = {}
        self._log = structlog.get_logger()

    def look(self, uuid: GpuUuid) -> str:
        """Take in what happened to a GPU; return why no new work may go there, or an empty text. Raises NvmlError."""
        try:
            seen = self._signals(uuid, self._glances.recent(uuid))
        except (GpuLostError, DriverGoneError) as e:
            self._advance(uuid, Signals(lost=str(e)))
            raise
        self._advance(uuid, seen)
        return self._health[uuid].problem

    def after_reset(self, uuid: GpuUuid) -> None:
        """The GPU was reset by us: what was registered with it is gone."""
        self._xids.forget(uuid)

    def has_new_xid(self, uuid: GpuUuid) -> bool:
        """Whether a look has brought an XID that nobody has taken in yet."""
        return uuid in self._struck

    def clear_xid(self, uuid: GpuUuid) -> None:
        """Its MPS clients were looked at: a look that fails before that must not lose what struck them."""
        self._struck.discard(uuid)

    def counters(self, uuid: GpuUuid) -> dict[str, float]:
        """The last XID since the agent began, 0 where none came; absent where the driver reports none."""
        return {"DCGM_FI_DEV_XID_ERRORS": float(self._last_xid[uuid])} if uuid in self._last_xid else {}

    def idle_power(self, uuid: GpuUuid, power_w: float | None) -> None:
        """Learn what a GPU draws with nobody on it: a GPU that says it is busy and draws no more is stuck."""
        if power_w is not None:
            self._idle_w[uuid] = power_w

    def _signals(self, uuid: GpuUuid, telemetry: Telemetry) -> Signals:
        xids = self._xids.seen(uuid)  # may fail; until it does not, a reset is still to be told
        if xids:
            self._struck.add(uuid)
        if self._xids.is_watched(uuid):
            self._last_xid[uuid] = xids[-1] if xids else self._last_xid.get(uuid, 0)
        before_mj, now_mj = self._energy_mj.get(uuid), telemetry.energy_mj
        has_fallen = before_mj is not None and now_mj is not None and now_mj < before_mj
        was_reset = self._openings[uuid] != self._session.generation or has_fallen
        self._openings[uuid], self._energy_mj[uuid] = self._session.generation, now_mj
        reasons = telemetry.clock_reasons
        return Signals(
            xids=xids,
            was_reset=was_reset,
            ecc_uncorrectable=telemetry.ecc_uncorrectable,
            remap_pending=telemetry.remap_pending,
            remap_failed=telemetry.remap_failed,
            is_hot=None if reasons is None else bool(reasons & _HOT),
            is_motionless=self._is_motionless(uuid, telemetry),
        )

    def _is_motionless(self, uuid: GpuUuid, telemetry: Telemetry) -> bool | None:
        idle_w, power_w = self._idle_w.get(uuid), telemetry.power_w
        if idle_w is None or power_w is None or telemetry.gpu_util_percent is None:
            return None
        return telemetry.gpu_util_percent >= 99 and not telemetry.memory_util_percent and power_w <= 1.05 * idle_w

    def _advance(self, uuid: GpuUuid, seen: Signals) -> None:
        was = self._written[uuid]
        now = self._health[uuid] = next_health(self._health[uuid], seen, self._monotonic())
        moved_s = abs((now.until or 0.0) - (was.until or 0.0))
        is_news = (was.problem, was.falls) != (now.problem, now.falls) or moved_s > _KEPT_WITHIN_S
        if is_news and self._may_write:
            self._keep(uuid, now)

    def _path(self, uuid: GpuUuid) -> Path:
        return self._directory / f"{uuid}.health.json"

    def _kept(self, uuid: GpuUuid) -> Health:
        try:
            kept = msgspec.json.decode(self._path(uuid).read_bytes(), type=_Kept)
        except (OSError, msgspec.DecodeError):
            return Health()  # never sick before, or nobody knows
        if not self._boot or kept.boot != self._boot:
            return Health()
        self._energy_mj[uuid] = kept.energy_mj
        return kept.health

    def _keep(self, uuid: GpuUuid, health: Health) -> None:
        path = self._path(uuid)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(
                msgspec.json.encode(_Kept(boot=self._boot, health=health, energy_mj=self._energy_mj.get(uuid)))
            )
            temporary.replace(path)
            self._written[uuid] = health
        except OSError as e:
            self._log.warning("health not kept", gpu=uuid, error=str(e))  # it still holds for this agent's life
