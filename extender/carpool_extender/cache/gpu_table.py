"""The GPUs of the cluster as arrays, one row per GPU: values, views, and how rows are written from a GpuNode."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from carpool_core.clock import parse_rfc3339
from carpool_core.kube.nodes import Node, NodeConstraints
from carpool_core.products import DeviceClass
from carpool_core.resources.node import Device, GpuNode, Reservation, Tenant, TenantProfile
from carpool_core.values import GpuUuid, PodUid, SharingMode, Tenancy
from carpool_predictor.models.slowdown import TenantActivity, is_saturated, slowdowns
from msgspec import structs
from numpy.typing import NDArray

NOWHERE = -1
"""In `NodeGrid.rows`: the node has no further GPU."""


class NodeGrid(NamedTuple):
    """The GPUs of some nodes, side by side."""

    rows: NDArray[np.intp]
    """(places, nodes) Row of the first GPU of each node, then of the second, and so on; NOWHERE if there is none."""
    node: NDArray[np.intp]
    """(nodes,) Index of each node."""
    has_gaps: bool
    """Whether a node has fewer GPUs than another."""

    def only(self, nodes: NDArray[np.bool_]) -> "NodeGrid":
        """Return the part of the grid for some nodes, given as a mask over the indices of nodes."""
        kept = np.flatnonzero(nodes.take(self.node))
        return NodeGrid(self.rows.take(kept, axis=1), self.node.take(kept), self.has_gaps)


def grid_of(alive: NDArray[np.bool_], node: NDArray[np.int32]) -> NodeGrid:
    """Return the GPUs of all nodes side by side.

    Args:
        alive: Whether a GPU uses the row, shape (gpus,).
        node: Index of its node, same shape; rows of one node are adjacent.
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
EXCLUSIVE = CODES[SharingMode.EXCLUSIVE]
SHARED = ((CODES[SharingMode.TIME_SLICING], SharingMode.TIME_SLICING), (CODES[SharingMode.MPS], SharingMode.MPS))
"""Modes in which tenants slow each other down, by code."""
NO_TENANT, MIXED = -1, -2
"""In `GpuTable.tenant_namespace`: the GPU is idle; its tenants come from several tenancy domains."""

Bools = NDArray[np.bool_]
Floats = NDArray[np.floating]
Rows = NDArray[np.intp]
Column = TypeVar("Column", bound=np.generic)


def some(column: NDArray[Column], rows: Rows | None) -> NDArray[Column]:
    """Return a column's values in some rows; the column itself, not copied, if None."""
    return column if rows is None else column.take(rows, axis=0)


def places(which: Bools) -> Rows:
    """Return the indices where a mask of shape (rows,) is true; a third of the time of `np.flatnonzero`."""
    return which.nonzero()[0]


class UnavailableReason(NamedTuple):
    """Why a GPU takes no job at present."""

    kind: int
    """Equal for all GPUs whose sentences differ only in numbers and names."""
    reason: str


class TenantName(NamedTuple):
    """Name of a tenant, for sentences."""

    namespace: str
    job: str
    pod_uid: PodUid

    def __str__(self) -> str:
        return f"{self.namespace}/{self.job}"


def needed_mib(memory_mib: int | None, usable_mib: int) -> int:
    """Return the free memory that an incoming pod needs on a GPU, in MiB; all of the GPU's if unknown, at least 1.

    It may exceed the GPU's memory: then the pod does not fit, and the refusal names the amount.
    """
    return usable_mib if memory_mib is None else max(1, memory_mib)


def counted_mib(memory_mib: int | None, usable_mib: int) -> int:
    """Return the memory that counts for a present tenant, in MiB: as `needed_mib`, but at most what the GPU has."""
    return min(needed_mib(memory_mib, usable_mib), usable_mib)


# --- MIG profiles ----------------------------------------------------------------------------------------------------

_PROFILE_NAME = re.compile(r"(?P<slices>[1-9][0-9]?)g\.(?P<gb>[1-9][0-9]{0,3})gb")
MIB_OF_A_GB = 890
"""Memory that an instance has at least for each GB of its profile's name, in MiB; the least is 896 (H200)."""


