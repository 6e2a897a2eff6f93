"""Two states of one GpuNode: which is the newer, and whether decisions see a difference."""

from carpool_core.resources.node import GpuNode


def differ(old: GpuNode, new: GpuNode) -> bool:
    """Whether anything has changed that decisions look at; with tenants the time of their measures is such a thing."""
    if old.spec != new.spec or old.status.devices != new.status.devices:
        return True
    if old.status.tenants != new.status.tenants:
        return True
    return bool(new.status.tenants) and old.status.heartbeat_time != new.status.heartbeat_time


def is_older(node: GpuNode, than: GpuNode) -> bool:
    """Whether a version comes before another of the same object; versions of one kind are ordered integers."""
    mine, other = node.metadata, than.metadata
    if mine.uid != other.uid or not (mine.resource_version.isdigit() and other.resource_version.isdigit()):
        return False
    return int(mine.resource_version) < int(other.resource_version)
