"""gRPC over unix sockets, as the kubelet speaks it: the few calls of its APIs, and nothing generated but messages."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc  # type: ignore[import-untyped]

from carpool_deviceplugin.kubelet.protos import deviceplugin_pb2 as dp
from carpool_deviceplugin.kubelet.protos import podresources_pb2 as pr

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


def _handlers(handler: PluginHandler) -> Any:
    async def options(_: dp.Empty, __: Any) -> dp.DevicePluginOptions:
        return handler.options()

    async def list_and_watch(_: dp.Empty, __: Any) -> AsyncIterator[dp.ListAndWatchResponse]:
        async for devices in handler.devices():
            yield dp.ListAndWatchResponse(devices=devices)

    async def allocate(request: dp.AllocateRequest, _: Any) -> dp.AllocateResponse:
        answers = [handler.allocate(list(one.devices_ids)) for one in request.container_requests]
        return dp.AllocateResponse(container_responses=answers)

    async def pre_start(request: dp.PreStartContainerRequest, context: Any) -> dp.PreStartContainerResponse:
        try:
            await handler.pre_start(list(request.devices_ids))
        except RefusedError as e:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(e))
        return dp.PreStartContainerResponse()

    def unary(method: Any, request: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            method, request.FromString, lambda answer: answer.SerializeToString()
        )

    return grpc.method_handlers_generic_handler(
        f"{API_VERSION}.DevicePlugin",
        {
            "GetDevicePluginOptions": unary(options, dp.Empty),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                list_and_watch, dp.Empty.FromString, dp.ListAndWatchResponse.SerializeToString
            ),
            "Allocate": unary(allocate, dp.AllocateRequest),
            "PreStartContainer": unary(pre_start, dp.PreStartContainerRequest),
        },
    )


class Server:
    """A plugin's gRPC server on a unix socket."""

    def __init__(self, path: Path, handler: PluginHandler) -> None:
        self.path = path
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_handlers(handler),))

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
        call = channel.unary_unary(
            f"/{API_VERSION}.Registration/Register", dp.RegisterRequest.SerializeToString, dp.Empty.FromString
        )
        await call(request, timeout=_CALL_TIMEOUT_S)


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
        call = self._channel.unary_unary(
            "/v1.PodResourcesLister/List",
            pr.ListPodResourcesRequest.SerializeToString,
            pr.ListPodResourcesResponse.FromString,
        )
        try:
            answer: pr.ListPodResourcesResponse = await call(pr.ListPodResourcesRequest(), timeout=self._within_s)
        except grpc.aio.AioRpcError as e:
            await self.close()  # a restarted kubelet makes its socket anew: the next question goes to that one
            raise KubeletError(f"{self._socket}: expected an answer, found {e.code().name}: {e.details()}") from e
        return answer.pod_resources

    async def close(self) -> None:
        """End the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
