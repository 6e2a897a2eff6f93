"""GPUs of which a GpuNode tells what cannot all be true: nobody is sent there until it is clear."""

from collections.abc import Collection
from heapq import nsmallest

from carpool_core.resources.node import Device, GpuNode
from carpool_core.values import DeviceHealth, GpuUuid, SharingMode

from carpool_extender.state.rows import Said
from carpool_extender.state.standing import Hindrance

UNHEALTHY, STRANGER, CONTRADICTION, NONSENSE, DISPUTED, NO_MEMORY = 0, 3, 4, 5, 6, 7
"""Kinds of hindrances; the others are those of time, in `standing`."""
LEAST_MIB = 256
"""Memory that any job needs, in MiB: what a process takes of a GPU before it has stored anything there."""
MOST_NAMED = 3
"""Pods or nodes that a hindrance names."""
LONGEST_MESSAGE = 120
"""Characters of what others wrote that a hindrance repeats: it goes into the conditions of all pods that wait."""


def shortened(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Cut a text where it gets too long, and show that it was cut."""
    return text if len(text) <= longest else f"{text[: longest - 1].rstrip()}…"


def listed(names: Collection[str]) -> str:
    """Name the first few of some, and say how many more there are: `a`, `a and b`, `a, b, c and 37 more`."""
    first, more = nsmallest(MOST_NAMED, names), len(names) - MOST_NAMED
    *others, last = [*first, f"{more:,} more"] if more > 0 else first
    return f"{', '.join(others)} and {last}" if others else last


def doubt(said: Said) -> Hindrance | None:
    """Say why a GPU is left out; None where nothing speaks against it."""
    device, held = said.device, said.held
    if device.health is not DeviceHealth.HEALTHY:
        message = shortened(device.health_message)
        return Hindrance(UNHEALTHY, f"unhealthy: {message}" if message else "unhealthy")
    if said.is_told_twice:
        return Hindrance(CONTRADICTION, f"its node tells of several GPUs by the UUID {device.uuid}")
    if said.shares_index:
        return Hindrance(CONTRADICTION, f"its node tells of several GPUs by the index {device.index}")
    if device.memory_mib - device.reserved_mib < LEAST_MIB:
        return Hindrance(NO_MEMORY, _without_memory(device))
    modes = sorted({reservation.mode for reservation in held})
    if len(modes) > 1:
        return Hindrance(CONTRADICTION, f"its reservations contradict each other: {', '.join(modes)}")
    if len(held) > 1 and modes == [SharingMode.EXCLUSIVE]:
        return Hindrance(CONTRADICTION, f"its reservations contradict each other: {len(held)} are exclusive")
    known = {reservation.pod_uid for reservation in held}
    strangers = [tenant for tenant in said.seen if tenant.pod_uid not in known and tenant.memory_mib > 0]
    if strangers:
        memory = sum(tenant.memory_mib for tenant in strangers)
        pods = {tenant.pod_uid for tenant in strangers}
        who = f"{'pod' if len(pods) == 1 else 'pods'} {listed(pods)}"
        return Hindrance(STRANGER, f"{memory:,} MiB are used without a reservation, by {who}")
    return None


def _without_memory(device: Device) -> str:
    reserved = f", of which {device.reserved_mib:,} are reserved" if device.reserved_mib else ""
    return f"reports {device.memory_mib:,} MiB of memory{reserved}: expected at least {LEAST_MIB} MiB to give"


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
