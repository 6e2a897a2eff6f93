"""Health of GPUs: from XIDs, counters and failed calls to whether a GPU gets new work."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
import pynvml
import structlog
from carpool_core.values import GpuUuid

from carpool_deviceplugin.files import write_file
from carpool_deviceplugin.nvlib import (
    NO_INSTANCE,
    DriverGoneError,
    GpuLostError,
    Handle,
    NvmlError,
    Session,
    Telemetry,
    read_telemetry,
)

_QUIET_S = 60.0
"""Time without a further problem after which a GPU is healthy again."""
_MAX_QUIET_S = 3600.0
_RELAPSE_S = 3600.0
"""Each relapse within this time doubles the quiet time."""
_HOT_S = 30.0
"""A thermal slowdown of the hardware counts after this time."""
_STUCK_S = 600.0
"""A GPU that reports full utilization at idle power counts as stuck after this time."""


class XidClass(StrEnum):
    """Consequence of an XID for the GPU."""

    APPLICATION = "Application"
    """An error of the program, or a notice; the GPU stays healthy."""
    RECOVERABLE = "Recoverable"
    """The GPU is healthy again after a quiet time."""
    FATAL = "Fatal"
    """The GPU must be reset or replaced."""


_RESTART_APP = (
    8, 11, 13, 25, 31, 32, *range(39, 42), 45, 60, *range(68, 73), *range(75, 78), 80, *range(82, 87), 88, 89, 94,
    *range(96, 106), *range(126, 136), 139,
)  # fmt: skip
_IGNORE = (14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 154, 157, 161)
_FATAL = (
    46, 48, 54, 61, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, *range(143, 152), 155, 156, 158, 160, 162,
)  # fmt: skip
XIDS: Mapping[int, XidClass] = {
    **dict.fromkeys(_RESTART_APP + _IGNORE, XidClass.APPLICATION),
    **dict.fromkeys(_FATAL, XidClass.FATAL),
}
"""Immediate actions of NVIDIA's XID catalog (as in NVIDIA/NVSentinel 6f8b0fc, compared on 2026-11-28): RESTART_APP and
IGNORE, and those that need a reset, a reboot or work on the machine. XID 61 is that of Volta and older. All others are
recoverable."""

_MEANING = {
    13: "graphics engine exception",
    31: "memory page fault",
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    54: "power cable",
    62: "micro-controller halted",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    90: "L2 cache error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    119: "GSP does not answer",
    120: "GSP error",
    **dict.fromkeys(range(144, 151), "NVLink error"),
    155: "NVLink error",
    156: "resource retired",
    158: "fatal timeout",
}


def xid_class(xid: int) -> XidClass:
    """Return the consequence of an XID for the GPU."""
    return XIDS.get(xid, XidClass.RECOVERABLE)


class Xid(NamedTuple):
    """An XID of a GPU, and the MIG instance that the driver names with it.

    The instance is part of the message only: the whole GPU gets no new work. The catalog has no action for an instance.
    An XID that ends with its program closes no GPU, and a reset, which the others may need, ends every instance.
    """

    code: int
    gpu_instance_id: int | None = None

    def __str__(self) -> str:
        """Return text such as `XID 95 (uncontained ECC error) of MIG instance 3`."""
        meaning = f" ({_MEANING[self.code]})" if self.code in _MEANING else ""
        instance = "" if self.gpu_instance_id is None else f" of MIG instance {self.gpu_instance_id}"
        return f"XID {self.code}{meaning}{instance}"


@dataclass(frozen=True, slots=True)
class Signals:
    """Observations of a GPU since the last update. None if the GPU does not report one."""

    xids: Sequence[Xid] = ()
    lost: str = ""
    """Why it cannot be read; empty if it can."""
    was_reset: bool = False
    """The GPU or its driver was restarted."""
    ecc_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    is_hot: bool | None = None
    """The hardware slows down because of heat."""
    is_motionless: bool | None = None
    """It reports full utilization at idle power."""


@dataclass(frozen=True, slots=True)
class Health:
    """Health of a GPU, with the history that its recovery depends on.

    Healthy → (problem, `until` a time) → healthy at that time if nothing else happens.
    Healthy → (problem, `until` None) → reset or readable again → (problem, `until` a time) → healthy.
    """

    problem: str = ""
    """Why it gets no new work; empty if healthy."""
    until: float | None = None
    """Time of recovery; None if it needs a reset."""
    falls: tuple[float, ...] = ()
    """Times when it became unhealthy, within the last hour."""
    is_lost: bool = False
    """It could not be read at the last update. Reading it again counts as a reset."""
    hot_since: float | None = None
    motionless_since: float | None = None
    ecc_uncorrectable: int | None = None


def next_health(health: Health, seen: Signals, now: float) -> Health:
    """Return the health after what was seen since; `now` is monotonic, in seconds."""
    before, was_reset = health, seen.was_reset or health.is_lost
    health = replace(
        health,
        is_lost=bool(seen.lost),
        hot_since=(now if before.hot_since is None else before.hot_since) if seen.is_hot else None,
        motionless_since=(now if before.motionless_since is None else before.motionless_since)
        if seen.is_motionless
        else None,
        ecc_uncorrectable=before.ecc_uncorrectable if seen.ecc_uncorrectable is None else seen.ecc_uncorrectable,
        falls=tuple(t for t in before.falls if now - t < _RELAPSE_S),
    )
    if was_reset and health.problem and health.until is None and not seen.lost:
        health = replace(health, until=now + _quiet_s(health))
    if fatal := _fatal(seen):
        return _unhealthy(health, fatal, None, now)
    if passing := _passing(seen, before.ecc_uncorrectable, health, now):
        if health.problem and health.until is None:
            return health  # a problem that needs a reset has priority
        return _unhealthy(health, passing, now + _quiet_s(health), now)
    if health.problem and health.until is not None and now >= health.until:
        return replace(health, problem="", until=None)
    return health


def _unhealthy(health: Health, problem: str, until: float | None, now: float) -> Health:
    falls = health.falls if health.problem else (*health.falls, now)
    return replace(health, problem=problem, until=until, falls=falls)


def _quiet_s(health: Health) -> float:
    """Return the quiet time: a minute, doubled by each relapse."""
    return min(_MAX_QUIET_S, _QUIET_S * 2.0 ** max(0, len(health.falls) - (1 if health.problem else 0)))


def _fatal(seen: Signals) -> str:
    if seen.lost:
        return seen.lost
    for xid in seen.xids:
        if xid_class(xid.code) is XidClass.FATAL:
            return f"{xid}: drain the GPU and reset it (nvidia-smi --gpu-reset)"
    return "a row of its memory could not be remapped: replace the GPU" if seen.remap_failed else ""


def _passing(seen: Signals, ecc_before: int | None, health: Health, now: float) -> str:
    for xid in seen.xids:
        if xid_class(xid.code) is XidClass.RECOVERABLE:
            return f"{xid}: no new work until it has been quiet for a while"
    if ecc_before is not None and seen.ecc_uncorrectable is not None and seen.ecc_uncorrectable > ecc_before:
        return f"{seen.ecc_uncorrectable - ecc_before} uncorrectable ECC errors: no new work until it has been quiet"
    if seen.remap_pending:
        return "a row of its memory waits to be remapped: drain the GPU and reset it (nvidia-smi --gpu-reset)"
    if health.hot_since is not None and now - health.hot_since >= _HOT_S:
        return f"it has slowed down for heat for more than {_HOT_S:.0f} s: check its cooling"
    if health.motionless_since is not None and now - health.motionless_since >= _STUCK_S:
        return (
            f"it is stuck: it reports full utilization, but has drawn idle power for more than {_STUCK_S:.0f} s: end "
            "its processes, and reset it (nvidia-smi --gpu-reset) if that does not help"
        )
    return ""


_MAX_XIDS = 256
"""XIDs read in one poll."""


@dataclass
class _Events:
    """Event set of one GPU. GPUs do not share a set, so that an event is never attributed to another GPU."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    handle: Handle | None = None
    generation: int = -1
    """Opening of the driver that created the set."""
    is_registered: bool = False
    is_reported: bool = False
    """Whether the driver reports the GPU's XIDs."""
    xids: list[Xid] = field(default_factory=list)
    """XIDs read by a poll that failed later."""


