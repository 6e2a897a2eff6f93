"""What decisions are made on: every GPU of the cluster as one row of arrays, at one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, PodUid, SharingMode
from numpy.typing import NDArray

from carpool_extender.standing import Hindrance

MODES: tuple[SharingMode | None, ...] = (None, *SharingMode)
"""Sharing modes by their code in the `mode` columns; code 0 is an idle GPU, or no possible mode."""
NO_MODE = 0
CODES: Mapping[SharingMode, int] = {mode: code for code, mode in enumerate(MODES) if mode is not None}

Bools = NDArray[np.bool_]
Ints = NDArray[np.integer]
Floats = NDArray[np.floating]


class TenantName(NamedTuple):
    """Who stands behind one entry of a GPU's tenants, for sentences."""

    namespace: str
    job: str
    pod_uid: PodUid

    def __str__(self) -> str:
        return f"{self.namespace}/{self.job}"


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """All GPUs that are alike to a demand."""

    product: str
    memory_mib: int
    reserved_mib: int
    compute_capability: str
    modes: tuple[SharingMode, ...]

    @property
    def usable_mib(self) -> int:
        """Memory that tenants can have, in MiB; never negative."""
        return max(0, self.memory_mib - self.reserved_mib)

    def device(self) -> Device:
        """Return an anonymous device of this class."""
        return Device(
            uuid=GpuUuid(""),
            index=0,
            product=self.product,
            memory_mib=self.memory_mib,
            reserved_mib=self.reserved_mib,
            compute_capability=self.compute_capability,
            modes=list(self.modes),
        )


def class_of(device: Device) -> DeviceClass:
    """Return the class of a device."""
    return DeviceClass(
        product=device.product,
        memory_mib=device.memory_mib,
        reserved_mib=device.reserved_mib,
        compute_capability=device.compute_capability,
        modes=tuple(device.modes),
    )


@dataclass(slots=True, eq=False)
class Columns:
    """The arrays, for G GPUs with room for T tenants each. Rows of one node stand together."""

    alive: Bools
    """(G,) False in rows that no GPU uses at present; the rest of such a row means nothing."""
    node: NDArray[np.int32]
    """(G,) Index into `View.node_names`."""
    gpu_index: NDArray[np.int16]
    """(G,) NVML's index on the node."""
    device_class: NDArray[np.int16]
    """(G,) Index into `View.classes`."""
    usable_mib: NDArray[np.int64]
    """(G,) Total memory less reserve."""
    healthy: Bools
    """(G,)"""
    mode: NDArray[np.int8]
    """(G,) Code of the mode that its reservations have; 0 without any."""
    count: NDArray[np.int16]
    """(G,) Number of tenants."""
    reserved_at: NDArray[np.float64]
    """(G,) When its newest reservation was made, in seconds since 1970; 0 without any, or where none says."""
    uuid: NDArray[np.object_]
    """(G,) `GpuUuid`."""
    tenants: NDArray[np.object_]
    """(G,) Tuple of `TenantName`, in the order of the (G, T) arrays."""
    present: Bools
    """(G, T) Whether a tenant stands here."""
    memory_mib: NDArray[np.int64]
    """(G, T) Upper bound of its memory, at most the GPU's usable memory, which also stands for unknown."""
    util: NDArray[np.float32]
    """(G, T) GPU utilization alone, 0..1."""
    sm: NDArray[np.float32]
    """(G, T) SM activity alone, 0..1."""
    dram: NDArray[np.float32]
    """(G, T) DRAM activity alone, 0..1."""
    max_slowdown: NDArray[np.float32]
    """(G, T) Slowdown that it accepts."""
    namespace: NDArray[np.int32]
    """(G, T) Index of its namespace, as in `View.namespaces`."""
    cluster_tenancy: Bools
    """(G, T) Whether it shares with other namespaces."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the columns by name."""
        return {column.name: getattr(self, column.name) for column in fields(self)}

    def copy(self) -> "Columns":
        """Return arrays of one's own."""
        return Columns(**{name: array.copy() for name, array in self.arrays().items()})

    def resized(self, gpus: int, tenants: int) -> "Columns":
        """Return a copy with more rows and more room for tenants; what is new is empty."""
        larger = empty_columns(gpus, tenants)
        for name, array in self.arrays().items():
            target = getattr(larger, name)
            target[tuple(slice(0, n) for n in array.shape)] = array
        return larger

    def part(self, rows: slice) -> "Columns":
        """Return these rows, without copying."""
        return Columns(**{name: array[rows] for name, array in self.arrays().items()})


def empty_columns(gpus: int, tenants: int) -> Columns:
    """Return columns of G rows, none of them alive, with room for T tenants each."""
    one, many = (gpus,), (gpus, tenants)
    return Columns(
        alive=np.zeros(one, np.bool_),
        node=np.zeros(one, np.int32),
        gpu_index=np.zeros(one, np.int16),
        device_class=np.zeros(one, np.int16),
        usable_mib=np.zeros(one, np.int64),
        healthy=np.zeros(one, np.bool_),
        mode=np.zeros(one, np.int8),
        count=np.zeros(one, np.int16),
        reserved_at=np.zeros(one, np.float64),
        uuid=np.full(one, "", np.object_),
        tenants=np.full(one, None, np.object_),
        present=np.zeros(many, np.bool_),
        memory_mib=np.zeros(many, np.int64),
        util=np.zeros(many, np.float32),
        sm=np.zeros(many, np.float32),
        dram=np.zeros(many, np.float32),
        max_slowdown=np.ones(many, np.float32),
        namespace=np.zeros(many, np.int32),
        cluster_tenancy=np.zeros(many, np.bool_),
    )


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The cluster at one moment. Nobody changes it any more: whoever writes afterwards copies first."""

    columns: Columns
    node_names: Sequence[str]
    node_ids: Mapping[str, int]
    """Index into `node_names` by name; also of nodes without GPUs that once had some."""
    classes: Sequence[DeviceClass]
    namespaces: Mapping[str, int]
    """Index of each namespace that has or had a tenant."""
    hindered: Mapping[int, Hindrance] = field(default_factory=dict)
    """Rows of GPUs that take nobody at this moment, whatever their health."""

    def healthy(self) -> Bools:
        """GPUs that are healthy and not hindered, shape (gpus,)."""
        if not self.hindered:
            return self.columns.healthy
        able = self.columns.healthy.copy()
        able[list(self.hindered)] = False
        return able

    def product(self, row: int) -> str:
        """Return the product of one GPU."""
        return self.classes[int(self.columns.device_class[row])].product

    def place(self, row: int) -> str:
        """Name one GPU for people: `GPU 0 of node-a`."""
        return f"GPU {int(self.columns.gpu_index[row])} of {self.node_names[int(self.columns.node[row])]}"
