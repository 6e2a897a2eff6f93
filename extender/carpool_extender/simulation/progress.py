"""How far a run is, for who waits for it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

EVERY_S = 15.0
"""Where there is no terminal, as in a job's log, a line is printed no oftener than this, in seconds."""


@contextmanager
def shown(console: Console, name: str, now: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """Show how far a run is: in one line of a terminal that changes, elsewhere in lines from time to time.

    Args:
        console: Where.
        name: Of the run, shown before it says how far it is.
        now: Clock, in seconds.
    """
    if console.is_terminal:
        with console.status(name) as status:
            yield status.update
        return
    last_s = now()

    def tell(text: str) -> None:
        nonlocal last_s
        if now() - last_s >= EVERY_S:
            last_s = now()
            console.print(text)

    yield tell
