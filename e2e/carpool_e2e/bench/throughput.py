"""Jobs a second through a real control plane: operator, kube-scheduler, extender and API server on this machine."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from carpool_core.clock import SystemClock, rfc3339
from carpool_core.keys import RESOURCE_GPU
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, KubeApi
from carpool_core.kube.errors import KubeError
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.node import GpuNode, Partition
from carpool_core.values import PartitionState

from carpool_e2e.bench.load import GPUS, JOBS, NODE_COUNT, Throughput, beat, bind_all, node_name, offer
from carpool_e2e.bench.memory import populate
from carpool_e2e.cluster import Cluster
from carpool_e2e.jobs import sleeper

_SLOTS = 64
_BEAT_S = 25.0
"""An agent writes at least so often: after a minute of silence its GPUs are left out."""
PROCESSES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "extender", "operator")


@dataclass
class _Players:
    """Plays the agents of all nodes: each reports every reservation as prepared, at once, and that it lives."""

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
                with suppress(KubeError):  # an agent tries a server that is too busy again
                    await self._write(name, {"partitions": msgspec.to_builtins(reported)})
        finally:
            self.busy.discard(name)

    async def beat(self) -> None:
        """Write what agents write when nothing has changed, each at its own moment."""
        async with asyncio.TaskGroup() as agents:
            for number, name in enumerate(self.latest):
                agents.create_task(self._live(name, _BEAT_S * number / len(self.latest)))

    async def _live(self, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while True:
            with suppress(KubeError):  # the next one says it, too
                await self._write(name, {})
            await asyncio.sleep(_BEAT_S)

    async def _write(self, name: str, changes: dict[str, Any]) -> None:
        patch = {"status": {**changes, "heartbeatTime": rfc3339(SystemClock().now())}}
        answer = await self.api.patch(GPU_NODES, name, patch, subresource="status")
        self.latest[name] = msgspec.convert(answer, GpuNode)


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
    players = _Players(api)
    watch = Reflector(api, GPU_NODES, GpuNode, clock=SystemClock(), on_change=players.see)
    around = [asyncio.create_task(work) for work in (beat(api), watch.run())]
    submit = [
        partial(api.create, GPU_TRAINING_JOBS, sleeper(node_name(number)), namespace="default")
        for number in range(jobs)
    ]
    try:
        await watch.wait_synced()
        around.append(asyncio.create_task(players.beat()))
        return await bind_all(cluster, api, tell, submit, PROCESSES)
    finally:
        for task in around:
            task.cancel()
        await asyncio.gather(*around, return_exceptions=True)
