"""Which nodes tell of which GPUs: no GPU is in two nodes, so nobody is sent to one that several tell of."""

from collections.abc import Mapping

from carpool_core.values import GpuUuid

from carpool_extender.state.doubts import DISPUTED, listed
from carpool_extender.state.standing import Hindrance


class Claims:
    """The GPUs of all nodes by UUID. What a node tells costs as much as it has GPUs, whatever others tell."""

    def __init__(self) -> None:
        self._rows: dict[str, Mapping[GpuUuid, int]] = {}
        self._only: dict[GpuUuid, str] = {}
        """Who tells of a GPU; means nothing where several do."""
        self._disputed: dict[GpuUuid, set[str]] = {}
        self._hindered: dict[int, Hindrance] | None = {}
        """None where it has to be worked out anew."""

    def tell(self, node: str, rows: Mapping[GpuUuid, int]) -> None:
        """Take in of which GPUs a node tells now, and their rows; what it told before is forgotten."""
        before = self._rows.get(node, {})
        if rows == before:
            return
        self._rows.pop(node, None)
        self._hindered = None
        if rows:
            self._rows[node] = rows
        for uuid in before.keys() - rows.keys():
            self._discard(uuid, node)
        for uuid in rows.keys() - before.keys():
            self._add(uuid, node)

    def nodes(self) -> set[str]:
        """Names of the nodes that tell of a GPU of which another tells, too."""
        return set().union(*self._disputed.values())

    def hindered(self) -> dict[int, Hindrance]:
        """Rows of the GPUs of which several nodes tell, on each of these; whoever asks may change what it gets."""
        if self._hindered is None:
            self._hindered = self._worked_out()
        return self._hindered.copy()

    def _worked_out(self) -> dict[int, Hindrance]:
        found: dict[int, Hindrance] = {}
        for uuid, nodes in self._disputed.items():
            why = Hindrance(DISPUTED, f"several nodes tell of a GPU by the UUID {uuid}: {listed(nodes)}")
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
