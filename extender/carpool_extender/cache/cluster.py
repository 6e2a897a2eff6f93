"""The cluster cache: GpuNodes, assumed reservations, and the GPU table that follows them row by row.

```
              assume                     apply (written)
 (nothing) ───────────▶ assumed ─────────────────────────▶ reserved ──▶ (nothing) when released
                           │  forget
                           └────────▶ (nothing)
```

A reservation is assumed from the decision until it is written, so that other pods see its GPUs as taken.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from heapq import nsmallest
from typing import TypeVar

import msgspec
import numpy as np
from cachetools import LRUCache
from carpool_core.clock import Clock
from carpool_core.kube.nodes import Node, NodeConstraints
from carpool_core.products import DeviceClass, device_class
from carpool_core.resources.node import Device, GpuNode, Reservation
from carpool_core.values import DeviceHealth, GpuUuid, JobUid, PodUid, SharingMode
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import (
    Bools,
    GpuReport,
    GpuTable,
    NodeGrid,
    Rows,
    Snapshot,
    UnavailableReason,
    empty_table,
    grid_of,
    nvlink_domains,
    reports_of,
    update_aggregates,
    write_device,
    write_tenants,
)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 30.0, 600.0
"""Backoff of a GPU that could not be prepared: after the first failure, and at most."""
LEAST_MIB = 256
"""Memory that any job needs, in MiB: what a process takes before it has stored anything."""
REMEMBERED_CONSTRAINTS = 256
"""Node constraints of pods for which the accepted nodes are kept."""
MOST_NAMED = 3
"""Pods or nodes that a reason names."""
LONGEST_MESSAGE = 120
"""Characters of other processes' messages in a reason, which goes into the conditions of all waiting pods."""
(
    UNHEALTHY, AGENT_DOWN, BACKOFF, UNRESERVED_USE, CONTRADICTION, INVALID, DUPLICATE_UUID, NO_MEMORY, UNRESERVED_POD,
    BEYOND_LIMIT,
) = range(10)  # fmt: skip
"""Kinds of `UnavailableReason`."""
KINDS = (
    "unhealthy", "agent_down", "backoff", "unreserved_use", "contradiction", "invalid", "duplicate_uuid", "no_memory",
    "unreserved_pod", "beyond_limit",
)  # fmt: skip
"""Name of each kind in metrics."""

N = TypeVar("N", bound=GpuNode)


