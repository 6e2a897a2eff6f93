"""Jobs a second through a real control plane: operator, kube-scheduler, extender and API server on this machine."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Self
from urllib.error import HTTPError

import msgspec
import yaml
from carpool_core.clock import Clock, SystemClock, rfc3339
from carpool_core.keys import RESOURCE_GPU
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS, KubeApi, Selector
from carpool_core.kube.client import connect
from carpool_core.kube.errors import KubeError
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode, Partition
from carpool_core.settings import KubeSettings
from carpool_core.values import PartitionState, PodUid
from carpool_extender.reservations.binder import wait_for

from carpool_e2e.bench.measure import CALM, RAISED, counted, least_disturbed, preferred, share_stolen, stolen_and_asked
from carpool_e2e.bench.memory import listed, populate
from carpool_e2e.bench.placement import processor_s
from carpool_e2e.cluster import Cluster, scheduler_config
from carpool_e2e.demo.manifests import sleeper
from carpool_e2e.errors import StalledError, log_tail
from carpool_e2e.fleet import FleetNode, lease_patch, node_status
from carpool_e2e.fleetprocess import LEASES
from carpool_e2e.nodes import BUSYBOX_IMAGE
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


_SLOTS = 64
_HEARTBEAT_S = 25.0
"""An agent writes at least so often: after a minute of silence its GPUs are left out."""
_RETRY_S = 1.0
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
                    await self.sleep(_RETRY_S)
                    continue
                self.reported[name] = {(r.pod_uid, r.generation) for r in reservations}
        finally:
            self.busy.discard(name)

    def beat(self) -> None:
        """Write what agents write when nothing has changed, each at its own moment."""
        for number, name in enumerate(self.latest):
            self.background.start(self._live(name, _HEARTBEAT_S * number / len(self.latest)))

    async def _live(self, name: str, after_s: float) -> None:
        await self.sleep(after_s)
        while True:
            due_in_s = self.written_at.get(name, -_HEARTBEAT_S) + _HEARTBEAT_S - self.clock.monotonic()
            if due_in_s > 0:  # a report is a sign of life, too
                await self.sleep(due_in_s)
                continue
            try:
                await self._write(self.lives, name, {})
            except KubeError:
                await self.sleep(_RETRY_S)

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


WHOLE = "example.com/gpu"
"""Extended resource that stands for whole GPUs."""
STOCK_SCHEDULER_PROCESSES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
CONFIG = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    # At its default of 50 a second the client would be what is measured.
    "clientConnection": {"qps": 1000, "burst": 1000},
}


def pod(number: int) -> dict[str, Any]:
    """Return a pod that asks for one whole GPU."""
    limits = {WHOLE: "1"}
    container = {
        "name": "train",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", "sleep 600"],
        "resources": {"limits": limits, "requests": limits},
    }
    return {"metadata": {"name": f"whole-{number:04}"}, "spec": {"containers": [container]}}


async def measure_stock(cluster: Cluster, api: KubeApi, tell: Callable[[str], None], pods: int = JOBS) -> Throughput:
    """Measure on a cluster whose control plane runs, without Carpool."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def register(number: int) -> None:
        async with gate:
            await api.create(NODES, {"metadata": {"name": node_name(number)}})

    await asyncio.gather(*(register(number) for number in range(NODE_COUNT)))
    await offer(api, WHOLE, GPUS)
    submit = [partial(api.create, PODS, pod(number), namespace="default") for number in range(pods)]
    async with Background() as background:
        beat(api, background)
        await settled(api)
        await asyncio.to_thread(_start_scheduler, cluster)
        tell(f"{NODE_COUNT} nodes of {GPUS} whole GPUs are there")
        return await bind_all(cluster, api, tell, submit, STOCK_SCHEDULER_PROCESSES)


def _start_scheduler(cluster: Cluster) -> None:
    file, port = cluster.plane.state / "stock-scheduler.yaml", cluster.plane.ports.scheduler
    file.write_text(scheduler_config(yaml.safe_dump(CONFIG), cluster.kubeconfig))
    command = [cluster.binaries["kube-scheduler"], f"--config={file}", f"--secure-port={port}"]
    outside = [f"--{what}-kubeconfig={cluster.kubeconfig}" for what in ("authentication", "authorization")]
    started = cluster.table.start("kube-scheduler", [*command, *outside, "--bind-address=127.0.0.1"])
    started.wait_until(lambda: _leads(cluster))


def _leads(cluster: Cluster) -> bool:
    try:
        lease = cluster.plane.api.call(
            "GET", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/kube-scheduler"
        )
    except HTTPError:
        return False  # it has not made one yet
    return bool(lease["spec"].get("holderIdentity"))


ROUNDS, MOST_ROUNDS = 3, 5
"""With those that are played again because too much was stolen."""
_JOBS_A_SECOND, _AIM = 40.0, 80.0
_SELDOM = 0.01
"""Requests a job below which a kind of request is not listed."""


