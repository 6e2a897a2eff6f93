"""What somebody has said, as it may stand in a sentence."""

from pathlib import Path

_LONGEST, _LONGEST_PATH = 64, 200


def quoted(said: str | Path) -> str:
    """Quote it: escape sequences are written out, and what is long is cut; a terminal or a log shows it as it was."""
    text, longest = str(said), _LONGEST_PATH if isinstance(said, Path) else _LONGEST
    return repr(text) if len(text) <= longest else f"{text[:longest]!r}… ({len(text):,} characters)"


def printable(text: str) -> str:
    """Write out escape sequences and the like, and leave the rest: tenants choose what processes are called."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
