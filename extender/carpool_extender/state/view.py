"""What decisions are made on: every GPU of the cluster as one row of arrays, at one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np
from carpool_core.deviceclass import DeviceClass
from carpool_core.values import PodUid, SharingMode
from numpy.typing import NDArray

from carpool_extender.state.grid import Grid
from carpool_extender.state.standing import Hindrance

MODES: tuple[SharingMode | None, ...] = (None, *SharingMode)
"""Sharing modes by their code in the `mode` columns; code 0 is an idle GPU, or no possible mode."""
NO_MODE = 0
CODES: Mapping[SharingMode, int] = {mode: code for code, mode in enumerate(MODES) if mode is not None}

NOBODY, SEVERAL = -1, -2
"""In `Columns.landlord`: the GPU is idle; its tenants come from several namespaces."""

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
class Columns:
    """The arrays, for G GPUs with room for T tenants each. Rows of one node stand together."""

    alive: Bools = field(metadata=_of(np.bool_))
    """(G,) False in rows that no GPU uses at present; the rest of such a row means nothing."""
    node: NDArray[np.int32] = field(metadata=_of(np.int32))
    """(G,) Index into `View.node_names`."""
    gpu_index: NDArray[np.int32] = field(metadata=_of(np.int32))
    """(G,) NVML's index on the node."""
    island: NDArray[np.int32] = field(metadata=_of(np.int32))
    """(G,) Number of its NVLink island on the node; a GPU without links is alone on one."""
    device_class: NDArray[np.intp] = field(metadata=_of(np.intp))
    """(G,) Index into `View.classes`."""
    usable_mib: NDArray[np.int64] = field(metadata=_of(np.int64))
    """(G,) Total memory less reserve."""
    hindered: Bools = field(metadata=_of(np.bool_))
    """(G,) Whether `View.hindered` says why it takes nobody at this moment."""
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
    user: NDArray[np.int64] = field(metadata=_of(np.int64, empty=NOBODY))
    """(G,) User of its MPS server's clients; NOBODY where it has none or none of them says, or SEVERAL."""
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
    namespace: NDArray[np.int32] = field(metadata=_of(np.int32, each_tenant=True, empty=NOBODY))
    """(G, T) Index of its namespace, as in `View.namespaces`."""
    cluster_tenancy: Bools = field(metadata=_of(np.bool_, each_tenant=True))
    """(G, T) Whether it shares with other namespaces."""

    kind: NDArray[np.intp] = field(metadata=_of(np.intp))
    """(G,) Aggregate: class and mode in one number, the index of both into an array of shape (classes, modes)."""
    free_mib: NDArray[np.int64] = field(metadata=_of(np.int64))
    """(G,) Aggregate: memory that nobody was promised, never negative; none beside an exclusive tenant."""
    sm_active: NDArray[np.float64] = field(metadata=_of(np.float64))
    """(G,) Aggregate: SM activity of all tenants together; may exceed 1."""
    dram_active: NDArray[np.float64] = field(metadata=_of(np.float64))
    """(G,) Aggregate: the same of DRAM activity."""
    before: NDArray[np.float64] = field(metadata=_of(np.float64))
    """(G,) Aggregate: number of its tenants less the sum of their predicted slowdowns; what they lose, negated."""
    patience: NDArray[np.float64] = field(metadata=_of(np.float64, empty=np.inf))
    """(G,) Aggregate: the least slowdown that one of its tenants accepts; infinite without any."""
    landlord: NDArray[np.int32] = field(metadata=_of(np.int32, empty=NOBODY))
    """(G,) Aggregate: the namespace of all tenants; NOBODY, or SEVERAL."""

    def resized(self, gpus: int, tenants: int) -> "Columns":
        """Return a copy with more rows and more room for tenants; what is new is empty."""
        larger = empty_columns(gpus, tenants)
        for name in _NAMES:
            array = getattr(self, name)
            getattr(larger, name)[tuple(slice(0, n) for n in array.shape)] = array
        return larger

    def take(self, rows: Rows) -> "Columns":
        """Return copies of some rows."""
        return Columns(*[getattr(self, name).take(rows, axis=0) for name in _NAMES])

    def shown(self, gpus: int) -> "Columns":
        """Return the first rows, without copying; they cannot be written through what is returned."""
        parts = [getattr(self, name)[:gpus] for name in _NAMES]
        for part in parts:
            part.flags.writeable = False
        return Columns(*parts)


_NAMES = tuple(column.name for column in fields(Columns))


def empty_columns(gpus: int, tenants: int) -> Columns:
    """Return columns of G rows, none of them alive, with room for T tenants each."""
    made: dict[str, NDArray[Any]] = {}
    for column in fields(Columns):
        shape = (gpus, tenants) if column.metadata["each_tenant"] else (gpus,)
        made[column.name] = np.full(shape, column.metadata["empty"], column.metadata["dtype"])
    return Columns(**made)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The cluster at one moment. It holds until the cluster changes: decide on it without waiting for anything."""

    columns: Columns
    grid: Grid
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
    hindered: Mapping[int, Hindrance]
    """Why GPUs take nobody at this moment, by row: unhealthy, in doubt, silent, or left alone for a while."""

    def ids(self, names: Sequence[str]) -> Rows:
        """Return the indices of nodes; -1 for those that never reported GPUs."""
        return np.fromiter(map(self.node_ids.get, names, repeat(-1)), np.intp, len(names))

    def product(self, row: int) -> str:
        """Return the product of one GPU."""
        return self.classes[int(self.columns.device_class[row])].product

    def place(self, row: int) -> str:
        """Name one GPU for people: `GPU 0 of node-a`."""
        return f"GPU {int(self.columns.gpu_index[row])} of {self.node_names[int(self.columns.node[row])]}"