class MigProfile(NamedTuple):
    """A kind of MIG instance. Profiles with media engines and of compute instances are never placed."""

    gb: int
    slices: int
    name: str

    @property
    def memory_mib(self) -> int:
        """Memory that it has at least, in MiB."""
        return self.gb * MIB_OF_A_GB


def mig_profile(name: str | None) -> MigProfile | None:
    """Parse a profile's name, such as `2g.10gb`; return None for a profile that is never placed."""
    found = _PROFILE_NAME.fullmatch(name or "")
    return None if found is None else MigProfile(int(found["gb"]), int(found["slices"]), name or "")


def mig_profiles(names: Iterable[str]) -> list[MigProfile]:
    """Return those of a GPU's profiles that can be placed, the smallest first."""
    return sorted(found for name in names if (found := mig_profile(name)) is not None)


def smallest_mig_profile(names: Iterable[str], need_mib: int | None, sm_active: float) -> MigProfile | None:
    """Return the smallest profile that holds a job and has enough SMs; the largest of those that hold it otherwise.

    Args:
        names: The GPU's profiles.
        need_mib: Upper bound of the job's memory; if None, the largest profile is returned.
        sm_active: Share of the whole GPU's SMs that the job fills, 0..1.
    """
    profiles = mig_profiles(names)
    if not profiles or need_mib is None:
        return profiles[-1] if profiles else None
    most = max(profile.slices for profile in profiles)
    large = [profile for profile in profiles if profile.memory_mib >= need_mib]
    wide = [profile for profile in large if profile.slices >= sm_active * most]
    return next(iter([*wide, *large[-1:]]), None)


def mig_capacity(names: Iterable[str]) -> tuple[int, int]:
    """Return how many memory slices and compute slices a GPU with these profiles has; (0, 0) without any."""
    slices = max((p.slices for p in mig_profiles(names)), default=0)
    return (8 if slices == 7 else slices), slices


def mig_slices(profile: MigProfile, names: Iterable[str]) -> tuple[int, int]:
    """Return how many memory slices and compute slices an instance takes of a GPU with these profiles.

    The GB of names are rounded: four times `1g.24gb` have more of them than the GPU's `7g.94gb`, and take its 8 slices.
    """
    names = list(names)
    memory_slices, _ = mig_capacity(names)
    most_gb = max((p.gb for p in mig_profiles(names)), default=profile.gb)
    return max(1, round(profile.gb * memory_slices / most_gb)), profile.slices


# --- Memory and activity of tenants ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """Memory and activity that count for one tenant of one GPU."""

    memory_mib: int | None
    """The reserved bound, or the measured peak if that is larger or replaces it; None if unknown."""
    util: float
    """GPU utilization alone, 0..1."""
    sm: float
    """SM activity alone, 0..1."""
    dram: float
    """DRAM activity alone, 0..1."""


def counted_tenants(node: GpuNode) -> Mapping[tuple[PodUid, GpuUuid], Tenant]:
    """Return the measurements of a node that count, by pod and GPU: memory at once, activity once settled."""
    if not node.status.tenants:
        return {}
    reserved = {reservation.pod_uid for reservation in node.spec.reservations}
    return {
        (tenant.pod_uid, tenant.gpu_uuid): tenant
        if tenant.settled
        else structs.replace(tenant, gpu_util_percent=None, sm_active_ratio=None)
        for tenant in node.status.tenants
        if tenant.pod_uid in reserved
    }


