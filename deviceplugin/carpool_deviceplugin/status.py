"""Builds `GpuNode.status` and writes it."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from datetime import datetime
from importlib.metadata import version
from operator import attrgetter
from typing import Literal

import msgspec
import structlog
from carpool_core.clock import Clock, rfc3339
from carpool_core.kube.api import GPU_NODES, KubeApi
from carpool_core.kube.errors import Invalid, KubeError, NotFound
from carpool_core.resources.meta import Condition
from carpool_core.resources.node import (
    MAX_STRUCK,
    Device,
    GpuNodeStatus,
    NodeSummary,
    Partition,
    Reservation,
    Struck,
    Tenant,
)
from carpool_core.values import DeviceHealth, GpuUuid, NodeName, PartitionState, PodUid
from msgspec.structs import replace

from carpool_deviceplugin.device_state import FAILED, PREPARING, READY, Outcome
from carpool_deviceplugin.gpu import DeviceError, Devices
from carpool_deviceplugin.metering import damp_changes
from carpool_deviceplugin.timeouts import CallThreads, Intervals, Poll, wait_for_event

_LONGEST, _LONGEST_CONDITION, _LONGEST_COLUMN, _LONGEST_UID = 4096, 32_768, 512, 253
_MOST_TENANTS = 1024
_BY_GPU = attrgetter("gpu_uuid", "pod_uid")
_LARGEST = 1e12
"""Upper bound of every measure, in any unit."""


def partition_of(reservation: Reservation, outcomes: Mapping[GpuUuid, Mapping[PodUid, Outcome]]) -> Partition:
    """Combine the states of a reservation's GPUs: ready if all are ready, failed if one failed.

    Args:
        reservation: The reservation.
        outcomes: Outcomes of each GPU of the node, by pod.
    """

    def answer(state: PartitionState, message: str = "") -> Partition:
        return Partition(
            pod_uid=reservation.pod_uid, generation=reservation.generation, state=state, message=message[:_LONGEST]
        )

    absent = [uuid for uuid in reservation.gpu_uuids if uuid not in outcomes]
    if absent:
        return answer(FAILED, f"expected a GPU out of {', '.join(outcomes) or 'none'}, found {', '.join(absent)}")
    found = [outcomes[uuid].get(reservation.pod_uid) for uuid in reservation.gpu_uuids]
    current = [o for o in found if o is not None and o.generation == reservation.generation]
    failed = [o.message for o in current if o.state is FAILED]
    if failed:
        return answer(FAILED, "; ".join(failed))
    if len(current) == len(found) and all(o.state is READY for o in current):
        return answer(READY, "; ".join(dict.fromkeys(o.message for o in current if o.message)))
    return answer(PREPARING, "; ".join(dict.fromkeys(o.message for o in current if o.message)))


def ready_condition(devices: Sequence[Device], before: Iterable[Condition], now: datetime) -> Condition:
    """Return the condition Ready: whether a GPU is healthy. Its time is that of the last change."""
    sick = [d for d in devices if d.health is DeviceHealth.UNHEALTHY]
    status: Literal["True", "False"] = "True" if len(sick) < len(devices) else "False"
    reason = "GpusHealthy" if not sick else "SomeGpusUnhealthy" if status == "True" else "NoHealthyGpu"
    message = f"{len(devices) - len(sick)} of {len(devices)} GPUs are healthy"
    if sick:
        message += ": " + "; ".join(d.health_message for d in sick)
    old = next((c for c in before if c.type == "Ready"), None)
    since = old.last_transition_time if old and old.status == status else rfc3339(now)
    return Condition(
        type="Ready",
        status=status,
        reason=reason,
        message=message[:_LONGEST_CONDITION],
        last_transition_time=since,
    )


def brief(device: Device) -> Device:
    """Cut the health message to the API's limit; it may contain text from tenants."""
    return msgspec.structs.replace(device, health_message=device.health_message[:_LONGEST])


def struck_of(ended: Iterable[Mapping[PodUid, str]]) -> list[Struck]:
    """Return the pods that MPS faults have ended, for all GPUs."""
    reasons = {pod: why for of_gpu in ended for pod, why in of_gpu.items()}
    return [Struck(pod_uid=pod, message=why[:_LONGEST]) for pod, why in sorted(reasons.items())][:MAX_STRUCK]


