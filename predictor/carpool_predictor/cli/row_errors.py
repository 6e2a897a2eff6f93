"""What is said of a row that makes no sense: what was expected where, what was found, and what may have been meant."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

import msgspec
from carpool_core.values import Optimizer, Precision

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a row can raise; the last where brackets nest without end."""
_AT = re.compile(r"(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_CHOICES: Mapping[str, type[StrEnum]] = {"training.optimizer": Optimizer, "training.precision": Precision}
_MOST = 200
"""Characters that are shown of what was found."""


def told(error: Exception, line: bytes, fields: Mapping[str, tuple[str, ...]]) -> str:
    """Say what is wrong with a row.

    Args:
        error: What the decoder said.
        line: The row.
        fields: Names of the known fields, for each path that has a list of its own; "" is the row itself.
    """
    located = _AT.fullmatch(str(error))
    what, path = (located["what"], located["path"]) if located else (str(error), "")
    if unknown := _UNKNOWN.fullmatch(what):
        return _unknown(unknown["field"], path, fields.get(path, ()))
    if not located or what.startswith("Object missing"):
        return str(error)
    choices = f", expected one of {', '.join(_CHOICES[path])}" if path in _CHOICES else ""
    return f"{what[0].lower()}{what[1:]} in {path}{choices}{_found(line, path)}"


def in_a_row(message: str) -> str:
    """Return what is said to the owner of a GpuTrainingJob in the words of a row, whose fields lie elsewhere."""
    return message.replace("spec.model.", "").replace("spec.training", "training")


def _unknown(field: str, path: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(_folded(field), [_folded(name) for name in known], n=1)
    meant = [name for name in known if _folded(name) in near]
    advice = f"did you mean {meant[0]}?" if meant else f"known fields are {', '.join(known)}"
    return f"unknown field {field!r} in {path or 'the row'}; {advice}"


def _folded(name: str) -> str:
    return name.replace("_", "").casefold()


def _found(line: bytes, path: str) -> str:
    try:
        found: Any = msgspec.json.decode(line)
        for index, name in _STEP.findall(path):
            found = found[int(index) if index else name]
    except (*UNREADABLE, LookupError, TypeError):
        return ""  # after what is wrong the line goes on to be no JSON, or to say the same twice
    text = msgspec.json.encode(found).decode()
    return f", found {text if len(text) <= _MOST else f'{text[:_MOST]} and more'}"
