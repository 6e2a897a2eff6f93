"""How the workers of one job find each other: a headless Service, a name for each pod, and PyTorch's variables.

Worker 0 is `MASTER_ADDR`. `RANK` and `WORLD_SIZE` count workers, as `init_process_group("env://")` reads them where
each worker is one process; `torchrun` reads the `PET_*` variables instead and sets the others for its processes.
The names are those that Kubeflow's training operator gives (docs of its PyTorchJob).
"""

import hashlib
import re
from typing import Any

from carpool_core import keys
from carpool_core.resources.job import GpuTrainingJob

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
