"""Device plugin of the kubelet: Allocate assigns anonymous slots, PreStartContainer the pod's reserved GPUs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import structlog
from carpool_core.clock import Clock
from carpool_core.keys import ANNOTATION_PROBE, CDI_KIND, RESOURCE_GPU
from carpool_core.kube.errors import KubeError
from carpool_core.kube.pods import Pod, container_uid
from carpool_core.resources.node import Partition, Reservation
from carpool_core.values import GpuUuid, PartitionState, PodUid, ProbeMode, SharingMode

from carpool_deviceplugin import cdi
from carpool_deviceplugin.gpu import Access, DeviceError
from carpool_deviceplugin.probe import ProbeFiles
from carpool_deviceplugin.protos import deviceplugin_pb2 as dp
from carpool_deviceplugin.protos import deviceplugin_pb2_grpc, podresources_pb2_grpc
from carpool_deviceplugin.protos import podresources_pb2 as pr
from carpool_deviceplugin.timeouts import Sleep

API_VERSION = "v1beta1"
KUBELET_SOCKET = "kubelet.sock"
ENDPOINT = "carpool.sock"
OPTIONS = dp.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=False)
_RETRY_S = 0.25
_CALL_TIMEOUT_S = 5.0
_OPTIONS = [("grpc.default_authority", "localhost")]
"""Go's gRPC servers reject the socket's path, which is the default authority."""


class KubeletError(Exception):
    """The kubelet did not answer, or returned an error."""


class RefusedError(Exception):
    """The plugin refuses a call; `str()` is the sentence that `kubectl describe pod` shows."""


class LaterError(RefusedError):
    """Refused for now: the agent may not have received the pod or its reservation yet."""


def _no_answer(socket: Path, error: grpc.aio.AioRpcError) -> KubeletError:
    return KubeletError(f"{socket}: expected an answer, found {error.code().name}: {error.details()}")


class PodResources:
    """Client of the kubelet's PodResources API, with one lasting connection.

    Args:
        socket: Socket of the API.
        within_s: Timeout of an answer, in seconds.
    """

    def __init__(self, socket: Path, within_s: float = _CALL_TIMEOUT_S) -> None:
        self._socket, self._within_s = socket, within_s
        self._channel: Any = None

    async def list(self) -> Sequence[pr.PodResources]:
        """Return which pod holds which devices; raises KubeletError."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        lister = podresources_pb2_grpc.PodResourcesListerStub(self._channel)
        try:
            answer: pr.ListPodResourcesResponse = await lister.List(
                pr.ListPodResourcesRequest(), timeout=self._within_s
            )
        except grpc.aio.AioRpcError as e:
            await self.close()  # the next call connects to the new socket of a restarted kubelet
            raise _no_answer(self._socket, e) from e
        return answer.pod_resources

    async def close(self) -> None:
        """End the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


@dataclass(frozen=True, slots=True)
class Owner:
    """The container that holds some slots."""

    namespace: str
    pod: str
    container: str
    slots: tuple[str, ...]
    """All slots of the container."""

    @property
    def key(self) -> str:
        """`namespace/name` of the pod."""
        return f"{self.namespace}/{self.pod}"


def slot_number(slot: str) -> int:
    """Return N of `slot-N`; raises RefusedError for another format."""
    prefix, _, number = slot.rpartition("-")
    if prefix != "slot" or not number.isdecimal():
        raise RefusedError(f"expected a slot such as slot-3, found {slot!r}; this plugin never offered it")
    return int(number)


def owners_of(held: Iterable[pr.PodResources]) -> Iterable[Owner]:
    """Yield the containers that hold slots, according to PodResources."""
    for pod in held:
        for container in pod.containers:
            if slots := [i for d in container.devices if d.resource_name == RESOURCE_GPU for i in d.device_ids]:
                yield Owner(pod.namespace, pod.name, container.name, tuple(slots))


def owner_of(slots: Iterable[str], held: Iterable[pr.PodResources]) -> Owner:
    """Return the container that holds the slots, according to PodResources.

    Raises:
        LaterError: No container holds them yet.
        RefusedError: They belong to several containers.
    """
    asked = sorted(set(slots), key=slot_number)
    owners = [one for one in owners_of(held) if not set(asked).isdisjoint(one.slots)]
    if not owners:
        raise LaterError(
            f"expected a container that holds {', '.join(asked)}, found none in the kubelet's PodResources"
        )
    if len(owners) > 1:
        names = ", ".join(f"{owner.key}/{owner.container}" for owner in owners)
        raise RefusedError(f"expected one container to hold {', '.join(asked)}, found {names}; delete one of the pods")
    (owner,) = owners
    if set(owner.slots) != set(asked):
        raise RefusedError(
            f"expected {owner.key} to start with {', '.join(sorted(owner.slots, key=slot_number))}, which it "
            f"holds, found {', '.join(asked)}; delete the pod"
        )
    return replace(owner, slots=tuple(asked))


def holders(held: Iterable[pr.PodResources]) -> dict[str, str]:
    """Return the container that holds slots, by `namespace/name` of its pod."""
    return {owner.key: owner.container for owner in owners_of(held)}


def living_pod(owner: Owner, pod: Pod | None) -> Pod:
    """Return the pod that holds the slots, as the API server knows it.

    Raises:
        LaterError: It does not exist yet, or one of the same name is ending.
    """
    if pod is None:
        raise LaterError(f"expected pod {owner.key} on this node, found none in the API server's answers so far")
    if pod.metadata.deletion_timestamp or pod.is_finished:
        raise LaterError(f"expected pod {owner.key} to be alive, found it finished or being deleted")
    return pod


def ready_reservation(
    owner: Owner, pod: Pod, reservations: Iterable[Reservation], partitions: Iterable[Partition]
) -> Reservation:
    """Return the pod's reservation, which must be ready and match the container's number of slots.

    Raises:
        LaterError: It does not exist, or is not ready yet.
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
    if len(reservation.gpu_uuids) != len(owner.slots):
        raise RefusedError(
            f"expected container {owner.container} of pod {owner.key} to hold {len(reservation.gpu_uuids)} of "
            f"{RESOURCE_GPU}, as reserved, found {len(owner.slots)}; let one container ask for all GPUs of the pod"
        )
    return reservation