_WHY = (
    "A pod, its Binding and kube-scheduler's event are what any scheduler costs. Carpool adds the job itself; its",
    "status, once, with the prediction and the place, which has two seconds and waits while other jobs need their",
    "pods; the reservation (`PATCH gpunodes`, one write for all pods that wait for a node at that moment); the",
    "agents' reports on them, and their signs of life 25 s after they last wrote (`gpunodes/status`); and from each",
    "process a hundred normal events, then two a second. The benchmark itself plays users, agents and kubelets: it",
    "creates the jobs, reports, and renews the nodes' leases, and its own processor time stands in the table.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A round: both were measured one after the other."""

    ours: Throughput
    """Carpool's jobs."""
    theirs: Throughput
    """As many pods of whole GPUs, by kube-scheduler alone."""

    @property
    def stolen(self) -> float:
        """The larger of the shares that were stolen from the two: what disturbs one of them makes them unlike."""
        return max(self.ours.stolen, self.theirs.stolen)


def throughput_section(turns: Sequence[Turn]) -> list[str]:
    """Write the section about the control plane.

    Args:
        turns: All that were played.
    """
    counted = least_disturbed(turns, ROUNDS)
    ours, theirs = [turn.ours for turn in counted], [turn.theirs for turn in counted]
    found, stock = _typical(ours), _typical(theirs)
    verdict = "kept" if found.jobs_a_second >= _JOBS_A_SECOND else "missed"
    return [
        "## Throughput of the control plane",
        "",
        f"{found.jobs:,} jobs at once onto {NODE_COUNT} nodes × {GPUS} GPUs without kubelets, from the first created",
        "to the last pod bound; agents are played by the benchmark, which reports each reservation as prepared.",
        "Everything, etcd and API server included, shares this machine. Beside it what such a control plane can do at",
        "all: as many plain pods that ask for a whole GPU each, and kube-scheduler alone.",
        "",
        f"Both take turns for {len(counted)} rounds, each with a control plane of its own. Told is the round of the",
        "median rate, of each by itself, with the least and the largest in brackets. `stolen` is the share of the",
        "processor time asked for on this machine that its hypervisor gave to other machines. A round in which either",
        f"lost more than {CALM:.0%} is played again, up to {MOST_ROUNDS} in all, and those count in which the least",
        f"was stolen; left out: {len(turns) - len(counted)}.",
        f"The machine's load averages before the first was created: {found.load:.1f} and {stock.load:.1f}.",
        *_raised("Carpool's", found.preferred),
        *_raised("kube-scheduler's", stock.preferred),
        "",
        "| | Carpool | kube-scheduler alone | asked for | |",
        "|---|---|---|---|---|",
        f"| jobs a second | {_rates(ours)} | {_rates(theirs)} | ≥ {_JOBS_A_SECOND:g}, aimed at {_AIM:g} | {verdict} |",
        f"| jobs a second until every job's status told its place, too | {found.told_a_second:.1f} | | | |",
        f"| stolen | {_stolen(ours)} | {_stolen(theirs)} | | |",
        "",
        "Processor time and requests are counted until then.",
        "",
        "| processor ms a job | Carpool | kube-scheduler alone |",
        "|---|---|---|",
        *(_row(name, _ms(found, [name]), _ms(stock, [name])) for name in found.processor_s),
        _row("all of them", _ms(found, found.processor_s), _ms(stock, stock.processor_s)),
        "",
        "| requests to the API server a job | Carpool | kube-scheduler alone |",
        "|---|---|---|",
        *(_row(name, _each(found, [name]), _each(stock, [name])) for name in _often(found, stock)),
        _row("all of them", _each(found, found.requests), _each(stock, stock.requests)),
        "",
        *_WHY,
        "",
    ]


def _typical(rounds: Sequence[Throughput]) -> Throughput:
    """Return the round of the median rate, of two in the middle the slower one."""
    return sorted(rounds, key=lambda one: one.jobs_a_second)[(len(rounds) - 1) // 2]


def _rates(rounds: Sequence[Throughput]) -> str:
    found = [one.jobs_a_second for one in rounds]
    return f"{_typical(rounds).jobs_a_second:.1f} ({min(found):.1f} to {max(found):.1f})"


def _stolen(rounds: Sequence[Throughput]) -> str:
    found = [one.stolen for one in rounds]
    return f"{_typical(rounds).stolen:.1%} ({min(found):.1%} to {max(found):.1%})"


def _raised(whose: str, processes: Sequence[str]) -> list[str]:
    if not processes:
        return []
    return [f"In {whose} run these ran with raised priority ({RAISED}): {', '.join(processes)}."]


def _often(*measured: Throughput) -> list[str]:
    names = {name for one in measured for name in one.requests if _each(one, [name]) >= _SELDOM}
    return sorted(names, key=lambda name: (-measured[0].requests[name], name))


def _ms(one: Throughput, names: Iterable[str]) -> float:
    return 1000 * sum(one.processor_s.get(name, 0.0) for name in names) / one.jobs


def _each(one: Throughput, names: Iterable[str]) -> float:
    return sum(one.requests[name] for name in names) / one.jobs


def _row(name: str, ours: float, theirs: float) -> str:
    return f"| {name} | {_figure(ours)} | {_figure(theirs)} |"


def _figure(value: float) -> str:
    return f"{value:.2f}" if 0 < value < 10 else f"{value:.1f}" if value else ""
