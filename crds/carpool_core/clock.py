"""Wall clock and monotonic clock as an argument, so that tests set the time."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Source of the current time."""

    def now(self) -> datetime:
        """Return the wall-clock time in UTC, for timestamps in objects."""
        ...

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start, for durations."""
        ...


class SystemClock:
    """The clocks of the operating system."""

    def now(self) -> datetime:
        """Return the wall-clock time in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds since the machine started."""
        return time.monotonic()


def rfc3339(moment: datetime) -> str:
    """Return a time in Kubernetes' form, to the microsecond: `2026-01-31T12:00:00.000000Z`."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def parse_rfc3339(text: str) -> datetime:
    """Return the time of an RFC 3339 text. Raises ValueError for other texts and without an offset from UTC."""
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    if moment.utcoffset() is None:
        raise ValueError(f"expected a time with its offset from UTC, such as 2026-01-31T12:00:00Z, found {text!r}")
    return moment
