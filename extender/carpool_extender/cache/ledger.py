"""The ledger of reservations of one GpuNode, as pure functions. Accepted reservations never exceed the capacity."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType

import msgspec
from carpool_core.clock import parse_rfc3339, rfc3339
from carpool_core.resources.node import Device, GpuNode, GpuNodeSpec, Reservation
from carpool_core.values import GpuUuid, PodUid, SharingMode, pluralize

from carpool_extender.cache.gpu_table import counted_mib, mig_capacity, mig_profile, mig_slices, needed_mib, peak_mib


@dataclass(frozen=True, slots=True)
class Rejected:
    """The ledger did not take a reservation; nothing has changed."""

    reason: str
    """The wanted and the free amount."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a node's GPUs."""

    devices: Mapping[GpuUuid, Device]
    slots: int
    """Most tenants of one GPU."""
    peaks: Mapping[tuple[PodUid, GpuUuid], int] = field(default_factory=dict)
    """The most memory that tenants were measured to take, in MiB."""

    def on(self, uuid: GpuUuid) -> dict[PodUid, int]:
        """Return the measured peaks of one GPU, by tenant."""
        return {pod: peak for (pod, gpu), peak in self.peaks.items() if gpu == uuid}


def capacity_of(node: GpuNode, slots: int) -> Capacity:
    """Collect what a node's agent reports."""
    peaks = {(tenant.pod_uid, tenant.gpu_uuid): peak_mib(tenant) for tenant in node.status.tenants}
    return Capacity({device.uuid: device for device in node.status.devices}, slots, peaks)


def held(spec: GpuNodeSpec, pod_uid: PodUid) -> Reservation | None:
    """Return a pod's reservation, if it has one here."""
    return next((r for r in spec.reservations if r.pod_uid == pod_uid), None)


def is_same(one: Reservation, other: Reservation) -> bool:
    """Return whether a pod's reservation is as it was: a later one, or one that a later bind took over, is not."""
    return (one.generation, one.deadline) == (other.generation, other.deadline)


def on_gpu(spec: GpuNodeSpec, uuid: GpuUuid) -> list[Reservation]:
    """Return the reservations of one GPU."""
    return [r for r in spec.reservations if uuid in r.gpu_uuids]


def promised_mib(
    reservations: list[Reservation], usable_mib: int, peaks: Mapping[PodUid, int] = MappingProxyType({})
) -> int:
    """Memory promised on one GPU, in MiB; at most the usable memory, which an unknown amount counts as.

    `peaks` are the largest measured memory of the pods there, in MiB. A peak counts only for a reservation that counts
    as measured, if the pod has exceeded that measurement since; the filters consider all other excess.
    """
    total = 0
    for one in reservations:
        peak = peaks.get(one.pod_uid, 0) if one.tenant.measured_mib is not None else 0
        total = min(usable_mib, total + counted_mib(one.tenant.counted_mib(peak), usable_mib))
    return total


def reserve(spec: GpuNodeSpec, wanted: Reservation, capacity: Capacity) -> GpuNodeSpec | Rejected:
    """Add a reservation. A pod that holds one already keeps it as it is: the answer is the same spec.

    This guards against a decision made on an outdated snapshot; it repeats the checks that protect a promise
    (memory, mode, places, namespace and user of an MPS server), and not those about taste (slowdown, tenancy).
    """
    if held(spec, wanted.pod_uid) is not None:
        return spec
    if len(set(wanted.gpu_uuids)) != len(wanted.gpu_uuids):
        return Rejected(f"expected different GPUs, found {', '.join(wanted.gpu_uuids)}")
    for uuid in wanted.gpu_uuids:
        refusal = _refusal(on_gpu(spec, uuid), wanted, capacity.devices.get(uuid), capacity)
        if refusal is not None:
            return Rejected(f"{uuid}: {refusal}")
    return msgspec.structs.replace(spec, reservations=[*spec.reservations, wanted])


def next_generation(node: GpuNode, pod_uid: PodUid, now: datetime) -> int:
    """Number a pod's reservation so that no earlier one of that pod has the number, nor any report about one.

    Milliseconds since 1970: reservations that were released leave nothing behind to count on from. Where the clock
    was ahead before, what the agent still reports of that pod does.
    """
    reported = max((p.generation for p in node.status.partitions if p.pod_uid == pod_uid), default=0)
    return max(int(now.timestamp() * 1000), reported + 1)


