"""A large cluster without machines: an API server on the loopback address that lists GPU nodes, tenants and jobs."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS
from carpool_core.kube.client import url_path
from carpool_core.products import PRODUCTS
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import JobState, SharingMode
from carpool_extender.testing import device, gpu_node, node_of, pod_of, prediction, tenant

from carpool_e2e import controlplane

GPUS, TENANTS = 8, 6
"""GPUs and tenants of each node."""
KINDS = [product.name for product in PRODUCTS if product.memory_mib >= 16_000][:4]
"""Products of the nodes, in turn."""
MODES = (SharingMode.MPS, SharingMode.MPS, SharingMode.TIME_SLICING)
"""Modes of the GPUs in use, drawn for each."""

Load = dict[str, float]
"""Memory in MiB and activity of a job, as arguments of `prediction`."""


def draw_load(draw: random.Random) -> Load:
    """Draw a job."""
    return {
        "memory_mib": draw.randrange(1_000, 9_000),
        "util": draw.uniform(10, 95),
        "sm": draw.uniform(0.05, 0.6),
        "dram": draw.uniform(0.05, 0.5),
    }


@dataclass(frozen=True, slots=True)
class PaperCluster:
    """Objects of the API server; those other than nodes are encoded."""

    nodes: list[GpuNode]
    jobs: list[bytes]
    pods: list[bytes]
    pending: list[bytes]
    """Pods of jobs that have no node."""


def paper_cluster(nodes: int, pending: Sequence[Load]) -> PaperCluster:
    """Build a cluster whose nodes have tenants, and jobs that wait for a node."""
    draw = random.Random(1)  # noqa: S311  # reproducible, not secret
    made, jobs, pods = list[GpuNode](), list[bytes](), list[bytes]()
    for number in range(nodes):
        node, loads = _node(number, draw)
        made.append(node)
        for held, load in zip(node.spec.reservations, loads, strict=True):
            jobs.append(_job(held.job_name, held.pod_namespace, load, JobState.RUNNING))
            pods.append(_pod(held.job_name, held.pod_namespace, node.metadata.name))
    names = [f"pending-{number}" for number in range(len(pending))]
    jobs += [_job(name, "default", load, JobState.QUEUED) for name, load in zip(names, pending, strict=True)]
    return PaperCluster(made, jobs, pods, [_pod(name, "default") for name in names])


def _node(number: int, draw: random.Random) -> tuple[GpuNode, list[Load]]:
    name, product = f"gpu-node-{number:05}", KINDS[number % len(KINDS)]
    gpus = [device(index, name, product, reserved_mib=512) for index in range(GPUS)]
    free_mib = {gpu.uuid: gpu.memory_mib - gpu.reserved_mib for gpu in gpus}
    modes, held, loads = dict[str, SharingMode](), list[Reservation](), list[Load]()
    for at in range(TENANTS):
        load = draw_load(draw)
        gpu = draw.choice([one for one in gpus if free_mib[one.uuid] >= load["memory_mib"]])
        free_mib[gpu.uuid] -= int(load["memory_mib"])
        mode = modes.setdefault(gpu.uuid, draw.choice(MODES))
        namespace = "default" if gpu.index % 2 else f"team-{number % 20}"
        held.append(_reservation(f"job-{number}-{at}", gpu.uuid, mode, product, load, namespace))
        loads.append(load)
    return gpu_node(name, gpus, held, resource_version="1"), loads


def _reservation(
    job: str, gpu: str, mode: SharingMode, product: str, load: Load, namespace: str = "default"
) -> Reservation:
    predicted = prediction(**load, products=[product])  # type: ignore[arg-type]
    return tenant(job, [gpu], mode, product, prediction=predicted, namespace=namespace)


def with_tenant(node: GpuNode, job: str, draw: random.Random) -> GpuNode:
    """Return a node with a small job as one tenant more, as after a bind."""
    gpu = draw.choice(node.status.devices)
    here = [held for held in node.spec.reservations if gpu.uuid in held.gpu_uuids]
    mode = here[0].mode if here else SharingMode.MPS
    load = {"memory_mib": 100, "util": 20.0, "sm": 0.1, "dram": 0.1}
    new = _reservation(job, gpu.uuid, mode, gpu.product, load)
    spec = msgspec.structs.replace(node.spec, reservations=[*node.spec.reservations, new])
    return msgspec.structs.replace(node, spec=spec)


def _job(name: str, namespace: str, load: Load, state: JobState) -> bytes:
    metadata = {"name": name, "namespace": namespace, "uid": f"job-{name}", "resourceVersion": "1"}
    predicted = prediction(**load, products=[product.name for product in PRODUCTS])  # type: ignore[arg-type]
    attempts = [{"number": 1, "podUids": [f"pod-{name}"]}]  # the extender accepts recorded pods only
    status = {"state": state, "prediction": predicted, "attempts": attempts}
    return msgspec.json.encode({"metadata": metadata, "spec": {"template": {}}, "status": status})


def _pod(job: str, namespace: str, node: str = "") -> bytes:
    pod = pod_of(job)
    pod["spec"] |= {"nodeName": node} if node else {}
    pod["metadata"] |= {"namespace": namespace, "resourceVersion": "1"}
    pod["status"] = {"phase": "Running" if node else "Pending"}
    return msgspec.json.encode(pod)


def write_kubeconfig(folder: Path, port: int) -> Path:
    """Write and return the kubeconfig of a `PaperApi` on this port, with an authority that nothing checks."""
    controlplane.make(folder, "ca", "/CN=ca")
    file = folder / "kubeconfig"
    file.write_text(controlplane.kubeconfig(f"http://127.0.0.1:{port}", folder / "ca.crt", "paper"))
    return file


class PaperApi:
    """An API server that lists a cluster and reports changed GpuNodes to watches."""

    def __init__(self, cluster: PaperCluster) -> None:
        self._nodes = {node.metadata.name: node for node in cluster.nodes}
        self._objects = {
            url_path(GPU_NODES): [msgspec.json.encode(node) for node in cluster.nodes],
            url_path(NODES): [msgspec.json.encode(node_of(name)) for name in self._nodes],
            url_path(GPU_TRAINING_JOBS): cluster.jobs,
            url_path(PODS): [*cluster.pods, *cluster.pending],
        }
        self._version = 1
        self._watches: set[asyncio.Queue[bytes]] = set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        """Listen on a free port for the duration of a block; the port is the value."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._handle)
        app.router.add_post("/{path:.*}", self._allow)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield int(runner.addresses[0][1])
        finally:
            await runner.cleanup()

    def change(self, node: GpuNode) -> None:
        """Report a node as it is now to every watch."""
        self._version += 1
        self._nodes[node.metadata.name] = node
        metadata = msgspec.structs.replace(node.metadata, resource_version=str(self._version))
        line = msgspec.json.encode({"type": "MODIFIED", "object": msgspec.structs.replace(node, metadata=metadata)})
        for watch in self._watches:
            watch.put_nowait(line + b"\n")

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        objects = self._objects.get(request.path, [])
        begin = int(request.query.get("continue") or "0")
        end = begin + int(request.query.get("limit", "500"))
        token = str(end) if end < len(objects) else ""
        metadata = msgspec.json.encode({"resourceVersion": "1", "continue": token})
        body = b'{"metadata":' + metadata + b',"items":[' + b",".join(objects[begin:end]) + b"]}"
        return web.Response(body=body, content_type="application/json")

    async def _allow(self, _: web.Request) -> web.Response:
        return web.json_response({"status": {"allowed": True}})  # access reviews are all that is posted

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        changes: asyncio.Queue[bytes] = asyncio.Queue()
        if request.path == url_path(GPU_NODES):
            self._watches.add(changes)
        try:
            while True:
                await response.write(await changes.get())
        except ConnectionResetError:
            return response
        finally:
            self._watches.discard(changes)
