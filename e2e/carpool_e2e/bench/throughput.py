"""Jobs a second through a real control plane: operator, kube-scheduler, extender and API server on this machine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
from carpool_core.clock import SystemClock
from carpool_core.keys import RESOURCE_GPU
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, KubeApi
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.node import GpuNode, Partition
from carpool_core.values import PartitionState

from carpool_e2e.bench.load import GPUS, JOBS, NODE_COUNT, Throughput, beat, bind_all, node_name, offer
from carpool_e2e.bench.memory import populate
from carpool_e2e.cluster import Cluster
from carpool_e2e.jobs import sleeper

_SLOTS = 64
PROCESSES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "extender", "operator")


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


async def measure(cluster: Cluster, api: KubeApi, tell: Callable[[str], None], jobs: int = JOBS) -> Throughput:
    """Measure on a cluster whose control plane runs, and nothing of Carpool yet."""
    await populate(api, NODE_COUNT, GPUS)
    await offer(api, RESOURCE_GPU, _SLOTS)
    await asyncio.to_thread(cluster.processes.start_scheduler)
    await asyncio.to_thread(cluster.processes.start_operator)
    tell(f"{NODE_COUNT} nodes of {GPUS} GPUs are there")
    players = Reflector(api, GPU_NODES, GpuNode, clock=SystemClock(), on_change=_Players(api).see)
    around = [asyncio.create_task(beat(api)), asyncio.create_task(players.run())]
    submit = [
        partial(api.create, GPU_TRAINING_JOBS, sleeper(node_name(number)), namespace="default")
        for number in range(jobs)
    ]
    try:
        await players.wait_synced()
        return await bind_all(cluster, api, tell, submit, PROCESSES)
    finally:
        for task in around:
            task.cancel()
        await asyncio.gather(*around, return_exceptions=True)
