"""Resident memory of the processes, with as much to look after as the targets say."""

import asyncio
from pathlib import Path
from typing import Any

from carpool_core.clock import SystemClock, rfc3339
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS, KubeApi, Selector
from carpool_core.products import PRODUCTS
from carpool_core.values import SharingMode

from carpool_e2e.jobs import sleeper

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
        "product": _A100.name,
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
        if await _count_pods(api) >= jobs:
            return
        await asyncio.sleep(1)
    raise TimeoutError(f"expected {jobs} pods within {_PATIENCE_S} s, found {await _count_pods(api)}")


async def _count_pods(api: KubeApi) -> int:
    count, token = 0, ""
    while True:
        page = await api.list_page(PODS, Selector(namespace="default"), continue_token=token)
        count, token = count + len(page.items), page.continue_token
        if not token:
            return count
