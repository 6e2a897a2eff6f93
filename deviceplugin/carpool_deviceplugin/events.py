"""Kubernetes events about GPU health, partitions and MPS faults."""

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
class NodeEvent:
    """An event about a pod or the GpuNode."""

    pod: Reservation | None
    """Reservation of the pod; None for an event about the GpuNode."""
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def of_devices(before: Mapping[GpuUuid, Device], after: Iterable[Device]) -> list[NodeEvent]:
    """Return an event for each GPU whose health changed; a changed reason alone is not an event."""
    found: list[NodeEvent] = []
    for device in after:
        known = before.get(device.uuid)
        was = known.health if known is not None else DeviceHealth.HEALTHY
        if device.health is was:
            continue
        where = f"GPU {device.index} ({device.uuid})"
        if device.health is DeviceHealth.UNHEALTHY:
            found.append(
                NodeEvent(None, "Warning", "GpuUnhealthy", f"{where} gets no new work: {device.health_message}")
            )
        else:
            found.append(NodeEvent(None, "Normal", "GpuHealthy", f"{where} gets work again"))
    return found


def of_partitions(
    before: Mapping[PodUid, Partition], after: Iterable[Partition], reservations: Mapping[PodUid, Reservation]
) -> list[NodeEvent]:
    """Return an event for each partition that failed, or became ready after a failure."""
    found: list[NodeEvent] = []
    for partition in after:
        known, pod = before.get(partition.pod_uid), reservations.get(partition.pod_uid)
        was = known.state if known is not None and known.generation == partition.generation else None
        if pod is None or partition.state is was:
            continue
        if partition.state is PartitionState.FAILED:
            found.append(NodeEvent(pod, "Warning", "GpuShareFailed", partition.message))
        elif partition.state is PartitionState.READY and was is PartitionState.FAILED:
            found.append(NodeEvent(pod, "Normal", "GpuShareReady", f"its share of {', '.join(pod.gpu_uuids)} is ready"))
    return found


def of_struck(
    before: Mapping[PodUid, str], after: Mapping[PodUid, str], reservations: Mapping[PodUid, Reservation]
) -> list[NodeEvent]:
    """Return an event for each pod that a fault of its MPS daemon ends."""
    return [
        NodeEvent(reservations[pod], "Warning", "MpsClientsEnd", why)
        for pod, why in after.items()
        if before.get(pod) != why and pod in reservations
    ]


_MOST = 256
"""Maximum number of queued events; more are dropped, because the status contains the same information."""


class EventWriter:
    """Writes events through a bounded queue.

    Args:
        node: Name of the GpuNode.
        api: Client of the API server.
        clock: The clock.
    """

    def __init__(self, node: NodeName, api: KubeApi, clock: Clock) -> None:
        self._node, self._events = node, EventRecorder(api, clock, "carpool-agent")
        self._waiting: asyncio.Queue[tuple[NodeEvent, str]] = asyncio.Queue(_MOST)
        self._log = structlog.get_logger().bind(node=node)

    def enqueue(self, events: Iterable[NodeEvent], node_uid: str) -> None:
        """Queue events for writing.

        Args:
            events: The events.
            node_uid: UID of the GpuNode.
        """
        for one in events:
            if self._waiting.full():
                self._log.warning("event dropped", reason=one.reason, message=one.message)
            else:
                self._waiting.put_nowait((one, node_uid))

    async def run(self) -> None:
        """Write queued events until cancelled."""
        while True:
            event, node_uid = await self._waiting.get()
            about = event.pod
            await self._events.record(
                kind=GPU_NODES if about is None else PODS,
                namespace="" if about is None else about.pod_namespace,
                name=self._node if about is None else about.pod_name,
                uid=node_uid if about is None else about.pod_uid,
                type=event.type,
                reason=event.reason,
                message=event.message,
            )
