"""Threads that are used again: to start one costs more than most of the calls that it would make."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

_IDLE_S = 20.0
"""A thread without work for so long ends."""

Work = Callable[[], None]


class Threads:
    """As many threads as there is work at the same time; work that never ends keeps nobody else from one.

    Args:
        idle_s: How long a thread waits for more work before it ends.
    """

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Work]] = []

    def run(self, work: Work) -> None:
        """Let work, which must not raise, be done by a thread that has none."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None  # the last one that was used: the others may end
        if thread is None:
            threading.Thread(target=self._live, args=(work,), daemon=True).start()
        else:
            thread.put(work)

    def _live(self, work: Work) -> None:
        mine: SimpleQueue[Work] = SimpleQueue()
        while True:
            work()
            with self._lock:
                self._idle.append(mine)
            try:
                work = mine.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if mine in self._idle:
                        self._idle.remove(mine)
                        return
                work = mine.get()  # it was given away at the last moment
