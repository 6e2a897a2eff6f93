"""A large cluster on paper: GPU nodes with tenants, the tenants' jobs and pods, and jobs that wait for a place."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from carpool_core.clock import Clock, SystemClock, rfc3339
from carpool_core.keys import RESOURCE_GPU, SCHEDULER_NAME
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS, ResourceKind
from carpool_core.kube.client import url_path
from carpool_core.products import PRODUCTS
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import Device, GpuNode, GpuNodeSpec, GpuNodeStatus, Reservation, TenantProfile
from carpool_core.resources.prediction import (
    ActivityPrediction,
    Interval,
    MemoryPrediction,
    Prediction,
    ProductPrediction,
)
from carpool_core.values import GpuUuid, JobState, JobUid, PodUid, SharingMode

NAMESPACE = "default"
KINDS = [p for p in PRODUCTS if p.memory_mib >= 16_000][:4]
"""Products of the nodes, one after the other."""
NAMESPACES = 20
SHARED = (SharingMode.MPS, SharingMode.MPS, SharingMode.TIME_SLICING)
"""Modes of the GPUs in use: of three, one takes turns, whose slowdown costs more to predict."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a job does to a GPU."""

    memory_mib: int
    util: float
    sm: float
    dram: float


def draw_shape(draw: random.Random) -> Shape:
    """Draw a job."""
    return Shape(
        draw.randrange(1_000, 9_000), draw.uniform(0.1, 0.95), draw.uniform(0.05, 0.6), draw.uniform(0.05, 0.5)
    )


@dataclass(frozen=True, slots=True)
class World:
    """Everything that a watch of this cluster lists."""

    nodes: list[GpuNode]
    jobs: list[bytes]
    pods: list[bytes]
    waiting: list[bytes]
    """Pods of jobs that have no place, in the order in which they ask for one."""


