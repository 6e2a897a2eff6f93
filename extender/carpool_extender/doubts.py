"""GPUs of which a GpuNode tells what cannot all be true: nobody is sent there until it is clear."""

from collections.abc import Mapping, Sequence

from carpool_core.resources.node import Device, GpuNode, Reservation, Tenant
from carpool_core.values import DeviceHealth, GpuUuid, SharingMode

from carpool_extender.standing import Hindrance

UNHEALTHY, STRANGER, CONTRADICTION = 0, 3, 4
"""Kinds of hindrances; 1 and 2 are those of time, in `standing`."""


def doubts(node: GpuNode, by_gpu: Mapping[GpuUuid, Sequence[Reservation]]) -> dict[GpuUuid, Hindrance]:
    """Say why GPUs of a node are left out, by UUID.

    Args:
        node: The node.
        by_gpu: Its reservations, by GPU.
    """
    measured: dict[GpuUuid, list[Tenant]] = {}
    for tenant in node.status.tenants:
        measured.setdefault(tenant.gpu_uuid, []).append(tenant)
    found = {
        device.uuid: _doubt(device, by_gpu.get(device.uuid, ()), measured.get(device.uuid, ()))
        for device in node.status.devices
    }
    return {uuid: why for uuid, why in found.items() if why is not None}


def has_strangers(node: GpuNode) -> bool:
    """Whether pods use memory of a node's GPUs without a reservation there."""
    known = {reservation.pod_uid for reservation in node.spec.reservations}
    return any(tenant.pod_uid not in known and tenant.memory_mib for tenant in node.status.tenants)


def _doubt(device: Device, held: Sequence[Reservation], measured: Sequence[Tenant]) -> Hindrance | None:
    if device.health is not DeviceHealth.HEALTHY:
        return Hindrance(UNHEALTHY, f"unhealthy: {device.health_message}" if device.health_message else "unhealthy")
    modes = sorted({reservation.mode for reservation in held})
    if len(modes) > 1:
        return Hindrance(CONTRADICTION, f"its reservations contradict each other: {', '.join(modes)}")
    if len(held) > 1 and modes == [SharingMode.EXCLUSIVE]:
        return Hindrance(CONTRADICTION, f"its reservations contradict each other: {len(held)} are exclusive")
    known = {reservation.pod_uid for reservation in held}
    strangers = [tenant for tenant in measured if tenant.pod_uid not in known and tenant.memory_mib > 0]
    if strangers:
        memory = sum(tenant.memory_mib for tenant in strangers)
        pods = ", ".join(sorted(tenant.pod_uid for tenant in strangers))
        return Hindrance(STRANGER, f"{memory:,} MiB are used without a reservation, by pod {pods}")
    return None
