"""Where the extender's time goes: what it does for a decision, step by step in one process, without HTTP."""

import asyncio
import gc
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from carpool_core.clock import SystemClock
from carpool_core.kube.api import KubeApi
from carpool_core.kube.client import connect
from carpool_core.resources.node import GpuNode
from carpool_core.settings import KubeSettings
from carpool_extender.cache.cluster import Cluster
from carpool_extender.extender_api import ExtenderArgs, FilterResult, HostPriority
from carpool_extender.framework.evaluation_cache import EvaluationCache
from carpool_extender.framework.scheduler_config import SchedulerConfig
from carpool_extender.framework.scores import find_policy
from carpool_extender.framework.selection import filter_nodes, score_nodes
from carpool_extender.informers import Informers, WatchedNode
from carpool_extender.settings import ExtenderSettings
from carpool_extender.workloads import JobOptions, Workloads

from carpool_e2e.bench.apiserver import PaperApi
from carpool_e2e.bench.placement import GPUS, SIZES, TENANTS_PER_NODE, WARM_UP, changed, draw_jobs
from carpool_e2e.bench.placement_asking import asked_for, paper_kubeconfig
from carpool_e2e.bench.world import World, world

DECISIONS = 300
AS_SHIPPED = ExtenderSettings()
READ, WHO, LOOK, BEST, ANSWER, SCORE, CHANGE, LIFE = (
    "filter: read the pod and the offered nodes' names",
    "find out what the pod's job asks for",
    "look at the GPUs: at all for a new shape, otherwise at those that changed since it was asked for last",
    "find the best node among those offered",
    "write the answer",
    "prioritize: all of it, for that node",
    "read a GpuNode that changed, and write it into the arrays",
    "one sign of life of an agent, of which there are 200 a second",
)
STEPS = (READ, WHO, LOOK, BEST, ANSWER, SCORE, CHANGE)
"""What is done for each decision."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Processor time of each step, in ms: medians over decisions about shapes that were known, and about new ones."""

    nodes: int
    known_ms: dict[str, float]
    new_ms: dict[str, float]


def measure(tell: Callable[[str], None], nodes: int = SIZES[-1], decisions: int = DECISIONS) -> Profile:
    """Replay what the extender does for decisions on a cluster of that size."""
    found = asyncio.run(_measure(nodes, decisions))
    tell(f"in process: {sum(found.known_ms[step] for step in STEPS):.1f} ms of processor for a shape that was known")
    return found


async def _measure(nodes: int, decisions: int) -> Profile:
    shapes, new = draw_jobs(random.Random(7), decisions)  # noqa: S311  # a benchmark, no secret
    paper = world(nodes, GPUS, nodes * TENANTS_PER_NODE, shapes)
    async with _api(paper, len(shapes)) as api:
        informers = Informers(api, SystemClock(), Cluster(AS_SHIPPED.slots_per_gpu))
        watching = asyncio.create_task(informers.run())
        await informers.wait_synced()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        gc.collect()
        gc.freeze()
        workloads = Workloads(api, informers, JobOptions(AS_SHIPPED.job_policies, AS_SHIPPED.count_peaks))
        replay = _Replay(paper, informers, workloads)
        took = [await replay.decide(number) for number in range(len(shapes))]
        gc.unfreeze()
    known = [one for one, is_new in list(zip(took, new, strict=True))[WARM_UP:] if not is_new]
    fresh = [one for one, is_new in zip(took, new, strict=True) if is_new]
    return Profile(nodes, _medians(known), _medians(fresh))


def _medians(took: list[dict[str, float]]) -> dict[str, float]:
    return {step: 1000 * median(one[step] for one in took) for step in (*STEPS, LIFE)}


@asynccontextmanager
async def _api(paper: World, waiting: int) -> AsyncIterator[KubeApi]:
    served = PaperApi(paper.nodes, paper.jobs[-waiting:], [])
    runner, port = await served.serve()
    try:
        with tempfile.TemporaryDirectory() as folder:
            kubeconfig = paper_kubeconfig(Path(folder), port)
            async with connect(KubeSettings(kubeconfig=str(kubeconfig)), clock=SystemClock()) as api:
                yield api
    finally:
        await runner.cleanup()


class _Replay:
    """Does what the extender's service does, with a stopwatch between the steps."""

    def __init__(self, paper: World, informers: Informers, workloads: Workloads) -> None:
        self._paper, self._informers, self._workloads = paper, informers, workloads
        rules = SchedulerConfig(find_policy(AS_SHIPPED.policy), AS_SHIPPED.slots_per_gpu)
        self._evaluation_cache = EvaluationCache(informers.cluster, rules)
        self._names = [node.metadata.name for node in paper.nodes]
        self._draw = random.Random(3)  # noqa: S311  # a benchmark, no secret
        self._args, self._node = msgspec.json.Decoder(ExtenderArgs), msgspec.json.Decoder(WatchedNode)
        self._version = 10

    async def decide(self, number: int) -> dict[str, float]:
        """Filter and prioritize one pod, then hear of a change and a sign of life; return what each step took, in s."""
        self._draw.shuffle(self._names)
        pod, watch = self._paper.waiting[number], _Stopwatch()
        body = asked_for(pod, self._names)
        watch.start()
        args = self._args.decode(body)
        watch.lap(READ)
        pod_request = await self._workloads.of(args.pod)
        watch.lap(WHO)
        cached_evaluation = self._evaluation_cache.of(pod_request)
        watch.lap(LOOK)
        found = filter_nodes(cached_evaluation, args.node_names or [], AS_SHIPPED.candidates)
        watch.lap(BEST)
        msgspec.json.encode(FilterResult(node_names=found.fits))
        watch.lap(ANSWER)
        body = asked_for(pod, found.fits)
        watch.start()
        args = self._args.decode(body)
        names = args.node_names or []
        scores = score_nodes(self._evaluation_cache.of(await self._workloads.of(args.pod)), names).tolist()
        msgspec.json.encode([HostPriority(host=name, score=score) for name, score in zip(names, scores, strict=True)])
        watch.lap(SCORE)
        for step, node in (
            (CHANGE, changed(self._paper.nodes, number, self._draw)),
            (LIFE, self._informers.cluster.nodes[self._draw.choice(self._names)]),
        ):
            line = self._line(node)
            watch.start()
            self._informers.take(self._node.decode(line))
            watch.lap(step)
        return watch.laps

    def _line(self, node: GpuNode) -> bytes:
        self._version += 1
        meta = msgspec.structs.replace(node.metadata, resource_version=str(self._version))
        status = msgspec.structs.replace(node.status, heartbeat_time=f"2026-01-31T12:00:{self._version % 60:02}Z")
        return msgspec.json.encode(msgspec.structs.replace(node, metadata=meta, status=status))


class _Stopwatch:
    """Counts the processor time of this thread."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._at = 0.0

    def start(self) -> None:
        """Count from now on."""
        self._at = time.thread_time()

    def lap(self, step: str) -> None:
        """Note what a step took."""
        now = time.thread_time()
        self.laps[step], self._at = now - self._at, now
