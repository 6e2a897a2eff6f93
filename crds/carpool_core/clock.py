"""Time as an argument, so that tests never wait for it."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What time it is."""

    def now(self) -> datetime:
        """Return wall-clock time in UTC, for timestamps that others read."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, for durations."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        """Return wall-clock time in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds since the machine started."""
        return time.monotonic()


def rfc3339(moment: datetime) -> str:
    """Write a UTC time as Kubernetes does, to the microsecond: `2026-01-31T12:00:00.000000Z`."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def parse_rfc3339(text: str) -> datetime:
    """Read a time as Kubernetes writes it; raises ValueError otherwise, also where it names no offset from UTC."""
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    if moment.utcoffset() is None:
        raise ValueError(f"expected a time with its offset from UTC, such as 2026-01-31T12:00:00Z, found {text!r}")
    return moment
