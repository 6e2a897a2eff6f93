"""Keys of jobs that want to be looked at: each once, never two looks at one job at a time."""

import asyncio
import contextlib

from carpool_core.clock import Clock

from carpool_operator.watching.delays import Delays, Turns

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