def shortened(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Cut a text that is too long, and mark the cut."""
    return text if len(text) <= longest else f"{text[: longest - 1].rstrip()}…"


def listed(names: Collection[str]) -> str:
    """Name the first few, and count the others: `a`, `a and b`, `a, b, c and 37 more`."""
    first, more = nsmallest(MOST_NAMED, names), len(names) - MOST_NAMED
    *others, last = [*first, f"{more:,} more"] if more > 0 else first
    return f"{', '.join(others)} and {last}" if others else last


@dataclass(frozen=True, slots=True)
class _Backoff:
    length_s: float
    until_s: float


class GpuBackoff:
    """GPUs in backoff after failed preparations."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._backoffs: dict[tuple[str, GpuUuid], _Backoff] = {}

    def forget(self, node: str) -> None:
        """Forget a deleted node."""
        for key in [key for key in self._backoffs if key[0] == node]:
            del self._backoffs[key]

    def record_failure(self, node: str, gpus: Sequence[GpuUuid]) -> None:
        """Begin the backoff of GPUs that could not be prepared; it doubles with each failure in a row."""
        now = self._clock.monotonic()
        for gpu in gpus:
            last = self._backoffs.get((node, gpu))
            if last is None or now >= last.until_s:  # several that failed together are one failure
                length = FIRST_BACKOFF_S if last is None else min(LONGEST_BACKOFF_S, 2 * last.length_s)
                self._backoffs[node, gpu] = _Backoff(length, now + length)

    def record_success(self, node: str, gpus: Sequence[GpuUuid]) -> None:
        """Forget the failures of GPUs that were prepared."""
        for gpu in gpus:
            self._backoffs.pop((node, gpu), None)

    def in_backoff(self) -> dict[tuple[str, GpuUuid], UnavailableReason]:
        """Return the GPUs in backoff, by node and UUID."""
        now, found = self._clock.monotonic(), {}
        for key, backoff in self._backoffs.items():
            if now < backoff.until_s:
                at = self._clock.now() + timedelta(seconds=backoff.until_s - now)
                text = f"could not be prepared, is tried again at {at:%Y-%m-%dT%H:%M:%SZ}"
                found[key] = UnavailableReason(BACKOFF, text)
        return found


def validate_gpu(report: GpuReport) -> UnavailableReason | None:
    """Return why a GPU takes no job by its own report; None if it can."""
    device, held = report.device, report.held
    if device.health is not DeviceHealth.HEALTHY:
        message = shortened(device.health_message)
        return UnavailableReason(UNHEALTHY, f"unhealthy: {message}" if message else "unhealthy")
    if report.has_duplicate_uuid:
        return UnavailableReason(CONTRADICTION, f"its node reports several GPUs with UUID {device.uuid}")
    if report.has_duplicate_index:
        return UnavailableReason(CONTRADICTION, f"its node reports several GPUs with index {device.index}")
    if device.memory_mib - device.reserved_mib < LEAST_MIB:
        reserved = f", of which {device.reserved_mib:,} are reserved" if device.reserved_mib else ""
        has = f"reports {device.memory_mib:,} MiB of memory{reserved}"
        return UnavailableReason(NO_MEMORY, f"{has}: expected at least {LEAST_MIB} MiB to give")
    modes = sorted({reservation.mode for reservation in held})
    if len(modes) > 1:
        return UnavailableReason(CONTRADICTION, f"its reservations contradict each other: {', '.join(modes)}")
    if len(held) > 1 and modes == [SharingMode.EXCLUSIVE]:
        return UnavailableReason(CONTRADICTION, f"its reservations contradict each other: {len(held)} are exclusive")
    reserved_pods = {reservation.pod_uid for reservation in held}
    others = [tenant for tenant in report.measured if tenant.pod_uid not in reserved_pods and tenant.memory_mib > 0]
    if others:
        memory, pods = sum(tenant.memory_mib for tenant in others), {tenant.pod_uid for tenant in others}
        who = f"{'pod' if len(pods) == 1 else 'pods'} {listed(pods)}"
        return UnavailableReason(UNRESERVED_USE, f"{memory:,} MiB are used without a reservation, by {who}")
    return _beyond_limit(report)


def _beyond_limit(report: GpuReport) -> UnavailableReason | None:
    """Return which tenant's measured slowdown beside its co-tenants exceeds its limit; None if there is none."""
    if len(report.held) < 2:
        return None
    for held, found in zip(report.held, report.counted, strict=True):
        slowdown, limit = None if found is None else found.slowdown, held.tenant.max_slowdown
        if slowdown is not None and slowdown > limit:
            who = f"{held.pod_namespace}/{held.job_name}"
            text = f"its tenant {who} was measured to run {slowdown:.2f} times as long as alone, accepts {limit:.2f}"
            return UnavailableReason(BEYOND_LIMIT, text)
    return None


def reuse_equal_parts(old: GpuNode, new: N) -> N:
    """Return a GpuNode with the old spec and devices if they are equal.

    Shared parts need no memory of their own, and are compared by identity.
    """
    if new.spec is not old.spec and new.spec == old.spec:
        new = msgspec.structs.replace(new, spec=old.spec)
    if new.status.devices is not old.status.devices and new.status.devices == old.status.devices:
        new = msgspec.structs.replace(new, status=msgspec.structs.replace(new.status, devices=old.status.devices))
    return new


def _is_older(node: GpuNode, than: GpuNode) -> bool:
    """Return whether a version of an object is older than another; versions of one kind are ordered integers."""
    mine, other = node.metadata, than.metadata
    if mine.uid != other.uid or not (mine.resource_version.isdigit() and other.resource_version.isdigit()):
        return False
    return int(mine.resource_version) < int(other.resource_version)


class ClusterCache:
    """All GpuNodes with their assumed reservations, as objects and as a GPU table.

    A change of a node rewrites only the rows of GPUs whose report has changed, and dates them with a generation.

    Args:
        slots: Places for tenants of each GPU at first; more tenants make the table wider.
        backoff: GPUs in backoff; none are if None.
    """

    def __init__(self, slots: int = 8, backoff: GpuBackoff | None = None) -> None:
        self._backoff = backoff
        # Objects and indices
        self._nodes: dict[str, GpuNode] = {}
        self._assumed: dict[str, dict[PodUid, Reservation]] = {}
        self._nodes_of_pod: dict[PodUid, list[str]] = {}
        self._pods_of_job: dict[JobUid, Counter[PodUid]] = {}
        # Rows: each node has a block; blocks of deleted nodes are used again, by their length.
        self._table = empty_table(0, slots)
        self._view: GpuTable | None = None
        self._grid: NodeGrid | None = None
        self._blocks: dict[str, slice] = {}
        self._free_blocks: dict[int, list[slice]] = {}
        self._used_rows = 0
        self._reports: dict[str, list[GpuReport]] = {}
        # Changes: the generation in which each row was written last.
        self.generation = 0
        """Number of the last change; `snapshot` adds one if availability changed by time."""
        self.freed_at = 0
        """Generation of the last change after which a GPU may hold more."""
        self._written_in: NDArray[np.int64] = np.zeros(0, np.int64)
        self._aggregated = 0
        # Indices in the columns
        self._node_names: list[str] = []
        self._node_ids: dict[str, int] = {}
        self._free_node_ids: list[int] = []
        self._classes: list[DeviceClass] = []
        self._class_ids: dict[DeviceClass, int] = {}
        self._class_sizes: Counter[DeviceClass] = Counter()
        self._kinds: dict[str, list[DeviceClass]] = {}
        self._namespaces: dict[str, int] = {}
        # Reasons why GPUs are unavailable
        self._kube_nodes: dict[str, Node] = {}
        self._refusing: LRUCache[NodeConstraints, Bools] = LRUCache(REMEMBERED_CONSTRAINTS)
        self._unavailable: dict[int, UnavailableReason] = {}
        self._invalid: dict[int, UnavailableReason] = {}
        self._of_nodes: dict[int, dict[str, UnavailableReason]] = {AGENT_DOWN: {}, UNRESERVED_POD: {}, INVALID: {}}
        self._reporters: dict[GpuUuid, list[str]] = {}
        self._duplicates: set[GpuUuid] = set()

    # --- Objects ---------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> Mapping[str, GpuNode]:
        """Every GpuNode by name."""
        return self._nodes

    def node(self, name: str) -> GpuNode | None:
        """Return the newest version of a GpuNode."""
        return self._nodes.get(name)

    def with_assumed(self, name: str) -> GpuNode | None:
        """Return a GpuNode with its assumed reservations, as `snapshot` counts it."""
        node = self._nodes.get(name)
        return None if node is None else self._add_assumed(node)

    def _add_assumed(self, node: GpuNode) -> GpuNode:
        if not (assumed := self._assumed.get(node.metadata.name)):
            return node
        written = {reservation.pod_uid for reservation in node.spec.reservations}
        more = [reservation for uid, reservation in assumed.items() if uid not in written]
        spec = msgspec.structs.replace(node.spec, reservations=[*node.spec.reservations, *more])
        return msgspec.structs.replace(node, spec=spec)

    def nodes_holding(self, pod_uid: PodUid) -> list[str]:
        """Return the nodes on which a pod has a written reservation; more than one only if two schedulers raced."""
        return sorted(self._nodes_of_pod.get(pod_uid, ()))

    def nodes_assuming(self, pod_uid: PodUid) -> list[str]:
        """Return the nodes on which a pod has an assumed reservation."""
        return sorted(name for name, assumed in self._assumed.items() if pod_uid in assumed)

    def pods_of_job(self, job_uid: JobUid) -> set[PodUid]:
        """Return the pods of a job that have reservations, written or assumed."""
        return set(self._pods_of_job.get(job_uid, ()))

    def without_workers(self, job_uid: JobUid, own: Collection[PodUid]) -> Bools | None:
        """Return the mask of the GPUs that no other worker of a job has, shape (gpus,); None if it has no other worker.

        The GPUs of the workers `own` are permitted, too.
        """
        others = self.pods_of_job(job_uid).difference(own)
        if not others:
            return None
        gpus = self.snapshot().gpus
        permitted = np.ones(len(gpus.alive), np.bool_)
        names = {name for uid in others for name in (*self.nodes_holding(uid), *self.nodes_assuming(uid))}
        for row in (row for name in names for row in self._rows_of(name)):
            permitted[row] = not any(tenant.pod_uid in others for tenant in gpus.tenants[row])
        return permitted

    def apply(self, node: GpuNode) -> None:
        """Take in a GpuNode, unless a newer version is here."""
        name = node.metadata.name
        old = self._nodes.get(name)
        if old is not None and _is_older(node, old):
            return
        self._nodes[name] = node
        if old is None or old.spec is not node.spec:
            self._index(name, old, node)
        before = [one.measured for one in self._reports.get(name, ())]
        self._write(name, node)
        if old is None or before != [one.measured for one in self._reports[name]] or may_free_capacity(old, node):
            self.freed_at = self.generation

    def remove(self, name: str) -> None:
        """Forget a deleted GpuNode."""
        if (old := self._nodes.pop(name, None)) is not None:
            self._index(name, old, None)
        self._release_block(name)
        if (number := self._node_ids.pop(name, None)) is not None:
            self._free_node_ids.append(number)
        if self._backoff is not None:
            self._backoff.forget(name)

    def assume(self, name: str, reservation: Reservation) -> None:
        """Count a reservation on a node that is decided and not yet written."""
        assumed = self._assumed.setdefault(name, {})
        if (replaced := assumed.get(reservation.pod_uid)) is not None:
            self._count(replaced, -1)
        assumed[reservation.pod_uid] = reservation
        self._count(reservation, 1)
        self._write_again(name)

    def forget(self, name: str, pod_uid: PodUid) -> None:
        """Count only the written reservation of a pod on a node."""
        assumed = self._assumed.get(name, {})
        if (gone := assumed.pop(pod_uid, None)) is None:
            return
        if not assumed:
            del self._assumed[name]
        self._count(gone, -1)
        if name not in self._nodes_of_pod.get(pod_uid, ()):
            self._write_again(name)
            self.freed_at = self.generation

    def _write_again(self, name: str) -> None:
        if (node := self._nodes.get(name)) is not None:
            self._write(name, node)

    def _index(self, name: str, old: GpuNode | None, new: GpuNode | None) -> None:
        before, now = ({} if of is None else {r.pod_uid: r for r in of.spec.reservations} for of in (old, new))
        for uid, reservation in before.items():
            if uid not in now or now[uid].job_uid != reservation.job_uid:
                self._nodes_of_pod[uid].remove(name)
                if not self._nodes_of_pod[uid]:
                    del self._nodes_of_pod[uid]
                self._count(reservation, -1)
        for uid, reservation in now.items():
            if uid not in before or before[uid].job_uid != reservation.job_uid:
                self._nodes_of_pod.setdefault(uid, []).append(name)
                self._count(reservation, 1)

    def _count(self, reservation: Reservation, by: int) -> None:
        pods = self._pods_of_job.setdefault(reservation.job_uid, Counter())
        pods[reservation.pod_uid] += by
        if not pods[reservation.pod_uid]:
            del pods[reservation.pod_uid]
        if not pods:
            del self._pods_of_job[reservation.job_uid]

    # --- The table -------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the table as it is now; valid until the next change."""
        self._update_unavailable()
        if (rows := self.changed_since(self._aggregated)).size:
            update_aggregates(self._table, rows)
        self._aggregated = self.generation
        if self._view is None:
            self._view = self._table.shown(self._used_rows)
        if self._grid is None:
            self._grid = grid_of(self._view.alive, self._view.node)
        return Snapshot(
            gpus=self._view,
            grid=self._grid,
            node_names=self._node_names,
            node_ids=self._node_ids,
            classes=self._classes,
            present_classes=self._class_sizes.keys(),
            namespaces=self._namespaces,
            unavailable=self._unavailable,
            kube_nodes=self._kube_nodes,
            refusing_nodes=self._refusing_nodes,
        )

    def changed_since(self, generation: int) -> Rows:
        """Return the rows that changed after a generation, in rising order."""
        if generation == self.generation:
            return np.zeros(0, np.intp)
        return (self._written_in[: self._used_rows] > generation).nonzero()[0]

    def _mark(self, rows: list[int] | slice) -> None:
        self.generation += 1
        self._written_in[rows] = self.generation

    def _write(self, name: str, node: GpuNode) -> None:
        """Write the rows of a node's GPUs whose reports have changed."""
        now, before = reports_of(self._add_assumed(node)), self._reports.get(name, [])
        has_new_devices = name not in self._blocks or [one.device for one in now] != [one.device for one in before]
        if len(now) != len(before):
            self._release_block(name)
            before = []
        self._reports[name] = now
        block = self._block(name, len(now), max((len(one.held) for one in now), default=0))
        if has_new_devices:
            self._write_devices(name, block, [one.device for one in now])
        changed = [place for place, one in enumerate(now) if not before or one != before[place]]
        for place in changed:
            row = block.start + place
            write_tenants(self._table, row, now[place], self._namespaces)
            self._invalid.pop(row, None)
            if (reason := validate_gpu(now[place])) is not None:
                self._invalid[row] = reason
        if changed:
            self._mark([block.start + place for place in changed])

    def _write_devices(self, name: str, block: slice, devices: list[Device]) -> None:
        if name not in self._node_ids:
            self._node_ids[name] = self._free_node_ids.pop() if self._free_node_ids else len(self._node_names)
            self._node_names[self._node_ids[name] : self._node_ids[name] + 1] = [name]
            self._refusing.clear()
        kinds = [device_class(device) for device in devices]
        self._set_kinds(name, kinds)
        self._set_uuids(name, {device.uuid for device in devices}, set(self._table.uuid[block].tolist()))
        for row, (device, kind) in enumerate(zip(devices, kinds, strict=True), start=block.start):
            if kind not in self._class_ids:
                self._class_ids[kind] = len(self._classes)
                self._classes.append(kind)
            class_id = self._class_ids[kind]
            write_device(self._table, row, device, node=self._node_ids[name], kind=kind, class_id=class_id)
        self._table.nvlink_domain[block] = nvlink_domains(devices)
        self._grid = None

    def _set_kinds(self, name: str, kinds: list[DeviceClass]) -> None:
        self._class_sizes.update(kinds)
        self._class_sizes.subtract(self._kinds.pop(name, []))
        self._class_sizes = +self._class_sizes
        if kinds:
            self._kinds[name] = kinds

    def _set_uuids(self, name: str, now: set[GpuUuid], before: set[GpuUuid]) -> None:
        for uuid in before - now:
            if name in (nodes := self._reporters.get(uuid, [])):
                nodes.remove(name)
                if not nodes:
                    del self._reporters[uuid]
        for uuid in now:
            if name not in (nodes := self._reporters.setdefault(uuid, [])):
                nodes.append(name)
        changed = before | now
        self._duplicates -= changed
        self._duplicates |= {uuid for uuid in changed if len(self._reporters.get(uuid, ())) > 1}

    def _block(self, name: str, gpus: int, tenants: int) -> slice:
        """Return the rows of a node's GPUs: its own, free ones, or new ones."""
        room, width = self._table.memory_mib.shape
        block = self._blocks.get(name)
        if block is None:
            free = self._free_blocks.get(gpus)
            block = free.pop() if free else slice(self._used_rows, self._used_rows + gpus)
            self._used_rows, self._view = max(self._used_rows, block.stop), None
            self._blocks[name] = block
        if block.stop > room or tenants > width:
            room = max(room, 64, block.stop + block.stop // 2) if block.stop > room else room
            self._table, self._view = self._table.resized(room, max(width, tenants)), None
            self._written_in = np.append(self._written_in, np.zeros(room - len(self._written_in), np.int64))
        return block

    def _release_block(self, name: str) -> None:
        self._reports.pop(name, None)
        if (block := self._blocks.pop(name, None)) is None:
            return
        self._set_kinds(name, [])
        self._set_uuids(name, set(), set(self._table.uuid[block].tolist()))
        self._table.alive[block], self._grid = False, None
        for row in range(block.start, block.stop):
            self._invalid.pop(row, None)
        self._mark(block)
        self._free_blocks.setdefault(block.stop - block.start, []).append(block)

    # --- Availability ----------------------------------------------------------------------------------------------

    def set_unavailable(self, name: str, kind: int, why: str | None) -> None:
        """Make all GPUs of a node unavailable for a reason of a kind; None ends it.

        The kind is AGENT_DOWN, UNRESERVED_POD or INVALID.
        """
        self._of_nodes[kind].pop(name, None)
        if why is not None:
            self._of_nodes[kind][name] = UnavailableReason(kind, why)

    def set_kube_node(self, name: str, node: Node | None) -> None:
        """Take in a Node, whose taints, cordon and labels decide which pods accept it; None if it was deleted."""
        old = self._kube_nodes.pop(name, None)
        if node is not None:
            self._kube_nodes[name] = node
        if old and node and (old.spec, old.metadata.labels) == (node.spec, node.metadata.labels):
            return
        if name in self._node_ids:
            for constraints, refusing in self._refusing.items():
                refusing[self._node_ids[name]] = self._is_refused(name, constraints)
        if rows := self._rows_of(name):
            self._mark(rows)
            self.freed_at = self.generation

    def _refusing_nodes(self, constraints: NodeConstraints) -> Bools:
        found = self._refusing.get(constraints)
        if found is None:
            found = np.array([self._is_refused(name, constraints) for name in self._node_names], np.bool_)
            self._refusing[constraints] = found
        return found

    def _is_refused(self, name: str, constraints: NodeConstraints) -> bool:
        return (node := self._kube_nodes.get(name)) is not None and constraints.refusal(node) is not None

    def is_agent_down(self, name: str) -> bool:
        """Return whether no agent serves the kubelet of a node."""
        return name in self._of_nodes[AGENT_DOWN]

    def _update_unavailable(self) -> None:
        """Write the column: time makes GPUs available or unavailable without any change of an object."""
        found: dict[int, UnavailableReason] = {}
        for name, reason in self._of_nodes[AGENT_DOWN].items():
            found |= dict.fromkeys(self._rows_of(name), reason)
        for uuid in self._duplicates:
            nodes = self._reporters[uuid]
            reason = UnavailableReason(DUPLICATE_UUID, f"several nodes report a GPU with UUID {uuid}: {listed(nodes)}")
            for name in nodes:
                found |= dict.fromkeys(self._rows_of(name, uuid), reason)
        found |= self._invalid
        if self._backoff is not None:
            for (name, uuid), reason in self._backoff.in_backoff().items():
                found |= dict.fromkeys(self._rows_of(name, uuid), reason)
        for name, reason in (*self._of_nodes[UNRESERVED_POD].items(), *self._of_nodes[INVALID].items()):
            found |= dict.fromkeys(self._rows_of(name), reason)
        changed = sorted(found.keys() ^ self._unavailable.keys())
        self._unavailable = found
        if changed:
            self._table.unavailable[changed] = [row in found for row in changed]
            self._mark(changed)
            if any(row not in found for row in changed):
                self.freed_at = self.generation

    def _rows_of(self, name: str, uuid: GpuUuid | None = None) -> list[int]:
        block = self._blocks.get(name, slice(0, 0))
        return [r for r in range(block.start, block.stop) if uuid is None or self._table.uuid[r] == uuid]


def may_free_capacity(old: GpuNode | None, new: GpuNode) -> bool:
    """Return whether a change of a GpuNode may give a pending job room: the QueueingHint of the queue.

    A reservation that ended or shrank does, and a GPU that appeared or recovered; a GPU that changed its mode for a
    tenant, or failed, does not.
    """
    if old is None or (_has_unreserved_use(old) and not _has_unreserved_use(new)):
        return True
    if old.spec is not new.spec:
        left = {one.pod_uid: one.tenant for one in new.spec.reservations}
        if any(left.get(one.pod_uid) != one.tenant for one in old.spec.reservations):
            return True
    if old.status.devices == new.status.devices:
        return False
    before = {device.uuid: device for device in old.status.devices}
    return any(_may_hold_more(before.get(device.uuid), device) for device in new.status.devices)


def _has_unreserved_use(node: GpuNode) -> bool:
    reserved = {reservation.pod_uid for reservation in node.spec.reservations}
    return any(tenant.pod_uid not in reserved and tenant.memory_mib for tenant in node.status.tenants)


def _may_hold_more(old: Device | None, new: Device) -> bool:
    if old is None or (old.health is not new.health and new.health is DeviceHealth.HEALTHY):
        return True
    return device_class(old) != device_class(new) or old.nvlink_peers != new.nvlink_peers


def without_pods(node: GpuNode, pods: Collection[PodUid]) -> GpuNode:
    """Return a GpuNode without the reservations and measurements of some pods."""
    reservations = [one for one in node.spec.reservations if one.pod_uid not in pods]
    tenants = [one for one in node.status.tenants if one.pod_uid not in pods]
    return msgspec.structs.replace(
        node,
        spec=msgspec.structs.replace(node.spec, reservations=reservations),
        status=msgspec.structs.replace(node.status, tenants=tenants),
    )
