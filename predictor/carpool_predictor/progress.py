"""Progress of a file of rows, on standard error: a bar for people, one line at the end for logs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from carpool_predictor.bulk import Tally


@contextmanager
def following(rows: Path) -> Iterator[Callable[[Tally, int], None]]:
    """Show how far a file is; yields what is told of each answered chunk and the bytes that it took."""
    console = Console(stderr=True)
    begin = time.monotonic()
    last = Tally()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=rows.stat().st_size)

        def on_progress(tally: Tally, taken: int) -> None:
            nonlocal last
            last = tally
            bar.update(task, advance=taken, description=_told(tally, time.monotonic() - begin))

        yield on_progress
    if last.rows:
        console.print(_told(last, time.monotonic() - begin), highlight=False)


def _told(tally: Tally, took_s: float) -> str:
    counts = ", ".join(f"{count:,} {status}" for status, count in sorted(tally.statuses.items()))
    return f"{tally.rows:,} rows ({counts}), {tally.rows / max(took_s, 1e-6):,.0f} a second"
