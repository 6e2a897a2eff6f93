"""Builds `GpuNode.status` and the node's events, and writes both."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from typing import Literal

import msgspec
import structlog
from carpool_core.clock import Clock, rfc3339
from carpool_core.kube.api import GPU_NODES, PODS, KubeApi
from carpool_core.kube.errors import Invalid, KubeError, NotFound
from carpool_core.kube.events import EventRecorder
from carpool_core.resources.meta import Condition
from carpool_core.resources.node import (
    MAX_STRUCK,
    Device,
    GpuNode,
    GpuNodeStatus,
    NodeSummary,
    Partition,
    Reservation,
    Struck,
    Tenant,
)
from carpool_core.values import DeviceHealth, GpuUuid, NodeName, PartitionState, PodUid
from msgspec.structs import replace

from carpool_deviceplugin.device_state import FAILED, PREPARING, READY
from carpool_deviceplugin.gpu import DeviceError, Devices
from carpool_deviceplugin.metering import damp_changes
from carpool_deviceplugin.preflight import Outcome, Verdict
from carpool_deviceplugin.timeouts import Intervals, Poll, wait_for_event

_MAX_MESSAGE, _MAX_CONDITION_MESSAGE, _MAX_COLUMN, _MAX_UID = 4096, 32_768, 512, 253
_MAX_TENANTS = 1024
_MAX_MEASURE = 1e12
"""Upper bound of every measurement, in any unit."""
_MAX_QUEUED_EVENTS = 256
"""More events are dropped, because the status contains the same information."""


def partition_of(reservation: Reservation, of_gpus: Mapping[GpuUuid, Mapping[PodUid, Partition]]) -> Partition:
    """Combine the states of a reservation's GPUs: ready if all are ready, failed if one failed.

    `of_gpus` has the partitions of each GPU of the node, by pod.
    """

    def partition(state: PartitionState, messages: Iterable[str]) -> Partition:
        return Partition(
            pod_uid=reservation.pod_uid,
            generation=reservation.generation,
            state=state,
            message="; ".join(dict.fromkeys(filter(None, messages)))[:_MAX_MESSAGE],
        )

    absent = [uuid for uuid in reservation.gpu_uuids if uuid not in of_gpus]
    if absent:
        expected = ", ".join(of_gpus) or "none"
        return partition(FAILED, [f"expected a GPU out of {expected}, found {', '.join(absent)}"])
    found = [of_gpus[uuid].get(reservation.pod_uid) for uuid in reservation.gpu_uuids]
    current = [o for o in found if o is not None and o.generation == reservation.generation]
    if failed := [o.message for o in current if o.state is FAILED]:
        return partition(FAILED, failed)
    is_ready = len(current) == len(found) and all(o.state is READY for o in current)
    return partition(READY if is_ready else PREPARING, (o.message for o in current))


def node_conditions(
    devices: Sequence[Device],
    unreadable: Sequence[str],
    mps_problem: str,
    before: Iterable[Condition],
    now: datetime,
    preflight: Sequence[Outcome] = (),
) -> list[Condition]:
    """Return the conditions Ready (a GPU is healthy), MpsAvailable (the node offers mode MPS) and Preflight.

    Preflight is False if a row of the preflight failed or names something missing; its message has all rows with their
    state, and of those that passed or were skipped the names.
    `unreadable` has the reasons of further GPUs that could not be read at the start of the agent. `mps_problem` is why
    the node offers no mode MPS; empty if it does. A condition's time is that of the last change of its status.
    """
    earlier = {c.type: c for c in before}

    def condition(kind: str, is_true: bool, reason: str, message: str) -> Condition:
        status: Literal["True", "False"] = "True" if is_true else "False"
        old = earlier.get(kind)
        since = old.last_transition_time if old and old.status == status else rfc3339(now)
        message = message[:_MAX_CONDITION_MESSAGE]
        return Condition(type=kind, status=status, reason=reason, message=message, last_transition_time=since)

    problems = [d.health_message for d in devices if d.health is DeviceHealth.UNHEALTHY] + [*unreadable]
    count = len(devices) + len(unreadable)
    is_ready = len(problems) < count
    reason = "GpusHealthy" if not problems else "SomeGpusUnhealthy" if is_ready else "NoHealthyGpu"
    message = f"{count - len(problems)} of {count} GPUs are healthy" + (": " if problems else "") + "; ".join(problems)
    found = [
        condition("Ready", is_ready, reason, message),
        condition("MpsAvailable", not mps_problem, "RequirementMissing" if mps_problem else "Available", mps_problem),
    ]
    if preflight:
        fine = (Verdict.PASSED, Verdict.SKIPPED)
        is_met = all(row.verdict in (*fine, Verdict.UNKNOWN) for row in preflight)
        rows = [f"{row.verdict} {row.name}: {row}" for row in preflight if row.verdict not in fine]
        others = {v: [row.name for row in preflight if row.verdict is v] for v in fine}
        rows += [f"{verdict}: {', '.join(names)}" for verdict, names in others.items() if names]
        reason = "RequirementsMet" if is_met else "RequirementMissing"
        found.append(condition("Preflight", is_met, reason, ". ".join(rows)))
    return found


async def report_unusable(node: NodeName, api: KubeApi, now: datetime, problem: str, rows: Sequence[Outcome]) -> None:
    """Write into a GpuNode why the agent cannot use the driver. Its GPUs and reservations stay as they were."""
    known = await api.get(GPU_NODES, node, GpuNode)
    ready, *others = node_conditions([], [problem], problem, known.status.conditions, now, rows)
    ready = msgspec.structs.replace(ready, reason="DriverUnusable", message=problem[:_MAX_CONDITION_MESSAGE])
    status = {"conditions": msgspec.to_builtins([ready, *others])}
    await api.patch(GPU_NODES, node, {"status": status}, subresource="status", wants_object=False)


def struck_of(ended: Iterable[Mapping[PodUid, str]]) -> list[Struck]:
    """Return the pods that MPS faults have ended, for all GPUs."""
    reasons = {pod: why for of_gpu in ended for pod, why in of_gpu.items()}
    return [Struck(pod_uid=pod, message=why[:_MAX_MESSAGE]) for pod, why in sorted(reasons.items())][:MAX_STRUCK]


def summarise(devices: Sequence[Device], partitions: Iterable[Partition]) -> NodeSummary:
    """Return the columns of `kubectl get gpn`."""
    products = Counter(d.product for d in devices)
    sizes = dict.fromkeys(f"{d.memory_mib / 1024:.0f} GiB" for d in devices)
    return NodeSummary(
        gpus=", ".join(f"{count}x {product}" for product, count in products.items())[:_MAX_COLUMN],
        healthy=sum(d.health is DeviceHealth.HEALTHY for d in devices),
        tenants=sum(p.state is READY for p in partitions),
        memory=", ".join(sizes),
    )


def presentable(tenants: Iterable[Tenant], reserved: Set[PodUid]) -> tuple[list[Tenant], list[str]]:
    """Return the tenants with valid values, and a message for each other one, which must not block the whole status.

    Processes on simulated GPUs write their own measurements. Pods with a reservation have priority over the limit on
    the number of tenants.
    """
    valid: list[Tenant] = []
    removed: list[str] = []
    for tenant in sorted(tenants, key=lambda t: t.pod_uid not in reserved):
        if why := "too many tenants" if len(valid) >= _MAX_TENANTS else _invalid(tenant):
            removed.append(f"{tenant.pod_uid[:64]!a} on {tenant.gpu_uuid}: {why}")
        else:
            valid.append(tenant)
    return sorted(valid, key=lambda t: (t.gpu_uuid, t.pod_uid)), removed


def _invalid(tenant: Tenant) -> str:
    measures = (
        *(tenant.gpu_util_percent, tenant.sm_active_ratio, tenant.power_w, tenant.steps, tenant.step_time_seconds),
        *(tenant.step_time_deviation_seconds, tenant.solo_step_time_seconds, tenant.samples_per_second),
        *(tenant.data_wait_ratio, tenant.checkpoint_ratio, tenant.copy_ratio),
    )
    if not all(m is None or 0 <= m <= _MAX_MEASURE for m in measures):
        return f"expected measures from 0 to {_MAX_MEASURE:g}, found {measures}"
    if max(tenant.memory_mib, tenant.peak_memory_mib) > _MAX_MEASURE or len(tenant.pod_uid) > _MAX_UID:
        return f"expected a UID and at most {_MAX_MEASURE:g} MiB, found {tenant.peak_memory_mib} MiB"
    try:
        msgspec.json.decode(msgspec.json.encode(tenant), type=Tenant)
    except (msgspec.ValidationError, UnicodeEncodeError) as e:
        return str(e)
    return ""


def above_limit(tenants: Iterable[Tenant], reservations: Iterable[Reservation]) -> dict[tuple[PodUid, GpuUuid], str]:
    """Return a message for each tenant above its memory limit.

    MPS applies the limit to each process, but the ledger counts it once for the pod. So a pod of several processes can
    use memory that is reserved for others.
    """
    limits = {r.pod_uid: (r.memory_limit_mib, f"{r.pod_namespace}/{r.pod_name}") for r in reservations}
    found: dict[tuple[PodUid, GpuUuid], str] = {}
    for tenant in tenants:
        limit, name = limits.get(tenant.pod_uid, (None, ""))
        if limit is not None and tenant.memory_mib > limit:
            found[tenant.pod_uid, tenant.gpu_uuid] = (
                f"expected all processes of {name} to take at most {limit:,} MiB together, found {tenant.memory_mib:,} "
                "MiB; run fewer processes in the pod, or raise spec.memory.limit"
            )
    return found


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """An event about a pod or the GpuNode."""

    pod: Reservation | None
    """Reservation of the pod; None for an event about the GpuNode."""
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def device_events(before: Mapping[GpuUuid, Device], after: Iterable[Device]) -> list[NodeEvent]:
    """Return an event for each GPU whose health changed; a changed reason alone is not an event."""
    found: list[NodeEvent] = []
    for device in after:
        known = before.get(device.uuid)
        if device.health is (known.health if known is not None else DeviceHealth.HEALTHY):
            continue
        name = f"GPU {device.index} ({device.uuid})"
        if device.health is DeviceHealth.UNHEALTHY:
            found.append(
                NodeEvent(None, "Warning", "GpuUnhealthy", f"{name} gets no new work: {device.health_message}")
            )
        else:
            found.append(NodeEvent(None, "Normal", "GpuHealthy", f"{name} gets work again"))
    return found


def partition_events(
    before: Mapping[PodUid, Partition], after: Iterable[Partition], reservations: Mapping[PodUid, Reservation]
) -> list[NodeEvent]:
    """Return an event for each partition that failed, or became ready after a failure."""
    found: list[NodeEvent] = []
    for partition in after:
        known, pod = before.get(partition.pod_uid), reservations.get(partition.pod_uid)
        earlier = known.state if known is not None and known.generation == partition.generation else None
        if pod is None or partition.state is earlier:
            continue
        if partition.state is FAILED:
            found.append(NodeEvent(pod, "Warning", "GpuShareFailed", partition.message))
        elif partition.state is READY and earlier is FAILED:
            found.append(NodeEvent(pod, "Normal", "GpuShareReady", f"its share of {', '.join(pod.gpu_uuids)} is ready"))
    return found


def struck_events(
    before: Mapping[PodUid, str], after: Mapping[PodUid, str], reservations: Mapping[PodUid, Reservation]
) -> list[NodeEvent]:
    """Return an event for each pod that a fault of its MPS daemon ends."""
    return [
        NodeEvent(reservations[pod], "Warning", "MpsClientsEnd", why)
        for pod, why in after.items()
        if before.get(pod) != why and pod in reservations
    ]


class EventWriter:
    """Writes events of a GpuNode through a bounded queue."""

    def __init__(self, node: NodeName, api: KubeApi, clock: Clock) -> None:
        self._node, self._events = node, EventRecorder(api, clock, "carpool-agent")
        self._queue: asyncio.Queue[tuple[NodeEvent, str]] = asyncio.Queue(_MAX_QUEUED_EVENTS)
        self._log = structlog.get_logger().bind(node=node)

    def enqueue(self, events: Iterable[NodeEvent], node_uid: str) -> None:
        """Queue events for writing; `node_uid` is the UID of the GpuNode."""
        for event in events:
            if self._queue.full():
                self._log.warning("event dropped", reason=event.reason, message=event.message)
            else:
                self._queue.put_nowait((event, node_uid))

    async def run(self) -> None:
        """Write queued events until cancelled."""
        while True:
            event, node_uid = await self._queue.get()
            pod = event.pod
            await self._events.record(
                kind=PODS if pod else GPU_NODES,
                namespace=pod.pod_namespace if pod else "",
                name=pod.pod_name if pod else self._node,
                uid=pod.pod_uid if pod else node_uid,
                type=event.type,
                reason=event.reason,
                message=event.message,
            )


class Reporter:
    """The only writer of one GpuNode's status.

    `tenants` returns the measurements; they are asked for only when they are compared with the written status.
    `on_devices` is called with the GPUs after each reading of their health. `on_missing` creates the GpuNode; it is
    called if there is none.
    """

    def __init__(
        self,
        node: NodeName,
        api: KubeApi,
        clock: Clock,
        devices: Devices,
        intervals: Intervals,
        *,
        tenants: Callable[[], Iterable[Tenant]],
        on_devices: Callable[[Sequence[Device]], None],
        on_missing: Callable[[], Awaitable[None]],
    ) -> None:
        self._node, self._api, self._clock, self._gpus, self._intervals = node, api, clock, devices, intervals
        self._tenants, self._on_devices, self._on_missing = tenants, on_devices, on_missing
        self._awake = asyncio.Event()
        self._poll = Poll(intervals.step_deadline_s)
        self.devices: list[Device] = []
        """The GPUs as last read; one that never answered is missing."""
        self.preflight: Sequence[Outcome] = ()
        self.has_reported = False
        """Whether the API server has this agent's status."""
        self._written: GpuNodeStatus | None = None
        """Status as last written or watched; None if there is no GpuNode."""
        self._written_at = self._compared_at = float("-inf")
        self._partitions: Sequence[Partition] = ()
        self._struck: Sequence[Struck] = ()
        self._is_stale = True
        """Whether the GPUs must be read before the next write; new measurements alone do not require it."""
        self._failures = 0
        self._version = version("carpool")
        self._log = structlog.get_logger().bind(node=node)
        self.writes = 0
        """Number of status writes."""

    def appeared(self, status: GpuNodeStatus) -> None:
        """Handle an added GpuNode with this status."""
        self._written, self._written_at = status, float("-inf")
        self.look_again()

    def vanished(self) -> None:
        """Handle the deletion of the GpuNode."""
        self._written = None
        self._awake.set()

    def report(self, partitions: Sequence[Partition], struck: Sequence[Struck] = ()) -> None:
        """Set the desired status, after a change or a measurement."""
        if struck != self._struck:
            self._struck = struck
            self._awake.set()
        if partitions != self._partitions:
            self._partitions = partitions
            self.look_again()  # the mode of a GPU may have changed
        if self._clock.monotonic() - self._compared_at >= self._intervals.measures_s:
            self._awake.set()

    def see(self, found: Mapping[GpuUuid, Device | DeviceError]) -> None:
        """Set what the GPUs answered; one without an answer is unhealthy."""
        self._see(found)
        self._awake.set()

    def _see(self, found: Mapping[GpuUuid, Device | DeviceError]) -> None:
        known = {d.uuid: d for d in (*(self._written.devices if self._written else ()), *self.devices)}
        devices: list[Device] = []
        for uuid, answer in found.items():
            if not isinstance(answer, DeviceError):
                devices.append(answer)
            elif uuid in known:
                devices.append(replace(known[uuid], health=DeviceHealth.UNHEALTHY, health_message=str(answer)))
        self.devices = [replace(d, health_message=d.health_message[:_MAX_MESSAGE]) for d in devices]
        self._on_devices(self.devices)

    def look_again(self) -> None:
        """Read the GPUs again, because their health may have changed."""
        self._is_stale = True
        self._awake.set()

    async def run(self) -> None:
        """Keep the status current until cancelled."""
        while True:
            self._awake.clear()
            try:
                wait_s = await self.once()
                self._failures = 0
            except KubeError as e:
                if isinstance(e, NotFound):
                    self._written = None
                wait_s = self._intervals.retry_s * min(32.0, 2.0**self._failures)
                self._failures += 1
                self._log.warning("status not written", error=str(e), retry_in_s=wait_s)
                await self._intervals.sleep(wait_s)
                continue
            await wait_for_event(self._awake, wait_s, self._intervals.sleep)

    async def once(self) -> float:
        """Write the status if it is due; return the seconds until the next check."""
        if self._written is None:
            await self._on_missing()
            return self._intervals.resync_s  # the watch wakes the reporter
        status = await self._desired(self._written)
        if self._written is None:  # deleted while the GPUs were read
            return 0.0
        if status == self._written:
            self.has_reported = True
            return self._intervals.resync_s
        due_s = self._written_at + self._intervals.measures_s - self._clock.monotonic()
        has_new_measures_only = replace(status, tenants=[]) == replace(self._written, tenants=[])
        if has_new_measures_only and due_s > 0:
            return max(0.01, due_s)
        await self._write(status)
        self.has_reported = True
        return self._intervals.resync_s

    async def _desired(self, written: GpuNodeStatus) -> GpuNodeStatus:
        """Return the desired status."""
        if self._is_stale:
            self._is_stale = False
            self._see(await self._poll.ask(self._gpus.describe, self._gpus.uuids))
        devices = self.devices
        self._compared_at = self._clock.monotonic()
        return replace(
            written,
            agent_version=self._version,
            simulated=self._gpus.simulated,
            devices=devices,
            partitions=list(self._partitions),
            tenants=damp_changes(written.tenants, self._tenants()),
            struck=list(self._struck),
            conditions=node_conditions(
                devices,
                self._gpus.unreadable,
                self._gpus.mps_problem,
                written.conditions,
                self._clock.now(),
                self.preflight,
            ),
            summary=summarise(devices, self._partitions),
        )

    async def _write(self, status: GpuNodeStatus) -> None:
        # A merge patch replaces only what it contains, and msgspec omits defaults.
        body: dict[str, object] = {"simulated": False}
        body |= {name: [] for name in ("devices", "partitions", "tenants", "struck", "conditions")}
        body |= msgspec.to_builtins(status)
        try:
            msgspec.convert(body, GpuNodeStatus)
        except msgspec.ValidationError as error:  # the API server does not validate every field
            raise Invalid(f"expected a valid status, found: {error}") from error
        await self._api.patch(GPU_NODES, self._node, {"status": body}, subresource="status", wants_object=False)
        if self._written is not None:  # otherwise it was deleted meanwhile
            self._written = status
        self._written_at = self._clock.monotonic()
        self.writes += 1
