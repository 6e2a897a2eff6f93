"""The kubelet's device plugin: anonymous slots at admission, the pod's own reservation before its container starts."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc  # type: ignore[import-untyped]
import structlog
from carpool_core.clock import Clock
from carpool_core.keys import CDI_KIND, RESOURCE_GPU
from carpool_core.kube.pods import Pod, container_uid
from carpool_core.resources.node import Partition, Reservation
from carpool_core.values import GpuUuid, PartitionState, PodUid, SharingMode

from carpool_deviceplugin import cdi
from carpool_deviceplugin.gpu import Access, DeviceError
from carpool_deviceplugin.protos import deviceplugin_pb2 as dp
from carpool_deviceplugin.protos import deviceplugin_pb2_grpc, podresources_pb2_grpc
from carpool_deviceplugin.protos import podresources_pb2 as pr
from carpool_deviceplugin.timeouts import Sleep

API_VERSION = "v1beta1"
KUBELET_SOCKET = "kubelet.sock"
_CALL_TIMEOUT_S = 5.0
_OPTIONS = [("grpc.default_authority", "localhost")]
"""Otherwise the socket's path would be the authority, which Go's servers refuse."""


class KubeletError(Exception):
    """The kubelet gave no answer, or refused."""


class RefusedError(Exception):
    """The plugin refuses a call; `str()` is the sentence that `kubectl describe pod` shows."""


class PluginHandler(Protocol):
    """What a device plugin does."""

    def options(self) -> dp.DevicePluginOptions:
        """Say which optional calls the kubelet should make."""
        ...

    def devices(self) -> AsyncIterator[Sequence[dp.Device]]:
        """Yield all devices now, and again after each change, for ever."""
        ...

    def allocate(self, slots: Sequence[str]) -> dp.ContainerAllocateResponse:
        """Answer for one container of a pod that is being admitted."""
        ...

    async def pre_start(self, slots: Sequence[str]) -> None:
        """Prepare a container's devices before it starts; raises RefusedError."""
        ...


class _Servicer:
    """Adapter of a plugin to the generated service; the methods carry the names of the protocol."""

    def __init__(self, handler: PluginHandler) -> None:
        self._handler = handler

    async def GetDevicePluginOptions(self, _: dp.Empty, __: Any) -> dp.DevicePluginOptions:
        return self._handler.options()

    async def ListAndWatch(self, _: dp.Empty, __: Any) -> AsyncIterator[dp.ListAndWatchResponse]:
        async for devices in self._handler.devices():
            yield dp.ListAndWatchResponse(devices=devices)

    async def Allocate(self, request: dp.AllocateRequest, _: Any) -> dp.AllocateResponse:
        answers = [self._handler.allocate(list(one.devices_ids)) for one in request.container_requests]
        return dp.AllocateResponse(container_responses=answers)

    async def PreStartContainer(
        self, request: dp.PreStartContainerRequest, context: Any
    ) -> dp.PreStartContainerResponse:
        try:
            await self._handler.pre_start(list(request.devices_ids))
        except RefusedError as e:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(e))
        return dp.PreStartContainerResponse()


class Server:
    """A plugin's gRPC server on a unix socket."""

    def __init__(self, path: Path, handler: PluginHandler) -> None:
        self.path = path
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        deviceplugin_pb2_grpc.add_DevicePluginServicer_to_server(_Servicer(handler), self._server)

    async def start(self) -> None:
        """Listen; a socket that another server left there is replaced.

        Raises:
            KubeletError: The socket cannot be made.
        """
        if not self.path.parent.is_dir():  # gRPC would complain in words of its own, each time
            raise KubeletError(
                f"{self.path.parent}: expected the kubelet's device plugin directory, found none; mount it, or name it "
                "by CARPOOL_DEVICE_PLUGIN_DIR (CARPOOL_KUBELET=false where there is no kubelet)"
            )
        try:
            self.path.unlink(missing_ok=True)
            self._server.add_insecure_port(f"unix:{self.path}")
        except (OSError, RuntimeError) as e:
            raise KubeletError(f"{self.path}: expected to listen there, found {e}; is the directory mounted?") from e
        await self._server.start()

    async def stop(self) -> None:
        """End all calls and stop listening."""
        await self._server.stop(grace=None)


