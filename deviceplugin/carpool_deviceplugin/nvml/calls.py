"""Calls of NVML that say, when they fail, which call on which GPU, and what to do.

DeviceError
├── NvmlError            a call failed
│   ├── GpuLostError     the GPU has fallen off the bus, or needs a reset
│   ├── DriverGoneError  the driver was unloaded or restarted; a later call may find it again
│   └── NotPermittedError
└── (NOT_SUPPORTED is no error: `ask` returns None)
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.devices.port import NoDevicesError
from carpool_deviceplugin.nvml import advice
from carpool_deviceplugin.nvml.library import Handle, NvmlLibrary

T = TypeVar("T")


class NvmlError(DeviceError):
    """A call of NVML failed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class GpuLostError(NvmlError):
    """The GPU does not answer any more."""


class DriverGoneError(NvmlError):
    """The driver does not answer any more, or was restarted under us."""


class NotPermittedError(NvmlError):
    """The agent lacks a right."""


_GONE = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}
_LOST = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND}
_ABSENT = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
}
"""The GPU, or a driver older than the bindings, does not know it."""


class Session:
    """One use of the library. Thread-safe; survives a driver that goes away and comes back."""

    def __init__(self, library: NvmlLibrary) -> None:
        self.library = library
        self._lock = threading.Lock()
        self._handles: dict[str, Handle] = {}
        self._is_open = False
        self.openings = 0
        """How many times the driver was opened: what was registered with it must be registered again."""

    def open(self) -> None:
        """Open the driver; raises NoDevicesError with what to do."""
        try:
            self._reopen()
        except pynvml.NVMLError as e:
            raise NoDevicesError(advice.on_start(e.value, str(e))) from e

    def _reopen(self) -> None:
        with self._lock:
            if not self._is_open:
                self._handles.clear()
                self.library.nvmlInit()
                self._is_open = True
                self.openings += 1

    def close(self) -> None:
        """Close the driver; errors are of no interest any more."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
            if was_open:
                try:
                    self.library.nvmlShutdown()
                except pynvml.NVMLError as e:
                    if e.value not in _GONE | _LOST:
                        raise

    def call(self, gpu: str, function: Callable[..., T], *args: Any) -> T:
        """Call a function of the library.

        Args:
            gpu: For the message: the GPU's UUID, or empty.
            function: Of the library.
            args: What it takes.

        Raises:
            NvmlError: Or one of its kinds.
        """
        try:
            return function(*args)
        except pynvml.NVMLError as e:
            raise self._wrapped(gpu, function.__name__, e) from e

    def ask(self, gpu: str, function: Callable[..., T], *args: Any, absent: int | None = None) -> T | None:
        """Call a function; None where this GPU or driver does not support it, or says `absent`."""
        try:
            return function(*args)
        except pynvml.NVMLError as e:
            if e.value in _ABSENT or e.value == absent:
                return None
            raise self._wrapped(gpu, function.__name__, e) from e

    def handle(self, uuid: str) -> Handle:
        """Return a GPU's handle, opening the driver again where it had gone."""
        with self._lock:
            found = self._handles.get(uuid) if self._is_open else None
        if found is not None:
            return found
        try:
            self._reopen()
            found = self.library.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as e:
            raise self._wrapped(uuid, "nvmlDeviceGetHandleByUUID", e) from e
        with self._lock:
            self._handles[uuid] = found
        return found

    def forget(self, uuid: str) -> None:
        """Ask for a GPU's handle anew: it was reset."""
        with self._lock:
            self._handles.pop(uuid, None)

    def _wrapped(self, gpu: str, name: str, error: pynvml.NVMLError) -> NvmlError:
        code = error.value
        message = f"{f'GPU {gpu}' if gpu else 'NVML'}: {name} failed: {error}; {advice.on_call(code)}"
        if code in _GONE:
            self._forget()
            return DriverGoneError(message, code)
        if code in _LOST or (code == pynvml.NVML_ERROR_NOT_FOUND and name == "nvmlDeviceGetHandleByUUID"):
            with self._lock:
                self._handles.pop(gpu, None)
            return GpuLostError(message, code)
        return (NotPermittedError if code == pynvml.NVML_ERROR_NO_PERMISSION else NvmlError)(message, code)

    def _forget(self) -> None:
        with self._lock:
            was_open, self._is_open = self._is_open, False
            self._handles.clear()
            if was_open:
                try:
                    self.library.nvmlShutdown()
                except pynvml.NVMLError:
                    return  # it is gone already; this only balances the library's own count
