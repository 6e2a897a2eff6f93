"""Many pods at once onto nodes without kubelets: how long until the last is bound, and what that costs."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

import msgspec
from carpool_core.clock import Clock, SystemClock
from carpool_core.kube.api import NODES, PODS, KubeApi, Selector
from carpool_core.kube.errors import KubeError
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_extender.reservations.binder import wait_for

from carpool_e2e.bench.circumstances import preferred
from carpool_e2e.bench.memory import listed
from carpool_e2e.bench.placement_asking import processor_s
from carpool_e2e.bench.requests import counted
from carpool_e2e.bench.rounds import share_stolen, stolen_and_asked
from carpool_e2e.cluster import Cluster
from carpool_e2e.errors import StalledError, log_tail
from carpool_e2e.fleet import FleetNode, lease_patch, node_status
from carpool_e2e.fleetprocess import LEASES
from carpool_e2e.processes import Process

NODE_COUNT, GPUS, JOBS = 500, 8, 2000
AT_ONCE = 16
"""Calls of the benchmark to the API server at once."""
ITSELF = "the benchmark"
_PATIENCE_S = 600.0
_LOOK_S = 1.0
"""Time between two looks at whether all processes are there still."""
_BEAT_S, _LATE_S, _AGAIN_S = 25.0, 40.0, 1.0
"""Time between two renewals of a lease, where the node controller waits for fifty seconds; after how long the node may
have been given up; the least between two tries."""
_LEASES = "kube-node-lease"


class _NodeSpec(msgspec.Struct, frozen=True):
    taints: list[msgspec.Raw] = []


class _Node(msgspec.Struct, frozen=True):
    spec: _NodeSpec


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was measured."""

    jobs: int
    elapsed_s: float
    """From the first job created to the last pod bound."""
    processor_s: dict[str, float]
    """Processor time of each process until everything was told, in seconds; the benchmark's own among them."""
    requests: Counter[str]
    """What the API server was asked for until everything was told, as `requests.counted` names it."""
    told_s: float
    """From the last pod bound until everything was told that is still to be told then."""
    load: float
    """Processes that wanted a processor in the minute before, the machine's load average."""
    preferred: Sequence[str]
    """Processes that went before others on the machine; see `circumstances.preferred`."""
    stolen: float
    """Of the processor time that was asked for on this machine, the share that the hypervisor gave others."""

    @property
    def jobs_a_second(self) -> float:
        """How many jobs found their place in a second."""
        return self.jobs / self.elapsed_s

    @property
    def told_a_second(self) -> float:
        """How many jobs a second were done with altogether: placed, and their users told."""
        return self.jobs / (self.elapsed_s + self.told_s)


class Background:
    """Tasks that end with a block."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._tasks:  # of hundreds of calls that are cancelled some raise what they were about to raise
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_LOOK_S)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass
class Finish:
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


def node_name(number: int) -> str:
    """Return the name of a node, as `memory.populate` gives it."""
    return f"bench-{number:04}"


async def offer(api: KubeApi, resource: str, amount: int) -> None:
    """Report every node as ready, with so much of an extended resource."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        node, now = FleetNode(node_name(number), 0), datetime.now(UTC)
        status = node_status(node, now)["status"]
        capacity = {**status["capacity"], resource: str(amount)}
        async with gate:
            told = {"status": {**status, "capacity": capacity, "allocatable": capacity}}
            await api.patch(NODES, node.name, told, subresource="status")
            await api.create(LEASES, lease_patch(node, now), namespace=_LEASES)

    await asyncio.gather(*(one(number) for number in range(NODE_COUNT)))


async def settled(api: KubeApi) -> None:
    """Wait until the node controller has taken in that the nodes are ready, and has removed its taints from them."""
    for _ in range(int(_PATIENCE_S)):
        if not any(node.spec.taints for node in await listed(api, NODES, Selector(), _Node)):
            return
        await asyncio.sleep(1)
    raise TimeoutError(f"expected {NODE_COUNT} nodes without taints within {_PATIENCE_S:.0f} s, found some with")


def beat(api: KubeApi, background: Background) -> None:
    """Play the kubelets of all nodes, each at its own moment, as far as the node controller looks at them."""
    for number in range(NODE_COUNT):
        background.start(play(api, node_name(number), _BEAT_S * number / NODE_COUNT))


