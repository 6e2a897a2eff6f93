"""Values: what is refused, with which sentence; what the defaults leave out."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from carpool_core.settings import LogFormat, LogLevel
from carpool_deviceplugin.gpu import NoDevicesError
from carpool_deviceplugin.simulated import parse_inventory
from carpool_extender.framework.scores import POLICIES
from carpool_extender.queue.order import QueueOrder

FOLDER = Path(__file__).parents[2] / "helm" / "carpool"
VALUES = (FOLDER / "values.yaml").read_text()
SCHEMA = json.loads((FOLDER / "values.schema.json").read_text())


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in values.items():
        found += leaves(value, (*path, key)) if isinstance(value, dict) and value else [(*path, key)]
    return found


def described(path: tuple[str, ...]) -> bool:
    """Whether the schema names this value itself, rather than letting everything pass."""
    schema = SCHEMA
    for part in path:
        if "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
        if "properties" not in schema:
            return bool(schema.get("type") == "object")
        if part not in schema["properties"]:
            return False
        schema = schema["properties"][part]
    return True


def test_the_defaults_are_what_the_schema_allows() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(yaml.safe_load(VALUES), SCHEMA)


@pytest.mark.parametrize("path", leaves(yaml.safe_load(VALUES)), ids=".".join)
def test_every_default_is_described_by_the_schema(path: tuple[str, ...]) -> None:
    assert described(path)


@pytest.mark.parametrize(
    ("path", "choices"),
    [("log level", LogLevel), ("log format", LogFormat), ("policy", POLICIES), ("queueOrder", QueueOrder)],
)
def test_the_schema_has_the_choices_of_each_setting(path: str, choices: Iterable[str]) -> None:
    schema = SCHEMA["properties"]["settings"]
    for part in path.split():
        schema = schema["properties"][part]
    assert schema["enum"] == [*choices]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        pytest.param(
            {"settings": {"policy": "fastest"}},
            "at '/settings/policy': value must be one of 'least-slowdown', 'most-available-memory'",
            id="unknown policy",
        ),
        pytest.param(
            {"settings": {"queueOrder": "ShortestFirst"}},
            "at '/settings/queueOrder': value must be one of 'Alternate', 'Arrival', 'LongestFirst'",
            id="an unknown order",
        ),
        pytest.param(
            {"nodeAgent": {"simulatedGpu": "x"}},
            "at '/nodeAgent': additional properties 'simulatedGpu' not allowed",
            id="misspelt key",
        ),
        pytest.param(
            {"operator": {"resources": {"limit": {"memory": "1Gi"}}}},
            "at '/operator/resources': additional properties 'limit' not allowed",
            id="misspelt limits",
        ),
        pytest.param(
            {"scheduler": {"affinity": {"podAntiaffinity": {}}}},
            "at '/scheduler/affinity': additional properties 'podAntiaffinity' not allowed",
            id="misspelt affinity",
        ),
        pytest.param(
            {"extender": {"image": {"tag": 1.1}}},
            "at '/extender/image/tag': got number, want string",
            id="tag unquoted",
        ),
        pytest.param(
            {"global": {"imageRegistry": "https://registry.example"}},
            "at '/global/imageRegistry': 'https://registry.example' does not match pattern",
            id="registry as a URL",
        ),
        pytest.param(
            {"operator": {"image": {"registry": "registry.example/team/"}}},
            "at '/operator/image/registry': 'registry.example/team/' does not match pattern",
            id="slash after the registry",
        ),
        pytest.param(
            {"extender": {"image": {"repository": "carpool/extender:1"}}},
            "at '/extender/image/repository': 'carpool/extender:1' does not match pattern",
            id="tag in the repository",
        ),
        pytest.param(
            {"nodeAgent": {"simulatedGpus": "A100"}},
            "expected nodeAgent.simulatedGpus as PRODUCT:COUNT with a count of 1 to 64, several separated by commas, "
            'such as "NVIDIA A100-SXM4-40GB:4"; found "A100".',
            id="simulated GPUs without a count",
        ),
        pytest.param(
            {"nameOverride": "A_B"}, "at '/nameOverride': 'A_B' does not match pattern", id="a name with capitals"
        ),
        pytest.param(
            {"operator": {"extraEnv": [{"name": "CARPOOL_X", "value": 1}]}},
            "at '/operator/extraEnv/0/value': got number, want string",
            id="variable unquoted",
        ),
        pytest.param(
            {"global": {"imageRegistry": ""}},
            "expected the registry of image carpool/extender in extender.image.registry or global.imageRegistry, found "
            "neither.\nCarpool's images are built from its Dockerfile",
            id="no registry at all",
        ),
        pytest.param(
            {"global": {"imageRegistry": ""}, "extender": {"image": {"registry": "registry.example"}}},
            "expected the registry of image kube-scheduler in scheduler.image.registry or global.imageRegistry, found "
            "neither.\nIt is the stock kube-scheduler",
            id="no registry of the scheduler",
        ),
    ],
)
def test_invalid_value_is_refused_with_a_sentence(render: Any, values: dict[str, Any], sentence: str) -> None:
    assert sentence in render(**values).error


@pytest.mark.e2e
def test_an_object_that_is_null_is_the_default_or_refused_with_a_sentence(render: Any) -> None:
    """Regression: `--set scheduler.tls=null` ended in `nil pointer evaluating interface {}.existingSecret`."""

    def objects(of: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        for name, value in of.items():
            if isinstance(value, dict):
                yield of, name
                yield from objects(value)

    values = yaml.safe_load(VALUES)
    optional = []
    for inside, name in list(objects(values)):
        before = inside.pop(name)
        if jsonschema.Draft202012Validator(SCHEMA).is_valid(values):
            optional.append((inside, name))
        inside[name] = before
    for inside, name in optional:
        inside[name] = None
    values["global"]["imageRegistry"] = "localhost"
    assert {"resources", "nodeSelector", "tenancyGroups"} <= {name for _, name in optional}
    assert render(**values).error == ""
    for required in ({"settings": None}, {"scheduler": {"tls": None}}, {"settings": {"log": None}}):
        assert "missing property" in render(**required).error


@pytest.mark.e2e
def test_clusters_whose_rules_would_hold_up_stored_jobs_are_refused(render: Any) -> None:
    assert "requires kubeVersion: >=1.30.0-0" in render(kube_version="v1.29.8").error
    assert render(kube_version="v1.30.0").error == ""


@pytest.mark.e2e
def test_admission_policies_can_be_left_out(render: Any) -> None:
    accepted = render(admissionPolicies={"enabled": False})
    assert accepted.error == ""
    assert accepted.all("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding") == []


@pytest.mark.e2e
def test_vendors_versions_pass_and_the_scheduler_is_the_clusters_own_release(render: Any) -> None:
    image = render(kube_version="v1.31.2-gke.100").containers["kube-scheduler"]["image"]
    assert image == "localhost/kube-scheduler:v1.31.2"


@pytest.mark.e2e
def test_a_digest_and_a_components_own_registry_win(render: Any) -> None:
    digest = "sha256:" + "0" * 64
    containers = render(
        scheduler={"image": {"registry": "mirror.example/k8s", "tag": "v1.36.0"}},
        operator={"image": {"digest": digest}},
    ).containers
    assert containers["kube-scheduler"]["image"] == "mirror.example/k8s/kube-scheduler:v1.36.0"
    assert containers["operator"]["image"] == f"localhost/carpool/operator@{digest}"


@pytest.mark.e2e
@pytest.mark.parametrize("order", list(QueueOrder))
def test_the_order_reaches_the_extender(render: Any, order: QueueOrder) -> None:
    assert render().environment("extender")["CARPOOL_QUEUE_ORDER"] == QueueOrder.ALTERNATE
    assert render(settings={"queueOrder": str(order)}).environment("extender")["CARPOOL_QUEUE_ORDER"] == order


@pytest.mark.e2e
def test_large_numbers_reach_the_processes_as_whole_numbers(render: Any) -> None:
    """Regression: Helm wrote 2000000 of a values file as 2e+06, with which operator and extender did not start."""
    limits = {"leastFreeMib": 1_073_741_824, "mostSmActive": 0.8}
    chart = render(settings={"defaultDurationSeconds": 2_000_000, "traceMemoryMib": 1_048_576, "preconditions": limits})
    environment = chart.environment("extender")
    assert environment["CARPOOL_DEFAULT_DURATION_SECONDS"] == "2000000"
    assert environment["CARPOOL_LEAST_FREE_MIB"] == "1073741824"
    assert environment["CARPOOL_MOST_SM_ACTIVE"] == "0.8"
    assert chart.environment("operator")["CARPOOL_TRACE_MEMORY_MIB"] == "1048576"
    assert chart.one("ConfigMap", "carpool-settings")["data"].items() <= environment.items() | {
        ("CARPOOL_CALIBRATION", "carpool-system/carpool-calibration"), ("CARPOOL_SHARE_UNMEASURED", "false")
    }  # fmt: skip


@pytest.mark.e2e
def test_nothing_is_simulated_by_default(chart: Any) -> None:
    assert "imulated" not in json.dumps([o for o in chart.objects if o["kind"] != "CustomResourceDefinition"])
    assert "CARPOOL_SIMULATED_GPUS" not in chart.environment("agent")


@pytest.mark.e2e
def test_simulated_gpus_are_given_to_the_agent_as_they_were_asked_for(render: Any) -> None:
    asked = "NVIDIA A100-SXM4-40GB:4,NVIDIA H100 80GB HBM3:2"
    assert render(nodeAgent={"simulatedGpus": asked}).environment("agent")["CARPOOL_SIMULATED_GPUS"] == asked


@pytest.mark.parametrize("count", [0, 1, 9, 10, 59, 60, 64, 65, 99, 100])
def test_the_chart_takes_as_many_simulated_gpus_as_the_agent(count: int) -> None:
    """The chart let 65 to 99 through, and the agent ended with them."""
    template = (FOLDER / "templates" / "node-agent" / "daemonset.yaml").read_text()
    pattern = re.search(r'regexMatch "(.+?)" \$simulated', template)
    assert pattern
    asked = f"Tesla T4:1,Tesla T4:{count}"
    if re.match(pattern[1], asked):
        assert parse_inventory(asked)
    else:
        with pytest.raises(NoDevicesError):
            parse_inventory(asked)


def test_no_registry_is_named() -> None:
    values = yaml.safe_load(VALUES)
    images = [
        component["image"] for component in values.values() if isinstance(component, dict) and "image" in component
    ]
    assert [image["registry"] for image in images] == [""] * 4
    assert values["global"]["imageRegistry"] == ""
    dockerfile = (FOLDER.parents[1] / "Dockerfile").read_text()
    bases = re.findall(r"^ARG \w+_IMAGE=(\S+)", dockerfile, re.MULTILINE)
    assert len(bases) == 2
    for name in [*(image["repository"] for image in images), *bases]:
        assert re.fullmatch(r"[a-z/-]+(:[\d.]+-slim)?", name), f"{name} names a registry"
