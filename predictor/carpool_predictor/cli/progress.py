"""Progress on standard error: what moves for people, lines for logs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from carpool_predictor.cli.bulk import Tally


@contextmanager
def telling(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show what is being worked at: on a terminal one line that changes, elsewhere a line for each."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: console.print(f"  {what}", highlight=False, markup=False, soft_wrap=True)
        return
    with console.status("") as status:
        yield lambda what: status.update(escape(what))


@contextmanager
def waiting(what: str, console: Console | None = None) -> Iterator[None]:
    """Show on a terminal that something takes its time; elsewhere nothing."""
    console = console or Console(stderr=True)
    with console.status(escape(what)) if console.is_terminal else nullcontext():
        yield


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
