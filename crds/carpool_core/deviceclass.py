"""What of a GPU decides whether a job could ever run there; its health and its mode at present do not."""

from dataclasses import dataclass

from carpool_core.resources.node import Device
from carpool_core.values import SharingMode


@dataclass(frozen=True, slots=True, order=True)
class DeviceClass:
    """All GPUs that are alike to a demand."""

    product: str
    memory_mib: int
    reserved_mib: int
    compute_capability: str
    modes: tuple[SharingMode, ...]
    mig_profiles: tuple[str, ...] = ()

    @property
    def usable_mib(self) -> int:
        """Memory that tenants can have, in MiB; never negative."""
        return max(0, self.memory_mib - self.reserved_mib)


def class_of(device: Device) -> DeviceClass:
    """Return the class of a device."""
    return DeviceClass(
        product=device.product,
        memory_mib=device.memory_mib,
        reserved_mib=device.reserved_mib,
        compute_capability=device.compute_capability,
        modes=tuple(device.modes),
        mig_profiles=tuple(device.mig_profiles),
    )
