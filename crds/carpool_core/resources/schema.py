"""How the resource types say what the CRD must: descriptions, CEL rules, defaults, list types."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Meta


class Resource(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, repr_omit_defaults=True):
    """Base of everything that stands in a custom resource: frozen, camelCase on the wire, defaults left out."""


class Rule(NamedTuple):
    """A CEL rule (`x-kubernetes-validations`) of a field, or of an object.

    An object's stand in its type's `rules: ClassVar[tuple[Rule, ...]]`.
    """

    cel: str
    """The expression that must hold; `self` is the value."""
    message: str
    """A sentence: what was expected, what to do."""
    found: str = ""
    """CEL for the same sentence with what was found in it; `message` stands where it cannot be computed."""
    field_path: str = ""
    """Which field under this one is to blame, such as `.spec.workers`. The root has no name of its own, and without
    this the API server calls it `<nil>`."""

    def as_schema(self) -> dict[str, Any]:
        """Return the rule as the CRD holds it."""
        detail = {"messageExpression": self.found, "fieldPath": self.field_path}
        return {"rule": self.cel, "message": self.message} | {key: value for key, value in detail.items() if value}


def field(description: str, *, schema: dict[str, Any] | None = None, rules: Sequence[Rule] = (), **bounds: Any) -> Meta:
    """Say what stands inside `Annotated[…]` of a resource type.

    Args:
        description: What `kubectl explain` shows, with the unit.
        schema: Further keys of the field's OpenAPI schema, such as `x-kubernetes-list-type`.
        rules: CEL rules of the field's value; they are not asked where the field is absent or null.
        bounds: msgspec's constraints (`ge`, `le`, `min_length`, `max_length`, `pattern`).
    """
    own = {"x-kubernetes-validations": [rule.as_schema() for rule in rules]} if rules else {}
    return Meta(description=description, extra_json_schema=(schema or {}) | own, **bounds)


ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
"""Schema of a list that one writer owns and replaces whole. For lists that are merged by keys the API server works out,
with each write, what became of each field of each entry, and of each field it looks at all others."""

UNCHECKED = "x-carpool-unchecked"
"""Key of a list that the API server takes as it is (`whole`), or the entries of which it does; it stands in no CRD."""

OWN: dict[str, Any] = {UNCHECKED: "whole"}
"""Schema of a list that Carpool's processes write, from these very types, and check again when they read it. The API
server goes through each field of its entries several times with every write of the object, also of what does not
change, and of those that no schema tells of, too, unless it is told nothing at all, not even that there is a list: more
than half of what writing a GpuNode costs. Not for what people write."""

COUNTED: dict[str, Any] = ATOMIC | {UNCHECKED: "entries"}
"""The same for a list whose length a rule asks for."""

ATOMIC_MAP: dict[str, Any] = {"x-kubernetes-map-type": "atomic"}
"""Schema of an object that one writer owns: the API server notes its owner, not who wrote which field inside."""

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


_PLACE = re.compile(r"^(?P<said>.*?)(?: - at `\$(?P<place>[^`]*)`)?$", re.DOTALL)


def describe_decode_error(said: str) -> str:
    """Say what a decoder says, of a field as users write it: `spec.sharing.maxSlowdown: expected a number >= 1.0`."""
    found = _PLACE.match(said)
    place = "" if found is None else (found["place"] or "").lstrip(".")
    text = (said if found is None else found["said"]).replace("`", "")
    for theirs, ours in (("float", "a number"), ("int", "a whole number"), ("str", "a text"), ("object", "a mapping")):
        text = re.sub(rf"\b{theirs}\b", ours, text)
    text = text[:1].lower() + text[1:]
    return f"{place}: {text}" if place else text
