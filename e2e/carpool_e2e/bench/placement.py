"""Speed of the extender: filter and prioritize over HTTP with mutual TLS, as kube-scheduler asks."""

import asyncio
import gc
import http.client
import os
import random
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import urlopen

import msgspec

from carpool_e2e.bench.measure import Figure, Section, percentile, resident_mib
from carpool_e2e.bench.paper import (
    GPUS,
    TENANTS,
    Load,
    PaperApi,
    draw_load,
    paper_cluster,
    with_tenant,
    write_kubeconfig,
)
from carpool_e2e.cluster import carpool_command
from carpool_e2e.errors import HarnessError
from carpool_e2e.processes import choose

T = TypeVar("T")

SIZES = {5_000: 1_000, 20_000: 300}
"""Nodes of each cluster, and decisions measured there."""
TARGETS = {5_000: (10.0, 250.0), 20_000: (15.0, None)}
"""Nodes → largest p99 in ms, least decisions a second."""
WARM_UP, REFUSALS = 30, 10
SHAPES, NEW_EVERY = 20, 10
"""Jobs repeat so many shapes; one in so many has a shape of its own."""
READY_S = 300.0
_SLOT = 90
"""Slot of the ports; no cluster has it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Measurements of one cluster."""

    nodes: int
    decision_s: list[float]
    """Filter and prioritize of each pod."""
    refusal_s: list[float]
    """Filter of a pod that fits nowhere."""
    resident_mib: float

    def figures(self) -> list[Figure]:
        """Return the rows."""
        at = f"{self.nodes:,} nodes × {GPUS} GPUs"
        most_ms, least_rate = TARGETS.get(self.nodes, (None, None))
        rate = len(self.decision_s) / sum(self.decision_s)
        return [
            Figure(f"filter and prioritize, p50, {at}", 1e3 * percentile(self.decision_s, 0.5), "ms"),
            Figure(f"filter and prioritize, p99, {at}", 1e3 * percentile(self.decision_s, 0.99), "ms", most_ms),
            Figure(f"decisions a second, {at}", rate, "/s", at_least=least_rate),
            Figure(f"filter of a job that fits nowhere, p50, {at}", 1e3 * percentile(self.refusal_s, 0.5), "ms"),
            Figure(f"memory of the extender, {at}", self.resident_mib, "MiB"),
        ]


class Client:
    """Plays kube-scheduler: asks about one pod after another over one connection.

    Args:
        folder: Certificates.
        port: Port of the extender.
        nodes: Names of all nodes, which are offered in random order.
    """

    def __init__(self, folder: Path, port: int, nodes: Sequence[str]) -> None:
        tls = ssl.create_default_context(cafile=str(folder / "client" / "ca.crt"))
        tls.load_cert_chain(folder / "client" / "client.pem")
        self._connection = http.client.HTTPSConnection("127.0.0.1", port, context=tls)
        self._draw, self._nodes = random.Random(3), nodes  # noqa: S311  # reproducible, not secret

    def decide(self, pod: bytes) -> float:
        """Filter, then prioritize what fits; return the time of both, in seconds.

        Raises:
            HarnessError: No node fits.
        """
        filter_s, feasible = self.filter(pod)
        if not feasible:
            raise HarnessError("expected a node that fits, found none")
        prioritize_s, _ = self._post("/prioritize", pod, feasible)
        return filter_s + prioritize_s

    def filter(self, pod: bytes) -> tuple[float, list[str]]:
        """Return the time, in seconds, and the feasible nodes."""
        took_s, found = self._post("/filter", pod, self._draw.sample(self._nodes, len(self._nodes)))
        return took_s, found["NodeNames"] or []

    def _post(self, path: str, pod: bytes, nodes: list[str]) -> tuple[float, Any]:
        body = b'{"Pod":' + pod + b',"Nodes":null,"NodeNames":' + msgspec.json.encode(nodes) + b"}"
        began = time.perf_counter()
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        text = response.read()
        took_s = time.perf_counter() - began
        if response.status != 200:
            raise HarnessError(f"expected an answer to {path}, found {response.status}: {text[:200]!r}")
        return took_s, msgspec.json.decode(text)


