"""The part of an agent that looks after one GPU with MIG, over the fake of NVML, and that can begin anew."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, PartitionState, PodUid, SharingMode

from carpool_deviceplugin.devices.patience import Rhythm
from carpool_deviceplugin.partitions.worker import GpuWorker, Outcome
from carpool_deviceplugin.testing.agents import Inline
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node, uid

READY = PartitionState.READY
Reserve = Callable[..., Reservation]


class MigAgent:
    """Looks after the node's first GPU.

    Args:
        node: With the GPU.
        reserve: Makes a reservation for a pod and a GPU.
        confirm: Says whether what the agent may do has changed.
    """

    def __init__(self, node: Node, reserve: Reserve, confirm: Callable[[], Awaitable[bool]] | None = None) -> None:
        self.node, self._reserve, self._confirm = node, reserve, confirm
        self.devices = node.devices()
        self.worker = self._worker()

    def _worker(self) -> GpuWorker:
        if self._confirm is None:
            return GpuWorker(self.gpu, self.devices, lambda: None, Rhythm(), caller=Inline())
        return GpuWorker(self.gpu, self.devices, lambda: None, Rhythm(), self._confirm, Inline())

    def begin(self) -> None:
        """A new agent on the same node, that remembers nothing but what the status says."""
        promised = frozenset(pod for pod, outcome in self.worker.outcomes.items() if outcome.state is READY)
        self.devices = self.node.devices()
        self.worker = self._worker()
        self.worker.remember(promised)

    @property
    def gpu(self) -> GpuUuid:
        """The GPU."""
        return self.devices.uuids[0]

    def reservations(self, *wanted: tuple[str, str | SharingMode]) -> list[Reservation]:
        """Make reservations of profiles, or of other modes, for pods."""
        return [
            msgspec.structs.replace(
                self._reserve(pod, self.gpu, mode=what if isinstance(what, SharingMode) else SharingMode.MIG),
                pod_uid=PodUid(uid(pod)),
                mig_profile=None if isinstance(what, SharingMode) else what,
            )
            for pod, what in wanted
        ]

    async def want(self, *wanted: tuple[str, str | SharingMode]) -> dict[str, Outcome]:
        """Reserve profiles, or other modes, for pods; return the outcomes."""
        self.worker.want(self.reservations(*wanted))
        await self.worker.once()
        return {pod: self.worker.outcomes[PodUid(uid(pod))] for pod, _ in wanted}

    @property
    def instances(self) -> dict[str, int]:
        """What the hardware has: ID by profile and place."""
        return {f"{i.profile.name}@{i.start}": i.id for i in self.node.nvml.gpus[0].mig.instances.values()}


def mig_node(directory: Path, kind: str = "A100-40", *, on: bool = True, may_switch: bool = False) -> Node:
    """Make a node with one GPU that has MIG.

    Args:
        directory: Of the node's files.
        kind: The GPU's short name.
        on: Whether MIG is switched on.
        may_switch: Whether agents may switch it.
    """
    node = Node(FakeNvml([kind]), FakeMpsCommands(), directory, may_switch_mig=may_switch)
    node.nvml.gpus[0].mig.is_enabled = node.nvml.gpus[0].mig.is_pending = on
    return node


def states(outcomes: dict[str, Outcome]) -> dict[str, PartitionState]:
    """Return how far each pod's share is."""
    return {pod: outcome.state for pod, outcome in outcomes.items()}
