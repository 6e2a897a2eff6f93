"""Errors of a cluster on one machine.

HarnessError
├── MissingError      the machine lacks something; the message names it and how to get it
├── BuildError        a binary did not build
├── StartError        a process did not become ready; the message ends with its log
└── StalledError      an operation makes no progress
"""

from pathlib import Path


class HarnessError(Exception):
    """Root of everything that the harness raises on purpose."""


class MissingError(HarnessError):
    """The machine lacks something."""


class BuildError(HarnessError):
    """A binary did not build."""


class StartError(HarnessError):
    """A process did not become ready."""


class StalledError(HarnessError):
    """An operation makes no progress."""


def log_tail(log: Path) -> str:
    """Return the last lines of a log, to be put under an error message."""
    if not log.exists():
        return f"(no log at {log})"
    text = log.read_text(errors="replace").splitlines()
    return "\n".join([f"--- the last lines of {log}", *text[-25:]])
