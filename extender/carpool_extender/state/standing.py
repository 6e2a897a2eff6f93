"""Which GPUs are in no state to take a job just now, though nobody reports them unhealthy: time decides."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from carpool_core.clock import Clock
from carpool_core.values import GpuUuid

from carpool_extender.state.measured import seconds

SILENCE_S = 60.0
"""After this time without a heartbeat a node's agent counts as gone: it sends one each 25 s, and one may be lost."""
AHEAD_S = SILENCE_S
"""A heartbeat that lies further in the future, in seconds, is no time: ages are reckoned from it."""
HOUR_S = 3600.0
FIRST_REST_S, LONGEST_REST_S = 30.0, 600.0
"""How long a GPU that could not be prepared is left alone, after the first failure in a row and at most."""


class Hindrance(NamedTuple):
    """Why a GPU takes nobody at present."""

    kind: int
    """Equal for all GPUs whose sentences differ in nothing but numbers."""
    reason: str


SILENT, RESTING, AHEAD = 1, 2, 7
"""Kinds of hindrances; the others are in `doubts`."""


@dataclass(frozen=True, slots=True)
class _Rest:
    length_s: float
    until_s: float


class Standing:
    """Counts the silence of agents and the failures of GPUs.

    Silence counts from when this process saw a heartbeat change, not from the time that the heartbeat says: clocks of
    nodes differ, and after a start, or an outage of the API server, every agent has its time to report. Only that they
    must not differ by much: what is measured counts once it is old enough by the agent's clock.

    Args:
        clock: Tells how long ago something was, and what time it is.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: OrderedDict[str, tuple[str | None, float]] = OrderedDict()
        self._ahead: dict[str, float] = {}
        self._rests: dict[tuple[str, GpuUuid], _Rest] = {}

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
            self._note_clock(node, heartbeat)

    def _note_clock(self, node: str, heartbeat: str | None) -> None:
        """Take note of how far a node's clock is ahead; what was told stays while that is nearly the same."""
        ahead_s = seconds(heartbeat or "") - self._clock.now().timestamp()
        if ahead_s <= AHEAD_S:
            self._ahead.pop(node, None)
        elif abs(ahead_s - self._ahead.get(node, 0.0)) > AHEAD_S:
            self._ahead[node] = ahead_s

    def forget(self, node: str) -> None:
        """Forget a node that was deleted."""
        self._heard.pop(node, None)
        self._ahead.pop(node, None)
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

    def unheard(self) -> dict[str, Hindrance]:
        """Nodes whose agents are silent, or tell a time that cannot be, in words that stay likewise."""
        ahead = {node: Hindrance(AHEAD, _told_ahead(ahead_s)) for node, ahead_s in self._ahead.items()}
        return ahead | self.silent()

    def silent(self) -> dict[str, Hindrance]:
        """Nodes whose agents are silent, in words that stay: each change is a write for every waiting pod."""
        now, found = self._clock.monotonic(), {}
        for node, (_, at) in self._heard.items():
            if now - at <= SILENCE_S:
                break
            found[node] = Hindrance(SILENT, f"its agent has not reported for more than {SILENCE_S:.0f} s")
        return found

    def resting(self) -> dict[tuple[str, GpuUuid], Hindrance]:
        """GPUs that are left alone, by node and UUID."""
        now = self._clock.monotonic()
        return {
            key: Hindrance(RESTING, f"could not be prepared, is tried again at {self._time(rest.until_s - now)}")
            for key, rest in self._rests.items()
            if now < rest.until_s
        }

    def _time(self, in_s: float) -> str:
        moment: datetime = self._clock.now() + timedelta(seconds=in_s)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _told_ahead(ahead_s: float) -> str:
    found = f"{int(ahead_s):,} s" if ahead_s < 2 * HOUR_S else f"{int(ahead_s / HOUR_S):,} h"
    return f"its agent's clock is {found} ahead, expected at most {AHEAD_S:.0f} s: it is wrong, or the one here is"
