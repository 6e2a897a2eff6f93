"""Directories in which others write: emptied, made anew, put away. No link in them is followed."""

import secrets
import shutil
from contextlib import suppress
from pathlib import Path


def make_empty(directory: Path) -> None:
    """Make a directory with nothing in it, in place of one that cannot be emptied, too; raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    empty(directory)
    if any(directory.iterdir()):
        put_away(directory)
        directory.mkdir()


def put_away(directory: Path) -> None:
    """Make a directory's place free, and remove of it what can be; raises OSError, but not where there is none."""
    aside = directory.with_name(f".old.{secrets.token_hex(8)}")
    try:
        directory.rename(aside)
    except FileNotFoundError:
        return
    with suppress(RecursionError):
        shutil.rmtree(aside, ignore_errors=True)


def empty(directory: Path) -> None:
    """Remove what clients and daemon left: nobody else would.

    What clients made too deep, or closed in another user's own directory, cannot be removed and stays.
    """
    with suppress(OSError, RecursionError):
        for path in list(directory.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
