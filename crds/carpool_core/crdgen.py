"""The CustomResourceDefinitions: what each is called, what `kubectl get` shows of it, and its file."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from carpool_core import keys
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, ResourceKind
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.resources.schema import UNCHECKED, Rule

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


_SEE = "The API server takes its entries as they are; docs/reference/resources.md says what stands in them."
_ANYTHING: Schema = {"x-kubernetes-preserve-unknown-fields": True}
HEADER = "# Generated by `make crds` from carpool_core.resources; change the types there, not this file.\n"


class Column(NamedTuple):
    """A column of `kubectl get`."""

    name: str
    path: str
    """JSONPath; of several results kubectl shows the first."""
    description: str
    type: str = "string"
    wide: bool = False
    """Shown with `-o wide` only."""


@dataclass(frozen=True)
class Definition:
    """One CRD."""

    kind: ResourceKind
    type: type[msgspec.Struct]
    short_names: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def file_name(self) -> str:
        """Name of its file, as controller-gen would call it."""
        return f"{self.kind.group}_{self.kind.plural}.yaml"


_AGE = Column("Age", ".metadata.creationTimestamp", "Time since it was created.", "date")

DEFINITIONS = (
    Definition(
        GPU_TRAINING_JOBS,
        GpuTrainingJob,
        ("gtj",),
        (
            Column("State", ".status.state", "Where the job stands."),
            Column("Queue", r".metadata.labels.kueue\.x-k8s\.io/queue-name", "Kueue's queue, where there is one."),
            Column("Node", ".status.summary.node", "Nodes of the workers."),
            Column("GPU", ".status.summary.gpu", "Product of the GPUs."),
            Column("Mode", ".status.summary.mode", "How the GPUs are shared."),
            Column("PredMem", ".status.summary.predictedMemory", "Predicted GPU memory, median."),
            Column("PredUtil", ".status.summary.predictedUtilization", "Predicted GPU utilization, median."),
            Column("Restarts", ".status.restarts", "Failures charged to backoffLimit.", "integer"),
            _AGE,
            Column("MemBound", ".status.summary.memoryBound", "GPU memory that placement counts with.", wide=True),
            Column("ObsMem", ".status.summary.observedMemory", "Largest GPU memory measured.", wide=True),
            Column("ObsUtil", ".status.summary.observedUtilization", "Mean GPU utilization measured.", wide=True),
            Column(
                "Slowdown", ".status.summary.slowdown", "Slowdown that the neighbours are expected to cause.", wide=True
            ),
            Column(
                "StepTime", ".status.summary.stepTime", "Step time measured, over the one predicted alone.", wide=True
            ),
        ),
    ),
    Definition(
        GPU_NODES,
        GpuNode,
        ("gpn",),
        (
            Column("GPUs", ".status.summary.gpus", "GPUs of each product."),
            Column("Memory", ".status.summary.memory", "Total memory of one GPU."),
            Column("Healthy", ".status.summary.healthy", "Number of healthy GPUs.", "integer"),
            Column("Tenants", ".status.summary.tenants", "Pods with a share of a GPU.", "integer"),
            Column("Simulated", ".status.simulated", "Whether there is no hardware.", "boolean"),
            Column(
                "Ready",
                '.status.conditions[?(@.type=="Ready")].status',
                "Whether new work may go there, as the agent said last: True of a dead one, too. See Heartbeat.",
            ),
            Column(
                "Heartbeat",
                ".status.heartbeatTime",
                "Time since the agent last wrote; after a minute the node is left out, whatever Ready says.",
                "date",
            ),
            _AGE,
            Column("Agent", ".status.agentVersion", "Version of the node agent.", wide=True),
        ),
    ),
)


def crd_of(definition: Definition) -> Schema:
    """Build the CustomResourceDefinition of a resource type."""
    kind = definition.kind
    names = {
        "kind": kind.kind,
        "listKind": f"{kind.kind}List",
        "plural": kind.plural,
        "singular": kind.kind.lower(),
        "shortNames": list(definition.short_names),
        # `kubectl get all` is about what users own; a GpuNode for each node of the cluster would bury that.
        "categories": ["all", "carpool"] if kind.namespaced else ["carpool"],
    }
    version = {
        "name": kind.version,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(column) for column in definition.columns],
        "schema": {"openAPIV3Schema": _served(root_schema(definition.type))},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            "labels": {"app.kubernetes.io/name": "carpool", "app.kubernetes.io/part-of": "carpool"},
        },
        "spec": {
            "group": keys.DOMAIN,
            "names": names,
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "versions": [version],
        },
    }


def _served(schema: Schema) -> Schema:
    """What of a schema the API server is told: nothing of lists that it takes as they are, or of their entries."""
    told = {key: value for key, value in schema.items() if key != UNCHECKED}
    if UNCHECKED in schema:
        described = {"description": f"{schema['description']} {_SEE}"}
        if schema[UNCHECKED] == "whole":
            return described | _ANYTHING
        return told | described | {"items": {"type": "object"} | _ANYTHING}
    if "properties" in schema:
        told["properties"] = {name: _served(inner) for name, inner in schema["properties"].items()}
    if "items" in schema:
        told["items"] = _served(schema["items"])
    return told


def _column(column: Column) -> Schema:
    result = {"name": column.name, "type": column.type, "jsonPath": column.path, "description": column.description}
    return result | ({"priority": 1} if column.wide else {})


def as_yaml(definition: Definition) -> str:
    """Return the file's content."""
    import yaml  # only `make crds` and tests need it

    class Dumper(yaml.SafeDumper):
        """Writes no anchors, which kubectl would refuse nowhere but people everywhere."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    return HEADER + yaml.dump(crd_of(definition), Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)


def write(folder: Path) -> list[Path]:
    """Write every CRD into a folder; returns the files. One that is a link to another of them is left a link."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / definition.file_name for definition in DEFINITIONS]
    for file, definition in zip(files, DEFINITIONS, strict=True):
        file.write_text(as_yaml(definition))
    return files
