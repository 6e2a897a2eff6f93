"""Keys of jobs that want to be looked at: each once, never two looks at one job at a time."""

import asyncio
import contextlib
import heapq

from carpool_core.clock import Clock


class Delays:
    """Keys with a time each, the earliest that was asked for."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._order: list[tuple[float, str]] = []
        """A heap. Beside what `_at` holds, it has entries of keys that were dropped or have an earlier time since."""

    def put(self, key: str, at: float) -> None:
        """Take a key in, unless it has an earlier time already."""
        if key in self._at and self._at[key] <= at:
            return
        self._at[key] = at
        if len(self._order) > 2 * len(self._at):
            self._order = [(at, key) for key, at in self._at.items()]
            heapq.heapify(self._order)
        else:
            heapq.heappush(self._order, (at, key))

    def drop(self, key: str) -> None:
        """Forget a key."""
        self._at.pop(key, None)

    def next_at(self) -> float | None:
        """When the time of the next key comes; None where there is none."""
        while self._order and self._at.get(self._order[0][1]) != self._order[0][0]:
            heapq.heappop(self._order)
        return self._order[0][0] if self._order else None

    def take(self, now: float) -> str | None:
        """Take the first key out whose time has come; None where there is none."""
        at = self.next_at()
        if at is None or at > now:
            return None
        _, key = heapq.heappop(self._order)
        del self._at[key]
        return key


class Turns:
    """Keys that come one after the other, with a distance between any two.

    A turn belongs to nobody before it comes: a key that is dropped leaves none, and those behind it come sooner.

    Args:
        every_s: The distance, in seconds.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._from: dict[str, float] = {}
        self._next = float("-inf")

    def put(self, key: str, at: float) -> None:
        """Let a key come at that time or later, after all that came before it; its turn stays where it has one."""
        self._from.setdefault(key, at)

    def drop(self, key: str) -> None:
        """Forget a key."""
        self._from.pop(key, None)

    def next_at(self) -> float | None:
        """When the next key's turn comes; None where there is none."""
        first = next(iter(self._from.values()), None)
        return None if first is None else max(first, self._next)

    def take(self, now: float) -> str | None:
        """Take the first key out if its turn has come; None otherwise."""
        at = self.next_at()
        if at is None or at > now:
            return None
        key = next(iter(self._from))
        del self._from[key]
        self._next = at + self._every_s
        return key


LEISURE_EVERY = 8
"""Of so many looks one is at leisure where both kinds wait, so that a flood of urgent ones stops none for good."""
TURNS_A_SECOND = 10.0
"""Jobs that are looked at in turn in a second: thousands that run bring more news than an API server can take, and each
would have its status written whenever a measure moves in its last digit."""


class WorkQueue:
    """A queue of keys, after client-go's, with a second one for what has time.

    A key that is added while it waits is not added again; a key that is added while somebody looks at it waits until
    that is done. Delayed keys keep their earliest time. Of those who take keys one waits for the next, and the others
    for that one: a key, or its time, wakes nobody else.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready: dict[str, None] = {}
        self._leisure: dict[str, None] = {}
        self._busy: set[str] = set()
        self._again: set[str] = set()
        self._due, self._due_at_leisure = Delays(), Delays()
        self._turns = Turns(1 / TURNS_A_SECOND)
        self._delayed: tuple[Delays | Turns, ...] = (self._due, self._due_at_leisure, self._turns)
        self._taken = 0
        self._changed = asyncio.Event()
        self._waiting = asyncio.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is being looked at; delayed keys do not count."""
        return not (self._ready or self._leisure or self._busy)

    def add(self, key: str) -> None:
        """Look at a key soon."""
        if key in self._busy:
            self._again.add(key)
        else:
            self._leisure.pop(key, None)
            self._ready[key] = None
            self._changed.set()

    def add_after(self, key: str, seconds: float, *, at_leisure: bool = False) -> None:
        """Look at a key after so many seconds at the latest.

        Args:
            key: What is looked at.
            seconds: How long that has time.
            at_leisure: Whether keys that were added meanwhile come first, even then.
        """
        if seconds <= 0 and not at_leisure:
            self.add(key)
            return
        (self._due_at_leisure if at_leisure else self._due).put(key, self._clock.monotonic() + seconds)
        self._changed.set()

    def add_in_turn(self, key: str, seconds: float) -> None:
        """Look at a key when so many seconds are over and it is its turn; not if it is looked at before.

        Args:
            key: What is looked at.
            seconds: How long that has time at least.
        """
        self._turns.put(key, self._clock.monotonic() + seconds)
        self._changed.set()

    def forget(self, key: str) -> None:
        """Drop a key's delayed look."""
        for delayed in self._delayed:
            delayed.drop(key)

    def release_due(self) -> float | None:
        """Move keys whose time has come to those that wait; return the seconds to the next, None without one."""
        now = self._clock.monotonic()
        for delayed in self._delayed:
            while (key := delayed.take(now)) is not None:
                (self.add if delayed is self._due else self._add_at_leisure)(key)
        times = [delayed.next_at() for delayed in self._delayed]
        return min((at - now for at in times if at is not None), default=None)

    def _add_at_leisure(self, key: str) -> None:
        if key in self._busy:
            self._again.add(key)
        elif key not in self._ready:
            self._leisure[key] = None
            self._changed.set()

    def take_now(self) -> str | None:
        """Take the key that has waited longest, those at leisure last; None where nothing waits. `done` must follow."""
        self.release_due()
        self._taken += 1
        waiting = self._ready or self._leisure
        if self._leisure and self._taken % LEISURE_EVERY == 0:
            waiting = self._leisure
        if not waiting:
            return None
        key = next(iter(waiting))
        del waiting[key]
        self._turns.drop(key)  # whatever it waited to tell is told now
        self._busy.add(key)
        return key

    async def take(self) -> str:
        """Wait for a key. `done` must follow."""
        async with self._waiting:
            while (key := self.take_now()) is None:
                self._changed.clear()
                # Not wait_for, which makes a task each time: kopf would take it for one of its own that hangs.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.release_due()):
                        await self._changed.wait()
        return key

    def done(self, key: str) -> None:
        """Say that the look at a key is over."""
        self._busy.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
