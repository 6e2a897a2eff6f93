"""Where results come from: when they were made, and by which version of the code."""

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import msgspec
from carpool_core.clock import Clock

HERE = Path(__file__).resolve()
TIMEOUT_S = 10.0
DOCS = "docs"
"""Folder of documents, in a checkout."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """When a run began, and what ran."""

    when: str = ""
    """To the minute, UTC: `2026-01-31 12:00`; empty where nobody noted it."""
    version: str = ""
    """Of the package and, in a checkout, the commit; empty where nobody noted it."""

    def __str__(self) -> str:
        return f"{self.when or 'time not noted'}, {self.version or 'version not noted'}"


def provenance(clock: Clock) -> Provenance:
    """Return what a run that begins now comes from."""
    commit = commit_of(HERE)
    version = metadata.version("carpool") + (f", commit {commit}" if commit else "")
    return Provenance(when=clock.now().strftime("%Y-%m-%d %H:%M"), version=version)


def commit_of(file: Path) -> str:
    """Return the commit of the checkout that a file belongs to; empty where to none.

    `-dirty` is added where anything else than its documents has changes: those are what runs write.
    """
    git = shutil.which("git")
    if git is None or not _said(git, file, "ls-files", "--", file.name):  # not even if a checkout holds the environment
        return ""
    commit = _said(git, file, "describe", "--always")
    changed = _said(git, file, "status", "--porcelain", "--untracked-files=no", "--", ":(top)", f":(top,exclude){DOCS}")
    return f"{commit}-dirty" if commit and changed else commit


def _said(git: str, file: Path, *arguments: str) -> str:
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
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
