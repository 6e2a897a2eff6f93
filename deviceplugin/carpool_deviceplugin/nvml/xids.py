"""XIDs as events of the driver: registered once, looked at without waiting, registered again after a restart."""

import threading
from collections.abc import Sequence

import pynvml
from carpool_core.values import GpuUuid

from carpool_deviceplugin.nvml.calls import NvmlError, Session
from carpool_deviceplugin.nvml.library import Handle

_MOST = 256
"""XIDs taken at one look: a storm of them is no reason to look no further."""


class XidWatch:
    """Collects the XIDs of some GPUs; thread-safe."""

    def __init__(self, session: Session, uuids: Sequence[GpuUuid]) -> None:
        self._session, self._uuids = session, uuids
        self._lock = threading.Lock()
        self._events: Handle | None = None
        self._opening = -1
        self._watched: set[GpuUuid] = set()
        self._reported: set[GpuUuid] = set()
        self._seen: dict[GpuUuid, list[int]] = {uuid: [] for uuid in uuids}

    def seen(self, uuid: GpuUuid) -> list[int]:
        """Return the XIDs of a GPU since this was last asked of it; raises NvmlError."""
        with self._lock:
            self._register(uuid)
            self._collect()
            found, self._seen[uuid] = self._seen[uuid], []
            return found

    def forget(self, uuid: GpuUuid) -> None:
        """Register a GPU's events again at the next look: it was reset."""
        with self._lock:
            self._watched.discard(uuid)

    def is_watched(self, uuid: GpuUuid) -> bool:
        """Whether the driver reports this GPU's XIDs."""
        return uuid in self._reported

    def _register(self, uuid: GpuUuid) -> None:
        session, library = self._session, self._session.library
        if self._opening != session.openings:
            self._events, self._opening = session.call("", library.nvmlEventSetCreate), session.openings
            self._watched = set()
        if uuid not in self._watched:
            if self._can_report(uuid):
                self._reported.add(uuid)
            self._watched.add(uuid)

    def _can_report(self, uuid: GpuUuid) -> bool:
        session, kind = self._session, pynvml.nvmlEventTypeXidCriticalError
        try:
            session.call(uuid, session.library.nvmlDeviceRegisterEvents, session.handle(uuid), kind, self._events)
        except NvmlError as e:
            if e.code == pynvml.NVML_ERROR_NOT_SUPPORTED:
                return False
            raise
        return True

    def _collect(self) -> None:
        session, library = self._session, self._session.library
        for _ in range(_MOST):
            try:
                event = session.call("", library.nvmlEventSetWait, self._events, 0)
            except NvmlError as e:
                if e.code in (pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_GPU_IS_LOST):
                    return  # nothing more; a GPU that is lost is told by its own reading
                raise
            uuid = GpuUuid(session.call("", library.nvmlDeviceGetUUID, event.device))
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError and uuid in self._seen:
                self._seen[uuid] = [*self._seen[uuid], event.eventData][-_MOST:]