def earlier_reservations(reservation: Reservation, reservations: Iterable[Reservation]) -> list[Reservation]:
    """Return the earlier reservations on the same GPUs."""
    return [
        r
        for r in reservations
        if set(r.gpu_uuids) & set(reservation.gpu_uuids)
        and (r.reserved_at, r.pod_uid) < (reservation.reserved_at, reservation.pod_uid)
    ]


def check_same_user(owner: Owner, user: int | None, served: Mapping[str, int | None]) -> None:
    """Check that all clients of an MPS daemon run as one user; those of another user would block in CUDA.

    Args:
        owner: The container that is about to start.
        user: User ID of the container; None if unknown.
        served: User ID of each other pod or server of the daemon, by name.

    Raises:
        LaterError: The clients of another user must end first.
    """
    for name, other in served.items():
        if user is not None and other is not None and user != other:
            raise LaterError(
                f"expected container {owner.container} of pod {owner.key} to run as user {other}, as {name} does, "
                f"found {user}; an MPS daemon serves one user at a time: give both the same securityContext.runAsUser, "
                "or set sharing.mode to TimeSlicing; it starts by itself when the other has ended"
            )


@dataclass(frozen=True, slots=True)
class AgentState:
    """State of the agent that the plugin reads."""

    pod: Callable[[str], Pod | None]
    """Returns a pod by `namespace/name`, from the watch; None if unknown."""
    read_pod: Callable[[str, str], Awaitable[Pod | None]]
    """Returns a pod by namespace and name, from the API server; None if there is none."""
    reservations: Callable[[], Collection[Reservation]]
    partitions: Callable[[], Iterable[Partition]]
    access: Callable[[GpuUuid, PodUid], Access]
    held: Callable[[], Awaitable[Sequence[pr.PodResources]]]
    """Returns the pods that hold slots, from PodResources."""
    probe: ProbeFiles | None = None
    """The step probe; None if it could not be installed."""


