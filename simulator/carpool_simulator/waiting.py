"""The queue: who waits, in which order, and whom it is no use to try again."""

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from carpool_extender.queue.order import QueueEnd, QueueKey, QueueOrder, sort_key

from carpool_simulator.information import Stage
from carpool_simulator.truth import SimJob

_Turn: TypeAlias = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One job that waits."""

    ticket: QueueKey
    """What it is sorted by; nobody else has its number."""
    job: SimJob
    stage: Stage


@dataclass(slots=True, eq=False)
class _Line:
    """Jobs for which the same decision would be made."""

    ends: dict[QueueEnd, list[tuple[_Turn, Entry]]]
    """By end who is first there; who was taken at the other end is still among them."""
    waiting: set[int] = field(default_factory=set)
    """Numbers of those that still wait."""
    refused_at: int = -1
    """State of the cluster for which they were refused."""

    def first(self, end: QueueEnd) -> tuple[_Turn, Entry]:
        """Return who is first at an end; somebody must wait."""
        entries = self.ends[end]
        while entries[0][1].ticket.number not in self.waiting:
            heapq.heappop(entries)
        return entries[0]


class Waiting:
    """All jobs that wait.

    Args:
        order: How they are sorted.
        in_order: Whether everybody waits for the first.
    """

    def __init__(self, order: QueueOrder = QueueOrder.ARRIVAL, *, in_order: bool) -> None:
        self._order, self._in_order = order, in_order
        self._end = QueueEnd.LONGEST
        self._ends = tuple(QueueEnd) if order is QueueOrder.ALTERNATE else (self._end,)
        self._lines: dict[Hashable, _Line] = {}

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    def add(self, alike: Hashable, entry: Entry) -> None:
        """Add a job, with the key of those that are decided alike."""
        line = self._lines.setdefault(alike, _Line({end: [] for end in self._ends}))
        line.waiting.add(entry.ticket.number)
        for end, entries in line.ends.items():
            heapq.heappush(entries, (sort_key(entry.ticket, self._order, end), entry))

    def place(self, freed: int, start: Callable[[Entry], bool]) -> None:
        """Try everybody in order, but nobody whose like was refused since something became free.

        Where ends take turns, whoever starts makes the other end the next one's.

        Args:
            freed: Grows whenever something becomes free; what only becomes fuller refuses again.
            start: Starts a job, or says that there is no room.
        """
        heads: dict[QueueEnd, list[tuple[_Turn, Hashable]]] = {}
        while True:
            if self._end not in heads:
                heads[self._end] = self._heads(freed)
            found = self._next(heads[self._end], freed)
            if found is None:
                return
            alike, entry = found
            line = self._lines[alike]
            if line.refused_at != freed and start(entry):
                self._remove(alike, entry)
                continue
            line.refused_at = freed
            if self._in_order:
                return

    def _heads(self, freed: int) -> list[tuple[_Turn, Hashable]]:
        """Return who is first in each line, at the end that is the next one's."""
        heads = [
            (line.first(self._end)[0], alike)
            for alike, line in self._lines.items()
            if self._in_order or line.refused_at != freed
        ]
        heapq.heapify(heads)
        return heads

    def _next(self, heads: list[tuple[_Turn, Hashable]], freed: int) -> tuple[Hashable, Entry] | None:
        """Return whom to try next; heads of which somebody was taken since then are brought up to date."""
        while heads:
            known, alike = heads[0]
            line = self._lines.get(alike)
            if line is None or (line.refused_at == freed and not self._in_order):
                heapq.heappop(heads)
                continue
            now, entry = line.first(self._end)
            if now == known:
                return alike, entry
            heapq.heapreplace(heads, (now, alike))  # who is left comes later than who was taken
        return None

    def _remove(self, alike: Hashable, entry: Entry) -> None:
        line = self._lines[alike]
        line.waiting.remove(entry.ticket.number)
        if not line.waiting:
            del self._lines[alike]
        if self._order is QueueOrder.ALTERNATE:
            self._end = self._end.other
