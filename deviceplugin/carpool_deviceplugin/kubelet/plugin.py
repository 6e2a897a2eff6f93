"""The kubelet's device plugin: anonymous slots at admission, the pod's own reservation before its container starts."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from carpool_core.clock import Clock
from carpool_core.keys import CDI_KIND, RESOURCE_GPU
from carpool_core.kube.pods import Pod, container_uid
from carpool_core.resources.node import Partition, Reservation
from carpool_core.values import GpuUuid, PodUid, SharingMode

from carpool_deviceplugin.cdi import slots as cdi
from carpool_deviceplugin.devices.gpu import Access, DeviceError
from carpool_deviceplugin.devices.patience import Sleep
from carpool_deviceplugin.kubelet.prestart import (
    HeldByPod,
    LaterError,
    Owner,
    claimant,
    earlier,
    owner_of,
    promise,
    same_user,
)
from carpool_deviceplugin.kubelet.protos import deviceplugin_pb2 as dp
from carpool_deviceplugin.kubelet.wire import KUBELET_SOCKET, KubeletError, RefusedError, Server, register

ENDPOINT = "carpool.sock"
_LOOK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the plugin asks of the rest of the agent."""

    pod: Callable[[str], Pod | None]
    """By `namespace/name`, as the API server knows it."""
    reservations: Callable[[], Iterable[Reservation]]
    partitions: Callable[[], Iterable[Partition]]
    access: Callable[[GpuUuid, PodUid], Access]
    held: Callable[[], Awaitable[Sequence[HeldByPod]]]
    """PodResources: who holds which slots."""


def slots(gpus: int, slots_per_gpu: int, healthy: int) -> list[tuple[str, bool]]:
    """Name the slots and say which are healthy: as large a share of them as of the GPUs, the first ones.

    A slot stands for no GPU in particular: a sick GPU lowers how many pods may come, and disturbs none that is there.
    """
    return [(f"slot-{i}", i < healthy * slots_per_gpu) for i in range(gpus * slots_per_gpu)]


class Plugin:
    """Answers the kubelet.

    Args:
        knowledge: What the agent knows.
        cdi_dir: Where CDI specifications are read by the container runtime.
        also_read: Where it reads some, too; none is written there.
        gpus: How many GPUs the node has.
        slots_per_gpu: How many pods may share a GPU at most.
        clock: For patience.
        patience_s: How long PreStartContainer waits for word that may be on its way; the kubelet gives it 30 s.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        cdi_dir: Path,
        *,
        also_read: Sequence[Path] = (),
        gpus: int,
        slots_per_gpu: int,
        clock: Clock,
        patience_s: float = 5.0,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._patience_s, self._sleep = patience_s, sleep
        self._knowledge, self._cdi_dir, self._clock = knowledge, cdi_dir, clock
        self._also_read = also_read
        self._gpus, self._slots_per_gpu = gpus, slots_per_gpu
        self._healthy = gpus
        self._changes: set[asyncio.Event] = set()
        self._log = structlog.get_logger()

    def set_healthy(self, healthy: int) -> None:
        """Say how many GPUs are healthy."""
        if healthy != self._healthy:
            self._healthy = healthy
            for change in self._changes:
                change.set()

    def options(self) -> dp.DevicePluginOptions:
        """PreStartContainer must be called."""
        return dp.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=False)

    async def devices(self) -> AsyncIterator[Sequence[dp.Device]]:
        """Yield the slots, and again whenever the health of a GPU has changed."""
        change = asyncio.Event()
        self._changes.add(change)
        try:
            while True:
                change.clear()
                named = slots(self._gpus, self._slots_per_gpu, self._healthy)
                yield [dp.Device(ID=slot, health="Healthy" if fine else "Unhealthy") for slot, fine in named]
                await change.wait()
        finally:
            self._changes.discard(change)

    def allocate(self, slots: Sequence[str]) -> dp.ContainerAllocateResponse:
        """Name the slots' CDI devices. The kubelet admits pods one after the other through here: never think."""
        return dp.ContainerAllocateResponse(cdi_devices=[dp.CDIDevice(name=cdi.device_name(slot)) for slot in slots])

    async def pre_start(self, slots: Sequence[str]) -> None:
        """Write what the slots bring, out of the reservation of the pod that holds them; raises RefusedError."""
        until = self._clock.monotonic() + self._patience_s
        while True:
            try:
                owner, reservation, access = await self._find(slots)
                break
            except LaterError as e:
                if self._clock.monotonic() >= until:
                    self._log.warning("container refused", slots=list(slots), reason=str(e))
                    raise
            except RefusedError as e:
                self._log.warning("container refused", slots=list(slots), reason=str(e))
                raise
            await self._sleep(_LOOK_AGAIN_S)
        self._write(owner, reservation, access)

    async def _find(self, slots: Sequence[str]) -> tuple[Owner, Reservation, dict[GpuUuid, Access]]:
        know = self._knowledge
        try:
            owner = owner_of(slots, await know.held())
        except KubeletError as e:
            raise LaterError(f"expected the kubelet's PodResources to say who holds {', '.join(slots)}: {e}") from e
        pod = claimant(owner, know.pod(owner.key))
        reservation = promise(owner, pod, know.reservations(), know.partitions())
        try:
            access = {uuid: know.access(uuid, reservation.pod_uid) for uuid in reservation.gpu_uuids}
        except DeviceError as e:
            raise RefusedError(f"expected to bring its GPUs into pod {owner.key}: {e}") from e
        if reservation.mode is SharingMode.MPS:
            same_user(owner, container_uid(pod.spec, owner.container), self._served(reservation, access))
        return owner, reservation, access

    def _served(self, reservation: Reservation, access: Mapping[GpuUuid, Access]) -> dict[str, int | None]:
        """Whom the pod's MPS daemon serves, and whom it will."""
        served = {f"the MPS server of GPU {uuid}": one.mps_user for uuid, one in access.items()}
        for other in earlier(reservation, self._knowledge.reservations()):
            pod = self._knowledge.pod(f"{other.pod_namespace}/{other.pod_name}")
            if pod is not None and pod.metadata.uid == other.pod_uid and not pod.is_finished:
                served[f"pod {other.pod_namespace}/{other.pod_name}"] = container_uid(pod.spec)
        return served

    def _write(self, owner: Owner, reservation: Reservation, access: Mapping[GpuUuid, Access]) -> None:
        if theirs := [path for one in (self._cdi_dir, *self._also_read) for path in cdi.claimed_by_others(one)]:
            raise RefusedError(
                f"expected Carpool alone to describe devices of kind {CDI_KIND}, found {', '.join(map(str, theirs))}; "
                "remove it: the container runtime refuses devices that two files describe"
            )
        try:
            cdi.write(self._cdi_dir, cdi.specifications(reservation, owner.slots, access))
        except OSError as e:
            raise RefusedError(f"expected to write the CDI specification of pod {owner.key}: {e}") from e
        self._log.info("container given", pod=owner.key, slots=list(owner.slots), gpus=list(reservation.gpu_uuids))


