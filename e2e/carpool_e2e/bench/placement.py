"""How quickly the extender decides: filter and prioritize over HTTP with mutual TLS, as kube-scheduler asks."""

import asyncio
import gc
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec
from carpool_core.resources.node import GpuNode
from carpool_core.values import SharingMode

from carpool_e2e.bench.apiserver import PaperApi
from carpool_e2e.bench.circumstances import circumstances
from carpool_e2e.bench.memory import resident_mib
from carpool_e2e.bench.naive import filter_and_prioritize
from carpool_e2e.bench.placement_asking import Client, Decision, extender, processor_s
from carpool_e2e.bench.rounds import are_enough, least_disturbed, share_stolen, stolen_and_asked
from carpool_e2e.bench.world import NAMESPACE, Shape, World, draw_shape, reservation, world

GPUS, TENANTS_PER_NODE = 8, 6
SIZES = (500, 1000, 2000, 5000)
ROUNDS, DECISIONS, REFUSALS, WARM_UP = 5, 200, 4, 30
MOST_ROUNDS = 8
"""With those that are played again because too much was stolen."""
SHAPES, NEW_EVERY = 20, 10
"""Jobs are of so many shapes, as models and batch sizes come again and again; one in so many has a shape of its own."""
WAITING, WAITING_KINDS = 1000, 8
"""Pods that wait, and the demands that they have, where it is measured what it costs to look after them."""
_SLOT = 90
"""Beyond the slots of clusters."""


@dataclass(frozen=True, slots=True)
class Round:
    """What was measured in one go with a cluster of one size."""

    decisions: list[Decision]
    refusal_s: list[float]
    """Filter of a job that no node has room for."""
    naive_s: float
    """The naive loop over the same cluster, in process, without HTTP."""
    stolen: float
    """Of the processor time that was asked for on this machine meanwhile, the share that the hypervisor gave others."""


@dataclass(frozen=True, slots=True)
class Size:
    """What was measured with a cluster of one size."""

    nodes: int
    tenants: int
    rounds: list[Round]
    """Those that count."""
    left_out: int
    """Rounds in which too much was stolen, and which were played again."""
    resident_mib: float
    circumstances: str
    """What else went on, in a sentence."""
    behind: list[Decision] = field(default_factory=list)
    """Decisions while others waited who come before whoever asks; of the largest size alone."""

    def typical(self, figure: Callable[[Round], float]) -> float:
        """Return the median of a figure over the rounds: what happens in one of them does not decide."""
        return median(map(figure, self.rounds))

    def span(self, figure: Callable[[Round], float]) -> tuple[float, float]:
        """Return the least and the largest of a figure over the rounds."""
        found = list(map(figure, self.rounds))
        return min(found), max(found)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of all values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def waited_ms(one: Round, share: float) -> float:
    """Return how long that share of a round's decisions took at most, in ms."""
    return 1000 * percentile([decision.total_s for decision in one.decisions], share)


def processor_ms(one: Round) -> float:
    """Return the extender's processor time for each decision of a round, in ms."""
    return 1000 * sum(decision.processor_s for decision in one.decisions) / len(one.decisions)


def a_second(one: Round) -> float:
    """Return how many decisions a second a round had, the client's own work between them left out."""
    return len(one.decisions) / sum(decision.total_s for decision in one.decisions)


def naive_ms(one: Round) -> float:
    """Return what the naive loop took, in ms."""
    return 1000 * one.naive_s


def measure(tell: Callable[[str], None], sizes: tuple[int, ...] = SIZES) -> list[Size]:
    """Measure clusters of several sizes in turns, so that a bad moment of the machine meets each of them."""
    found = asyncio.run(_measure(sizes))
    for size in found:
        least, most = size.span(lambda one: waited_ms(one, 0.99))
        tell(
            f"{size.nodes} nodes: p99 {size.typical(lambda one: waited_ms(one, 0.99)):.1f} ms ({least:.1f} to "
            f"{most:.1f}), {size.typical(processor_ms):.1f} ms of processor each, {size.typical(a_second):.0f} "
            f"decisions/s, {size.resident_mib:.0f} MiB, naive {size.typical(naive_ms):.0f} ms, "
            f"{size.typical(lambda one: one.stolen):.1%} stolen"
        )
    return found


def draw_jobs(draw: random.Random, decisions: int) -> tuple[list[Shape], list[bool]]:
    """Draw the jobs that ask for a place, and say which of them are of a shape that nobody had before."""
    known = [draw_shape(draw) for _ in range(SHAPES)]
    new = [number >= WARM_UP and number % NEW_EVERY == 0 for number in range(WARM_UP + decisions)]
    return [draw_shape(draw) if is_new else known[number % SHAPES] for number, is_new in enumerate(new)], new


