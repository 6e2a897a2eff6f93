"""The cluster as the extender knows it: GpuNodes and their arrays, kept up to date node by node."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np
from carpool_core.products import DeviceClass, device_class
from carpool_core.resources.node import Device, GpuNode, Reservation
from carpool_core.values import DeviceHealth, GpuUuid, JobUid, PodUid

from carpool_extender.cache.gpu_table import (
    GpuTable,
    NodeGrid,
    Rows,
    Snapshot,
    Told,
    UnavailableReason,
    empty_table,
    grid_of,
    nvlink_domains,
    said_of,
    told_by,
    touched,
    update_aggregates,
    write_device,
    write_tenants,
)
from carpool_extender.cache.health import (
    DISPUTED,
    INVALID,
    GpuAvailability,
    has_unreserved_usage,
    listed,
    shortened,
    validate_gpu,
)

K = TypeVar("K", bound=Hashable)


class IdPool(Generic[K]):
    """Numbers things from 0 for as long as somebody holds them; a number that nobody holds goes to the next thing.

    So there are never more numbers than things that were held at the same time.
    """

    def __init__(self) -> None:
        self.ids: dict[K, int] = {}
        """The number of each thing that is held; do not change it."""
        self.things: list[K] = []
        """The things by number; what stands at a number that nobody holds means nothing."""
        self._holders: list[int] = []
        self._spare: list[int] = []

    def hold(self, things: Iterable[K]) -> None:
        """Keep the numbers of some things, and give numbers to those that have none."""
        for thing in things:
            number = self.ids.get(thing)
            self._holders[self._new(thing) if number is None else number] += 1

    def let_go(self, things: Iterable[K]) -> None:
        """Take back what `hold` did once for each of them."""
        for thing in things:
            number = self.ids[thing]
            self._holders[number] -= 1
            if not self._holders[number]:
                del self.ids[thing]
                self._spare.append(number)

    def _new(self, thing: K) -> int:
        if self._spare:
            number = self._spare.pop()
            self.things[number] = thing
        else:
            number = len(self.things)
            self.things.append(thing)
            self._holders.append(0)
        self.ids[thing] = number
        return number


N = TypeVar("N", bound=GpuNode)


def sharing(old: GpuNode, new: N) -> N:
    """Return a state with another's parts where these are equal.

    Most of what agents tell is that they live. Each of these words would hold the whole of its node once more, and
    everybody who asks what has changed would have to compare it.
    """
    if new.spec is not old.spec and new.spec == old.spec:
        new = msgspec.structs.replace(new, spec=old.spec)
    if new.status.devices is not old.status.devices and new.status.devices == old.status.devices:
        new = msgspec.structs.replace(new, status=msgspec.structs.replace(new.status, devices=old.status.devices))
    return new


def differ(old: GpuNode, new: GpuNode) -> bool:
    """Whether anything has changed that decisions look at; with tenants the time of their measures is such a thing."""
    if old.spec != new.spec or old.status.devices != new.status.devices:
        return True
    if old.status.tenants != new.status.tenants:
        return True
    return bool(new.status.tenants) and old.status.heartbeat_time != new.status.heartbeat_time


def is_older(node: GpuNode, than: GpuNode) -> bool:
    """Whether a version comes before another of the same object; versions of one kind are ordered integers."""
    mine, other = node.metadata, than.metadata
    if mine.uid != other.uid or not (mine.resource_version.isdigit() and other.resource_version.isdigit()):
        return False
    return int(mine.resource_version) < int(other.resource_version)


class DuplicateUuids:
    """The GPUs of all nodes by UUID. What a node tells costs as much as it has GPUs, whatever others tell."""

    def __init__(self) -> None:
        self._rows: dict[str, Mapping[GpuUuid, int]] = {}
        self._only: dict[GpuUuid, str] = {}
        """Who tells of a GPU; means nothing where several do."""
        self._disputed: dict[GpuUuid, set[str]] = {}
        self._unavailable: dict[int, UnavailableReason] | None = {}
        """None where it has to be worked out anew."""

    def tell(self, node: str, rows: Mapping[GpuUuid, int]) -> None:
        """Take in of which GPUs a node tells now, and their rows; what it told before is forgotten."""
        before = self._rows.get(node, {})
        if rows == before:
            return
        self._rows.pop(node, None)
        self._unavailable = None
        if rows:
            self._rows[node] = rows
        for uuid in before.keys() - rows.keys():
            self._discard(uuid, node)
        for uuid in rows.keys() - before.keys():
            self._add(uuid, node)

    def nodes(self) -> set[str]:
        """Names of the nodes that tell of a GPU of which another tells, too."""
        return set().union(*self._disputed.values())

    def unavailable(self) -> dict[int, UnavailableReason]:
        """Rows of the GPUs of which several nodes tell, on each of these; whoever asks may change what it gets."""
        if self._unavailable is None:
            self._unavailable = self._worked_out()
        return self._unavailable.copy()

    def _worked_out(self) -> dict[int, UnavailableReason]:
        found: dict[int, UnavailableReason] = {}
        for uuid, nodes in self._disputed.items():
            why = UnavailableReason(DISPUTED, f"several nodes tell of a GPU by the UUID {uuid}: {listed(nodes)}")
            found.update((self._rows[node][uuid], why) for node in nodes)
        return found

    def _add(self, uuid: GpuUuid, node: str) -> None:
        if (nodes := self._disputed.get(uuid)) is not None:
            nodes.add(node)
        elif (other := self._only.setdefault(uuid, node)) != node:
            self._disputed[uuid] = {other, node}

    def _discard(self, uuid: GpuUuid, node: str) -> None:
        nodes = self._disputed.get(uuid)
        if nodes is None:
            del self._only[uuid]
            return
        nodes.remove(node)
        if len(nodes) == 1:
            (self._only[uuid],) = self._disputed.pop(uuid)


LONGEST = 2048
"""Changes that are remembered; who is further behind looks at everything again."""


class ChangeLog:
    """The latest changes of the rows of a cluster."""

    def __init__(self) -> None:
        self._changes: list[Sequence[int]] = []
        self._first = 0
        self._settled = 0

    @property
    def generation(self) -> int:
        """Number of changes until now."""
        return self._first + len(self._changes)

    def note(self, rows: Sequence[int]) -> None:
        """Write down that rows have changed."""
        self._changes.append(rows)
        if len(self._changes) > 2 * LONGEST:
            # What is not settled must stay, however much it is: nothing else tells of it.
            forgotten = min(LONGEST, self._settled - self._first)
            del self._changes[:forgotten]
            self._first += forgotten

    def since(self, generation: int) -> Rows | None:
        """Return the rows that changed after a generation, in rising order; None where that is too long ago."""
        if generation < self._first or self.generation - generation > LONGEST:
            return None
        return _together(self._changes[generation - self._first :])

    def unsettled(self) -> Rows:
        """Return the rows that changed since this was asked last."""
        rows = _together(self._changes[self._settled - self._first :])
        self._settled = self.generation
        return rows


def _together(changes: list[Sequence[int]]) -> Rows:
    # Changes are of a few rows each, for which a set is several times as quick as arrays are.
    rows = sorted(set().union(*changes))
    return np.fromiter(rows, np.intp, len(rows))


V = TypeVar("V")


class MultiMap(Generic[K, V]):
    """Things by keys, each once. With one thing each, sets would take several times the memory.

    Adding the n-th thing under a key copies those before it.
    """

    def __init__(self) -> None:
        self._found: dict[K, tuple[V, ...]] = {}

    def of(self, key: K) -> tuple[V, ...]:
        """Return what is found under a key, in the order in which it came."""
        return self._found.get(key, ())

    def add(self, key: K, thing: V) -> None:
        """Have a thing found under a key."""
        found = self.of(key)
        if thing not in found:
            self._found[key] = (*found, thing)

    def discard(self, key: K, thing: V) -> None:
        """Have it found there no more."""
        left = tuple(one for one in self.of(key) if one != thing)
        if left:
            self._found[key] = left
        else:
            self._found.pop(key, None)


class Assumed:
    """What is about to be written on nodes, so that whoever asks meanwhile is sent elsewhere."""

    def __init__(self) -> None:
        self._on: dict[str, dict[PodUid, Reservation]] = {}
        self._of_job: MultiMap[JobUid, tuple[str, PodUid]] = MultiMap()

    def add(self, name: str, reservation: Reservation) -> None:
        """Count a reservation on a node."""
        self._on.setdefault(name, {})[reservation.pod_uid] = reservation
        self._of_job.add(reservation.job_uid, (name, reservation.pod_uid))

    def discard(self, name: str, pod_uid: PodUid) -> bool:
        """Count a pod's no more; say whether it did."""
        on_node = self._on.get(name, {})
        gone = on_node.pop(pod_uid, None)
        if not on_node:
            self._on.pop(name, None)
        if gone is not None:
            self._of_job.discard(gone.job_uid, (name, pod_uid))
        return gone is not None

    def pods_of(self, job_uid: JobUid) -> Iterable[PodUid]:
        """UIDs of a job's pods for which something is counted."""
        return (pod for _, pod in self._of_job.of(job_uid))

    def beside(self, node: GpuNode) -> GpuNode:
        """Return a node with what is about to be written there."""
        if not (on_node := self._on.get(node.metadata.name)):
            return node
        held = {reservation.pod_uid for reservation in node.spec.reservations}
        more = [reservation for uid, reservation in on_node.items() if uid not in held]
        spec = msgspec.structs.replace(node.spec, reservations=[*node.spec.reservations, *more])
        return msgspec.structs.replace(node, spec=spec)


