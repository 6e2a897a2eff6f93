"""Fake kubelet for device plugins: real gRPC on real sockets; tests admit pods and start containers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
from carpool_deviceplugin.protos import deviceplugin_pb2 as dp
from carpool_deviceplugin.protos import deviceplugin_pb2_grpc, podresources_pb2_grpc
from carpool_deviceplugin.protos import podresources_pb2 as pr


class _Registration:
    def __init__(self, record: Callable[[dp.RegisterRequest], None]) -> None:
        self._record = record

    async def Register(self, request: dp.RegisterRequest, _: Any) -> dp.Empty:
        self._record(request)
        return dp.Empty()


class _PodResourcesLister:
    def __init__(self, pods: Callable[[], list[pr.PodResources]]) -> None:
        self._pods = pods

    async def List(self, _: pr.ListPodResourcesRequest, __: Any) -> pr.ListPodResourcesResponse:
        return pr.ListPodResourcesResponse(pod_resources=self._pods())


class Kubelet:
    """One life of a kubelet.

    Args:
        directory: Its device plugin directory.
        pod_resources: Path of its PodResources socket.
    """

    def __init__(self, directory: Path, pod_resources: Path) -> None:
        self._directory, self._pod_resources = directory, pod_resources
        self.registered: asyncio.Queue[dp.RegisterRequest] = asyncio.Queue()
        """Registrations, in order."""
        self.held: dict[tuple[str, str, str], list[str]] = {}
        """Slots by namespace, pod and container."""
        self.environment: dict[str, str] = {}
        """Variables that the last Allocate added to its container."""
        self._server = grpc.aio.server()

    async def start(self) -> None:
        """Listen. Deletes all sockets in its directory first, as the real one does."""
        for socket in self._directory.glob("*.sock"):
            socket.unlink()
        self._pod_resources.unlink(missing_ok=True)

        deviceplugin_pb2_grpc.add_RegistrationServicer_to_server(
            _Registration(lambda request: self.registered.put_nowait(request)), self._server
        )
        podresources_pb2_grpc.add_PodResourcesListerServicer_to_server(
            _PodResourcesLister(lambda: [self._pod_resources_of(*key) for key in self.held]), self._server
        )
        self._server.add_insecure_port(f"unix:{self._directory / 'kubelet.sock'}")
        self._server.add_insecure_port(f"unix:{self._pod_resources}")
        await self._server.start()

    def _pod_resources_of(self, namespace: str, pod: str, container: str) -> pr.PodResources:
        devices = [
            pr.ContainerDevices(resource_name="carpool.dev/gpu", device_ids=self.held[namespace, pod, container])
        ]
        return pr.PodResources(
            namespace=namespace, name=pod, containers=[pr.ContainerResources(name=container, devices=devices)]
        )

    async def stop(self) -> None:
        """Die; the sockets' files stay, as they do when the real one is killed."""
        await self._server.stop(grace=None)

    @contextlib.asynccontextmanager
    async def _plugin(self) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(f"unix:{self._directory / 'carpool.sock'}") as channel:
            yield deviceplugin_pb2_grpc.DevicePluginStub(channel)

    async def options(self) -> dp.DevicePluginOptions:
        """GetDevicePluginOptions."""
        async with self._plugin() as plugin:
            options: dp.DevicePluginOptions = await plugin.GetDevicePluginOptions(dp.Empty(), timeout=60)
            return options

    async def lists(self) -> AsyncIterator[dict[str, str]]:
        """Yield the health of each slot, as ListAndWatch streams it."""
        async with self._plugin() as plugin:
            async for answer in plugin.ListAndWatch(dp.Empty()):
                yield {device.ID: device.health for device in answer.devices}

    async def admit(self, pod: str, *slots: str, container: str = "train", namespace: str = "default") -> list[str]:
        """Allocate at admission; return the CDI names."""
        request = dp.AllocateRequest(container_requests=[dp.ContainerAllocateRequest(devices_ids=slots)])
        async with self._plugin() as plugin:
            answer: dp.AllocateResponse = await plugin.Allocate(request, timeout=60)
        self.held[namespace, pod, container] = list(slots)
        self.environment = dict(answer.container_responses[0].envs)
        return [device.name for device in answer.container_responses[0].cdi_devices]

    async def start_container(self, pod: str, container: str = "train", namespace: str = "default") -> None:
        """Call PreStartContainer; raises AioRpcError if the plugin refuses."""
        request = dp.PreStartContainerRequest(devices_ids=self.held[namespace, pod, container])
        async with self._plugin() as plugin:
            await plugin.PreStartContainer(request, timeout=60)
