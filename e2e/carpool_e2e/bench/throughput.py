"""Jobs a second through a real control plane on this machine, and the memory of extender and operator after that."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import uvloop
from carpool_core.clock import SystemClock
from carpool_core.keys import SIMULATED_PREFIX
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, LEASES, NODES, PODS, KubeApi, Selector
from carpool_core.kube.client import connect
from carpool_core.kube.errors import KubeError
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.node import GpuNode, Partition
from carpool_core.settings import KubeSettings
from carpool_core.values import PartitionState
from carpool_extender.testing import A100, device
from rich.console import Console

from carpool_e2e.bench.measure import Figure, Section, processor_s, resident_mib
from carpool_e2e.cluster import BARE, Cluster, running
from carpool_e2e.demo.manifests import sleeper
from carpool_e2e.errors import StalledError, log_tail
from carpool_e2e.fleet import FleetNode, lease_patch, node_status

NODE_COUNT, GPUS, SLOTS, JOBS = 500, 8, 64, 2000
PROCESSES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "extender", "operator")
BOUND_WITHIN_S = 600.0
AT_ONCE = 16
"""Calls to the API server at once."""
LEASE_S = 20.0
"""Time between two renewals of a node's lease: the node controller waits for 40 s."""


def node_name(number: int) -> str:
    """Return the name of a node."""
    return f"bench-{number:04}"


async def at_once(calls: Iterable[Awaitable[object]]) -> None:
    """Await all calls, at most `AT_ONCE` at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[object]) -> None:
        async with gate:
            await call

    await asyncio.gather(*(one(call) for call in calls))


async def populate(api: KubeApi, nodes: int, gpus: int) -> None:
    """Create Nodes, and their GpuNodes as agents of simulated A100 would report them."""

    async def one(name: str) -> None:
        devices = [device(index, name, f"{SIMULATED_PREFIX}{A100}", reserved_mib=512) for index in range(gpus)]
        status = {"agentVersion": "bench", "devices": msgspec.to_builtins(devices)}
        await api.create(NODES, {"metadata": {"name": name}})
        await api.create(GPU_NODES, {"metadata": {"name": name}, "spec": {}})
        await api.patch(GPU_NODES, name, {"status": status}, subresource="status")

    await at_once(one(node_name(number)) for number in range(nodes))


class Agents:
    """Plays the agents and kubelets of all nodes: reports each reservation as prepared, and renews leases.

    Args:
        reports: Connections for reports.
        renewals: Connections for leases, which do not delay reports.
    """

    def __init__(self, reports: KubeApi, renewals: KubeApi) -> None:
        self._reports, self._renewals = reports, renewals
        self._nodes: dict[str, GpuNode] = {}
        self._reported: dict[str, set[tuple[str, int]]] = {}
        self._busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def on_change(self, _: GpuNode | None, node: GpuNode | None) -> None:
        """Report the reservations of a node that changed, unless its report is under way."""
        if node is None:
            return
        name = node.metadata.name
        self._nodes[name] = node
        if name not in self._busy and _keys(node) - self._reported.get(name, set()):
            self._busy.add(name)
            task = asyncio.create_task(self._report(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _report(self, name: str) -> None:
        while (wanted := _keys(self._nodes[name])) - self._reported.get(name, set()):
            reservations = self._nodes[name].spec.reservations
            partitions = [
                Partition(pod_uid=r.pod_uid, generation=r.generation, state=PartitionState.READY) for r in reservations
            ]
            patch = {"status": {"partitions": msgspec.to_builtins(partitions)}}
            try:
                await self._reports.patch(GPU_NODES, name, patch, subresource="status", wants_object=False)
                self._reported[name] = wanted
            except KubeError:
                await asyncio.sleep(1)
        self._busy.discard(name)

    async def renew(self) -> None:
        """Renew all leases until cancelled."""
        while True:
            began = time.monotonic()
            await at_once(self._renew_lease(node_name(number)) for number in range(NODE_COUNT))
            await asyncio.sleep(LEASE_S - (time.monotonic() - began))

    async def _renew_lease(self, name: str) -> None:
        lease = lease_patch(FleetNode(name, SLOTS), datetime.now(UTC))
        with suppress(KubeError):  # the next round tries again
            await self._renewals.patch(LEASES, name, lease, namespace="kube-node-lease", wants_object=False)


def _keys(node: GpuNode) -> set[tuple[str, int]]:
    return {(held.pod_uid, held.generation) for held in node.spec.reservations}


async def _register(api: KubeApi) -> None:
    """Report every node as ready, with GPUs to offer, and wait until the node controller has removed all taints."""

    async def one(number: int) -> None:
        node, now = FleetNode(node_name(number), SLOTS), datetime.now(UTC)
        await api.patch(NODES, node.name, node_status(node, now), subresource="status")
        await api.create(LEASES, lease_patch(node, now), namespace="kube-node-lease")

    await at_once(one(number) for number in range(NODE_COUNT))
    while True:
        page = await api.list_page(NODES, Selector(), limit=NODE_COUNT)
        if not any(msgspec.json.decode(item)["spec"].get("taints") for item in page.items):
            return
        await asyncio.sleep(1)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Measurements of one run."""

    jobs: int
    elapsed_s: float
    """From the first create to the last binding."""
    processor_s: dict[str, float]
    """Processor time of each process meanwhile."""
    extender_mib: float
    operator_mib: float

    def figures(self) -> list[Figure]:
        """Return the rows."""
        at = f"{NODE_COUNT} nodes × {GPUS} GPUs, {self.jobs:,} jobs bound"
        return [
            Figure("jobs a second", self.jobs / self.elapsed_s, "/s", at_least=50),
            *(Figure(f"processor time a job, {n}", 1e3 * s / self.jobs, "ms") for n, s in self.processor_s.items()),
            Figure(f"memory of the extender, {at}", self.extender_mib, "MiB", at_most=150),
            Figure(f"memory of the operator, {at}", self.operator_mib, "MiB", at_most=120),
        ]


