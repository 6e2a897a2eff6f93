"""News that change only what a job's status tells: taken in soon, several at once, and not too many a second."""

from carpool_operator.watching.work_queue import WorkQueue

NEWS_S = 2.0
"""How long nothing is told of a pod that was created or bound, and of what changed on its GPUs. Most pods get their
place within that time, and then their container, and one write tells of all; while many jobs start, each brings some
news to others."""


class News:
    """Has jobs looked at for news, each within `NEWS_S`, or later where others are more urgent.

    Args:
        queue: Takes the keys.
    """

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

    def of_pod(self, key: str) -> None:
        """Look at a job whose pod got a little further."""
        self._queue.add_after(key, NEWS_S, at_leisure=True)

    def of_gpus(self, key: str) -> None:
        """Look at a job on whose GPUs something has changed, when it is its turn."""
        self._queue.add_in_turn(key, NEWS_S)