async def play(
    api: KubeApi,
    name: str,
    after_s: float,
    clock: Clock | None = None,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Renew a node's lease for ever, and say again that the node is ready where the lease may have run out.

    A node controller that has waited too long calls the node unknown, and a renewed lease alone does not change that.
    """
    clock = clock or SystemClock()
    node, renewed_at = FleetNode(name, 0), clock.monotonic()
    await sleep(after_s)
    while True:
        began = clock.monotonic()
        with suppress(KubeError):  # a kubelet does not end at a server that is too busy to answer either
            await api.patch(LEASES, name, lease_patch(node, clock.now()), namespace=_LEASES, wants_object=False)
            if clock.monotonic() - renewed_at > _LATE_S:
                ready = {"conditions": node_status(node, clock.now())["status"]["conditions"]}
                await api.patch(NODES, name, {"status": ready}, subresource="status", wants_object=False)
            renewed_at = began
        await sleep(max(_AGAIN_S, renewed_at + _BEAT_S - clock.monotonic()))


async def bind_all(
    cluster: Cluster,
    api: KubeApi,
    tell: Callable[[str], None],
    create: Sequence[Callable[[], Awaitable[object]]],
    processes: Sequence[str],
    told: Callable[[], Awaitable[object]] | None = None,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> Throughput:
    """Create everything at once, and measure until as many pods are bound, and what that costs until all is told.

    Args:
        cluster: Its control plane and all that takes part runs already.
        api: Its API server.
        tell: Takes the progress.
        create: Each creates what becomes one pod.
        processes: Whose processor time counts.
        told: Waits until everything is told; what that costs counts, too.
        sleep: Waits.

    Raises:
        StalledError: As `until_bound`; nothing goes on then.
    """
    finish, gate = Finish(len(create)), asyncio.Semaphore(AT_ONCE)

    async def submit(one: Callable[[], Awaitable[object]]) -> None:
        async with gate:
            await one()

    bound = Selector(fields="spec.nodeName!=")  # of others the benchmark need not hear
    watch = Reflector(api, PODS, Pod, selector=bound, clock=SystemClock(), on_change=finish.see)
    async with Background() as background:
        background.start(watch.run())
        await sleep(1)
        load = os.getloadavg()[0]
        asked, spent, before, began = _asked(cluster), _spent(cluster, processes), stolen_and_asked(), time.monotonic()
        background.start(_progress(finish, began, tell, sleep))
        submitting = asyncio.gather(*(submit(one) for one in create))
        try:
            await until_bound(finish, [cluster[name] for name in processes], sleep)
            elapsed_s = time.monotonic() - began
            await submitting
        finally:
            submitting.cancel()
            await asyncio.gather(submitting, return_exceptions=True)
        if told is not None:
            await told()
        told_s, after = time.monotonic() - began - elapsed_s, _spent(cluster, processes)
    taken = {name: after[name] - spent[name] for name in after}
    first = preferred({name: cluster[name].pid for name in processes} | {ITSELF: os.getpid()})
    stolen = share_stolen(before, stolen_and_asked())
    return Throughput(len(create), elapsed_s, taken, _asked(cluster) - asked, told_s, load, first, stolen)


async def until_bound(
    finish: Finish,
    processes: Sequence[Process],
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Wait until every pod is bound.

    Raises:
        StalledError: A process has ended, which nobody starts again here, or pods were not bound in time.
    """
    for _ in range(round(_PATIENCE_S / _LOOK_S)):
        with suppress(TimeoutError):
            await wait_for(finish.reached.wait(), _LOOK_S, sleep)
            return
        for process in (one for one in processes if not one.running):
            code = process.popen.returncode if process.popen else None
            raise StalledError(
                f"{process.name} ended with {code} while pods were being bound, {len(finish.bound):,} of "
                f"{finish.wanted:,} until then; a kubelet would start it again, here nobody does\n"
                f"{log_tail(process.log)}"
            )
    raise StalledError(
        f"expected {finish.wanted:,} pods to be bound within {_PATIENCE_S:.0f} s, found {len(finish.bound):,}; "
        "the logs of operator, extender and kube-scheduler say what the others wait for"
    )


async def _progress(
    finish: Finish, began: float, tell: Callable[[str], None], sleep: Callable[[float], Awaitable[object]]
) -> None:
    while not finish.reached.is_set():
        await sleep(5)
        tell(f"{len(finish.bound)} bound after {time.monotonic() - began:.0f} s")


def _spent(cluster: Cluster, processes: Sequence[str]) -> dict[str, float]:
    return {name: processor_s(cluster[name].pid) for name in processes} | {ITSELF: time.process_time()}


def _asked(cluster: Cluster) -> Counter[str]:
    return counted(cluster.plane.api.call("GET", "/metrics"))
