"""Who may do what, as a table; a right that is not in it is one too many."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from carpool_board.commands import BoardSettings
from carpool_core.kube.api import CONFIG_MAPS
from carpool_core.settings import load, settings_of
from carpool_core.testing.kube import FakeKube
from carpool_extender.explain.commands import read_site_settings
from carpool_extender.framework.filters import AdmissionLimits, Quantile
from carpool_extender.settings import AskSettings
from own_rights import OWN, READ

pytestmark = pytest.mark.e2e

SECURITY = Path(__file__).parents[2] / "docs" / "security.md"


def rights(role: dict[str, Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault(f"{group}/{resource}".lstrip("/"), set()).update(rule["verbs"])
    return found


def written(account: str) -> dict[str, set[str]]:
    """Read an account's table in docs/security.md."""
    section = SECURITY.read_text().split(f"ServiceAccount `{account}`\n")[1].split("\n### ")[0]
    table = section.split("| resource | verbs | for |\n")[1].split("\n\n")[0]
    found: dict[str, set[str]] = {}
    for line in table.splitlines()[1:]:
        _, resource, verbs, *_ = (cell.strip() for cell in line.split("|"))
        group = "carpool.dev/" if re.match("gpu(nodes|trainingjobs)", resource) else ""
        words = set(verbs.split(", "))
        found[group + resource] = (words - {"read"}) | (READ if "read" in words else set())
    return found


@pytest.mark.parametrize("name", OWN)
def test_security_page_lists_exactly_the_rights(chart: Any, name: str) -> None:
    assert written(name) == rights(chart.one("ClusterRole", name))


def test_board_lists_and_watches_only_and_runs_only_if_asked_for(render: Any) -> None:
    assert [one["metadata"]["name"] for one in render().objects if "carpool-board" in str(one)] == []
    chart = render(board={"enabled": True}, networkPolicies={"enabled": True})
    found = rights(chart.one("ClusterRole", "carpool-board"))
    watched = ("carpool.dev/gputrainingjobs", "carpool.dev/gpunodes", "pods", "nodes")
    assert written("carpool-board") == found == {kind: {"list", "watch"} for kind in watched}
    [rule] = chart.one("Role", "carpool-board")["rules"]
    assert (rule["resourceNames"], rule["verbs"]) == (["carpool-settings"], ["get"])
    assert chart.one("NetworkPolicy", "carpool-board")["spec"]["ingress"][0]["ports"][0]["port"] == 8044
    environment = chart.environment("board")
    settings = load(BoardSettings, environment)
    assert {one.env for one in settings_of(BoardSettings)} >= environment.keys()
    assert (settings.host, settings.port, settings.site) == ("0.0.0.0", 8044, "carpool-system/carpool")  # noqa: S104
    assert chart.one("Service", "carpool-board")["spec"]["ports"][0]["port"] == 80
    assert settings.tls_cert is None


def test_board_speaks_tls_with_the_certificate_of_a_secret(render: Any) -> None:
    chart = render(board={"enabled": True, "tls": {"existingSecret": "board-tls"}})
    pod = chart.one("Deployment", "carpool-board")["spec"]["template"]["spec"]
    [mount], [volume] = pod["containers"][0]["volumeMounts"], pod["volumes"]
    assert (mount["name"], volume["secret"]["secretName"]) == (volume["name"], "board-tls")
    settings = load(BoardSettings, chart.environment("board"))
    assert {str(settings.tls_cert), str(settings.tls_key)} == {
        f"{mount['mountPath']}/tls.{end}" for end in ("crt", "key")
    }
    assert chart.one("Service", "carpool-board")["spec"]["ports"][0]["port"] == 443


@pytest.mark.parametrize("tls", [None, {"existingSecret": None}, {"existingSecret": ""}])
def test_board_without_a_secret_has_the_port_of_http(render: Any, tls: Any) -> None:
    """Regression: with null the Service had port 443 before a board that speaks HTTP, or nothing was rendered."""
    chart = render(board={"enabled": True, "tls": tls})
    assert chart.one("Service", "carpool-board")["spec"]["ports"][0]["port"] == 80
    assert "CARPOOL_BOARD_TLS_CERT" not in chart.environment("board")


@pytest.mark.parametrize("volume", [{"configMap": {"name": "p"}}, {"persistentVolumeClaim": {"claimName": "p"}}])
def test_board_shows_the_plan_of_a_volume(render: Any, volume: Any) -> None:
    """Regression: CARPOOL_BOARD_PLAN could not be set, so that the page was absent in the cluster."""
    chart = render(board={"enabled": True, "plan": volume, "tls": {"existingSecret": "board-tls"}})
    pod = chart.one("Deployment", "carpool-board")["spec"]["template"]["spec"]
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert pod["volumes"][1:] == [{"name": "plan", **volume}]
    assert load(BoardSettings, chart.environment("board")).plan == mounts["plan"]
    assert "CARPOOL_BOARD_PLAN" not in render(board={"enabled": True, "plan": None}).environment("board")
    assert "/board/plan" in render(board={"plan": {**volume, "emptyDir": {}}}).error


