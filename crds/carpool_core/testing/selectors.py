"""Label and field selectors over plain objects."""

import re
from collections.abc import Mapping
from typing import Any

from carpool_core.kube.api import Selector

_TERM = re.compile(
    r"\s*(?:(?P<absent>!\s*)(?P<gone>[^\s,=!()]+)|(?P<key>[^\s,=!()]+)\s*"
    r"(?:(?P<op>==|!=|=)\s*(?P<value>[^,\s]*)|(?P<set>notin|in)\s*\((?P<values>[^)]*)\))?)\s*(?:,|$)"
)


def selects(selector: Selector, item: Mapping[str, Any]) -> bool:
    """Whether the object is one of those that are selected.

    Raises:
        ValueError: The selector cannot be read.
    """
    metadata = item.get("metadata", {})
    if selector.namespace and metadata.get("namespace", "") != selector.namespace:
        return False
    labels = metadata.get("labels") or {}
    return all(_holds(term, labels.get(term["key"] or term["gone"])) for term in _terms(selector.labels)) and all(
        _holds(term, str(_field(item, term["key"]))) for term in _terms(selector.fields)
    )


def _terms(text: str) -> list[dict[str, str]]:
    found, position = [], 0
    while position < len(text):
        match = _TERM.match(text, position)
        if match is None or match.end() == position:
            raise ValueError(f"cannot read the selector {text!r} from {text[position:]!r}")
        found.append(match.groupdict())
        position = match.end()
    return found


def _holds(term: Mapping[str, str], value: str | None) -> bool:
    if term["absent"]:
        return value is None
    if term["op"] == "!=":
        return value != term["value"]
    if term["op"]:
        return value == term["value"]
    if term["set"]:
        is_in = value in [choice.strip() for choice in term["values"].split(",")]
        return is_in == (term["set"] == "in")
    return value is not None


def _field(item: Mapping[str, Any], path: str) -> Any:
    here: Any = item
    for part in path.split("."):
        here = here.get(part, "") if isinstance(here, Mapping) else ""
    return here
