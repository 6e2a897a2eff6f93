"""What Carpool reads of a pod; everything else of it is never decoded."""

import re
from typing import NamedTuple

import msgspec

from carpool_core.keys import DOMAIN, RESOURCE_GPU
from carpool_core.resources.meta import ObjectMeta


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Camel-cased, partial view of a Kubernetes object."""


class OwnerReference(_Wire, frozen=True, kw_only=True):
    """One owner of an object."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class PodMeta(ObjectMeta, frozen=True, kw_only=True, rename="camel"):
    """`metadata` of a pod, with its owners."""

    owner_references: list[OwnerReference] = []


class ResourceRequirements(_Wire, frozen=True, kw_only=True):
    """Requests and limits of a container."""

    limits: dict[str, int | str] = {}
    requests: dict[str, int | str] = {}


class SecurityContext(_Wire, frozen=True, kw_only=True):
    """Whom a container, or all of a pod's, run as."""

    run_as_user: int | None = None
    """None: the pod's for a container, the image's for a pod."""


class Container(_Wire, frozen=True, kw_only=True):
    """A container of a pod's spec."""

    name: str = ""
    resources: ResourceRequirements = ResourceRequirements()
    security_context: SecurityContext = SecurityContext()


class PodSpec(_Wire, frozen=True, kw_only=True):
    """A pod's spec, as far as placement depends on it."""

    node_name: str = ""
    scheduler_name: str = ""
    priority: int = 0
    containers: list[Container] = []
    init_containers: list[Container] = []
    security_context: SecurityContext = SecurityContext()
    host_users: bool = True
    """False: its users are others on the node than in the container."""


def container_uid(spec: PodSpec, container: str = "") -> int | None:
    """Return the user of the node that a container runs as; None where its image decides, or a user namespace.

    Args:
        spec: Of its pod.
        container: Its name; where empty the one that asks for GPUs, or the first, which gets them where none asks.
    """
    if not spec.host_users:
        return None
    everyone = (*spec.containers, *spec.init_containers)
    asking = [c for c in everyone if RESOURCE_GPU in {**c.resources.limits, **c.resources.requests}]
    asked = [c for c in everyone if c.name == container] if container else [*asking, *everyone]
    own = asked[0].security_context.run_as_user if asked else None
    return spec.security_context.run_as_user if own is None else own


class PodCondition(_Wire, frozen=True, kw_only=True):
    """A condition of a pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class ContainerTerminated(_Wire, frozen=True, kw_only=True):
    """How a container ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""
    finished_at: str | None = None
    """None where the container never started: the kubelet then sends null."""


class ContainerRunning(_Wire, frozen=True, kw_only=True):
    """Since when a container runs."""

    started_at: str | None = None


class ContainerWaiting(_Wire, frozen=True, kw_only=True):
    """Why a container does not run yet."""

    reason: str = ""
    message: str = ""


class ContainerState(_Wire, frozen=True, kw_only=True):
    """One of the three."""

    waiting: ContainerWaiting | None = None
    running: ContainerRunning | None = None
    terminated: ContainerTerminated | None = None


class ContainerStatus(_Wire, frozen=True, kw_only=True):
    """Status of one container."""

    name: str = ""
    state: ContainerState = ContainerState()
    ready: bool = False
    restart_count: int = 0


class PodStatus(_Wire, frozen=True, kw_only=True):
    """Status of a pod."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: list[PodCondition] = []
    container_statuses: list[ContainerStatus] = []


class Pod(_Wire, frozen=True, kw_only=True):
    """A pod, projected to what Carpool uses."""

    metadata: PodMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def is_finished(self) -> bool:
        """Whether its containers will never run again."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def has_started(self) -> bool:
        """Whether a container of it runs or ever ran."""
        ran = any(s.state.running or s.state.terminated or s.restart_count for s in self.status.container_statuses)
        return ran or self.status.phase not in ("", "Pending")


class WorkerName(NamedTuple):
    """What the name of a worker's pod says. Nobody can change a name, while labels anybody with access to pods can."""

    job: str
    worker: int
    attempt: int

    @property
    def pod(self) -> str:
        """Name of the pod. The same three always give the same name, so no pod is created twice."""
        return f"{self.job}-worker-{self.worker}-{self.attempt}"


_WORKER = re.compile(r"(.+)-worker-(0|[1-9][0-9]{0,5})-([1-9][0-9]{0,8})", re.ASCII)


def parse_worker_name(pod_name: str) -> WorkerName | None:
    """Read the name of a pod; None where no worker's pod is called so."""
    found = _WORKER.fullmatch(pod_name)
    return None if found is None else WorkerName(found[1], int(found[2]), int(found[3]))


def job_owner_reference(metadata: PodMeta) -> OwnerReference | None:
    """Return the reference to the GpuTrainingJob that controls an object; None where something else does, or nothing.

    Whoever creates a pod writes it: alone it proves nothing.
    """
    for owner in metadata.owner_references:
        if owner.controller and is_training_job(owner.api_version, owner.kind):
            return owner
    return None


def is_training_job(api_version: str, kind: str) -> bool:
    """Whether an object of this type is a GpuTrainingJob, of whatever version."""
    return kind == "GpuTrainingJob" and api_version.partition("/")[0] == DOMAIN
