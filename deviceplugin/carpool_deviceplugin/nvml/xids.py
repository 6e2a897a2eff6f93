"""XIDs as events of the driver: registered once, looked at without waiting, registered again after a restart."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pynvml
from carpool_core.values import GpuUuid

from carpool_deviceplugin.nvml.calls import NvmlError, Session
from carpool_deviceplugin.nvml.library import Handle

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
        if gpu.opening != session.openings:
            opening = session.openings
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
