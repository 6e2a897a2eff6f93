"""A stateful NVML: the functions of `pynvml` over GPUs that live in memory.

It raises pynvml's own errors and returns pynvml's own structures and pointers, so that an adapter cannot tell. Its
behaviour is that of NVIDIA's documentation; what was never compared with hardware is said in docs/node-agent.md.
"""

import uuid as uuids
from collections.abc import Callable, Sequence
from ctypes import cast
from typing import Any

import pynvml

from carpool_deviceplugin.testing.nvml_activity_functions import ActivityFunctions
from carpool_deviceplugin.testing.nvml_calls import key_of
from carpool_deviceplugin.testing.nvml_event_functions import NONE, EventFunctions, EventSet
from carpool_deviceplugin.testing.nvml_gpus import FakeGpu, FakeProcess
from carpool_deviceplugin.testing.nvml_hardware import HARDWARE, Hardware
from carpool_deviceplugin.testing.nvml_mig import FakeCompute, FakeMig
from carpool_deviceplugin.testing.nvml_mig_functions import MigFunctions
from carpool_deviceplugin.testing.nvml_read_functions import ReadFunctions

_SAMPLING_S = 1 / 6
"""The driver's sampling period of utilization."""


def refuse(code: int) -> pynvml.NVMLError:
    """Return NVML's error of a code."""
    return pynvml.NVMLError(code)