class ClientProcess:
    """A client in a process of its own, which neither the API server's work nor its garbage delay."""

    _client: Client

    def __init__(self, folder: Path, port: int, nodes: Sequence[str]) -> None:
        self._pool = ProcessPoolExecutor(
            1, get_context("spawn"), initializer=self._connect, initargs=(folder, port, nodes)
        )

    @classmethod
    def _connect(cls, folder: Path, port: int, nodes: Sequence[str]) -> None:
        gc.disable()
        cls._client = Client(folder, port, nodes)

    @classmethod
    def _ask(cls, method: Callable[[Client, bytes], T], pod: bytes) -> T:
        return method(cls._client, pod)

    async def ask(self, method: Callable[[Client, bytes], T], pod: bytes) -> T:
        """Return the answer of `Client.decide` or `Client.filter`."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, method, pod)

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


def wait_ready(url: str) -> None:
    """Wait until the extender has listed everything.

    Raises:
        HarnessError: It is not ready in time.
    """
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            with urlopen(url):  # noqa: S310  # our own URL
                return
        except OSError:
            time.sleep(0.2)
    raise HarnessError(f"expected the extender to be ready within {READY_S:.0f} s, it was not")


@contextmanager
def extender(folder: Path, api_port: int) -> Iterator[tuple[int, int, str]]:
    """Run `carpool extender` against an API server without TLS; yield its process ID, its port and its ready URL."""
    ports = choose(_SLOT)
    environment = {
        "KUBECONFIG": str(write_kubeconfig(folder, api_port)),
        "CARPOOL_EXTENDER_PORT": str(ports.extender),
        "CARPOOL_METRICS_PORT": str(ports.extender_metrics),
        "CARPOOL_EXTENDER_TLS_DIR": str(folder),
        "CARPOOL_SCHEDULER_LEASE": "default/of-another",  # a leader would claim GPUs for every pending pod
    }
    with (folder / "log").open("wb") as log:
        command = [carpool_command(), "extender"]
        with subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log) as process:
            try:
                yield process.pid, ports.extender, f"http://127.0.0.1:{ports.extender_metrics}/readyz"
            finally:
                process.terminate()


def draw_jobs(count: int) -> list[Load]:
    """Draw the jobs: repeated shapes, and after the warm-up one in `NEW_EVERY` with a shape of its own."""
    draw = random.Random(7)  # noqa: S311  # reproducible, not secret
    repeated = [draw_load(draw) for _ in range(SHAPES)]
    new = (number >= WARM_UP and number % NEW_EVERY == 0 for number in range(count))
    return [draw_load(draw) if is_new else repeated[number % SHAPES] for number, is_new in enumerate(new)]


def measure(report: Callable[[str], None], sizes: dict[int, int] = SIZES) -> Section:
    """Measure the extender in clusters of several sizes, one after another."""
    figures = list[Figure]()
    for nodes, decisions in sizes.items():
        found = asyncio.run(_measure(nodes, decisions)).figures()
        for figure in found:
            report(f"{figure.what}: {figure}")
        figures += found
    text = (
        f"kube-scheduler's requests over HTTP with mutual TLS, one pod after another. Each node has {TENANTS} tenants. "
        "All nodes are offered each time, in another order. "
        f"After each pod one GpuNode changes. One job in {NEW_EVERY} has a new shape. The pods have no claim of the "
        "queue, so that filter evaluates all nodes: the slow path."
    )
    return Section("Placement", text, figures)


async def _measure(nodes: int, decisions: int) -> Placement:
    jobs = draw_jobs(WARM_UP + decisions)
    cluster = paper_cluster(nodes, [*jobs, {"memory_mib": 10**6, "util": 50.0, "sm": 0.5, "dram": 0.5}])
    names, api, draw = [node.metadata.name for node in cluster.nodes], PaperApi(cluster), random.Random(5)  # noqa: S311
    *pods, huge = cluster.pending
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with api.serve() as port:
            with extender(folder, port) as (pid, extender_port, ready_url):
                await asyncio.to_thread(wait_ready, ready_url)
                client, decision_s = ClientProcess(folder, extender_port, names), list[float]()
                for number, pod in enumerate(pods):
                    decision_s.append(await client.ask(Client.decide, pod))
                    api.change(with_tenant(draw.choice(cluster.nodes), f"pending-{number}", draw))
                refusals = [await client.ask(Client.filter, huge) for _ in range(REFUSALS)]
                memory_mib = resident_mib(pid)
                client.close()
    if any(feasible for _, feasible in refusals):
        raise HarnessError("expected that no node fits a job of 1,000,000 MiB, found some that do")
    return Placement(nodes, decision_s[WARM_UP:], [took_s for took_s, _ in refusals], memory_mib)
