"""A clock that only a test advances."""

import asyncio
from datetime import UTC, datetime, timedelta

from carpool_core.clock import Clock


class FakeClock(Clock):
    """Starts at noon of 2026-01-31, UTC, and at 1,000 s monotonic."""

    def __init__(self) -> None:
        self._now, self._monotonic = datetime(2026, 1, 31, 12, tzinfo=UTC), 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> datetime:
        """Return the wall-clock time."""
        return self._now

    def monotonic(self) -> float:
        """Return the monotonic time in seconds."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass; sleepers whose time has come wake at the loop's next turn."""
        self._now += timedelta(seconds=seconds)
        self._monotonic += seconds
        for due, sleeper in self._sleepers:
            if due <= self._monotonic and not sleeper.done():
                sleeper.set_result(None)
        self._sleepers = [(due, sleeper) for due, sleeper in self._sleepers if not sleeper.done()]

    async def sleep(self, seconds: float) -> None:
        """Wait until the test has advanced the clock by so many seconds, as `asyncio.sleep` would."""
        sleeper = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._monotonic + seconds, sleeper))
        if seconds <= 0:
            self.advance(0)
        await sleeper

    @property
    def sleeping(self) -> list[float]:
        """Seconds that each sleeper still has to wait, shortest first."""
        return sorted(due - self._monotonic for due, sleeper in self._sleepers if not sleeper.done())
