"""`GpuNode`: the GPUs of one node. `spec` is what the scheduler decided, `status` is what its agent found."""

from typing import Annotated

import msgspec

from carpool_core.resources.meta import Condition, ObjectMeta
from carpool_core.resources.schema import ATOMIC, ATOMIC_MAP, Resource, field
from carpool_core.values import DeviceHealth, GpuUuid, JobUid, PartitionState, PodUid, SharingMode, Tenancy

MAX_MIB = 1024 * 1024 * 1024
"""Upper bound of every amount of memory, in MiB: 1 PiB, as for a job's own numbers."""
MAX_GPUS = 256
"""GPUs of one node that the API server accepts."""
MAX_STRUCK = 256
"""Pods of one node that are told to have ended together."""
MAX_UID = 2**31 - 1
"""Of the users that the API server accepts for a pod."""
MAX_REASON_LENGTH = 4096
"""Characters of a reservation's reason that whoever reads it accepts."""


class TenantProfile(Resource, frozen=True, kw_only=True):
    """What the decision counted with: enough to decide about the next tenant without looking anything up."""

    memory_mib: (
        Annotated[int, field("Upper bound of its memory on each GPU, in MiB; unknown when left out.", ge=0, le=MAX_MIB)]
        | None
    ) = None
    gpu_util_percent: Annotated[float, field("Predicted GPU utilization alone, 0..100.", ge=0, le=100)] = 100.0
    sm_active_ratio: Annotated[float, field("Predicted SM activity alone, 0..1.", ge=0, le=1)] = 1.0
    dram_active_ratio: Annotated[float, field("Predicted DRAM activity alone, 0..1.", ge=0, le=1)] = 1.0
    max_slowdown: Annotated[float, field("Slowdown that it accepts.", ge=1)] = 1.0
    tenancy: Annotated[Tenancy, field("With whose jobs it may share.")] = Tenancy.NAMESPACE
    provisional: Annotated[
        bool, field("Whether memoryMib, or the whole GPU without it, counts only until its own peak was measured.")
    ] = False
    measured_mib: (
        Annotated[
            int,
            field(
                "What counts in place of memoryMib since its measured peak has stood still: that and a margin, in MiB. "
                "Void once it is measured to take more.",
                ge=1,
                le=MAX_MIB,
            ),
        ]
        | None
    ) = None

    def counted_mib(self, peak_mib: int) -> int | None:
        """Return the memory to count for it on one GPU, in MiB; None where that is the whole GPU.

        Args:
            peak_mib: The most that it was measured to take there; 0 where nothing was. What exceeds a promise counts.
        """
        if self.measured_mib is not None and peak_mib <= self.measured_mib:
            return self.measured_mib
        return None if self.memory_mib is None else max(self.memory_mib, peak_mib)


class Reservation(Resource, frozen=True, kw_only=True):
    """The single authority on who may use which GPU."""

    pod_uid: Annotated[PodUid, field("UID of the pod that it is for.", min_length=1)]
    pod_namespace: Annotated[str, field("The pod's namespace.")]
    pod_name: Annotated[str, field("The pod's name.")]
    job_uid: Annotated[JobUid, field("UID of the pod's GpuTrainingJob.")]
    job_name: Annotated[str, field("The job's name.")]
    gpu_uuids: Annotated[
        list[GpuUuid], field("GPUs, one for each slot of the pod.", schema=ATOMIC, min_length=1, max_length=16)
    ]
    mode: Annotated[SharingMode, field("How the GPUs are shared.")]
    memory_limit_mib: Annotated[int, field("Memory limit on each GPU, in MiB; none when left out.", ge=1)] | None = None
    thread_percentage: Annotated[int, field("MPS active thread percentage.", ge=1, le=100)] | None = None
    mig_profile: Annotated[str, field("MIG profile, such as 1g.5gb.")] | None = None
    run_as_user: (
        Annotated[
            int,
            field(
                "User that the pod runs as, where its spec says: an MPS server serves one at a time.",
                ge=0,
                le=MAX_UID,
            ),
        ]
        | None
    ) = None
    generation: Annotated[
        int,
        field(
            "Number of this reservation, larger than that of any earlier one of the same pod: reports name it.", ge=1
        ),
    ] = 1
    reserved_at: Annotated[str, field("When it was made, RFC 3339.")] = ""
    deadline: Annotated[str, field("When it lapses unless its pod is bound, RFC 3339.")] = ""
    tenant: Annotated[TenantProfile, field("What the decision counted with.")] = TenantProfile()
    expected_slowdown: Annotated[
        float, field("Predicted slowdown of this tenant at the time of the decision.", ge=1)
    ] = 1.0
    policy: Annotated[str, field("Policy that chose the place.")] = ""
    reason: Annotated[str, field("Why this place.", max_length=MAX_REASON_LENGTH)] = ""