def summarise(devices: Sequence[Device], partitions: Iterable[Partition]) -> NodeSummary:
    """Return the columns of `kubectl get gpn`."""
    products = Counter(d.product for d in devices)
    sizes = dict.fromkeys(f"{d.memory_mib / 1024:.0f} GiB" for d in devices)
    return NodeSummary(
        gpus=", ".join(f"{count}x {product}" for product, count in products.items())[:_LONGEST_COLUMN],
        healthy=sum(d.health is DeviceHealth.HEALTHY for d in devices),
        tenants=sum(p.state is READY for p in partitions),
        memory=", ".join(sizes),
    )


def presentable(tenants: Iterable[Tenant], reserved: Set[PodUid]) -> tuple[list[Tenant], list[str]]:
    """Remove tenants with invalid values, so that one tenant cannot block the status of the others.

    Args:
        tenants: As measured.
        reserved: Pods with a reservation; they have priority over the limit on the number of tenants.

    Returns:
        The valid tenants, and a message for each removed one.
    """
    fine: list[Tenant] = []
    left_out: list[str] = []
    tenants = list(tenants)
    if len(tenants) <= _MOST_TENANTS and not _unpresentable(tenants):  # the usual case
        return sorted(tenants, key=_BY_GPU), []
    for tenant in sorted(tenants, key=lambda t: t.pod_uid not in reserved):
        if why := "too many tenants" if len(fine) >= _MOST_TENANTS else _unpresentable([tenant]):
            left_out.append(f"{tenant.pod_uid[:64]!a} on {tenant.gpu_uuid}: {why}")
        else:
            fine.append(tenant)
    return sorted(fine, key=_BY_GPU), left_out


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


def _unpresentable(tenants: Sequence[Tenant]) -> str:
    for tenant in tenants:
        measures = (tenant.gpu_util_percent, tenant.sm_active_ratio, tenant.power_w, tenant.step_time_seconds)
        if not all(m is None or 0 <= m <= _LARGEST for m in measures):
            return f"expected measures from 0 to {_LARGEST:g}, found {measures}"
        if max(tenant.memory_mib, tenant.peak_memory_mib) > _LARGEST or len(tenant.pod_uid) > _LONGEST_UID:
            return f"expected a UID and at most {_LARGEST:g} MiB, found {tenant.peak_memory_mib} MiB"
    try:
        msgspec.json.decode(msgspec.json.encode(tenants), type=list[Tenant])
    except (msgspec.ValidationError, UnicodeEncodeError) as e:
        return str(e)
    return ""


def as_patch(status: GpuNodeStatus) -> dict[str, object]:
    """Return the merge patch that replaces the status; empty lists are written explicitly."""
    body: dict[str, object] = {"simulated": False}
    body |= {name: [] for name in ("devices", "partitions", "tenants", "struck", "conditions")}
    body |= msgspec.to_builtins(status)
    return {"status": body}


