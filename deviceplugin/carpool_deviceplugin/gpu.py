"""Values that describe a GPU, the steps that change it, and the port to the GPUs of a node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.mig import Instance, MigTable, Placement


@dataclass(frozen=True, slots=True)
class Limits:
    """MPS limits of each process of a pod; None means no limit."""

    memory_mib: int | None = None
    thread_percentage: int | None = None


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A MIG instance and its owner."""

    instance: Instance
    is_managed: bool = False
    """Whether the agent created it. The agent never assigns or destroys other instances."""
    pod_uid: PodUid | None = None
    """Pod for which it was created."""
    users: frozenset[PodUid] = frozenset()
    """Pods with a process on it."""
    is_used: bool = False
    """Whether any process runs on it."""


@dataclass(frozen=True, slots=True)
class GpuActual:
    """Actual state of a GPU, read back from it."""

    uuid: GpuUuid
    usable_mib: int
    """Memory available to processes, in MiB."""
    modes: frozenset[SharingMode]
    """Modes for which it can be prepared."""
    mode: SharingMode | None = None
    """None: idle, not prepared for any pod."""
    mps_daemon: bool = False
    mps_hung: bool = False
    """Whether its MPS daemon has not answered for a while."""
    mps_servers_left: bool = False
    """Whether servers of an ended MPS daemon still run."""
    mps_cleanup_pending: bool = False
    """Whether a daemon's stop began and has not finished: files of its clients may remain."""
    limits: Mapping[PodUid, Limits] = field(default_factory=dict)
    tenants: frozenset[PodUid] = frozenset()
    """Pods with a process on the GPU."""
    problem: str = ""
    """Reason why the GPU accepts no new work; empty when healthy."""
    struck: Mapping[PodUid, str] = field(default_factory=dict)
    """Running pods that a fault of their MPS daemon ends, with the reason."""
    ended: Mapping[PodUid, str] = field(default_factory=dict)
    """The same for the last minutes, including pods that have ended."""
    mig_table: MigTable | None = None
    """MIG profiles and placements; None without MIG."""
    mig_instances: tuple[MigInstance, ...] = ()
    """Its MIG instances."""
    mig_manager: str = ""
    """Another manager that partitions the node's GPUs, so that the agent must not; empty if there is none."""


@dataclass(frozen=True, slots=True)
class SetMode:
    """Change the sharing mode; requires a GPU without processes."""

    mode: SharingMode | None

    def __str__(self) -> str:
        return f"set mode {self.mode or 'idle'}"


@dataclass(frozen=True, slots=True)
class StartMps:
    """Start the GPU's MPS daemon."""

    def __str__(self) -> str:
        return "start MPS"


@dataclass(frozen=True, slots=True)
class StopMps:
    """Stop the GPU's MPS daemon and remove its limits; requires a GPU without processes."""

    def __str__(self) -> str:
        return "stop MPS"


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Set the MPS limits of a pod; None removes them."""

    pod_uid: PodUid
    limits: Limits | None

    def __str__(self) -> str:
        if self.limits is None:
            return f"remove the limits of pod {self.pod_uid}"
        memory, threads = self.limits.memory_mib, self.limits.thread_percentage
        return f"limit pod {self.pod_uid} to {memory or 'any'} MiB and {threads or 100}% of threads"


@dataclass(frozen=True, slots=True)
class CreateInstance:
    """Create a MIG instance for a pod, or reuse the agent's idle one at that placement. No pod: keep it idle."""

    placement: Placement
    pod_uid: PodUid | None

    def __str__(self) -> str:
        return f"create {self.placement}" + (f" for pod {self.pod_uid}" if self.pod_uid else "")


@dataclass(frozen=True, slots=True)
class DestroyInstance:
    """Destroy an idle MIG instance that the agent created."""

    placement: Placement

    def __str__(self) -> str:
        return f"destroy {self.placement}"


Step = SetMode | StartMps | StopMps | SetLimits | CreateInstance | DestroyInstance


def changes_mig(step: Step) -> bool:
    """Return whether a step may change MIG on a GPU that has it."""
    return isinstance(step, CreateInstance | DestroyInstance) or (isinstance(step, SetMode) and step.mode is not None)


