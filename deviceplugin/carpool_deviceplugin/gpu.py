"""Values of a GPU: its state, its readings, and the steps that change it. Contains the port to the GPUs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.mig import Instance, MigTable, Placement

CONTAINER_MPS = "/run/carpool/mps"
"""Where containers see the pipes of their GPU's MPS daemon."""
FRAGMENTATION_MIB = 256
"""Kept free beside the driver's memory, because allocators lose some to fragmentation."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that MPS enforces for each process of a pod; None is no limit."""

    memory_mib: int | None = None
    thread_percentage: int | None = None


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A MIG instance and its owner."""

    instance: Instance
    is_managed: bool = False
    """Whether the agent created it; others are never assigned or destroyed."""
    pod_uid: PodUid | None = None
    """The pod that it was created for."""
    users: frozenset[PodUid] = frozenset()
    """Pods with a process on it."""
    is_used: bool = False
    """Whether it has any process."""


@dataclass(frozen=True, slots=True)
class GpuActual:
    """Actual state of a GPU, as read from it."""

    uuid: GpuUuid
    usable_mib: int
    """Memory available to processes, in MiB."""
    modes: frozenset[SharingMode]
    """Modes that it can be prepared for."""
    mode: SharingMode | None = None
    """Present mode; None if idle."""
    mps_daemon: bool = False
    mps_hung: bool = False
    """Whether its MPS daemon has not answered for a while."""
    mps_servers_left: bool = False
    """Whether MPS servers have outlived their daemon."""
    mps_cleanup_pending: bool = False
    """Whether stopping an MPS daemon has begun and not finished; files of its clients may be left."""
    limits: Mapping[PodUid, Limits] = field(default_factory=dict)
    tenants: frozenset[PodUid] = frozenset()
    """Pods with a process on the GPU."""
    problem: str = ""
    """Why it gets no new work; empty if healthy."""
    struck: Mapping[PodUid, str] = field(default_factory=dict)
    """Present pods that a fault of their MPS daemon ends together, with the reason."""
    ended: Mapping[PodUid, str] = field(default_factory=dict)
    """Pods that such faults ended in the last minutes, present or gone, with the reason."""
    mig_table: MigTable | None = None
    """Its MIG profiles; None without MIG."""
    mig_instances: tuple[MigInstance, ...] = ()
    mig_manager: str = ""
    """Another MIG manager of the node, which keeps the agent from partitioning; empty if there is none."""


@dataclass(frozen=True, slots=True)
class SetMode:
    """Change the sharing mode; only while the GPU has no processes."""

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
    """Stop the GPU's MPS daemon and delete its limits; only while the GPU has no processes."""

    def __str__(self) -> str:
        return "stop MPS"


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Set a pod's MPS limits; None removes them."""

    pod_uid: PodUid
    limits: Limits | None

    def __str__(self) -> str:
        if self.limits is None:
            return f"remove the limits of pod {self.pod_uid}"
        memory, threads = self.limits.memory_mib, self.limits.thread_percentage
        return f"limit pod {self.pod_uid} to {memory or 'any'} MiB and {threads or 100}% of threads"


@dataclass(frozen=True, slots=True)
class CreateInstance:
    """Create a MIG instance for a pod, or reuse the agent's idle one at this placement; no pod keeps it idle."""

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
    """Whether the step may create, destroy or switch MIG instances."""
    return isinstance(step, CreateInstance | DestroyInstance) or (isinstance(step, SetMode) and step.mode is not None)


MIN_BUSY = 0.01
"""Below this share of the last seconds a pod does not work: it loads, or waits, and may allocate memory later."""


class StepCounts(msgspec.Struct, frozen=True):
    """Growth of a pod's step counters between two readings."""

    elapsed_s: float = 0.0
    """Time between the readings; 0 if there was no earlier one."""
    steps: int = 0
    """Training steps."""
    steps_s: float = 0.0
    """Time of the timed steps."""
    timed_steps: int = 0
    """Steps without the first one of each process."""
    samples: int = 0
    """Samples of all processes, as far as known."""
    data_s: float = 0.0
    """Time in which a process waited for data; mean over the pod's processes."""
    checkpoint_s: float = 0.0
    """The same for checkpoints."""
    copy_s: float = 0.0
    """The same for copies from the host to a device."""
    batches: int = 0
    """Batches from the data loaders of all processes, also those of an evaluation."""

    def plus(self, other: "StepCounts") -> "StepCounts":
        """Return the sum."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return StepCounts(*(one + two for one, two in pairs))


class StepReport(msgspec.Struct, frozen=True):
    """A reading of a pod's step counters."""

    steps: int
    """Training steps since the start of its processes."""
    since: StepCounts
    """Growth since the last reading."""
    waits_for: str = ""
    """Present wait of a process: `data` or `checkpoint`; empty if it waits for neither."""