@contextlib.asynccontextmanager
async def _channel(path: Path) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"unix:{path}", options=_OPTIONS) as channel:
        try:
            yield channel
        except grpc.aio.AioRpcError as e:
            raise KubeletError(f"{path}: expected an answer, found {e.code().name}: {e.details()}") from e


async def register(directory: Path, endpoint: str, resource: str, options: dp.DevicePluginOptions) -> None:
    """Make a plugin known to the kubelet, which then calls back; raises KubeletError."""
    request = dp.RegisterRequest(version=API_VERSION, endpoint=endpoint, resource_name=resource, options=options)
    async with _channel(directory / KUBELET_SOCKET) as channel:
        await deviceplugin_pb2_grpc.RegistrationStub(channel).Register(request, timeout=_CALL_TIMEOUT_S)


class PodResources:
    """The kubelet's PodResources API, over one connection for as long as it holds.

    Args:
        socket: Of the API.
        within_s: How long an answer may take, in seconds.
    """

    def __init__(self, socket: Path, within_s: float = _CALL_TIMEOUT_S) -> None:
        self._socket, self._within_s = socket, within_s
        self._channel: Any = None

    async def list(self) -> Sequence[pr.PodResources]:
        """Ask which pod holds which devices; raises KubeletError."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        lister = podresources_pb2_grpc.PodResourcesListerStub(self._channel)
        try:
            answer: pr.ListPodResourcesResponse = await lister.List(
                pr.ListPodResourcesRequest(), timeout=self._within_s
            )
        except grpc.aio.AioRpcError as e:
            await self.close()  # a restarted kubelet makes its socket anew: the next question goes to that one
            raise KubeletError(f"{self._socket}: expected an answer, found {e.code().name}: {e.details()}") from e
        return answer.pod_resources

    async def close(self) -> None:
        """End the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class LaterError(RefusedError):
    """Refused for now: word of the pod or of its reservation may be on its way."""


class _Devices(Protocol):
    @property
    def resource_name(self) -> str: ...
    @property
    def device_ids(self) -> Iterable[str]: ...


