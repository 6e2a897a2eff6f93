"""`GpuNode`: the GPUs of one node. The scheduler writes its spec, the node's agent its status."""

from typing import Annotated

import msgspec

from carpool_core.resources.meta import Condition, ObjectMeta
from carpool_core.resources.schema import ATOMIC, ATOMIC_MAP, Resource, field
from carpool_core.values import DeviceHealth, GpuUuid, JobUid, PartitionState, PodUid, SharingMode, Tenancy

MAX_MIB = 1024 * 1024 * 1024
"""Largest amount of memory, in MiB: 1 PiB, as for a job's own numbers."""
MAX_GPUS = 256
"""Largest number of GPUs of a node."""
MAX_STRUCK = 256
"""Largest number of pods in `status.struck`."""
MAX_UID = 2**31 - 1
"""Largest UID that the API server accepts for a pod."""
MAX_REASON_LENGTH = 4096
"""Largest length of a reservation's reason, in characters."""
LOADING_S = 90.0
"""Age in seconds from which the peak and the activity of a running job count; a younger job is still loading."""
STEADY_S = 600.0
"""Seconds without growth after which a peak counts as the job's. PyTorch's allocator keeps reserved memory, so that the
first steps reach the peak; ten minutes include an evaluation or a longer sample."""


class TenantProfile(Resource, frozen=True, kw_only=True):
    """Prediction and limits of a tenant, by which the next tenant of its GPU is decided without further lookups."""

    memory_mib: (
        Annotated[int, field("Upper bound of its memory on each GPU, in MiB; unknown when left out.", ge=0, le=MAX_MIB)]
        | None
    ) = None
    gpu_util_percent: Annotated[float, field("Predicted GPU utilization alone, 0..100.", ge=0, le=100)] = 100.0
    sm_active_ratio: Annotated[float, field("Predicted SM activity alone, 0..1.", ge=0, le=1)] = 1.0
    dram_active_ratio: Annotated[float, field("Predicted DRAM activity alone, 0..1.", ge=0, le=1)] = 1.0
    max_slowdown: Annotated[float, field("Largest slowdown that it accepts.", ge=1)] = 1.0
    tenancy: Annotated[Tenancy, field("Jobs with which it may share a GPU.")] = Tenancy.NAMESPACE
    family: Annotated[
        str, field("Family and digest of its job, for learned slowdowns; empty if unknown.", max_length=128)
    ] = ""
    comparable: Annotated[
        bool,
        field("Whether an earlier run of the same job showed its step time alone, so that slowdowns are measured."),
    ] = False
    provisional: Annotated[
        bool, field("Whether memoryMib, or the whole GPU without it, counts only until its own peak is measured.")
    ] = False
    measured_mib: (
        Annotated[
            int,
            field(
                "Measured peak plus a margin, in MiB, which counts instead of memoryMib once the peak is stable. "
                "It no longer counts once a larger peak is measured.",
                ge=1,
                le=MAX_MIB,
            ),
        ]
        | None
    ) = None

    def counted_mib(self, peak_mib: int) -> int | None:
        """Return the memory to count for it on one GPU, in MiB; None means the whole GPU.

        Args:
            peak_mib: Its measured peak on that GPU, which counts if it is larger; 0 if nothing was measured.
        """
        if self.measured_mib is not None and peak_mib <= self.measured_mib:
            return self.measured_mib
        return None if self.memory_mib is None else max(self.memory_mib, peak_mib)


def tenancy_domain(namespace: str, group: str) -> str:
    """Return the tenancy group by name, or the namespace that belongs to none, as a message names it."""
    return f"tenancy group {group}" if group else f"namespace {namespace}"


