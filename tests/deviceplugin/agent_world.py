"""Agents of a node with fake GPUs: a whole one with an API server in memory, or the worker of one GPU."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from carpool_core.kube.api import GPU_NODES, NODES
from carpool_core.resources.node import GpuNode, GpuNodeStatus, Partition, Reservation
from carpool_core.testing.kube import FakeKube
from carpool_core.values import GpuUuid, PartitionState, PodUid, SharingMode
from carpool_deviceplugin.app import Agent
from carpool_deviceplugin.device_state import GpuWorker
from carpool_deviceplugin.gpu import Devices
from carpool_deviceplugin.metrics import AgentCollector
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Inline, Node, flowing, uid, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import Intervals
from prometheus_client import CollectorRegistry


def reservation(pod: str = "a", *gpus: str, mode: SharingMode = SharingMode.TIME_SLICING, **more: Any) -> Reservation:
    """Return a reservation out of what matters to a test."""
    fields = {
        "pod_uid": f"uid-{pod}",
        "pod_namespace": "default",
        "pod_name": pod,
        "job_uid": f"job-uid-{pod}",
        "job_name": f"job-{pod}",
        "gpu_uuids": list(gpus or ("GPU-1",)),
        "mode": mode,
        "reserved_at": f"2026-01-31T12:00:00.{pod}Z",
    }
    return Reservation(**fields | more)


def agent_on(
    devices: Devices | None,
    directory: Path,
    kube: FakeKube,
    intervals: Intervals | None = None,
    *,
    name: str = "node-1",
) -> Agent:
    """Return an agent without a kubelet."""
    settings = AgentSettings(node_name=name, kubelet=False, state_dir=directory)
    return flowing(settings, kube, devices, intervals or Intervals(labels_s=30.0))


def status_of(kube: FakeKube, name: str = "node-1") -> GpuNodeStatus:
    """Return the status of a GpuNode; an empty one before there is any."""
    found = next((one for one in kube.dump_all(GPU_NODES) if one["metadata"]["name"] == name), None)
    return msgspec.convert(found, GpuNode).status if found else GpuNodeStatus()


async def reserve_on(kube: FakeKube, *reservations: Reservation, name: str = "node-1") -> None:
    """Replace the reservations of a GpuNode, as soon as there is one."""
    await until(lambda: kube.dump_all(GPU_NODES))
    await kube.patch(GPU_NODES, name, {"spec": {"reservations": msgspec.to_builtins(reservations)}})


def registry_of(agent: Agent) -> CollectorRegistry:
    """Return a registry with the metrics of an agent."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(agent))
    return registry


class World:
    """Where reservations are made, and pods run."""

    def __init__(self, root: Path, intervals: Intervals | None = None) -> None:
        self.node, self.kube = Node(FakeNvml(["H100"]), FakeMpsCommands(), root), FakeKube()
        self.kube.seed(NODES, {"metadata": {"name": "n"}})
        self.devices = self.node.devices()
        (self.gpu,) = self.devices.uuids
        self.pipe = root / "mps" / self.gpu / "pipe"
        self.agent = agent_on(self.devices, root, self.kube, intervals, name="n")

    @property
    def seen(self) -> GpuNode:
        """The GpuNode, as the operator reads it."""
        return msgspec.convert(self.kube.dump(GPU_NODES, "n"), GpuNode)

    @property
    def status(self) -> GpuNodeStatus:
        return status_of(self.kube, "n")

    @property
    def states(self) -> dict[str, str]:
        """How far each reservation is, by pod."""
        return {p.pod_uid: p.state.value for p in self.status.partitions}

    async def hold(self, *reservations: Reservation, **states: str) -> None:
        """Make these the node's reservations, and wait until each pod is ready or in its given state."""
        await reserve_on(self.kube, *reservations, name="n")
        wanted = {r.pod_uid: states.get(r.pod_name, "Ready") for r in reservations}
        await until(lambda: self.states == wanted)


async def unchanged() -> bool:
    return False


class GpuAgent:
    """The worker of a node's first GPU, which makes its calls without threads.

    Args:
        node: The node.
        confirm: Returns whether the agent's permission to partition has changed.
    """

    def __init__(self, node: Node, confirm: Callable[[], Awaitable[bool]] = unchanged) -> None:
        self.node, self._confirm = node, confirm
        self.begin(frozenset())

    def begin(self, promised: frozenset[PodUid]) -> None:
        """Start an agent that knows the node and the pods that an earlier one reported ready."""
        self.devices = self.node.devices()
        self.worker = GpuWorker(self.gpu, self.devices, lambda: None, Intervals(), self._confirm, Inline())
        self.worker.remember(promised)

    def restart(self) -> None:
        """Replace the agent; only the node and the status remain."""
        partitions = self.worker.partitions
        self.begin(frozenset(pod for pod, partition in partitions.items() if partition.state is PartitionState.READY))

    @property
    def gpu(self) -> GpuUuid:
        """The GPU."""
        return self.devices.uuids[0]

    def reservations(self, *wanted: tuple[str, str | SharingMode]) -> list[Reservation]:
        """Return reservations of MIG profiles, or of other modes, for pods."""
        return [
            reservation(pod, self.gpu, mode=what, pod_uid=uid(pod))
            if isinstance(what, SharingMode)
            else reservation(pod, self.gpu, mode=SharingMode.MIG, pod_uid=uid(pod), mig_profile=what)
            for pod, what in wanted
        ]

    async def want(self, *wanted: tuple[str, str | SharingMode]) -> dict[str, Partition]:
        """Reserve profiles, or other modes, for pods; return the partitions."""
        self.worker.want(self.reservations(*wanted))
        await self.worker.once()
        return {pod: self.worker.partitions[PodUid(uid(pod))] for pod, _ in wanted}

    @property
    def instances(self) -> dict[str, int]:
        """IDs of the MIG instances, by profile and position."""
        return {f"{i.profile.name}@{i.start}": i.id for i in self.node.nvml.gpus[0].mig.instances.values()}


def first_gpu(node: Node) -> tuple[NvmlDevices, GpuUuid]:
    """Return the GPUs of a node, as a new agent finds them, and the UUID of the first."""
    devices = node.devices()
    return devices, devices.uuids[0]


def mig_node(directory: Path, kind: str = "A100-40", *, on: bool = True, may_switch: bool = False) -> Node:
    """Return a node with one GPU that has MIG, switched `on` or off; agents switch it if they `may_switch`."""
    node = Node(FakeNvml([kind]), FakeMpsCommands(), directory, may_switch_mig=may_switch)
    node.nvml.gpus[0].mig.is_enabled = node.nvml.gpus[0].mig.is_pending = on
    return node


def states(partitions: dict[str, Partition]) -> dict[str, PartitionState]:
    """Return the state of each pod's partition."""
    return {pod: partition.state for pod, partition in partitions.items()}
