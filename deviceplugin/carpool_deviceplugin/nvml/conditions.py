"""What happened to each GPU, and whether new work may go there; kept over restarts of the agent."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pynvml
import structlog
from carpool_core.values import GpuUuid

from carpool_deviceplugin.nvml.calls import DriverGoneError, GpuLostError, Session
from carpool_deviceplugin.nvml.glances import Glances
from carpool_deviceplugin.nvml.health import Health, Signals, advance
from carpool_deviceplugin.nvml.values import Telemetry
from carpool_deviceplugin.nvml.xids import XidWatch

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


class Conditions:
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
        glances: Glances,
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
        self._openings = dict.fromkeys(uuids, session.openings)
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

    def begin_anew(self, uuid: GpuUuid) -> None:
        """The GPU was reset by us: what was registered with it is gone."""
        self._xids.forget(uuid)

    def had_xid(self, uuid: GpuUuid) -> bool:
        """Whether a look has brought an XID that nobody has taken in yet."""
        return uuid in self._struck

    def took_xid(self, uuid: GpuUuid) -> None:
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
        was_reset = self._openings[uuid] != self._session.openings or has_fallen
        self._openings[uuid], self._energy_mj[uuid] = self._session.openings, now_mj
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
        now = self._health[uuid] = advance(self._health[uuid], seen, self._monotonic())
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
