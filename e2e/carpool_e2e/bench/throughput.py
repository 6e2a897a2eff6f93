"""Jobs a second through a real control plane: operator, kube-scheduler, extender and API server on this machine."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from carpool_core.clock import Clock, SystemClock, rfc3339
from carpool_core.keys import RESOURCE_GPU
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, KubeApi, Selector
from carpool_core.kube.client import connect
from carpool_core.kube.errors import KubeError
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode, Partition
from carpool_core.settings import KubeSettings
from carpool_core.values import PartitionState, PodUid

from carpool_e2e.bench.load import (
    GPUS,
    JOBS,
    NODE_COUNT,
    Background,
    Throughput,
    beat,
    bind_all,
    node_name,
    offer,
    settled,
)
from carpool_e2e.bench.memory import listed, populate
from carpool_e2e.cluster import Cluster
from carpool_e2e.jobs import sleeper

_SLOTS = 64
_BEAT_S = 25.0
"""An agent writes at least so often: after a minute of silence its GPUs are left out."""
_AGAIN_S = 1.0
"""After so long an agent tries to write again that could not."""
_TOLD_WITHIN_S = 300
PROCESSES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "extender", "operator")


@dataclass
class Players:
    """Plays the agents of all nodes: each reports every reservation as prepared, at once, and that it lives."""

    reports: KubeApi
    """Calls of its own: agents do not wait behind others, or for each other's signs of life, for a connection."""
    lives: KubeApi
    background: Background
    clock: Clock = field(default_factory=SystemClock)
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    busy: set[str] = field(default_factory=set)
    written_at: dict[str, float] = field(default_factory=dict)
    reported: dict[str, set[tuple[PodUid, int]]] = field(default_factory=dict)
    """What each agent knows that it has written."""
    latest: dict[str, GpuNode] = field(default_factory=dict)

    def see(self, _: GpuNode | None, node: GpuNode | None) -> None:
        """Look at a GpuNode that changed."""
        if node is None:
            return
        name = node.metadata.name
        self.latest[name] = node
        if name not in self.busy and self._lacks_report(name):
            self.busy.add(name)
            self.background.start(self._report(name))

    def _lacks_report(self, name: str) -> bool:
        done = self.reported.get(name, set())
        return any((r.pod_uid, r.generation) not in done for r in self.latest[name].spec.reservations)

    async def _report(self, name: str) -> None:
        try:
            while self._lacks_report(name):
                reservations = self.latest[name].spec.reservations
                prepared = [
                    Partition(pod_uid=r.pod_uid, generation=r.generation, state=PartitionState.READY)
                    for r in reservations
                ]
                try:
                    await self._write(self.reports, name, {"partitions": msgspec.to_builtins(prepared)})
                except KubeError:  # a server that is too busy is not asked again at once
                    await self.sleep(_AGAIN_S)
                    continue
                self.reported[name] = {(r.pod_uid, r.generation) for r in reservations}
        finally:
            self.busy.discard(name)

    def beat(self) -> None:
        """Write what agents write when nothing has changed, each at its own moment."""
        for number, name in enumerate(self.latest):
            self.background.start(self._live(name, _BEAT_S * number / len(self.latest)))

    async def _live(self, name: str, after_s: float) -> None:
        await self.sleep(after_s)
        while True:
            due_in_s = self.written_at.get(name, -_BEAT_S) + _BEAT_S - self.clock.monotonic()
            if due_in_s > 0:  # a report is a sign of life, too
                await self.sleep(due_in_s)
                continue
            try:
                await self._write(self.lives, name, {})
            except KubeError:
                await self.sleep(_AGAIN_S)

    async def _write(self, api: KubeApi, name: str, changes: dict[str, Any]) -> None:
        patch = {"status": {**changes, "heartbeatTime": rfc3339(self.clock.now())}}
        await api.patch(GPU_NODES, name, patch, subresource="status", wants_object=False)
        self.written_at[name] = self.clock.monotonic()


async def _all_told(api: KubeApi) -> None:
    """Wait until every job's status tells its place."""
    for _ in range(_TOLD_WITHIN_S):
        jobs = await listed(api, GPU_TRAINING_JOBS, Selector(), GpuTrainingJob)
        if all(job.status.placement for job in jobs):
            return
        await asyncio.sleep(1)
    raise TimeoutError(f"expected every job's status to tell its place within {_TOLD_WITHIN_S} s")


async def measure(cluster: Cluster, api: KubeApi, tell: Callable[[str], None], jobs: int = JOBS) -> Throughput:
    """Measure on a cluster whose control plane runs, and nothing of Carpool yet."""
    await populate(api, NODE_COUNT, GPUS)
    settings = KubeSettings(kubeconfig=str(cluster.kubeconfig))
    async with connect(settings) as reports, connect(settings) as lives, Background() as background:
        players = Players(reports, lives, background)
        watch = Reflector(reports, GPU_NODES, GpuNode, clock=SystemClock(), on_change=players.see)
        background.start(watch.run())
        await watch.wait_synced()
        players.beat()  # from now on: a node that was silent once is looked at anew
        await offer(api, RESOURCE_GPU, _SLOTS)
        beat(lives, background)
        await settled(api)
        await asyncio.to_thread(cluster.processes.start_scheduler)
        await asyncio.to_thread(cluster.processes.start_operator)
        tell(f"{NODE_COUNT} nodes of {GPUS} GPUs are there")
        submit = [
            partial(api.create, GPU_TRAINING_JOBS, sleeper(node_name(number)), namespace="default")
            for number in range(jobs)
        ]
        return await bind_all(cluster, api, tell, submit, PROCESSES, partial(_all_told, api))
