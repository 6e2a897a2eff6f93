"""What the chart's `settings` are, read from its values.yaml."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from carpool_docs.markdown import code, table

FILE = Path(__file__).parents[2] / "helm" / "carpool" / "values.yaml"
BLOCK = "settings"
_LINE = re.compile(r"(?P<indent> *)(?:# ?(?P<comment>.*)|(?P<key>\w+):(?: (?P<default>.*))?)")
_INDENT = 2

_INTRODUCTION = f"""Whoever installs the chart sets these, with `--set {BLOCK}.queueOrder=LongestFirst` or in a file of
values; the chart hands each to the process that it is for."""


class Value(NamedTuple):
    """One of the chart's values."""

    path: str
    default: str
    """As it stands there; empty for a group of others."""
    meaning: str


def values(text: str) -> Iterator[Value]:
    """Yield the values of the chart's `settings` with the comments above them, in the order in which they stand.

    Args:
        text: What values.yaml holds.

    Raises:
        ValueError: There are none, or a line of them is neither a comment nor a value.
    """
    block = re.search(rf"^{BLOCK}:\n((?: .*\n)*)", text, re.MULTILINE)
    if block is None:
        raise ValueError(f"{FILE.name}: expected the block {BLOCK}, found none")
    names: list[str] = [BLOCK]
    comment: list[str] = []
    for line in block[1].splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"{FILE.name}: expected a comment or `key: value` under {BLOCK}, found {line!r}")
        if found["key"] is None:
            comment.append(found["comment"])
            continue
        names = [*names[: len(found["indent"]) // _INDENT], found["key"]]
        if comment or found["default"]:
            yield Value(".".join(names), found["default"] or "", " ".join(comment))
        comment = []


def section() -> list[str]:
    """Write the section about them."""
    rows = [(code(one.path), code(one.default), one.meaning) for one in values(FILE.read_text(encoding="utf-8"))]
    return [
        f"## The chart's {code(BLOCK)}",
        _INTRODUCTION,
        table(("Value", "Default", "Meaning"), rows),
    ]