class _Site:
    """A cluster of one size, with an extender of its own."""

    def __init__(self, paper: World, new: list[bool], api: PaperApi, pid: int, client: Client) -> None:
        self.paper, self.pid, self.client = paper, pid, client
        self._new, self._api = new, api
        self._draw = random.Random(7)  # noqa: S311  # a benchmark, no secret
        self._next = 0
        self._played: list[Round] = []
        self._behind: list[Decision] = []

    @property
    def is_over(self) -> bool:
        """Whether there were enough rounds of which little was stolen, or too many."""
        return are_enough(self._played, ROUNDS, MOST_ROUNDS)

    async def decide(self, decisions: int) -> list[Decision]:
        """Ask for so many pods, one after the other; a GpuNode changes after each."""
        found = []
        began = processor_s(self.pid)
        for number in range(self._next, self._next + decisions):
            pod = self.paper.waiting[number]
            filter_s, prioritize_s = await asyncio.to_thread(self.client.decide, pod, self.paper.nodes)
            self._api.change(changed(self.paper.nodes, number, self._draw))
            await asyncio.sleep(0)
            ended = processor_s(self.pid)
            found.append(Decision(filter_s, prioritize_s, ended - began, self._new[number]))
            began = ended
        self._next += decisions
        return found

    async def play(self, shape: Shape) -> None:
        """Play a round.

        Args:
            shape: What the naive loop is asked for.
        """
        before = stolen_and_asked()
        decisions = await self.decide(DECISIONS)
        stolen = share_stolen(before, stolen_and_asked())
        pod, nodes = self.paper.waiting[-1], self.paper.nodes
        refusals = [await asyncio.to_thread(self.client.refused, pod, nodes) for _ in range(REFUSALS)]
        began = time.perf_counter()
        filter_and_prioritize(nodes, shape)
        naive_s = time.perf_counter() - began
        self._played.append(Round(decisions, refusals, naive_s, stolen))

    async def queue_up(self, waiting: int) -> None:
        """Have so many pods refused, the last ones, which come before all others; decide with these waiting."""
        for pod in self.paper.waiting[-waiting:]:
            await asyncio.to_thread(self.client.refused, pod, self.paper.nodes)
        await self.decide(WARM_UP)
        self._behind = await self.decide(DECISIONS)

    def result(self, told: str) -> Size:
        """Return what was measured.

        Args:
            told: What else went on.
        """
        rounds = least_disturbed(self._played, ROUNDS)
        nodes, left_out = len(self.paper.nodes), len(self._played) - len(rounds)
        return Size(nodes, nodes * TENANTS_PER_NODE, rounds, left_out, resident_mib(self.pid), told, self._behind)


async def _measure(sizes: tuple[int, ...]) -> list[Size]:
    decisions = (MOST_ROUNDS + 1) * DECISIONS + WARM_UP
    shapes, new = draw_jobs(random.Random(7), decisions)  # noqa: S311  # a benchmark, no secret
    async with AsyncExitStack() as stack:
        sites = [await stack.enter_async_context(_site(n, shapes, new, _SLOT + i)) for i, n in enumerate(sizes)]
        # The client's own collector would go through these clusters while it waits for an answer.
        gc.collect()
        gc.freeze()
        for site in sites:
            await site.decide(WARM_UP)
        for number in range(MOST_ROUNDS):
            for site in sites:
                if not site.is_over:
                    await site.play(shapes[number])
        await sites[-1].queue_up(WAITING)
        told = circumstances()
        found = [site.result(told) for site in sites]
    gc.unfreeze()
    return found


@asynccontextmanager
async def _site(nodes: int, shapes: list[Shape], new: list[bool], slot: int) -> AsyncIterator[_Site]:
    huge = [Shape(10**6 + number % WAITING_KINDS, 0.5, 0.5, 0.5) for number in range(WAITING)]
    paper = world(nodes, GPUS, nodes * TENANTS_PER_NODE, [*shapes, *huge])
    api = PaperApi(paper.nodes, paper.jobs, [*paper.pods, *paper.waiting])
    runner, port = await api.serve()
    try:
        with tempfile.TemporaryDirectory() as folder, extender(Path(folder), port, slot) as (process, client):
            await asyncio.to_thread(client.wait)
            yield _Site(paper, new, api, process.pid, client)
    finally:
        await runner.cleanup()


def changed(nodes: list[GpuNode], number: int, draw: random.Random) -> GpuNode:
    """Return a node with the last pod as one tenant more, as after a bind."""
    node = draw.choice(nodes)
    gpu = draw.choice(node.status.devices).uuid
    here = [r for r in node.spec.reservations if gpu in r.gpu_uuids]
    mode = here[0].mode if here else SharingMode.MPS
    one = reservation(f"waiting-{number}", NAMESPACE, gpu, mode, Shape(100, 0.2, 0.1, 0.1))
    return msgspec.structs.replace(
        node, spec=msgspec.structs.replace(node.spec, reservations=[*node.spec.reservations, one])
    )
