"""Port to NVML: the functions of `pynvml` that the agent calls, a session, and readers of GPUs."""

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec
import pynvml
from carpool_core.products import UNIFIED_MEMORY, unified_memory_problem
from carpool_core.resources.node import NO_FIGURES, NvmlFigures
from carpool_core.values import MIB, GpuUuid, SharingMode

from carpool_deviceplugin.gpu import DeviceError, NoDevicesError
from carpool_deviceplugin.preflight import Outcome, Verdict

Handle = Any
"""Opaque handle of a device, MIG device, GPU instance, compute instance, event set or GPM sample."""


class NvmlLibrary(Protocol):
    """The functions of NVML that the agent calls. All raise `pynvml.NVMLError`; units are NVML's.

    Names, arguments and structures are those of `nvidia-ml-py`, so that its module `pynvml` implements this protocol.
    """

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlSystemGetCudaDriverVersion(self) -> int: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle: ...
    def nvmlDeviceGetUUID(self, handle: Handle) -> str: ...
    def nvmlDeviceGetIndex(self, handle: Handle) -> int: ...
    def nvmlDeviceGetMinorNumber(self, handle: Handle) -> int: ...
    def nvmlDeviceGetName(self, handle: Handle) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> tuple[int, int]: ...
    def nvmlDeviceGetNumGpuCores(self, handle: Handle) -> int: ...
    def nvmlDeviceGetMaxClockInfo(self, handle: Handle, type_: int) -> int: ...
    def nvmlDeviceGetMemoryBusWidth(self, handle: Handle) -> int: ...
    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Handle) -> int: ...
    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any: ...
    def nvmlDeviceGetComputeMode(self, handle: Handle) -> int: ...
    def nvmlDeviceGetPersistenceMode(self, handle: Handle) -> int: ...
    def nvmlDeviceGetNvLinkState(self, handle: Handle, link: int) -> int: ...
    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Handle, link: int) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> list[Any]: ...
    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Handle) -> list[Any]: ...
    def nvmlDeviceGetProcessUtilization(self, handle: Handle, since_us: int) -> list[Any]: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int: ...
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle) -> int: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Handle) -> int: ...
    def nvmlDeviceGetClockInfo(self, handle: Handle, type_: int) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int: ...
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle) -> int: ...
    def nvmlDeviceGetTotalEccErrors(self, handle: Handle, error: int, counter: int) -> int: ...
    def nvmlDeviceGetRemappedRows(self, handle: Handle) -> tuple[int, int, int, int]: ...
    def nvmlEventSetCreate(self) -> Handle: ...
    def nvmlEventSetFree(self, events: Handle) -> None: ...
    def nvmlDeviceRegisterEvents(self, handle: Handle, types: int, events: Handle) -> None: ...
    def nvmlEventSetWait(self, events: Handle, timeout_ms: int) -> Any: ...
    def nvmlGpmQueryDeviceSupport(self, handle: Handle) -> Any: ...
    def nvmlGpmSampleAlloc(self) -> Handle: ...
    def nvmlGpmSampleFree(self, sample: Handle) -> None: ...
    def nvmlGpmSampleGet(self, handle: Handle, sample: Handle) -> Handle: ...
    def nvmlGpmMigSampleGet(self, handle: Handle, instance: int, sample: Handle) -> Handle: ...
    def nvmlGpmMetricsGet(self, request: Any) -> Any: ...
    def nvmlDeviceGetMigMode(self, handle: Handle) -> list[int]: ...
    def nvmlDeviceSetMigMode(self, handle: Handle, mode: int) -> int: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int) -> Handle: ...
    def nvmlDeviceGetGpuInstanceId(self, handle: Handle) -> int: ...
    def nvmlDeviceGetComputeInstanceId(self, handle: Handle) -> int: ...
    def nvmlDeviceGetGpuInstanceProfileInfo(self, handle: Handle, profile: int, version: int = 2) -> Any: ...
    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, handle: Handle, profile_id: int, placements: Any, count: Any
    ) -> int: ...
    def nvmlDeviceGetGpuInstances(self, handle: Handle, profile_id: int, instances: Any, count: Any) -> int: ...
    def nvmlGpuInstanceGetInfo(self, instance: Handle) -> Any: ...
    def nvmlDeviceCreateGpuInstanceWithPlacement(self, handle: Handle, profile_id: int, placement: Any) -> Handle: ...
    def nvmlGpuInstanceDestroy(self, instance: Handle) -> int: ...
    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, instance: Handle, profile: int, engine_profile: int, version: int = 2
    ) -> Any: ...
    def nvmlGpuInstanceCreateComputeInstance(self, instance: Handle, profile_id: int) -> Handle: ...
    def nvmlGpuInstanceGetComputeInstances(
        self, instance: Handle, profile_id: int, instances: Any, count: Any
    ) -> int: ...
    def nvmlComputeInstanceDestroy(self, instance: Handle) -> int: ...


