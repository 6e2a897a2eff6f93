"""Progress and provenance of a run."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import msgspec
from carpool_core.clock import Clock
from rich.console import Console

EVERY_S = 15.0
"""Least time between two lines where the output is no terminal, in seconds."""


@contextmanager
def progress(console: Console, name: str, now: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """Show the progress of a run: a changing line on a terminal, otherwise a line from time to time.

    The name of the run is shown until the first progress. `now` is a clock, in seconds.
    """
    if console.is_terminal:
        with console.status(name) as status:
            yield status.update
        return
    last_s = now()

    def show(text: str) -> None:
        nonlocal last_s
        if now() - last_s >= EVERY_S:
            last_s = now()
            console.print(text)

    yield show


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Time and version of a run."""

    when: str = ""
    """UTC to the minute, such as `2026-01-31 12:00`."""
    version: str = ""
    """Version of the package and, in a checkout, the commit."""


def provenance(clock: Clock) -> Provenance:
    """Return the provenance of a run that begins now."""
    commit = commit_of(Path(__file__).resolve())
    version = metadata.version("carpool") + (f", commit {commit}" if commit else "")
    return Provenance(when=clock.now().strftime("%Y-%m-%d %H:%M"), version=version)


def commit_of(file: Path) -> str:
    """Return the commit of the checkout that tracks a file, with `-dirty` after changes; empty if unknown."""
    git = ["git", "--no-optional-locks"]
    try:
        for command in ([*git, "ls-files", "--error-unmatch", file.name], [*git, "describe", "--always", "--dirty"]):
            done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
