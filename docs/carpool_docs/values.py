"""Section of the chart's `settings`, read from its values.yaml."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from carpool_docs.markdown import code, table

FILE = Path(__file__).parents[2] / "helm" / "carpool" / "values.yaml"
BLOCK = "settings"
_LINE = re.compile(r"(?P<indent> *)(?:# ?(?P<comment>.*)|(?P<key>\w+):(?: (?P<default>.*))?)")
_INDENT = 2

_INTRODUCTION = f"""Set these at the installation of the chart, with `--set {BLOCK}.queueOrder=LongestFirst` or in a
values file. The chart passes each one to its process."""


class Value(NamedTuple):
    """One value of the chart."""

    path: str
    default: str
    """Its text in the file; empty for a group of values."""
    meaning: str


def values(text: str) -> Iterator[Value]:
    """Yield the values of the chart's `settings` with the comments above them, in the order of the file.

    Args:
        text: Content of values.yaml.

    Raises:
        ValueError: The block is missing, or a line is neither a comment nor a value.
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
    """Return the section about them."""
    rows = [(code(one.path), code(one.default), one.meaning) for one in values(FILE.read_text(encoding="utf-8"))]
    return [f"## The chart's {code(BLOCK)}", _INTRODUCTION, table(("Value", "Default", "Meaning"), rows)]