def load_nvml() -> NvmlLibrary:
    """Return the bindings of the installed library. `nvmlInit` loads `libnvidia-ml.so.1`."""
    return cast("NvmlLibrary", pynvml)


_ADVICE = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "it has fallen off the bus: check dmesg for its last XID, and reset or replace it",
    pynvml.NVML_ERROR_RESET_REQUIRED: "drain it and run nvidia-smi --gpu-reset",
    pynvml.NVML_ERROR_UNINITIALIZED: "the agent opens the driver again at its next read",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the driver (modprobe nvidia); the agent tries again",
    pynvml.NVML_ERROR_NO_PERMISSION: "run the agent as root with the device nodes and, for MIG, CAP_SYS_ADMIN",
    pynvml.NVML_ERROR_IN_USE: "something still uses it: end its processes, DCGM and nvidia-persistenced among them",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library and kernel module are of different versions: restart the node",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "no room for it at its placement: plan again",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "check its power cables",
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: "its flash memory is damaged: have it flashed anew or replaced",
    pynvml.NVML_ERROR_IRQ_ISSUE: "its interrupts do not arrive: check dmesg, the firmware's settings and its slot",
    pynvml.NVML_ERROR_OPERATING_SYSTEM: "the node's kernel or a cgroup forbids it: give the agent /dev/nvidia*",
    pynvml.NVML_ERROR_MEMORY: "the node has no memory left: free some",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "check that lspci still lists it; reset it, or restart the node",
    pynvml.NVML_ERROR_TIMEOUT: "the driver took too long: the agent asks again; if it stays so, restart the node",
    pynvml.NVML_ERROR_NOT_READY: "the agent asks again; if it stays so, restart the node",
}

_NO_START = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "none",
        "libnvidia-ml.so.1",
        "install NVIDIA's driver on the node; in a container, run it with the nvidia runtime class (or the driver's "
        "libraries mounted)",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: ("it not loaded", "NVIDIA's kernel module", "run modprobe nvidia"),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "different ones",
        "library and kernel module of one version",
        "the driver was updated under a running kernel module; restart the node",
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "no permission",
        "to be allowed to talk to the driver",
        "give the container /dev/nvidiactl and /dev/nvidia* and run it as root",
    ),
}
"""Found, needed and what to do, by the error of `nvmlInit`."""