def test_with_namespaces_the_operator_has_its_rights_there_only(render: Any) -> None:
    """Regression: restricted to two namespaces, it could still create pods in all of them."""
    chart = render(settings={"namespaces": ["team-a", "team-b"]})
    nodes = {"carpool.dev/gpunodes": READ}
    assert rights(chart.one("ClusterRole", "carpool-operator")) == nodes
    everywhere = {name: table for name, table in OWN["carpool-operator"].items() if name not in nodes}
    named = [o for o in chart.all("Role", "RoleBinding") if o["metadata"]["name"] == "carpool-operator"]
    own = [o for o in named if o["metadata"]["namespace"] != "carpool-system"]
    assert sorted((o["kind"], o["metadata"]["namespace"]) for o in own) == [
        (kind, namespace) for kind in ("Role", "RoleBinding") for namespace in ("team-a", "team-b")
    ]
    for role in own:
        if role["kind"] == "Role":
            assert rights(role) == everywhere
        else:
            assert role["roleRef"]["kind"] == "Role"
            assert [s["name"] for s in role["subjects"]] == ["carpool-operator"]


def test_an_operator_that_does_not_learn_may_touch_no_configmap(render: Any) -> None:
    chart = render(settings={"learning": False})
    assert [o["metadata"]["name"] for o in chart.all("Role", "RoleBinding") if "calibration" in str(o)] == []
    assert [rule["resourceNames"] for rule in chart.one("Role", "carpool-asker")["rules"]] == [["carpool-settings"]]
    assert "CARPOOL_CALIBRATION" not in str(chart.one("Deployment", "carpool-operator"))


def test_there_are_no_other_roles(chart: Any) -> None:
    assert {o["metadata"]["name"] for o in chart.all("ClusterRole")} == {*OWN, "carpool-view", "carpool-edit"}
    roles = {role["metadata"]["name"]: role for role in chart.all("Role")}
    leases = {"carpool-scheduler": ["get", "update", "list", "watch"], "carpool-operator": ["get", "patch"]}
    for name, verbs in leases.items():
        [rule] = roles.pop(name)["rules"]
        lease = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [name]}
        assert rule == {**lease, "verbs": verbs}
    assert {*roles} == {"carpool-operator-calibration", "carpool-asker"}


def test_role_for_explain_reads_settings_and_calibration_only(chart: Any) -> None:
    """What `carpool explain` and `what-if` read of the chart's own namespace; the chart binds it to no subject."""
    role = chart.one("Role", "carpool-asker")
    assert role["metadata"]["namespace"] == "carpool-system"
    assert [(rule["resources"], rule["resourceNames"], rule["verbs"]) for rule in role["rules"]] == [
        (["configmaps"], ["carpool-settings", "carpool-calibration"], ["get"])
    ]
    assert "`carpool-asker`" in SECURITY.read_text()


@pytest.mark.parametrize(
    ("settings", "answered"),
    [
        pytest.param({}, {}, id="as shipped"),
        pytest.param({"learning": False}, {"calibration": ""}, id="learns nothing"),
        pytest.param(
            {"policy": "energy", "jobPolicies": True, "countPeaks": False, "slotsPerGpu": 4, "shareUnmeasured": True,
             "slowdownQuantile": "upper", "preconditions": {"mostJobs": 2},
             "tenancyGroups": {"research": ["vision", "speech"], "others": ["*"]}},
            {"policy": "energy", "job_policies": True, "count_peaks": False, "slots_per_gpu": 4,
             "share_unmeasured": True, "tenancy_groups": "others=*;research=vision,speech",
             "conditions": AdmissionLimits(max_jobs=2, quantile=Quantile.UPPER)},
            id="everything that decides",
        ),
    ],
)  # fmt: skip
async def test_the_charts_configmap_holds_the_settings_of_its_deployments(
    render: Any, settings: dict[str, Any], answered: dict[str, Any]
) -> None:
    chart = render(settings=settings)
    kube = FakeKube()
    settings_map = chart.one("ConfigMap", "carpool-settings")
    kube.seed(CONFIG_MAPS, settings_map)
    found, note = await read_site_settings(kube, AskSettings(), frozenset())
    assert found == dataclasses.replace(AskSettings(), **answered)
    assert "the site's may differ" not in note
    environment: dict[str, str] = {}
    for deployment in chart.all("Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            environment |= {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}
    assert {name: environment.get(name, "") for name in settings_map["data"]} == settings_map["data"]


@pytest.mark.parametrize(
    ("resource", "verbs", "writer"),
    [
        ("carpool.dev/gputrainingjobs/status", {"patch", "update"}, "carpool-operator"),
        ("carpool.dev/gpunodes", {"patch", "update"}, "carpool-scheduler"),
        ("carpool.dev/gpunodes/status", {"patch", "update"}, "carpool-node-agent"),
        ("pods/binding", {"create"}, "carpool-scheduler"),
    ],
)
def test_what_has_one_writer_has_one(chart: Any, resource: str, verbs: set[str], writer: str) -> None:
    writers = [o["metadata"]["name"] for o in chart.all("ClusterRole") if rights(o).get(resource, set()) & verbs]
    assert writers == [writer]


def test_no_right_is_a_wildcard(chart: Any) -> None:
    for role in chart.all("ClusterRole", "Role"):
        for rule in role["rules"]:
            assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]


def test_users_roles_are_collected_into_kubernetes_own(chart: Any) -> None:
    def into(name: str) -> list[str]:
        labels = chart.one("ClusterRole", name)["metadata"]["labels"]
        return sorted(
            key.rpartition("-to-")[2] for key, value in labels.items() if "aggregate-to" in key and value == "true"
        )

    assert into("carpool-view") == ["admin", "edit", "view"]
    read = {
        one: rule["verbs"] for rule in chart.one("ClusterRole", "carpool-view")["rules"] for one in rule["resources"]
    }
    assert read == {
        "gputrainingjobs": ["get", "list", "watch"],
        "gpunodes": ["get", "list", "watch"],
        "pods": ["list"],
    }, "what queue reads"
    assert into("carpool-edit") == ["admin", "edit"]