def usage_of(reservations: Sequence[Reservation], measured: Sequence[Tenant | None]) -> list[TenantUsage]:
    """Combine reservation and measurement for the tenants of one GPU.

    A tenant that shares a GPU is measured below its activity alone, by its slowdown. Measured activity times slowdown
    is its activity alone. On a saturated GPU each tenant takes what the others leave; there it is at least the
    predicted activity, unless the slowdown was measured, too. Memory beyond the reserved bound counts; less is taken
    back only in the reservation itself.
    """
    expected = [reserved_usage(one.tenant, peak_mib(of)) for one, of in zip(reservations, measured, strict=True)]
    if not any(measured):
        return expected
    stretch = _stretch(reservations[0].mode, tuple((one.util, one.sm, one.dram) for one in expected))
    found = [_slowdown(one.tenant, of, by) for one, of, by in zip(reservations, measured, stretch, strict=True)]
    trusted = [by if is_measured else alone for alone, (by, is_measured) in zip(stretch, found, strict=True)]
    together = [_shared_activity(one, tenant, by) for one, tenant, by in zip(expected, measured, trusted, strict=True)]
    only_raises = is_saturated(reservations[0].mode, together)
    return [
        one if tenant is None else _combined(one, tenant, by, only_raises=only_raises and not is_measured)
        for one, tenant, (by, is_measured) in zip(expected, measured, found, strict=True)
    ]


@lru_cache(maxsize=4096)
def _stretch(mode: SharingMode, alone: tuple[tuple[float, float, float], ...]) -> list[float]:
    """Predict the slowdowns of the tenants of one GPU from utilization, SM and DRAM activity of each alone."""
    util, sm, dram = np.array(alone, np.float64).T[:, None, :]
    found: list[float] = slowdowns(mode, util, sm, dram, np.ones(util.shape, np.bool_))[0].tolist()
    return found


def _slowdown(profile: TenantProfile, tenant: Tenant | None, predicted: float) -> tuple[float, bool]:
    """Return the slowdown that counts for a tenant, and whether it was measured and may lower its activity.

    A container reports its steps itself. If it shares with other tenancy domains, that can only raise its activity.
    """
    measured = None if tenant is None else tenant.slowdown
    if measured is None or profile.tenancy is not Tenancy.NAMESPACE:
        return max(measured or 1.0, predicted), False
    return measured, True


def _shared_activity(expected: TenantUsage, tenant: Tenant | None, slowdown: float) -> TenantActivity:
    """Return a tenant's measured activity beside its co-tenants; the predicted one if it is unknown."""
    util = None if tenant is None else tenant.gpu_util_percent
    sm = None if tenant is None else tenant.sm_active_ratio
    return TenantActivity(
        expected.util / slowdown if util is None else _share(util / 100),
        expected.sm / slowdown if sm is None else _share(sm),
        expected.dram,
    )


def _combined(expected: TenantUsage, tenant: Tenant, slowdown: float, *, only_raises: bool) -> TenantUsage:
    util, sm = tenant.gpu_util_percent, tenant.sm_active_ratio
    alone = TenantUsage(
        memory_mib=expected.memory_mib,
        util=expected.util if util is None else _share(util / 100 * slowdown),
        sm=expected.sm if sm is None else _share(sm * slowdown),
        dram=expected.dram,
    )
    if not only_raises:
        return alone
    return replace(alone, util=max(alone.util, expected.util), sm=max(alone.sm, expected.sm))


def _share(value: float) -> float:
    """Clip a share of a GPU to 0..1: a negative one would make room for others."""
    return min(1.0, max(0.0, value))


def peak_mib(measured: Tenant | None) -> int:
    """Return the largest measured memory of a tenant, in MiB; 0 without a measurement."""
    return 0 if measured is None else max(measured.peak_memory_mib, measured.memory_mib)


def reserved_usage(profile: TenantProfile, peak_mib: int = 0) -> TenantUsage:
    """Return the predicted activity of a tenant, and the memory that counts with this measured peak."""
    return TenantUsage(
        memory_mib=profile.counted_mib(peak_mib),
        util=profile.gpu_util_percent / 100,
        sm=profile.sm_active_ratio,
        dram=profile.dram_active_ratio,
    )


@lru_cache(maxsize=4096)
def epoch_seconds(moment: str) -> float:
    """Return a time in seconds since 1970; 0 if it is missing or unreadable."""
    try:
        return parse_rfc3339(moment).timestamp() if moment else 0.0
    except ValueError:
        return 0.0


