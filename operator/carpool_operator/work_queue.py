"""Work queue of job keys, after client-go's, with priorities, debounced and rate-limited keys."""

import asyncio
import contextlib
import heapq

from carpool_core.clock import Clock

DEBOUNCE_S = 2.0
"""Seconds by which events are delayed that only change what a status reports. Within that time most pods are bound and
started, so that one write reports all of it."""
LOW_PRIORITY_EVERY = 8
"""One of so many keys is taken from the low-priority ones if both wait, so that urgent keys never starve them."""
RATE_LIMIT_PER_S = 10.0
"""Rate-limited keys per second: thousands of running jobs change their measurements more often than the API server
can take status writes."""


class DelayQueue:
    """Keys with a due time each, the earliest that was asked for; a heap. A dropped key leaves no gap.

    Keys come at least `every_s` seconds apart.
    """

    def __init__(self, every_s: float = 0.0) -> None:
        self._every_s = every_s
        self._next = float("-inf")
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """Also holds entries of keys that were dropped or got an earlier time, which `next_at` skips."""

    def put(self, key: str, at: float) -> None:
        """Add a key, unless it has an earlier time already."""
        if key in self._at and self._at[key] <= at:
            return
        self._at[key] = at
        if len(self._heap) > 2 * len(self._at):
            self._heap = [(at, key) for key, at in self._at.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (at, key))

    def drop(self, key: str) -> None:
        """Remove a key."""
        self._at.pop(key, None)

    def next_at(self) -> float | None:
        """Return when the next key is due; None if empty."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return max(self._heap[0][0], self._next) if self._heap else None

    def take(self, now: float) -> str | None:
        """Remove and return the first key that is due; None without any."""
        at = self.next_at()
        if at is None or at > now:
            return None
        _, key = heapq.heappop(self._heap)
        del self._at[key]
        self._next = at + self._every_s
        return key


class WorkQueue:
    """Queue of keys for several workers. Each key waits once, and is processed by one worker at a time.

    A key that is added while it is processed waits until that is done. One worker waits for the next key or due time;
    the others wait for that worker, so that an event wakes only one of them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready: dict[str, None] = {}
        self._low_priority: dict[str, None] = {}
        self._processing: set[str] = set()
        self._again: set[str] = set()
        self._delayed, self._debounced = DelayQueue(), DelayQueue()
        self._rate_limited = DelayQueue(1 / RATE_LIMIT_PER_S)
        self._taken = 0
        self._changed = asyncio.Event()
        self._waiting = asyncio.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether no key waits or is being processed; delayed keys do not count."""
        return not (self._ready or self._low_priority or self._processing)

    def add(self, key: str) -> None:
        """Process a key soon."""
        if key in self._processing:
            self._again.add(key)
        else:
            self._low_priority.pop(key, None)
            self._ready[key] = None
            self._changed.set()

    def add_after(self, key: str, seconds: float) -> None:
        """Process a key after so many seconds at the latest."""
        if seconds <= 0:
            self.add(key)
            return
        self._delayed.put(key, self._clock.monotonic() + seconds)
        self._changed.set()

    def add_debounced(self, key: str) -> None:
        """Process a key after `DEBOUNCE_S` with low priority, once for all events until then."""
        self._debounced.put(key, self._clock.monotonic() + DEBOUNCE_S)
        self._changed.set()

    def add_rate_limited(self, key: str) -> None:
        """Process a key after `DEBOUNCE_S` with low priority, as far as the rate limit allows."""
        self._rate_limited.put(key, self._clock.monotonic() + DEBOUNCE_S)
        self._changed.set()

    def forget(self, key: str) -> None:
        """Drop a key's delayed entries."""
        for queue in (self._delayed, self._debounced, self._rate_limited):
            queue.drop(key)

    def release_due(self) -> float | None:
        """Move due keys to those that wait; return the seconds until the next is due, None without one."""
        now = self._clock.monotonic()
        while (key := self._delayed.take(now)) is not None:
            self.add(key)
        for queue in (self._debounced, self._rate_limited):
            while (key := queue.take(now)) is not None:
                self._add_low_priority(key)
        times = [queue.next_at() for queue in (self._delayed, self._debounced, self._rate_limited)]
        return min((at - now for at in times if at is not None), default=None)

    def _add_low_priority(self, key: str) -> None:
        if key in self._processing:
            self._again.add(key)
        elif key not in self._ready:
            self._low_priority[key] = None
            self._changed.set()

    def take_now(self) -> str | None:
        """Return the key that has waited longest, low priority last; None if none waits. Call `done` afterwards."""
        self.release_due()
        self._taken += 1
        waiting = self._ready or self._low_priority
        if self._low_priority and self._taken % LOW_PRIORITY_EVERY == 0:
            waiting = self._low_priority
        if not waiting:
            return None
        key = next(iter(waiting))
        del waiting[key]
        self._rate_limited.drop(key)
        self._processing.add(key)
        return key

    async def take(self) -> str:
        """Wait for a key. Call `done` afterwards."""
        async with self._waiting:
            while (key := self.take_now()) is None:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.release_due()):
                        await self._changed.wait()
        return key

    def done(self, key: str) -> None:
        """End the processing of a key."""
        self._processing.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