class Reservation(Resource, frozen=True, kw_only=True):
    """Right of a pod to use GPUs. It is the single authority on this."""

    pod_uid: Annotated[PodUid, field("UID of the pod that it is for.", min_length=1)]
    pod_namespace: Annotated[str, field("The pod's namespace.")]
    pod_name: Annotated[str, field("The pod's name.")]
    job_uid: Annotated[JobUid, field("UID of the pod's GpuTrainingJob.")]
    job_name: Annotated[str, field("The job's name.")]
    gpu_uuids: Annotated[
        list[GpuUuid],
        field("UUIDs of its GPUs, one for each slot of the pod.", schema=ATOMIC, min_length=1, max_length=16),
    ]
    mode: Annotated[SharingMode, field("How the GPUs are shared.")]
    memory_limit_mib: Annotated[int, field("Memory limit on each GPU, in MiB; none when left out.", ge=1)] | None = None
    thread_percentage: Annotated[int, field("MPS active thread percentage.", ge=1, le=100)] | None = None
    mig_profile: Annotated[str | None, field("MIG profile, such as 1g.5gb.")] = None
    tenancy_group: Annotated[
        str,
        field(
            "Tenancy group of the pod's namespace; empty if it is in none. Jobs of one group share MPS servers.",
            max_length=63,
        ),
    ] = ""
    run_as_user: (
        Annotated[
            int,
            field(
                "User that the pod runs as, if its spec names one. An MPS server serves one user at a time.",
                ge=0,
                le=MAX_UID,
            ),
        ]
        | None
    ) = None
    generation: Annotated[
        int,
        field(
            "Number of this reservation, larger than that of any earlier one of the pod. Partitions refer to it.", ge=1
        ),
    ] = 1
    reserved_at: Annotated[str, field("Time when it was made, RFC 3339.")] = ""
    deadline: Annotated[str, field("Time when it expires unless its pod is bound, RFC 3339.")] = ""
    tenant: Annotated[TenantProfile, field("Prediction and limits that the decision used.")] = TenantProfile()
    expected_slowdown: Annotated[
        float, field("Predicted slowdown of this tenant at the time of the decision.", ge=1)
    ] = 1.0
    policy: Annotated[str, field("Policy that chose the GPUs.")] = ""
    reason: Annotated[str, field("Reason for these GPUs.", max_length=MAX_REASON_LENGTH)] = ""

    @property
    def tenancy_domain(self) -> str:
        """The tenancy group or else the namespace: its pods share MPS servers."""
        return tenancy_domain(self.pod_namespace, self.tenancy_group)


class GpuNodeSpec(Resource, frozen=True, kw_only=True):
    """Desired state, written by the scheduler only.

    A pod has one reservation. If an administrator adds a second one by hand, the first counts.
    """

    reservations: Annotated[
        list[Reservation], field("Rights of pods to use GPUs.", schema=ATOMIC, max_length=1024)
    ] = []

    def __post_init__(self) -> None:
        """Keep the first reservation of each pod."""
        first = {one.pod_uid: one for one in reversed(self.reservations)}
        if len(first) < len(self.reservations):
            kept = [one for one in self.reservations if first[one.pod_uid] is one]
            msgspec.structs.force_setattr(self, "reservations", kept)


class NvmlFigures(Resource, frozen=True, kw_only=True, order=True):
    """Speed of a GPU as NVML reports it; 0 if unknown. It describes products that Carpool has no table of."""

    cuda_cores: Annotated[int, field("FP32 cores.", ge=0, le=MAX_MIB)] = 0
    sm_clock_mhz: Annotated[int, field("Largest SM clock, in MHz.", ge=0, le=MAX_MIB)] = 0
    memory_clock_mhz: Annotated[int, field("Largest memory clock, in MHz.", ge=0, le=MAX_MIB)] = 0
    memory_bus_bits: Annotated[int, field("Width of the memory bus, in bits.", ge=0, le=MAX_MIB)] = 0
    power_limit_w: Annotated[int, field("Default power limit, in W.", ge=0, le=MAX_MIB)] = 0

    @property
    def is_complete(self) -> bool:
        """Whether every figure is known."""
        return all(msgspec.structs.astuple(self))


NO_FIGURES = NvmlFigures()


