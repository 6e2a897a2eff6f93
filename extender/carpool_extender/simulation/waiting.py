"""The queue: who waits, in which order, and whom it is no use to try again."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from carpool_extender.simulation.knowing import Stage
from carpool_extender.simulation.workload import SimJob


@dataclass(order=True, slots=True)
class Entry:
    """One job that waits; entries compare by urgency, then by the order of the queue."""

    urgency: int
    size: float
    number: int
    job: SimJob = field(compare=False)
    stage: Stage = field(compare=False)


@dataclass(slots=True, eq=False)
class _Line:
    """Jobs for which the same decision would be made, the first ahead."""

    entries: list[Entry] = field(default_factory=list)
    refused_at: int = -1
    """State of the cluster for which they were refused."""


class Waiting:
    """All jobs that wait.

    Args:
        in_order: Whether everybody waits for the first.
    """

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._lines: dict[object, _Line] = {}

    def __len__(self) -> int:
        return sum(len(line.entries) for line in self._lines.values())

    def add(self, alike: object, entry: Entry) -> None:
        """Add a job, with the key of those that are decided alike."""
        heapq.heappush(self._lines.setdefault(alike, _Line()).entries, entry)

    def place(self, freed: int, start: Callable[[Entry], bool]) -> None:
        """Try everybody in order, but nobody whose like was refused since something became free.

        Args:
            freed: Grows whenever something becomes free; what only becomes fuller refuses again.
            start: Starts a job, or says that there is no room.
        """
        heads = [
            (line.entries[0], alike)
            for alike, line in self._lines.items()
            if self._in_order or line.refused_at != freed
        ]
        heapq.heapify(heads)
        while heads:
            entry, alike = heads[0]
            line = self._lines[alike]
            if line.refused_at == freed or not start(entry):
                line.refused_at = freed
                if self._in_order:
                    return
                heapq.heappop(heads)
                continue
            heapq.heappop(line.entries)
            if line.entries:
                heapq.heapreplace(heads, (line.entries[0], alike))
            else:
                heapq.heappop(heads)
                del self._lines[alike]
