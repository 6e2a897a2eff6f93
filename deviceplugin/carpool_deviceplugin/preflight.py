"""Text of `carpool node inspect`, and helpers of the `carpool node` commands."""

import os
from collections.abc import Iterator
from pathlib import Path

import click
from carpool_core import logs
from carpool_core.resources.node import Device
from carpool_core.settings import SettingsError, load
from carpool_core.values import DeviceHealth, GpuUuid

from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.dcgm import Exporter, HostEngine
from carpool_deviceplugin.gpu import DeviceError, MigInstance, NoDevicesError
from carpool_deviceplugin.mig import fragmentation, occupied
from carpool_deviceplugin.mig_instances import read_mig_devices, read_table
from carpool_deviceplugin.mps import MpsProgram
from carpool_deviceplugin.nvlib import Identity
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.quoting import quoted
from carpool_deviceplugin.sampling import GPM, PLAIN
from carpool_deviceplugin.settings import AgentSettings


def inspect_node(devices: NvmlDevices, cdi: NvidiaCdi, proc: Path = Path("/proc"), mps_host: str = "") -> Iterator[str]:
    """Describe a node, line by line.

    Args:
        devices: The node's GPUs.
        cdi: NVIDIA's CDI specifications.
        proc: Path of /proc.
        mps_host: Socket of the process that starts MPS daemons; empty if the agent starts them.
    """
    session = devices.session
    library = session.library
    driver = session.ask("", library.nvmlSystemGetDriverVersion) or "unknown"
    cuda = session.ask("", library.nvmlSystemGetCudaDriverVersion)
    yield f"driver {driver}, CUDA {f'{cuda // 1000}.{cuda % 1000 // 10}' if cuda else 'unknown'}"
    devices.refresh_counters()
    for device in devices.inventory():
        yield ""
        yield from _gpu(devices, device)
    yield ""
    yield from _missing(devices, cdi, proc, mps_host)


def _gpu(devices: NvmlDevices, device: Device) -> Iterator[str]:
    known = devices.identity(device.uuid)
    yield f"GPU {device.index}: {device.product}  {device.uuid}"
    numa = "" if known.numa_node is None else f", NUMA node {known.numa_node}"
    yield (
        f"  {device.memory_mib:,} MiB ({known.reserved_mib:,} the driver's, "
        f"{device.reserved_mib - known.reserved_mib:,} more kept free), compute capability "
        f"{known.compute_capability}, PCI {known.pci_bus_id}{numa}"
    )
    if known.nvlink_peers:
        yield f"  NVLink to {', '.join(known.nvlink_peers)}"
    yield f"  modes: {', '.join(device.modes) or 'none'}; now {device.mode or 'no mode set'}"
    yield "  healthy" if device.health is DeviceHealth.HEALTHY else f"  UNHEALTHY: {device.health_message}"
    try:
        yield f"  metrics: {_metrics(devices, known)}"
        yield from _mig(devices, known)
    except DeviceError as e:
        yield f"  cannot be read: {e}"


_SOURCES = {
    GPM: "NVML with GPM (SM activity, occupancy, tensor cores, DRAM)",
    PLAIN: "NVML (utilization and memory; no SM activity: that takes Hopper or newer, or DCGM)",
    HostEngine.name: "DCGM's host engine (SM activity, occupancy, tensor cores, DRAM)",
    Exporter.name: "dcgm-exporter, which shows them itself",
}


def _metrics(devices: NvmlDevices, known: Identity) -> str:
    return _SOURCES[devices.read(known.uuid).source]


def _mig(devices: NvmlDevices, known: Identity) -> Iterator[str]:
    if not known.mig_capable:
        yield "  MIG: not supported"
        return
    session, uuid = devices.session, known.uuid
    pending = (
        "" if known.mig_enabled == known.mig_pending else f" ({'on' if known.mig_pending else 'off'} after a reset)"
    )
    yield f"  MIG: {'on' if known.mig_enabled else 'off'}{pending}"
    table = read_table(session, uuid)
    for profile in table.profiles if table else ():
        places = f"{{{','.join(map(str, profile.starts))}}}:{profile.memory_slices}"
        yield f"    {profile.name:<12} {profile.memory_mib:>7,} MiB, {profile.sm_count} SMs, at {places}"
    if table is None or not known.mig_enabled:
        return
    names = {d.gpu_instance_id: d.uuid for d in read_mig_devices(session, uuid)}
    mig_instances = devices.actual(uuid).mig_instances
    for part in mig_instances:
        yield f"    {part.instance}  {names.get(part.instance.id, 'no compute instance')}  {_whose(part)}"
    scattered = fragmentation(table, occupied(p.instance.placement for p in mig_instances))
    yield f"    fragmentation of what is free: {scattered:.2f}"


