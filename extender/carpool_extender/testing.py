"""Builders of GPUs, jobs and pods for tests, and a node agent that a test controls."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from carpool_core.demand import Demand
from carpool_core.keys import RESOURCE_GPU, SCHEDULER_NAME
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS
from carpool_core.products import find_product
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import Device, GpuNode, GpuNodeSpec, GpuNodeStatus, Partition, Reservation
from carpool_core.resources.prediction import (
    ActivityPrediction,
    Interval,
    MemoryPrediction,
    Prediction,
    ProductPrediction,
)
from carpool_core.testing.kube import FakeKube
from carpool_core.values import GpuUuid, JobUid, PartitionState, PodUid, RequestedMode, SharingMode, Tenancy

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.pod_request import PodRequest

A100 = "NVIDIA A100-SXM4-40GB"
T4 = "Tesla T4"
TURNS = 5000
"""Turns of the event loop after which something that was waited for counts as not happening."""


def device(index: int = 0, node: str = "a", product: str = A100, **changes: Any) -> Device:
    """Build a GPU of a known product, idle and healthy, able to do everything but MIG."""
    fields: dict[str, Any] = {
        "uuid": GpuUuid(f"GPU-{node}-{index}"),
        "index": index,
        "product": product,
        "memory_mib": find_product(product).memory_mib,
        "compute_capability": find_product(product).compute_capability,
        "modes": [SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS],
    }
    return Device(**(fields | changes))


def gpu_node(
    name: str = "a", devices: Sequence[Device] | int = 1, reservations: Sequence[Reservation] = (), **meta: Any
) -> GpuNode:
    """Build a GpuNode; a number of devices makes so many A100."""
    gpus = [device(i, name) for i in range(devices)] if isinstance(devices, int) else list(devices)
    return GpuNode(
        metadata=ObjectMeta(name=name, uid=f"uid-of-{name}", **meta),
        spec=GpuNodeSpec(reservations=list(reservations)),
        status=GpuNodeStatus(devices=gpus),
    )


def prediction(
    memory_mib: int = 4000,
    util: float = 50,
    sm: float = 0.3,
    dram: float = 0.2,
    products: Sequence[str] = (A100, T4),
    *,
    trusted: bool = True,
    learned_runs: int = 0,
    unenforced_mib: int = 0,
) -> Prediction:
    """Build a prediction that is the same on every product and has no spread."""

    def exactly(value: float) -> Interval:
        return Interval(median=value, lower=value, upper=value)

    return Prediction(
        outcome="Predicted",
        reason="Estimated",
        products=[
            ProductPrediction(
                product=product,
                memory=MemoryPrediction(
                    median_mib=memory_mib,
                    upper_mib=memory_mib,
                    upper_unenforced_mib=unenforced_mib,
                    coverage=0.95,
                    trusted=trusted,
                    learned_runs=learned_runs,
                ),
                activity=ActivityPrediction(
                    gpu_util_percent=exactly(util), sm_active_ratio=exactly(sm), dram_active_ratio=exactly(dram)
                ),
                step_time_seconds=exactly(0.1),
            )
            for product in products
        ],
    )


def demand(name: str = "new", **changes: Any) -> Demand:
    """Build a demand; without `prediction`, the default one."""
    fields: dict[str, Any] = {
        "job_uid": JobUid(f"job-{name}"),
        "job_name": name,
        "namespace": "default",
        "gpus": 1,
        "mode": RequestedMode.AUTO,
        "max_slowdown": 1.5,
        "tenancy": Tenancy.NAMESPACE,
        "product": None,
        "min_memory_mib": 0,
        "min_compute_capability": None,
        "memory_limit_mib": None,
        "prediction": prediction(),
    }
    return Demand(**(fields | changes))


def pod_request(name: str = "new", user: int | None = None, **changes: Any) -> PodRequest:
    """Build an applicant with such a demand."""
    return PodRequest(demand(name, **changes), user=user)


def tenant(
    name: str,
    gpus: Sequence[str],
    mode: SharingMode = SharingMode.MPS,
    product: str = A100,
    user: int | None = None,
    **changes: Any,
) -> Reservation:
    """Build the reservation of a tenant whose demand has these changes."""
    wants = demand(name, **changes)
    return Reservation(
        pod_uid=PodUid(f"pod-{name}"),
        pod_namespace=wants.namespace,
        tenancy_group=wants.tenancy_group,
        pod_name=name,
        job_uid=wants.job_uid,
        job_name=name,
        gpu_uuids=[GpuUuid(gpu) for gpu in gpus],
        mode=mode,
        run_as_user=user,
        tenant=wants.profile_on(product),
    )


def cluster(*nodes: GpuNode, slots: int = 8) -> ClusterCache:
    """Build a cluster of these nodes."""
    found = ClusterCache(slots)
    for node in nodes:
        found.apply(node)
    return found


def unavailable_nodes(known: ClusterCache) -> set[str]:
    """Return the nodes with GPUs that take no job at present."""
    snapshot = known.snapshot()
    return {snapshot.node_names[snapshot.gpus.node[row]] for row in snapshot.unavailable}


def seed_node(kube: FakeKube, node: GpuNode) -> None:
    """Put a GpuNode and its Node on a server."""
    kube.seed(GPU_NODES, node)
    kube.seed(NODES, node_of(node.metadata.name))


def node_of(
    name: str, *, slots: int = 64, is_ready: bool = True, labels: Mapping[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    """Build a Node; without slots its agent does not run."""
    allocatable = {"cpu": "64", "memory": "512Gi", "pods": "110", RESOURCE_GPU: str(slots)}
    conditions = [{"type": "Ready", "status": "True" if is_ready else "Unknown"}]
    status = {"allocatable": allocatable, "conditions": conditions}
    return {"metadata": {"name": name, "labels": dict(labels or {})}, "spec": spec, "status": status}


def seed_job(
    kube: FakeKube, name: str, *, spec: Mapping[str, Any] | None = None, created: str | None = None, **predicted: Any
) -> str:
    """Put a job with a prediction and recorded pods on a server; return its UID."""
    body = {
        "metadata": {"name": name, "uid": f"job-{name}", "creationTimestamp": created},
        "spec": {"template": {}} | dict(spec or {}),
        "status": {
            "prediction": msgspec.to_builtins(prediction(**predicted)),
            "attempts": [
                {"number": 1, "podUids": [f"pod-{name}", *(f"pod-{name}-{worker}" for worker in range(1, 8))]}
            ],
        },
    }
    kube.seed(GPU_TRAINING_JOBS, body)
    return f"job-{name}"


def pod_of(job: str, *, gpus: int = 1, uid: str = "", worker: int = 0, **spec: Any) -> dict[str, Any]:
    """Build the pod of a job's worker, as the operator would."""
    owner = {
        "apiVersion": "carpool.dev/v1alpha1",
        "kind": "GpuTrainingJob",
        "name": job,
        "uid": f"job-{job}",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    limits = {RESOURCE_GPU: str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{job}-worker-{worker}-1",
            "namespace": "default",
            "uid": uid or (f"pod-{job}-{worker}" if worker else f"pod-{job}"),
            "ownerReferences": [owner],
        },
        "spec": {
            "schedulerName": SCHEDULER_NAME,
            "containers": [{"name": "train", "resources": {"limits": limits, "requests": limits}}],
        }
        | spec,
        "status": {"phase": "Pending"},
    }


