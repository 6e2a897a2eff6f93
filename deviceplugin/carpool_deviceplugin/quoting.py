"""Untrusted text in messages: quoted, escaped and cut."""

from pathlib import Path

_LONGEST, _LONGEST_PATH = 64, 200


def quoted(value: str | Path) -> str:
    """Return the text quoted, with escape sequences written out, and cut after 64 characters (paths: 200)."""
    text, longest = str(value), _LONGEST_PATH if isinstance(value, Path) else _LONGEST
    return repr(text) if len(text) <= longest else f"{text[:longest]!r}… ({len(text):,} characters)"


def printable(text: str) -> str:
    """Return the text with unprintable characters escaped; tenants choose the names of processes."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