def world(nodes: int, gpus: int, tenants: int, waiting: list[Shape], seed: int = 1) -> World:
    """Make a cluster.

    Args:
        nodes: Number of nodes.
        gpus: GPUs of each.
        tenants: Tenants of all GPUs together.
        waiting: The jobs that ask for a place.
        seed: Draws the tenants.
    """
    draw = random.Random(seed)  # noqa: S311  # a benchmark, no secret
    made: list[GpuNode] = []
    jobs, pods = [], []
    for number in range(nodes):
        node = _node(number, gpus, range(number * tenants // nodes, (number + 1) * tenants // nodes), draw)
        made.append(node)
        for held in node.spec.reservations:
            jobs.append(_job(held.job_name, held.pod_namespace, _shape_of(held), JobState.RUNNING))
            pods.append(_pod(held.job_name, held.pod_namespace, node.metadata.name))
    asking = [f"waiting-{number}" for number in range(len(waiting))]
    jobs += [_job(name, NAMESPACE, shape, JobState.QUEUED) for name, shape in zip(asking, waiting, strict=True)]
    return World(made, jobs, pods, [_pod(name, NAMESPACE, "") for name in asking])


def _shape_of(held: Reservation) -> Shape:
    tenant = held.tenant
    return Shape(
        tenant.memory_mib or 0, tenant.gpu_util_percent / 100, tenant.sm_active_ratio, tenant.dram_active_ratio
    )


def _node(number: int, gpus: int, tenants: range, draw: random.Random) -> GpuNode:
    name, kind = f"gpu-node-{number:05}", KINDS[number % len(KINDS)]
    devices = [
        Device(
            uuid=GpuUuid(f"GPU-{number:08x}-0000-4000-8000-{index:012x}"),
            index=index,
            product=kind.name,
            memory_mib=kind.memory_mib,
            reserved_mib=512,
            compute_capability=kind.compute_capability,
            modes=[SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS],
        )
        for index in range(gpus)
    ]
    mode: dict[int, SharingMode] = {}
    free = dict.fromkeys(range(gpus), kind.memory_mib - 512)
    held = []
    for tenant in tenants:
        shape = draw_shape(draw)
        at = draw.choice([index for index in range(gpus) if free[index] >= shape.memory_mib])
        free[at] -= shape.memory_mib
        chosen = mode.setdefault(at, draw.choice(SHARED))
        space = NAMESPACE if at % 2 else f"team-{number % NAMESPACES}"
        held.append(reservation(f"job-{tenant}", space, devices[at].uuid, chosen, shape))
    return GpuNode(
        metadata=ObjectMeta(name=name, uid=f"uid-of-{name}", resource_version="1"),
        spec=GpuNodeSpec(reservations=held),
        status=GpuNodeStatus(devices=devices),
    )


def reservation(job: str, namespace: str, gpu: GpuUuid, mode: SharingMode, shape: Shape) -> Reservation:
    """Make a tenant."""
    return Reservation(
        pod_uid=PodUid(f"pod-{job}"),
        pod_namespace=namespace,
        pod_name=f"{job}-worker-0-1",
        job_uid=JobUid(f"uid-{job}"),
        job_name=job,
        gpu_uuids=[gpu],
        mode=mode,
        memory_limit_mib=shape.memory_mib,
        thread_percentage=50,
        reserved_at="2026-01-31T12:00:00Z",
        deadline="2100-01-31T12:00:20Z",
        tenant=TenantProfile(
            memory_mib=shape.memory_mib,
            gpu_util_percent=100 * shape.util,
            sm_active_ratio=shape.sm,
            dram_active_ratio=shape.dram,
            max_slowdown=1.5,
        ),
        policy="least-slowdown",
        reason=f"least-slowdown: {mode} beside nobody, expected slowdown 1.00 of 1.50",
    )


def _job(name: str, namespace: str, shape: Shape, state: JobState) -> bytes:
    products = [
        ProductPrediction(
            product=kind.name,
            memory=MemoryPrediction(
                median_mib=shape.memory_mib * 4 // 5,
                upper_mib=shape.memory_mib,
                coverage=0.95,
                class_lower_mib=shape.memory_mib // 1024 * 1024,
                class_upper_mib=shape.memory_mib // 1024 * 1024 + 1024,
            ),
            activity=ActivityPrediction(
                gpu_util_percent=_around(100 * shape.util),
                sm_active_ratio=_around(shape.sm),
                dram_active_ratio=_around(shape.dram),
            ),
            step_time_seconds=_around(0.1),
        )
        for kind in PRODUCTS
    ]
    prediction = Prediction(outcome="Predicted", reason="Estimated", model_version="bench", products=products)
    return msgspec.json.encode(
        {
            "apiVersion": "carpool.dev/v1alpha1",
            "kind": "GpuTrainingJob",
            "metadata": _meta(name, namespace, f"uid-{name}"),
            "spec": {
                "workers": 1,
                "gpusPerWorker": 1,
                "sharing": {"mode": "Auto", "maxSlowdown": 1.5},
                "template": _template(),
            },
            "status": {"state": state, "prediction": prediction},
        }
    )


def _around(value: float) -> Interval:
    return Interval(median=value, lower=value * 0.8, upper=value * 1.2)


def _meta(name: str, namespace: str, uid: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": namespace,
        "uid": uid,
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-31T12:00:00Z",
        "labels": {"carpool.dev/job": name},
        "managedFields": [
            {"manager": "carpool-operator", "operation": "Update", "fieldsV1": {"f:metadata": {"f:labels": {}}}}
        ],
    }


def _template() -> dict[str, Any]:
    limits = {RESOURCE_GPU: "1"}
    container = {
        "name": "train",
        "image": "registry.example/train:1",
        "command": ["python", "train.py", "--epochs", "90"],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    return {"spec": {"containers": [container], "volumes": [{"name": "data", "emptyDir": {}}]}}


def _pod(job: str, namespace: str, node: str) -> bytes:
    owner = {
        "apiVersion": "carpool.dev/v1alpha1",
        "kind": "GpuTrainingJob",
        "name": job,
        "uid": f"uid-{job}",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    meta = _meta(f"{job}-worker-0-1", namespace, f"pod-{job}") | {"ownerReferences": [owner]}
    spec = _template()["spec"] | {"schedulerName": SCHEDULER_NAME} | ({"nodeName": node} if node else {})
    status = {"phase": "Running" if node else "Pending"}
    return msgspec.json.encode({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status})


BEAT_S = 25.0
"""Each agent writes at least so often: after a minute of silence its GPUs are left out."""


class PaperApi:
    """Serves the objects that it was given, and tells whoever watches what is changed, and that agents live.

    Args:
        nodes: The GpuNodes.
        jobs: The jobs, encoded.
        pods: The pods, encoded.
        clock: For signs of life.
        sleep: Waits between them.
    """

    def __init__(
        self,
        nodes: Sequence[GpuNode],
        jobs: Sequence[bytes],
        pods: Sequence[bytes],
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._nodes = {node.metadata.name: node for node in nodes}
        self._clock, self._sleep = clock or SystemClock(), sleep
        self._objects: dict[ResourceKind, list[bytes]] = {
            GPU_NODES: [msgspec.json.encode(node) for node in nodes],
            GPU_TRAINING_JOBS: list(jobs),
            PODS: list(pods),
        }
        self._version = 1
        self._changes: set[asyncio.Queue[bytes]] = set()

    async def serve(self, port: int = 0) -> tuple[web.AppRunner, int]:
        """Listen on the loopback address; return what ends it, and the port."""
        app = web.Application()
        for kind in self._objects:
            app.router.add_get(url_path(kind), self._handler(kind))
        app.cleanup_ctx.append(self._living)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner, int(runner.addresses[0][1])

    def _handler(self, kind: ResourceKind) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._watch(kind, request) if "watch" in request.query else self._list(kind, request)

        return handle

    def _list(self, kind: ResourceKind, request: web.Request) -> web.Response:
        limit, begin = int(request.query.get("limit", "500")), int(request.query.get("continue") or "0")
        part = self._objects[kind][begin : begin + limit]
        more = str(begin + limit) if begin + limit < len(self._objects[kind]) else ""
        meta = f'{{"resourceVersion":"1","continue":"{more}"}}'.encode()
        return web.Response(
            body=b'{"metadata":' + meta + b',"items":[' + b",".join(part) + b"]}", content_type="application/json"
        )

    async def _watch(self, kind: ResourceKind, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        changes: asyncio.Queue[bytes] = asyncio.Queue()
        if kind is GPU_NODES:
            self._changes.add(changes)
        try:
            while True:
                await answer.write(await changes.get())
        except ConnectionResetError:
            return answer  # whoever watched has ended
        finally:
            self._changes.discard(changes)

    async def _living(self, _: web.Application) -> AsyncIterator[None]:
        living = asyncio.create_task(self._live(), name="agents live")
        yield
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)

    async def _live(self) -> None:
        """Play the agents: one node after the other tells that its agent lives."""
        while self._nodes:
            for name in self._nodes:
                await self._sleep(BEAT_S / len(self._nodes))
                node = self._nodes[name]
                status = msgspec.structs.replace(node.status, heartbeat_time=rfc3339(self._clock.now()))
                self.change(msgspec.structs.replace(node, status=status))

    def change(self, node: GpuNode) -> None:
        """Tell whoever watches of a GpuNode as it is now."""
        self._nodes[node.metadata.name] = node
        self._version += 1
        meta = msgspec.structs.replace(node.metadata, resource_version=str(self._version))
        line = (
            b'{"type":"MODIFIED","object":' + msgspec.json.encode(msgspec.structs.replace(node, metadata=meta)) + b"}\n"
        )
        for changes in self._changes:
            changes.put_nowait(line)