class XidWatch:
    """Collects the XIDs of some GPUs. Thread-safe."""

    def __init__(self, session: Session, uuids: Sequence[GpuUuid]) -> None:
        self._session = session
        self._gpus = {uuid: _Events() for uuid in uuids}

    def poll(self, uuid: GpuUuid) -> list[Xid]:
        """Return the XIDs of a GPU since the last poll; raises NvmlError."""
        events, session, library = self._gpus[uuid], self._session, self._session.library
        with events.lock:
            self._register(uuid, events)
            while len(events.xids) < _MAX_XIDS:
                try:
                    event = session.call("", library.nvmlEventSetWait, events.handle, 0)
                except NvmlError as e:
                    if e.code in (pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_GPU_IS_LOST):
                        break  # no more events; reading the telemetry reports a lost GPU
                    raise
                if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                    events.xids.append(Xid(event.eventData, self._instance(uuid, event.gpuInstanceId)))
            found, events.xids = events.xids, []
            return found

    def _instance(self, uuid: GpuUuid, reported: int) -> int | None:
        """Return the instance of an event; without MIG none, though NVIDIA's mock reports 0 then."""
        if reported == NO_INSTANCE:
            return None
        session = self._session
        try:
            mode = session.ask(uuid, session.library.nvmlDeviceGetMigMode, session.handle(uuid))
        except NvmlError:  # the driver reports each event once, so the XID must not be lost
            return None
        return reported if mode is not None and mode[0] else None

    def forget(self, uuid: GpuUuid) -> None:
        """Register a GPU's events again at the next poll, because it was reset."""
        events = self._gpus[uuid]
        with events.lock:
            events.is_registered = False

    def is_reported(self, uuid: GpuUuid) -> bool:
        """Whether the driver reports this GPU's XIDs."""
        return self._gpus[uuid].is_reported

    def _register(self, uuid: GpuUuid, events: _Events) -> None:
        session, library, kind = self._session, self._session.library, pynvml.nvmlEventTypeXidCriticalError
        if events.generation != session.generation:
            generation = session.generation
            events.handle, events.generation = session.call(uuid, library.nvmlEventSetCreate), generation
            events.is_registered = False
        if events.is_registered:
            return
        try:
            session.call(uuid, library.nvmlDeviceRegisterEvents, session.handle(uuid), kind, events.handle)
            events.is_reported = True
        except NvmlError as e:
            if e.code != pynvml.NVML_ERROR_NOT_SUPPORTED:
                raise
        events.is_registered = True


