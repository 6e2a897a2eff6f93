"""GPUs of which a GpuNode tells what cannot all be true: nobody is sent there until it is clear."""

from collections.abc import Collection

from carpool_core.resources.node import GpuNode
from carpool_core.values import DeviceHealth, GpuUuid, SharingMode

from carpool_extender.state.rows import Said
from carpool_extender.state.standing import Hindrance

UNHEALTHY, STRANGER, CONTRADICTION, NONSENSE = 0, 3, 4, 5
"""Kinds of hindrances; 1 and 2 are those of time, in `standing`."""


def doubt(said: Said) -> Hindrance | None:
    """Say why a GPU is left out; None where nothing speaks against it."""
    device, held = said.device, said.held
    if device.health is not DeviceHealth.HEALTHY:
        return Hindrance(UNHEALTHY, f"unhealthy: {device.health_message}" if device.health_message else "unhealthy")
    if said.is_told_twice:
        return Hindrance(CONTRADICTION, f"its node tells of several GPUs by the UUID {device.uuid}")
    modes = sorted({reservation.mode for reservation in held})
    if len(modes) > 1:
        return Hindrance(CONTRADICTION, f"its reservations contradict each other: {', '.join(modes)}")
    if len(held) > 1 and modes == [SharingMode.EXCLUSIVE]:
        return Hindrance(CONTRADICTION, f"its reservations contradict each other: {len(held)} are exclusive")
    known = {reservation.pod_uid for reservation in held}
    strangers = [tenant for tenant in said.seen if tenant.pod_uid not in known and tenant.memory_mib > 0]
    if strangers:
        memory = sum(tenant.memory_mib for tenant in strangers)
        pods = ", ".join(sorted(tenant.pod_uid for tenant in strangers))
        return Hindrance(STRANGER, f"{memory:,} MiB are used without a reservation, by pod {pods}")
    return None


def has_strangers(node: GpuNode) -> bool:
    """Whether pods use memory of a node's GPUs without a reservation there."""
    known = {reservation.pod_uid for reservation in node.spec.reservations}
    return any(tenant.pod_uid not in known and tenant.memory_mib for tenant in node.status.tenants)


def tells_nothing_new(node: GpuNode, seen: GpuNode, chosen: Collection[GpuUuid]) -> bool:
    """Whether a decision that was made on one state of a node holds for another.

    It does where it knew all that stands there now, and everybody whom it counted with is there: what was released on
    other GPUs since makes room, and forbids nothing.

    Args:
        node: The node as it is now.
        seen: As it was decided on, with all that was about to be written.
        chosen: The GPUs that were decided on.
    """
    was, now = seen.status, node.status
    # The generation alone does not tell them apart: it is a millisecond, in which a pod may be decided on twice.
    known = {r.pod_uid: (r.generation, r.gpu_uuids, r.mode, r.tenant) for r in seen.spec.reservations}
    here = {r.pod_uid for r in node.spec.reservations}
    gone = [r for r in seen.spec.reservations if r.pod_uid not in here]
    return (
        (seen.metadata.uid, was.devices, was.tenants) == (node.metadata.uid, now.devices, now.tenants)
        and all(known.get(r.pod_uid) == (r.generation, r.gpu_uuids, r.mode, r.tenant) for r in node.spec.reservations)
        and not any(uuid in chosen for r in gone for uuid in r.gpu_uuids)
        and not has_strangers(node)
    )
