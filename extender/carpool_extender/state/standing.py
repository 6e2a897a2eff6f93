"""Which GPUs take no job just now, though nobody reports them unhealthy: for a while, of which time tells the end."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from carpool_core.clock import Clock
from carpool_core.values import GpuUuid

SILENCE_S = 60.0
"""After this time without a heartbeat a node's agent counts as gone: it sends one each 25 s, and one may be lost."""
FIRST_REST_S, LONGEST_REST_S = 30.0, 600.0
"""How long a GPU that could not be prepared is left alone, after the first failure in a row and at most."""


class Hindrance(NamedTuple):
    """Why a GPU takes nobody at present."""

    kind: int
    """Equal for all GPUs whose sentences differ in nothing but numbers."""
    reason: str


SILENT, RESTING, KEPT = 1, 2, 8
"""Kinds of hindrances; the others are in `doubts`."""
KEPT_FOR_OTHERS = Hindrance(KEPT, "kept for a job that comes first")
"""In words that stay: each change is a write for every waiting pod."""


@dataclass(frozen=True, slots=True)
class _Rest:
    length_s: float
    until_s: float


class Standing:
    """Counts the silence of agents and the failures of GPUs, and knows which are kept for somebody.

    Silence counts from when this process saw a heartbeat change, not from the time that the heartbeat says: clocks of
    nodes differ, and after a start, or an outage of the API server, every agent has its time to report.

    Args:
        clock: Tells how long ago something was.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: OrderedDict[str, tuple[str | None, float]] = OrderedDict()
        self._rests: dict[tuple[str, GpuUuid], _Rest] = {}
        self._kept: set[tuple[str, GpuUuid]] = set()

    def heard(self, node: str, heartbeat: str | None, ago_s: float = 0.0) -> None:
        """Take note of a node's heartbeat; an agent that never sent one is silent since the node was first heard of.

        Args:
            node: Name of the node.
            heartbeat: What the agent wrote.
            ago_s: For how long that has stood there, where it is known; nodes are told of in falling order of it.
        """
        last = self._heard.get(node)
        if last is None or (heartbeat and last[0] != heartbeat):
            self._heard[node] = (heartbeat, self._clock.monotonic() - ago_s)
            self._heard.move_to_end(node)  # so that the longest silent stand first

    def forget(self, node: str) -> None:
        """Forget a node that was deleted."""
        self._heard.pop(node, None)
        for key in [key for key in self._rests if key[0] == node]:
            del self._rests[key]

    def failed(self, node: str, gpus: Sequence[GpuUuid]) -> None:
        """Leave GPUs that could not be prepared alone for a while, twice as long as the last time."""
        now = self._clock.monotonic()
        for gpu in gpus:
            last = self._rests.get((node, gpu))
            if last is None or now >= last.until_s:  # several that failed together are one failure
                length = FIRST_REST_S if last is None else min(LONGEST_REST_S, 2 * last.length_s)
                self._rests[node, gpu] = _Rest(length, now + length)

    def succeeded(self, node: str, gpus: Sequence[GpuUuid]) -> None:
        """Forget the failures of GPUs that were prepared."""
        for gpu in gpus:
            self._rests.pop((node, gpu), None)

    def keep(self, gpus: Iterable[tuple[str, GpuUuid]]) -> None:
        """Have GPUs, by node and UUID, take nobody, because they are kept for somebody."""
        self._kept.update(gpus)

    def keep_no_more(self, gpus: Iterable[tuple[str, GpuUuid]]) -> None:
        """Have GPUs take others again."""
        self._kept.difference_update(gpus)

    def silent(self) -> dict[str, Hindrance]:
        """Nodes whose agents are silent, in words that stay: each change is a write for every waiting pod."""
        now, found = self._clock.monotonic(), {}
        for node, (_, at) in self._heard.items():
            if now - at <= SILENCE_S:
                break
            found[node] = Hindrance(SILENT, f"its agent has not reported for more than {SILENCE_S:.0f} s")
        return found

    def resting(self) -> dict[tuple[str, GpuUuid], Hindrance]:
        """GPUs that are left alone because they could not be prepared, by node and UUID."""
        now = self._clock.monotonic()
        return {
            key: Hindrance(RESTING, f"could not be prepared, is tried again at {self._time(rest.until_s - now)}")
            for key, rest in self._rests.items()
            if now < rest.until_s
        }

    def left_alone(self) -> dict[tuple[str, GpuUuid], Hindrance]:
        """GPUs that are left alone for whatever reason, by node and UUID."""
        return dict.fromkeys(self._kept, KEPT_FOR_OTHERS) | self.resting()

    def _time(self, in_s: float) -> str:
        moment: datetime = self._clock.now() + timedelta(seconds=in_s)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
