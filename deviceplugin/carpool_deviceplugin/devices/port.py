"""The port to the GPUs of a node. Calls may block for a moment; the agent makes them in threads, with deadlines."""

from collections.abc import Sequence
from typing import Protocol

from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, PodUid

from carpool_deviceplugin.devices.gpu import Access, GpuActual, Reading, Step


class Devices(Protocol):
    """The GPUs of a node. Every call but `inventory` raises DeviceError where the GPU cannot be read or changed."""

    @property
    def simulated(self) -> bool:
        """Whether there is no hardware."""
        ...

    @property
    def uuids(self) -> Sequence[GpuUuid]:
        """The GPUs by index; they stay the same for as long as the agent lives."""
        ...

    def inventory(self) -> list[Device]:
        """Describe every GPU, with its mode and health now. A GPU that cannot be read is unhealthy, not absent."""
        ...

    def describe(self, uuid: GpuUuid) -> Device:
        """Describe one GPU, as `inventory` does."""
        ...

    def actual(self, uuid: GpuUuid) -> GpuActual:
        """Read how a GPU is divided."""
        ...

    def apply(self, uuid: GpuUuid, step: Step) -> None:
        """Take one step. Idempotent: a step that was taken already changes nothing."""
        ...

    def read(self, uuid: GpuUuid) -> Reading:
        """Read a GPU's counters."""
        ...

    def access(self, uuid: GpuUuid, pod_uid: PodUid | None = None) -> Access:
        """Return what brings the GPU, or the pod's MIG instance of it, into a container. Never blocks."""
        ...

    def ask_others(self) -> None:
        """Ask who else on the node measures the GPUs; what is heard counts in readings. May block."""
        ...

    def set_mig_manager(self, manager: str) -> None:
        """Say who else divides the node's GPUs, so that the agent does not; empty where nobody does."""
        ...


class NoDevicesError(Exception):
    """The agent has no GPUs; the message says what to set."""