# --- The table -------------------------------------------------------------------------------------------------------


def _of(dtype: type, *, each_tenant: bool = False, empty: object = 0) -> dict[str, Any]:
    """Describe a column: one value for each GPU, or one for each tenant of each GPU."""
    return {"dtype": dtype, "each_tenant": each_tenant, "empty": empty}


@dataclass(slots=True, eq=False)
class GpuTable:
    """The arrays, for G GPUs with T places for tenants each. Rows of one node are adjacent."""

    alive: Bools = field(metadata=_of(np.bool_))
    """(G,) False in rows that no GPU uses; the rest of such a row is undefined."""
    node: NDArray[np.int32] = field(metadata=_of(np.int32))
    """(G,) Index into `Snapshot.node_names`."""
    gpu_index: NDArray[np.int32] = field(metadata=_of(np.int32))
    """(G,) NVML's index on the node."""
    nvlink_domain: NDArray[np.int32] = field(metadata=_of(np.int32))
    """(G,) Number of its NVLink domain on the node; a GPU without links is a domain of its own."""
    device_class: NDArray[np.intp] = field(metadata=_of(np.intp))
    """(G,) Index into `Snapshot.classes`."""
    usable_mib: NDArray[np.int64] = field(metadata=_of(np.int64))
    """(G,) Total memory minus reserve."""
    unavailable: Bools = field(metadata=_of(np.bool_))
    """(G,) Whether it takes no job at present; `Snapshot.unavailable` has the reason."""
    mode: NDArray[np.int8] = field(metadata=_of(np.int8))
    """(G,) Code of the mode of its reservations; 0 without any."""
    prepared: NDArray[np.int8] = field(metadata=_of(np.int8))
    """(G,) Code of the mode that its agent has prepared; 0 if none."""
    count: NDArray[np.int16] = field(metadata=_of(np.int16))
    """(G,) Number of tenants; they have the first places of the (G, T) arrays."""
    mig_memory_slices: NDArray[np.int16] = field(metadata=_of(np.int16))
    """(G,) Memory slices of the MIG instances of its reservations."""
    mig_compute_slices: NDArray[np.int16] = field(metadata=_of(np.int16))
    """(G,) Compute slices of these instances."""
    reserved_at: NDArray[np.float64] = field(metadata=_of(np.float64))
    """(G,) Time of its newest reservation, in seconds since 1970; 0 if unknown or without any."""
    uuid: NDArray[np.object_] = field(metadata=_of(np.object_, empty=""))
    """(G,) `GpuUuid`."""
    tenants: NDArray[np.object_] = field(metadata=_of(np.object_, empty=None))
    """(G,) Tuple of `TenantName`, in the order of the (G, T) arrays."""
    user: NDArray[np.int64] = field(metadata=_of(np.int64, empty=NO_TENANT))
    """(G,) User of its MPS server's clients; NO_TENANT if there is none or it is unknown; or MIXED."""
    memory_mib: NDArray[np.int64] = field(metadata=_of(np.int64, each_tenant=True))
    """(G, T) Upper bound of its memory, at most the GPU's usable memory; that also means unknown."""
    util: NDArray[np.float32] = field(metadata=_of(np.float32, each_tenant=True))
    """(G, T) GPU utilization alone, 0..1."""
    sm: NDArray[np.float32] = field(metadata=_of(np.float32, each_tenant=True))
    """(G, T) SM activity alone, 0..1."""
    dram: NDArray[np.float32] = field(metadata=_of(np.float32, each_tenant=True))
    """(G, T) DRAM activity alone, 0..1."""
    max_slowdown: NDArray[np.float32] = field(metadata=_of(np.float32, each_tenant=True, empty=np.inf))
    """(G, T) Slowdown that it accepts; infinite in an empty place."""
    namespace: NDArray[np.int32] = field(metadata=_of(np.int32, each_tenant=True, empty=NO_TENANT))
    """(G, T) Index of its tenancy domain in `Snapshot.namespaces`."""
    family: NDArray[np.object_] = field(metadata=_of(np.object_, each_tenant=True, empty=""))
    """(G, T) Family and digest of its job, by which slowdowns are learned; empty if unknown."""
    comparable: Bools = field(metadata=_of(np.bool_, each_tenant=True))
    """(G, T) Whether its step time alone is known, so that its slowdown is measured."""
    cluster_tenancy: Bools = field(metadata=_of(np.bool_, each_tenant=True))
    """(G, T) Whether it shares with other namespaces."""

    class_mode: NDArray[np.intp] = field(metadata=_of(np.intp))
    """(G,) Aggregate: flat index of class and mode into an array of shape (classes, modes)."""
    free_mib: NDArray[np.int64] = field(metadata=_of(np.int64))
    """(G,) Aggregate: unreserved memory, never negative; 0 beside an exclusive tenant."""
    sm_active: NDArray[np.float64] = field(metadata=_of(np.float64))
    """(G,) Aggregate: sum of the SM activities of all tenants; may exceed 1."""
    dram_active: NDArray[np.float64] = field(metadata=_of(np.float64))
    """(G,) Aggregate: sum of the DRAM activities."""
    existing_slowdown: NDArray[np.float64] = field(metadata=_of(np.float64))
    """(G,) Aggregate: number of its tenants minus the sum of their predicted slowdowns; never positive."""
    min_slowdown_limit: NDArray[np.float64] = field(metadata=_of(np.float64, empty=np.inf))
    """(G,) Aggregate: least slowdown that one of its tenants accepts; infinite without any."""
    tenant_namespace: NDArray[np.int32] = field(metadata=_of(np.int32, empty=NO_TENANT))
    """(G,) Aggregate: tenancy domain of all tenants; NO_TENANT, or MIXED."""

    def resized(self, gpus: int, tenants: int) -> "GpuTable":
        """Return a copy with more rows and more places for tenants; the new ones are empty."""
        larger = empty_table(gpus, tenants)
        for name in _NAMES:
            array = getattr(self, name)
            getattr(larger, name)[tuple(slice(0, n) for n in array.shape)] = array
        return larger

    def take(self, rows: Rows) -> "GpuTable":
        """Return copies of some rows."""
        return GpuTable(*[getattr(self, name).take(rows, axis=0) for name in _NAMES])

    def shown(self, gpus: int) -> "GpuTable":
        """Return a read-only view of the first rows."""
        parts = [getattr(self, name)[:gpus] for name in _NAMES]
        for part in parts:
            part.flags.writeable = False
        return GpuTable(*parts)


