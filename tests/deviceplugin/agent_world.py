"""One node with one GPU of the fake, its agent, and an API server in memory."""

from pathlib import Path

import msgspec
from carpool_core.kube.api import GPU_NODES, NODES
from carpool_core.resources.node import GpuNode, GpuNodeStatus, Reservation
from carpool_core.testing.kube import FakeKube
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, flowing, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import Intervals


class World:
    """Where reservations are made, and pods run."""

    def __init__(self, root: Path, intervals: Intervals | None = None) -> None:
        self.node, self.kube = Node(FakeNvml(["H100"]), FakeMpsCommands(), root), FakeKube()
        self.kube.seed(NODES, {"metadata": {"name": "n"}})
        self.devices = self.node.devices()
        (self.gpu,) = self.devices.uuids
        self.pipe = root / "mps" / self.gpu / "pipe"
        settings = AgentSettings(node_name="n", kubelet=False, state_dir=root)
        self.agent = flowing(settings, self.kube, self.devices, intervals or Intervals(labels_s=30.0))

    @property
    def status(self) -> GpuNodeStatus:
        return msgspec.convert(self.kube.dump_all(GPU_NODES)[0], GpuNode).status

    @property
    def states(self) -> dict[str, str]:
        """How far each reservation is, by pod."""
        return {p.pod_uid: p.state.value for p in self.status.partitions}

    async def hold(self, *reservations: Reservation, **states: str) -> None:
        """Make these the node's reservations, and wait until each pod is ready or in its given state."""
        await until(lambda: self.kube.dump_all(GPU_NODES))
        await self.kube.patch(GPU_NODES, "n", {"spec": {"reservations": msgspec.to_builtins(reservations)}})
        wanted = {r.pod_uid: states.get(r.pod_name, "Ready") for r in reservations}
        await until(lambda: self.states == wanted)
