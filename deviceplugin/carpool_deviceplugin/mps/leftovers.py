"""Directories in which others write: emptied, made anew, put away. No link in them is followed."""

import os
import re
import secrets
import subprocess
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

_OLD = re.compile(r"\.old\.[0-9a-f]{16}")
_MOST = 256
"""Directories named to one program."""
MOMENT_S = 1.5
"""Whoever leaves more than can be removed, or goes on writing there, must not keep the next tenant waiting: several of
these fit into the time in which an answer is expected. What is left stays until the next daemon starts or ends."""


def make_empty(directory: Path, within_s: float = MOMENT_S) -> None:
    """Make a directory with nothing in it, in place of one that cannot be emptied, too; raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    empty(directory, within_s=within_s)
    if _has_something(directory):
        put_away(directory, within_s)
        directory.mkdir()


def put_away(directory: Path, within_s: float = MOMENT_S) -> None:
    """Make a directory's place free, and remove of it what can be; raises OSError, but not where there is none."""
    with suppress(FileNotFoundError):
        directory.rename(directory.with_name(f".old.{secrets.token_hex(8)}"))
    sweep(directory.parent, within_s=within_s)


def sweep(*directories: Path, within_s: float = MOMENT_S) -> None:
    """Remove what was put away in these, and could not be removed so far; as much of it as a moment allows.

    In any order: what can never be removed must not keep a moment's time from the rest for ever.
    """
    old = [Path(entry.path) for directory in directories for entry in _put_away(directory)]
    some = SystemRandom().sample(old, min(len(old), _MOST))
    empty(*some, within_s=within_s)
    for one in some:
        with suppress(OSError):
            one.rmdir()


def _put_away(directory: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(directory) as entries:
            return [one for one in entries if _OLD.fullmatch(one.name) and one.is_dir(follow_symlinks=False)]
    except OSError:
        return []  # whoever needs the directory is told


def empty(*directories: Path, within_s: float = MOMENT_S) -> None:
    """Remove what clients and daemon left, as much of it as a moment allows: nobody else would.

    Millions of files, or directories as deep, are removed in a process that lists them piece by piece: in this one they
    would take memory without a limit. What stands in another user's own directory cannot be removed and stays.
    """
    with suppress(OSError, subprocess.TimeoutExpired):
        if full := [str(one.absolute()) for one in directories if _has_something(one)]:
            command = ["find", *full, "-mindepth", "1", "-delete"]
            quiet = subprocess.DEVNULL
            subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=within_s, check=False)


def _has_something(directory: Path) -> bool:
    """Whether there is anything in it; where nobody may look there is."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True
