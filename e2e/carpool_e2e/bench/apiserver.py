"""Lists and watches of a cluster that exists on paper only: as much of an API server as the extender reads."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
from aiohttp import web
from carpool_core.clock import Clock, SystemClock, rfc3339
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS, ResourceKind
from carpool_core.kube.client import path_of
from carpool_core.resources.node import GpuNode

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
            app.router.add_get(path_of(kind), self._handler(kind))
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
