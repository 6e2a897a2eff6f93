"""The driver's events: registered for, raised by tests, waited for."""

from dataclasses import dataclass, field
from typing import Any

import pynvml

from carpool_deviceplugin.testing.nvml_calls import Calls, key_of

NONE = 0xFFFFFFFF


@dataclass
class EventSet:
    """What somebody registered for, and what has happened since."""

    gpus: set[int] = field(default_factory=set)
    events: list[tuple[int, int, int]] = field(default_factory=list)


class EventFunctions(Calls):
    """The part of the fake library that reports XIDs."""

    def nvmlEventSetCreate(self) -> Any:
        self._enter("nvmlEventSetCreate")
        return self._pointer(EventSet(), pynvml.c_nvmlEventSet_t)

    def nvmlEventSetFree(self, events: Any) -> None:
        self._enter("nvmlEventSetFree")
        self._object(events)
        del self._objects[key_of(events)]

    def nvmlDeviceRegisterEvents(self, handle: Any, types: int, events: Any) -> None:
        gpu = self._gpu("nvmlDeviceRegisterEvents", handle)
        self._object(events).gpus.add(gpu.index)

    def nvmlEventSetWait(self, events: Any, timeout_ms: int) -> Any:
        self._enter("nvmlEventSetWait")
        waiting = self._object(events).events
        if not waiting:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        gpu, xid, instance = waiting.pop(0)
        return pynvml.c_nvmlEventData_t(
            device=self._pointer(self.gpus[gpu], pynvml.c_nvmlDevice_t),
            eventType=pynvml.nvmlEventTypeXidCriticalError,
            eventData=xid,
            gpuInstanceId=instance,
            computeInstanceId=NONE,
        )
