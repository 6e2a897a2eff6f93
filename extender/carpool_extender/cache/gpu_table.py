"""What decisions are made on: every GPU of the cluster as one row of arrays, at one moment."""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from carpool_core.products import DeviceClass
from carpool_core.resources.node import Device, GpuNode, Reservation, Tenant
from carpool_core.values import GpuUuid, PodUid, SharingMode, Tenancy
from carpool_predictor.models.slowdown import slowdowns
from numpy.typing import NDArray

from carpool_extender.cache.mig import profile_of
from carpool_extender.cache.usage import counted_tenants, epoch_seconds, usage_of

NOWHERE = -1
"""In `Grid.rows`: the node has no GPU more."""


class NodeGrid(NamedTuple):
    """The GPUs of some nodes."""

    rows: NDArray[np.intp]
    """(places, nodes) The first GPU of each node, then the second, and so on, by their rows; or NOWHERE."""
    node: NDArray[np.intp]
    """(nodes,) Index of each node."""
    has_gaps: bool
    """Whether a node has fewer GPUs than another."""

    def only(self, nodes: NDArray[np.bool_]) -> "NodeGrid":
        """Return some of the nodes; those that are not here have no GPUs.

        Args:
            nodes: Which, by their indices.
        """
        kept = np.flatnonzero(nodes.take(self.node))
        return NodeGrid(self.rows.take(kept, axis=1), self.node.take(kept), self.has_gaps)