class FakeNvml(ReadFunctions, ActivityFunctions, EventFunctions, MigFunctions):
    """The library, and the hands of whoever tests.

    Args:
        kinds: Short names out of HARDWARE, one for each GPU.
    """

    driver_version, cuda_version = "580.95.05", 13000

    def __init__(self, kinds: Sequence[str]) -> None:
        self.gpus = [self._made(index, HARDWARE[kind]) for index, kind in enumerate(kinds)]
        self.now_us = 1_700_000_000_000_000
        self.calls: list[str] = []
        self.init_error: int | None = None
        self._generation = 0
        """Of the driver; handles of earlier ones are dead."""
        self._open_generation: int | None = None
        self._objects: dict[int, tuple[int, Any]] = {}
        self._next_key = 0x1000
        self._failures: dict[str, list[int]] = {}
        self._before: Callable[[str], None] = lambda _: None

    @staticmethod
    def _made(index: int, hardware: Hardware) -> FakeGpu:
        uuid = f"GPU-{uuids.uuid5(uuids.NAMESPACE_OID, f'{index}/{hardware.product}')}"
        return FakeGpu(hardware, uuid, index, FakeMig(hardware))

    # What tests do.

    def start(self, gpu: int, pid: int, memory_mib: int, *, instance: int | None = None) -> FakeProcess:
        """A process opens a context."""
        process = FakeProcess(pid, memory_mib, instance)
        self.gpus[gpu].processes[pid] = process
        self.gpus[gpu].mig.busy = {p.instance for p in self.gpus[gpu].processes.values() if p.instance is not None}
        return process

    def end(self, gpu: int, pid: int) -> None:
        """A process ends."""
        del self.gpus[gpu].processes[pid]
        self.gpus[gpu].mig.busy = {p.instance for p in self.gpus[gpu].processes.values() if p.instance is not None}

    def advance(self, seconds: float) -> None:
        """Time passes; kernels run, energy flows, the driver samples."""
        left = seconds
        while left > 1e-9:
            slice_s = min(left, _SAMPLING_S)
            left -= slice_s
            self.now_us += round(slice_s * 1e6)
            for gpu in self.gpus:
                self._pass(gpu, slice_s)

    def _pass(self, gpu: FakeGpu, seconds: float) -> None:
        gpu.energy_mj += 1000 * gpu.power_w * seconds
        for place in (None, *gpu.mig.instances):
            mine = [p for p in gpu.processes.values() if place is None or p.instance == place]
            sm, dram = min(1.0, sum(p.sm for p in mine)), min(1.0, sum(p.dram for p in mine))
            total = gpu.integrals.setdefault(place, [0.0] * 6)
            for at, share in enumerate((1.0, min(1.0, 1.2 * sm), sm, 0.5 * sm, 0.6 * sm, dram)):
                total[at] += share * seconds
        for p in gpu.processes.values():
            if p.sm or p.dram:
                gpu.samples.append(
                    pynvml.c_nvmlProcessUtilizationSample_t(
                        pid=p.pid, timeStamp=self.now_us, smUtil=round(100 * p.sm), memUtil=round(100 * p.dram)
                    )
                )
        del gpu.samples[:-100]

    def raise_xid(self, gpu: int, xid: int, instance: int | None = None) -> None:
        """The driver reports an error to whoever registered for it."""
        for _, made in self._objects.values():
            if isinstance(made, EventSet) and gpu in made.gpus:
                made.events.append((gpu, xid, NONE if instance is None else instance))

    def _reset(self, gpu: FakeGpu) -> None:
        """A GPU is reset in place: whoever registered for its events hears no more of them."""
        for _, made in self._objects.values():
            if isinstance(made, EventSet):
                made.gpus.discard(gpu.index)

    def restart_driver(self) -> None:
        """The driver is unloaded and loaded again: every handle is dead, counters begin anew."""
        self._generation += 1
        for gpu in self.gpus:
            gpu.processes.clear()
            gpu.samples.clear()
            gpu.energy_mj, gpu.is_lost = 0.0, False
            gpu.mig.reset()

    def fail_next(self, function: str, code: int, times: int = 1) -> None:
        """Let the next calls of a function fail."""
        self._failures.setdefault(function, []).extend([code] * times)

    def before_each(self, hook: Callable[[str], None]) -> None:
        """Call `hook` with the name of each function that is called, before it is."""
        self._before = hook

    # How every function begins.

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        self._before(name)
        if self._failures.get(name):
            raise refuse(self._failures[name].pop(0))
        if self._open_generation != self._generation:
            raise refuse(pynvml.NVML_ERROR_UNINITIALIZED)

    def _gpu(self, name: str, handle: Any) -> FakeGpu:
        self._enter(name)
        found = self._object(handle)
        if isinstance(found, FakeCompute):
            found = next(
                g for g in self.gpus if any(found in made.compute.values() for made in g.mig.instances.values())
            )
        if not isinstance(found, FakeGpu):
            raise refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if found.is_lost:
            raise refuse(pynvml.NVML_ERROR_GPU_IS_LOST)
        return found

    def _pointer(self, made: Any, type_: Any) -> Any:
        self._next_key += 0x10
        self._objects[self._next_key] = (self._generation, made)
        return cast(self._next_key, type_)

    def _object(self, handle: Any) -> Any:
        generation, found = self._objects.get(key_of(handle), (None, None))
        if generation != self._generation:
            raise refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found

    # The library.

    def nvmlInit(self) -> None:
        self.calls.append("nvmlInit")
        if self.init_error is not None:
            raise refuse(self.init_error)
        self._open_generation = self._generation

    def nvmlShutdown(self) -> None:
        self._enter("nvmlShutdown")
        self._open_generation = None

    def nvmlSystemGetDriverVersion(self) -> str:
        self._enter("nvmlSystemGetDriverVersion")
        return self.driver_version

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        self._enter("nvmlSystemGetCudaDriverVersion")
        return self.cuda_version

    def nvmlDeviceGetCount(self) -> int:
        self._enter("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._enter("nvmlDeviceGetHandleByIndex")
        if not 0 <= index < len(self.gpus):
            raise refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if self.gpus[index].is_lost:
            raise refuse(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self._pointer(self.gpus[index], pynvml.c_nvmlDevice_t)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        self._enter("nvmlDeviceGetHandleByUUID")
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                if gpu.is_lost:
                    raise refuse(pynvml.NVML_ERROR_GPU_IS_LOST)
                return self._pointer(gpu, pynvml.c_nvmlDevice_t)
            for made in gpu.mig.instances.values():
                for compute in made.compute.values():
                    if compute.uuid == uuid:
                        return self._pointer(compute, pynvml.c_nvmlDevice_t)
        raise refuse(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        self._enter("nvmlDeviceGetUUID")
        found = self._object(handle)
        if isinstance(found, FakeGpu) and found.is_lost:
            raise refuse(pynvml.NVML_ERROR_GPU_IS_LOST)
        return str(found.uuid)
