"""Pages of the custom resources, read from the schemas of the CRDs, and of the optimizers that a job can name."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from carpool_core.crdgen import DEFINITIONS, Column, Definition, Schema, root_schema
from carpool_predictor.optimizers import TABLE as OPTIMIZERS

from carpool_docs import code, table
from carpool_docs import page as page_of

_INTRODUCTION = """The API server refuses objects that violate these types, bounds and rules, and fills in the
defaults of `spec`. `[]` means each item of a list, `{}` each value of a map. `kubectl explain gtj.spec.sharing` shows
the same."""

_NOTES = {
    "GpuTrainingJob": """Users write `spec`; the operator alone writes `status`. The list has the fields of
`spec.template` that the API server checks; every other field of a Pod template is allowed and passed on.""",
    "GpuNode": """One for each node with GPUs, with the node's name, created by the node's agent. The extender alone
writes `spec`, the agent alone writes `status`.""",
}


class Field(NamedTuple):
    """A field, or an item of one."""

    path: str
    schema: Schema
    is_required: bool


def fields(schema: Schema, path: str = "", is_required: bool = True) -> Iterator[Field]:
    """Yield a schema's field and all fields below; items of lists and maps only if they have fields or rules."""
    if path:
        yield Field(path, schema, is_required)
    needed = schema.get("required", ())
    for name, inner in schema.get("properties", {}).items():
        yield from fields(inner, f"{path}.{name}" if path else name, name in needed)
    for inner, mark in ((schema.get("items"), "[]"), (schema.get("additionalProperties"), "{}")):
        if inner is not None and ("properties" in inner or "x-kubernetes-validations" in inner):
            yield from list(fields(inner, path + mark))[1:]


def rules(schema: Schema, path: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every CEL rule with the path of its value."""
    yield from ((path, rule) for rule in schema.get("x-kubernetes-validations", ()))
    for name, inner in schema.get("properties", {}).items():
        yield from rules(inner, f"{path}.{name}" if path else name)
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if key in schema:
            yield from rules(schema[key], path + mark)


def page() -> str:
    """Return the page."""
    parts = [_INTRODUCTION]
    for definition in DEFINITIONS:
        parts += _resource(definition)
    return page_of("Resources", *parts)


def _resource(definition: Definition) -> list[str]:
    kind, schema = definition.kind, root_schema(definition.type)
    scope = "namespaced" if kind.namespaced else "cluster-scoped"
    known_as = ", ".join(code(name) for name in (kind.plural, *definition.short_names))
    every = list(fields(schema))
    parts = [
        f"## {kind.kind}",
        f"{code(f'{kind.group}/{kind.version}')}, {scope}, for kubectl {known_as}. {schema['description']}",
        _NOTES[kind.kind],
    ]
    for top in ("spec", "status"):
        below = [field for field in every if field.path == top or field.path.startswith(f"{top}.")]
        parts += [f"### {kind.kind}: {top}", _field_table(below)]
    stated = list(rules(schema))
    if stated:
        header = ("Path", "Rule", "Message")
        rows = [(code(path) if path else "the object", code(rule["rule"]), rule["message"]) for path, rule in stated]
        parts += [f"### {kind.kind}: rules", table(header, rows)]
    return [*parts, f"### {kind.kind}: columns of kubectl get", _column_table(definition.columns)]


def _field_table(found: Sequence[Field]) -> str:
    header = ("Field", "Type", "Default", "Description")
    return table(header, [(code(f.path), _type(f), _default(f.schema), _description(f.schema)) for f in found])


def _type(field: Field) -> str:
    kind = _type_of(field.schema)
    return f"{kind}, required" if field.is_required and field.path not in ("spec", "status") else kind


def _type_of(schema: Schema) -> str:
    if "enum" in schema:
        return " or ".join(code(str(value)) for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type_of(schema['items'])}{_lengths(schema)}"
    if kind == "object" and "additionalProperties" in schema:
        return f"map to {_type_of(schema['additionalProperties'])}"
    if kind == "string" and "pattern" in schema:
        return f"string like {code(schema['pattern'])}"
    if kind == "string":
        return f"{schema.get('format', kind)}{_limits(schema, 'minLength', 'maxLength', ' characters')}"
    return f"{kind}{_limits(schema, 'minimum', 'maximum')}"


def _limits(schema: Schema, least: str, most: str, of: str = "") -> str:
    low, high = schema.get(least), schema.get(most)
    if (low, high, of) == (1, None, " characters"):
        return ", not empty"
    if high is None:
        return "" if low is None else f", at least {_number(low)}{of}"
    return f", at most {_number(high)}{of}" if low is None else f", {_number(low)} to {_number(high)}{of}"


def _lengths(schema: Schema) -> str:
    limits = _limits(schema, "minItems", "maxItems", " items").removeprefix(", ")
    return f" ({limits})" if limits else ""


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e6 or value != int(value) else f"{int(value):,}"


def _default(schema: Schema) -> str:
    value: Any = schema.get("default")
    if value is None or value == {}:
        return ""
    return code(_text(value))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _description(schema: Schema) -> str:
    """Return the description without the default, which has its own column here."""
    text = str(schema.get("description") or "")
    return text.removesuffix(f" Default: {_text(schema.get('default'))}.")


def _column_table(columns: Sequence[Column]) -> str:
    rows = [
        (column.name, code(column.path), f"{column.description}{' With `-o wide`.' if column.wide else ''}")
        for column in columns
    ]
    return table(("Column", "Field", "Meaning"), rows)


_OPTIMIZERS = """Values of `spec.training.optimizer` and of `--optimizer`. The state is alive between steps, and
temporaries during the update. Bytes are those of a parameter of a 4,096 × 4,096 matrix in FP32 and in BF16; small
tensors differ where the source has blocks or thresholds. Updates that handle all tensors at once hold the temporaries
of all parameters. Others hold those of one tensor, or of two while the loop keeps the previous one."""

_MATRIX = (4096, 4096)


def _per_parameter(numbers: tuple[int, int]) -> str:
    return " / ".join(f"{number / (_MATRIX[0] * _MATRIX[1]):.3g}" for number in numbers)


def optimizers_page() -> str:
    """Return the page of the optimizers, read from the predictor's table."""
    rows = [
        (
            code(kind),
            _per_parameter((row.state_bytes([_MATRIX], 4), row.state_bytes([_MATRIX], 2))),
            _per_parameter((row.temporary_bytes([_MATRIX], 4), row.temporary_bytes([_MATRIX], 2))),
            "all tensors" if row.at_once else "one tensor",
            row.source,
        )
        for kind, row in OPTIMIZERS.items()
    ]
    header = ("optimizer", "state, bytes", "temporaries, bytes", "of", "source")
    return page_of("Optimizers", _OPTIMIZERS, table(header, rows))
