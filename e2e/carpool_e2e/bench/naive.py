"""The baseline: an extender as it is written first, a loop over nodes, GPUs and tenants for every request."""

from collections.abc import Sequence

from carpool_core.resources.node import Device, GpuNode, Reservation
from carpool_core.values import DeviceHealth, SharingMode

from carpool_e2e.bench.world import NAMESPACE, Shape

_SLOTS, _MOST_SM, _MAX_SLOWDOWN = 8, 0.8, 1.5


def filter_and_prioritize(nodes: Sequence[GpuNode], newcomer: Shape) -> tuple[list[str], dict[str, int]]:
    """Return which nodes have room, and a score for each; checks memory, mode, tenancy and slowdown of each GPU."""
    costs: dict[str, float] = {}
    for node in nodes:
        by_gpu: dict[str, list[Reservation]] = {}
        for held in node.spec.reservations:
            for uuid in held.gpu_uuids:
                by_gpu.setdefault(uuid, []).append(held)
        found = [
            cost
            for device in node.status.devices
            if (cost := _cost(device, by_gpu.get(device.uuid, []), newcomer)) is not None
        ]
        if found:
            costs[node.metadata.name] = min(found)
    if not costs:
        return [], {}
    most = max(costs.values()) or 1.0
    return list(costs), {name: round(10 * (1 - cost / most)) for name, cost in costs.items()}


def _cost(device: Device, tenants: list[Reservation], newcomer: Shape) -> float | None:
    """Slowdown that a newcomer would bring; None where it has no room."""
    if device.health is not DeviceHealth.HEALTHY or len(tenants) >= _SLOTS:
        return None
    usable = device.memory_mib - device.reserved_mib
    if (
        sum(usable if t.tenant.memory_mib is None else t.tenant.memory_mib for t in tenants) + newcomer.memory_mib
        > usable
    ):
        return None
    if any(t.pod_namespace != NAMESPACE for t in tenants):
        return None
    added = 0.0
    if tenants and tenants[0].mode is SharingMode.EXCLUSIVE:
        return None
    joint = newcomer.sm + sum(t.tenant.sm_active_ratio for t in tenants)
    busy = newcomer.util + sum(t.tenant.gpu_util_percent / 100 for t in tenants)
    for util, sm in [
        (newcomer.util, newcomer.sm),
        *((t.tenant.gpu_util_percent / 100, t.tenant.sm_active_ratio) for t in tenants),
    ]:
        takes_turns = bool(tenants) and tenants[0].mode is SharingMode.TIME_SLICING
        slowdown = 1 + util * (busy - util if takes_turns else max(0.0, joint - max(_MOST_SM, sm)))
        if slowdown > _MAX_SLOWDOWN:
            return None
        added += slowdown - 1
    return added
