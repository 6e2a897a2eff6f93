"""A job's worker pods, Service and disruption budget: built from the template, validated and recognised. Pure."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from carpool_core import keys
from carpool_core.kube.nodes import GPU_TOLERATION
from carpool_core.kube.pods import Pod, PodMeta, WorkerName, job_owner_reference, parse_worker_name
from carpool_core.resources.job import MAX_WORKERS, GpuTrainingJob
from carpool_core.values import JobUid, ProbeMode, parse_quantity, without_nulls

# Names and owners


def job_key(namespace: str, name: str) -> str:
    """Return the key of a job in caches and work queue: `namespace/name`."""
    return f"{namespace}/{name}"


def key_of(job: GpuTrainingJob) -> str:
    """Return the key of a job."""
    return job_key(job.metadata.namespace, job.metadata.name)


def key_of_pod(pod: Pod) -> str | None:
    """Return the key of the job of which a pod has a worker's name, or which it names as controller; None without one.

    A name cannot be changed, unlike labels and owners.
    """
    named, owner = parse_worker_name(pod.metadata.name), job_owner_reference(pod.metadata)
    if named is not None:
        return job_key(pod.metadata.namespace, named.job)
    return None if owner is None else job_key(pod.metadata.namespace, owner.name)


def pod_name(job_name: str, worker: int, attempt: int) -> str:
    """Return the name of a worker's pod in an attempt."""
    return WorkerName(job_name, worker, attempt).pod


def controller_of(metadata: PodMeta) -> JobUid | None:
    """Return the UID of the GpuTrainingJob that controls an object; None if no job does."""
    owner = job_owner_reference(metadata)
    return None if owner is None else JobUid(owner.uid)


def worker_of(pod: Pod) -> int | None:
    """Return the worker's index by the pod's name; None if it is not a worker's name."""
    named = parse_worker_name(pod.metadata.name)
    return None if named is None else named.worker


def attempt_of(pod: Pod) -> int | None:
    """Return the attempt's number by the pod's name; None if it is not a worker's name."""
    named = parse_worker_name(pod.metadata.name)
    return None if named is None else named.attempt


def is_worker(pod: Pod, job: GpuTrainingJob) -> bool:
    """Return whether both the pod's controller UID and its name are those of a worker of the job."""
    named = parse_worker_name(pod.metadata.name)
    return named is not None and named.job == job.metadata.name and controller_of(pod.metadata) == job.metadata.uid


def started_at(pods: Sequence[Pod]) -> str | None:
    """Return when the first running container started, RFC 3339; None if none runs."""
    times = [
        status.state.running.started_at
        for pod in pods
        for status in pod.status.container_statuses
        if status.state.running is not None and status.state.running.started_at
    ]
    return min(times, default=None)


# The pod

KEPT_BY_AUTOSCALERS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Annotations by which cluster-autoscaler and Karpenter keep the node of a running pod; the template's values win."""

_TOLERATION = msgspec.to_builtins(GPU_TOLERATION)

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Label of NVIDIA's GPU feature discovery; its values have hyphens instead of spaces."""


def owner_reference(job: GpuTrainingJob) -> dict[str, Any]:
    """Return an owner reference that makes the job the controller of an object, which is deleted with the job.

    `blockOwnerDeletion` is left out: some clusters require the right to change the job's finalizers for it.
    """
    return {
        "apiVersion": keys.GROUP_VERSION,
        "kind": "GpuTrainingJob",
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
    }


def _requests_gpus(container: Mapping[str, Any]) -> bool:
    resources = container.get("resources", {})
    return any(keys.RESOURCE_GPU in resources.get(part, {}) for part in ("limits", "requests"))


def _set_gpus(container: dict[str, Any], gpus: int) -> None:
    container.setdefault("resources", {}).setdefault("limits", {})[keys.RESOURCE_GPU] = str(gpus)


def _avoid_products(spec: dict[str, Any], products: Iterable[str]) -> None:
    """Exclude the nodes of some products from each of the template's node selector terms, of which one must match."""
    values = [product.replace(" ", "-") for product in products]
    if not values:
        return
    of_nodes = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    avoid = {"key": _PRODUCT_LABEL, "operator": "NotIn", "values": values}
    for term in of_nodes.setdefault(_REQUIRED, {}).setdefault("nodeSelectorTerms", [{}]):
        term.setdefault("matchExpressions", []).append(avoid)


def _probe_mode(job: GpuTrainingJob, containers: Sequence[Mapping[str, Any]]) -> str:
    """Return `spec.probe`; Off if a container sets PYTHONUSERBASE, which the agent would replace."""
    names = {one.get("name") for container in containers for one in container.get("env", [])}
    return ProbeMode.OFF if "PYTHONUSERBASE" in names else job.spec.probe


