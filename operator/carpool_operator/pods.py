"""The pod of (job, worker, attempt), built purely; and what a template may not say."""

import copy
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from carpool_core import keys
from carpool_core.kube.errors import Invalid
from carpool_core.kube.pods import Pod, PodMeta, WorkerName, job_owner_reference, parse_worker_name
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.values import JobUid

MASTER_PORT = 29500
"""PyTorch's own default."""

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""What the name of a Service may be; a job's may also begin with a digit or hold dots."""

_SUFFIX = "-workers"


def needs_service(job: GpuTrainingJob) -> bool:
    """Whether there are several workers, which have to find each other."""
    return job.spec.workers > 1


def service_name(job: GpuTrainingJob) -> str:
    """Name of the job's Service, which is a part of its workers' host names."""
    name = job.metadata.name
    if _LABEL.fullmatch(name):
        return f"{name}{_SUFFIX}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"job-{name.replace('.', '-')[:40]}-{digest}{_SUFFIX}"


def host_name(worker: int) -> str:
    """Host name of a worker. Not its pod's name, which may be longer than a host's."""
    return f"worker-{worker}"


def build_service(job: GpuTrainingJob, owner: dict[str, Any]) -> dict[str, Any]:
    """Build the headless Service that gives each worker of the job a name in the cluster's DNS."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(job),
            "namespace": job.metadata.namespace,
            "labels": {"app.kubernetes.io/managed-by": "carpool", keys.LABEL_JOB: job.metadata.name},
            "ownerReferences": [owner],
        },
        "spec": {
            "clusterIP": "None",
            "selector": {keys.LABEL_JOB_UID: job.metadata.uid},
            # Workers look each other up while they start, before any of them is ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "rendezvous", "port": MASTER_PORT}],
        },
    }


def join(spec: dict[str, Any], job: GpuTrainingJob, worker: int) -> None:
    """Give a worker's pod its host name and every container the variables; what the template says itself stays."""
    if not needs_service(job):
        return
    spec.setdefault("hostname", host_name(worker))
    spec.setdefault("subdomain", service_name(job))
    variables = _variables(job, worker, spec["subdomain"])
    for container in spec["containers"]:
        env = list(container.get("env") or [])
        known = {one.get("name") for one in env}
        container["env"] = [*({"name": n, "value": v} for n, v in variables.items() if n not in known), *env]


def _variables(job: GpuTrainingJob, worker: int, subdomain: str) -> dict[str, str]:
    address, port = f"{host_name(0)}.{subdomain}", str(MASTER_PORT)
    workers = str(job.spec.workers)
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "RANK": str(worker),
        "WORLD_SIZE": workers,
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": port,
        "PET_NODE_RANK": str(worker),
        "PET_NNODES": workers,
        "PET_NPROC_PER_NODE": str(job.spec.gpus_per_worker),
    }


_TEMPLATE_FIELDS = frozenset({"metadata", "spec"})
_METADATA_FIELDS = frozenset({"labels", "annotations", "name", "namespace", "creationTimestamp"})
"""The pod takes the first two over; the others, which tools print, mean nothing in the template of a Job either."""

_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
_FOREIGN_GPUS = ("nvidia.com/gpu", "nvidia.com/mig-")


def pod_name(job_name: str, worker: int, attempt: int) -> str:
    """Name the pod of a worker's attempt."""
    return WorkerName(job_name, worker, attempt).pod


def job_key(namespace: str, name: str) -> str:
    """Key of a job in caches and queue: `namespace/name`."""
    return f"{namespace}/{name}"


def key_of_pod(pod: Pod) -> str | None:
    """Key of the job that a pod says it belongs to (which wakes that job, and is trusted for nothing else)."""
    name = pod.metadata.labels.get(keys.LABEL_JOB)
    return None if name is None else job_key(pod.metadata.namespace, name)


def controller_uid(pod: Pod) -> JobUid | None:
    """UID of the GpuTrainingJob that controls a pod; None where something else does, or nothing."""
    return controller_of(pod.metadata)


def controller_of(metadata: PodMeta) -> JobUid | None:
    """UID of the GpuTrainingJob that controls an object; None where something else does, or nothing."""
    owner = job_owner_reference(metadata)
    return None if owner is None else JobUid(owner.uid)


def worker_of(pod: Pod) -> int | None:
    """Index of the worker that a pod runs, by its name; None where it has no such name."""
    named = parse_worker_name(pod.metadata.name)
    return None if named is None else named.worker


def attempt_of(pod: Pod) -> int | None:
    """Number of the attempt that a pod belongs to, by its name; None where it has no such name."""
    named = parse_worker_name(pod.metadata.name)
    return None if named is None else named.attempt


def is_worker(pod: Pod, job: GpuTrainingJob) -> bool:
    """Whether a pod is one that Carpool made for the job: its controller by UID, and its name, say so alike."""
    named = parse_worker_name(pod.metadata.name)
    return named is not None and named.job == job.metadata.name and controller_uid(pod) == job.metadata.uid