_NAMES = tuple(column.name for column in fields(GpuTable))


def empty_table(gpus: int, tenants: int) -> GpuTable:
    """Return a table of G rows, none of them alive, with T places for tenants each."""
    made: dict[str, NDArray[Any]] = {}
    for column in fields(GpuTable):
        shape = (gpus, tenants) if column.metadata["each_tenant"] else (gpus,)
        made[column.name] = np.full(shape, column.metadata["empty"], column.metadata["dtype"])
    return GpuTable(**made)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The cluster at one moment; valid until the next `await`."""

    gpus: GpuTable
    grid: NodeGrid
    """All GPUs, by their nodes."""
    node_names: Sequence[str]
    node_ids: Mapping[str, int]
    """Index into `node_names` by name, of nodes that exist; the index of a deleted node is used again."""
    classes: Sequence[DeviceClass]
    """Every device class that the cluster ever had, by index."""
    present_classes: Collection[DeviceClass]
    """Device classes of the GPUs that exist."""
    namespaces: Mapping[str, int]
    """Index of each tenancy domain that ever had a tenant."""
    unavailable: Mapping[int, UnavailableReason]
    """Why GPUs take no job at present, by row."""
    kube_nodes: Mapping[str, Node]
    """Nodes by name."""
    refusing_nodes: Callable[[NodeConstraints], Bools]
    """Returns the mask of the nodes that a pod does not accept, shape (nodes,)."""

    def ids(self, names: Sequence[str]) -> Rows:
        """Return the indices of nodes; -1 for those that reported no GPUs."""
        return np.fromiter(map(self.node_ids.get, names, repeat(-1)), np.intp, len(names))

    def rows_of(self, ids: Rows) -> Rows:
        """Return the rows of the GPUs of some nodes, in rising order; an index of -1 has none."""
        wanted = np.zeros(len(self.node_names) + 1, np.bool_)
        wanted[ids] = True
        wanted[-1] = False
        return np.flatnonzero(self.gpus.alive & wanted[self.gpus.node])

    def product(self, row: int) -> str:
        """Return the product of one GPU."""
        return self.classes[int(self.gpus.device_class[row])].product

    def place(self, *rows: int) -> str:
        """Return the name of GPUs of one node for people: `GPU 0 of node-a`, `GPUs 0, 1 of node-a`."""
        numbers = ", ".join(str(int(self.gpus.gpu_index[row])) for row in rows)
        return f"GPU{'' if len(rows) == 1 else 's'} {numbers} of {self.node_names[int(self.gpus.node[rows[0]])]}"


# --- Writing rows ----------------------------------------------------------------------------------------------------


class GpuReport(NamedTuple):
    """Everything in a GpuNode about one GPU: equal reports are equal rows."""

    device: Device
    held: tuple[Reservation, ...]
    """Its reservations."""
    counted: tuple[Tenant | None, ...]
    """Measurement of each reservation's pod that counts."""
    measured: tuple[Tenant, ...]
    """All measurements on this GPU."""
    has_duplicate_uuid: bool
    """Whether the node reports several GPUs with this UUID."""
    has_duplicate_index: bool
    """Whether the node reports several GPUs with this index."""