def grid_of(alive: NDArray[np.bool_], node: NDArray[np.int32]) -> NodeGrid:
    """Put the GPUs of all nodes side by side.

    Args:
        alive: Whether a GPU has this row, shape (gpus,).
        node: Index of its node, same shape; rows of one node stand together.
    """
    rows = np.flatnonzero(alive)
    of = node.take(rows).astype(np.intp)
    is_first = np.ones(rows.size, np.bool_)
    np.not_equal(of[1:], of[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    run = is_first.cumsum() - 1
    place = np.arange(rows.size) - starts.take(run)
    grid = np.full((int(place.max(initial=-1)) + 1, starts.size), NOWHERE, np.intp)
    grid[place, run] = rows
    return NodeGrid(grid, of.take(starts), grid.size > rows.size)


MODES: tuple[SharingMode | None, ...] = (None, *SharingMode)
"""Sharing modes by their code in the `mode` columns; code 0 is an idle GPU, or no possible mode."""
NO_MODE = 0
CODES: Mapping[SharingMode, int] = {mode: code for code, mode in enumerate(MODES) if mode is not None}

NO_TENANT, MIXED = -1, -2
"""In `GpuTable.landlord`: the GPU is idle; its tenants come from several namespaces."""

Bools = NDArray[np.bool_]
Floats = NDArray[np.floating]
Rows = NDArray[np.intp]


Column = TypeVar("Column", bound=np.generic)


def some(column: NDArray[Column], rows: Rows | None) -> NDArray[Column]:
    """Return a column's values in some rows; the column itself, not copied, where None."""
    return column if rows is None else column.take(rows, axis=0)


def places(which: Bools) -> Rows:
    """Return where a mask of shape (rows,) holds, as `np.flatnonzero` does: of few rows in a third of its time."""
    return which.nonzero()[0]


class UnavailableReason(NamedTuple):
    """Why a GPU takes nobody at present."""

    kind: int
    """Equal for all GPUs whose sentences differ in nothing but numbers."""
    reason: str


class TenantName(NamedTuple):
    """Who stands behind one entry of a GPU's tenants, for sentences."""

    namespace: str
    job: str
    pod_uid: PodUid

    def __str__(self) -> str:
        return f"{self.namespace}/{self.job}"


def needed_mib(memory_mib: int | None, usable_mib: int) -> int:
    """Memory that a newcomer must find free on a GPU, in MiB: all of it where nothing is known.

    Everybody needs something, so that nobody stands beside a tenant that has the whole GPU. It may be more than the GPU
    has: then the newcomer does not fit, and the sentence that says so names the amount.
    """
    return usable_mib if memory_mib is None else max(1, memory_mib)


def counted_mib(memory_mib: int | None, usable_mib: int) -> int:
    """Memory to count for a tenant that is there, in MiB: the same, but never more than the GPU has."""
    return min(needed_mib(memory_mib, usable_mib), usable_mib)


def _of(dtype: type, *, each_tenant: bool = False, empty: object = 0) -> dict[str, Any]:
    """Describe a column: one value for each GPU, or one for each tenant of each GPU."""
    return {"dtype": dtype, "each_tenant": each_tenant, "empty": empty}


@dataclass(slots=True, eq=False)
class GpuTable:
    """The arrays, for G GPUs with room for T tenants each. Rows of one node stand together."""

    alive: Bools = field(metadata=_of(np.bool_))
    """(G,) False in rows that no GPU uses at present; the rest of such a row means nothing."""
    node: NDArray[np.int32] = field(metadata=_of(np.int32))
    """(G,) Index into `Snapshot.node_names`."""
    gpu_index: NDArray[np.int32] = field(metadata=_of(np.int32))
    """(G,) NVML's index on the node."""
    nvlink_domain: NDArray[np.int32] = field(metadata=_of(np.int32))
    """(G,) Number of its NVLink island on the node; a GPU without links is alone on one."""
    device_class: NDArray[np.intp] = field(metadata=_of(np.intp))
    """(G,) Index into `Snapshot.classes`."""
    usable_mib: NDArray[np.int64] = field(metadata=_of(np.int64))
    """(G,) Total memory less reserve."""
    unavailable: Bools = field(metadata=_of(np.bool_))
    """(G,) Whether `Snapshot.hindered` says why it takes nobody at this moment."""
    mode: NDArray[np.int8] = field(metadata=_of(np.int8))
    """(G,) Code of the mode that its reservations have; 0 without any."""
    prepared: NDArray[np.int8] = field(metadata=_of(np.int8))
    """(G,) Code of the mode that its agent has it in at present; 0 where it is in none."""
    count: NDArray[np.int16] = field(metadata=_of(np.int16))
    """(G,) Number of tenants; they stand in the first places of the (G, T) arrays."""
    mig_gb: NDArray[np.int16] = field(metadata=_of(np.int16))
    """(G,) GB that the MIG instances of its reservations take."""
    mig_slices: NDArray[np.int16] = field(metadata=_of(np.int16))
    """(G,) Slices that they take."""
    reserved_at: NDArray[np.float64] = field(metadata=_of(np.float64))
    """(G,) When its newest reservation was made, in seconds since 1970; 0 without any, or where none says."""
    uuid: NDArray[np.object_] = field(metadata=_of(np.object_, empty=""))
    """(G,) `GpuUuid`."""
    tenants: NDArray[np.object_] = field(metadata=_of(np.object_, empty=None))
    """(G,) Tuple of `TenantName`, in the order of the (G, T) arrays."""
    user: NDArray[np.int64] = field(metadata=_of(np.int64, empty=NO_TENANT))
    """(G,) User of its MPS server's clients; NO_TENANT where it has none or none of them says, or MIXED."""
    memory_mib: NDArray[np.int64] = field(metadata=_of(np.int64, each_tenant=True))
    """(G, T) Upper bound of its memory, at most the GPU's usable memory, which also stands for unknown."""
    util: NDArray[np.float32] = field(metadata=_of(np.float32, each_tenant=True))
    """(G, T) GPU utilization alone, 0..1."""
    sm: NDArray[np.float32] = field(metadata=_of(np.float32, each_tenant=True))
    """(G, T) SM activity alone, 0..1."""
    dram: NDArray[np.float32] = field(metadata=_of(np.float32, each_tenant=True))
    """(G, T) DRAM activity alone, 0..1."""
    max_slowdown: NDArray[np.float32] = field(metadata=_of(np.float32, each_tenant=True, empty=np.inf))
    """(G, T) Slowdown that it accepts; infinite where nobody is."""
    namespace: NDArray[np.int32] = field(metadata=_of(np.int32, each_tenant=True, empty=NO_TENANT))
    """(G, T) Index of its namespace, as in `Snapshot.namespaces`."""
    cluster_tenancy: Bools = field(metadata=_of(np.bool_, each_tenant=True))
    """(G, T) Whether it shares with other namespaces."""

    class_mode: NDArray[np.intp] = field(metadata=_of(np.intp))
    """(G,) Aggregate: class and mode in one number, the index of both into an array of shape (classes, modes)."""
    free_mib: NDArray[np.int64] = field(metadata=_of(np.int64))
    """(G,) Aggregate: memory that nobody was promised, never negative; none beside an exclusive tenant."""
    sm_active: NDArray[np.float64] = field(metadata=_of(np.float64))
    """(G,) Aggregate: SM activity of all tenants together; may exceed 1."""
    dram_active: NDArray[np.float64] = field(metadata=_of(np.float64))
    """(G,) Aggregate: the same of DRAM activity."""
    existing_slowdown: NDArray[np.float64] = field(metadata=_of(np.float64))
    """(G,) Aggregate: number of its tenants less the sum of their predicted slowdowns; what they lose, negated."""
    min_slowdown_limit: NDArray[np.float64] = field(metadata=_of(np.float64, empty=np.inf))
    """(G,) Aggregate: the least slowdown that one of its tenants accepts; infinite without any."""
    tenant_namespace: NDArray[np.int32] = field(metadata=_of(np.int32, empty=NO_TENANT))
    """(G,) Aggregate: the namespace of all tenants; NO_TENANT, or MIXED."""

    def resized(self, gpus: int, tenants: int) -> "GpuTable":
        """Return a copy with more rows and more room for tenants; what is new is empty."""
        larger = empty_table(gpus, tenants)
        for name in _NAMES:
            array = getattr(self, name)
            getattr(larger, name)[tuple(slice(0, n) for n in array.shape)] = array
        return larger

    def take(self, rows: Rows) -> "GpuTable":
        """Return copies of some rows."""
        return GpuTable(*[getattr(self, name).take(rows, axis=0) for name in _NAMES])

    def shown(self, gpus: int) -> "GpuTable":
        """Return the first rows, without copying; they cannot be written through what is returned."""
        parts = [getattr(self, name)[:gpus] for name in _NAMES]
        for part in parts:
            part.flags.writeable = False
        return GpuTable(*parts)


_NAMES = tuple(column.name for column in fields(GpuTable))


def empty_table(gpus: int, tenants: int) -> GpuTable:
    """Return columns of G rows, none of them alive, with room for T tenants each."""
    made: dict[str, NDArray[Any]] = {}
    for column in fields(GpuTable):
        shape = (gpus, tenants) if column.metadata["each_tenant"] else (gpus,)
        made[column.name] = np.full(shape, column.metadata["empty"], column.metadata["dtype"])
    return GpuTable(**made)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The cluster at one moment. It holds until the cluster changes: decide on it without waiting for anything."""

    gpus: GpuTable
    grid: NodeGrid
    """All GPUs, by their nodes."""
    node_names: Sequence[str]
    node_ids: Mapping[str, int]
    """Index into `node_names` by name, of nodes that exist; a node that comes may get the index of one that went."""
    classes: Sequence[DeviceClass]
    """By number; what stands at a number that no GPU has means nothing."""
    class_ids: Mapping[DeviceClass, int]
    """Index into `classes` of those of which there are GPUs."""
    namespaces: Mapping[str, int]
    """Index of each namespace that has a tenant."""
    unavailable: Mapping[int, UnavailableReason]
    """Why GPUs take nobody at this moment, by row: unhealthy, in doubt, silent, or left alone for a while."""

    def ids(self, names: Sequence[str]) -> Rows:
        """Return the indices of nodes; -1 for those that never reported GPUs."""
        return np.fromiter(map(self.node_ids.get, names, repeat(-1)), np.intp, len(names))

    def rows_of(self, ids: Rows) -> Rows:
        """Return the rows of the GPUs of some nodes, in rising order; none for an index of -1."""
        wanted = np.zeros(len(self.node_names) + 1, np.bool_)
        wanted[ids] = True
        wanted[-1] = False
        return np.flatnonzero(self.gpus.alive & wanted[self.gpus.node])

    def product(self, row: int) -> str:
        """Return the product of one GPU."""
        return self.classes[int(self.gpus.device_class[row])].product

    def place(self, row: int) -> str:
        """Name one GPU for people: `GPU 0 of node-a`."""
        return f"GPU {int(self.gpus.gpu_index[row])} of {self.node_names[int(self.gpus.node[row])]}"


INDEX = attrgetter("index")
N = TypeVar("N", bound=Hashable)


class GpuReport(NamedTuple):
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


def said_of(told: Told, among: Collection[GpuUuid] | None = None) -> list[GpuReport]:
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
            found.append(GpuReport(place, device, here, counted, seen.get(device.uuid, []), *doubles))
    return found


def write_device(columns: GpuTable, row: int, device: Device, kind: DeviceClass, *, of: tuple[int, int]) -> None:
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


def write_tenants(columns: GpuTable, row: int, said: GpuReport, namespaces: Mapping[str, int]) -> None:
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
    columns.reserved_at[row] = max((epoch_seconds(r.reserved_at) for r in held), default=0.0)
    columns.tenants[row] = tuple(TenantName(r.pod_namespace, r.job_name, r.pod_uid) for r in held)
    users = {r.run_as_user for r in held if r.mode is SharingMode.MPS and r.run_as_user is not None}
    columns.user[row] = MIXED if len(users) > 1 else next(iter(users), NO_TENANT)
    for place, (reservation, of) in enumerate(zip(held, usage_of(held, said.counted), strict=True)):
        tenant = reservation.tenant
        columns.memory_mib[row, place] = counted_mib(of.memory_mib, usable_mib)
        columns.util[row, place] = of.util
        columns.sm[row, place] = of.sm
        columns.dram[row, place] = of.dram
        columns.max_slowdown[row, place] = tenant.max_slowdown
        columns.namespace[row, place] = namespaces[reservation.pod_namespace]
        columns.cluster_tenancy[row, place] = tenant.tenancy is Tenancy.CLUSTER


def _empty(columns: GpuTable, row: int, places: slice) -> None:
    """Write that nobody has some places of a GPU any more."""
    for emptied in (columns.memory_mib, columns.util, columns.sm, columns.dram, columns.cluster_tenancy):
        emptied[row, places] = 0
    columns.namespace[row, places] = NO_TENANT
    columns.max_slowdown[row, places] = np.inf


def nvlink_domains(devices: Sequence[Device]) -> list[int]:
    """Number the islands: GPUs with equal numbers are linked, directly or by way of others.

    Args:
        devices: The GPUs of one node.

    Returns:
        The island of each, by its first member's place; a GPU without links is an island of its own.
    """
    place = {device.uuid: number for number, device in enumerate(devices)}
    found = list(range(len(devices)))
    for number, device in enumerate(devices):
        for peer in device.nvlink_peers:
            if peer in place:
                low, high = sorted((found[number], found[place[peer]]))
                found = [low if island == high else island for island in found]
    return found


EXCLUSIVE = CODES[SharingMode.EXCLUSIVE]
SHARED = ((CODES[SharingMode.TIME_SLICING], SharingMode.TIME_SLICING), (CODES[SharingMode.MPS], SharingMode.MPS))
"""Modes in which tenants slow each other down, by code."""


def update_aggregates(columns: GpuTable, rows: Rows) -> None:
    """Fill in the aggregates of some rows.

    Args:
        columns: They are written.
        rows: Which, shape (rows,).
    """
    promised = np.add.reduce(columns.memory_mib.take(rows, axis=0), axis=1)
    how, count, namespace = columns.mode[rows], columns.count[rows], columns.namespace.take(rows, axis=0)
    columns.class_mode[rows] = columns.device_class[rows] * len(MODES) + how
    free = np.maximum(0, columns.usable_mib[rows] - promised)
    columns.free_mib[rows] = np.where(how == EXCLUSIVE, 0, free)
    columns.sm_active[rows] = np.add.reduce(columns.sm.take(rows, axis=0), axis=1, dtype=np.float64)
    columns.dram_active[rows] = np.add.reduce(columns.dram.take(rows, axis=0), axis=1, dtype=np.float64)
    first, nobody = namespace[:, 0], np.arange(namespace.shape[1]) >= count[:, None]
    columns.min_slowdown_limit[rows] = np.minimum.reduce(columns.max_slowdown.take(rows, axis=0), axis=1)
    columns.tenant_namespace[rows] = np.where(count == 0, NO_TENANT, first)
    columns.existing_slowdown[rows] = 0.0
    several = count > 1
    if not several.any():
        return
    is_mixed = np.logical_or.reduce((namespace != first[:, None]) & ~nobody, axis=1)
    columns.tenant_namespace[rows[is_mixed]] = MIXED
    for code, mode in SHARED:
        mine = rows[(how == code) & several]
        for tenants in np.flatnonzero(np.bincount(columns.count[mine])).tolist():
            part = mine[columns.count[mine] == tenants]
            util, sm, dram = (a[part, :tenants] for a in (columns.util, columns.sm, columns.dram))
            columns.existing_slowdown[part] = tenants - slowdowns(mode, util, sm, dram).sum(axis=1)
