"""Reading one GPU through NVML."""

import struct
from collections.abc import Sequence

import pynvml
from carpool_core.values import MIB, GpuUuid

from carpool_deviceplugin.nvml.calls import NvmlError, Session
from carpool_deviceplugin.nvml.values import Identity, RunningProcess, Telemetry, UtilizationSample

_SAMPLE = struct.Struct("=I4xQI12x")
"""Process ID, stamp and SM share of NVML's structure of a sample: there are hundreds, and its attributes are slow."""
_EVER_US = 2**64 - 1
_MAX_LINKS = 18
"""More than any GPU has that this was written for."""
_NO_NUMA = 0xFFFFFFFF


def list_gpus(session: Session) -> list[GpuUuid]:
    """Return the UUIDs of all GPUs by index. One that is lost already when the agent starts is left out by NVML."""
    library = session.library
    count = session.call("", library.nvmlDeviceGetCount)
    uuids: list[GpuUuid] = []
    for index in range(count):
        try:
            handle = session.call(f"#{index}", library.nvmlDeviceGetHandleByIndex, index)
            uuids.append(GpuUuid(session.call(f"#{index}", library.nvmlDeviceGetUUID, handle)))
        except NvmlError as e:
            if e.code not in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_NO_PERMISSION):
                raise
    return uuids


def read_identity(session: Session, uuid: GpuUuid) -> Identity:
    """Describe a GPU; raises NvmlError."""
    library, handle = session.library, session.handle(uuid)
    memory = session.call(uuid, library.nvmlDeviceGetMemoryInfo, handle)
    detailed = session.ask(uuid, library.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    major, minor = session.call(uuid, library.nvmlDeviceGetCudaComputeCapability, handle)
    numa = session.ask(uuid, library.nvmlDeviceGetNumaNodeId, handle)
    mig = session.ask(uuid, library.nvmlDeviceGetMigMode, handle)
    limit_mw = session.ask(uuid, library.nvmlDeviceGetEnforcedPowerLimit, handle)
    return Identity(
        uuid=uuid,
        index=session.call(uuid, library.nvmlDeviceGetIndex, handle),
        minor=session.ask(uuid, library.nvmlDeviceGetMinorNumber, handle),
        product=session.call(uuid, library.nvmlDeviceGetName, handle),
        memory_mib=memory.total // MIB,
        reserved_mib=detailed.reserved // MIB if detailed is not None else 0,
        compute_capability=f"{major}.{minor}",
        pci_bus_id=_text(session.call(uuid, library.nvmlDeviceGetPciInfo, handle).busId),
        numa_node=None if numa is None or numa in (-1, _NO_NUMA) else numa,
        nvlink_peers=_nvlink_peers(session, uuid),
        mig_capable=mig is not None,
        mig_enabled=mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        mig_pending=mig is not None and mig[1] == pynvml.NVML_DEVICE_MIG_ENABLE,
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
    )


def _nvlink_peers(session: Session, uuid: GpuUuid) -> tuple[str, ...]:
    library, handle = session.library, session.handle(uuid)
    peers: dict[str, None] = {}
    for link in range(_MAX_LINKS):
        try:
            state = session.ask(uuid, library.nvmlDeviceGetNvLinkState, handle, link)
        except NvmlError as e:
            if e.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                break  # no such link: the GPU has fewer
            raise
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
        memory_used_mib=memory.used // MIB,
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


_NO_INSTANCE = 0xFFFFFFFF


def read_processes(session: Session, uuid: GpuUuid) -> list[RunningProcess]:
    """List the processes with a context on a GPU, those of its MIG instances too; raises NvmlError."""
    library, handle = session.library, session.handle(uuid)
    found = session.ask(uuid, library.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return [
        RunningProcess(
            pid=p.pid,
            memory_mib=None if p.usedGpuMemory is None else p.usedGpuMemory // MIB,
            gpu_instance_id=None if p.gpuInstanceId == _NO_INSTANCE else p.gpuInstanceId,
        )
        for p in found
    ]


def read_utilization(
    session: Session, uuid: GpuUuid, since_us: int, until_us: int = _EVER_US
) -> Sequence[UtilizationSample] | None:
    """Return what processes did between two moments, by the driver's stamps; None where the GPU cannot say (MIG)."""
    found = list_samples(session, uuid, since_us)
    if found is None:
        return None
    return [sample for sample in found if since_us < sample[1] <= until_us and sample[2] <= 100]


def list_samples(session: Session, uuid: GpuUuid, since_us: int) -> Sequence[UtilizationSample] | None:
    """Return what the driver says that processes did since a moment, whatever it is; None where it cannot say."""
    library, handle = session.library, session.handle(uuid)
    try:
        found = session.ask(uuid, library.nvmlDeviceGetProcessUtilization, handle, since_us)
    except NvmlError as e:
        # The bindings raise SUCCESS and the driver NOT_FOUND where no process has done anything since.
        if e.code in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NO_DATA):
            return ()
        raise
    if found is None:
        return None
    # The driver's ring holds slots that were never filled: their pid is 0, and their numbers are not percentages.
    return [(pid, at_us, sm_percent) for pid, at_us, sm_percent in map(_SAMPLE.unpack, found) if pid]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
