"""The cluster as the extender knows it: GpuNodes and their arrays, kept up to date node by node."""

from collections.abc import Mapping

from carpool_core.deviceclass import DeviceClass, class_of
from carpool_core.resources.node import Device, GpuNode, Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid

from carpool_extender.state.aggregates import work_out
from carpool_extender.state.assumed import Assumed
from carpool_extender.state.claims import Claims
from carpool_extender.state.doubts import NONSENSE, doubt, shortened
from carpool_extender.state.grid import Grid, grid_of
from carpool_extender.state.islands import islands
from carpool_extender.state.journal import Journal
from carpool_extender.state.numbering import Numbering
from carpool_extender.state.rows import Told, said_of, told_by, touched, write_device, write_tenants
from carpool_extender.state.several import Several
from carpool_extender.state.standing import Hindrance, Standing
from carpool_extender.state.versions import differ, is_older
from carpool_extender.state.view import Columns, Rows, View, empty_columns


class Cluster:
    """All GpuNodes. A change of a node rewrites those of its rows that it is about, and a journal tells which.

    Args:
        slots: Tenants for which each GPU has room from the start; more make the arrays wider.
        standing: Which GPUs are hindered, as time goes by; none where left out.
    """

    def __init__(self, slots: int = 8, standing: Standing | None = None) -> None:
        self._standing = standing
        self._columns = empty_columns(0, slots)
        self._shown: Columns | None = None
        self._grid: Grid | None = None
        self._used = 0
        self._journal = Journal()
        self._hindered: dict[int, Hindrance] = {}
        self._doubts: dict[str, dict[int, Hindrance]] = {}
        self._nonsense: dict[str, Hindrance] = {}
        self._claims = Claims()
        self._written: dict[str, Told] = {}
        self._blocks: dict[str, slice] = {}
        self._free: dict[int, list[slice]] = {}
        self._nodes: dict[str, GpuNode] = {}
        self._assumed = Assumed()
        self._holders: Several[PodUid, str] = Several()
        self._of_job: Several[JobUid, tuple[str, PodUid]] = Several()
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

    def counted(self, name: str) -> GpuNode | None:
        """Return the same with what is about to be written there, as `view` counts it."""
        node = self._nodes.get(name)
        return None if node is None else self._assumed.beside(node)

    def holders(self, pod_uid: PodUid) -> list[str]:
        """Names of the nodes on which a pod has a reservation: none, or one; more only if two schedulers raced."""
        return sorted(self._holders.of(pod_uid))

    def pods_of(self, job_uid: JobUid) -> set[PodUid]:
        """UIDs of the pods of a job that have reservations, written or about to be."""
        return {pod for _, pod in self._of_job.of(job_uid)}.union(self._assumed.pods_of(job_uid))

    def view(self) -> View:
        """Return the arrays as they are now; they hold until the next change."""
        self._note_hindrances()
        if (rows := self._journal.unsettled()).size:
            work_out(self._columns, rows)
        if self._shown is None:
            self._shown = self._columns.shown(self._used)
        if self._grid is None:
            self._grid = grid_of(self._shown.alive, self._shown.node)
        return View(
            columns=self._shown,
            grid=self._grid,
            node_names=self._names.things,
            node_ids=self._names.ids,
            classes=self._classes.things,
            class_ids=self._classes.ids,
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
        found = {*self._doubts, *self._nonsense, *self._claims.nodes()}
        if self._standing is not None:
            found.update(self._standing.silent(), (node for node, _ in self._standing.resting()))
        return found

    def note_unreadable(self, name: str, why: str | None) -> None:
        """Send nobody to a node whose GpuNode nobody can read; what is known of it is as it was before.

        Args:
            name: Name of the GpuNode.
            why: What is wrong with it; None once it can be read again, or is gone.
        """
        self._nonsense.pop(name, None)
        if why is not None:
            self._nonsense[name] = Hindrance(NONSENSE, f"GpuNode {name} makes no sense: {shortened(why)}")

    def _note_hindrances(self) -> None:
        """Bring the column up to date: time hinders GPUs and sets them free again, without any change of an object."""
        found: dict[int, Hindrance] = {}
        resting: dict[tuple[str, GpuUuid], Hindrance] = {}
        if self._standing is not None:
            resting = self._standing.left_alone()
            # What speaks against single GPUs comes over it: an agent that reports again makes nothing of that good.
            self._hinder(found, self._standing.silent())
        found |= self._claims.hindered()
        for doubted in self._doubts.values():
            found |= doubted
        for (node, uuid), why in resting.items():
            block = self._blocks.get(node, slice(0, 0))
            found |= {r: why for r in range(block.start, block.stop) if self._columns.uuid[r] == uuid}
        self._hinder(found, self._nonsense)
        changed = found.keys() ^ self._hindered.keys()
        self._hindered = found
        if changed:
            rows = sorted(changed)
            self._columns.hindered[rows] = [row in found for row in rows]
            self._journal.note(rows)

    def _hinder(self, found: dict[int, Hindrance], nodes: Mapping[str, Hindrance]) -> None:
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
        if self._standing is not None:
            self._standing.heard(name, node.status.heartbeat_time)
        if old is not None and not differ(old, node):
            return False
        if old is None or old.spec is not node.spec:
            self._index_holders(name, old, node)
        self._write(name, node)
        return True

    def assume(self, name: str, reservation: Reservation) -> None:
        """Count a reservation that is about to be written, so that whoever asks meanwhile is sent elsewhere."""
        self._assumed.add(name, reservation)
        self._write_again(name)

    def assume_no_more(self, name: str, pod_uid: PodUid) -> None:
        """Count only what is written of a pod."""
        if self._assumed.discard(name, pod_uid):
            self._write_again(name)

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
        if self._standing is not None:
            self._standing.forget(name)

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
        kinds = [class_of(device) for device in devices] if is_changed else []
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
        self._doubt(name, dict(zip(rows, map(doubt, different), strict=True)))
        self._journal.note(rows)
        self._written[name] = told

    def _describe(self, name: str, block: slice, devices: list[Device], kinds: list[DeviceClass]) -> None:
        node, columns, self._grid = self._names.ids[name], self._columns, None
        columns.island[block] = islands(devices)
        for row, (device, kind) in enumerate(zip(devices, kinds, strict=True), start=block.start):
            write_device(columns, row, device, kind, of=(node, self._classes.ids[kind]))

    def _doubt(self, name: str, found: dict[int, Hindrance | None]) -> None:
        """Keep in mind which rows of a node are in doubt, some of which were looked at again."""
        doubted = {row: why for row, why in self._doubts.pop(name, {}).items() if row not in found}
        doubted |= {row: why for row, why in found.items() if why is not None}
        if doubted:
            self._doubts[name] = doubted


def _pods_on(node: GpuNode | None) -> set[tuple[PodUid, JobUid]]:
    """Return the pods that have reservations on a node, each with its job."""
    return {(one.pod_uid, one.job_uid) for one in node.spec.reservations} if node is not None else set()
