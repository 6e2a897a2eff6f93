"""Two states of one GpuNode: which is the newer, whether decisions see a difference, and what they have in common."""

from typing import TypeVar

import msgspec
from carpool_core.resources.node import GpuNode

N = TypeVar("N", bound=GpuNode)


def sharing(old: GpuNode, new: N) -> N:
    """Return a state with another's parts where these are equal.

    Most of what agents tell is that they live. Each of these words would hold the whole of its node once more, and
    everybody who asks what has changed would have to compare it.
    """
    if new.spec is not old.spec and new.spec == old.spec:
        new = msgspec.structs.replace(new, spec=old.spec)
    if new.status.devices is not old.status.devices and new.status.devices == old.status.devices:
        new = msgspec.structs.replace(new, status=msgspec.structs.replace(new.status, devices=old.status.devices))
    return new


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
