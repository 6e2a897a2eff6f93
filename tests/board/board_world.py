"""A board behind a real HTTP server, on an API server in memory that knows the rights of several viewers."""

import asyncio
import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import uvicorn
from carpool_board.app import Board, create_app
from carpool_board.viewers import SELF_REVIEWS, Viewers
from carpool_board.watch import ClusterWatch
from carpool_core.kube.api import EVENTS, GPU_TRAINING_JOBS, ResourceKind, Selector
from carpool_core.kube.errors import Forbidden
from carpool_core.resources.node import GpuNode, Partition, Tenant
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, GpuUuid, PartitionState, PodUid, SharingMode
from carpool_extender.explain.commands import read_site, rights_remedy
from carpool_extender.settings import AskSettings
from carpool_extender.testing import device, gpu_node, seed_job, seed_node, seed_pod, tenant, until
from carpool_extender.uvicorn_server import Server
from carpool_simulator.commands import simulate
from click.testing import CliRunner

SITE = "carpool-system/carpool"
PAGES = ("/", "/queue", "/jobs", "/jobs/default/small-a", "/jobs/default/small-a/explain", "/plan", "/v1")
EVERYTHING = frozenset({"*/gputrainingjobs", "*/gpunodes", "*/pods", "*/nodes", "*/events", "*/configmaps"})


class AsViewer:
    """The calls of one viewer: what RBAC would refuse is refused. `allowed` is None for an invalid token."""

    def __init__(self, server: FakeKube, allowed: Collection[str] | None) -> None:
        self._server, self._allowed = server, allowed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    async def __aenter__(self) -> "AsViewer":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def _may(self, plural: str, namespace: str) -> bool:
        if self._allowed is None:
            raise Forbidden("Unauthorized", status=401)
        return bool({f"*/{plural}", f"{namespace}/{plural}"} & set(self._allowed))

    def _check(self, verb: str, kind: ResourceKind, namespace: str) -> None:
        if not self._may(kind.plural, namespace):
            raise Forbidden(f"{verb} {kind.plural}: forbidden", status=403)

    async def get(self, kind: ResourceKind, name: str, type_: type[Any], *, namespace: str = "") -> Any:
        self._check("get", kind, namespace)
        return await self._server.get(kind, name, type_, namespace=namespace)

    async def list_page(self, kind: ResourceKind, selector: Selector, **page: Any) -> Any:
        self._check("list", kind, selector.namespace)
        return await self._server.list_page(kind, selector, **page)

    async def create(self, kind: ResourceKind, body: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        assert kind == SELF_REVIEWS, "the board writes nothing"
        self._server.calls.append(("create", kind.plural, "", ""))  # type: ignore[arg-type]
        asked = body["spec"]["resourceAttributes"]
        return {"status": {"allowed": self._may(asked["resource"], asked.get("namespace", ""))}}


@dataclass
class World:
    """A board and its cluster."""

    kube: FakeKube
    clock: FakeClock
    watch: ClusterWatch
    board: Board
    url: str
    session: aiohttp.ClientSession

    async def get(self, path: str, token: str = "", **headers: str) -> tuple[int, str]:
        """Return the status and the text of an answer."""
        given = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.session.get(f"{self.url}{path}", headers=given | headers) as answer:
            return answer.status, await answer.text()

    async def document(self, path: str, token: str = "") -> Any:
        """Return a JSON document."""
        status, text = await self.get(path, token)
        assert status == 200, text
        return msgspec.json.decode(text)


@functools.cache
def simulated() -> Path:
    """A folder with the results of a small simulation of the cluster's GPUs."""
    folder = Path(tempfile.mkdtemp(prefix="carpool-plan-"))
    atexit.register(shutil.rmtree, folder)
    lines = ["timestamp,duration,num_gpus", *(f"{at_s},600,1" for at_s in range(4))]
    (folder / "trace.csv").write_text("\n".join(lines))
    (folder / "gpus.yaml").write_bytes(msgspec.yaml.encode({"kind": "List", "items": [shared_node()]}))
    files = ["--trace", str(folder / "trace.csv"), "--cluster", str(folder / "gpus.yaml")]
    done = CliRunner().invoke(simulate, [*files, "--out", str(folder / "out")])
    assert done.exit_code == 0, done.output
    return folder / "out"


@contextlib.asynccontextmanager
async def running(
    kube: FakeKube,
    *,
    own: Collection[str] = EVERYTHING,
    tokens: Mapping[str, Collection[str]] | None = None,
    plan: Path | Literal["simulated"] | None = "simulated",
) -> AsyncIterator[World]:
    """A board with these rights of its own; `tokens` are the viewers of one that needs tokens."""
    clock = FakeClock()

    def connect(token: str | None) -> Any:
        return AsViewer(kube, own if token is None else (tokens or {}).get(token))

    viewers, asked = Viewers(connect, clock, rights_remedy(SITE)), AskSettings(site=SITE)
    watch = ClusterWatch(connect(None), clock, lambda: read_site(connect(None), asked, frozenset(), clock), shortly)
    board = Board(viewers, watch, clock, SITE, needs_token=tokens is not None, namespace="" if tokens else "default",
                  plan=simulated() if plan == "simulated" else plan)  # fmt: skip
    config = uvicorn.Config(create_app(board), port=0, lifespan="off", ws="none", log_config=None,
                            timeout_graceful_shutdown=1)  # fmt: skip
    server = Server(config, "CARPOOL_BOARD")
    tasks = [asyncio.create_task(server.serve()), asyncio.create_task(watch.run(viewers))]
    await until(lambda: server.started)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        async with aiohttp.ClientSession() as session:
            yield World(kube, clock, watch, board, url, session)
    finally:
        tasks[1].cancel()
        server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)