_KNOWN_CODES = {code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_")}


def _advice(code: int) -> str:
    """Return what to do after an error, also for codes that the bindings do not know."""
    if code in _ADVICE:
        return _ADVICE[code]
    where = "check dmesg and nvidia-smi -q on the node"
    if code not in _KNOWN_CODES:
        return f"this code is newer than the agent, nvmlReturn_t in nvml.h names it: update the agent, and {where}"
    return f"{where}; if it stays so, restart the node, and report both"


T = TypeVar("T")


class UnusableDriverError(NoDevicesError):
    """The driver or its GPUs cannot be used; `row` is the row of the preflight."""

    def __init__(self, found: str, needed: str, advice: str, *, name: str = "driver") -> None:
        self.row = Outcome(name=name, verdict=Verdict.FAILED, found=found, needed=needed, advice=advice)
        super().__init__(str(self.row))


class NvmlError(DeviceError):
    """A call of NVML failed.

    NvmlError
    ├── GpuLostError
    ├── DriverGoneError
    └── SuspendedError
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class GpuLostError(NvmlError):
    """The GPU does not answer any more."""


class DriverGoneError(NvmlError):
    """The driver does not answer any more, or was restarted."""


class SuspendedError(NvmlError):
    """The agent keeps the driver closed for now."""


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
"""The GPU or its driver does not support the call."""


MIN_DRIVER = 510
"""Older drivers do not list a GPU's processes as NVIDIA's bindings read them."""


class Session:
    """An opened NVML. Thread-safe; after a restart of the driver it opens the driver again."""

    def __init__(self, library: NvmlLibrary) -> None:
        self.library = library
        self._lock = threading.Lock()
        self._handles: dict[str, Handle] = {}
        self._is_open = False
        self.generation = 0
        """Number of times that the driver was opened. Registrations are valid for one generation."""
        self.suspended = ""
        """Why the driver stays closed; empty if it is opened when needed."""

    def open(self) -> None:
        """Open the driver; raises UnusableDriverError."""
        try:
            self._reopen()
        except pynvml.NVMLError as e:
            raise UnusableDriverError(*_NO_START.get(e.value, (str(e), "NVML to start", _advice(e.value)))) from e
        driver = self.ask("", self.library.nvmlSystemGetDriverVersion) or ""
        major = driver.partition(".")[0]
        if major.isdecimal() and int(major) < MIN_DRIVER:
            raise UnusableDriverError(driver, f"driver {MIN_DRIVER} or newer", "update the driver")

    def _reopen(self) -> None:
        with self._lock:
            if self.suspended:
                raise SuspendedError(self.suspended, pynvml.NVML_ERROR_UNINITIALIZED)
            if not self._is_open:
                self._handles.clear()
                self.library.nvmlInit()
                self._is_open = True
                self.generation += 1

    def close(self) -> None:
        """Close the driver. Errors are ignored: a lost driver is closed already."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
            self._handles.clear()
            if was_open:
                with suppress(pynvml.NVMLError):
                    self.library.nvmlShutdown()

    def suspend(self, reason: str) -> None:
        """Close the driver, and keep it closed while there is a reason; an empty one lets the next call open it."""
        self.suspended = reason
        if reason:
            self.close()

    def call(self, gpu: str, function: Callable[..., T], *args: Any) -> T:
        """Call a function of the library.

        Args:
            gpu: UUID of the GPU for the error message, or empty.
            function: The function.
            args: Its arguments.

        Raises:
            NvmlError: Or a subclass.
        """
        try:
            return function(*args)
        except pynvml.NVMLError as e:
            raise self._wrapped(gpu, function.__name__, e) from e

    def ask(self, gpu: str, function: Callable[..., T], *args: Any, absent: int | None = None) -> T | None:
        """Call a function; return None if the GPU or driver does not support it, or returns the code `absent`."""
        try:
            return function(*args)
        except pynvml.NVMLError as e:
            if e.value in _ABSENT or e.value == absent:
                return None
            raise self._wrapped(gpu, function.__name__, e) from e

    def handle(self, uuid: str) -> Handle:
        """Return a GPU's handle; opens the driver again if it was restarted."""
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
        """Request a new handle at the next use, because the GPU was reset."""
        with self._lock:
            self._handles.pop(uuid, None)

    def _wrapped(self, gpu: str, name: str, error: pynvml.NVMLError) -> NvmlError:
        code = error.value
        message = f"{f'GPU {gpu}' if gpu else 'NVML'}: {name} failed: {error}; {_advice(code)}"
        if code in _GONE:
            self.close()
            return DriverGoneError(message, code)
        if code in _LOST or (code == pynvml.NVML_ERROR_NOT_FOUND and name == "nvmlDeviceGetHandleByUUID"):
            self.forget(gpu)
            return GpuLostError(message, code)
        return NvmlError(message, code)


class ComputeMode(StrEnum):
    """How many processes the driver lets use a GPU."""

    DEFAULT = "Default"
    EXCLUSIVE_PROCESS = "ExclusiveProcess"
    """One process, such as an MPS server."""
    PROHIBITED = "Prohibited"

    @property
    def withdrawn_modes(self) -> frozenset[SharingMode]:
        """Sharing modes that do not work in this compute mode."""
        if self is ComputeMode.PROHIBITED:
            return frozenset(SharingMode)
        return frozenset({SharingMode.TIME_SLICING}) if self is ComputeMode.EXCLUSIVE_PROCESS else frozenset()


_COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: ComputeMode.EXCLUSIVE_PROCESS,
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: ComputeMode.EXCLUSIVE_PROCESS,
    pynvml.NVML_COMPUTEMODE_PROHIBITED: ComputeMode.PROHIBITED,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Description of a GPU. Only its MIG mode, power limit and compute mode change."""

    uuid: GpuUuid
    index: int
    minor: int | None
    """N of /dev/nvidiaN."""
    product: str
    memory_mib: int
    reserved_mib: int
    """Memory that the driver reserves."""
    compute_capability: str
    pci_bus_id: str
    numa_node: int | None
    nvlink_peers: tuple[str, ...]
    """PCI bus IDs at the other ends of active links, each once: GPUs and switches."""
    mig_capable: bool
    mig_enabled: bool
    mig_pending: bool
    """MIG mode after the next reset."""
    power_limit_w: float | None
    compute_mode: ComputeMode = ComputeMode.DEFAULT
    is_persistent: bool | None = None
    """Whether the driver keeps the GPU initialized without programs; None if the GPU does not support it."""
    figures: NvmlFigures = NO_FIGURES
    graphics_pids: tuple[int, ...] = ()
    """Process IDs of programs that draw, such as an X server; those that compute as well are not among them."""


def linked_gpus(known: Identity, everyone: Mapping[GpuUuid, Identity]) -> list[GpuUuid]:
    """Return the other GPUs that are linked directly or by a switch."""
    ends, own = set(known.nvlink_peers), {each.pci_bus_id for each in everyone.values()}
    return [
        uuid
        for uuid, other in everyone.items()
        if uuid != known.uuid and (other.pci_bus_id in ends or (ends - own) & set(other.nvlink_peers))
    ]


class Telemetry(msgspec.Struct, frozen=True):
    """A GPU's counters at one moment."""

    memory_used_mib: int
    """By processes and the driver."""
    memory_free_mib: int
    gpu_util_percent: float | None = None
    """Share of time in which a kernel ran; None under MIG."""
    memory_util_percent: float | None = None
    power_w: float | None = None
    energy_mj: int | None = None
    """Since the driver was loaded."""
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    clock_reasons: int | None = None
    """NVML's bits of the reasons for lower clocks."""
    ecc_uncorrectable: int | None = None
    """Since the driver was loaded."""
    rows_remapped_correctable: int | None = None
    rows_remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    """A reset is needed to remap a row."""
    remap_failed: bool | None = None
    """There was no spare row: replace the GPU."""


class RunningProcess(msgspec.Struct, frozen=True):
    """A process with a CUDA context."""

    pid: int
    memory_mib: int | None
    """None in containers without the permission to read it."""
    gpu_instance_id: int | None = None


UtilizationSample = tuple[int, int, int]
"""Utilization by one process since the stamp of the question: process ID, stamp of its last activity in microseconds of
the node's clock, mean share of the time in which its kernels ran, in percent.

NVML documents one sample for each process. The driver keeps its last 72 sampling periods (100 in older ones) of a sixth
of a second or more, each with the process that was active then (`ctrl2080perf.h` of NVIDIA's open kernel modules)."""


_SAMPLE = struct.Struct("=I4xQI12x")
"""Process ID, stamp and SM share in NVML's structure; faster than reading its attributes."""
_MAX_LINKS = 18
"""More than any GPU has, up to Blackwell."""


def find_gpus(session: Session) -> tuple[list[GpuUuid], list[str], list[int]]:
    """Return the UUIDs of all GPUs by index, and an error message for each GPU that has no readable UUID.

    GPUs whose device files the container does not have are left out; the third list has their indices. Raises NvmlError
    if there is no answer at all.
    """
    library = session.library
    uuids, errors, hidden = list[GpuUuid](), list[str](), list[int]()
    for index in range(session.call("", library.nvmlDeviceGetCount)):
        try:
            handle = session.call(f"#{index}", library.nvmlDeviceGetHandleByIndex, index)
            uuids.append(GpuUuid(session.call(f"#{index}", library.nvmlDeviceGetUUID, handle)))
        except NvmlError as e:
            if e.code == pynvml.NVML_ERROR_NO_PERMISSION:
                hidden.append(index)
            else:
                errors.append(str(e))
    return uuids, errors, hidden


def list_gpus(session: Session) -> list[GpuUuid]:
    """Return the UUIDs of all GPUs that can be read, by index."""
    return find_gpus(session)[0]


def read_numa_node(sysfs: Path, pci_bus_id: str) -> int | None:
    """Return the NUMA node that a GPU is attached to; None without one.

    NVML reports one only on platforms where GPU memory is a NUMA node itself: that node, which has no CPUs.
    """
    domain, _, place = pci_bus_id.lower().partition(":")
    try:
        found = int((sysfs / "bus/pci/devices" / f"{int(domain, 16):04x}:{place}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return found if found >= 0 else None


def read_identity(session: Session, uuid: GpuUuid, sysfs: Path = Path("/sys")) -> Identity:
    """Describe a GPU; raises NvmlError, also if its memory is not its own."""
    library, handle = session.library, session.handle(uuid)
    product = session.call(uuid, library.nvmlDeviceGetName, handle)
    memory = session.ask(uuid, library.nvmlDeviceGetMemoryInfo, handle)
    major, minor = session.call(uuid, library.nvmlDeviceGetCudaComputeCapability, handle)
    if memory is None or f"{major}.{minor}" in UNIFIED_MEMORY:
        raise NvmlError(
            f"GPU {uuid}: {unified_memory_problem(product)}",
            pynvml.NVML_ERROR_NOT_SUPPORTED,
        )
    detailed = session.ask(uuid, library.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    mig = session.ask(uuid, library.nvmlDeviceGetMigMode, handle)
    limit_mw = session.ask(uuid, library.nvmlDeviceGetEnforcedPowerLimit, handle)
    persistence = session.ask(uuid, library.nvmlDeviceGetPersistenceMode, handle)
    pci_bus_id = _text(session.call(uuid, library.nvmlDeviceGetPciInfo, handle).busId)
    return Identity(
        uuid=uuid,
        index=session.call(uuid, library.nvmlDeviceGetIndex, handle),
        minor=session.ask(uuid, library.nvmlDeviceGetMinorNumber, handle),
        product=product,
        memory_mib=memory.total // MIB,
        reserved_mib=detailed.reserved // MIB if detailed is not None else 0,
        compute_capability=f"{major}.{minor}",
        pci_bus_id=pci_bus_id,
        numa_node=read_numa_node(sysfs, pci_bus_id),
        nvlink_peers=_nvlink_peers(session, uuid),
        mig_capable=mig is not None,
        mig_enabled=mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        mig_pending=mig is not None and mig[1] == pynvml.NVML_DEVICE_MIG_ENABLE,
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        compute_mode=_COMPUTE_MODES.get(
            session.ask(uuid, library.nvmlDeviceGetComputeMode, handle) or 0, ComputeMode.DEFAULT
        ),
        is_persistent=None if persistence is None else persistence == pynvml.NVML_FEATURE_ENABLED,
        figures=_read_figures(session, uuid),
        graphics_pids=tuple(
            p.pid for p in session.ask(uuid, library.nvmlDeviceGetGraphicsRunningProcesses_v3, handle) or ()
        ),
    )


def _read_figures(session: Session, uuid: GpuUuid) -> NvmlFigures:
    library, handle = session.library, session.handle(uuid)
    return NvmlFigures(
        cuda_cores=session.ask(uuid, library.nvmlDeviceGetNumGpuCores, handle) or 0,
        sm_clock_mhz=session.ask(uuid, library.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM) or 0,
        memory_clock_mhz=session.ask(uuid, library.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM) or 0,
        memory_bus_bits=session.ask(uuid, library.nvmlDeviceGetMemoryBusWidth, handle) or 0,
        power_limit_w=(session.ask(uuid, library.nvmlDeviceGetPowerManagementDefaultLimit, handle) or 0) // 1000,
    )


def _nvlink_peers(session: Session, uuid: GpuUuid) -> tuple[str, ...]:
    library, handle = session.library, session.handle(uuid)
    peers: dict[str, None] = {}
    for link in range(_MAX_LINKS):
        absent = pynvml.NVML_ERROR_INVALID_ARGUMENT  # the GPU has fewer links
        state = session.ask(uuid, library.nvmlDeviceGetNvLinkState, handle, link, absent=absent)
        if state is None:
            break
        if state == pynvml.NVML_FEATURE_ENABLED:
            remote = session.ask(uuid, library.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            if remote is not None:
                peers[_text(remote.busId)] = None
    return tuple(peers)


def read_telemetry(session: Session, uuid: GpuUuid) -> Telemetry:
    """Read a GPU's counters; raises NvmlError."""
    library, handle = session.library, session.handle(uuid)
    memory = session.call(uuid, library.nvmlDeviceGetMemoryInfo, handle)
    rates = session.ask(uuid, library.nvmlDeviceGetUtilizationRates, handle)
    power_mw = session.ask(uuid, library.nvmlDeviceGetPowerUsage, handle)
    rows = session.ask(uuid, library.nvmlDeviceGetRemappedRows, handle)
    return Telemetry(
        # `free` never contains the driver's reserved memory; `used` contains it in some drivers only.
        memory_used_mib=(memory.total - memory.free) // MIB,
        memory_free_mib=memory.free // MIB,
        gpu_util_percent=None if rates is None else float(rates.gpu),
        memory_util_percent=None if rates is None else float(rates.memory),
        power_w=None if power_mw is None else power_mw / 1000,
        energy_mj=session.ask(uuid, library.nvmlDeviceGetTotalEnergyConsumption, handle),
        temperature_c=session.ask(uuid, library.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        sm_clock_mhz=session.ask(uuid, library.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        memory_clock_mhz=session.ask(uuid, library.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        clock_reasons=session.ask(uuid, library.nvmlDeviceGetCurrentClocksEventReasons, handle),
        ecc_uncorrectable=session.ask(
            uuid,
            library.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        rows_remapped_correctable=None if rows is None else rows[0],
        rows_remapped_uncorrectable=None if rows is None else rows[1],
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
    )


NO_INSTANCE = 0xFFFFFFFF


def read_processes(session: Session, uuid: GpuUuid) -> list[RunningProcess]:
    """List the processes with a context on a GPU, those of its MIG instances too; raises NvmlError."""
    library, handle = session.library, session.handle(uuid)
    found = session.ask(uuid, library.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return [
        RunningProcess(
            pid=p.pid,
            memory_mib=None if p.usedGpuMemory is None else p.usedGpuMemory // MIB,
            gpu_instance_id=None if p.gpuInstanceId == NO_INSTANCE else p.gpuInstanceId,
        )
        for p in found
    ]


def read_utilization(
    session: Session, uuid: GpuUuid, since_us: int, until_us: int = 2**64 - 1
) -> Sequence[UtilizationSample] | None:
    """Return the valid samples between two stamps; None if the GPU does not support them (MIG)."""
    found = list_samples(session, uuid, since_us)
    if found is None:
        return None
    return [sample for sample in found if since_us < sample[1] <= until_us and sample[2] <= 100]


def list_samples(session: Session, uuid: GpuUuid, since_us: int) -> Sequence[UtilizationSample] | None:
    """Return the driver's sample of each process since a stamp, valid or not; None if unsupported."""
    library, handle = session.library, session.handle(uuid)
    try:
        found = session.ask(uuid, library.nvmlDeviceGetProcessUtilization, handle, since_us)
    except NvmlError as e:
        # Without samples the bindings raise SUCCESS and the driver NOT_FOUND.
        if e.code in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NO_DATA):
            return ()
        raise
    if found is None:
        return None
    # Some drivers return more slots than processes; unused ones have process ID 0 and invalid numbers.
    return [(pid, at_us, sm_percent) for pid, at_us, sm_percent in map(_SAMPLE.unpack, found) if pid]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