def seed_pod(kube: FakeKube, job: str, **changes: Any) -> dict[str, Any]:
    """Put a job's pod on a server; return it."""
    return kube.seed(PODS, pod_of(job, **changes))


class FakeAgent:
    """The agents of all nodes: reports reservations as a test wants."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube

    async def report(self, node: str, state: PartitionState = PartitionState.READY, message: str = "") -> None:
        """Report every reservation of a node in the same state."""
        found = await self._kube.get(GPU_NODES, node, GpuNode)
        partitions = [
            Partition(pod_uid=r.pod_uid, generation=r.generation, state=state, message=message)
            for r in found.spec.reservations
        ]
        patch = {"status": {"partitions": msgspec.to_builtins(partitions)}}
        await self._kube.patch(GPU_NODES, node, patch, subresource="status")

    async def serve(self, node: str) -> None:
        """Report all reservations as ready, until cancelled."""
        seen: list[Reservation] = []
        while True:
            found = await self._kube.get(GPU_NODES, node, GpuNode)
            if found.spec.reservations != seen:
                seen = found.spec.reservations
                await self.report(node)


async def until(holds: Callable[[], bool]) -> None:
    """Let other tasks run until something holds; AssertionError where it never does."""
    for _ in range(TURNS):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("what was waited for did not happen")
