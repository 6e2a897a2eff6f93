"""What the agent writes into `GpuNode.status`. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import datetime
from operator import attrgetter
from typing import Literal

import msgspec
from carpool_core.clock import rfc3339
from carpool_core.resources.meta import Condition
from carpool_core.resources.node import (
    MAX_STRUCK,
    Device,
    GpuNodeStatus,
    NodeSummary,
    Partition,
    Reservation,
    Struck,
    Tenant,
)
from carpool_core.values import DeviceHealth, GpuUuid, PartitionState, PodUid

from carpool_deviceplugin.partitions.worker import FAILED, PREPARING, READY, Outcome

_LONGEST, _LONGEST_CONDITION, _LONGEST_COLUMN, _LONGEST_UID = 4096, 32_768, 512, 253
_MOST_TENANTS = 1024
_BY_GPU = attrgetter("gpu_uuid", "pod_uid")
_LARGEST = 1e12
"""In whatever unit: beyond all that a GPU could be measured to do."""


def partition_of(reservation: Reservation, outcomes: Mapping[GpuUuid, Mapping[PodUid, Outcome]]) -> Partition:
    """Join what the GPUs of one reservation say: ready when all are, failed when one is.

    Args:
        reservation: The reservation.
        outcomes: Of each GPU of the node, by pod.
    """

    def answer(state: PartitionState, message: str = "") -> Partition:
        return Partition(
            pod_uid=reservation.pod_uid, generation=reservation.generation, state=state, message=message[:_LONGEST]
        )

    absent = [uuid for uuid in reservation.gpu_uuids if uuid not in outcomes]
    if absent:
        return answer(FAILED, f"expected a GPU out of {', '.join(outcomes) or 'none'}, found {', '.join(absent)}")
    found = [outcomes[uuid].get(reservation.pod_uid) for uuid in reservation.gpu_uuids]
    current = [o for o in found if o is not None and o.generation == reservation.generation]
    failed = [o.message for o in current if o.state is FAILED]
    if failed:
        return answer(FAILED, "; ".join(failed))
    if len(current) == len(found) and all(o.state is READY for o in current):
        return answer(READY, "; ".join(dict.fromkeys(o.message for o in current if o.message)))
    return answer(PREPARING, "; ".join(dict.fromkeys(o.message for o in current if o.message)))


def ready_condition(devices: Sequence[Device], before: Iterable[Condition], now: datetime) -> Condition:
    """Say whether new work may go to the node's GPUs; the time is that of the last change."""
    sick = [d for d in devices if d.health is DeviceHealth.UNHEALTHY]
    status: Literal["True", "False"] = "True" if len(sick) < len(devices) else "False"
    reason = "GpusHealthy" if not sick else "SomeGpusUnhealthy" if status == "True" else "NoHealthyGpu"
    message = f"{len(devices) - len(sick)} of {len(devices)} GPUs are healthy"
    if sick:
        message += ": " + "; ".join(d.health_message for d in sick)
    old = next((c for c in before if c.type == "Ready"), None)
    since = old.last_transition_time if old and old.status == status else rfc3339(now)
    return Condition(
        type="Ready",
        status=status,
        reason=reason,
        message=message[:_LONGEST_CONDITION],
        last_transition_time=since,
    )


def brief(device: Device) -> Device:
    """Cut what is said of a GPU's health: a tenant may have had its say in it, and the status is written whole."""
    return msgspec.structs.replace(device, health_message=device.health_message[:_LONGEST])


def struck_of(ended: Iterable[Mapping[PodUid, str]]) -> list[Struck]:
    """List the pods that faults have ended together, of all GPUs."""
    told = {pod: why for of_gpu in ended for pod, why in of_gpu.items()}
    return [Struck(pod_uid=pod, message=why[:_LONGEST]) for pod, why in sorted(told.items())][:MAX_STRUCK]


def summarise(devices: Sequence[Device], partitions: Iterable[Partition]) -> NodeSummary:
    """Return the columns of `kubectl get gpn`."""
    products = Counter(d.product for d in devices)
    sizes = dict.fromkeys(f"{d.memory_mib / 1024:.0f} GiB" for d in devices)
    return NodeSummary(
        gpus=", ".join(f"{count}x {product}" for product, count in products.items())[:_LONGEST_COLUMN],
        healthy=sum(d.health is DeviceHealth.HEALTHY for d in devices),
        tenants=sum(p.state is READY for p in partitions),
        memory=", ".join(sizes),
    )


def presentable(tenants: Iterable[Tenant], reserved: Set[PodUid]) -> tuple[list[Tenant], list[str]]:
    """Leave out what no reader would accept, or what no machine can have: one tenant must not keep others waiting.

    Args:
        tenants: As measured.
        reserved: Pods with a reservation; they come first where there are too many.

    Returns:
        The tenants that can be written, and for each other one why it was left out.
    """
    fine: list[Tenant] = []
    left_out: list[str] = []
    tenants = list(tenants)
    if len(tenants) <= _MOST_TENANTS and not _unpresentable(tenants):  # as ever: one look at all of them
        return sorted(tenants, key=_BY_GPU), []
    for tenant in sorted(tenants, key=lambda t: t.pod_uid not in reserved):
        if why := "too many tenants" if len(fine) >= _MOST_TENANTS else _unpresentable([tenant]):
            left_out.append(f"{tenant.pod_uid[:64]!a} on {tenant.gpu_uuid}: {why}")
        else:
            fine.append(tenant)
    return sorted(fine, key=_BY_GPU), left_out


def above_limit(tenants: Iterable[Tenant], reservations: Iterable[Reservation]) -> dict[tuple[PodUid, GpuUuid], str]:
    """Say which tenants take more of a GPU than their reservations allow.

    MPS holds each process to the limit, while the ledger counts it once for the pod: a pod of several processes can
    take what was promised to others.
    """
    limits = {r.pod_uid: (r.memory_limit_mib, f"{r.pod_namespace}/{r.pod_name}") for r in reservations}
    found: dict[tuple[PodUid, GpuUuid], str] = {}
    for tenant in tenants:
        limit, name = limits.get(tenant.pod_uid, (None, ""))
        if limit is not None and tenant.memory_mib > limit:
            found[tenant.pod_uid, tenant.gpu_uuid] = (
                f"expected all processes of {name} to take at most {limit:,} MiB together, found {tenant.memory_mib:,} "
                "MiB; run fewer processes in the pod, or raise spec.memory.limit"
            )
    return found


def _unpresentable(tenants: Sequence[Tenant]) -> str:
    for tenant in tenants:
        measures = (tenant.gpu_util_percent, tenant.sm_active_ratio, tenant.power_w, tenant.step_time_seconds)
        if not all(m is None or 0 <= m <= _LARGEST for m in measures):
            return f"expected measures from 0 to {_LARGEST:g}, found {measures}"
        if max(tenant.memory_mib, tenant.peak_memory_mib) > _LARGEST or len(tenant.pod_uid) > _LONGEST_UID:
            return f"expected a UID and at most {_LARGEST:g} MiB, found {tenant.peak_memory_mib} MiB"
    try:
        msgspec.json.decode(msgspec.json.encode(tenants), type=list[Tenant])
    except (msgspec.ValidationError, UnicodeEncodeError) as e:
        return str(e)
    return ""


def as_patch(status: GpuNodeStatus) -> dict[str, object]:
    """Return the merge patch that makes the status just this one: what is empty is written out as empty."""
    body: dict[str, object] = {"simulated": False}
    body |= {name: [] for name in ("devices", "partitions", "tenants", "struck", "conditions")}
    body |= msgspec.to_builtins(status)
    return {"status": body}
