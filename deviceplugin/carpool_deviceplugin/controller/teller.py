"""Records news as events, one after the other, without keeping anybody waiting."""

import asyncio
from collections.abc import Iterable

import structlog
from carpool_core.clock import Clock
from carpool_core.kube.api import GPU_NODES, PODS, KubeApi
from carpool_core.kube.events import EventRecorder
from carpool_core.values import NodeName

from carpool_deviceplugin.controller.news import News

_MOST = 256
"""News that wait at most; a node that has more of them says the rest in its status."""


class Teller:
    """Records what it is told.

    Args:
        node: Name of the GpuNode.
        api: The API server.
        clock: The time.
    """

    def __init__(self, node: NodeName, api: KubeApi, clock: Clock) -> None:
        self._node, self._events = node, EventRecorder(api, clock, "carpool-agent")
        self._waiting: asyncio.Queue[tuple[News, str]] = asyncio.Queue(_MOST)
        self._log = structlog.get_logger().bind(node=node)

    def tell(self, news: Iterable[News], node_uid: str) -> None:
        """Take in what happened.

        Args:
            news: What happened.
            node_uid: UID of the GpuNode.
        """
        for one in news:
            if self._waiting.full():
                self._log.warning("event dropped", reason=one.reason, message=one.message)
            else:
                self._waiting.put_nowait((one, node_uid))

    async def run(self) -> None:
        """Record, for ever."""
        while True:
            news, node_uid = await self._waiting.get()
            about = news.pod
            await self._events.record(
                kind=GPU_NODES if about is None else PODS,
                namespace="" if about is None else about.pod_namespace,
                name=self._node if about is None else about.pod_name,
                uid=node_uid if about is None else about.pod_uid,
                type=news.type,
                reason=news.reason,
                message=news.message,
            )
