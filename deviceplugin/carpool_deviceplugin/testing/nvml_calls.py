"""What every part of the fake library needs of the whole."""

from abc import ABC, abstractmethod
from ctypes import c_void_p, cast
from typing import Any

from carpool_deviceplugin.testing.nvml_gpus import FakeGpu


def key_of(handle: Any) -> int:
    """Return the number behind an opaque pointer."""
    return cast(handle, c_void_p).value or 0


class Calls(ABC):
    """How every function begins and ends."""

    gpus: list[FakeGpu]
    _objects: dict[int, tuple[int, Any]]

    @abstractmethod
    def _enter(self, name: str) -> None: ...
    @abstractmethod
    def _gpu(self, name: str, handle: Any) -> FakeGpu: ...
    @abstractmethod
    def _pointer(self, made: Any, type_: Any) -> Any: ...
    @abstractmethod
    def _object(self, handle: Any) -> Any: ...
    @abstractmethod
    def _reset(self, gpu: FakeGpu) -> None: ...
