"""Node affinity: what kube-scheduler asks of a node's labels."""

from typing import Any

import msgspec


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Camel-cased, partial snapshot of an object."""


class Requirement(_Wire, frozen=True, kw_only=True):
    """A condition on one label."""

    key: str
    operator: str
    values: list[str] | None = None


class NodeSelectorTerm(_Wire, frozen=True, kw_only=True):
    """Conditions that have to hold together."""

    match_expressions: list[Requirement] | None = None
    match_fields: list[Requirement] | None = None


class _Required(_Wire, frozen=True, kw_only=True):
    node_selector_terms: list[NodeSelectorTerm] = []


class _NodeAffinity(_Wire, frozen=True, kw_only=True):
    required: _Required | None = msgspec.field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")


class Affinity(_Wire, frozen=True, kw_only=True):
    """A pod's affinity."""

    node_affinity: _NodeAffinity | None = None
    pod_affinity: dict[str, Any] | None = None
    pod_anti_affinity: dict[str, Any] | None = None

    @property
    def required_terms(self) -> list[NodeSelectorTerm] | None:
        """Terms of which one has to hold; None where nothing is required."""
        required = None if self.node_affinity is None else self.node_affinity.required
        return None if required is None else required.node_selector_terms


def matches(term: NodeSelectorTerm, labels: dict[str, str], name: str) -> bool:
    """Whether a node's labels and name meet a term; an empty term matches nothing."""
    expressions, fields = term.match_expressions or [], term.match_fields or []
    if not expressions and not fields:
        return False
    named = {"metadata.name": name}
    return all(_holds(one, labels) for one in expressions) and all(_holds(one, named) for one in fields)


def _holds(one: Requirement, labels: dict[str, str]) -> bool:
    found, values = labels.get(one.key), one.values or []
    if one.operator in ("Exists", "DoesNotExist"):
        return (found is not None) == (one.operator == "Exists")
    if one.operator == "NotIn":
        return found not in values
    if found is None:
        return False
    if one.operator == "In":
        return found in values
    return _is_beyond(one.operator, found, values)


def _is_beyond(operator: str, found: str, values: list[str]) -> bool:
    """Gt and Lt, for which both sides have to be whole numbers."""
    try:
        number, limit = int(found), int(values[0])
    except (ValueError, IndexError):
        return False
    return number > limit if operator == "Gt" else operator == "Lt" and number < limit
