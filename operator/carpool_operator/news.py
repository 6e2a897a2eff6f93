"""News that change only what a job's status tells: taken in soon, several at once, and not too many a second."""

from carpool_core.clock import Clock

from carpool_operator.work_queue import WorkQueue

NEWS_S = 2.0
"""How long nothing is told of a pod that was created or bound, and of what changed on its GPUs. Most pods get their
place within that time, and then their container, and one write tells of all; while many jobs start, each brings some
news to others."""
A_SECOND = 10.0
"""Jobs that are looked at for such news in a second: thousands that run bring more of it than an API server can take,
and each would have its status written whenever a measure moves in its last digit."""


class News:
    """Has jobs looked at for news, each within `NEWS_S`, or later where others are more urgent.

    Args:
        queue: Takes the keys.
        clock: Tells when the next may be looked at.
    """

    def __init__(self, queue: WorkQueue, clock: Clock) -> None:
        self._queue, self._clock = queue, clock
        self._next = 0.0

    def of_pod(self, key: str) -> None:
        """Look at a job whose pod got a little further."""
        self._queue.add_after(key, NEWS_S, at_leisure=True)

    def of_gpus(self, key: str) -> None:
        """Look at a job on whose GPUs something has changed, but not at more than `A_SECOND` jobs a second."""
        now = self._clock.monotonic()
        at = max(now + NEWS_S, self._next)
        due = self._queue.due(key)
        if due is None or due > at:
            self._next = at + 1 / A_SECOND
            self._queue.add_after(key, at - now, at_leisure=True)
