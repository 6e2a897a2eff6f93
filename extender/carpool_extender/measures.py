"""Where what was measured of tenants counts in place of what was predicted of them, in words."""

from collections.abc import Mapping

from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import GpuUuid

from carpool_extender.measured import Known, known_of, promised, settled_tenants


def differences(node: GpuNode) -> Mapping[GpuUuid, str]:
    """Say of the GPUs of a node which of their tenants count with other figures than were predicted, by UUID."""
    settled, found = settled_tenants(node), {}
    for uuid in {uuid for _, uuid in settled}:
        held = [one for one in node.spec.reservations if uuid in one.gpu_uuids]
        measured = [settled.get((one.pod_uid, uuid)) for one in held]
        told = [
            said
            for one, of, known in zip(held, measured, known_of(held, measured), strict=True)
            if of is not None and (said := _of_one(one, known))
        ]
        if told:
            found[uuid] = f"counts as measured: {', '.join(told)}"
    return found


def _of_one(held: Reservation, known: Known) -> str:
    """Say what of a tenant is counted otherwise than predicted; nothing where that is the same in whole percents."""
    before, told = promised(held.tenant), []
    if known.memory_mib is not None and before.memory_mib is not None and known.memory_mib > before.memory_mib:
        told.append(f"{known.memory_mib:,} MiB, at most {before.memory_mib:,} MiB expected")
    for what, now, was in (("SM", known.sm, before.sm), ("utilization", known.util, before.util)):
        if f"{now:.0%}" != f"{was:.0%}":
            told.append(f"measured {what} {now:.0%}, predicted {was:.0%}")
    return f"{held.pod_namespace}/{held.job_name} ({'; '.join(told)})" if told else ""
