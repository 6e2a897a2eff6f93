"""What each kind of request costs the control plane: measured on the objects that a run of the throughput has left."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from carpool_core.clock import SystemClock, rfc3339
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS, KubeApi, Selector
from carpool_core.resources.node import GpuNode

from carpool_e2e.bench.load import node_name
from carpool_e2e.bench.memory import listed
from carpool_e2e.bench.placement import processor_s
from carpool_e2e.bench.stock import pod
from carpool_e2e.cluster import Cluster
from carpool_e2e.fleetprocess import LEASES
from carpool_e2e.jobs import sleeper

ASKED = 200
"""Requests of each kind."""
_AT_ONCE = 6
_SETTLE_S = 0.5
_SERVERS = ("etcd", "kube-apiserver", "kube-controller-manager")
_CLIENTS = ("kube-scheduler", "extender", "operator")

Ask = Callable[[int], Awaitable[object]]


async def measure(cluster: Cluster, api: KubeApi) -> dict[str, float]:
    """Ask for the same again and again, with nobody else at work.

    Args:
        cluster: Runs still, with all jobs placed; its scheduler, extender and operator are ended.
        api: Its API server.

    Returns:
        Processor time of API server, etcd and controller manager together for each kind of request, in ms.
    """
    for name in _CLIENTS:
        await asyncio.to_thread(cluster[name].kill)
    nodes = await listed(api, GPU_NODES, Selector(), GpuNode)
    full = [node for node in nodes if node.spec.reservations]
    idle = [node.metadata.name for node in nodes if not node.spec.reservations]
    tenants = sum(len(node.spec.reservations) for node in full) // len(full)
    held = [msgspec.to_builtins(node.spec.reservations) for node in full]
    now = rfc3339(SystemClock().now())

    def touched(names: list[str], number: int) -> Awaitable[object]:
        alive = {"status": {"heartbeatTime": rfc3339(SystemClock().now())}}
        return api.patch(GPU_NODES, names[number % len(names)], alive, subresource="status")

    def reserved(number: int) -> Awaitable[object]:
        some = [reservation | {"deadline": now, "policy": f"{number}"} for reservation in held[number % len(held)]]
        return api.patch(GPU_NODES, full[number % len(full)].metadata.name, {"spec": {"reservations": some}})

    def told(number: int) -> Awaitable[object]:
        began = {"status": {"startTime": now}}
        return api.patch(GPU_TRAINING_JOBS, node_name(number), began, subresource="status", namespace="default")

    def bound(number: int) -> Awaitable[object]:
        name = f"whole-{number:04}"
        target = {"apiVersion": "v1", "kind": "Node", "name": nodes[number % len(nodes)].metadata.name}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        return api.create(PODS, body, namespace="default", name=name, subresource="binding")

    kinds: dict[str, Ask] = {
        "create a pod": lambda number: api.create(PODS, pod(number), namespace="default"),
        "bind a pod": bound,
        "create a job": lambda number: api.create(GPU_TRAINING_JOBS, sleeper(f"price-{number}"), namespace="default"),
        "write a job's status": lambda number: api.patch(
            GPU_TRAINING_JOBS,
            f"bench-{number:04}",
            {"status": {"startTime": now}},
            subresource="status",
            namespace="default",
        ),
        f"write {tenants} reservations": reserved,
        f"report on {tenants} reservations": partial(touched, [node.metadata.name for node in full]),
        "an idle agent's sign of life": partial(touched, idle),
        "renew a lease": lambda number: api.patch(
            LEASES, nodes[number].metadata.name, {"spec": {"leaseDurationSeconds": 41}}, namespace="kube-node-lease"
        ),
    }
    return {name: await _price(cluster, ask) for name, ask in kinds.items()}


async def _price(cluster: Cluster, ask: Ask) -> float:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> None:
        async with gate:
            await ask(number)

    before = _spent(cluster)
    await asyncio.gather(*(one(number) for number in range(ASKED)))
    await asyncio.sleep(_SETTLE_S)  # watches are served after the answer
    return 1000 * (_spent(cluster) - before) / ASKED


def _spent(cluster: Cluster) -> float:
    return sum(processor_s(cluster[name].pid) for name in _SERVERS)