def release(spec: GpuNodeSpec, pod_uid: PodUid) -> GpuNodeSpec:
    """Remove a pod's reservation; return the same spec if it has none."""
    left = [r for r in spec.reservations if r.pod_uid != pod_uid]
    return spec if len(left) == len(spec.reservations) else msgspec.structs.replace(spec, reservations=left)


def take_over(spec: GpuNodeSpec, pod_uid: PodUid, timeout_s: float) -> GpuNodeSpec:
    """Move a reservation's deadline to twice the timeout after it was made: a later bind goes on with it.

    The bind that made it does not release it then. Its deadline moves once, so that no retry keeps it forever. The
    agent need not act, so its generation stays.
    """
    held = [_taken_over(r, timeout_s) if r.pod_uid == pod_uid else r for r in spec.reservations]
    return spec if held == spec.reservations else msgspec.structs.replace(spec, reservations=held)


def _taken_over(reservation: Reservation, timeout_s: float) -> Reservation:
    try:
        made = parse_rfc3339(reservation.reserved_at)
    except ValueError:
        return reservation
    return msgspec.structs.replace(reservation, deadline=rfc3339(made + timedelta(seconds=2 * timeout_s)))


def has_lapsed(reservation: Reservation, now: datetime, grace_s: float = 0.0) -> bool:
    """Return whether a reservation is past its deadline by more than a grace period, in seconds.

    The caller checks that the pod is not bound; a deadline means nothing after that. A reservation without a readable
    deadline never lapses.
    """
    try:
        deadline = parse_rfc3339(reservation.deadline)
    except ValueError:
        return False
    # Not `deadline + grace`, which does not exist at the end of the calendar.
    return now - deadline > timedelta(seconds=grace_s)


def _refusal(present: list[Reservation], wanted: Reservation, device: Device | None, capacity: Capacity) -> str | None:
    """Return why a GPU cannot take a reservation; None if it can."""
    if device is None:
        return "the node reports no such GPU"
    modes = {r.mode for r in present}
    if present and (modes != {wanted.mode} or wanted.mode is SharingMode.EXCLUSIVE):
        return f"wants it by {wanted.mode}, it is used by {', '.join(sorted(modes))}"
    others = {r.tenancy_domain for r in present} - {wanted.tenancy_domain}
    if wanted.mode is SharingMode.MPS and others:
        return f"its MPS server belongs to {', '.join(sorted(others))}"
    users = {r.run_as_user for r in present} - {None, wanted.run_as_user}
    if wanted.mode is SharingMode.MPS and wanted.run_as_user is not None and users:
        return f"its MPS server serves user {', '.join(map(str, sorted(users, key=str)))}, not {wanted.run_as_user}"
    if wanted.mode is SharingMode.MIG and (lacking := _no_instance(present, wanted, device)) is not None:
        return lacking
    if len(present) >= capacity.slots:
        return f"has {pluralize(len(present), 'tenant')}, the most allowed is {capacity.slots}"
    usable = max(0, device.memory_mib - device.reserved_mib)
    peaks = capacity.on(device.uuid)
    need = needed_mib(wanted.tenant.counted_mib(peaks.get(wanted.pod_uid, 0)), usable)
    free = usable - promised_mib(present, usable, peaks)
    if need > free:
        return f"needs {need:,} MiB, has {free:,} MiB free"
    return None


def _no_instance(present: list[Reservation], wanted: Reservation, device: Device) -> str | None:
    """Return why a MIG instance does not fit beside the present ones; None if it fits."""
    asked = mig_profile(wanted.mig_profile)
    if asked is None or wanted.mig_profile not in device.mig_profiles:
        return f"has no MIG profile {wanted.mig_profile}, only {', '.join(device.mig_profiles) or 'none'}"
    instances = [found for r in present if (found := mig_profile(r.mig_profile)) is not None]
    taken = [mig_slices(one, device.mig_profiles) for one in (*instances, asked)]
    memory, compute = mig_capacity(device.mig_profiles)
    if sum(slices for slices, _ in taken) > memory or sum(slices for _, slices in taken) > compute:
        return f"has no room for MIG instance {asked.name} beside {', '.join(i.name for i in instances)}"
    return None