def build_pod(job: GpuTrainingJob, worker: int, attempt: int, avoided: Iterable[str] = ()) -> dict[str, Any]:
    """Build a worker's pod of an attempt.

    The pod excludes nodes with `avoided` products, which cannot hold it: autoscalers do not know GPU memory.
    """
    template = without_nulls(job.spec.template)
    metadata, spec = template.get("metadata", {}), template["spec"]
    containers: list[dict[str, Any]] = spec["containers"]
    _set_gpus(next((c for c in containers if _requests_gpus(c)), containers[0]), job.spec.gpus_per_worker)
    for container in containers:
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    if is_gang(job):
        _set_rendezvous(spec, job, worker, attempt)
    if job.spec.gpus_per_worker > 1:
        _set_processes(containers, job.spec.gpus_per_worker)
    _avoid_products(spec, avoided)
    if _TOLERATION not in spec.setdefault("tolerations", []):
        spec["tolerations"].append(_TOLERATION)
    spec.update(schedulerName=keys.SCHEDULER_NAME, restartPolicy="Never")
    # The queue of the scheduler removes this gate; others, such as Kueue's, are removed by their owners.
    spec.setdefault("schedulingGates", []).append({"name": keys.GATE_ADMISSION})
    labels = {
        "app.kubernetes.io/managed-by": "carpool",
        **metadata.get("labels", {}),
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
            "annotations": {
                **KEPT_BY_AUTOSCALERS,
                **metadata.get("annotations", {}),
                keys.ANNOTATION_PROBE: _probe_mode(job, containers),
            },
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }


# Rendezvous: a headless Service, a host name for each pod, and PyTorch's variables
#
# Worker 0 is `MASTER_ADDR`. `RANK` and `WORLD_SIZE` count workers, as `init_process_group("env://")` reads them if each
# worker is one process. `torchrun` reads the `PET_*` variables and sets the others for its processes. The names are
# those of Kubeflow's PyTorchJob.

MASTER_PORT = 29500
"""PyTorch's default."""

_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""Valid Service names; a job's name may also begin with a digit or contain dots."""

_SUFFIX = "-workers"


def is_gang(job: GpuTrainingJob) -> bool:
    """Return whether the job has several workers, which have to find each other."""
    return job.spec.workers > 1


def service_name(job: GpuTrainingJob) -> str:
    """Return the name of the job's Service, which is part of its workers' host names."""
    name = job.metadata.name
    if _SERVICE_NAME.fullmatch(name):
        return f"{name}{_SUFFIX}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"job-{name.replace('.', '-')[:40]}-{digest}{_SUFFIX}"


def build_service(job: GpuTrainingJob) -> dict[str, Any]:
    """Build the headless Service that gives each worker of the job a DNS name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(job),
            "namespace": job.metadata.namespace,
            "labels": {"app.kubernetes.io/managed-by": "carpool", keys.LABEL_JOB: job.metadata.name},
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {
            "clusterIP": "None",
            "selector": {keys.LABEL_JOB_UID: job.metadata.uid},
            # Workers resolve each other's names while they start, before any of them is ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "rendezvous", "port": MASTER_PORT}],
        },
    }


def build_disruption_budget(job: GpuTrainingJob) -> dict[str, Any]:
    """Build the PodDisruptionBudget that forbids the eviction of each running worker of a gang.

    `minAvailable` is the largest number of workers, because the job's own number may change while it is suspended.
    """
    # A GpuTrainingJob has no scale subresource. Without one only an integer `minAvailable` works, no `maxUnavailable`.
    # Source: https://kubernetes.io/docs/tasks/run-application/configure-pdb/#arbitrary-controllers-and-selectors
    service = build_service(job)
    spec = {"minAvailable": MAX_WORKERS, "selector": {"matchLabels": service["spec"]["selector"]}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": service["metadata"], "spec": spec}


def _set_processes(containers: Sequence[dict[str, Any]], gpus: int) -> None:
    """Let `torchrun` start a process for each GPU, with an equal share of the container's CPUs as OpenMP threads.

    Without OMP_NUM_THREADS, `torchrun` gives each of several processes one thread. Values of the template win.
    """
    for container in containers:
        resources = container.get("resources", {})
        cpu = resources.get("limits", {}).get("cpu") or resources.get("requests", {}).get("cpu")
        variables = {"PET_NPROC_PER_NODE": str(gpus)}
        if cpu:
            variables["OMP_NUM_THREADS"] = str(max(1, int(parse_quantity(cpu) / gpus)))
        _add_variables(container, variables)


def _add_variables(container: dict[str, Any], variables: Mapping[str, str]) -> None:
    """Put variables before those of the container, which win."""
    env = container.get("env", [])
    known = {one.get("name") for one in env}
    container["env"] = [*({"name": n, "value": v} for n, v in variables.items() if n not in known), *env]


def _set_rendezvous(spec: dict[str, Any], job: GpuTrainingJob, worker: int, attempt: int) -> None:
    """Set a worker's host name and the variables of every container; values of the template win."""
    # A pod's name may be longer than a host name. An attempt has its own names, because DNS keeps those of lost pods.
    spec.setdefault("hostname", f"worker-{worker}-{attempt}")
    spec.setdefault("subdomain", service_name(job))
    address, port, workers = f"worker-0-{attempt}.{spec['subdomain']}", str(MASTER_PORT), str(job.spec.workers)
    variables = {
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
    for container in spec["containers"]:
        _add_variables(container, variables)
