"""A GPU's telemetry, asked of the driver once for the measures and for the health that are looked at together."""

from collections.abc import Callable

from carpool_core.values import GpuUuid

from carpool_deviceplugin.nvml.calls import Session
from carpool_deviceplugin.nvml.reading import read_telemetry
from carpool_deviceplugin.nvml.values import Telemetry

_RECENT_S = 0.5


class Glances:
    """Reads telemetry, and remembers it for a moment.

    Args:
        session: The open library.
        monotonic: Seconds.
    """

    def __init__(self, session: Session, monotonic: Callable[[], float]) -> None:
        self._session, self._monotonic = session, monotonic
        self._last: dict[GpuUuid, tuple[float, int, Telemetry]] = {}

    def now(self, uuid: GpuUuid) -> Telemetry:
        """Ask the driver; raises NvmlError."""
        self._last.pop(uuid, None)
        found = read_telemetry(self._session, uuid)
        self._last[uuid] = (self._monotonic(), self._session.openings, found)
        return found

    def recent(self, uuid: GpuUuid) -> Telemetry:
        """Return what was read a moment ago, once; otherwise ask the driver. Raises NvmlError."""
        at, openings, found = self._last.pop(uuid, (0.0, -1, None))
        if found is None or openings != self._session.openings or self._monotonic() - at > _RECENT_S:
            return read_telemetry(self._session, uuid)
        return found
