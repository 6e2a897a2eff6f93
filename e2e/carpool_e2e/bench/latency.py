"""From `kubectl apply` to a running container, split by who had the job in hand."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from carpool_core.clock import SystemClock
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS, KubeApi
from carpool_core.kube.errors import NotFound
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.values import PartitionState

from carpool_e2e.demo.manifests import sleeper

MILESTONES = ("applied", "predicted", "pod created", "reserved", "partition ready", "bound", "container started")

STEPS: dict[str, tuple[str, str]] = {
    "operator: predict and create the pod": ("applied", "pod created"),
    "scheduler: queue, filter, prioritize, decide, reserve": ("pod created", "reserved"),
    "reservation: agent prepares, extender binds": ("reserved", "bound"),
    "kubelet: admission, PreStartContainer, container": ("bound", "container started"),
    "all: apply to container started": ("applied", "container started"),
}
"""Each step, from one milestone to another."""

_NAMESPACE = "default"


@dataclass
class Timeline:
    """When each milestone of one job was first seen, in monotonic seconds."""

    job: str
    at: dict[str, float] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def mark(self, milestone: str, *, true: bool) -> None:
        """Note the first time that something is true."""
        if true and milestone not in self.at:
            self.at[milestone] = time.monotonic()
            if milestone == MILESTONES[-1]:
                self.done.set()

    def see_job(self, _: GpuTrainingJob | None, job: GpuTrainingJob | None) -> None:
        """Look at a job that changed."""
        if job is not None and job.metadata.name == self.job:
            self.mark("predicted", true=job.status.prediction is not None)

    def see_pod(self, _: Pod | None, pod: Pod | None) -> None:
        """Look at a pod that changed."""
        if pod is None or not pod.metadata.name.startswith(f"{self.job}-worker-"):
            return
        self.mark("pod created", true=True)
        self.mark("bound", true=bool(pod.spec.node_name))
        self.mark("container started", true=any(status.state.running for status in pod.status.container_statuses))

    def see_node(self, _: GpuNode | None, node: GpuNode | None) -> None:
        """Look at a GpuNode that changed."""
        held = [r for r in node.spec.reservations if r.job_name == self.job] if node is not None else []
        if node is None or not held:
            return
        self.mark("reserved", true=True)
        ready = {p.pod_uid for p in node.status.partitions if p.state is PartitionState.READY}
        self.mark("partition ready", true=any(r.pod_uid in ready for r in held))


async def measure(api: KubeApi, runs: int, tell: Callable[[str], None], timeout_s: float = 60.0) -> list[Timeline]:
    """Apply one job after the other to an idle cluster and follow each; the last job is gone before the next comes."""
    timelines = []
    for number in range(runs):
        timeline = Timeline(f"bench-{number}")
        reflectors: list[Reflector[Any]] = [
            Reflector(api, GPU_TRAINING_JOBS, GpuTrainingJob, clock=SystemClock(), on_change=timeline.see_job),
            Reflector(api, PODS, Pod, clock=SystemClock(), on_change=timeline.see_pod),
            Reflector(api, GPU_NODES, GpuNode, clock=SystemClock(), on_change=timeline.see_node),
        ]
        watching = [asyncio.create_task(reflector.run()) for reflector in reflectors]
        await asyncio.gather(*(reflector.wait_synced() for reflector in reflectors))
        timeline.mark("applied", true=True)
        await api.create(GPU_TRAINING_JOBS, sleeper(timeline.job), namespace=_NAMESPACE)
        await asyncio.wait_for(timeline.done.wait(), timeout_s)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        timelines.append(timeline)
        tell(f"{timeline.job}: {duration(timeline, 'all: apply to container started'):.2f} s")
        await _remove(api, timeline.job)
    return timelines


async def _remove(api: KubeApi, job: str) -> None:
    await api.delete(GPU_TRAINING_JOBS, job, namespace=_NAMESPACE)
    while True:
        try:
            await api.get(PODS, f"{job}-worker-0-1", Pod, namespace=_NAMESPACE)
        except NotFound:
            return
        await asyncio.sleep(0.1)


def duration(timeline: Timeline, step: str) -> float:
    """Return how long a step of `STEPS` took, in seconds; milestones may be seen out of order by some milliseconds."""
    begin, end = STEPS[step]
    return max(0.0, timeline.at[end] - timeline.at[begin])


def table(timelines: list[Timeline]) -> list[tuple[str, float, float, float]]:
    """Return each step's median, least and greatest duration over all runs, in seconds."""
    rows = []
    for step in STEPS:
        took = [duration(timeline, step) for timeline in timelines]
        rows.append((step, median(took), min(took), max(took)))
    return rows
