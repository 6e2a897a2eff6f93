"""What is worth an event: a GPU that falls sick or is well again, a share that fails, pods that end together. Pure."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import structlog
from carpool_core.clock import Clock
from carpool_core.kube.api import GPU_NODES, PODS, KubeApi
from carpool_core.kube.events import EventRecorder
from carpool_core.resources.node import Device, Partition, Reservation
from carpool_core.values import DeviceHealth, GpuUuid, NodeName, PartitionState, PodUid


@dataclass(frozen=True, slots=True)
class News:
    """Something that happened."""

    pod: Reservation | None
    """The reservation of the pod that it is about; the GpuNode when None."""
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def of_devices(before: Mapping[GpuUuid, Device], after: Iterable[Device]) -> list[News]:
    """Say whose health has changed. A GPU that is sick for another reason than before is no news until it was well."""
    found: list[News] = []
    for device in after:
        known = before.get(device.uuid)
        was = known.health if known is not None else DeviceHealth.HEALTHY
        if device.health is was:
            continue
        where = f"GPU {device.index} ({device.uuid})"
        if device.health is DeviceHealth.UNHEALTHY:
            found.append(News(None, "Warning", "GpuUnhealthy", f"{where} gets no new work: {device.health_message}"))
        else:
            found.append(News(None, "Normal", "GpuHealthy", f"{where} gets work again"))
    return found


def of_partitions(
    before: Mapping[PodUid, Partition], after: Iterable[Partition], reservations: Mapping[PodUid, Reservation]
) -> list[News]:
    """Say whose share failed, or is there after it had failed."""
    found: list[News] = []
    for partition in after:
        known, pod = before.get(partition.pod_uid), reservations.get(partition.pod_uid)
        was = known.state if known is not None and known.generation == partition.generation else None
        if pod is None or partition.state is was:
            continue
        if partition.state is PartitionState.FAILED:
            found.append(News(pod, "Warning", "GpuShareFailed", partition.message))
        elif partition.state is PartitionState.READY and was is PartitionState.FAILED:
            found.append(News(pod, "Normal", "GpuShareReady", f"its share of {', '.join(pod.gpu_uuids)} is there now"))
    return found


def of_struck(
    before: Mapping[PodUid, str], after: Mapping[PodUid, str], reservations: Mapping[PodUid, Reservation]
) -> list[News]:
    """Tell each pod that ends together with others: at most one of them is to blame."""
    return [
        News(reservations[pod], "Warning", "MpsClientsEnd", why)
        for pod, why in after.items()
        if before.get(pod) != why and pod in reservations
    ]


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
