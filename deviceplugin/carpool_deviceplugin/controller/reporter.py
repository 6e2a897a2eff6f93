"""Writes `GpuNode.status`: at once when something changed, rarely otherwise."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version

import msgspec
import structlog
from carpool_core.clock import Clock, rfc3339
from carpool_core.kube.api import GPU_NODES, KubeApi
from carpool_core.kube.errors import Invalid, KubeError, NotFound
from carpool_core.resources.node import Device, GpuNodeStatus, Partition, Struck, Tenant
from carpool_core.values import DeviceHealth, NodeName
from msgspec.structs import replace

from carpool_deviceplugin.controller.meter import worth_writing
from carpool_deviceplugin.controller.status import as_patch, brief, ready_condition, summarise
from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.devices.patience import Rhythm, woken
from carpool_deviceplugin.devices.port import Devices
from carpool_deviceplugin.devices.rounds import Rounds
from carpool_deviceplugin.devices.threads import Threads


class Reporter:
    """The only writer of one GpuNode's status.

    Args:
        node: Name of the GpuNode.
        api: The API server.
        clock: The time.
        devices: The node's GPUs.
        rhythm: Intervals.
        threads: To ask the GPUs in.
        on_devices: Called with the GPUs as they are before each look at what to write.
        on_missing: Creates the GpuNode; awaited where there is none.
    """

    def __init__(
        self,
        node: NodeName,
        api: KubeApi,
        clock: Clock,
        devices: Devices,
        rhythm: Rhythm,
        threads: Threads,
        *,
        on_devices: Callable[[Sequence[Device]], None],
        on_missing: Callable[[], Awaitable[None]],
    ) -> None:
        self._node, self._api, self._clock, self._devices, self._rhythm = node, api, clock, devices, rhythm
        self._on_devices, self._on_missing = on_devices, on_missing
        self._awake = asyncio.Event()
        self._rounds = Rounds(devices.describe, rhythm.step_deadline_s, threads)
        self.devices: list[Device] = []
        """The GPUs as they were when last looked at; one that never answered is missing."""
        self._written: GpuNodeStatus | None = None
        self._written_at = float("-inf")
        self._partitions: Sequence[Partition] = ()
        self._tenants: Sequence[Tenant] = ()
        self._struck: Sequence[Struck] = ()
        self._is_stale = True
        """Whether the GPUs must be looked at before the next word on them: measures alone are no reason to."""
        self._looked_at = self._compared_at = float("-inf")
        self._has_measures = False
        """Whether there are measures that were not compared with the written ones yet."""
        self._failures = 0
        self._version = version("carpool")
        self._log = structlog.get_logger().bind(node=node)
        self.writes = 0
        """Status writes so far."""

    def appeared(self, status: GpuNodeStatus) -> None:
        """The GpuNode is there, and its status says this."""
        self._written, self._written_at = status, float("-inf")
        self.look_again()

    def vanished(self) -> None:
        """There is no GpuNode."""
        self._written = None
        self._awake.set()

    def report(self, partitions: Sequence[Partition], tenants: Sequence[Tenant], struck: Sequence[Struck] = ()) -> None:
        """Set what the status should say."""
        if struck != self._struck:
            self._struck = struck
            self._awake.set()
        if partitions != self._partitions:
            self._partitions = partitions
            self.look_again()  # a GPU's mode has changed with them
        if tenants != self._tenants:
            self._tenants = tenants
            self._has_measures = True
        if self._has_measures and self._clock.monotonic() - self._compared_at >= self._rhythm.measures_s:
            self._awake.set()  # otherwise nothing could be written yet

    def look_again(self) -> None:
        """The GPUs' health may have changed."""
        self._is_stale = True
        self._awake.set()

    async def run(self) -> None:
        """Keep the status true, for ever."""
        while True:
            self._awake.clear()
            wait_s = await self._try()
            if self._failures:
                await self._rhythm.sleep(wait_s)
                continue
            await woken(self._awake, wait_s, self._rhythm.sleep)

    async def _try(self) -> float:
        try:
            wait_s = await self.once()
        except KubeError as e:
            self._failures += 1
            if isinstance(e, NotFound):
                self._written = None
            wait_s = self._rhythm.retry_s * min(32.0, 2.0 ** (self._failures - 1))
            self._log.warning("status not written", error=str(e), retry_in_s=wait_s)
            return wait_s
        self._failures = 0
        return wait_s

    async def once(self) -> float:
        """Write what is worth writing; return the seconds until it is worth looking again."""
        if self._written is None:
            await self._on_missing()
            return self._rhythm.heartbeat_s  # until the watch shows it
        status = await self._present(self._written)
        if self._written is None:  # it vanished meanwhile
            return 0.0
        since = self._clock.monotonic() - self._written_at
        if self._is_due(self._written, status, since):
            return await self._write(status)
        if status.tenants != self._written.tenants:
            return max(0.01, self._rhythm.measures_s - since)
        return max(0.01, self._rhythm.heartbeat_s - since)

    def _is_due(self, written: GpuNodeStatus, status: GpuNodeStatus, since_s: float) -> bool:
        if replace(status, tenants=[]) != replace(written, tenants=[]) or since_s >= self._rhythm.heartbeat_s:
            return True
        return status.tenants != written.tenants and since_s >= self._rhythm.measures_s

    async def _present(self, written: GpuNodeStatus) -> GpuNodeStatus:
        """What the status should be, with the heartbeat of the last write."""
        if self._is_stale or self._clock.monotonic() - self._looked_at >= self._rhythm.heartbeat_s:
            await self._look(written)
        devices = self.devices
        self._has_measures, self._compared_at = False, self._clock.monotonic()
        return replace(
            written,
            agent_version=self._version,
            simulated=self._devices.simulated,
            devices=devices,
            partitions=list(self._partitions),
            tenants=worth_writing(written.tenants, self._tenants),
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
        except msgspec.ValidationError as error:  # the API server takes lists of ours as they are, and readers do not
            raise Invalid(f"expected a status that makes sense, found: {error}") from error
        await self._api.patch(GPU_NODES, self._node, patch, subresource="status", wants_object=False)
        if self._written is not None:  # otherwise it vanished meanwhile
            self._written = status
        self._written_at = self._clock.monotonic()
        self.writes += 1
        return self._rhythm.heartbeat_s
