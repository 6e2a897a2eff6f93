from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import msgspec
import pytest
import yaml
from carpool_core import crdgen
from carpool_core.crdgen import DEFINITIONS, Definition, object_schema
from carpool_core.demand import demand_of
from carpool_core.resources.job import GpuTrainingJob, JobSpec
from carpool_core.resources.schema import Resource, field

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
BAD = sorted((ROOT / "tests/crds/bad").glob("*.yaml"))
each_crd = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda d: d.kind.kind)


def _schema(definition: Definition) -> dict[str, Any]:
    (version,) = crdgen.crd_of(definition)["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def _nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, with its path; items of lists are `path[]`."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from _nodes(inner, f"{path}.{name}")
    if "items" in schema:
        yield from _nodes(schema["items"], f"{path}[]")


@each_crd
def test_committed_crds_match_the_types(definition: Definition) -> None:
    committed = (ROOT / "crds" / definition.file_name).read_text()
    assert committed == crdgen.as_yaml(definition), "run `make crds` and commit the result"


def _missing(schema: dict[str, Any], path: str) -> Iterator[str]:
    """What `kubectl explain` could not show of a field and all below it."""
    if "type" not in schema and not schema.get("x-kubernetes-int-or-string"):
        yield f"{path}: type"
    if not schema.get("description") and not path.endswith("[]"):
        yield f"{path}: description"
    if schema.get("type") == "array" and "items" not in schema:
        yield f"{path}: items"
    if schema.get("type") == "object" and not schema.keys() & {"properties", "additionalProperties"}:
        yield f"{path}: properties"


@each_crd
def test_explain_describes_every_field(definition: Definition) -> None:
    """Of the committed file: type and description of every field, items of every list, properties of every object."""
    committed = yaml.safe_load((ROOT / "crds" / definition.file_name).read_text())
    (version,) = committed["spec"]["versions"]
    nodes = dict(_nodes(version["schema"]["openAPIV3Schema"]))
    assert len(nodes) > 70
    del nodes[".metadata"]  # the API server describes it
    assert [gap for path, schema in nodes.items() for gap in _missing(schema, path)] == []


@each_crd
def test_every_rule_has_a_sentence(definition: Definition) -> None:
    for path, schema in _nodes(_schema(definition)):
        for rule in schema.get("x-kubernetes-validations", []):
            assert len(rule["message"].split()) >= 6, f"{path}: {rule}"
            assert "\n" not in rule["message"]


@each_crd
def test_schema_is_structural(definition: Definition) -> None:
    for path, schema in _nodes(_schema(definition)):
        assert "$ref" not in schema
        assert "anyOf" not in schema
        assert schema.get("type") or schema.get("x-kubernetes-int-or-string"), path
        if schema.get("type") == "array":
            kind = schema.get("x-kubernetes-list-type")
            assert kind in ("atomic", "map", "set"), f"{path} has no list type"
            for key in schema.get("x-kubernetes-list-map-keys", []):
                assert key in schema["items"]["required"], f"{path} merges by {key}, which is not required"
        if schema.get("type") == "integer":
            assert schema["format"] == "int64", path


@each_crd
def test_lists_of_the_spec_are_bounded(definition: Definition) -> None:
    spec = _schema(definition)["properties"]["spec"]
    assert [path for path, schema in _nodes(spec) if schema.get("type") == "array" and "maxItems" not in schema] == []


@each_crd
def test_status_has_no_defaults(definition: Definition) -> None:
    status = _schema(definition)["properties"]["status"]
    assert [path for path, schema in _nodes(status) if "default" in schema] == []


@each_crd
def test_columns_show_existing_fields(definition: Definition) -> None:
    paths = {path for path, _ in _nodes(_schema(definition))}
    for column in definition.columns:
        if column.path.startswith((".metadata", ".spec.template.metadata.labels", ".status.conditions")):
            continue
        assert column.path in paths, f"{column.name} shows {column.path}, which is no field"


def _defaulted(schema: dict[str, Any], value: Any) -> Any:
    """Fill in defaults as the API server does."""
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name not in value and "default" in inner:
                value[name] = msgspec.json.decode(msgspec.json.encode(inner["default"]))
            if name in value:
                value[name] = _defaulted(inner, value[name])
    if isinstance(value, list):
        return [_defaulted(schema["items"], item) for item in value]
    return value


def test_schema_and_types_have_equal_defaults() -> None:
    spec = _schema(DEFINITIONS[0])["properties"]["spec"]
    bare = {"template": {"spec": {"containers": []}}}
    defaulted = _defaulted(spec, {"template": {"spec": {"containers": []}}})
    assert msgspec.convert(defaulted, JobSpec) == msgspec.convert(bare, JobSpec)


def _as_json_schema(schema: Any) -> Any:
    """OpenAPI's `nullable` and Kubernetes' int-or-string in JSON Schema's words, unknown fields refused."""
    if isinstance(schema, list):
        return [_as_json_schema(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _as_json_schema(value) for key, value in schema.items() if not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result["additionalProperties"] = False
    if schema.get("nullable") is True:
        result = {"anyOf": [{"type": "null"}, result]}
    return result


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.stem)
def test_examples_are_valid(file: Path) -> None:
    manifest = yaml.safe_load(file.read_text())
    schema = _as_json_schema(_schema(DEFINITIONS[0])["properties"]["spec"])
    jsonschema.validate(manifest["spec"], schema, cls=jsonschema.Draft202012Validator)
    job = msgspec.convert(manifest, GpuTrainingJob)
    assert demand_of(job).gpus >= 1
    assert file.read_text().startswith("# "), "say what the example shows"
    assert job.metadata.name == file.stem


def test_examples_cover_each_model_source() -> None:
    models = [yaml.safe_load(file.read_text())["spec"].get("model") for file in EXAMPLES]
    assert None in models
    assert {key for model in models if model for key in model} == {"features", "catalog", "graph"}


def test_types_without_a_crd_schema_are_refused() -> None:
    class Choice(Resource, frozen=True, kw_only=True):
        value: Annotated[int | float, field("One of two.")] = 0

    class Unbounded(Resource, frozen=True, kw_only=True):
        value: Annotated[float, field("Too large for int64.", le=1e21)] = 0

    class Timed(Resource, frozen=True, kw_only=True):
        value: Annotated[bytes, field("No schema.")] = b""

    for type_, error in ((Choice, TypeError), (Unbounded, ValueError), (Timed, TypeError)):
        with pytest.raises(error):
            object_schema(msgspec.inspect.type_info(type_), with_defaults=False)  # type: ignore[arg-type]
