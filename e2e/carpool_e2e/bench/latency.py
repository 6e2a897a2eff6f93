"""From `kubectl apply` to a running container, step by step, and the cost of the agents meanwhile."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from carpool_core.clock import SystemClock
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS, KubeApi
from carpool_core.kube.client import connect
from carpool_core.kube.errors import NotFound
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.node import GpuNode
from carpool_core.settings import KubeSettings
from rich.console import Console

from carpool_e2e.bench.measure import Figure, Section, processor_s, resident_mib
from carpool_e2e.cluster import FULL, Cluster, Shape, running
from carpool_e2e.demo.manifests import sleeper

RUNS = 15
STARTED_WITHIN_S = 60.0
STEPS = {
    "operator: predict and create the pod": ("applied", "pod created"),
    "scheduler: queue, filter, prioritize, reserve": ("pod created", "reserved"),
    "agent prepares, extender binds": ("reserved", "bound"),
    "kubelet: admission, PreStartContainer, container": ("bound", "container started"),
    "all: apply to container started": ("applied", "container started"),
}
"""Each step, from one milestone to another."""


@dataclass
class Timeline:
    """When each milestone of one job was first observed, in monotonic seconds."""

    job: str
    at: dict[str, float] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def mark(self, milestone: str, is_reached: bool = True) -> None:
        """Note the first time of a milestone."""
        if is_reached and milestone not in self.at:
            self.at[milestone] = time.monotonic()
            if milestone == "container started":
                self.done.set()

    def on_pod(self, _: Pod | None, pod: Pod | None) -> None:
        """Note what a changed pod shows."""
        if pod is not None and pod.metadata.name.startswith(f"{self.job}-worker-"):
            self.mark("pod created")
            self.mark("bound", bool(pod.spec.node_name))
            self.mark("container started", any(status.state.running for status in pod.status.container_statuses))

    def on_node(self, _: GpuNode | None, node: GpuNode | None) -> None:
        """Note what a changed GpuNode shows."""
        held = node.spec.reservations if node is not None else []
        self.mark("reserved", any(one.job_name == self.job for one in held))

    def duration_s(self, step: str) -> float:
        """Return how long a step took; milestones of different watches may come out of order by milliseconds."""
        begin, end = STEPS[step]
        return max(0.0, self.at[end] - self.at[begin])


def measure(report: Callable[[str], None], console: Console) -> Section:
    """Run one job after another on an idle cluster, and read the agents' memory and processor time."""
    with running(Shape(kubelet_nodes=FULL.kubelet_nodes), console) as cluster:
        pids = [cluster[f"agent-{node}"].pid for node in FULL.kubelet_nodes]
        before, began = [processor_s(pid) for pid in pids], time.monotonic()
        timelines = asyncio.run(_measure(cluster, report))
        elapsed_s = time.monotonic() - began
        core = max(100 * (processor_s(pid) - spent) / elapsed_s for pid, spent in zip(pids, before, strict=True))
        memory_mib = max(map(resident_mib, pids))
    figures = [Figure(f"{s}, median", median(one.duration_s(s) for one in timelines), "s") for s in STEPS]
    figures[-1] = Figure(figures[-1].what, figures[-1].value, "s", at_most=3)
    figures += [
        Figure("memory of a node agent with 4 GPUs", memory_mib, "MiB", at_most=80),
        Figure("processor time of a node agent meanwhile", core, "% of a core"),
    ]
    text = (
        f"{len(timelines)} jobs, one after another, on an idle cluster of two nodes. Features are given; the "
        "container is busybox. A client that watches the API server takes the times. The larger figure of two agents."
    )
    return Section("One job, and the node agents", text, figures)


async def _measure(cluster: Cluster, report: Callable[[str], None]) -> list[Timeline]:
    async with connect(KubeSettings(kubeconfig=str(cluster.kubeconfig))) as api:
        timelines = []
        for number in range(RUNS + 1):
            timeline = await _follow(api, f"bench-{number}")
            report(f"{timeline.job}: {timeline.duration_s('all: apply to container started'):.2f} s")
            timelines.append(timeline)
        return timelines[1:]  # the first warms up


async def _follow(api: KubeApi, job: str) -> Timeline:
    timeline = Timeline(job)
    watches: list[Reflector[Any]] = [
        Reflector(api, PODS, Pod, clock=SystemClock(), on_change=timeline.on_pod),
        Reflector(api, GPU_NODES, GpuNode, clock=SystemClock(), on_change=timeline.on_node),
    ]
    tasks = [asyncio.create_task(watch.run()) for watch in watches]
    await asyncio.gather(*(watch.wait_synced() for watch in watches))
    timeline.mark("applied")
    await api.create(GPU_TRAINING_JOBS, sleeper(job), namespace="default")
    await asyncio.wait_for(timeline.done.wait(), STARTED_WITHIN_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await api.delete(GPU_TRAINING_JOBS, job, namespace="default")
    while True:
        try:
            await api.get(PODS, f"{job}-worker-0-1", Pod, namespace="default")
        except NotFound:
            return timeline
        await asyncio.sleep(0.1)