class ClusterCache:
    """All GpuNodes. A change of a node rewrites those of its rows that it is about, and a journal tells which.

    Args:
        slots: Tenants for which each GPU has room from the start; more make the arrays wider.
        availability: Which GPUs are hindered, as time goes by; none where left out.
    """

    def __init__(self, slots: int = 8, availability: GpuAvailability | None = None) -> None:
        self._availability = availability
        self._columns = empty_table(0, slots)
        self._shown: GpuTable | None = None
        self._grid: NodeGrid | None = None
        self._used = 0
        self._journal = ChangeLog()
        self._unavailable: dict[int, UnavailableReason] = {}
        self._doubts: dict[str, dict[int, UnavailableReason]] = {}
        self._nonsense: dict[str, UnavailableReason] = {}
        self._claims = DuplicateUuids()
        self._written: dict[str, Told] = {}
        self._blocks: dict[str, slice] = {}
        self._free: dict[int, list[slice]] = {}
        self._nodes: dict[str, GpuNode] = {}
        self._assumed = Assumed()
        self._holders: MultiMap[PodUid, str] = MultiMap()
        self._of_job: MultiMap[JobUid, tuple[str, PodUid]] = MultiMap()
        self._names: IdPool[str] = IdPool()
        self._classes: IdPool[DeviceClass] = IdPool()
        self._namespaces: IdPool[str] = IdPool()
        self._held: dict[str, tuple[frozenset[DeviceClass], frozenset[str]]] = {}
        self.freed_at = 0
        """Generation of the last change after which a GPU may hold more."""

    @property
    def nodes(self) -> dict[str, GpuNode]:
        """Every GpuNode by name; do not change it."""
        return self._nodes

    def node(self, name: str) -> GpuNode | None:
        """Return the newest GpuNode of that name that was seen."""
        return self._nodes.get(name)

    def with_assumed(self, name: str) -> GpuNode | None:
        """Return the same with what is about to be written there, as `snapshot` counts it."""
        node = self._nodes.get(name)
        return None if node is None else self._assumed.beside(node)

    def nodes_holding(self, pod_uid: PodUid) -> list[str]:
        """Names of the nodes on which a pod has a reservation: none, or one; more only if two schedulers raced."""
        return sorted(self._holders.of(pod_uid))

    def pods_of_job(self, job_uid: JobUid) -> set[PodUid]:
        """UIDs of the pods of a job that have reservations, written or about to be."""
        return {pod for _, pod in self._of_job.of(job_uid)}.union(self._assumed.pods_of(job_uid))

    def snapshot(self) -> Snapshot:
        """Return the arrays as they are now; they hold until the next change."""
        self._note_hindrances()
        if (rows := self._journal.unsettled()).size:
            update_aggregates(self._columns, rows)
        if self._shown is None:
            self._shown = self._columns.shown(self._used)
        if self._grid is None:
            self._grid = grid_of(self._shown.alive, self._shown.node)
        return Snapshot(
            gpus=self._shown,
            grid=self._grid,
            node_names=self._names.things,
            node_ids=self._names.ids,
            classes=self._classes.things,
            class_ids=self._classes.ids,
            namespaces=self._namespaces.ids,
            unavailable=self._unavailable,
        )

    @property
    def generation(self) -> int:
        """Number of the last change; a snapshot that was asked for brings hindrances up to date."""
        return self._journal.generation

    def changed_since(self, generation: int) -> Rows | None:
        """Return the rows that changed after that generation; None where too much did."""
        return self._journal.since(generation)

    def unavailable_nodes(self) -> set[str]:
        """Names of the nodes with GPUs that take nobody at this moment, whatever their health."""
        found = {*self._doubts, *self._nonsense, *self._claims.nodes()}
        if self._availability is not None:
            found.update(self._availability.silent(), (node for node, _ in self._availability.resting()))
        return found

    def set_unreadable(self, name: str, why: str | None) -> None:
        """Send nobody to a node whose GpuNode nobody can read; what is known of it is as it was before.

        Args:
            name: Name of the GpuNode.
            why: What is wrong with it; None once it can be read again, or is gone.
        """
        self._nonsense.pop(name, None)
        if why is not None:
            self._nonsense[name] = UnavailableReason(INVALID, f"GpuNode {name} makes no sense: {shortened(why)}")

    def _note_hindrances(self) -> None:
        """Bring the column up to date: time hinders GPUs and sets them free again, without any change of an object."""
        found: dict[int, UnavailableReason] = {}
        resting: dict[tuple[str, GpuUuid], UnavailableReason] = {}
        if self._availability is not None:
            resting = self._availability.excluded()
            # What speaks against single GPUs comes over it: an agent that reports again makes nothing of that good.
            self._hinder(found, self._availability.silent())
        found |= self._claims.unavailable()
        for doubted in self._doubts.values():
            found |= doubted
        for (node, uuid), why in resting.items():
            block = self._blocks.get(node, slice(0, 0))
            found |= {r: why for r in range(block.start, block.stop) if self._columns.uuid[r] == uuid}
        self._hinder(found, self._nonsense)
        changed, lifted = found.keys() ^ self._unavailable.keys(), self._unavailable.keys() - found.keys()
        self._unavailable = found
        if changed:
            rows = sorted(changed)
            self._columns.unavailable[rows] = [row in found for row in rows]
            self._journal.note(rows)
            if lifted:
                self.freed_at = self.generation

    def _hinder(self, found: dict[int, UnavailableReason], nodes: Mapping[str, UnavailableReason]) -> None:
        for node, why in nodes.items():
            block = self._blocks.get(node, slice(0, 0))
            found |= dict.fromkeys(range(block.start, block.stop), why)

    def apply(self, node: GpuNode) -> bool:
        """Take in a GpuNode, unless a newer one was seen; say whether anything that decisions look at has changed."""
        name = node.metadata.name
        old = self._nodes.get(name)
        if old is not None and is_older(node, old):
            return False
        self._nodes[name] = node
        if self._availability is not None:
            self._availability.record_heartbeat(name, node.status.heartbeat_time)
        if old is not None and not differ(old, node):
            return False
        if old is None or old.spec is not node.spec:
            self._index_holders(name, old, node)
        self._write(name, node)
        if old is None or old.status.tenants != node.status.tenants or may_free_capacity(old, node):
            self.freed_at = self.generation
        return True

    def assume(self, name: str, reservation: Reservation) -> None:
        """Count a reservation that is about to be written, so that whoever asks meanwhile is sent elsewhere."""
        self._assumed.add(name, reservation)
        self._write_again(name)

    def forget(self, name: str, pod_uid: PodUid) -> None:
        """Count only what is written of a pod."""
        if self._assumed.discard(name, pod_uid) and name not in self._holders.of(pod_uid):
            self._write_again(name)
            self.freed_at = self.generation

    def _write_again(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is not None:
            self._write(name, node)

    def remove(self, name: str) -> None:
        """Forget a GpuNode that was deleted."""
        old = self._nodes.pop(name, None)
        if old is not None:
            self._index_holders(name, old, None)
        self._release_rows(name)
        self._hold(name, None)
        if self._availability is not None:
            self._availability.forget(name)

    def _index_holders(self, name: str, old: GpuNode | None, new: GpuNode | None) -> None:
        before, now = _pods_on(old), _pods_on(new)
        for pod, job in before - now:
            self._holders.discard(pod, name)
            self._of_job.discard(job, (name, pod))
        for pod, job in now - before:
            self._holders.add(pod, name)
            self._of_job.add(job, (name, pod))

    def _hold(self, name: str, now: tuple[frozenset[DeviceClass], frozenset[str]] | None) -> None:
        """Keep numbers for what a node's rows speak of, and no longer for what they spoke of before."""
        before = self._held.get(name)
        if now == before:
            return
        for held, change in ((now, IdPool.hold), (before, IdPool.let_go)):
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
        self._written.pop(name, None)
        self._doubts.pop(name, None)
        self._claims.tell(name, {})
        if block is not None:
            self._columns.alive[block] = False
            self._grid = None
            self._journal.note(range(block.start, block.stop))
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
            self._used, self._shown = max(self._used, block.stop), None
            self._blocks[name] = block
        if block.stop > room or tenants > width:
            more = max(room, 64, block.stop + block.stop // 2) if block.stop > room else room
            self._columns, self._shown = self._columns.resized(more, max(width, tenants)), None
        return block

    def _write(self, name: str, node: GpuNode) -> None:
        """Write the rows of which the node says something else than what stands there."""
        node, written = self._assumed.beside(node), self._written.get(name)
        told = told_by(node)
        is_new = written is None or len(node.status.devices) != len(written.node.status.devices)
        only = None if written is None or is_new else touched(written, told)
        now = different = said_of(told, only)
        is_changed = is_new
        if written is not None and not is_new and only is None:
            before = said_of(written)
            different = [said for said, was in zip(now, before, strict=True) if said != was]
            is_changed = any(said.device != was.device for said, was in zip(now, before, strict=True))
        devices = [said.device for said in now]
        kinds = [device_class(device) for device in devices] if is_changed else []
        if is_changed or written is None or written.node.spec is not node.spec:
            namespaces = frozenset(reservation.pod_namespace for reservation in node.spec.reservations)
            self._hold(name, (frozenset(kinds) if is_changed else self._held[name][0], namespaces))
        block = self._rows(name, len(node.status.devices), max((len(said.held) for said in now), default=0))
        if is_changed:
            self._describe(name, block, devices, kinds)
            self._claims.tell(name, {device.uuid: row for row, device in enumerate(devices, start=block.start)})
        rows = [block.start + said.place for said in different]
        for row, said in zip(rows, different, strict=True):
            write_tenants(self._columns, row, said, self._namespaces.ids)
        self._doubt(name, dict(zip(rows, map(validate_gpu, different), strict=True)))
        self._journal.note(rows)
        self._written[name] = told

    def _describe(self, name: str, block: slice, devices: list[Device], kinds: list[DeviceClass]) -> None:
        node, columns, self._grid = self._names.ids[name], self._columns, None
        columns.nvlink_domain[block] = nvlink_domains(devices)
        for row, (device, kind) in enumerate(zip(devices, kinds, strict=True), start=block.start):
            write_device(columns, row, device, kind, of=(node, self._classes.ids[kind]))

    def _doubt(self, name: str, found: dict[int, UnavailableReason | None]) -> None:
        """Keep in mind which rows of a node are in doubt, some of which were looked at again."""
        doubted = {row: why for row, why in self._doubts.pop(name, {}).items() if row not in found}
        doubted |= {row: why for row, why in found.items() if why is not None}
        if doubted:
            self._doubts[name] = doubted


def _pods_on(node: GpuNode | None) -> set[tuple[PodUid, JobUid]]:
    """Return the pods that have reservations on a node, each with its job."""
    return {(one.pod_uid, one.job_uid) for one in node.spec.reservations} if node is not None else set()


def may_free_capacity(old: GpuNode | None, new: GpuNode) -> bool:
    """Return whether a change of a GpuNode may give a pending job room: the QueueingHint of the queue.

    A reservation that ended or shrank does, and a GPU that appeared or recovered; a GPU that changed its mode for a
    tenant, or failed, does not.
    """
    if old is None or (has_unreserved_usage(old) and not has_unreserved_usage(new)):
        return True
    if old.spec is not new.spec:
        left = {one.pod_uid: one.tenant for one in new.spec.reservations}
        if any(left.get(one.pod_uid) != one.tenant for one in old.spec.reservations):
            return True
    if old.status.devices is new.status.devices:
        return False  # as in each sign of life
    before = {device.uuid: device for device in old.status.devices}
    return any(_may_hold_more(before.get(device.uuid), device) for device in new.status.devices)


def _may_hold_more(old: Device | None, new: Device) -> bool:
    if old is None or (old.health is not new.health and new.health is DeviceHealth.HEALTHY):
        return True
    return device_class(old) != device_class(new) or old.nvlink_peers != new.nvlink_peers