class GpuNodeSpec(Resource, frozen=True, kw_only=True):
    """The desired state. Written only by the scheduler.

    A pod has one reservation. Who edits by hand may write more of one, and then the first holds for all who read it.
    """

    reservations: Annotated[list[Reservation], field("Who may use which GPU.", schema=ATOMIC, max_length=1024)] = []

    def __post_init__(self) -> None:
        """Leave out what nobody may count twice."""
        first = {one.pod_uid: one for one in reversed(self.reservations)}
        if len(first) < len(self.reservations):
            kept = [one for one in self.reservations if first[one.pod_uid] is one]
            msgspec.structs.force_setattr(self, "reservations", kept)


class Device(Resource, frozen=True, kw_only=True):
    """One GPU."""

    uuid: Annotated[GpuUuid, field("NVML's UUID.", max_length=128)]
    index: Annotated[int, field("NVML's index on the node.", ge=0, le=MAX_GPUS - 1)]
    product: Annotated[
        str, field("Product by NVML's name; begins with `Simulated` where there is no hardware.", max_length=256)
    ]
    memory_mib: Annotated[int, field("Total memory, in MiB.", ge=0, le=MAX_MIB)]
    reserved_mib: Annotated[
        int,
        field(
            "Memory that no tenant can have, in MiB: the driver's, and a margin for fragmentation.", ge=0, le=MAX_MIB
        ),
    ] = 0
    compute_capability: Annotated[
        str,
        field("CUDA compute capability, such as 8.0; empty where unknown.", pattern=r"^([0-9]{1,3}\.[0-9]{1,3})?$"),
    ] = ""
    mig_profiles: Annotated[list[str], field("MIG profiles that it supports; empty without MIG.", schema=ATOMIC)] = []
    modes: Annotated[list[SharingMode], field("Sharing modes that the agent can prepare.", schema=ATOMIC)] = []
    mode: Annotated[SharingMode, field("Sharing mode at present; none when idle.")] | None = None
    health: Annotated[DeviceHealth, field("Whether new work may go there.")] = DeviceHealth.HEALTHY
    health_message: Annotated[str, field("Why it is unhealthy.")] = ""
    numa_node: Annotated[int, field("NUMA node.")] | None = None
    nvlink_peers: Annotated[
        list[GpuUuid], field("GPUs of the node that it reaches by NVLink, directly or through a switch.", schema=ATOMIC)
    ] = []


class Partition(Resource, frozen=True, kw_only=True):
    """How far the agent got with one reservation."""

    pod_uid: Annotated[PodUid, field("UID of the reservation's pod.")]
    generation: Annotated[int, field("Generation of the reservation that this speaks of.", ge=0)]
    state: Annotated[PartitionState, field("Preparing, Ready or Failed.")]
    message: Annotated[str, field("What was done, or why it failed.", max_length=4096)] = ""


