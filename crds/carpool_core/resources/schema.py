"""How the resource types say what the CRD must: descriptions, CEL rules, defaults, list types."""

from typing import Any, NamedTuple

import msgspec
from msgspec import Meta


class Resource(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, repr_omit_defaults=True):
    """Base of everything that stands in a custom resource: frozen, camelCase on the wire, defaults left out."""


class Rule(NamedTuple):
    """A CEL rule of an object (`x-kubernetes-validations`), listed in a type's `rules: ClassVar[tuple[Rule, ...]]`."""

    cel: str
    """The expression that must hold; `self` is the object."""
    message: str
    """A sentence: what was expected, what to do."""


def field(description: str, *, schema: dict[str, Any] | None = None, **bounds: Any) -> Meta:
    """Describe a field, as in `Annotated[int, field("Memory in MiB.", ge=0)]`.

    Args:
        description: What `kubectl explain` shows, with the unit.
        schema: Further keys of the field's OpenAPI schema, such as `x-kubernetes-list-type`.
        bounds: msgspec's constraints (`ge`, `le`, `min_length`, `max_length`, `pattern`).
    """
    return Meta(description=description, extra_json_schema=schema or {}, **bounds)


def map_list(*keys: str) -> dict[str, Any]:
    """Schema of a list that server-side apply merges by `keys`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
"""Schema of a list that one writer owns and replaces whole."""

QUANTITY: dict[str, Any] = {"x-kubernetes-int-or-string": True}
"""Schema of a Kubernetes quantity such as `12Gi`."""
