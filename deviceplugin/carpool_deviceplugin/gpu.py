"""What the agent knows of a GPU, and the steps that change one. Values only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.mig import Instance, MigTable, Placement


@dataclass(frozen=True, slots=True)
class Limits:
    """What MPS holds each process of a pod to; None is no limit."""

    memory_mib: int | None = None
    thread_percentage: int | None = None


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A MIG instance, and whose it is."""

    instance: Instance
    is_managed: bool = False
    """Whether the agent made it; nobody else's is ever given out or destroyed."""
    pod_uid: PodUid | None = None
    """Whom it was made for."""
    users: frozenset[PodUid] = frozenset()
    """Pods with a process on it."""
    is_used: bool = False
    """Whether it has a process, of whomever."""


@dataclass(frozen=True, slots=True)
class GpuActual:
    """How a GPU is divided at this moment, read back from it."""

    uuid: GpuUuid
    usable_mib: int
    """Memory that processes can have, in MiB."""
    modes: frozenset[SharingMode]
    """What it can be prepared for."""
    mode: SharingMode | None = None
    """None: idle, prepared for nobody."""
    mps_daemon: bool = False
    mps_hung: bool = False
    """Whether its MPS daemon has not answered for a while."""
    mps_servers_left: bool = False
    """Whether servers of an MPS daemon that has ended are there."""
    mps_cleanup_pending: bool = False
    """Whether the stop of an MPS daemon was begun and has not ended: what its clients left may be there."""
    limits: Mapping[PodUid, Limits] = field(default_factory=dict)
    tenants: frozenset[PodUid] = frozenset()
    """Pods with a process on the GPU."""
    problem: str = ""
    """Why no new work may go there; empty when healthy."""
    struck: Mapping[PodUid, str] = field(default_factory=dict)
    """Pods that a fault of their MPS daemon ends together, and what happened."""
    ended: Mapping[PodUid, str] = field(default_factory=dict)
    """The same of the last minutes, with those that are gone."""
    mig_table: MigTable | None = None
    """What it can be divided into; None without MIG."""
    mig_instances: tuple[MigInstance, ...] = ()
    """Its MIG instances."""
    mig_manager: str = ""
    """Who else divides the node's GPUs, so that the agent may not; empty where nobody does."""