def reports_of(node: GpuNode) -> list[GpuReport]:
    """Return the reports of a node's GPUs, by index."""
    held: dict[GpuUuid, list[Reservation]] = {}
    for reservation in node.spec.reservations:
        for uuid in reservation.gpu_uuids:
            held.setdefault(uuid, []).append(reservation)
    measured: dict[GpuUuid, list[Tenant]] = {}
    for tenant in node.status.tenants:
        measured.setdefault(tenant.gpu_uuid, []).append(tenant)
    counted, found = counted_tenants(node), []
    devices = sorted(node.status.devices, key=attrgetter("index"))
    uuids, indices = Counter(device.uuid for device in devices), Counter(device.index for device in devices)
    for device in devices:
        here = held.get(device.uuid, ())
        found.append(
            GpuReport(
                device=device,
                held=tuple(here),
                counted=tuple(counted.get((one.pod_uid, device.uuid)) for one in here),
                measured=tuple(measured.get(device.uuid, ())),
                has_duplicate_uuid=uuids[device.uuid] > 1,
                has_duplicate_index=indices[device.index] > 1,
            )
        )
    return found


def write_device(table: GpuTable, row: int, device: Device, *, node: int, kind: DeviceClass, class_id: int) -> None:
    """Write the columns that describe a device."""
    table.alive[row] = True
    table.node[row], table.device_class[row] = node, class_id
    table.gpu_index[row] = device.index
    table.usable_mib[row] = kind.usable_mib
    table.prepared[row] = NO_MODE if device.mode is None else CODES[device.mode]
    table.uuid[row] = device.uuid