class Reporter:
    """The only writer of one GpuNode's status.

    Args:
        node: Name of the GpuNode.
        api: Client of the API server.
        clock: The clock.
        devices: The node's GPUs.
        intervals: Intervals.
        threads: Threads for calls to the GPUs.
        on_devices: Called with the GPUs after each look at them.
        on_missing: Creates the GpuNode; called if there is none.
    """

    def __init__(
        self,
        node: NodeName,
        api: KubeApi,
        clock: Clock,
        devices: Devices,
        intervals: Intervals,
        threads: CallThreads,
        *,
        on_devices: Callable[[Sequence[Device]], None],
        on_missing: Callable[[], Awaitable[None]],
    ) -> None:
        self._node, self._api, self._clock, self._devices, self._intervals = node, api, clock, devices, intervals
        self._on_devices, self._on_missing = on_devices, on_missing
        self._awake = asyncio.Event()
        self._rounds = Poll(devices.describe, intervals.step_deadline_s, threads)
        self.devices: list[Device] = []
        """The GPUs at the last look; one that never answered is missing."""
        self._written: GpuNodeStatus | None = None
        self._written_at = float("-inf")
        self._partitions: Sequence[Partition] = ()
        self._tenants: Sequence[Tenant] = ()
        self._struck: Sequence[Struck] = ()
        self._is_stale = True
        """Whether the GPUs must be read before the next write; measures alone do not require it."""
        self._looked_at = self._compared_at = float("-inf")
        self._has_measures = False
        """Whether new measures were not compared with the written ones yet."""
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

    def report(self, partitions: Sequence[Partition], tenants: Sequence[Tenant], struck: Sequence[Struck] = ()) -> None:
        """Set the desired status."""
        if struck != self._struck:
            self._struck = struck
            self._awake.set()
        if partitions != self._partitions:
            self._partitions = partitions
            self.look_again()  # a GPU's mode has changed with them
        if tenants != self._tenants:
            self._tenants = tenants
            self._has_measures = True
        if self._has_measures and self._clock.monotonic() - self._compared_at >= self._intervals.measures_s:
            self._awake.set()  # earlier, the write interval has not passed

    def look_again(self) -> None:
        """Read the GPUs again, because their health may have changed."""
        self._is_stale = True
        self._awake.set()

    async def run(self) -> None:
        """Keep the status current until cancelled."""
        while True:
            self._awake.clear()
            wait_s = await self._try()
            if self._failures:
                await self._intervals.sleep(wait_s)
                continue
            await wait_for_event(self._awake, wait_s, self._intervals.sleep)

    async def _try(self) -> float:
        try:
            wait_s = await self.once()
        except KubeError as e:
            self._failures += 1
            if isinstance(e, NotFound):
                self._written = None
            wait_s = self._intervals.retry_s * min(32.0, 2.0 ** (self._failures - 1))
            self._log.warning("status not written", error=str(e), retry_in_s=wait_s)
            return wait_s
        self._failures = 0
        return wait_s

    async def once(self) -> float:
        """Write the status if it is due; return the seconds until the next check."""
        if self._written is None:
            await self._on_missing()
            return self._intervals.heartbeat_s  # the watch wakes the reporter
        status = await self._present(self._written)
        if self._written is None:  # it vanished meanwhile
            return 0.0
        since = self._clock.monotonic() - self._written_at
        if self._is_due(self._written, status, since):
            return await self._write(status)
        if status.tenants != self._written.tenants:
            return max(0.01, self._intervals.measures_s - since)
        return max(0.01, self._intervals.heartbeat_s - since)

    def _is_due(self, written: GpuNodeStatus, status: GpuNodeStatus, since_s: float) -> bool:
        if replace(status, tenants=[]) != replace(written, tenants=[]) or since_s >= self._intervals.heartbeat_s:
            return True
        return status.tenants != written.tenants and since_s >= self._intervals.measures_s

    async def _present(self, written: GpuNodeStatus) -> GpuNodeStatus:
        """Return the desired status, with the heartbeat of the last write."""
        if self._is_stale or self._clock.monotonic() - self._looked_at >= self._intervals.heartbeat_s:
            await self._look(written)
        devices = self.devices
        self._has_measures, self._compared_at = False, self._clock.monotonic()
        return replace(
            written,
            agent_version=self._version,
            simulated=self._devices.simulated,
            devices=devices,
            partitions=list(self._partitions),
            tenants=damp_changes(written.tenants, self._tenants),
            struck=list(self._struck),
            conditions=[ready_condition(devices, written.conditions, self._clock.now())],
            summary=summarise(devices, self._partitions),
        )

    async def _look(self, written: GpuNodeStatus) -> None:
        self._is_stale, self._looked_at = False, self._clock.monotonic()
        known = {d.uuid: d for d in (*written.devices, *self.devices)}
        devices: list[Device] = []
        for uuid, found in (await self._rounds.ask(self._devices.uuids)).items():
            if not isinstance(found, DeviceError):
                devices.append(found)
            elif uuid in known:
                devices.append(replace(known[uuid], health=DeviceHealth.UNHEALTHY, health_message=str(found)))
        self.devices = [brief(device) for device in devices]
        self._on_devices(self.devices)

    async def _write(self, status: GpuNodeStatus) -> float:
        status = replace(status, heartbeat_time=rfc3339(self._clock.now()))
        patch = as_patch(status)
        try:
            msgspec.convert(patch["status"], GpuNodeStatus)
        except msgspec.ValidationError as error:  # the API server does not validate every field
            raise Invalid(f"expected a valid status, found: {error}") from error
        await self._api.patch(GPU_NODES, self._node, patch, subresource="status", wants_object=False)
        if self._written is not None:  # otherwise it vanished meanwhile
            self._written = status
        self._written_at = self._clock.monotonic()
        self.writes += 1
        return self._intervals.heartbeat_s
