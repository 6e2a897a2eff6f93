"""How quickly the extender decides: filter and prioritize over HTTP with mutual TLS, as kube-scheduler asks."""

import asyncio
import http.client
import os
import random
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
from carpool_core.resources.node import GpuNode
from carpool_core.values import SharingMode

from carpool_e2e import certificates
from carpool_e2e.bench.apiserver import PaperApi
from carpool_e2e.bench.circumstances import circumstances
from carpool_e2e.bench.memory import resident_mib
from carpool_e2e.bench.naive import filter_and_prioritize
from carpool_e2e.bench.world import NAMESPACE, Shape, World, draw_shape, reservation, world
from carpool_e2e.errors import HarnessError
from carpool_e2e.ports import choose

GPUS, TENANTS_PER_NODE = 8, 6
SIZES = (500, 1000, 2000, 5000)
DECISIONS, WARM_UP = 600, 30
SHAPES, NEW_EVERY = 20, 10
"""Jobs are of so many shapes, as models and batch sizes come again and again; one in so many has a shape of its own."""
NAIVE_RUNS = 5
PATIENCE_S = 180.0
_SLOT = 90
"""Beyond the slots of clusters."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How long one pod's decision took, in seconds."""

    filter_s: float
    prioritize_s: float
    is_new: bool
    """Whether nobody had asked for a place for such a job before."""

    @property
    def total_s(self) -> float:
        """Both together."""
        return self.filter_s + self.prioritize_s


@dataclass(frozen=True, slots=True)
class Size:
    """What was measured with a cluster of one size."""

    nodes: int
    tenants: int
    decisions: list[Decision]
    elapsed_s: float
    """Of all decisions one after the other, the client's own work and the changes between them included."""
    processor_s: float
    """Processor time of the extender meanwhile: other processes of the machine do not lengthen it."""
    refusal_s: list[float]
    """Filter of a job that no node has room for."""
    resident_mib: float
    naive_s: float
    """Median of the naive loop, in process, without HTTP."""
    circumstances: str
    """What else went on, in a sentence."""