class ProcessUsage(msgspec.Struct, frozen=True):
    """Use of a GPU by one process since the last reading; None if the GPU does not measure a value."""

    id: str
    """Identifies the process; never reused."""
    pod_uid: PodUid
    memory_mib: int
    """Memory now."""
    peak_memory_mib: int
    """Highest memory since its start, as far as known."""
    elapsed_s: float
    """Time of these measurements; 0 if its start or the last reading is unknown."""
    busy_s: float | None
    """Time in which its kernels ran."""
    sm_s: float | None
    """SM activity, integrated over time."""
    dram_s: float | None
    """DRAM activity, integrated over time."""
    energy_j: float | None
    """Energy above idle."""
    steps: int = 0
    """Training steps, if the process reports them."""
    steps_s: float = 0.0
    """Total time of these steps."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a GPU or MIG instance, by DCGM's field names and in DCGM's units."""

    values: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each field, also of fields without a first value."""
    exported: frozenset[str] = frozenset()
    """Fields that another program exports to Prometheus."""

    def completed_by(self, other: "Counters") -> "Counters":
        """Add the fields that are missing here."""
        return Counters(
            {**other.values, **self.values},
            {**self.sources, **other.sources, **self.sources},
            self.exported | other.exported,
        )


@dataclass(frozen=True, slots=True)
class InstanceReading:
    """One reading of a MIG instance."""

    instance_id: int
    profile: str
    pod_uid: PodUid | None
    """The pod that it belongs to; None if unknown."""
    counters: Counters


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a GPU. None if the GPU does not measure a value."""

    at: float
    """Monotonic time, in seconds."""
    processes: tuple[ProcessUsage, ...]
    """The present processes of pods."""
    power_w: float | None
    idle_power_w: float | None
    power_limit_w: float | None
    energy_j: float | None
    """Energy of the whole GPU since its driver was loaded."""
    energy_of_ended_j: Mapping[PodUid, float] = field(default_factory=dict)
    """Energy above idle, since the last reading, of processes that have ended since, by pod."""
    counters: Counters | None = None
    """None if the counters are computed from the processes."""
    pci_bus_id: str = ""
    mig_instances: tuple[InstanceReading, ...] = ()
    sources: tuple[str, ...] = ()
    """Sources of the counters of the GPU and its MIG instances, such as `nvml`."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory of the node, mounted into a container."""

    host_path: str
    container_path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """Environment, mounts and devices that a container needs for a GPU, without limits."""

    env: Mapping[str, str]
    """Equal for all GPUs of a container."""
    mounts: tuple[Mount, ...]
    mps_pipe: Mount | None = None
    """Directory of the MPS daemon's pipes; None without a daemon."""
    mps_shm: Mount | None = None
    """Memory that the daemon shares with its clients; None if not needed."""
    mps_user: int | None = None
    """User ID of the MPS server's clients; None if it has none, or the user is unknown."""
    edits: Mapping[str, Any] = field(default_factory=dict)
    """CDI container edits for this GPU."""
    common_edits: Mapping[str, Any] = field(default_factory=dict)
    """CDI container edits for each container with a GPU."""
    cdi_version: str = "0.6.0"
    """CDI version of the edits."""
    needs_runtime_env: bool = False
    """Whether NVIDIA's container runtime injects the device by its name, because there are no edits."""
    name: str = ""
    """UUID of the MIG device; empty for a whole GPU."""


class DeviceError(Exception):
    """A GPU could not be read or changed. `str()` states what was expected, what was found and what to do."""


class Devices(Protocol):
    """The GPUs of a node. Calls raise DeviceError if the GPU cannot be read or changed."""

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are simulated."""
        ...

    @property
    def uuids(self) -> Sequence[GpuUuid]:
        """The GPUs by index; constant during the life of the agent."""
        ...

    @property
    def unreadable(self) -> Sequence[str]:
        """A reason for each GPU of the node that is not among `uuids` because it could not be read at the start."""
        ...

    @property
    def numa_nodes(self) -> Collection[int]:
        """The NUMA nodes of the GPUs; empty if one of them has none."""
        ...

    @property
    def mps_problem(self) -> str:
        """Why the node offers no mode MPS and what to do; empty if it offers it."""
        ...

    def describe(self, uuid: GpuUuid) -> Device:
        """Describe a GPU, with its mode and health now. One that cannot be read is unhealthy, not absent."""
        ...

    def actual(self, uuid: GpuUuid) -> GpuActual:
        """Read the actual state of a GPU."""
        ...

    def apply(self, uuid: GpuUuid, step: Step) -> None:
        """Apply one step. Idempotent."""
        ...

    def read(self, uuid: GpuUuid) -> Reading:
        """Read a GPU's counters."""
        ...

    def survey(self, uuid: GpuUuid) -> tuple[Device, Reading | DeviceError]:
        """Describe a GPU and read its counters."""
        ...

    def access(self, uuid: GpuUuid, pod_uid: PodUid | None = None) -> Access:
        """Return what a container needs for the GPU, or for the pod's MIG instance of it. Never blocks."""
        ...

    def refresh_counters(self) -> None:
        """Read the other programs on the node that measure the GPUs, for later calls of `read`. May block."""
        ...

    def release(self, reason: str) -> None:
        """Give the GPUs no new work while there is a reason, and hold none open once no pod uses one. May block."""
        ...

    def set_mig_manager(self, manager: str) -> None:
        """Set the name of another MIG manager, which keeps the agent from partitioning; empty if there is none."""
        ...


class NoDevicesError(Exception):
    """The agent has no GPUs; the message names the setting."""