class Device(Resource, frozen=True, kw_only=True):
    """One GPU."""

    uuid: Annotated[GpuUuid, field("NVML's UUID.", max_length=128)]
    index: Annotated[int, field("NVML's index on the node.", ge=0, le=MAX_GPUS - 1)]
    product: Annotated[
        str, field("Product by NVML's name; begins with `Simulated` if there is no hardware.", max_length=256)
    ]
    memory_mib: Annotated[int, field("Total memory, in MiB.", ge=0, le=MAX_MIB)]
    reserved_mib: Annotated[
        int, field("Memory for no tenant, in MiB: the driver's, and a margin for fragmentation.", ge=0, le=MAX_MIB)
    ] = 0
    compute_capability: Annotated[
        str, field("CUDA compute capability, such as 8.0; empty if unknown.", pattern=r"^([0-9]{1,3}\.[0-9]{1,3})?$")
    ] = ""
    figures: Annotated[NvmlFigures, field("Its speed as NVML reports it.")] = NO_FIGURES
    mig_profiles: Annotated[list[str], field("MIG profiles that it supports; empty without MIG.", schema=ATOMIC)] = []
    modes: Annotated[list[SharingMode], field("Sharing modes that the agent can prepare.", schema=ATOMIC)] = []
    mode: Annotated[SharingMode | None, field("Present sharing mode; absent when idle.")] = None
    health: Annotated[DeviceHealth, field("Whether the GPU takes new pods.")] = DeviceHealth.HEALTHY
    health_message: Annotated[str, field("Reason why it is unhealthy; empty if it is healthy.")] = ""
    numa_node: Annotated[int | None, field("NUMA node.")] = None
    nvlink_peers: Annotated[
        list[GpuUuid],
        field("UUIDs of the GPUs that it reaches by NVLink, directly or through a switch.", schema=ATOMIC),
    ] = []


class Partition(Resource, frozen=True, kw_only=True):
    """Progress of the agent with one reservation."""

    pod_uid: Annotated[PodUid, field("UID of the reservation's pod.")]
    generation: Annotated[int, field("Generation of the reservation.", ge=0)]
    state: Annotated[PartitionState, field("Preparing, Ready or Failed.")]
    message: Annotated[str, field("Steps that were done, or why they failed.", max_length=4096)] = ""


class Anomaly(Resource, frozen=True, kw_only=True):
    """Unusual behaviour of a pod's training, with the numbers of the moment in which it was found."""

    type: Annotated[str, field("StepTimeDrift, Stalled or MemoryNearLimit.", max_length=64)]
    reason: Annotated[str, field("Likeliest cause, one CamelCase word.", max_length=64)]
    message: Annotated[str, field("Numbers and likeliest cause.", max_length=512)] = ""
    ends_below_seconds: Annotated[float, field("Step time below which a drift ends, in seconds.", ge=0)] = 0.0


class Tenant(Resource, frozen=True, kw_only=True):
    """Measured use of a GPU by a pod."""

    pod_uid: Annotated[PodUid, field("UID of the pod.")]
    gpu_uuid: Annotated[GpuUuid, field("UUID of the GPU.")]
    memory_mib: Annotated[int, field("Memory in use, in MiB.", ge=0)] = 0
    peak_memory_mib: Annotated[int, field("Largest memory measured, in MiB.", ge=0)] = 0
    gpu_util_percent: Annotated[
        float | None, field("Share of time in which its kernels ran, 0..100, mean of 90 s; absent if unknown.")
    ] = None
    sm_active_ratio: Annotated[
        float | None, field("Share of SMs with its work, 0..1, mean of 90 s; absent if unknown.")
    ] = None
    working: Annotated[bool | None, field("Whether its kernels ran in the last seconds; absent if unknown.")] = None
    settled: Annotated[
        bool, field("Whether it was measured for 90 s. Before that its activity does not count for co-tenants.")
    ] = False
    power_w: Annotated[float | None, field("Its share of the GPU's power, in W; absent if unknown.")] = None
    steps: (
        Annotated[int, field("Training steps since the pod started, which it reports; absent without a report.", ge=0)]
        | None
    ) = None
    steps_at: Annotated[str | None, field("Time of `steps`, RFC 3339; steps since then are not counted.")] = None
    step_time_seconds: Annotated[
        float | None, field("Mean time of a step without checkpoints, mean of 90 s, in seconds.")
    ] = None
    step_time_deviation_seconds: Annotated[
        float | None,
        field("Standard deviation of that mean between readings, in seconds; absent before twenty readings."),
    ] = None
    tenants_since: Annotated[
        str | None, field("When a process of another pod last came to the GPU or left it, RFC 3339.")
    ] = None
    checkpointed_at: Annotated[
        str | None, field("When steps followed the last checkpoint that it wrote, RFC 3339.")
    ] = None
    solo_step_time_seconds: Annotated[
        float | None, field("The mean while no other pod worked on the GPU; absent before twenty such steps.")
    ] = None
    samples_per_second: Annotated[float | None, field("Samples of all its processes, mean of 90 s.")] = None
    data_wait_ratio: Annotated[float | None, field("Share of time in which it waited for data, 0..1.")] = None
    checkpoint_ratio: Annotated[float | None, field("Share of time in which it waited for checkpoints, 0..1.")] = None
    copy_ratio: Annotated[float | None, field("Share of time in which it waited for copies to the GPU, 0..1.")] = None
    anomalies: Annotated[list[Anomaly], field("Its present anomalies.", schema=ATOMIC, max_length=8)] = []

    @property
    def slowdown(self) -> float | None:
        """Measured step time over its own step time alone, at least 1; None until both are known."""
        if not (self.settled and self.step_time_seconds and self.solo_step_time_seconds):
            return None
        return max(1.0, self.step_time_seconds / self.solo_step_time_seconds)


