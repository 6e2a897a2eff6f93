"""Spares kube-scheduler's connections: it keeps few of them, and each new one costs more than a decision."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from carpool_extender.reservations.binder import wait_for

KEPT = 2
"""Idle connections to an extender that kube-scheduler keeps, as Go's HTTP client does; it closes all others."""
HELD_S = 0.5
"""Longest that an answer is held. The pod is bound by then, and kube-scheduler has counted it as bound all along."""


class Connections:
    """Holds answers to binds until their connections are of use.

    Pods that came to one node are bound together, so that the answers to their binds would go out together. Of their
    connections kube-scheduler would keep two, and open others for the binds that come in the next moments, each with a
    handshake by certificates of both sides. So of answers that come together only two go out at once, and another with
    each bind that begins, which takes a connection that such an answer left.

    Args:
        sleep: Ends the time for which an answer is held.
        held_s: Seconds for which it is held at most.
    """

    def __init__(self, sleep: Callable[[float], Awaitable[Any]], held_s: float = HELD_S) -> None:
        self._sleep, self._held_s = sleep, held_s
        self._idle = 0
        self._held: deque[asyncio.Future[None]] = deque()

    def taken(self) -> None:
        """Count a connection as in use, and let an answer go that is held."""
        self._idle = max(0, self._idle - 1)
        while self._held and self._idle < KEPT:
            held = self._held.popleft()
            if not held.done():
                self._idle += 1
                held.set_result(None)

    async def free(self) -> None:
        """Wait until an answer's connection would be kept, or for as long as answers are held."""
        if self._idle < KEPT or not self._held_s:
            self._idle = min(KEPT, self._idle + 1)
            return
        held = asyncio.get_running_loop().create_future()
        self._held.append(held)
        with suppress(TimeoutError):
            await wait_for(held, self._held_s, self._sleep)