@dataclass(frozen=True, slots=True)
class SetMode:
    """Change how the GPU is shared; only while nobody is on it."""

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
    """Stop the GPU's MPS daemon, and forget its limits; only while nobody is on the GPU."""

    def __str__(self) -> str:
        return "stop MPS"


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Set what MPS holds a pod to; None removes it."""

    pod_uid: PodUid
    limits: Limits | None

    def __str__(self) -> str:
        if self.limits is None:
            return f"remove the limits of pod {self.pod_uid}"
        memory, threads = self.limits.memory_mib, self.limits.thread_percentage
        return f"limit pod {self.pod_uid} to {memory or 'any'} MiB and {threads or 100}% of threads"


@dataclass(frozen=True, slots=True)
class CreateInstance:
    """Make a MIG instance, or take an idle one of ours that stands there, for a pod; None keeps it idle."""

    placement: Placement
    pod_uid: PodUid | None

    def __str__(self) -> str:
        return f"create {self.placement}" + (f" for pod {self.pod_uid}" if self.pod_uid else "")


@dataclass(frozen=True, slots=True)
class DestroyInstance:
    """Destroy a MIG instance of ours that nobody uses."""

    placement: Placement

    def __str__(self) -> str:
        return f"destroy {self.placement}"


Step = SetMode | StartMps | StopMps | SetLimits | CreateInstance | DestroyInstance


def changes_mig(step: Step) -> bool:
    """Whether a step may change MIG on a GPU that has it."""
    return isinstance(step, CreateInstance | DestroyInstance) or (isinstance(step, SetMode) and step.mode is not None)


class ProcessUsage(msgspec.Struct, frozen=True):
    """What one process has used of a GPU since it began. Counters never fall."""

    id: str
    """Tells processes apart; never used again."""
    pod_uid: PodUid
    started: float
    """Monotonic time, in seconds."""
    memory_mib: int
    peak_memory_mib: int
    busy_s: float | None
    """Time in which its kernels ran; None where the GPU cannot say, as below."""
    sm_s: float | None
    """Time in which its work filled all SMs."""
    dram_s: float | None
    """Time in which its work filled the memory bandwidth."""
    energy_j: float | None
    """Energy above idle."""
    steps: int
    """Training steps, where the process reports them."""
    steps_s: float
    """Their time in all."""


@dataclass(frozen=True, slots=True)
class InstanceReading:
    """What a MIG instance's counters say."""

    instance_id: int
    profile: str
    pod_uid: PodUid | None
    """Whose it is; None where nobody knows."""
    counters: Mapping[str, float]
    """By DCGM's field names."""
    is_exported_elsewhere: bool = False
    """Whether Prometheus gets the counters from elsewhere already."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a GPU's counters say at one moment."""

    at: float
    """Monotonic time, in seconds."""
    processes: tuple[ProcessUsage, ...]
    """Those that are there."""
    power_w: float | None
    """None where the GPU cannot say; so below."""
    idle_power_w: float | None
    power_limit_w: float | None
    energy_j: float | None
    """Of the whole GPU, since it appeared."""
    ended: tuple[ProcessUsage, ...] = ()
    """Those that have ended since the reading before, with what they drew until then."""
    counters: Mapping[str, float] | None = None
    """The GPU's own word on itself, by DCGM's field names; None where it is reckoned from its processes."""
    pci_bus_id: str = ""
    mig_instances: tuple[InstanceReading, ...] = ()
    """Of its MIG instances."""
    source: str = ""
    """Where the counters are from, such as `nvml`."""
    is_exported_elsewhere: bool = False
    """Whether Prometheus gets the GPU's counters from there already; its instances have their own word."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory of the node that a container sees."""

    host_path: str
    container_path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """What a container must be given to reach a GPU, apart from limits."""

    env: Mapping[str, str]
    """The same for every GPU of a container."""
    mounts: tuple[Mount, ...]
    mps_pipe: Mount | None = None
    """The MPS daemon's directory, where the GPU has one."""
    mps_shm: Mount | None = None
    """The memory that the daemon shares with its clients; None where they need none."""
    mps_user: int | None = None
    """User whose processes the daemon's server has as clients; None where it has none, or nobody can tell."""
    edits: Mapping[str, Any] = field(default_factory=dict)
    """CDI container edits for this GPU."""
    common_edits: Mapping[str, Any] = field(default_factory=dict)
    """CDI container edits for each container that has a GPU."""
    cdi_version: str = "0.6.0"
    """That the edits are of."""
    needs_runtime_env: bool = False
    """Whether NVIDIA's container runtime must be told the name, because nothing else brings it."""
    name: str = ""
    """Of the MIG device; empty where it is the whole GPU."""


class DeviceError(Exception):
    """A GPU could not be read or changed. `str()` says what was expected, what was found and what to do."""


class Devices(Protocol):
    """The GPUs of a node. Every call but `inventory` raises DeviceError where the GPU cannot be read or changed."""

    @property
    def simulated(self) -> bool:
        """Whether there is no hardware."""
        ...

    @property
    def uuids(self) -> Sequence[GpuUuid]:
        """The GPUs by index; they stay the same for as long as the agent lives."""
        ...

    def inventory(self) -> list[Device]:
        """Describe every GPU, with its mode and health now. A GPU that cannot be read is unhealthy, not absent."""
        ...

    def describe(self, uuid: GpuUuid) -> Device:
        """Describe one GPU, as `inventory` does."""
        ...

    def actual(self, uuid: GpuUuid) -> GpuActual:
        """Read how a GPU is divided."""
        ...

    def apply(self, uuid: GpuUuid, step: Step) -> None:
        """Take one step. Idempotent: a step that was taken already changes nothing."""
        ...

    def read(self, uuid: GpuUuid) -> Reading:
        """Read a GPU's counters."""
        ...

    def access(self, uuid: GpuUuid, pod_uid: PodUid | None = None) -> Access:
        """Return what brings the GPU, or the pod's MIG instance of it, into a container. Never blocks."""
        ...

    def refresh_counters(self) -> None:
        """Ask who else on the node measures the GPUs; what is heard counts in readings. May block."""
        ...

    def set_mig_manager(self, manager: str) -> None:
        """Say who else divides the node's GPUs, so that the agent does not; empty where nobody does."""
        ...


class NoDevicesError(Exception):
    """The agent has no GPUs; the message says what to set."""
