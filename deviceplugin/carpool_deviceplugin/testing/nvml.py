"""A stateful NVML: the functions of `pynvml` over GPUs in memory.

It raises pynvml's errors and returns pynvml's structures and pointers. It behaves as NVIDIA documents it;
docs/node-agent.md lists what was never compared with hardware.
"""

import functools
import uuid as uuids
from collections.abc import Callable, Sequence
from ctypes import c_void_p, cast
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pynvml
from carpool_core.values import MIB

from carpool_deviceplugin.testing.gpus import HARDWARE, FakeCompute, FakeGpu, FakeMig, FakeProcess, Hardware, require

T = TypeVar("T")


def key_of(handle: Any) -> int:
    """Return the number behind an opaque pointer."""
    return c_void_p.from_buffer(handle).value or 0


NONE = 0xFFFFFFFF


@dataclass
class EventSet:
    """A registered event set and its pending events."""

    gpus: set[int] = field(default_factory=set)
    events: list[tuple[int, int, int]] = field(default_factory=list)


_SAMPLING_S = 1 / 6
"""The driver's sampling period of utilization."""


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that it first records the call, and fails where a test wants it."""

    @functools.wraps(function)
    def call(self: "FakeNvml", *args: Any, **kwargs: Any) -> Any:
        self._enter(function.__name__)
        return function(self, *args, **kwargs)

    return call


def _recording(library: type[T]) -> type[T]:
    """Let all functions of the library record their calls."""
    for name, function in list(vars(library).items()):
        if name.startswith("nvml"):
            setattr(library, name, _recorded(function))
    return library


@_recording
class FakeNvml:
    """The library, with methods that tests use to change the node.

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
        """Number of restarts of the driver; handles of earlier ones are invalid."""
        self._open_generation: int | None = None
        self._objects: dict[int, tuple[int, Any]] = {}
        self._next_key = 0x1000
        self._failures: dict[str, list[int]] = {}
        self._before: Callable[[str], None] = lambda _: None

    @staticmethod
    def _made(index: int, hardware: Hardware) -> FakeGpu:
        uuid = f"GPU-{uuids.uuid5(uuids.NAMESPACE_OID, f'{index}/{hardware.product}')}"
        return FakeGpu(hardware, uuid, index, FakeMig(hardware))

    @property
    def is_open(self) -> bool:
        """Whether a program holds handles of the driver."""
        return self._open_generation is not None

    # What tests do.

    def start(self, gpu: int, pid: int, memory_mib: int, *, instance: int | None = None) -> FakeProcess:
        """A process opens a context."""
        self.gpus[gpu].processes[pid] = process = FakeProcess(pid, memory_mib, instance)
        return process

    def end(self, gpu: int, pid: int) -> None:
        """A process ends."""
        del self.gpus[gpu].processes[pid]

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
        gpu.samples.append((self.now_us, {p.pid: (p.sm, p.dram) for p in gpu.processes.values() if p.sm or p.dram}))

    def raise_xid(self, gpu: int, xid: int, instance: int = NONE) -> None:
        """The driver reports an XID to registered event sets, with the MIG instance that had it."""
        for _, made in self._objects.values():
            if isinstance(made, EventSet) and gpu in made.gpus:
                made.events.append((gpu, xid, instance))

    def _reset(self, gpu: FakeGpu) -> None:
        """A GPU is reset in place: its event registrations end."""
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

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        if name == "nvmlInit":
            return
        self._before(name)
        if self._failures.get(name):
            raise pynvml.NVMLError(self._failures[name].pop(0))
        if self._open_generation != self._generation:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _gpu(self, handle: Any) -> FakeGpu:
        found = self._object(handle)
        if isinstance(found, FakeCompute):
            found = next(
                g for g in self.gpus if any(found in made.compute.values() for made in g.mig.instances.values())
            )
        if not isinstance(found, FakeGpu):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        require(not found.is_lost, pynvml.NVML_ERROR_GPU_IS_LOST)
        return found

    def _pointer(self, made: Any, type_: Any) -> Any:
        self._next_key += 0x10
        self._objects[self._next_key] = (self._generation, made)
        return cast(self._next_key, type_)

    def _object(self, handle: Any) -> Any:
        generation, found = self._objects.get(key_of(handle), (None, None))
        require(generation == self._generation, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found

    # The library.

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self._open_generation = self._generation

    def nvmlShutdown(self) -> None:
        self._open_generation = None

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver_version

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda_version

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        require(0 <= index < len(self.gpus), pynvml.NVML_ERROR_INVALID_ARGUMENT)
        require(not self.gpus[index].is_lost, pynvml.NVML_ERROR_GPU_IS_LOST)
        return self._pointer(self.gpus[index], pynvml.c_nvmlDevice_t)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                require(not gpu.is_lost, pynvml.NVML_ERROR_GPU_IS_LOST)
                return self._pointer(gpu, pynvml.c_nvmlDevice_t)
            for made in gpu.mig.instances.values():
                for compute in made.compute.values():
                    if compute.uuid == uuid:
                        return self._pointer(compute, pynvml.c_nvmlDevice_t)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        found = self._object(handle)
        require(not (isinstance(found, FakeGpu) and found.is_lost), pynvml.NVML_ERROR_GPU_IS_LOST)
        return str(found.uuid)

    # Readings.

    def nvmlDeviceGetIndex(self, handle: Any) -> int:
        return self._gpu(handle).index

    def nvmlDeviceGetMinorNumber(self, handle: Any) -> int:
        return self._gpu(handle).index

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return self._gpu(handle).hardware.product

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        gpu = self._gpu(handle)
        found = self._object(handle)
        if isinstance(found, FakeCompute):
            return _memory_of_part(gpu, found)
        total, reserved = gpu.hardware.memory_mib * MIB, gpu.hardware.reserved_mib * MIB
        used = gpu.used_mib * MIB
        if version is None:  # the first version counts what is reserved as used
            return pynvml.c_nvmlMemory_t(total=total, free=total - used - reserved, used=used + reserved)
        return pynvml.c_nvmlMemory_v2_t(
            version=version, total=total, reserved=reserved, free=total - used - reserved, used=used
        )

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        return self._gpu(handle).hardware.compute_capability

    def _figure(self, handle: Any, name: str) -> int:
        found: int = getattr(self._gpu(handle).hardware.figures, name)
        require(found, pynvml.NVML_ERROR_NOT_SUPPORTED)
        return found

    def nvmlDeviceGetNumGpuCores(self, handle: Any) -> int:
        return self._figure(handle, "cuda_cores")

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, type_: int) -> int:
        return self._figure(handle, "sm_clock_mhz" if type_ == pynvml.NVML_CLOCK_SM else "memory_clock_mhz")

    def nvmlDeviceGetMemoryBusWidth(self, handle: Any) -> int:
        return self._figure(handle, "memory_bus_bits")

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Any) -> int:
        return 1000 * self._figure(handle, "power_limit_w")

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        gpu = self._gpu(handle)
        return pynvml.nvmlPciInfo_t(busId=f"00000000:{0x10 + gpu.index:02X}:00.0".encode(), bus=0x10 + gpu.index)

    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        return self._gpu(handle).compute_mode

    def nvmlDeviceGetPersistenceMode(self, handle: Any) -> int:
        return int(self._gpu(handle).is_persistent)

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:
        gpu = self._gpu(handle)
        require(gpu.hardware.nvlinks, pynvml.NVML_ERROR_NOT_SUPPORTED)
        require(link < gpu.hardware.nvlinks, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(len(self.gpus) > 1)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Any, link: int) -> Any:
        gpu = self._gpu(handle)
        others = [g for g in self.gpus if g is not gpu]
        return pynvml.nvmlPciInfo_t(busId=f"00000000:{0x10 + others[link % len(others)].index:02X}:00.0".encode())

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        gpu = self._gpu(handle)
        return [
            pynvml.nvmlFriendlyObject(
                {
                    "pid": p.pid,
                    "usedGpuMemory": p.memory_mib * MIB,
                    "gpuInstanceId": NONE if p.instance is None else p.instance,
                    "computeInstanceId": NONE if p.instance is None else 0,
                }
            )
            for p in gpu.processes.values()
        ]

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any) -> list[Any]:
        return [pynvml.nvmlFriendlyObject({"pid": pid}) for pid in self._gpu(handle).graphics_pids]

    def nvmlDeviceGetProcessUtilization(self, handle: Any, since_us: int) -> list[Any]:
        gpu = self._gpu(handle)
        require(not gpu.mig.is_enabled, pynvml.NVML_ERROR_NOT_SUPPORTED)
        totals: dict[int, list[float]] = {}
        periods = 0
        for at_us, shares in reversed(gpu.samples):
            if at_us <= since_us:
                break
            periods += 1
            for pid, (sm, dram) in shares.items():
                total = totals.setdefault(pid, [at_us, 0.0, 0.0])
                total[1] += sm
                total[2] += dram
        require(totals, pynvml.NVML_ERROR_NOT_FOUND)
        found = [
            pynvml.c_nvmlProcessUtilizationSample_t(
                pid, int(at_us), round(100 * sm / periods), round(100 * dram / periods)
            )
            for pid, (at_us, sm, dram) in totals.items()
        ]
        return [*found, pynvml.c_nvmlProcessUtilizationSample_t()]  # an unfilled slot

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        gpu = self._gpu(handle)
        require(not gpu.mig.is_enabled, pynvml.NVML_ERROR_NOT_SUPPORTED)
        busy = min(1.0, sum(p.sm for p in gpu.processes.values()))
        memory = min(1.0, sum(p.dram for p in gpu.processes.values()))
        return pynvml.c_nvmlUtilization_t(gpu=round(100 * busy), memory=round(100 * memory))

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return round(1000 * self._gpu(handle).power_w)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        return 1000 * self._gpu(handle).hardware.power_limit_w

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        return int(self._gpu(handle).energy_mj)

    def nvmlDeviceGetClockInfo(self, handle: Any, type_: int) -> int:
        self._gpu(handle)
        return 1410 if type_ == pynvml.NVML_CLOCK_SM else 1215

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return self._gpu(handle).temperature_c

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self._gpu(handle).clock_reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, error: int, counter: int) -> int:
        gpu = self._gpu(handle)
        require(gpu.hardware.has_ecc, pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.ecc_uncorrectable if error == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else 0

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, int, int, int]:
        gpu = self._gpu(handle)
        require(gpu.hardware.has_row_remap, pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.remap

    # GPM samples.

    def nvmlGpmQueryDeviceSupport(self, handle: Any) -> Any:
        gpu = self._gpu(handle)
        return pynvml.c_nvmlGpmSupport_t(version=1, isSupportedDevice=int(gpu.hardware.has_gpm))

    def nvmlGpmSampleAlloc(self) -> Any:
        return self._pointer([0.0] * 6, pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self._object(sample)
        del self._objects[key_of(sample)]

    def nvmlGpmSampleGet(self, handle: Any, sample: Any) -> Any:
        return self._gpm(self._gpu(handle), None, sample)

    def nvmlGpmMigSampleGet(self, handle: Any, instance: int, sample: Any) -> Any:
        gpu = self._gpu(handle)
        require(instance in gpu.mig.instances, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._gpm(gpu, instance, sample)

    def _gpm(self, gpu: FakeGpu, instance: int | None, sample: Any) -> Any:
        require(gpu.hardware.has_gpm, pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._object(sample)[:] = gpu.integrals.get(instance, [0.0] * 6)
        return sample

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        before, now = self._object(request.sample1), self._object(request.sample2)
        places = {
            pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: 1,
            pynvml.NVML_GPM_METRIC_SM_UTIL: 2,
            pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: 3,
            pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 4,
            pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 5,
        }
        elapsed = now[0] - before[0]
        for i in range(request.numMetrics):
            at = places[request.metrics[i].metricId]
            request.metrics[i].nvmlReturn = pynvml.NVML_SUCCESS if elapsed > 0 else pynvml.NVML_ERROR_NO_DATA
            request.metrics[i].value = 100 * (now[at] - before[at]) / elapsed if elapsed > 0 else 0.0
        return request

    # XIDs.

    def nvmlEventSetCreate(self) -> Any:
        return self._pointer(EventSet(), pynvml.c_nvmlEventSet_t)

    def nvmlEventSetFree(self, events: Any) -> None:
        self._object(events)
        del self._objects[key_of(events)]

    def nvmlDeviceRegisterEvents(self, handle: Any, types: int, events: Any) -> None:
        gpu = self._gpu(handle)
        self._object(events).gpus.add(gpu.index)

    def nvmlEventSetWait(self, events: Any, timeout_ms: int) -> Any:
        waiting = self._object(events).events
        require(waiting, pynvml.NVML_ERROR_TIMEOUT)
        gpu, xid, instance = waiting.pop(0)
        return pynvml.c_nvmlEventData_t(
            device=self._pointer(self.gpus[gpu], pynvml.c_nvmlDevice_t),
            eventType=pynvml.nvmlEventTypeXidCriticalError,
            eventData=xid,
            gpuInstanceId=instance,
            computeInstanceId=NONE,
        )

    # MIG.

    def _mig(self, handle: Any, *, enabled: bool = True) -> tuple[FakeGpu, FakeMig]:
        gpu = self._gpu(handle)
        require(gpu.mig.table is not None and (gpu.mig.is_enabled or not enabled), pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu, gpu.mig

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        _, mig = self._mig(handle, enabled=False)
        return [int(mig.is_enabled), int(mig.is_pending)]

    def nvmlDeviceSetMigMode(self, handle: Any, mode: int) -> int:
        gpu, mig = self._mig(handle, enabled=False)
        was = mig.is_enabled
        status = mig.switch(bool(mode), in_use=bool(gpu.processes))
        if mig.is_enabled != was and gpu.hardware.mig_needs_reset:
            self._reset(gpu)
        return status

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        gpu = self._gpu(handle)
        return gpu.mig.most if gpu.mig.is_enabled else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        _, mig = self._mig(handle)
        return self._pointer(mig.device_at(index), pynvml.c_nvmlDevice_t)

    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int:
        return int(self._object(handle).instance_id)

    def nvmlDeviceGetComputeInstanceId(self, handle: Any) -> int:
        return int(self._object(handle).id)

    def nvmlDeviceGetGpuInstanceProfileInfo(self, handle: Any, profile: int, version: int = 2) -> Any:
        _, mig = self._mig(handle, enabled=False)
        return mig.profile_info(profile)

    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, handle: Any, profile_id: int, placements: Any, count: Any
    ) -> int:
        _, mig = self._mig(handle, enabled=False)
        profile = mig.profile(profile_id)
        found = [pynvml.c_nvmlGpuInstancePlacement_t(start, profile.memory_slices) for start in profile.starts]
        return _fill(placements, count, found)

    def nvmlDeviceGetGpuInstances(self, handle: Any, profile_id: int, instances: Any, count: Any) -> int:
        _, mig = self._mig(handle)
        found = [made for made in mig.instances.values() if made.profile.id == profile_id]
        return _fill(instances, count, [self._pointer((mig, made), pynvml.c_nvmlGpuInstance_t) for made in found])

    def nvmlGpuInstanceGetInfo(self, instance: Any) -> Any:
        mig, made = self._object(instance)
        mig.must_exist(made)
        place = pynvml.c_nvmlGpuInstancePlacement_t(made.start, made.profile.memory_slices)
        return pynvml.c_nvmlGpuInstanceInfo_t(id=made.id, profileId=made.profile.id, placement=place)

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, handle: Any, profile_id: int, placement: Any) -> Any:
        _, mig = self._mig(handle)
        made = mig.create(profile_id, placement._obj.start, placement._obj.size)
        return self._pointer((mig, made), pynvml.c_nvmlGpuInstance_t)

    def nvmlGpuInstanceDestroy(self, instance: Any) -> int:
        mig, made = self._object(instance)
        mig.destroy(made)
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, instance: Any, profile: int, engine_profile: int, version: int = 2
    ) -> Any:
        mig, made = self._object(instance)
        return mig.compute_profile_info(made, profile)

    def nvmlGpuInstanceCreateComputeInstance(self, instance: Any, profile_id: int) -> Any:
        mig, made = self._object(instance)
        return self._pointer((mig, made, mig.create_compute(made, profile_id)), pynvml.c_nvmlComputeInstance_t)

    def nvmlGpuInstanceGetComputeInstances(self, instance: Any, profile_id: int, instances: Any, count: Any) -> int:
        mig, made = self._object(instance)
        found = [c for c in made.compute.values() if c.profile_id == profile_id]
        return _fill(instances, count, [self._pointer((mig, made, c), pynvml.c_nvmlComputeInstance_t) for c in found])

    def nvmlComputeInstanceDestroy(self, instance: Any) -> int:
        mig, made, compute = self._object(instance)
        users = [p for gpu in self.gpus if gpu.mig is mig for p in gpu.processes.values() if p.instance == made.id]
        require(not users, pynvml.NVML_ERROR_IN_USE)
        mig.destroy_compute(made, compute)
        return int(pynvml.NVML_SUCCESS)


def _memory_of_part(gpu: FakeGpu, compute: FakeCompute) -> Any:
    total = gpu.mig.instances[compute.instance_id].profile.memory_mib * MIB
    used = sum(p.memory_mib for p in gpu.processes.values() if p.instance == compute.instance_id) * MIB
    return pynvml.c_nvmlMemory_t(total=total, free=total - used, used=used)


def _fill(array: Any, count: Any, items: Sequence[Any]) -> int:
    for i, item in enumerate(items):
        array[i] = item
    count._obj.value = len(items)
    return int(pynvml.NVML_SUCCESS)
