"""Jobs a second through a real control plane: operator, kube-scheduler, extender and API server on this machine."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
from carpool_core.clock import SystemClock
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS, KubeApi
from carpool_core.kube.errors import KubeError
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.node import GpuNode, Partition
from carpool_core.values import PartitionState

from carpool_e2e.bench.memory import populate
from carpool_e2e.bench.placement import processor_s
from carpool_e2e.cluster import Cluster
from carpool_e2e.fleet import FleetNode, lease_patch, node_status
from carpool_e2e.fleetprocess import LEASES
from carpool_e2e.jobs import sleeper

NODE_COUNT, GPUS, JOBS = 500, 8, 2000
_SLOTS = 64
_AT_ONCE = 16
_PATIENCE_S = 600.0
_BEAT_S = 25.0
"""Time between two renewals of a lease: the node controller waits for fifty seconds."""
_LEASES = "kube-node-lease"
PROCESSES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "extender", "operator")


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was measured."""

    jobs: int
    elapsed_s: float
    """From the first job created to the last pod bound."""
    processor_s: dict[str, float]
    """Processor time of each process meanwhile, in seconds."""

    @property
    def jobs_a_second(self) -> float:
        """How many jobs found their place in a second."""
        return self.jobs / self.elapsed_s


@dataclass
class _Players:
    """Plays the agents of all nodes: reports every reservation as prepared, at once."""

    api: KubeApi
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)
    latest: dict[str, GpuNode] = field(default_factory=dict)

    def see(self, _: GpuNode | None, node: GpuNode | None) -> None:
        """Look at a GpuNode that changed."""
        if node is None:
            return
        name = node.metadata.name
        self.latest[name] = node
        if name not in self.busy and _lacks_report(node):
            self.busy.add(name)
            task = asyncio.create_task(self._report(name))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _report(self, name: str) -> None:
        try:
            while _lacks_report(self.latest[name]):
                reported = [
                    Partition(pod_uid=r.pod_uid, generation=r.generation, state=PartitionState.READY)
                    for r in self.latest[name].spec.reservations
                ]
                patch = {"status": {"partitions": msgspec.to_builtins(reported)}}
                answer = await self.api.patch(GPU_NODES, name, patch, subresource="status")
                self.latest[name] = msgspec.convert(answer, GpuNode)
        finally:
            self.busy.discard(name)


def _lacks_report(node: GpuNode) -> bool:
    done = {p.pod_uid for p in node.status.partitions}
    return any(r.pod_uid not in done for r in node.spec.reservations)


@dataclass
class _Finish:
    """Counts the pods that have a node."""

    wanted: int
    bound: set[str] = field(default_factory=set)
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def see(self, _: Pod | None, pod: Pod | None) -> None:
        """Look at a pod that changed."""
        if pod is not None and pod.spec.node_name:
            self.bound.add(pod.metadata.uid)
            if len(self.bound) >= self.wanted:
                self.reached.set()


async def measure(cluster: Cluster, api: KubeApi, tell: Callable[[str], None], jobs: int = JOBS) -> Throughput:
    """Measure on a cluster whose control plane runs, and nothing of Carpool yet."""
    await populate(api, NODE_COUNT, GPUS)
    gate = asyncio.Semaphore(_AT_ONCE)

    async def offer(number: int) -> None:
        node = FleetNode(f"bench-{number:04}", _SLOTS)
        async with gate:
            await api.patch(NODES, node.name, node_status(node, datetime.now(UTC)), subresource="status")
            await api.create(LEASES, lease_patch(node, datetime.now(UTC)), namespace=_LEASES)

    await asyncio.gather(*(offer(number) for number in range(NODE_COUNT)))
    beating = asyncio.create_task(_beat(api))
    await asyncio.to_thread(cluster.processes.start_scheduler)
    await asyncio.to_thread(cluster.processes.start_operator)
    tell(f"{NODE_COUNT} nodes of {GPUS} GPUs are there")

    players, finish = _Players(api), _Finish(jobs)
    clock = SystemClock()
    watching: list[asyncio.Task[None]] = [
        beating,
        asyncio.create_task(Reflector(api, GPU_NODES, GpuNode, clock=clock, on_change=players.see).run()),
        asyncio.create_task(Reflector(api, PODS, Pod, clock=clock, on_change=finish.see).run()),
    ]
    try:
        await asyncio.sleep(1)
        before, began = _spent(cluster), time.monotonic()
        submitting = asyncio.gather(*(_submit(api, gate, number) for number in range(jobs)))
        reporting = asyncio.create_task(_progress(finish, began, tell))
        await asyncio.wait_for(finish.reached.wait(), _PATIENCE_S)
        elapsed_s = time.monotonic() - began
        reporting.cancel()
        await submitting
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    after = _spent(cluster)
    return Throughput(jobs, elapsed_s, {name: after[name] - before[name] for name in before})


async def _beat(api: KubeApi) -> None:
    """Renew the nodes' leases, as their kubelets would: without them the node controller gives nodes up."""
    gate = asyncio.Semaphore(_AT_ONCE // 2)

    async def renew(number: int) -> None:
        node = FleetNode(f"bench-{number:04}", _SLOTS)
        async with gate:
            await api.patch(LEASES, node.name, lease_patch(node, datetime.now(UTC)), namespace=_LEASES)

    while True:
        await asyncio.gather(*(renew(number) for number in range(NODE_COUNT)), asyncio.sleep(_BEAT_S))


async def _submit(api: KubeApi, gate: asyncio.Semaphore, number: int) -> None:
    async with gate:
        try:
            await api.create(GPU_TRAINING_JOBS, sleeper(f"bench-{number:04}"), namespace="default")
        except KubeError as error:
            raise AssertionError(f"job {number} was not created: {error}") from error


async def _progress(finish: _Finish, began: float, tell: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(5)
        tell(f"{len(finish.bound)} bound after {time.monotonic() - began:.0f} s")


def _spent(cluster: Cluster) -> dict[str, float]:
    return {name: processor_s(cluster[name].pid) for name in PROCESSES}