class ProcessUsage(msgspec.Struct, frozen=True):
    """Cumulative usage of a GPU by one process. Counters never decrease."""

    id: str
    """Unique per process; never reused."""
    pod_uid: PodUid
    started: float
    """Monotonic time, in seconds."""
    memory_mib: int
    peak_memory_mib: int
    busy_s: float | None
    """Time with at least one running kernel; None if the GPU does not report it. The next two likewise."""
    sm_s: float | None
    """Time-equivalent of all SMs filled by its work."""
    dram_s: float | None
    """Time-equivalent of the full memory bandwidth used by its work."""
    energy_j: float | None
    """Energy above idle."""
    steps: int
    """Training steps, if the process reports them."""
    steps_s: float
    """Total time of those steps."""


@dataclass(frozen=True, slots=True)
class InstanceReading:
    """Counters of a MIG instance."""

    instance_id: int
    profile: str
    pod_uid: PodUid | None
    """Its pod; None if unknown."""
    counters: Mapping[str, float]
    """By DCGM's field names."""
    is_exported_elsewhere: bool = False
    """Whether another exporter already serves the counters to Prometheus."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of a GPU at one moment."""

    at: float
    """Monotonic time, in seconds."""
    processes: tuple[ProcessUsage, ...]
    """Processes that are present."""
    power_w: float | None
    """None if the GPU does not report it; the next fields likewise."""
    idle_power_w: float | None
    power_limit_w: float | None
    energy_j: float | None
    """Energy of the whole GPU since the counter began."""
    ended: tuple[ProcessUsage, ...] = ()
    """Processes that have ended since the previous reading, with their final usage."""
    counters: Mapping[str, float] | None = None
    """The GPU's own counters by DCGM's field names; None if they are derived from its processes."""
    pci_bus_id: str = ""
    mig_instances: tuple[InstanceReading, ...] = ()
    """Of its MIG instances."""
    source: str = ""
    """Source of the counters, such as `nvml`."""
    is_exported_elsewhere: bool = False
    """Whether that source already serves the GPU's counters to Prometheus."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory of the node that is mounted into a container."""

    host_path: str
    container_path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """Devices, mounts and environment that give a container access to a GPU; limits are separate."""

    env: Mapping[str, str]
    """The same for every GPU of a container."""
    mounts: tuple[Mount, ...]
    mps_pipe: Mount | None = None
    """Pipe directory of the GPU's MPS daemon, if any."""
    mps_shm: Mount | None = None
    """Shared memory of the daemon and its clients; None if they need none."""
    mps_user: int | None = None
    """User whose processes are the clients of the daemon's server; None without clients or if unknown."""
    edits: Mapping[str, Any] = field(default_factory=dict)
    """CDI container edits for this GPU."""
    common_edits: Mapping[str, Any] = field(default_factory=dict)
    """CDI container edits for each container that has a GPU."""
    cdi_version: str = "0.6.0"
    """CDI version of the edits."""
    needs_runtime_env: bool = False
    """Whether NVIDIA's container runtime must inject the device, because no CDI edits exist."""
    name: str = ""
    """UUID of the MIG device; empty for a whole GPU."""


class DeviceError(Exception):
    """A GPU could not be read or changed. `str()` states what was expected, what was found and what to do."""


class Devices(Protocol):
    """The GPUs of a node. Every call but `inventory` raises DeviceError if the GPU cannot be read or changed."""

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are simulated."""
        ...

    @property
    def uuids(self) -> Sequence[GpuUuid]:
        """The GPUs by index; constant for the agent's lifetime."""
        ...

    def inventory(self) -> list[Device]:
        """Describe every GPU with its current mode and health. An unreadable GPU is unhealthy, not absent."""
        ...

    def describe(self, uuid: GpuUuid) -> Device:
        """Describe one GPU, as `inventory` does."""
        ...

    def actual(self, uuid: GpuUuid) -> GpuActual:
        """Read a GPU's actual state."""
        ...

    def apply(self, uuid: GpuUuid, step: Step) -> None:
        """Take one step. Idempotent."""
        ...

    def read(self, uuid: GpuUuid) -> Reading:
        """Read a GPU's counters."""
        ...

    def access(self, uuid: GpuUuid, pod_uid: PodUid | None = None) -> Access:
        """Return access to the GPU, or to the pod's MIG instance of it. Never blocks."""
        ...

    def refresh_counters(self) -> None:
        """Query other sources of counters; later readings include their values. May block."""
        ...

    def set_mig_manager(self, manager: str) -> None:
        """Set another manager that partitions the node's GPUs, so that the agent does not; empty for none."""
        ...


class NoDevicesError(Exception):
    """The agent has no GPUs; the message says what to set."""