def full_gpus(reservations: Collection[Reservation], holding: Container[str]) -> set[GpuUuid]:
    """Return the GPUs that one pod has for itself; none while a reserved pod holds no slot, because it may need any.

    Args:
        reservations: The node's reservations.
        holding: Pods that hold slots, as `namespace/name`.
    """
    if any(f"{one.pod_namespace}/{one.pod_name}" not in holding for one in reservations):
        return set()
    alone = (r for r in reservations if r.mode is SharingMode.EXCLUSIVE or r.tenant.counted_mib(0) is None)
    return {uuid for one in alone for uuid in one.gpu_uuids}


class Plugin:
    """Device plugin of the agent.

    Args:
        state: State of the agent.
        cdi_dir: Directory for CDI specifications.
        also_read: Other directories from which the container runtime reads specifications.
        gpus: All GPUs.
        numa_nodes: Their NUMA nodes; empty if one of them has none.
        slots_per_gpu: Maximum number of pods on a GPU.
        autoscaling: Whether a GPU that one pod uses alone offers no free slots, so that autoscalers see it as full.
        clock: Clock for the timeout.
        reservation_wait_s: How long PreStartContainer waits for a reservation; the kubelet's timeout is 30 s.
        sleep: Waits for the given number of seconds.
    """

    def __init__(
        self,
        state: AgentState,
        cdi_dir: Path,
        *,
        also_read: Sequence[Path] = (),
        gpus: Collection[GpuUuid],
        numa_nodes: Collection[int] = (),
        slots_per_gpu: int,
        autoscaling: bool = False,
        clock: Clock,
        reservation_wait_s: float = 5.0,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._reservation_wait_s, self._sleep = reservation_wait_s, sleep
        self._state, self._cdi_dir, self._clock = state, cdi_dir, clock
        self._also_read = also_read
        nodes = [dp.NUMANode(ID=node) for node in numa_nodes]
        self._topology = dp.TopologyInfo(nodes=nodes) if nodes else None
        self._slots = [f"slot-{number}" for number in range(len(gpus) * slots_per_gpu)]
        self._slots_per_gpu, self._autoscaling, self._healthy = slots_per_gpu, autoscaling, gpus
        self._changes: set[asyncio.Event] = set()
        self._log = structlog.get_logger()

    def set_healthy(self, healthy: Collection[GpuUuid]) -> None:
        """Set the healthy GPUs."""
        self._healthy = healthy
        self.look_again()

    def look_again(self) -> None:
        """Send the slots again if they have changed."""
        for change in self._changes:
            change.set()

    async def GetDevicePluginOptions(self, _: dp.Empty, __: Any) -> dp.DevicePluginOptions:
        """Require PreStartContainer."""
        return OPTIONS

    async def ListAndWatch(self, _: dp.Empty, __: Any) -> AsyncIterator[dp.ListAndWatchResponse]:
        """Yield the slots now and after each change of their health.

        A slot is not bound to a GPU. The healthy slots are those that pods hold and as many others as the GPUs have
        room for, so an unhealthy or full GPU lowers the number of new pods and does not affect running ones: after a
        reboot the kubelet admits a pod again only if its slots are healthy. A slot has the NUMA nodes of all GPUs: with
        its own node alone, the kubelet would choose CPUs beside another GPU than the reservation's, or admit no pod.
        """
        change, held, last = asyncio.Event(), list[pr.PodResources](), dict[str, str]()
        self._changes.add(change)
        try:
            while True:
                change.clear()
                with suppress(KubeletError):  # its last answer counts
                    held = [*await self._state.held()]
                healthy = self._healthy_slots(held)
                health = {slot: "Healthy" if slot in healthy else "Unhealthy" for slot in self._slots}
                if health != last:
                    slots = [dp.Device(ID=s, health=h, topology=self._topology) for s, h in health.items()]
                    yield dp.ListAndWatchResponse(devices=slots)
                last = health
                await change.wait()
        finally:
            self._changes.discard(change)

    def _healthy_slots(self, held: Sequence[pr.PodResources]) -> set[str]:
        used = {slot for owner in owners_of(held) for slot in owner.slots}
        full = full_gpus(self._state.reservations(), holders(held)) if self._autoscaling else set[GpuUuid]()
        taken = len(used) + len(full.intersection(self._healthy)) * (self._slots_per_gpu - 1)
        free = [slot for slot in self._slots if slot not in used]
        return used.union(free[: max(0, len(self._healthy) * self._slots_per_gpu - taken)])

    async def Allocate(self, request: dp.AllocateRequest, _: Any) -> dp.AllocateResponse:
        """Return the slots' CDI devices at once: the kubelet admits pods one after the other.

        A container runtime without CDI ignores the devices. The variable keeps NVIDIA's runtime from then adding every
        GPU to an image that asks for `all`. With CDI, the specification's own variables override it.
        """
        return dp.AllocateResponse(
            container_responses=[
                dp.ContainerAllocateResponse(
                    cdi_devices=[dp.CDIDevice(name=cdi.device_name(slot)) for slot in container.devices_ids],
                    envs={"NVIDIA_VISIBLE_DEVICES": "void"},
                )
                for container in request.container_requests
            ]
        )

    async def PreStartContainer(
        self, request: dp.PreStartContainerRequest, context: Any
    ) -> dp.PreStartContainerResponse:
        """Prepare a container's devices; the reason of a refusal is in the pod's events."""
        try:
            await self.pre_start(list(request.devices_ids))
        except RefusedError as e:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(e))
        return dp.PreStartContainerResponse()

    async def pre_start(self, slots: Sequence[str]) -> None:
        """Write the slots' CDI specifications from the pod's reservation; raises RefusedError."""
        until = self._clock.monotonic() + self._reservation_wait_s
        while True:
            try:
                owner, reservation, access = await self._find(slots, until)
                break
            except LaterError as e:
                if self._clock.monotonic() >= until:
                    self._log.warning("container refused", slots=list(slots), reason=str(e))
                    raise
            except RefusedError as e:
                self._log.warning("container refused", slots=list(slots), reason=str(e))
                raise
            await self._sleep(_RETRY_S)
        self._write(owner, reservation, access)

    async def _find(self, slots: Sequence[str], until: float) -> tuple[Owner, Reservation, dict[GpuUuid, Access]]:
        state = self._state
        try:
            owner = owner_of(slots, await state.held())
        except KubeletError as e:
            raise LaterError(
                f"expected the kubelet's PodResources to name the holder of {', '.join(slots)}: {e}"
            ) from e
        pod = living_pod(owner, state.pod(owner.key))
        reservation = ready_reservation(owner, pod, state.reservations(), state.partitions())
        pod = await self._read_again(owner, reservation.pod_uid, until)
        try:
            access = {uuid: state.access(uuid, reservation.pod_uid) for uuid in reservation.gpu_uuids}
        except DeviceError as e:
            raise RefusedError(f"expected to bring its GPUs into pod {owner.key}: {e}") from e
        if state.probe is not None and pod.metadata.annotations.get(ANNOTATION_PROBE) == ProbeMode.AUTO:
            self._add_probe(state.probe, reservation, access)
        if reservation.mode is SharingMode.MPS:
            check_same_user(owner, container_uid(pod.spec, owner.container), self._served(reservation, access))
        return owner, reservation, access

    async def _read_again(self, owner: Owner, reserved: PodUid, until: float) -> Pod:
        """Return the pod as it is now: the kubelet names no UID, and its watch may be newer than the agent's."""
        try:
            async with asyncio.timeout(max(until - self._clock.monotonic(), _RETRY_S)):
                pod = living_pod(owner, await self._state.read_pod(owner.namespace, owner.pod))
        except (KubeError, TimeoutError) as e:
            found = str(e) or "no answer in time"
            raise LaterError(
                f"expected the API server to confirm UID {reserved} of pod {owner.key}, found {found}"
            ) from e
        if (uid := pod.metadata.uid) != reserved:
            raise LaterError(f"expected pod {owner.key} to have UID {reserved}, as reserved, found {uid}")
        return pod

    def _add_probe(self, probe: ProbeFiles, reservation: Reservation, access: dict[GpuUuid, Access]) -> None:
        try:
            env, mounts = probe.access(reservation.pod_uid)
        except OSError as e:  # the container starts without it
            self._log.warning("probe not given", pod=reservation.pod_name, error=str(e))
            return
        first, one = reservation.gpu_uuids[0], access[reservation.gpu_uuids[0]]
        access[first] = replace(one, env={**one.env, **env}, mounts=(*one.mounts, *mounts))

    def _served(self, reservation: Reservation, access: Mapping[GpuUuid, Access]) -> dict[str, int | None]:
        """Return the users of the present clients and of earlier reservations of the pod's MPS daemon."""
        served = {f"the MPS server of GPU {uuid}": one.mps_user for uuid, one in access.items()}
        for other in earlier_reservations(reservation, self._state.reservations()):
            pod = self._state.pod(f"{other.pod_namespace}/{other.pod_name}")
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
    """Serves the plugin and registers it again after each restart of the kubelet.

    A restarted kubelet deletes all sockets in its directory and creates its own again. While the plugin does not serve,
    the kubelet offers none of its GPUs, and no new pod comes.

    Args:
        directory: The kubelet's device plugin directory.
        plugin: The plugin to serve.
        every_s: Interval of the checks, in seconds.
        sleep: Waits for the given number of seconds.
        may_serve: Whether the agent is able to prepare pods.
    """

    def __init__(
        self,
        directory: Path,
        plugin: Plugin,
        every_s: float = 1.0,
        sleep: Sleep = asyncio.sleep,
        may_serve: Callable[[], bool] = lambda: True,
    ) -> None:
        self._plugin, self._every_s, self._sleep, self._may_serve = plugin, every_s, sleep, may_serve
        self._socket, self._kubelet = directory / ENDPOINT, directory / KUBELET_SOCKET
        self._server: Any = None
        self._registered_with: tuple[int, int] | None = None
        """Identity of the kubelet's socket at the last registration."""
        self._error = ""
        self._log = structlog.get_logger()

    @property
    def is_registered(self) -> bool:
        """Whether the plugin is registered with the running kubelet."""
        return self._registered_with is not None

    async def run(self) -> None:
        """Serve and register until cancelled."""
        try:
            while True:
                await self.once()
                await self._sleep(self._every_s)
        finally:
            await self.close()

    async def once(self) -> None:
        """Check both sockets; serve and register if needed."""
        if not self._may_serve():
            self._registered_with = None
            await self.close()
            return
        own, kubelet = _identity(self._socket), _identity(self._kubelet)
        if kubelet is None or kubelet != self._registered_with:
            self._registered_with = None
        try:
            if self._server is None or own is None:
                self._registered_with = None
                await self.serve()
            if self._registered_with is None and kubelet is not None:
                await self._register()
                self._registered_with, self._error = kubelet, ""
                self._log.info("registered with the kubelet", resource=RESOURCE_GPU)
        except KubeletError as e:
            if str(e) != self._error:
                self._error = str(e)
                self._log.warning("not registered with the kubelet", error=self._error)

    async def serve(self) -> None:
        """Listen on the plugin's socket; an existing socket is replaced. Raises KubeletError."""
        await self.close()
        if not self._socket.parent.is_dir():  # gRPC would log an error at each attempt
            raise KubeletError(
                f"{self._socket.parent}: expected the kubelet's device plugin directory, found none; mount it, or name "
                "it by CARPOOL_DEVICE_PLUGIN_DIR (CARPOOL_KUBELET=false where there is no kubelet)"
            )
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        deviceplugin_pb2_grpc.add_DevicePluginServicer_to_server(self._plugin, server)
        try:
            self._socket.unlink(missing_ok=True)
            server.add_insecure_port(f"unix:{self._socket}")
        except (OSError, RuntimeError) as e:
            raise KubeletError(f"{self._socket}: expected to listen there, found {e}; is the directory mounted?") from e
        await server.start()
        self._server = server

    async def _register(self) -> None:
        request = dp.RegisterRequest(
            version=API_VERSION, endpoint=ENDPOINT, resource_name=RESOURCE_GPU, options=OPTIONS
        )
        async with grpc.aio.insecure_channel(f"unix:{self._kubelet}", options=_OPTIONS) as channel:
            try:
                await deviceplugin_pb2_grpc.RegistrationStub(channel).Register(request, timeout=_CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as e:
                raise _no_answer(self._kubelet, e) from e

    async def close(self) -> None:
        """End all calls and stop listening."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace=None)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return inode and change time of a socket; None if it is absent."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_ctime_ns)
