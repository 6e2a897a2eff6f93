"""Resident memory of the processes, with as much to look after as the targets say."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from carpool_core.clock import SystemClock, rfc3339
from carpool_core.keys import SIMULATED_PREFIX
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS, KubeApi, ResourceKind, Selector
from carpool_core.kube.pods import Pod
from carpool_core.products import PRODUCTS
from carpool_core.resources.node import GpuNode, Reservation, TenantProfile
from carpool_core.values import GpuUuid, JobUid, PodUid, SharingMode

from carpool_e2e.demo.manifests import sleeper

T = TypeVar("T")

_AT_ONCE = 16
"""Calls to the API server at once."""

_PATIENCE_S = 300

_A100 = next(p for p in PRODUCTS if p.name == "NVIDIA A100-SXM4-40GB")


def resident_mib(pid: int, proc: Path = Path("/proc")) -> float:
    """Return a process's resident memory, in MiB."""
    for line in (proc / str(pid) / "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no VmRSS: has it ended?")


async def populate(api: KubeApi, nodes: int, gpus: int) -> None:
    """Create Nodes, and their GpuNodes as agents would report them."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> None:
        name = f"bench-{number:04}"
        async with gate:
            await api.create(NODES, {"metadata": {"name": name}})
            await api.create(GPU_NODES, {"metadata": {"name": name}, "spec": {}})
            await api.patch(GPU_NODES, name, {"status": _status(name, gpus)}, subresource="status")

    await asyncio.gather(*(one(number) for number in range(nodes)))


def _status(node: str, gpus: int) -> dict[str, Any]:
    device = {
        "product": f"{SIMULATED_PREFIX}{_A100.name}",
        "memoryMib": _A100.memory_mib,
        "reservedMib": 512,
        "computeCapability": _A100.compute_capability,
        "modes": [mode.value for mode in SharingMode],
        "health": "Healthy",
    }
    return {
        "agentVersion": "bench",
        "heartbeatTime": rfc3339(SystemClock().now()),
        "devices": [{"uuid": f"GPU-{node}-{index}", "index": index, **device} for index in range(gpus)],
    }


async def submit(api: KubeApi, jobs: int) -> None:
    """Create jobs, and wait until each has its pod."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> None:
        async with gate:
            await api.create(GPU_TRAINING_JOBS, sleeper(f"bench-{number:04}"), namespace="default")

    await asyncio.gather(*(one(number) for number in range(jobs)))
    for _ in range(_PATIENCE_S):
        if len(await listed(api, PODS, Selector(namespace="default"), Pod)) >= jobs:
            return
        await asyncio.sleep(1)
    raise TimeoutError(f"expected {jobs} pods within {_PATIENCE_S} s, found fewer")


async def reserve(api: KubeApi) -> int:
    """Give every pod a reservation, spread over the nodes as an extender would write them; return how many."""
    pods = await listed(api, PODS, Selector(namespace="default"), Pod)
    nodes = await listed(api, GPU_NODES, Selector(), GpuNode)
    for index, node in enumerate(nodes):
        held = [
            _reservation(pod, node.status.devices[at % len(node.status.devices)].uuid)
            for at, pod in enumerate(pods[index :: len(nodes)])
        ]
        await api.patch(GPU_NODES, node.metadata.name, {"spec": {"reservations": msgspec.to_builtins(held)}})
    return len(pods)


def _reservation(pod: Pod, gpu: GpuUuid) -> Reservation:
    owner = pod.metadata.owner_references[0]
    return Reservation(
        pod_uid=PodUid(pod.metadata.uid),
        pod_namespace=pod.metadata.namespace,
        pod_name=pod.metadata.name,
        job_uid=JobUid(owner.uid),
        job_name=owner.name,
        gpu_uuids=[gpu],
        mode=SharingMode.MPS,
        memory_limit_mib=4096,
        thread_percentage=100,
        deadline=rfc3339(SystemClock().now() + timedelta(hours=1)),
        tenant=TenantProfile(memory_mib=4096, sm_active_ratio=0.2, dram_active_ratio=0.2, max_slowdown=1.5),
        policy="least-slowdown",
    )


async def listed(api: KubeApi, kind: ResourceKind, selector: Selector, type_: type[T]) -> list[T]:
    """List all objects of a kind."""
    found: list[T] = []
    token = ""
    while True:
        page = await api.list_page(kind, selector, continue_token=token)
        found += [msgspec.json.decode(raw, type=type_) for raw in page.items]
        token = page.continue_token
        if not token:
            return found