class Registration:
    """Keeps the plugin served and known to the kubelet, over restarts of either.

    A restarted kubelet deletes every socket in its directory and makes its own anew; both can be seen by looking.

    Args:
        directory: The kubelet's device plugin directory.
        plugin: What is served.
        every_s: How often to look, in seconds.
        sleep: Waits so many seconds.
    """

    def __init__(self, directory: Path, plugin: Plugin, every_s: float = 1.0, sleep: Sleep = asyncio.sleep) -> None:
        self._directory, self._plugin, self._every_s, self._sleep = directory, plugin, every_s, sleep
        self._own, self._kubelet = str(directory / ENDPOINT), str(directory / KUBELET_SOCKET)
        self._server: Server | None = None
        self._known_to: tuple[int, int] | None = None
        self._complaint = ""
        self._log = structlog.get_logger()

    @property
    def is_registered(self) -> bool:
        """Whether the kubelet that runs now knows the plugin."""
        return self._known_to is not None

    async def run(self) -> None:
        """Serve and register, for ever."""
        try:
            while True:
                await self.once()
                await self._sleep(self._every_s)
        finally:
            await self.close()

    async def once(self) -> None:
        """Look at both sockets, and do what is missing."""
        own, kubelet = _identity(self._own), _identity(self._kubelet)
        if kubelet is None or kubelet != self._known_to:
            self._known_to = None
        try:
            if self._server is None or own is None:
                self._known_to = None
                await self._serve()
            if self._known_to is None and kubelet is not None:
                await register(self._directory, ENDPOINT, RESOURCE_GPU, self._plugin.options())
                self._known_to, self._complaint = kubelet, ""
                self._log.info("registered with the kubelet", resource=RESOURCE_GPU)
        except KubeletError as e:
            self._complain(str(e))

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            self._log.warning("not registered with the kubelet", error=complaint)

    async def _serve(self) -> None:
        await self.close()
        server = Server(self._directory / ENDPOINT, self._plugin)
        await server.start()
        self._server = server

    async def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop()


def _identity(path: str) -> tuple[int, int] | None:
    """Tell one socket from another of the same name; None where there is none."""
    try:
        found = os.stat(path)  # each second: a path object would cost more than the looking
    except OSError:
        return None
    return (found.st_ino, found.st_ctime_ns)