def write_tenants(table: GpuTable, row: int, report: GpuReport, domains: dict[str, int]) -> None:
    """Write the tenants of a GPU whose device is written.

    New tenancy domains are added to `domains`, which has the index of each.
    """
    usable_mib, held = int(table.usable_mib[row]), report.held
    names = report.device.mig_profiles
    slices = [mig_slices(found, names) for r in held if (found := mig_profile(r.mig_profile)) is not None]
    table.mig_memory_slices[row] = sum(memory for memory, _ in slices)
    table.mig_compute_slices[row] = sum(compute for _, compute in slices)
    table.mode[row] = CODES[held[0].mode] if held else NO_MODE
    if (before := int(table.count[row])) > len(held):
        left = slice(len(held), before)
        for column in (table.memory_mib, table.util, table.sm, table.dram, table.comparable, table.cluster_tenancy):
            column[row, left] = 0
        table.namespace[row, left], table.max_slowdown[row, left] = NO_TENANT, np.inf
        table.family[row, left] = ""
    table.count[row] = len(held)
    table.reserved_at[row] = max((epoch_seconds(r.reserved_at) for r in held), default=0.0)
    table.tenants[row] = tuple(TenantName(r.pod_namespace, r.job_name, r.pod_uid) for r in held)
    users = {r.run_as_user for r in held if r.mode is SharingMode.MPS and r.run_as_user is not None}
    table.user[row] = MIXED if len(users) > 1 else next(iter(users), NO_TENANT)
    usage = usage_of(held, report.counted)
    for place, (reservation, of, measured) in enumerate(zip(held, usage, report.counted, strict=True)):
        tenant = reservation.tenant
        table.memory_mib[row, place] = counted_mib(of.memory_mib, usable_mib)
        table.util[row, place] = of.util
        table.sm[row, place] = of.sm
        table.dram[row, place] = of.dram
        table.max_slowdown[row, place] = tenant.max_slowdown
        table.family[row, place] = tenant.family
        table.comparable[row, place] = tenant.comparable or (measured is not None and measured.slowdown is not None)
        table.namespace[row, place] = domains.setdefault(reservation.tenancy_domain, len(domains))
        table.cluster_tenancy[row, place] = tenant.tenancy is Tenancy.CLUSTER


def nvlink_domains(devices: Sequence[Device]) -> list[int]:
    """Return the NVLink domain of each GPU of one node: equal numbers are linked, directly or through others.

    The number is the place of the domain's first member.
    """
    place = {device.uuid: number for number, device in enumerate(devices)}
    found = list(range(len(devices)))
    for number, device in enumerate(devices):
        for peer in device.nvlink_peers:
            if peer in place:
                low, high = sorted((found[number], found[place[peer]]))
                found = [low if domain == high else domain for domain in found]
    return found


def update_aggregates(columns: GpuTable, rows: Rows) -> None:
    """Fill in the aggregates of some rows, shape (rows,)."""
    promised = np.add.reduce(columns.memory_mib.take(rows, axis=0), axis=1)
    how, count, namespace = columns.mode[rows], columns.count[rows], columns.namespace.take(rows, axis=0)
    columns.class_mode[rows] = columns.device_class[rows] * len(MODES) + how
    free = np.maximum(0, columns.usable_mib[rows] - promised)
    columns.free_mib[rows] = np.where(how == EXCLUSIVE, 0, free)
    columns.sm_active[rows] = np.add.reduce(columns.sm.take(rows, axis=0), axis=1, dtype=np.float64)
    columns.dram_active[rows] = np.add.reduce(columns.dram.take(rows, axis=0), axis=1, dtype=np.float64)
    first, empty = namespace[:, 0], np.arange(namespace.shape[1]) >= count[:, None]
    columns.min_slowdown_limit[rows] = np.minimum.reduce(columns.max_slowdown.take(rows, axis=0), axis=1)
    columns.tenant_namespace[rows] = np.where(count == 0, NO_TENANT, first)
    columns.existing_slowdown[rows] = 0.0
    several = count > 1
    if not several.any():
        return
    is_mixed = np.logical_or.reduce((namespace != first[:, None]) & ~empty, axis=1)
    columns.tenant_namespace[rows[is_mixed]] = MIXED
    for code, mode in SHARED:
        mine = rows[(how == code) & several]
        for tenants in np.flatnonzero(np.bincount(columns.count[mine])).tolist():
            part = mine[columns.count[mine] == tenants]
            util, sm, dram = (a[part, :tenants] for a in (columns.util, columns.sm, columns.dram))
            columns.existing_slowdown[part] = tenants - slowdowns(mode, util, sm, dram).sum(axis=1)
