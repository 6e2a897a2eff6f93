"""Page of the settings: flag, environment variable, kind, unit, default and meaning of each, and the chart's values."""

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from carpool_board.commands import BoardSettings
from carpool_core.settings import Setting, settings_of
from carpool_deviceplugin.settings import AgentSettings
from carpool_extender.framework.scores import POLICIES, Policy
from carpool_extender.settings import ExtenderSettings
from carpool_operator.settings import OperatorSettings

from carpool_docs import code, table
from carpool_docs import page as page_of

PROCESSES: dict[str, type[Any]] = {
    "operator": OperatorSettings, "extender": ExtenderSettings, "agent": AgentSettings, "board": BoardSettings
}  # fmt: skip
"""Settings of each process."""

_INTRODUCTION = """Each process takes its settings as flags or as environment variables; a flag overrides its variable.
An empty variable counts as unset. The description of a setting states the meaning of an empty value.

The chart sets the variables of its workloads: from `settings` and `nodeAgent` in
[values.yaml](../../helm/carpool/values.yaml), and metrics on port 9400 for each of them but the
board, which has none."""

_KINDS = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
_UNITS = {"_s": "s", "_seconds": "s", "_mib": "MiB", "port": "TCP port", "_grams_per_kwh": "g/kWh"}
"""Unit of a number by the suffix of its field's name."""


def page() -> str:
    """Return the page."""
    parts = [_INTRODUCTION, *_chart_section()]
    for process, cls in PROCESSES.items():
        parts.append(f"## carpool {process}")
        parts.append(table(_HEADER, [_row(one) for one in settings_of(cls)]))
        if process == "extender":
            parts += [
                "### Policies",
                table(("Policy", "Meaning"), [(code(p.name), _meaning(p)) for p in POLICIES.values()]),
            ]
    return page_of("Settings", *parts)


def _meaning(policy: Policy) -> str:
    return f"{policy.meaning} ({policy.short})" if policy.short else policy.meaning


_HEADER = ("Flag", "Variable", "Kind", "Unit", "Default", "Meaning")


def _row(one: Setting) -> tuple[str, ...]:
    flag = f"{one.flag}, --no-{one.flag.removeprefix('--')}" if one.type is bool else one.flag
    return code(flag), code(one.env), _kind(one), unit_of(one), _default(one), one.description


def _kind(one: Setting) -> str:
    return " or ".join(code(str(m.value)) for m in one.type) if issubclass(one.type, Enum) else _KINDS[one.type]


def unit_of(one: Setting) -> str:
    """Return the unit of a number; empty for other types."""
    if one.type not in (int, float):
        return ""
    if "(0..1)" in one.help:
        return "0..1"
    return next((unit for end, unit in _UNITS.items() if one.path[-1].endswith(end)), "count")


def _default(one: Setting) -> str:
    match one.default:
        case None | "":
            return "empty"
        case Enum(value=value):
            return code(str(value))
        case bool(value):
            return code(str(value).lower())
        case float(value):
            return code(f"{value:g}")
        case value:
            return code(str(value))


CHART_VALUES = Path(__file__).parents[2] / "helm" / "carpool" / "values.yaml"
BLOCK = "settings"
_LINE = re.compile(r"(?P<indent> *)(?:# ?(?P<comment>.*)|(?P<key>\w+):(?: (?P<default>.*))?)")
_INDENT = 2

_CHART = f"""Set these at the installation of the chart, with `--set {BLOCK}.queueOrder=LongestFirst` or in a
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
        raise ValueError(f"{CHART_VALUES.name}: expected the block {BLOCK}, found none")
    names: list[str] = [BLOCK]
    comment: list[str] = []
    for line in block[1].splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"{CHART_VALUES.name}: expected a comment or `key: value` under {BLOCK}, found {line!r}")
        if found["key"] is None:
            comment.append(found["comment"])
            continue
        names = [*names[: len(found["indent"]) // _INDENT], found["key"]]
        if comment or found["default"]:
            yield Value(".".join(names), found["default"] or "", " ".join(comment))
        comment = []


def _chart_section() -> list[str]:
    """Return the section about them."""
    rows = [
        (code(one.path), code(one.default), one.meaning) for one in values(CHART_VALUES.read_text(encoding="utf-8"))
    ]
    return [f"## The chart's {code(BLOCK)}", _CHART, table(("Value", "Default", "Meaning"), rows)]
