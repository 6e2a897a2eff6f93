"""A kubelet as far as a device plugin sees it: real gRPC on real sockets, admission and starts on demand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]

from carpool_deviceplugin.kubelet.protos import deviceplugin_pb2 as dp
from carpool_deviceplugin.kubelet.protos import podresources_pb2 as pr


def _unary(method: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        method, request_deserializer=request.FromString, response_serializer=lambda answer: answer.SerializeToString()
    )


class Kubelet:
    """One life of a kubelet.

    Args:
        directory: Its device plugin directory.
        pod_resources: Where its PodResources socket stands.
    """

    def __init__(self, directory: Path, pod_resources: Path) -> None:
        self._directory, self._pod_resources = directory, pod_resources
        self.registered: asyncio.Queue[dp.RegisterRequest] = asyncio.Queue()
        """Registrations, in order."""
        self.held: dict[tuple[str, str, str], list[str]] = {}
        """Slots by namespace, pod and container."""
        self._server = grpc.aio.server()

    async def start(self) -> None:
        """Listen. Deletes all sockets in its directory first, as the real one does."""
        for socket in self._directory.glob("*.sock"):
            socket.unlink()
        self._pod_resources.unlink(missing_ok=True)

        async def register(request: dp.RegisterRequest, _: Any) -> dp.Empty:
            self.registered.put_nowait(request)
            return dp.Empty()

        async def listing(_: pr.ListPodResourcesRequest, __: Any) -> pr.ListPodResourcesResponse:
            return pr.ListPodResourcesResponse(pod_resources=[self._told(*key) for key in self.held])

        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "v1beta1.Registration", {"Register": _unary(register, dp.RegisterRequest)}
                ),
                grpc.method_handlers_generic_handler(
                    "v1.PodResourcesLister", {"List": _unary(listing, pr.ListPodResourcesRequest)}
                ),
            )
        )
        self._server.add_insecure_port(f"unix:{self._directory / 'kubelet.sock'}")
        self._server.add_insecure_port(f"unix:{self._pod_resources}")
        await self._server.start()

    def _told(self, namespace: str, pod: str, container: str) -> pr.PodResources:
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
            yield channel

    async def _ask(self, method: str, request: Any, answer: Any) -> Any:
        async with self._plugin() as channel:
            call = channel.unary_unary(
                f"/v1beta1.DevicePlugin/{method}", type(request).SerializeToString, answer.FromString
            )
            return await call(request, timeout=10)

    async def options(self) -> dp.DevicePluginOptions:
        """GetDevicePluginOptions."""
        answer: dp.DevicePluginOptions = await self._ask("GetDevicePluginOptions", dp.Empty(), dp.DevicePluginOptions)
        return answer

    async def lists(self) -> AsyncIterator[dict[str, str]]:
        """What ListAndWatch streams: health by slot."""
        async with self._plugin() as channel:
            call = channel.unary_stream(
                "/v1beta1.DevicePlugin/ListAndWatch", dp.Empty.SerializeToString, dp.ListAndWatchResponse.FromString
            )
            async for answer in call(dp.Empty()):
                yield {device.ID: device.health for device in answer.devices}

    async def admit(self, pod: str, *slots: str, container: str = "train", namespace: str = "default") -> list[str]:
        """Allocate at admission; return the CDI names."""
        request = dp.AllocateRequest(container_requests=[dp.ContainerAllocateRequest(devices_ids=slots)])
        answer = await self._ask("Allocate", request, dp.AllocateResponse)
        self.held[namespace, pod, container] = list(slots)
        return [device.name for device in answer.container_responses[0].cdi_devices]

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[Callable[[str], Awaitable[None]]]:
        """Start containers of pods over one connection, as the real one does."""
        async with self._plugin() as channel:
            call = channel.unary_unary(
                "/v1beta1.DevicePlugin/PreStartContainer",
                dp.PreStartContainerRequest.SerializeToString,
                dp.PreStartContainerResponse.FromString,
            )

            async def start(pod: str) -> None:
                await call(dp.PreStartContainerRequest(devices_ids=self.held["default", pod, "train"]), timeout=10)

            yield start

    async def start_container(self, pod: str, container: str = "train", namespace: str = "default") -> None:
        """PreStartContainer; raises AioRpcError where the plugin refuses."""
        request = dp.PreStartContainerRequest(devices_ids=self.held[namespace, pod, container])
        await self._ask("PreStartContainer", request, dp.PreStartContainerResponse)
