"""Keys whose time is to come, in the order of their times: neither adding nor looking goes through all of them."""

import heapq


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