class Struck(Resource, frozen=True, kw_only=True):
    """A pod that a fault of its MPS server or daemon ended together with its co-tenants."""

    pod_uid: Annotated[PodUid, field("UID of the pod.")]
    message: Annotated[str, field("The fault and the pods that it ended.", max_length=4096)] = ""


class NodeSummary(Resource, frozen=True, kw_only=True):
    """Columns of `kubectl get gpn`, which shows only single values. Computed for people; programs must not read it."""

    gpus: Annotated[str, field("GPUs of each product.", max_length=512)]
    healthy: Annotated[int, field("Number of healthy GPUs.", ge=0)]
    tenants: Annotated[int, field("Number of pods whose share of a GPU is ready.", ge=0)]
    memory: Annotated[str, field("Total memory of one GPU, with its unit.")]


class GpuNodeStatus(Resource, frozen=True, kw_only=True):
    """Actual state, written by the node's agent only."""

    agent_version: Annotated[str, field("Version of the agent.")] = ""
    simulated: Annotated[bool, field("True if the GPUs are simulated.")] = False
    devices: Annotated[list[Device], field("GPUs of the node.", schema=ATOMIC, max_length=MAX_GPUS)] = []
    partitions: Annotated[list[Partition], field("Progress of the agent with each reservation.", schema=ATOMIC)] = []
    tenants: Annotated[list[Tenant], field("Measured use of each GPU by each pod, smoothed.", schema=ATOMIC)] = []
    struck: Annotated[
        list[Struck],
        field(
            "Pods that a fault of their MPS server or daemon ended together in the last ten minutes.",
            schema=ATOMIC,
            max_length=MAX_STRUCK,
        ),
    ] = []
    conditions: Annotated[
        list[Condition],
        field(
            "Ready, MpsAvailable and Preflight, as the agent last reported; they stay if the agent dies.", schema=ATOMIC
        ),
    ] = []
    summary: Annotated[NodeSummary | None, field("Columns of `kubectl get`.")] = None


class GpuNode(Resource, frozen=True, kw_only=True):
    """GPUs of one node, the reservations of pods for them, and their measured use."""

    api_version: str = "carpool.dev/v1alpha1"
    kind: str = "GpuNode"
    metadata: ObjectMeta
    spec: Annotated[GpuNodeSpec, field("Desired state: reservations.", schema=ATOMIC_MAP)] = GpuNodeSpec()
    status: Annotated[GpuNodeStatus, field("Actual state: GPUs, partitions and use.", schema=ATOMIC_MAP)] = (
        GpuNodeStatus()
    )


MAX_NAMED_JOBS = 5
"""Jobs that are named; the rest are counted."""


def describe_later_tenants(node: GpuNode, own: Reservation) -> str:
    """Return the jobs that got a reservation's GPUs after it, as a suffix of its reason; empty without any."""
    later = sorted(
        {
            f"{other.pod_namespace}/{other.job_name}"
            for other in node.spec.reservations
            if other.job_uid != own.job_uid and other.reserved_at > own.reserved_at
            if set(other.gpu_uuids) & set(own.gpu_uuids)
        }
    )
    if not later:
        return ""
    more = [f"{len(later) - MAX_NAMED_JOBS} more"] if len(later) > MAX_NAMED_JOBS else []
    return f"; joined since by {', '.join([*later[:MAX_NAMED_JOBS], *more])}, not counted here"