def measure(report: Callable[[str], None], console: Console, jobs: int = JOBS) -> Section:
    """Create jobs at once on a cluster of its own, and measure until the last pod is bound."""
    with running(BARE, console) as cluster:
        # uvloop, because the processor time of the benchmark is missing to the processes that it measures.
        figures = uvloop.run(_measure(cluster, report, jobs)).figures()
    for figure in figures:
        report(f"{figure.what}: {figure}")
    text = (
        f"{jobs:,} jobs created at once on nodes without kubelets, from the first create to the last binding. "
        "The benchmark plays users, agents and kubelets. All processes, etcd and API server included, share this "
        "machine."
    )
    return Section("Throughput of the control plane", text, figures)


async def _measure(cluster: Cluster, report: Callable[[str], None], jobs: int) -> Throughput:
    settings = KubeSettings(kubeconfig=str(cluster.kubeconfig))
    bound, done = set[str](), asyncio.Event()

    def on_pod(_: Pod | None, pod: Pod | None) -> None:
        if pod is not None:
            bound.add(pod.metadata.uid)
            if len(bound) >= jobs:
                done.set()

    # Agents have connections of their own: a report does not wait behind the jobs that are created.
    async with connect(settings) as api, connect(settings) as agents_api, connect(settings) as renewals:
        await populate(api, NODE_COUNT, GPUS)
        agents = Agents(agents_api, renewals)
        has_node = Selector(fields="spec.nodeName!=")
        watches: list[Reflector[Any]] = [
            Reflector(agents_api, GPU_NODES, GpuNode, clock=SystemClock(), on_change=agents.on_change),
            Reflector(api, PODS, Pod, selector=has_node, clock=SystemClock(), on_change=on_pod),
        ]
        tasks = [asyncio.create_task(work) for work in (*(watch.run() for watch in watches), agents.renew())]
        await _register(api)
        await asyncio.to_thread(cluster.start_scheduler)
        await asyncio.to_thread(cluster.start_operator)
        report(f"{NODE_COUNT} nodes are ready")
        before, began = _processor_times(cluster), time.monotonic()
        creates = (api.create(GPU_TRAINING_JOBS, sleeper(node_name(n)), namespace="default") for n in range(jobs))
        creating = asyncio.create_task(at_once(creates))
        await _until(done, bound, jobs, cluster, report)
        elapsed_s, after = time.monotonic() - began, _processor_times(cluster)
        await creating
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    spent_s = {name: after[name] - before[name] for name in PROCESSES}
    resident = [resident_mib(cluster[name].pid) for name in ("extender", "operator")]
    return Throughput(jobs, elapsed_s, spent_s, *resident)


async def _until(
    done: asyncio.Event, bound: set[str], jobs: int, cluster: Cluster, report: Callable[[str], None]
) -> None:
    """Wait until all pods are bound; StalledError where a process ends or the time is over."""
    deadline = time.monotonic() + BOUND_WITHIN_S
    while True:
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), 5)
            return
        report(f"{len(bound):,} bound")
        for process in (cluster[name] for name in PROCESSES):
            if not process.running:
                raise StalledError(f"{process.name} ended while pods were being bound\n{log_tail(process.log)}")
        if time.monotonic() > deadline:
            raise StalledError(f"expected {jobs:,} bound pods within {BOUND_WITHIN_S:.0f} s, found {len(bound):,}")


def _processor_times(cluster: Cluster) -> dict[str, float]:
    return {name: processor_s(cluster[name].pid) for name in PROCESSES}