class Tenant(Resource, frozen=True, kw_only=True):
    """What a pod was measured to use of a GPU."""

    pod_uid: Annotated[PodUid, field("UID of the pod.")]
    gpu_uuid: Annotated[GpuUuid, field("The GPU.")]
    memory_mib: Annotated[int, field("Memory in use, in MiB.", ge=0)] = 0
    peak_memory_mib: Annotated[int, field("Largest memory seen, in MiB.", ge=0)] = 0
    gpu_util_percent: (
        Annotated[
            float, field("Share of time in which its kernels ran, 0..100, a mean over 90 s; absent where unknown.")
        ]
        | None
    ) = None
    sm_active_ratio: (
        Annotated[float, field("Share of SMs with its work, 0..1, a mean over 90 s; absent where unknown.")] | None
    ) = None
    working: Annotated[bool, field("Whether its kernels ran in the last seconds; absent where unknown.")] | None = None
    power_w: Annotated[float, field("Its share of the GPU's power, in W; absent where unknown.")] | None = None
    step_time_seconds: (
        Annotated[float, field("Mean time of a step, where the process reports it, in seconds.")] | None
    ) = None


class Struck(Resource, frozen=True, kw_only=True):
    """A pod that ended together with others, which was not its fault, or that of one of them only."""

    pod_uid: Annotated[PodUid, field("UID of the pod.")]
    message: Annotated[str, field("What happened, and which pods it ended.", max_length=4096)] = ""


class NodeSummary(Resource, frozen=True, kw_only=True):
    """The columns of `kubectl get gpn`, which can show no more than single values. Computed; decide nothing by it."""

    gpus: Annotated[str, field("GPUs of each product.", max_length=512)]
    healthy: Annotated[int, field("Number of healthy GPUs.", ge=0)]
    tenants: Annotated[int, field("Number of pods that have a share of a GPU ready.", ge=0)]
    memory: Annotated[str, field("Total memory of one GPU, with its unit.")]


class GpuNodeStatus(Resource, frozen=True, kw_only=True):
    """The actual state. Written only by the node's agent."""

    agent_version: Annotated[str, field("Version of the agent.")] = ""
    simulated: Annotated[bool, field("True where the GPUs are simulated.")] = False
    heartbeat_time: (
        Annotated[
            str,
            field(
                "When the agent last wrote, RFC 3339. One that has not for a minute counts as dead: its node gets no "
                "new work, whatever the condition Ready says."
            ),
        ]
        | None
    ) = None
    devices: Annotated[list[Device], field("GPUs of the node.", schema=ATOMIC, max_length=MAX_GPUS)] = []
    partitions: Annotated[list[Partition], field("Progress of each reservation.", schema=ATOMIC)] = []
    tenants: Annotated[list[Tenant], field("Measured use, smoothed.", schema=ATOMIC)] = []
    struck: Annotated[
        list[Struck],
        field(
            "Pods that a fault of their MPS server or its daemon has ended together in the last ten minutes.",
            schema=ATOMIC,
            max_length=MAX_STRUCK,
        ),
    ] = []
    conditions: Annotated[
        list[Condition],
        field("Ready, as the agent said last: nobody else writes it, so that a dead one's stays True.", schema=ATOMIC),
    ] = []
    summary: Annotated[NodeSummary, field("What `kubectl get` shows.")] | None = None


class GpuNode(Resource, frozen=True, kw_only=True):
    """The GPUs of one node, who may use them, and who does."""

    api_version: str = "carpool.dev/v1alpha1"
    kind: str = "GpuNode"
    metadata: ObjectMeta
    spec: Annotated[GpuNodeSpec, field("Who may use which GPU.", schema=ATOMIC_MAP)] = GpuNodeSpec()
    status: Annotated[GpuNodeStatus, field("What the agent found.", schema=ATOMIC_MAP)] = GpuNodeStatus()


MAX_NAMED_JOBS = 5
"""Jobs that are named; of more it is said how many."""


def describe_later_tenants(node: GpuNode, own: Reservation) -> str:
    """Say who came to a reservation's GPUs after it, to stand behind its reason; empty where nobody did."""
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
