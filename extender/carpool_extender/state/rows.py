"""What a GpuNode says of each of its GPUs, and how that becomes a row of the arrays."""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np
from carpool_core.deviceclass import DeviceClass
from carpool_core.resources.node import Device, GpuNode, Reservation, Tenant
from carpool_core.values import GpuUuid, PodUid, SharingMode, Tenancy

from carpool_extender.state.measured import counted_tenants, known_of, seconds
from carpool_extender.state.mig import profile_of
from carpool_extender.state.view import CODES, NO_MODE, NOBODY, SEVERAL, Columns, TenantName, counted_mib

INDEX = attrgetter("index")
N = TypeVar("N", bound=Hashable)


class Said(NamedTuple):
    """What a GpuNode says of one GPU: two rows that are said alike are written alike."""

    place: int
    """The GPU's place among the node's, by their index."""
    device: Device
    held: list[Reservation]
    """Its reservations."""
    counted: list[Tenant | None]
    """What counts of what was measured of whoever has each of them."""
    seen: list[Tenant]
    """Everybody of whom something was measured there."""
    is_told_twice: bool
    """Whether the node tells of several GPUs by this UUID."""
    shares_index: bool
    """Whether it tells of several GPUs by this index."""


class Told(NamedTuple):
    """A GpuNode, with what follows from it as a whole."""

    node: GpuNode
    counted: Mapping[tuple[PodUid, GpuUuid], Tenant]
    """What counts of its measures."""
    twice: frozenset[GpuUuid]
    """UUIDs by which it tells of several GPUs."""
    indices: frozenset[int]
    """Indices by which it tells of several GPUs."""


def told_by(node: GpuNode) -> Told:
    """Work out what follows from a node as a whole."""
    devices = node.status.devices
    uuids, indices = _repeated([device.uuid for device in devices]), _repeated([device.index for device in devices])
    return Told(node, counted_tenants(node), uuids, indices)


def _repeated(names: Sequence[N]) -> frozenset[N]:
    """Return what stands there more than once."""
    if len(set(names)) == len(names):  # as nearly always, and counting takes several times as long
        return frozenset()
    return frozenset(name for name, count in Counter(names).items() if count > 1)


def touched(before: Told, now: Told) -> frozenset[GpuUuid] | None:
    """Return the GPUs of which two states of a node may say different things; None where that may be any."""
    was, status = before.node.status, now.node.status
    if was is not status and was.devices != status.devices:
        return None
    found: set[GpuUuid] = set()
    if before.node.spec is not now.node.spec:
        old, new = ({one.pod_uid: one for one in told.node.spec.reservations} for told in (before, now))
        different = [one for uid, one in new.items() if old.get(uid) != one]
        different += [one for uid, one in old.items() if new.get(uid) != one]
        found.update(*(one.gpu_uuids for one in different))
    if was is not status:
        if was.tenants != status.tenants:
            seen = ({(one.pod_uid, one.gpu_uuid): one for one in of.tenants} for of in (was, status))
            found |= _apart(*seen)
        if before.counted != now.counted:
            found |= _apart(before.counted, now.counted)
    return frozenset(found)


def _apart(
    one: Mapping[tuple[PodUid, GpuUuid], Tenant], other: Mapping[tuple[PodUid, GpuUuid], Tenant]
) -> set[GpuUuid]:
    """Return the GPUs of which two collections of measures differ."""
    return {gpu for pod, gpu in one.keys() | other.keys() if one.get((pod, gpu)) != other.get((pod, gpu))}


def said_of(told: Told, among: Collection[GpuUuid] | None = None) -> list[Said]:
    """Return what a node says of its GPUs, by their index.

    Args:
        told: The node.
        among: The GPUs in question; all when None.
    """
    node, measured, twice, indices = told
    held: dict[GpuUuid, list[Reservation]] = {}
    for reservation in node.spec.reservations:
        for uuid in reservation.gpu_uuids:
            if among is None or uuid in among:
                held.setdefault(uuid, []).append(reservation)
    seen: dict[GpuUuid, list[Tenant]] = {}
    for tenant in node.status.tenants:
        if among is None or tenant.gpu_uuid in among:
            seen.setdefault(tenant.gpu_uuid, []).append(tenant)
    found = []
    for place, device in enumerate(sorted(node.status.devices, key=INDEX)):
        if among is None or device.uuid in among:
            here = held.get(device.uuid, [])
            counted: list[Tenant | None] = [None] * len(here)
            if measured:
                counted = [measured.get((r.pod_uid, device.uuid)) for r in here]
            doubles = device.uuid in twice, device.index in indices
            found.append(Said(place, device, here, counted, seen.get(device.uuid, []), *doubles))
    return found


def write_device(columns: Columns, row: int, device: Device, kind: DeviceClass, *, of: tuple[int, int]) -> None:
    """Write what a GPU is.

    Args:
        columns: They are written.
        row: Which.
        device: The GPU.
        kind: Its class.
        of: Numbers of its node and of its class.
    """
    columns.alive[row] = True
    columns.node[row], columns.device_class[row] = of
    columns.gpu_index[row] = device.index
    columns.usable_mib[row] = kind.usable_mib
    columns.prepared[row] = NO_MODE if device.mode is None else CODES[device.mode]
    columns.uuid[row] = device.uuid


def write_tenants(columns: Columns, row: int, said: Said, namespaces: Mapping[str, int]) -> None:
    """Write who has a GPU; the row says already what it is.

    Args:
        columns: They are written.
        row: Which.
        said: What the node says of the GPU.
        namespaces: Number of each namespace.
    """
    usable_mib, held = int(columns.usable_mib[row]), said.held
    instances = [found for r in held if (found := profile_of(r.mig_profile)) is not None]
    columns.mig_gb[row] = sum(instance.gb for instance in instances)
    columns.mig_slices[row] = sum(instance.slices for instance in instances)
    columns.mode[row] = CODES[held[0].mode] if held else NO_MODE
    if (before := int(columns.count[row])) > len(held):
        _empty(columns, row, slice(len(held), before))
    columns.count[row] = len(held)
    columns.reserved_at[row] = max((seconds(r.reserved_at) for r in held), default=0.0)
    columns.tenants[row] = tuple(TenantName(r.pod_namespace, r.job_name, r.pod_uid) for r in held)
    users = {r.run_as_user for r in held if r.mode is SharingMode.MPS and r.run_as_user is not None}
    columns.user[row] = SEVERAL if len(users) > 1 else next(iter(users), NOBODY)
    for place, (reservation, of) in enumerate(zip(held, known_of(held, said.counted), strict=True)):
        tenant = reservation.tenant
        columns.memory_mib[row, place] = counted_mib(of.memory_mib, usable_mib)
        columns.util[row, place] = of.util
        columns.sm[row, place] = of.sm
        columns.dram[row, place] = of.dram
        columns.max_slowdown[row, place] = tenant.max_slowdown
        columns.namespace[row, place] = namespaces[reservation.pod_namespace]
        columns.cluster_tenancy[row, place] = tenant.tenancy is Tenancy.CLUSTER


def _empty(columns: Columns, row: int, places: slice) -> None:
    """Write that nobody has some places of a GPU any more."""
    for emptied in (columns.memory_mib, columns.util, columns.sm, columns.dram, columns.cluster_tenancy):
        emptied[row, places] = 0
    columns.namespace[row, places] = NOBODY
    columns.max_slowdown[row, places] = np.inf
