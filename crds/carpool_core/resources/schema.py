"""Base type and annotations of the resource types: descriptions, bounds, CEL rules, list and map types."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Meta


class Resource(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, repr_omit_defaults=True):
    """Base of every part of a Kubernetes object: frozen, camelCase on the wire, defaults left out."""


class Rule(NamedTuple):
    """A CEL rule (`x-kubernetes-validations`) of a field or of an object.

    A type holds the rules of its objects in `rules: ClassVar[tuple[Rule, ...]]`.
    """

    cel: str
    """Expression that must hold; `self` is the value."""
    message: str
    """One sentence: what was expected and what to do."""
    message_expression: str = ""
    """CEL for the same sentence with the value found; `message` is used where it cannot be computed."""
    field_path: str = ""
    """Invalid field below this one, such as `.spec.workers`; without it the API server calls the root `<nil>`."""

    def as_schema(self) -> dict[str, Any]:
        """Return the rule as the CRD holds it."""
        optional = {"messageExpression": self.message_expression, "fieldPath": self.field_path}
        return {"rule": self.cel, "message": self.message} | {key: value for key, value in optional.items() if value}


def field(description: str, *, schema: dict[str, Any] | None = None, rules: Sequence[Rule] = (), **bounds: Any) -> Meta:
    """Return the metadata of a field, for `Annotated[…]`.

    Args:
        description: Text that `kubectl explain` shows, with the unit.
        schema: Further keys of the field's OpenAPI schema, such as `x-kubernetes-list-type`.
        rules: CEL rules of the value; the API server skips them where the field is absent or null.
        bounds: msgspec's constraints (`ge`, `le`, `min_length`, `max_length`, `pattern`).
    """
    own = {"x-kubernetes-validations": [rule.as_schema() for rule in rules]} if rules else {}
    return Meta(description=description, extra_json_schema=(schema or {}) | own, **bounds)


ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
"""Schema of a list that one writer replaces as a whole, because merging by keys costs the API server time."""

ATOMIC_MAP: dict[str, Any] = {"x-kubernetes-map-type": "atomic"}
"""Schema of an object that one writer owns: the API server tracks one owner instead of one for each field."""

QUANTITY: dict[str, Any] = {"x-kubernetes-int-or-string": True, "maxLength": 32}
"""Schema of a Kubernetes quantity such as `12Gi`."""

_AS_QUANTITY = "quantity(type(self) == int ? string(self) : self)"
MEMORY_RULES = (
    Rule(
        f"(type(self) == int || isQuantity(self)) && {_AS_QUANTITY}.compareTo(quantity('1Mi')) >= 0 && "
        f"{_AS_QUANTITY}.compareTo(quantity('1Pi')) <= 0",
        "expected an amount of memory from 1Mi to 1Pi with its unit, such as 12Gi; a number without a unit means bytes",
        "'expected an amount of memory from 1Mi to 1Pi with its unit, such as 12Gi, found ' + string(self) + "
        "'; a number without a unit means bytes'",
    ),
)
"""Rules of a quantity of memory."""


_DECODE_ERROR = re.compile(r"^(?P<text>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_PLAIN_TYPES = (("float", "a number"), ("int", "a whole number"), ("str", "a text"), ("object", "a mapping"))


def describe_decode_error(error: str) -> str:
    """Return msgspec's message in the words of a manifest: `spec.sharing.maxSlowdown: expected a number >= 1.0`."""
    found = _DECODE_ERROR.match(error)
    text, path = (error, "") if found is None else (found["text"], (found["path"] or "").lstrip("."))
    text = text.replace("`", "")
    for python_name, plain in _PLAIN_TYPES:
        text = re.sub(rf"\b{python_name}\b", plain, text)
    text = text[:1].lower() + text[1:]
    return f"{path}: {text}" if path else text
