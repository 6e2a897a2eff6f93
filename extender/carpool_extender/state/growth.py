"""When a GpuNode has more room than before."""

from carpool_core.deviceclass import class_of
from carpool_core.resources.node import Device, GpuNode
from carpool_core.values import DeviceHealth

from carpool_extender.state.doubts import has_strangers


def may_hold_more(old: GpuNode | None, new: GpuNode) -> bool:
    """Whether a change of a GpuNode may give a waiting pod a place, besides releases: those tell of themselves.

    That a GPU changed its mode for a tenant, or fell sick, gives nobody a place.
    """
    if old is None or (has_strangers(old) and not has_strangers(new)):
        return True
    if old.status.devices is new.status.devices:
        return False  # as in each sign of life
    before = {device.uuid: device for device in old.status.devices}
    return any(_may_hold_more(before.get(device.uuid), device) for device in new.status.devices)


def _may_hold_more(old: Device | None, new: Device) -> bool:
    if old is None or (old.health is not new.health and new.health is DeviceHealth.HEALTHY):
        return True
    return class_of(old) != class_of(new) or old.nvlink_peers != new.nvlink_peers