_HOT = pynvml.nvmlClocksEventReasonHwThermalSlowdown
_WRITE_AFTER_S = 30.0
"""A recovery time that moved by less than this is not written again."""


def boot_id() -> str:
    """Return the ID of this boot of the node; empty if unknown."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    boot: str
    """Boot ID of the node. A reboot resets the GPUs, and the monotonic clock."""
    health: Health
    energy_mj: int | None = None
    """The GPU's energy counter; a smaller value later means that the driver was restarted."""


@dataclass
class _Gpu:
    """State of one GPU."""

    generation: int
    """Opening of the driver at the last update."""
    health: Health = Health()
    written: Health = Health()
    energy_mj: int | None = None
    last_xid: int | None = None
    """0 before the first XID; None if the driver reports none."""
    idle_w: float | None = None
    has_new_xid: bool = False


class HealthMonitor:
    """Health of a node's GPUs, saved in files so that it outlives the agent; it only reads them without `may_write`.

    `monotonic` returns seconds since the node started.
    """

    def __init__(
        self,
        session: Session,
        uuids: Sequence[GpuUuid],
        directory: Path,
        monotonic: Callable[[], float],
        *,
        may_write: bool = True,
    ) -> None:
        self._session, self._monotonic, self._directory, self._may_write = session, monotonic, directory, may_write
        self._boot = boot_id()
        self._gpus = {uuid: self._load(uuid) for uuid in uuids}
        self._xids = XidWatch(session, uuids)
        self._log = structlog.get_logger()

    def update(self, uuid: GpuUuid) -> tuple[str, Telemetry]:
        """Update a GPU's health; return why it gets no new work, or an empty text, and its telemetry.

        Raises NvmlError.
        """
        try:
            telemetry = read_telemetry(self._session, uuid)
            signals = self._signals(uuid, telemetry)
        except (GpuLostError, DriverGoneError) as e:
            self._advance(uuid, Signals(lost=str(e)))
            raise
        self._advance(uuid, signals)
        return self._gpus[uuid].health.problem, telemetry

    def after_reset(self, uuid: GpuUuid) -> None:
        """Handle a reset of the GPU by the agent: its event registration is gone."""
        self._xids.forget(uuid)

    def has_new_xid(self, uuid: GpuUuid) -> bool:
        """Whether there was an XID since the last `clear_xid`."""
        return self._gpus[uuid].has_new_xid

    def clear_xid(self, uuid: GpuUuid) -> None:
        """Call when the MPS clients were read; an earlier error must not lose an XID that ended them."""
        self._gpus[uuid].has_new_xid = False

    def counters(self, uuid: GpuUuid) -> dict[str, float]:
        """Return the last XID since the start of the agent, 0 if none; empty if the driver reports none."""
        last = self._gpus[uuid].last_xid
        return {} if last is None else {"DCGM_FI_DEV_XID_ERRORS": float(last)}

    def set_idle_power(self, uuid: GpuUuid, power_w: float | None) -> None:
        """Set the measured idle power: a GPU that reports full utilization at this power is stuck."""
        if power_w is not None:
            self._gpus[uuid].idle_w = power_w

    def _signals(self, uuid: GpuUuid, telemetry: Telemetry) -> Signals:
        gpu, xids = self._gpus[uuid], self._xids.poll(uuid)
        gpu.has_new_xid |= bool(xids)
        if self._xids.is_reported(uuid):
            gpu.last_xid = xids[-1].code if xids else gpu.last_xid or 0
        before_mj, now_mj = gpu.energy_mj, telemetry.energy_mj
        has_fallen = before_mj is not None and now_mj is not None and now_mj < before_mj
        was_reset = gpu.generation != self._session.generation or has_fallen
        gpu.generation, gpu.energy_mj = self._session.generation, now_mj
        reasons, util_percent = telemetry.clock_reasons, telemetry.gpu_util_percent
        is_motionless = None
        if gpu.idle_w is not None and telemetry.power_w is not None and util_percent is not None:
            is_idle_power = telemetry.power_w <= 1.05 * gpu.idle_w
            is_motionless = util_percent >= 99 and not telemetry.memory_util_percent and is_idle_power
        return Signals(
            xids=xids,
            was_reset=was_reset,
            ecc_uncorrectable=telemetry.ecc_uncorrectable,
            remap_pending=telemetry.remap_pending,
            remap_failed=telemetry.remap_failed,
            is_hot=None if reasons is None else bool(reasons & _HOT),
            is_motionless=is_motionless,
        )

    def _advance(self, uuid: GpuUuid, signals: Signals) -> None:
        gpu = self._gpus[uuid]
        now = gpu.health = next_health(gpu.health, signals, self._monotonic())
        was, moved_s = gpu.written, abs((now.until or 0.0) - (gpu.written.until or 0.0))
        is_changed = (was.problem, was.falls) != (now.problem, now.falls) or moved_s > _WRITE_AFTER_S
        if is_changed and self._may_write:
            self._save(uuid, gpu)

    def _path(self, uuid: GpuUuid) -> Path:
        return self._directory / f"{uuid}.health.json"

    def _load(self, uuid: GpuUuid) -> _Gpu:
        gpu = _Gpu(self._session.generation)
        try:
            saved = msgspec.json.decode(self._path(uuid).read_bytes(), type=_Saved)
        except (OSError, msgspec.DecodeError):
            return gpu
        if self._boot and saved.boot == self._boot:
            gpu.health = gpu.written = saved.health
            gpu.energy_mj = saved.energy_mj
        return gpu

    def _save(self, uuid: GpuUuid, gpu: _Gpu) -> None:
        saved = _Saved(boot=self._boot, health=gpu.health, energy_mj=gpu.energy_mj)
        try:
            write_file(self._path(uuid), msgspec.json.encode(saved))
            gpu.written = gpu.health
        except OSError as e:
            self._log.warning("health not saved", gpu=uuid, error=str(e))