def _whose(part: MigInstance) -> str:
    used = ", in use" if part.is_used else ", idle"
    if part.pod_uid:
        return f"made for pod {part.pod_uid}{used}"
    return f"{'made by the agent' if part.is_managed else 'not created by the agent'}{used}"


def _sees_the_host(proc: Path) -> bool:
    """Whether /proc shows the host's PID namespace, where process 2 is kthreadd."""
    try:
        return (proc / "2" / "comm").read_text().strip() == "kthreadd"
    except OSError:
        return False


def _lacking_for_mps(mps_host: str) -> str:
    if mps_host and MpsProgram.is_installed():
        return (
            ""
            if Path(mps_host).is_socket()
            else f"the MPS daemons' host at {quoted(Path(mps_host))}; look at the pod carpool-mps"
        )
    return MpsProgram.missing()


def _is_plain(devices: NvmlDevices, uuid: GpuUuid) -> bool:
    """Whether no source measures the SM activity of a GPU."""
    try:
        return devices.read(uuid).source == PLAIN
    except DeviceError:
        return False  # the text of the GPU contains the error


def _missing(devices: NvmlDevices, cdi: NvidiaCdi, proc: Path, mps_host: str) -> Iterator[str]:
    """Yield the missing requirements and how to provide them."""
    found = False
    if lacking := _lacking_for_mps(mps_host):
        found = True
        yield f"missing, for mode MPS: {lacking}"
    if any(_is_plain(devices, uuid) for uuid in devices.uuids):
        found = True
        yield (
            "missing, for SM activity before Hopper: DCGM's library, and its host engine at CARPOOL_DCGM_ADDRESS; or "
            "dcgm-exporter, named by CARPOOL_DCGM_EXPORTER"
        )
    try:
        without = [u for u in devices.uuids if cdi.find(u, devices.identity(u).minor) is None]
        if without:
            found = True
            yield (
                f"missing: NVIDIA's CDI specification of {', '.join(without)}; without it containers need the nvidia "
                "runtime. Write it: nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml"
            )
    except DeviceError as e:
        found = True
        yield f"wrong: {e}"
    if not _sees_the_host(proc):
        found = True
        yield "missing: the host's PIDs; without them no process can be assigned to a pod. Run with hostPID: true"
    if not found:
        yield "nothing is missing"


_LONGEST_INDEX = 4
"""Maximum number of digits."""


class InputError(click.ClickException):
    """The request is not possible on this node; nothing was changed."""

    exit_code = 2


def node_settings() -> AgentSettings:
    """Read the agent's settings from the environment, and send logs to standard error.

    Raises:
        InputError: A variable has an invalid value.
    """
    try:
        settings = load(AgentSettings, os.environ)
    except SettingsError as e:
        raise InputError(str(e)) from e
    logs.configure(settings.log, "node")
    return settings


def no_gpus(error: NoDevicesError, settings: AgentSettings) -> InputError:
    """Return the error of a command that needs real GPUs."""
    hint = "; CARPOOL_SIMULATED_GPUS is for the agent, and this command needs NVIDIA's driver"
    return InputError(f"{error}{hint if settings.simulated_gpus else ''}")


def find_gpu(devices: NvmlDevices, said: str) -> GpuUuid:
    """Return the GPU with this index, UUID, or UUID of a MIG device on it; raises DeviceError."""
    uuids = devices.uuids
    if said in uuids:
        return GpuUuid(said)
    if said.isdecimal() and len(said) <= _LONGEST_INDEX and int(said) < len(uuids):
        return uuids[int(said)]
    if said.startswith("MIG-"):
        for uuid in uuids:
            if devices.identity(uuid).mig_enabled and said in {d.uuid for d in read_mig_devices(devices.session, uuid)}:
                return uuid
    raise DeviceError(
        f"--gpu: expected a GPU from 0 to {len(uuids) - 1}, its UUID, or that of a MIG device on it, found "
        f"{quoted(said)}; `carpool node inspect` names them"
    )
