"""Keys of jobs that want to be looked at: each once, never two looks at one job at a time."""

import asyncio
import contextlib

from carpool_core.clock import Clock


class WorkQueue:
    """A queue of keys, after client-go's.

    A key that is added while it waits is not added again; a key that is added while somebody looks at it waits until
    that is done. Delayed keys keep their earliest time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready: dict[str, None] = {}
        self._busy: set[str] = set()
        self._again: set[str] = set()
        self._due: dict[str, float] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Keys that wait to be looked at now."""
        return len(self._ready) + len(self._again)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is being looked at; delayed keys do not count."""
        return not (self._ready or self._busy)

    def add(self, key: str) -> None:
        """Look at a key soon."""
        if key in self._busy:
            self._again.add(key)
        else:
            self._ready[key] = None
            self._changed.set()

    def add_after(self, key: str, seconds: float) -> None:
        """Look at a key after so many seconds at the latest."""
        if seconds <= 0:
            self.add(key)
            return
        at = self._clock.monotonic() + seconds
        self._due[key] = min(at, self._due.get(key, at))
        self._changed.set()

    def forget(self, key: str) -> None:
        """Drop a key's delayed look."""
        self._due.pop(key, None)

    def release_due(self) -> float | None:
        """Move keys whose time has come to those that wait; return the seconds to the next, None without one."""
        now = self._clock.monotonic()
        for key in [key for key, at in self._due.items() if at <= now]:
            del self._due[key]
            self.add(key)
        return min(self._due.values()) - now if self._due else None

    def take_now(self) -> str | None:
        """Take the key that has waited longest; None where nothing waits. `done` must follow."""
        self.release_due()
        if not self._ready:
            return None
        key = next(iter(self._ready))
        del self._ready[key]
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
