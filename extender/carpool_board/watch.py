"""The board's copy of the cluster: one watch for each kind, whatever the number of viewers."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import structlog
from carpool_core.clock import Clock
from carpool_core.durations import format_duration
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS, KubeApi, ResourceKind
from carpool_core.kube.errors import Overloaded
from carpool_core.kube.nodes import Node
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import HasMetadata, Reflector, key_of
from carpool_core.kubectl.views import GpuView, gpu_views
from carpool_core.resources.node import GpuNode
from carpool_extender.explain.commands import Site
from carpool_extender.explain.explain import cluster_view
from carpool_extender.explain.queue_forecast import NOT_FAILED, QueueView, forecast_queue, pending_jobs
from carpool_extender.informers import WatchedJob

from carpool_board.viewers import Right, Viewers

GPUS, QUEUE = "gpus", "queue"
"""Topics of changes; that of a job is its NAMESPACE/NAME."""
PAUSE_S = 2.0
"""Time between two looks for changes of a viewer's topic, in seconds."""
IDLE_S = 15.0
"""Longest time without a sign of life to a viewer, in seconds."""
QUEUE_AGE_S = 5.0
"""Age in seconds up to which a forecast of the queue is shown."""
QUEUE_AGE_FACTOR = 10.0
"""The same in multiples of the time that the forecast took: seconds where thousands of GPUs are compared."""
STALE_S = 300.0
"""Age in seconds of the API server's last event from which nothing is shown: a healthy watch has one each minute."""
_FIRST_LIST_S = 10.0
_NEEDED = {GPUS: (GPU_NODES,), QUEUE: (GPU_NODES, GPU_TRAINING_JOBS, PODS)}


class ClusterWatch:
    """Watches GpuNodes, jobs, pods and Nodes with the process's own rights; the caller checks those of viewers."""

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        read_site: Callable[[], Awaitable[Site]],
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._clock, self._read_site, self._sleep = clock, read_site, sleep
        self._nodes = Reflector(api, GPU_NODES, GpuNode, clock=clock, on_change=self._node_changed)
        self._jobs = Reflector(api, GPU_TRAINING_JOBS, WatchedJob, clock=clock, on_change=self._job_changed)
        queue_changed = self._queue_changed
        self._pods = Reflector(api, PODS, Pod, selector=NOT_FAILED, clock=clock, on_change=queue_changed)
        self._kube_nodes = Reflector(api, NODES, Node, clock=clock)
        self._reflectors: dict[ResourceKind, Reflector[Any]] = {
            one.kind: one for one in (self._nodes, self._jobs, self._pods, self._kube_nodes)
        }
        self._unwatched: set[ResourceKind] = set()
        self._numbers = itertools.count(1)
        self._versions: dict[str, int] = {}
        """Number of the latest change by topic."""
        self._views: dict[str, list[GpuView]] = {}
        self._forecast: QueueView | None = None
        self._forecast_version: int | None = None
        self._forecast_until = 0.0
        self._forecasting = asyncio.Lock()

    async def run(self, viewers: Viewers) -> None:
        """Watch what the process may read, until cancelled.

        Raises:
            KubeError: The API server could not be asked for the process's rights.
        """
        for kind in self._reflectors:
            if not await viewers.may(None, right := Right("list", kind)):
                structlog.get_logger().warning("not watched, because a right is missing", right=str(right))
                self._unwatched.add(kind)
        async with asyncio.TaskGroup() as group:
            for kind, reflector in self._reflectors.items():
                if kind not in self._unwatched:
                    group.create_task(reflector.run())

    async def gpus(self) -> Iterable[GpuView]:
        """Return all GPUs by node and index. Raises `Overloaded` if they are not known."""
        await self._wait_for(*_NEEDED[GPUS])
        return (gpu for name in sorted(self._views) for gpu in self._views[name])

    async def queue(self) -> QueueView:
        """Return the pending jobs with their reasons. Raises `Overloaded` if they are not known."""
        await self._wait_for(*_NEEDED[QUEUE])
        async with self._forecasting:  # one computation serves all viewers
            now = self._clock.monotonic()
            if self._forecast is not None and now < self._forecast_until:
                return self._forecast
            site = await self._read_site()
            version = self._versions.get(QUEUE)
            nodes = list(self._nodes.store.values())
            pending = pending_jobs(self._jobs.store.values(), self._pods.store.values())
            kube_nodes = dict(self._kube_nodes.store.items) if self._kube_nodes.store.synced else None

            def compute() -> QueueView:
                cluster = cluster_view(nodes, site.config, kube_nodes)
                items = forecast_queue(pending, cluster, site.config, site.options)
                return QueueView(order=site.options.order, items=items)

            self._forecast, self._forecast_version = await asyncio.to_thread(compute), version
            took_s = self._clock.monotonic() - now
            self._forecast_until = now + max(QUEUE_AGE_S, QUEUE_AGE_FACTOR * took_s)
            return self._forecast

    async def notices(self, topic: str) -> AsyncIterator[bool]:
        """Yield True after changes of a topic, and False as a sign of life; True then if the topic is not watched."""
        is_watched = self._unwatched.isdisjoint(_NEEDED.get(topic, (GPU_TRAINING_JOBS,)))
        seen, yielded_s = self._shown(topic), self._clock.monotonic()
        while True:
            await self._sleep(PAUSE_S)
            shown, now_s = self._shown(topic), self._clock.monotonic()
            if shown != seen or now_s - yielded_s >= IDLE_S:
                is_changed = shown != seen or not is_watched
                seen, yielded_s = shown, now_s
                yield is_changed

    def _shown(self, topic: str) -> int | None:
        """Return the number of the latest change that a page of a topic would show now."""
        if topic == QUEUE and self._clock.monotonic() < self._forecast_until:
            return self._forecast_version
        return self._versions.get(topic)

    async def _wait_for(self, *kinds: ResourceKind) -> None:
        for kind in kinds:
            if kind in self._unwatched:
                raise Overloaded(
                    f"the board itself may not list {kind.plural} of the whole cluster; start it again once it may",
                    status=503,
                )
            try:
                await asyncio.wait_for(self._reflectors[kind].wait_synced(), _FIRST_LIST_S)
            except TimeoutError as error:
                reason = f"the first list of {kind.plural} is not complete; try again shortly"
                raise Overloaded(reason, status=503) from error
            if (age_s := self._reflectors[kind].store.age(self._clock.monotonic())) > STALE_S:
                raise Overloaded(f"nothing was heard of {kind.plural} for {format_duration(age_s)}", status=503)

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if new is not None:
            self._views[new.metadata.name] = gpu_views([new])
        elif old is not None:
            self._views.pop(old.metadata.name, None)
        self._note(GPUS, QUEUE)

    def _job_changed(self, old: WatchedJob | None, new: WatchedJob | None) -> None:
        if new is not None:
            self._note(QUEUE, key_of(new.metadata))
        elif old is not None:
            self._note(QUEUE)
            self._versions.pop(key_of(old.metadata), None)

    def _queue_changed(self, _: HasMetadata | None, __: HasMetadata | None) -> None:
        self._note(QUEUE)

    def _note(self, *topics: str) -> None:
        for topic in topics:
            self._versions[topic] = next(self._numbers)
