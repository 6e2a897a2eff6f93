"""How far a run is, for who waits for it."""

import shutil
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


HERE = Path(__file__).resolve()
TIMEOUT_S = 10.0
DOCS = "docs"
"""Folder of documents, in a checkout."""
DIRTY, UNKNOWN = "-dirty", "unknown"
"""How a version ends that says not what ran: there were changes, or git did not tell."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """When a run began, and what ran."""

    when: str = ""
    """To the minute, UTC: `2026-01-31 12:00`; empty where nobody noted it."""
    version: str = ""
    """Of the package and, in a checkout, the commit; empty where nobody noted it."""

    @property
    def is_noted(self) -> bool:
        """Whether the version says what ran: one with changes, or of which git told nothing, does not."""
        return bool(self.version) and not self.version.endswith((DIRTY, UNKNOWN))

    def is_like(self, other: "Provenance") -> bool:
        """Whether both are of one version: of one that is noted, or of one run of the command, whatever it ran."""
        one_run = bool(self.when) and self == other
        return one_run or (self.is_noted and self.version == other.version)

    def __str__(self) -> str:
        return f"{self.when or 'time not noted'}, {self.version or 'version not noted'}"


def provenance(clock: Clock) -> Provenance:
    """Return what a run that begins now comes from."""
    commit = commit_of(HERE)
    version = metadata.version("carpool") + (f", commit {commit}" if commit else "")
    return Provenance(when=clock.now().strftime("%Y-%m-%d %H:%M"), version=version)


def commit_of(file: Path) -> str:
    """Return the commit of the checkout that a file belongs to; empty where to none.

    `-dirty` is added where anything else than its documents has changes: those are what runs write. Where there is a
    checkout of which git does not tell, or not in time, that is `unknown`.
    """
    if not any((folder / ".git").exists() for folder in file.parents):
        return ""
    git = shutil.which("git")
    held = _said(git, file, "ls-files", "--", file.name)
    if held == "":  # the checkout holds the environment only
        return ""
    commit = _said(git, file, "describe", "--always")
    if held is None or not commit:
        return UNKNOWN
    changed = _said(git, file, "status", "--porcelain", "--untracked-files=no", "--", ":(top)", f":(top,exclude){DOCS}")
    if changed is None:
        return f"{commit}, changes {UNKNOWN}"
    return f"{commit}{DIRTY}" if changed else commit


def _said(git: str | None, file: Path, *arguments: str) -> str | None:
    """Return what git says; None where it fails."""
    if git is None:
        return None
    try:
        done = subprocess.run(
            [git, "--no-optional-locks", *arguments],
            cwd=file.parent,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
