"""The cluster as the extender knows it: GpuNodes and their arrays, kept up to date node by node."""

import msgspec
import numpy as np
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid, Tenancy

from carpool_extender.aggregates import work_out
from carpool_extender.doubts import doubts
from carpool_extender.islands import islands
from carpool_extender.journal import Journal
from carpool_extender.measured import Known, known_of, seconds, settled_tenants
from carpool_extender.mig import profile_of
from carpool_extender.numbering import Numbering
from carpool_extender.standing import Hindrance, Standing
from carpool_extender.versions import differ, is_older
from carpool_extender.view import (
    CODES,
    NO_MODE,
    NOBODY,
    Columns,
    DeviceClass,
    Rows,
    TenantName,
    View,
    class_of,
    counted_mib,
    empty_columns,
)


class Cluster:
    """All GpuNodes. Each change rewrites the rows of one node, and is written down in a journal of rows.

    Args:
        slots: Tenants for which each GPU has room from the start; more make the arrays wider.
        standing: Which GPUs are hindered, as time goes by; none where left out.
    """

    def __init__(self, slots: int = 8, standing: Standing | None = None) -> None:
        self._standing = standing
        self._columns = empty_columns(0, slots)
        self._used = 0
        self._journal = Journal()
        self._hindered: dict[int, Hindrance] = {}
        self._doubts: dict[str, dict[int, Hindrance]] = {}
        self._blocks: dict[str, slice] = {}
        self._free: dict[int, list[slice]] = {}
        self._nodes: dict[str, GpuNode] = {}
        self._assumed: dict[str, dict[PodUid, Reservation]] = {}
        self._holders: dict[PodUid, set[str]] = {}
        self._of_job: dict[JobUid, set[tuple[str, PodUid]]] = {}
        self._names: Numbering[str] = Numbering()
        self._classes: Numbering[DeviceClass] = Numbering()
        self._namespaces: Numbering[str] = Numbering()
        self._held: dict[str, tuple[frozenset[DeviceClass], frozenset[str]]] = {}

    @property
    def nodes(self) -> dict[str, GpuNode]:
        """Every GpuNode by name; do not change it."""
        return self._nodes

    def node(self, name: str) -> GpuNode | None:
        """Return the newest GpuNode of that name that was seen."""
        return self._nodes.get(name)

    def holders(self, pod_uid: PodUid) -> list[str]:
        """Names of the nodes on which a pod has a reservation: none, or one; more only if two schedulers raced."""
        held = self._holders.get(pod_uid)
        return [] if held is None else sorted(held)

    def pods_of(self, job_uid: JobUid) -> set[PodUid]:
        """UIDs of the pods of a job that have reservations."""
        return {pod for _, pod in self._of_job.get(job_uid, ())}

    def view(self) -> View:
        """Return the arrays as they are now; they hold until the next change."""
        self._note_hindrances()
        if (rows := self._journal.unsettled()).size:
            work_out(self._columns, rows)
        columns = self._columns.shown(self._used)
        return View(
            columns=columns,
            node_names=self._names.things,
            node_ids=self._names.ids,
            naming=self._names.changes,
            classes=self._classes.things,
            namespaces=self._namespaces.ids,
            hindered=self._hindered,
        )

    @property
    def generation(self) -> int:
        """Number of the last change; a view that was asked for brings hindrances up to date."""
        return self._journal.generation

    def changed_since(self, generation: int) -> Rows | None:
        """Return the rows that changed after that generation; None where too much did."""
        return self._journal.since(generation)

    def hindered_nodes(self) -> set[str]:
        """Names of the nodes with GPUs that take nobody at this moment, whatever their health."""
        if self._standing is None:
            return set(self._doubts)
        return {*self._doubts, *self._standing.silent(), *(node for node, _ in self._standing.resting())}

    def _note_hindrances(self) -> None:
        """Bring the column up to date: time hinders GPUs and sets them free again, without any change of an object."""
        found: dict[int, Hindrance] = {}
        for doubted in self._doubts.values():
            found |= doubted
        resting, silent = ({}, {}) if self._standing is None else (self._standing.resting(), self._standing.silent())
        for (node, uuid), why in resting.items():
            block = self._blocks.get(node, slice(0, 0))
            found |= {r: why for r in range(block.start, block.stop) if self._columns.uuid[r] == uuid}
        for node, why in silent.items():
            block = self._blocks.get(node, slice(0, 0))
            found |= dict.fromkeys(range(block.start, block.stop), why)
        changed = found.keys() ^ self._hindered.keys()
        self._hindered = found
        if changed:
            rows = np.array(sorted(changed), np.intp)
            self._columns.hindered[rows] = [row in found for row in rows.tolist()]
            self._journal.note(rows)

    def apply(self, node: GpuNode) -> bool:
        """Take in a GpuNode, unless a newer one was seen; say whether anything that decisions look at has changed."""
        name = node.metadata.name
        old = self._nodes.get(name)
        if old is not None and is_older(node, old):
            return False
        self._nodes[name] = node
        if self._standing is not None:
            self._standing.heard(name, node.status.heartbeat_time)
        if old is not None and not differ(old, node):
            return False
        self._index_holders(name, old, node)
        self._write(name, node)
        return True

    def assume(self, name: str, reservation: Reservation) -> None:
        """Count a reservation that is about to be written, so that whoever asks meanwhile is sent elsewhere."""
        self._assumed.setdefault(name, {})[reservation.pod_uid] = reservation
        self._write_again(name)

    def assume_no_more(self, name: str, pod_uid: PodUid) -> None:
        """Count only what is written of a pod."""
        assumed = self._assumed.get(name, {})
        if assumed.pop(pod_uid, None) is not None:
            self._write_again(name)
        if not assumed:
            self._assumed.pop(name, None)

    def _write_again(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is not None:
            self._write(name, node)

    def _with_assumed(self, node: GpuNode) -> GpuNode:
        """Return a node with what is about to be written there."""
        assumed = self._assumed.get(node.metadata.name)
        if not assumed:
            return node
        held = {reservation.pod_uid for reservation in node.spec.reservations}
        more = [reservation for uid, reservation in assumed.items() if uid not in held]
        spec = msgspec.structs.replace(node.spec, reservations=[*node.spec.reservations, *more])
        return msgspec.structs.replace(node, spec=spec)

    def remove(self, name: str) -> None:
        """Forget a GpuNode that was deleted."""
        old = self._nodes.pop(name, None)
        if old is not None:
            self._index_holders(name, old, None)
        self._release_rows(name)
        self._hold(name, None)
        if self._standing is not None:
            self._standing.forget(name)

    def _index_holders(self, name: str, old: GpuNode | None, new: GpuNode | None) -> None:
        for reservation in old.spec.reservations if old else ():
            held = self._holders.get(reservation.pod_uid, set())
            held.discard(name)
            if not held:
                self._holders.pop(reservation.pod_uid, None)
            pods = self._of_job.get(reservation.job_uid, set())
            pods.discard((name, reservation.pod_uid))
            if not pods:
                self._of_job.pop(reservation.job_uid, None)
        for reservation in new.spec.reservations if new else ():
            self._holders.setdefault(reservation.pod_uid, set()).add(name)
            self._of_job.setdefault(reservation.job_uid, set()).add((name, reservation.pod_uid))

    def _hold(self, name: str, now: tuple[frozenset[DeviceClass], frozenset[str]] | None) -> None:
        """Keep numbers for what a node's rows speak of, and no longer for what they spoke of before."""
        before = self._held.get(name)
        if now == before:
            return
        for held, change in ((now, Numbering.hold), (before, Numbering.let_go)):
            if held is not None:
                change(self._names, [name])
                change(self._classes, held[0])
                change(self._namespaces, held[1])
        if now is None:
            del self._held[name]
        else:
            self._held[name] = now

    def _release_rows(self, name: str) -> None:
        block = self._blocks.pop(name, None)
        self._doubts.pop(name, None)
        if block is not None:
            self._columns.alive[block] = False
            self._journal.note(np.arange(block.start, block.stop))
            self._free.setdefault(block.stop - block.start, []).append(block)

    def _rows(self, name: str, gpus: int, tenants: int) -> slice:
        """Return rows for a node's GPUs: its own, or free ones, or new ones."""
        block = self._blocks.get(name)
        if block is not None and block.stop - block.start != gpus:
            self._release_rows(name)
            block = None
        room, width = self._columns.memory_mib.shape
        if block is None:
            spare = self._free.get(gpus)
            block = spare.pop() if spare else slice(self._used, self._used + gpus)
            self._used = max(self._used, block.stop)
            self._blocks[name] = block
        if block.stop > room or tenants > width:
            more = max(room, 64, block.stop + block.stop // 2) if block.stop > room else room
            self._columns = self._columns.resized(more, max(width, tenants))
        return block

    def _write(self, name: str, node: GpuNode) -> None:
        node = self._with_assumed(node)
        by_gpu, measured = reservations_by_gpu(node), settled_tenants(node)
        devices = sorted(node.status.devices, key=lambda device: device.index)
        kinds = [class_of(device) for device in devices]
        self._hold(name, (frozenset(kinds), frozenset(r.pod_namespace for r in node.spec.reservations)))
        block = self._rows(name, len(devices), max((len(r) for r in by_gpu.values()), default=0))
        self._journal.note(np.arange(block.start, block.stop))
        columns = self._columns
        node_id = self._names.ids[name]
        columns.island[block] = islands(devices)
        doubted = doubts(node, by_gpu)
        self._doubts.pop(name, None)
        if doubted:
            rows = range(block.start, block.stop)
            self._doubts[name] = {r: doubted[d.uuid] for r, d in zip(rows, devices, strict=True) if d.uuid in doubted}
        for row, (device, kind) in enumerate(zip(devices, kinds, strict=True), start=block.start):
            columns.alive[row] = True
            columns.node[row] = node_id
            columns.gpu_index[row] = device.index
            columns.device_class[row] = self._classes.ids[kind]
            columns.usable_mib[row] = kind.usable_mib
            columns.prepared[row] = NO_MODE if device.mode is None else CODES[device.mode]
            columns.uuid[row] = device.uuid
            tenants = by_gpu.get(device.uuid, [])
            known = known_of(tenants, [measured.get((r.pod_uid, device.uuid)) for r in tenants])
            self._write_tenants(columns, row, tenants, known)

    def _write_tenants(self, columns: Columns, row: int, tenants: list[Reservation], known: list[Known]) -> None:
        usable_mib = int(columns.usable_mib[row])
        instances = [found for t in tenants if (found := profile_of(t.mig_profile)) is not None]
        columns.mig_gb[row] = sum(instance.gb for instance in instances)
        columns.mig_slices[row] = sum(instance.slices for instance in instances)
        columns.mode[row] = CODES[tenants[0].mode] if tenants else NO_MODE
        columns.count[row] = len(tenants)
        columns.reserved_at[row] = max((seconds(t.reserved_at) for t in tenants), default=0.0)
        columns.tenants[row] = tuple(TenantName(t.pod_namespace, t.job_name, t.pod_uid) for t in tenants)
        for emptied in (columns.memory_mib, columns.util, columns.sm, columns.dram, columns.cluster_tenancy):
            emptied[row] = 0
        columns.namespace[row] = NOBODY
        for place, (reservation, of) in enumerate(zip(tenants, known, strict=True)):
            tenant = reservation.tenant
            columns.memory_mib[row, place] = counted_mib(of.memory_mib, usable_mib)
            columns.util[row, place] = of.util
            columns.sm[row, place] = of.sm
            columns.dram[row, place] = of.dram
            columns.max_slowdown[row, place] = tenant.max_slowdown
            columns.namespace[row, place] = self._namespaces.ids[reservation.pod_namespace]
            columns.cluster_tenancy[row, place] = tenant.tenancy is Tenancy.CLUSTER


def reservations_by_gpu(node: GpuNode) -> dict[GpuUuid, list[Reservation]]:
    """Group a node's reservations by the GPUs that they are for."""
    found: dict[GpuUuid, list[Reservation]] = {}
    for reservation in node.spec.reservations:
        for uuid in reservation.gpu_uuids:
            found.setdefault(uuid, []).append(reservation)
    return found
