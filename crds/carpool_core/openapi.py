"""Schemas of CRDs from the resource types: structural OpenAPI v3, without references."""

from enum import Enum
from typing import Any

import msgspec
from msgspec import inspect

from carpool_core import keys
from carpool_core.resources.schema import Rule

Schema = dict[str, Any]


def root_schema(type_: type[msgspec.Struct]) -> Schema:
    """Return the schema of a whole object: defaults in a `spec` that people write, none in what one program writes."""
    info = inspect.type_info(type_)
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"expected a msgspec Struct, found {type_!r}")
    fields = {field.encode_name: field for field in info.fields}
    written_by_people = fields["spec"].required
    return {
        "type": "object",
        "description": _docstring(type_),
        "required": ["spec"] if fields["spec"].required else [],
        "properties": {
            "apiVersion": {"type": "string", "description": f"Version of this schema: {keys.GROUP_VERSION}."},
            "kind": {"type": "string", "description": f"Kind of the object: {type_.__name__}."},
            # Named, so that a rule can point at it.
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "description": "Its name."}}},
            "spec": _field(fields["spec"], with_defaults=written_by_people),
            "status": _schema(fields["status"].type, with_defaults=False),
        },
        **_rules(type_),
    }


def _docstring(type_: type) -> str:
    return " ".join((type_.__doc__ or "").split())


def _rules(type_: type) -> Schema:
    rules: tuple[Rule, ...] = getattr(type_, "rules", ())
    return {"x-kubernetes-validations": [rule.as_schema() for rule in rules]} if rules else {}


def _field(field: inspect.Field, *, with_defaults: bool) -> Schema:
    schema = _schema(field.type, with_defaults=with_defaults)
    default = _default(field)
    # An empty text or list says no more than its absence does, and the types read both alike.
    if with_defaults and not field.required and default not in (None, "", []):
        schema["default"] = default
        if not isinstance(default, dict):
            # `kubectl explain` shows no defaults of its own accord.
            schema["description"] += f" Default: {_spoken(default)}."
    return schema


def _spoken(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _default(field: inspect.Field) -> Any:
    if field.required:
        return None
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    # A nested object's own fields have their defaults, so an empty one is enough to set them off.
    return {} if isinstance(value, msgspec.Struct) else msgspec.to_builtins(value)


def _schema(info: inspect.Type, *, with_defaults: bool) -> Schema:
    if isinstance(info, inspect.Metadata):
        extra = info.extra_json_schema or {}
        inner = _schema(info.type, with_defaults=with_defaults)
        return {"description": extra.get("description"), **inner, **extra}
    if isinstance(info, inspect.UnionType):
        return _union(info, with_defaults=with_defaults)
    if isinstance(info, inspect.StructType):
        return object_schema(info, with_defaults=with_defaults)
    if isinstance(info, inspect.ListType):
        return {"type": "array", "items": _schema(info.item_type, with_defaults=with_defaults)} | _bounds(
            minItems=info.min_length, maxItems=info.max_length
        )
    return _scalar(info)


def object_schema(info: inspect.StructType, *, with_defaults: bool) -> Schema:
    """Return the schema of an object.

    Args:
        info: Its type.
        with_defaults: Whether the API server fills in what is left out.

    Raises:
        TypeError: A CRD cannot hold one of its fields.
        ValueError: A bound is none that the API server can compare with.
    """
    required = [field.encode_name for field in info.fields if field.required]
    return {
        "type": "object",
        **({"required": required} if required else {}),
        "properties": {field.encode_name: _field(field, with_defaults=with_defaults) for field in info.fields},
        **_rules(info.cls),
    }


def _union(info: inspect.UnionType, *, with_defaults: bool) -> Schema:
    """`X | None` is a nullable X; `int | str` is a quantity, whose schema its annotation gives."""
    arms = [arm for arm in info.types if not isinstance(arm, inspect.NoneType)]
    inner = _schema(arms[0], with_defaults=with_defaults) if len(arms) == 1 else {}
    if len(arms) > 1 and {type(arm) for arm in arms} != {inspect.IntType, inspect.StrType}:
        raise TypeError(f"a CRD cannot hold a choice between {arms}: give a single type, or `int | str`")
    return inner | ({"nullable": True} if len(arms) < len(info.types) else {})


def _scalar(info: inspect.Type) -> Schema:
    match info:
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.IntType():
            return {"type": "integer", "format": "int64"} | _bounds(minimum=info.ge, maximum=info.le)
        case inspect.FloatType():
            return {"type": "number", "format": "double"} | _bounds(minimum=info.ge, maximum=info.le)
        case inspect.StrType():
            return {"type": "string"} | _bounds(
                minLength=info.min_length, maxLength=info.max_length, pattern=info.pattern
            )
        case inspect.EnumType():
            return {"type": "string", "enum": [_text(member) for member in info.cls]}
        case inspect.LiteralType():
            return {"type": "string", "enum": list(info.values)}
        case inspect.DictType():
            return {"type": "object"}
    raise TypeError(f"no schema is known for {info!r}: add it here")


def _text(member: Enum) -> str:
    return str(member.value)


def _bounds(**bounds: Any) -> Schema:
    beyond = {name: value for name, value in bounds.items() if isinstance(value, int | float) and abs(value) >= 2**63}
    if beyond:
        # The API server compares whole numbers with bounds as int64, and a larger bound wraps around below zero.
        raise ValueError(f"a bound of a CRD must fit 64 bits, found {beyond}")
    return {name: value for name, value in bounds.items() if value is not None}