def percentile(values: list[float], share: float) -> float:
    """Return the value that a share of all values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def processor_s(pid: int, proc: Path = Path("/proc")) -> float:
    """Return the processor time that a process has used, in seconds."""
    fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(tell: Callable[[str], None], sizes: tuple[int, ...] = SIZES) -> list[Size]:
    """Measure clusters of several sizes, one after the other."""
    found = []
    for nodes in sizes:
        found.append(asyncio.run(_measure(nodes)))
        last = found[-1]
        tell(
            f"{nodes} nodes: p99 {1000 * percentile([d.total_s for d in last.decisions], 0.99):.1f} ms, "
            f"{1000 * last.processor_s / len(last.decisions):.1f} ms of processor each, "
            f"{len(last.decisions) / last.elapsed_s:.0f} decisions/s, {last.resident_mib:.0f} MiB, "
            f"naive {1000 * last.naive_s:.0f} ms"
        )
    return found


def _shapes(draw: random.Random) -> tuple[list[Shape], list[bool]]:
    """Draw the jobs that ask for a place, and say which of them are of a shape that nobody had before."""
    known = [draw_shape(draw) for _ in range(SHAPES)]
    new = [number >= WARM_UP and number % NEW_EVERY == 0 for number in range(WARM_UP + DECISIONS)]
    return [draw_shape(draw) if is_new else known[number % SHAPES] for number, is_new in enumerate(new)], new


async def _measure(nodes: int) -> Size:
    draw = random.Random(7)  # noqa: S311  # a benchmark, no secret
    shapes, new = _shapes(draw)
    huge = Shape(10**6, 0.5, 0.5, 0.5)
    tenants = nodes * TENANTS_PER_NODE
    paper = world(nodes, GPUS, tenants, [*shapes, huge])
    api = PaperApi(paper.nodes, paper.jobs, [*paper.pods, *paper.waiting])
    runner, port = await api.serve()
    try:
        with tempfile.TemporaryDirectory() as folder, _extender(Path(folder), port) as (process, client):
            await asyncio.to_thread(client.wait)
            began = cpu_s = 0.0
            decisions: list[Decision] = []
            for number, is_new in enumerate(new):
                if number == WARM_UP:
                    began, cpu_s, decisions = time.perf_counter(), processor_s(process.pid), []
                decisions.append(
                    await asyncio.to_thread(client.decide, paper.waiting[number], paper.nodes, is_new=is_new)
                )
                api.change(_changed(paper.nodes, number, draw))
                await asyncio.sleep(0)
            elapsed_s, cpu_s = time.perf_counter() - began, processor_s(process.pid) - cpu_s
            refusals = [await asyncio.to_thread(client.refused, paper.waiting[-1], paper.nodes) for _ in range(20)]
            resident = resident_mib(process.pid)
    finally:
        await runner.cleanup()
    told = circumstances()
    return Size(nodes, tenants, decisions, elapsed_s, cpu_s, refusals, resident, _naive(paper, shapes), told)


def _changed(nodes: list[GpuNode], number: int, draw: random.Random) -> GpuNode:
    """Return a node with the last pod as one tenant more, as after a bind."""
    node = draw.choice(nodes)
    gpu = draw.choice(node.status.devices).uuid
    here = [r for r in node.spec.reservations if gpu in r.gpu_uuids]
    mode = here[0].mode if here else SharingMode.MPS
    one = reservation(f"waiting-{number}", NAMESPACE, gpu, mode, Shape(100, 0.2, 0.1, 0.1))
    return msgspec.structs.replace(
        node, spec=msgspec.structs.replace(node.spec, reservations=[*node.spec.reservations, one])
    )


def _naive(paper: World, shapes: list[Shape]) -> float:
    took = []
    for shape in shapes[:NAIVE_RUNS]:
        began = time.perf_counter()
        filter_and_prioritize(paper.nodes, shape)
        took.append(time.perf_counter() - began)
    return percentile(took, 0.5)


class _Client:
    """Asks as kube-scheduler does: one pod after the other over a connection that is kept."""

    def __init__(self, port: int, ready: str, tls: ssl.SSLContext) -> None:
        self._port, self._ready, self._tls = port, ready, tls
        self._connection: http.client.HTTPSConnection | None = None
        self._draw = random.Random(3)  # noqa: S311  # a benchmark, no secret

    def wait(self) -> None:
        """Wait until the extender has listed everything."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                with urlopen(self._ready) as answer:  # noqa: S310  # our own URL
                    if answer.status == 200:
                        self._connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._tls)
                        return
            except OSError:
                time.sleep(0.2)
        raise HarnessError(f"expected the extender to be ready within {PATIENCE_S:.0f} s, it was not")

    def decide(self, pod: bytes, nodes: list[GpuNode], *, is_new: bool) -> Decision:
        """Filter, then prioritize what fits."""
        filter_s, found = self._filter(pod, nodes)
        fits = found["NodeNames"] or []
        prioritize_s, scored = self._post("/prioritize", pod, fits)
        if not fits or len(scored) != len(fits) or max(one["Score"] for one in scored) != 10:
            raise HarnessError(
                f"expected scores of some nodes with a 10 among them, found {len(scored)}: {found}"[:500]
            )
        return Decision(filter_s, prioritize_s, is_new)

    def refused(self, pod: bytes, nodes: list[GpuNode]) -> float:
        """Filter a job that fits nowhere."""
        took, found = self._filter(pod, nodes)
        if found["NodeNames"]:
            raise HarnessError("expected that no node fits, found some that do")
        return took

    def _filter(self, pod: bytes, nodes: list[GpuNode]) -> tuple[float, Any]:
        names = [node.metadata.name for node in nodes]
        self._draw.shuffle(names)  # kube-scheduler offers them as its own filters came to an end
        return self._post("/filter", pod, names)

    def _post(self, path: str, pod: bytes, names: list[str]) -> tuple[float, Any]:
        if self._connection is None:
            raise HarnessError("expected wait() before a request")
        body = b'{"Pod":' + pod + b',"Nodes":null,"NodeNames":' + msgspec.json.encode(names) + b"}"
        began = time.perf_counter()
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        took = time.perf_counter() - began
        if answer.status != 200:
            raise HarnessError(f"expected an answer to {path}, found {answer.status}: {text[:200]!r}")
        return took, msgspec.json.decode(text)


@contextmanager
def _extender(folder: Path, api_port: int) -> Iterator[tuple["subprocess.Popen[bytes]", _Client]]:
    """Run `carpool extender` beside that API server."""
    certificates.make(folder, "ca", "/CN=ca")
    certificates.make(folder, "server", "/CN=extender", ["IP:127.0.0.1"], "ca")
    certificates.make(folder, "client", "/CN=scheduler", ["DNS:scheduler"], "ca")
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_bytes(
        msgspec.json.encode(
            {
                "current-context": "c",
                "contexts": [context],
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{api_port}"}}],
                "users": [{"name": "u", "user": {"token": "paper"}}],
            }
        )
    )
    ports = choose(_SLOT)
    environment = {
        "KUBECONFIG": str(kubeconfig),
        "CARPOOL_EXTENDER_PORT": str(ports.extender),
        "CARPOOL_METRICS_PORT": str(ports.extender_metrics),
        "CARPOOL_EXTENDER_TLS_CERT": str(folder / "server.crt"),
        "CARPOOL_EXTENDER_TLS_KEY": str(folder / "server.key"),
        "CARPOOL_EXTENDER_CLIENT_CA": str(folder / "ca.crt"),
    }
    tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    tls.load_cert_chain(folder / "client.crt", folder / "client.key")
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "carpool_extender"]
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
        try:
            yield process, _Client(ports.extender, f"http://127.0.0.1:{ports.extender_metrics}/readyz", tls)
        finally:
            process.terminate()
            process.wait()