class _Container(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def devices(self) -> Iterable[_Devices]: ...


class HeldByPod(Protocol):
    """One pod in PodResources' answer."""

    @property
    def name(self) -> str:
        """Name of the pod."""
        ...

    @property
    def namespace(self) -> str:
        """Its namespace."""
        ...

    @property
    def containers(self) -> Iterable[_Container]:
        """Its containers and their devices."""
        ...


@dataclass(frozen=True, slots=True)
class Owner:
    """The container that holds some slots."""

    namespace: str
    pod: str
    container: str
    slots: tuple[str, ...]
    """All slots of the container, in order."""

    @property
    def key(self) -> str:
        """`namespace/name` of the pod."""
        return f"{self.namespace}/{self.pod}"


def slot_number(slot: str) -> int:
    """Number of `slot-N`; raises RefusedError for anything else."""
    prefix, _, number = slot.rpartition("-")
    if prefix != "slot" or not number.isdecimal():
        raise RefusedError(f"expected a slot such as slot-3, found {slot!r}; this plugin never offered it")
    return int(number)


def owner_of(slots: Iterable[str], held: Iterable[HeldByPod]) -> Owner:
    """Find the container that holds the slots, according to PodResources.

    Raises:
        LaterError: Nobody holds them (yet).
        RefusedError: They belong to several containers.
    """
    asked = sorted(set(slots), key=slot_number)
    owners: dict[tuple[str, str, str], list[str]] = {}
    for pod in held:
        for container in pod.containers:
            mine = [i for d in container.devices if d.resource_name == RESOURCE_GPU for i in d.device_ids]
            if set(mine) & set(asked):
                owners[pod.namespace, pod.name, container.name] = mine
    if not owners:
        raise LaterError(
            f"expected a container that holds {', '.join(asked)}, found none in the kubelet's PodResources"
        )
    if len(owners) > 1:
        names = ", ".join("/".join(owner) for owner in owners)
        raise RefusedError(f"expected one container to hold {', '.join(asked)}, found {names}; delete one of the pods")
    ((namespace, pod_name, container_name), all_slots) = owners.popitem()
    if set(all_slots) != set(asked):
        raise RefusedError(
            f"expected {namespace}/{pod_name} to start with {', '.join(sorted(all_slots, key=slot_number))}, which it "
            f"holds, found {', '.join(asked)}; delete the pod"
        )
    return Owner(namespace, pod_name, container_name, tuple(asked))


def holders(held: Iterable[HeldByPod]) -> dict[str, str]:
    """Return the container that holds slots, by `namespace/name` of its pod."""
    return {
        f"{pod.namespace}/{pod.name}": container.name
        for pod in held
        for container in pod.containers
        if any(d.resource_name == RESOURCE_GPU for d in container.devices)
    }


def claimant(owner: Owner, pod: Pod | None) -> Pod:
    """Return the pod that holds the slots, as the API server knows it.

    Raises:
        LaterError: It is not there yet, or one of the same name is just leaving.
    """
    if pod is None:
        raise LaterError(f"expected pod {owner.key} on this node, found none in the API server's answers so far")
    if pod.metadata.deletion_timestamp or pod.is_finished:
        raise LaterError(f"expected pod {owner.key} to be alive, found it finished or being deleted")
    return pod


def promise(
    owner: Owner, pod: Pod, reservations: Iterable[Reservation], partitions: Iterable[Partition]
) -> Reservation:
    """Return the pod's reservation, which must be ready and fit what the container holds.

    Raises:
        LaterError: There is none, or it is not ready yet.
        RefusedError: It failed, or has another number of GPUs.
    """
    uid = pod.metadata.uid
    reservation = next((r for r in reservations if r.pod_uid == uid), None)
    if reservation is None:
        raise LaterError(
            f"expected a reservation for pod {owner.key} ({uid}) on this node, found none; GPUs are given out by "
            f"carpool-scheduler only: submit a GpuTrainingJob, and leave spec.nodeName and schedulerName to it"
        )
    partition = next((p for p in partitions if p.pod_uid == uid and p.generation == reservation.generation), None)
    if partition is not None and partition.state is PartitionState.FAILED:
        raise RefusedError(f"expected the GPUs of pod {owner.key} to be ready, found: {partition.message}")
    if partition is None or partition.state is not PartitionState.READY:
        why = f" ({partition.message})" if partition and partition.message else ""
        raise LaterError(f"expected the GPUs of pod {owner.key} to be ready, found them being prepared{why}")
    _same_number(owner, reservation.gpu_uuids)
    return reservation


def earlier(reservation: Reservation, reservations: Iterable[Reservation]) -> list[Reservation]:
    """Return who was promised a place on the same GPUs before."""
    return [
        r
        for r in reservations
        if set(r.gpu_uuids) & set(reservation.gpu_uuids)
        and (r.reserved_at, r.pod_uid) < (reservation.reserved_at, reservation.pod_uid)
    ]


def same_user(owner: Owner, user: int | None, served: Mapping[str, int | None]) -> None:
    """See that an MPS daemon is asked by one user only: it runs a server for one at a time, and others wait in CUDA.

    Args:
        owner: Whose container is about to start.
        user: That it runs as; None where nobody can tell.
        served: User of each pod or server that it would stand beside, by name.

    Raises:
        LaterError: Another user's clients must end first.
    """
    for name, other in served.items():
        if user is not None and other is not None and user != other:
            raise LaterError(
                f"expected container {owner.container} of pod {owner.key} to run as user {other}, as {name} does, "
                f"found {user}; an MPS daemon serves one user at a time: give both the same securityContext.runAsUser, "
                "or set sharing.mode to TimeSlicing; it starts by itself when the other has ended"
            )


def _same_number(owner: Owner, gpus: Sequence[str]) -> None:
    if len(gpus) != len(owner.slots):
        raise RefusedError(
            f"expected container {owner.container} of pod {owner.key} to hold {len(gpus)} of {RESOURCE_GPU}, as "
            f"reserved, found {len(owner.slots)}; let one container ask for all GPUs of the pod"
        )


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
        reservation_wait_s: float = 5.0,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._patience_s, self._sleep = reservation_wait_s, sleep
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
