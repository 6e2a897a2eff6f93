"""Wall clock and monotonic clock as an argument, so that tests set the time; times in Kubernetes' form."""

import time
from datetime import UTC, datetime, timedelta
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


class ServerTime(Protocol):
    """Source of the difference between two machines' clocks; `KubeApi` is one."""

    @property
    def server_ahead_s(self) -> float:
        """Seconds by which the server's clock is ahead of this machine's."""
        ...


class ServerClock:
    """The API server's clock: what several processes compare must not depend on the clock of one machine."""

    def __init__(self, clock: Clock, server: ServerTime) -> None:
        self._clock, self._server = clock, server

    def now(self) -> datetime:
        """Return the server's wall-clock time in UTC, to about a second."""
        return self._clock.now() + timedelta(seconds=self._server.server_ahead_s)

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start."""
        return self._clock.monotonic()


def rfc3339(moment: datetime) -> str:
    """Return a time in Kubernetes' form, to the microsecond: `2026-01-31T12:00:00.000000Z`."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def parse_rfc3339(text: str) -> datetime:
    """Return the time of an RFC 3339 text. Raises ValueError for other texts and without an offset from UTC."""
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    if moment.utcoffset() is None:
        raise ValueError(f"expected a time with its offset from UTC, such as 2026-01-31T12:00:00Z, found {text!r}")
    return moment