def _resources(container: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every (resource, amount) that a container requests or limits."""
    resources = container.get("resources") or {}
    for part in ("limits", "requests"):
        yield from (resources.get(part) or {}).items()


def _asks_for_gpus(container: Mapping[str, Any]) -> bool:
    return any(resource == keys.RESOURCE_GPU for resource, _ in _resources(container))


def _metadata_error(template: Mapping[str, Any]) -> str | None:
    """Say what is wrong beside the spec; what the pod does not take over, the API server never sees."""
    metadata = template.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        return f"metadata: expected labels and annotations, found {metadata!r}"
    unknown = [*sorted(set(template) - _TEMPLATE_FIELDS)]
    unknown += [f"metadata.{field}" for field in sorted(set(metadata) - _METADATA_FIELDS)]
    if unknown:
        return f"{unknown[0]}: not one of a template's fields; correct its spelling or remove it"
    for part in ("labels", "annotations"):
        named = metadata.get(part) or {}
        if not isinstance(named, Mapping):
            return f"metadata.{part}: expected names with values, found {named!r}"
        for key in named:
            if key.startswith(f"{keys.DOMAIN}/"):
                return f"metadata.{part} sets {key}, which Carpool sets itself: remove it"
    return None


def _container_error(container: Mapping[str, Any], gpus: int) -> str | None:
    name = container.get("name", "?")
    for resource, amount in _resources(container):
        if resource.startswith(_FOREIGN_GPUS):
            return (
                f"container {name} asks for {resource}, a GPU outside of Carpool: "
                f"remove it, spec.gpusPerWorker asks for {keys.RESOURCE_GPU}"
            )
        if resource == keys.RESOURCE_GPU and str(amount) != str(gpus):
            return (
                f"container {name} asks for {amount} {keys.RESOURCE_GPU}, but spec.gpusPerWorker is {gpus}: "
                "remove the resource, or let both say the same"
            )
    return None


def _spec_error(spec: Mapping[str, Any], gpus: int) -> str | None:
    containers = spec.get("containers")
    if not isinstance(containers, list) or not containers or not all(isinstance(c, Mapping) for c in containers):
        return "spec.containers must list at least one container"
    for field, why in (("nodeName", "the scheduler chooses the node"), ("schedulerName", "Carpool sets it")):
        if spec.get(field):
            return f"spec.{field} is set to {spec[field]}, but {why}: remove it"
    if spec.get("restartPolicy", "Never") != "Never":
        return (
            f"spec.restartPolicy is {spec['restartPolicy']}, but workers are restarted by spec.runPolicy.backoffLimit: "
            "remove it or write Never"
        )
    for container in spec.get("initContainers") or []:
        if _asks_for_gpus(container):
            return f"init container {container.get('name', '?')} asks for GPUs; only one container of a worker may"
    asking = [container.get("name", "?") for container in containers if _asks_for_gpus(container)]
    if len(asking) > 1:
        return f"containers {', '.join(asking)} ask for GPUs; only one container of a worker may"
    return next((error for c in containers if (error := _container_error(c, gpus)) is not None), None)


def template_error(job: GpuTrainingJob) -> str | None:
    """Say what in the job's pod template Carpool cannot work with, and what to do; None where all is well."""
    template = job.spec.template
    spec = template.get("spec")
    if not isinstance(spec, Mapping):
        return "spec.template.spec must be a pod's spec with at least one container"
    error = _metadata_error(template) or _spec_error(spec, job.spec.gpus_per_worker)
    return None if error is None else f"spec.template.{error}"


def owner_reference(job: GpuTrainingJob) -> dict[str, Any]:
    """Make the job the controller of an object, so that it is deleted with the job.

    Without `blockOwnerDeletion`, which some clusters allow only to those who may change the job's finalizers.
    """
    return {
        "apiVersion": keys.GROUP_VERSION,
        "kind": "GpuTrainingJob",
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
    }


def _with_gpus(container: dict[str, Any], gpus: int) -> None:
    resources = container.setdefault("resources", {}) or {}
    resources["limits"] = {**(resources.get("limits") or {}), keys.RESOURCE_GPU: str(gpus)}
    container["resources"] = resources


def build_pod(job: GpuTrainingJob, worker: int, attempt: int) -> dict[str, Any]:
    """Build the pod of one worker's attempt from a template without errors (see `template_error`)."""
    template = copy.deepcopy(job.spec.template)
    metadata, spec = template.get("metadata") or {}, template["spec"]
    containers: list[dict[str, Any]] = spec["containers"]
    _with_gpus(next((c for c in containers if _asks_for_gpus(c)), containers[0]), job.spec.gpus_per_worker)
    for container in containers:
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    join(spec, job, worker)
    tolerations = list(spec.get("tolerations") or [])
    if _TOLERATION not in tolerations:
        tolerations.append(_TOLERATION)
    if not spec.get("priorityClassName"):
        spec.pop("priorityClassName", None)  # empty it says nothing, and the cluster's default is set
    spec.update(schedulerName=keys.SCHEDULER_NAME, restartPolicy="Never", tolerations=tolerations)
    labels = {
        "app.kubernetes.io/managed-by": "carpool",
        **(metadata.get("labels") or {}),
        keys.LABEL_JOB: job.metadata.name,
        keys.LABEL_JOB_UID: job.metadata.uid,
        keys.LABEL_WORKER: str(worker),
        keys.LABEL_ATTEMPT: str(attempt),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(job.metadata.name, worker, attempt),
            "namespace": job.metadata.namespace,
            "labels": labels,
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }


_MAY_GROW = frozenset({"volumes", "volumeMounts", "tolerations", "imagePullSecrets"})
"""Lists to which the API server's own admission adds items."""

_DECISIVE = frozenset(
    {"command", "args", "env", "envFrom", "lifecycle", "initContainers", "hostNetwork", "hostPID", "hostIPC"}
)
"""What the API server never adds by itself, and what would make another program of a container."""


def is_as_built(found: Mapping[str, Any], built: Mapping[str, Any]) -> bool:
    """Whether a pod holds all that Carpool puts into such a pod: what it was killed before recording, it may keep.

    A pod that differs is told apart even where only an admission webhook or a unit's spelling made it differ; then
    it is made again, which costs its start.

    Args:
        found: The pod, as the API server returns it.
        built: The pod's body, as it would be created.
    """
    return all(_holds(found.get(part), built[part], part) for part in ("metadata", "spec"))


def _holds(found: Any, wanted: Any, key: str) -> bool:
    if isinstance(wanted, Mapping):
        return not wanted or (isinstance(found, Mapping) and _holds_fields(found, wanted))
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return not wanted or (isinstance(found, Sequence) and _holds_items(found, wanted, key))
    return wanted in (None, found) or str(found) == str(wanted)


def _holds_fields(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    is_altered = any(found.get(name) for name in _DECISIVE if not wanted.get(name))
    return not is_altered and all(_holds(found.get(name), value, name) for name, value in wanted.items())


def _holds_items(found: Sequence[Any], wanted: Sequence[Any], key: str) -> bool:
    if key in _MAY_GROW:
        return all(any(_holds(item, one, key) for item in found) for one in wanted)
    return len(found) == len(wanted) and all(_holds(*pair, key) for pair in zip(found, wanted, strict=True))


_UNREADABLE = re.compile(r'^Pod in version "[^"]*" cannot be handled as a Pod: ')
_INVALID = re.compile(r'^Pod "[^"]*" is invalid: ')
_UNKNOWN_FIELD = re.compile(r'unknown field "([^"]+)"')
_WRONG_TYPE = re.compile(r"cannot unmarshal (\w+)(?: \S+)? into Go struct field [^.]+\.(\S+) of type (.+)$")

_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "number": (int, float), "bool": (bool,), "array": (list,), "object": (dict,),
}  # fmt: skip
"""Types by the names that the API server's decoder gives them."""

_MOST_PLACES = 3


def is_about_the_pod(error: Invalid) -> bool:
    """Whether the pod itself is wrong; an admission webhook that knows no dry run answers 400, too."""
    return bool(_UNREADABLE.match(error.server_message) or _INVALID.match(error.server_message) or error.status == 422)


def sentence(error: Invalid, body: Mapping[str, Any]) -> str:
    """Say which field of the template is wrong, and how.

    Args:
        error: What the API server said.
        body: The pod that it said this of.
    """
    unknown = _UNKNOWN_FIELD.findall(error.server_message)
    if unknown:
        fields = ", ".join(f"spec.template.{field}" for field in unknown)
        return f"{fields}: a pod has no such field; correct its spelling or remove it"
    if found := _WRONG_TYPE.search(error.server_message):
        kind, field, wanted = found.groups()
        places = list(_places(body, field.split("."), kind)) or [field]
        fields = ", ".join(f"spec.template.{place}" for place in places[:_MOST_PLACES])
        return f"{fields}: expected {wanted}, found a value of type {kind}"
    said = _INVALID.sub("", _UNREADABLE.sub("", error.server_message))
    return f"spec.template.{said}" if re.match(r"(spec|metadata)[.\[:]", said) else f"spec.template: {said}"


def _places(value: object, path: Sequence[str], kind: str, at: str = "") -> Iterator[str]:
    """Where below a value the path leads to one of the type, with the indices that the decoder leaves out."""
    if not path:
        if type(value) in _JSON_TYPES.get(kind, ()):
            yield at
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _places(item, path, kind, f"{at}[{index}]")
    elif isinstance(value, dict) and path[0] in value:
        yield from _places(value[path[0]], path[1:], kind, f"{at}.{path[0]}".lstrip("."))
