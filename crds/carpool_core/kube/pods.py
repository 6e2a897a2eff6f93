"""Pods as Carpool reads them; other fields are not decoded."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from carpool_core.keys import DOMAIN, RESOURCE_GPU
from carpool_core.kube.nodes import GPU_TOLERATION, Affinity, NodeConstraints, Toleration
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.schema import Resource


class OwnerReference(Resource, frozen=True, kw_only=True):
    """One owner of an object."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class PodMeta(ObjectMeta, frozen=True, kw_only=True, rename="camel"):
    """`metadata` of a pod, with its owners."""

    owner_references: list[OwnerReference] = []


class ResourceRequirements(Resource, frozen=True, kw_only=True):
    """Requests and limits of a container."""

    limits: dict[str, int | float | str] = {}
    requests: dict[str, int | float | str] = {}


class SecurityContext(Resource, frozen=True, kw_only=True):
    """User of a container or of a pod."""

    run_as_user: int | None = None
    """None means the pod's user for a container, the image's for a pod."""


class Container(Resource, frozen=True, kw_only=True):
    """A container of a pod's spec."""

    name: str = ""
    resources: ResourceRequirements = ResourceRequirements()
    security_context: SecurityContext = SecurityContext()


class SchedulingGate(Resource, frozen=True, kw_only=True):
    """A gate: the scheduler does not see a pod before all of its gates are removed."""

    name: str = ""


class PodSpec(Resource, frozen=True, kw_only=True):
    """The parts of a pod's spec that placement depends on."""

    node_name: str = ""
    priority: int = 0
    scheduling_gates: list[SchedulingGate] = []
    containers: list[Container] = []
    init_containers: list[Container] = []
    security_context: SecurityContext = SecurityContext()
    host_users: bool = True
    """False if the pod has a user namespace, so that its users differ from the node's."""
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    affinity: Affinity | None = None

    @property
    def node_constraints(self) -> NodeConstraints:
        """Which nodes it accepts, as a worker's pod or as a job's template."""
        of_nodes = None if self.affinity is None else self.affinity.node_affinity
        more = () if GPU_TOLERATION in self.tolerations else (GPU_TOLERATION,)
        return NodeConstraints(
            tolerations=(*self.tolerations, *more),
            node_selector=tuple(sorted(self.node_selector.items())),
            required=None if of_nodes is None else of_nodes.required_during_scheduling_ignored_during_execution,
        )


def container_uid(spec: PodSpec, container: str = "") -> int | None:
    """Return the node's UID that a container runs as; None if the image or a user namespace decides it.

    Without a name it is the first container that requests GPUs, else the first, which gets them.
    """
    if not spec.host_users:
        return None
    every = (*spec.containers, *spec.init_containers)
    requesting = [c for c in every if RESOURCE_GPU in {**c.resources.limits, **c.resources.requests}]
    candidates = [c for c in every if c.name == container] if container else [*requesting, *every]
    own = candidates[0].security_context.run_as_user if candidates else None
    return spec.security_context.run_as_user if own is None else own


class PodCondition(Resource, frozen=True, kw_only=True):
    """A condition of a pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class ContainerTerminated(Resource, frozen=True, kw_only=True):
    """How a container ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""
    finished_at: str | None = None
    """None if the container never started."""


class ContainerRunning(Resource, frozen=True, kw_only=True):
    """A running container."""

    started_at: str | None = None


class ContainerWaiting(Resource, frozen=True, kw_only=True):
    """A container that does not run yet, and why."""

    reason: str = ""
    message: str = ""


class ContainerState(Resource, frozen=True, kw_only=True):
    """State of a container; one of the three is set."""

    waiting: ContainerWaiting | None = None
    running: ContainerRunning | None = None
    terminated: ContainerTerminated | None = None


class ContainerStatus(Resource, frozen=True, kw_only=True):
    """Status of one container."""

    name: str = ""
    state: ContainerState = ContainerState()
    ready: bool = False
    restart_count: int = 0


class PodStatus(Resource, frozen=True, kw_only=True):
    """Status of a pod."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: list[PodCondition] = []
    container_statuses: list[ContainerStatus] = []
    init_container_statuses: list[ContainerStatus] = []


class Pod(Resource, frozen=True, kw_only=True):
    """A pod."""

    metadata: PodMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def is_finished(self) -> bool:
        """Whether its containers have ended for good."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def is_gated(self) -> bool:
        """Whether a scheduling gate keeps it from the scheduler."""
        return bool(self.spec.scheduling_gates)

    @property
    def bound_at(self) -> str | None:
        """When it was bound to a node, RFC 3339; None before."""
        scheduled = (c for c in self.status.conditions if c.type == "PodScheduled" and c.status == "True")
        return next((c.last_transition_time for c in scheduled), None) if self.spec.node_name else None

    @property
    def has_started(self) -> bool:
        """Whether one of its containers runs or has run."""
        ran = any(s.state.running or s.state.terminated or s.restart_count for s in self.status.container_statuses)
        return ran or self.status.phase not in ("", "Pending")

    @property
    def is_initializing(self) -> bool:
        """Whether one of its init containers runs."""
        return any(s.state.running for s in self.status.init_container_statuses)


_SCHEDULER_PREFIX = re.compile(r"0/\d+ nodes are available: ")
_SCHEDULER_SUFFIX = re.compile(r"\.?( (no new claims|preemption:|Preemption).*)?$", re.DOTALL)


def scheduler_message(message: str) -> str:
    """Return kube-scheduler's message about a pod that fits on no node as a sentence, without a word on preemption."""
    return _SCHEDULER_SUFFIX.sub("", _SCHEDULER_PREFIX.sub("kube-scheduler found no node: ", message), count=1)


def why_unscheduled(pods: Iterable[Pod]) -> str:
    """Return the first message of kube-scheduler about pods that it cannot place; empty without one."""
    conditions = (one for pod in pods for one in pod.status.conditions if one.type == "PodScheduled")
    messages = (scheduler_message(one.message) for one in conditions if one.reason == "Unschedulable")
    return next(filter(None, messages), "")


class WorkerName(NamedTuple):
    """Job, worker and attempt in the name of a worker's pod. Users can change a pod's labels, but not its name."""

    job: str
    worker: int
    attempt: int

    @property
    def pod(self) -> str:
        """Name of the pod. It is a function of the three, so no pod is created twice."""
        return f"{self.job}-worker-{self.worker}-{self.attempt}"


_WORKER = re.compile(r"(.+)-worker-(0|[1-9][0-9]{0,5})-([1-9][0-9]{0,8})", re.ASCII)


def parse_worker_name(pod_name: str) -> WorkerName | None:
    """Return the parts of a worker's pod name; None for other names."""
    found = _WORKER.fullmatch(pod_name)
    return None if found is None else WorkerName(found[1], int(found[2]), int(found[3]))


def job_owner_reference(metadata: PodMeta) -> OwnerReference | None:
    """Return the owner reference to the GpuTrainingJob that controls an object; None if there is none.

    A user who creates a pod can write any reference, so it proves nothing alone.
    """
    for owner in metadata.owner_references:
        if owner.controller and is_training_job(owner.api_version, owner.kind):
            return owner
    return None


def is_training_job(api_version: str, kind: str) -> bool:
    """Return whether a type is GpuTrainingJob, in any version."""
    return kind == "GpuTrainingJob" and api_version.partition("/")[0] == DOMAIN
