"""What somebody has said, as it may stand in a sentence."""

_LONGEST = 200
"""A path may be long."""


def quoted(said: object) -> str:
    """Quote it: escape sequences are written out, and what is long is cut; a terminal or a log shows it as it was."""
    text = str(said)
    return repr(text) if len(text) <= _LONGEST else f"{text[:_LONGEST]!r}… ({len(text):,} characters)"


def printable(text: str) -> str:
    """Write out escape sequences and the like, and leave the rest: tenants choose what processes are called."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