async def shortly(_: float) -> None:
    await asyncio.sleep(0.01)


def use(pod: str, gpu: str, memory_mib: int, util: float = 40.0) -> Tenant:
    return Tenant(pod_uid=PodUid(pod), gpu_uuid=GpuUuid(gpu), memory_mib=memory_mib, peak_memory_mib=memory_mib + 200,
                  gpu_util_percent=util, sm_active_ratio=util / 150, settled=True)  # fmt: skip


def shared_node(name: str = "a100-1") -> GpuNode:
    """A node with a shared, an idle and an unhealthy GPU."""
    gpus = [device(0, name, mode=SharingMode.MPS), device(1, name),
            device(2, name, health=DeviceHealth.UNHEALTHY, health_message="XID 79: it fell off the bus")]  # fmt: skip
    held = [tenant("small-a", [f"GPU-{name}-0"]), tenant("small-b", [f"GPU-{name}-0"])]
    node = gpu_node(name, gpus, held)
    ready = [Partition(pod_uid=one.pod_uid, generation=1, state=PartitionState.READY) for one in held]
    tenants = [use("pod-small-a", f"GPU-{name}-0", 3100), use("pod-small-b", f"GPU-{name}-0", 4300)]
    return msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, tenants=tenants, partitions=ready))


def condition(type_: str, time: str, message: str, status: str = "True", reason: str = "Because") -> dict[str, str]:
    return {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": time}


def seed_history(kube: FakeKube, name: str = "small-a") -> None:
    """Put a job on the server that ran out of memory once and runs beside another one now."""
    seed_job(kube, name, created="2026-01-01T00:00:00Z", spec={"training": {"steps": 1000}})
    job = kube.dump(GPU_TRAINING_JOBS, name, "default")
    at = "2026-01-01T00:{}Z".format
    place = {
        "worker": 0, "pod": f"{name}-worker-0-2", "podUid": f"pod-{name}", "node": "a100-1",
        "gpuUuids": ["GPU-a100-1-0"], "product": "NVIDIA A100-SXM4-40GB", "mode": "MPS", "memoryLimitMib": 4000,
        "expectedSlowdown": 1.25, "reason": "least-slowdown: MPS on GPU 0",
        "neighbours": [{"namespace": "default", "job": "small-b", "gpuUuid": "GPU-a100-1-0"}],
    }  # fmt: skip
    job["status"] |= {
        "state": "Running",
        "startTime": at("08:00"),
        "conditions": [
            condition("Predicted", at("00:05"), "4,000 MiB on each GPU"),
            condition("Placed", at("08:00"), "1 of 1 workers"),
            condition("Running", at("08:10"), "1 of 1 workers run"),
        ],
        "placement": [place],
        "attempts": [
            {"number": 1, "startedAt": at("00:10"), "endedAt": at("06:00"), "outcome": "GpuOutOfMemory",
             "message": "CUDA out of memory"},
            {"number": 2, "startedAt": at("07:00"), "outcome": "Running", "podUids": [f"pod-{name}"]},
        ],
        "observed": {"peakMemoryMib": 3300, "gpuUtilPercent": 42.0, "slowdown": 1.18, "stepTimeSeconds": 0.118},
    }  # fmt: skip
    kube.seed(GPU_TRAINING_JOBS, job)
    about = {"kind": "GpuTrainingJob", "name": name}
    event = {"involvedObject": about, "reason": "Restarted", "message": "attempt 2", "lastTimestamp": at("07:00")}
    kube.seed(EVENTS, {"metadata": {"name": f"e-{name}", "namespace": "default"}, **event})


def small_cluster() -> FakeKube:
    """Two nodes, two running jobs, and two that wait."""
    kube = FakeKube(FakeClock())
    seed_node(kube, shared_node())
    seed_node(kube, gpu_node("t4-1", [device(0, "t4-1", "Tesla T4")]))
    seed_history(kube, "small-a")
    seed_job(kube, "small-b")
    for name, memory_mib in (("waits", 30_000), ("too-large", 90_000)):
        seed_job(kube, name, memory_mib=memory_mib, spec={"workers": 3} if name == "waits" else {})
        seed_pod(kube, name, schedulingGates=[{"name": "carpool.dev/admission"}])
    return kube
