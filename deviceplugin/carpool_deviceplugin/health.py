"""Health of GPUs: classification of XIDs, a pure state machine, event collection, and persistence over restarts."""

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
"""Time without incidents before a GPU counts as healthy again."""
_LONGEST_QUIET_S = 3600.0
_MEMORY_S = 3600.0
"""Relapses within this time double the required quiet time."""
_HOT_S = 30.0
"""Thermal slowdown must last this long to count; shorter ones are peaks."""
_STUCK_S = 600.0
"""A GPU is stuck if it reports full utilization at idle power for this long."""


class XidClass(StrEnum):
    """Effect of an XID on the GPU. Source: NVIDIA, "XID Errors", column of recommended actions."""

    APPLICATION = "Application"
    """The application is at fault; the GPU is healthy."""
    RECOVERABLE = "Recoverable"
    """The GPU is usable again after a quiet period."""
    FATAL = "Fatal"
    """The GPU must be reset or replaced."""


_APPLICATION = (13, 31, 43, 45, 68, 69, 109)
_FATAL = (48, 61, 62, 64, 74, 79, 95, 110, 119, 120, 121, 136, 140, 143)
XIDS: Mapping[int, XidClass] = {
    **dict.fromkeys(_APPLICATION, XidClass.APPLICATION),
    **dict.fromkeys(_FATAL, XidClass.FATAL),
}
"""XIDs with a known class. All others count as recoverable, because unknown is not harmless."""

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
    """Return the class of an XID."""
    return XIDS.get(xid, XidClass.RECOVERABLE)


def describe_xid(xid: int) -> str:
    """Return a text such as `XID 79 (fallen off the bus)`."""
    return f"XID {xid}" + (f" ({_MEANING[xid]})" if xid in _MEANING else "")


@dataclass(frozen=True, slots=True)
class Signals:
    """Observations of a GPU since the last check; None if not reported."""

    xids: Sequence[int] = ()
    lost: str = ""
    """Reason why it cannot be read; empty if it can."""
    was_reset: bool = False
    """Whether the GPU was reset or the driver restarted."""
    ecc_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    is_hot: bool | None = None
    """Whether the hardware slows down because of heat."""
    is_motionless: bool | None = None
    """Whether it reports full utilization at idle power."""


@dataclass(frozen=True, slots=True)
class Health:
    """Health of a GPU and the condition of its recovery.

    States: healthy → quiet period (`until` is set) → healthy; healthy → needs reset (`until` is None) → after the reset
    a
    quiet period → healthy.
    """

    problem: str = ""
    """Reason why the GPU accepts no new work; empty if it does."""
    until: float | None = None
    """Monotonic time of recovery without further incidents; None: only after a reset."""
    falls: tuple[float, ...] = ()
    """Times at which it became unhealthy within the last hour."""
    is_lost: bool = False
    """Whether the last check could not read it. When it can be read again, it counts as reset."""
    hot_since: float | None = None
    motionless_since: float | None = None
    ecc_uncorrectable: int | None = None


def next_health(health: Health, seen: Signals, now: float) -> Health:
    """Return the health after new observations.

    Args:
        health: Health before.
        seen: Observations since then.
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
    """Return the required quiet time: a minute, doubled with each relapse, at most an hour."""
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
"""Maximum of XIDs per check, so that a storm of events cannot block it."""


@dataclass
class _Gpu:
    """Event registration of one GPU. Each GPU has its own event set, so events cannot be mixed up."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    events: Handle | None = None
    opening: int = -1
    """Driver generation in which the set was created."""
    is_registered: bool = False
    is_reported: bool = False
    """Whether the driver reports the GPU's XIDs."""
    seen: list[int] = field(default_factory=list)


class XidWatch:
    """Collects XIDs of GPUs; thread-safe."""

    def __init__(self, session: Session, uuids: Sequence[GpuUuid]) -> None:
        self._session = session
        self._gpus = {uuid: _Gpu() for uuid in uuids}

    def seen(self, uuid: GpuUuid) -> list[int]:
        """Return a GPU's XIDs since the previous call; raises NvmlError."""
        gpu = self._gpus[uuid]
        with gpu.lock:
            self._register(uuid, gpu)
            self._collect(gpu)
            found, gpu.seen = gpu.seen, []
            return found

    def forget(self, uuid: GpuUuid) -> None:
        """Register a GPU's events again at the next check, after a reset."""
        gpu = self._gpus[uuid]
        with gpu.lock:
            gpu.is_registered = False

    def is_watched(self, uuid: GpuUuid) -> bool:
        """Return whether the driver reports this GPU's XIDs."""
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
                    return  # no more events; telemetry reports a lost GPU
                raise
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                gpu.seen = [*gpu.seen, event.eventData][-_MOST:]


_HOT = pynvml.nvmlClocksEventReasonHwThermalSlowdown
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KEPT_WITHIN_S = 30.0
"""Smaller moves of the quiet period's end are not written to disk."""


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    boot: str
    """Boot ID: monotonic time restarts with the node, and a reboot resets the GPUs."""
    health: Health
    energy_mj: int | None = None
    """Energy counter at that time; a lower value later means that the driver restarted."""


class HealthMonitor:
    """Tracks the health of a node's GPUs.

    Args:
        session: The open library.
        uuids: The GPUs.
        telemetry_cache: Their telemetry.
        directory: Directory for the saved health of each GPU.
        monotonic: Clock since boot, in seconds.
        may_write: Whether to save health; otherwise the saved health is only read.
        boot_id: File that identifies the current boot.
    """

    def __init__(
        self,
        session: Session,
        uuids: Sequence[GpuUuid],
        telemetry_cache: TelemetryCache,
        directory: Path,
        monotonic: Callable[[], float],
        *,
        may_write: bool = True,
        boot_id: Path = _BOOT_ID,
    ) -> None:
        self._session, self._telemetry = session, telemetry_cache
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
        """Update a GPU's health; return why it accepts no new work, or an empty text. Raises NvmlError."""
        try:
            seen = self._signals(uuid, self._telemetry.recent(uuid))
        except (GpuLostError, DriverGoneError) as e:
            self._advance(uuid, Signals(lost=str(e)))
            raise
        self._advance(uuid, seen)
        return self._health[uuid].problem

    def after_reset(self, uuid: GpuUuid) -> None:
        """Register the GPU's events again: the agent has reset it."""
        self._xids.forget(uuid)

    def has_new_xid(self, uuid: GpuUuid) -> bool:
        """Return whether an XID has arrived that `clear_xid` has not acknowledged."""
        return uuid in self._struck

    def clear_xid(self, uuid: GpuUuid) -> None:
        """Acknowledge XIDs after the MPS clients were checked; a failed check must not lose them."""
        self._struck.discard(uuid)

    def counters(self, uuid: GpuUuid) -> dict[str, float]:
        """Return the last XID since the agent started, 0 without one; empty if the driver reports none."""
        return {"DCGM_FI_DEV_XID_ERRORS": float(self._last_xid[uuid])} if uuid in self._last_xid else {}

    def idle_power(self, uuid: GpuUuid, power_w: float | None) -> None:
        """Record the power of a GPU without processes, to detect stuck GPUs."""
        if power_w is not None:
            self._idle_w[uuid] = power_w

    def _signals(self, uuid: GpuUuid, telemetry: Telemetry) -> Signals:
        xids = self._xids.seen(uuid)  # may fail; then a reset is reported at the next check
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
            return Health()  # never unhealthy, or unknown
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
