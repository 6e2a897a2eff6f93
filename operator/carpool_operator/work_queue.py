"""Keys of jobs that want to be looked at: each once, never two looks at one job at a time."""

import asyncio
import contextlib

from carpool_core.clock import Clock

LEISURE_EVERY = 8
"""Of so many looks one is at leisure where both kinds wait, so that a flood of urgent ones stops none for good."""


class WorkQueue:
    """A queue of keys, after client-go's, with a second one for what has time.

    A key that is added while it waits is not added again; a key that is added while somebody looks at it waits until
    that is done. Delayed keys keep their earliest time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready: dict[str, None] = {}
        self._leisure: dict[str, None] = {}
        self._busy: set[str] = set()
        self._again: set[str] = set()
        self._due: dict[str, float] = {}
        self._due_at_leisure: dict[str, float] = {}
        self._taken = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Keys that wait to be looked at now."""
        return len(self._ready) + len(self._leisure) + len(self._again)

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
        at, due = self._clock.monotonic() + seconds, self._due_at_leisure if at_leisure else self._due
        due[key] = min(at, due.get(key, at))
        self._changed.set()

    def due(self, key: str) -> float | None:
        """When a delayed key is looked at, in monotonic seconds; None where none was delayed."""
        return min((due[key] for due in (self._due, self._due_at_leisure) if key in due), default=None)

    def forget(self, key: str) -> None:
        """Drop a key's delayed look."""
        self._due.pop(key, None)
        self._due_at_leisure.pop(key, None)

    def release_due(self) -> float | None:
        """Move keys whose time has come to those that wait; return the seconds to the next, None without one."""
        now = self._clock.monotonic()
        for due, add in ((self._due, self.add), (self._due_at_leisure, self._add_at_leisure)):
            for key in [key for key, at in due.items() if at <= now]:
                del due[key]
                add(key)
        return min((at - now for due in (self._due, self._due_at_leisure) for at in due.values()), default=None)

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
        self._busy.add(key)
        return key

    async def take(self) -> str:
        """Wait for a key. `done` must follow."""
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
