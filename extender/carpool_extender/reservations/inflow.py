"""How many pods may be on their way to a node at once: more than the control plane can carry, and none arrives."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from carpool_core.clock import Clock

from carpool_extender.reservations.binding import in_time

FIRST, LEAST, MOST = 128, 32, 512
"""Binds that may be under way at once: at first, and whatever happens. A control plane that does nothing else has forty
to eighty, so that nothing is kept back there."""
QUICK, SLOW = 0.15, 0.6
"""A bind that took less of the time for which a reservation lasts shows that there is room for more of them, one that
took more of it that there are too many."""
MORE = 0.25
"""What a quick bind adds to the number: those that began before many others are quick, too."""
CUT, CUT_EVERY_S = 0.75, 5.0
"""What is left of the number after a slow bind, and for how long later slow ones tell nothing new."""
PATIENCE_S = 5.0
"""Longest that a pod is kept back: binds that wait for a sick node's agent hold up nobody for long."""


class Inflow:
    """Keeps pods back while as many are being bound as can be.

    kube-scheduler offers the next pod while the last is being bound, as fast as the extender answers. On a machine that
    is too busy the binds grow in number until each takes longer than a reservation lasts. Then all of them are given
    back and tried again, which is more work than before, and nothing is bound any more. So a pod is offered a place
    only where few enough are under way, of which there may be one more with every few quick binds, and a quarter less
    with a slow one. kube-scheduler asks about one pod at a time, and waits meanwhile.

    Args:
        clock: Tells how long binds take.
        sleep: Ends the patience of a pod.
        timeout_s: Seconds for which a reservation lasts.
    """

    def __init__(self, clock: Clock, sleep: Callable[[float], Awaitable[Any]], timeout_s: float) -> None:
        self._clock, self._sleep = clock, sleep
        self._quick_s, self._slow_s = QUICK * timeout_s, SLOW * timeout_s
        self._under_way = 0
        self._cut_at = clock.monotonic() - CUT_EVERY_S
        self._left = asyncio.Event()
        self.limit: float = FIRST
        """Binds that may be under way at once."""

    @property
    def is_full(self) -> bool:
        """Whether as many binds are under way as may be."""
        return self._under_way >= self.limit

    async def room(self) -> None:
        """Wait until another pod may be bound, or has waited long enough."""
        if self.is_full:
            with suppress(TimeoutError):
                await in_time(self._until_room(), PATIENCE_S, self._sleep)

    async def _until_room(self) -> None:
        while self.is_full:
            self._left.clear()
            await self._left.wait()

    def enter(self) -> None:
        """Count a bind that has begun."""
        self._under_way += 1

    def leave(self) -> None:
        """Count a bind that has ended."""
        self._under_way -= 1
        self._left.set()

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """Do not count a bind that waits for others of its job, and have it wait for room like one that begins.

        Otherwise the workers of a job of more of them than may be under way would keep everybody else back.
        """
        self.leave()
        try:
            yield
            await self.room()
        finally:
            self.enter()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Learn from how long a bind takes; one that failed at once tells nothing."""
        began, succeeded = self._clock.monotonic(), False
        try:
            yield
            succeeded = True
        finally:
            now = self._clock.monotonic()
            if now - began >= self._slow_s:
                self._cut(now)
            elif succeeded and now - began < self._quick_s and 2 * self._under_way > self.limit:
                self.limit = min(MOST, self.limit + MORE)

    def _cut(self, now: float) -> None:
        if now - self._cut_at >= CUT_EVERY_S:
            self._cut_at = now
            self.limit = max(LEAST, CUT * self.limit)
