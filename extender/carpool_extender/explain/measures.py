"""Where what was measured of tenants counts in place of what was predicted of them, or will, in words."""

from collections.abc import Mapping

from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import GpuUuid

from carpool_extender.cache.usage import TenantUsage, counted_tenants, reserved_usage, usage_of


def differences(node: GpuNode) -> Mapping[GpuUuid, str]:
    """Say of the GPUs of a node which of their tenants count otherwise than promised, or will, by UUID."""
    counted, found = counted_tenants(node), {}
    for uuid in {uuid for one in node.spec.reservations for uuid in one.gpu_uuids}:
        held = [one for one in node.spec.reservations if uuid in one.gpu_uuids]
        measured = [counted.get((one.pod_uid, uuid)) for one in held]
        known = usage_of(held, measured)
        told = [said for one, of in zip(held, known, strict=True) if (said := _of_one(one, of))]
        parts = [f"counts as measured: {', '.join(told)}"] if told else []
        if later := [_open(one) for one in held if one.tenant.provisional and one.tenant.measured_mib is None]:
            parts.append(f"until their own peaks have stood still count {', '.join(later)}")
        if parts:
            found[uuid] = "; ".join(parts)
    return found


def _open(held: Reservation) -> str:
    memory = held.tenant.memory_mib
    return f"{held.pod_namespace}/{held.job_name} with {'the whole GPU' if memory is None else f'{memory:,} MiB'}"


def _of_one(held: Reservation, known: TenantUsage) -> str:
    """Say what of a tenant is counted otherwise than predicted; nothing where that is the same in whole percents."""
    before, told = reserved_usage(held.tenant), []
    counted, was = known.memory_mib, held.tenant.memory_mib
    if counted is not None and counted != was:
        at_most = "whole GPU" if was is None else f"at most {was:,} MiB"
        told.append(f"{counted:,} MiB, {at_most} expected")
    elif held.tenant.measured_mib is not None and counted != held.tenant.measured_mib:
        told.append(f"more than {held.tenant.measured_mib:,} MiB, as was measured before")
    for what, now, then in (("SM", known.sm, before.sm), ("utilization", known.util, before.util)):
        if f"{now:.0%}" != f"{then:.0%}":
            told.append(f"measured {what} {now:.0%}, predicted {then:.0%}")
    return f"{held.pod_namespace}/{held.job_name} ({'; '.join(told)})" if told else ""
