"""On a real API server: who may do what, and what the admission policies refuse."""

import json
import time
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
from carpool_e2e.chart import NAMESPACE
from carpool_e2e.cluster import Cluster
from carpool_e2e.controlplane import Api
from own_rights import OWN, READ

pytestmark = pytest.mark.e2e

GPU_NODES = "/apis/carpool.dev/v1alpha1/gpunodes"
JSON_MERGE = "application/merge-patch+json"

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")

RESOURCES = (
    "carpool.dev/gputrainingjobs", "carpool.dev/gputrainingjobs/status", "carpool.dev/gputrainingjobs/finalizers",
    "carpool.dev/gpunodes", "carpool.dev/gpunodes/status", "pods",
    "pods/status", "pods/binding", "pods/eviction", "pods/exec",
    "services", "nodes", "nodes/status", "events",
    "secrets", "configmaps", "serviceaccounts", "serviceaccounts/token", "namespaces",
    "apps/deployments", "policy/poddisruptionbudgets",
    "coordination.k8s.io/leases", "rbac.authorization.k8s.io/clusterroles",
    "rbac.authorization.k8s.io/clusterrolebindings", "apiextensions.k8s.io/customresourcedefinitions",
    "admissionregistration.k8s.io/validatingadmissionpolicies",
)  # fmt: skip

STOCK = {
    "pods": {"delete"},
    "pods/status": {"patch", "update"},
    "services": READ,
    "nodes": READ,
    "events": {"update"},
    "namespaces": READ,
    "coordination.k8s.io/leases": {"create"},
    "policy/poddisruptionbudgets": READ,
}
"""What the stock scheduler's own roles give beside."""

_SCHEDULER = OWN["carpool-scheduler"]
ALLOWED = OWN | {
    "carpool-scheduler": {one: _SCHEDULER.get(one, set()) | STOCK.get(one, set()) for one in {**_SCHEDULER, **STOCK}}
}


def account(name: str) -> tuple[str, list[str]]:
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}", "system:authenticated"]
    return f"system:serviceaccount:{NAMESPACE}:{name}", groups


def split(resource: str) -> dict[str, str]:
    """Split GROUP/PLURAL/SUBRESOURCE, of which the first and the last may be missing."""
    head, _, rest = resource.partition("/")
    group, rest = (head, rest) if "." in head or head in ("apps", "policy") else ("", resource)
    plural, _, subresource = rest.partition("/")
    return {"group": group, "resource": plural, "subresource": subresource}


def can_i(api: Api, who: tuple[str, list[str]], verb: str, resource: str, **where: str) -> bool:
    spec = {"user": who[0], "groups": who[1], "resourceAttributes": {"verb": verb, **split(resource), **where}}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = api.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
    return bool(answer["status"]["allowed"])


def refusal(api: Api, method: str, path: str, body: Any, content_type: str = "application/json") -> str:
    """Make a call that changes nothing; return why it was refused, empty where it was not."""
    try:
        api.call(method, f"{path}?dryRun=All", body, content_type)
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["message"])
    return ""


def eventually(check: Any, within_s: float = 30.0) -> None:
    """Wait for a controller or an informer of the API server."""
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, f"still not so after {within_s} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def api(control_plane: Cluster) -> Api:
    api = control_plane.plane.api
    # Policies act only once the API server has compiled them.
    eventually(lambda: refusal(api, "POST", PODS, pod(schedulerName="default-scheduler")))
    return api


@pytest.mark.parametrize("name", ALLOWED)
def test_an_account_may_do_this_and_no_more(api: Api, name: str) -> None:
    who = account(name)
    found = {resource: {verb for verb in VERBS if can_i(api, who, verb, resource)} for resource in RESOURCES}
    assert {resource: verbs for resource, verbs in found.items() if verbs} == ALLOWED[name]


def test_the_operator_may_keep_what_it_learns_in_one_configmap_only(api: Api) -> None:
    who = account("carpool-operator")
    for verb in ("get", "patch"):
        assert can_i(api, who, verb, "configmaps", namespace=NAMESPACE, name="carpool-calibration")
        assert not can_i(api, who, verb, "configmaps", namespace=NAMESPACE, name="another")
        assert not can_i(api, who, verb, "configmaps", namespace="default", name="carpool-calibration")
    assert can_i(api, who, "create", "configmaps", namespace=NAMESPACE)
    assert not can_i(api, who, "create", "configmaps", namespace="default")
    for verb in ("list", "watch", "update", "delete"):
        assert not can_i(api, who, verb, "configmaps", namespace=NAMESPACE, name="carpool-calibration")


def test_the_scheduler_may_hold_its_own_lease_only(api: Api) -> None:
    who, leases = account("carpool-scheduler"), "coordination.k8s.io/leases"
    assert can_i(api, who, "update", leases, namespace=NAMESPACE, name="carpool-scheduler")
    assert not can_i(api, who, "update", leases, namespace=NAMESPACE, name="another")
    assert not can_i(api, who, "update", leases, namespace="default", name="carpool-scheduler")


@pytest.mark.parametrize(("role", "jobs"), [("view", READ), ("edit", {*VERBS}), ("admin", {*VERBS})])
def test_users_of_a_namespace_have_its_jobs_but_neither_status_nor_gpunodes(
    api: Api, role: str, jobs: set[str]
) -> None:
    who, namespace = (f"a-user-with-{role}", ["system:authenticated"]), "default"
    bindings = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings"
    subject = {"kind": "User", "name": who[0], "apiGroup": "rbac.authorization.k8s.io"}
    reference = {"kind": "ClusterRole", "name": role, "apiGroup": "rbac.authorization.k8s.io"}
    api.call("POST", bindings, {"metadata": {"name": who[0]}, "subjects": [subject], "roleRef": reference})

    def verbs(resource: str, **where: str) -> set[str]:
        return {verb for verb in VERBS if can_i(api, who, verb, resource, **where)}

    eventually(lambda: verbs("carpool.dev/gputrainingjobs", namespace=namespace) == jobs)
    assert verbs("carpool.dev/gputrainingjobs/status", namespace=namespace) == set()
    assert verbs("carpool.dev/gputrainingjobs", namespace="kube-system") == set()
    assert verbs("carpool.dev/gpunodes") == set()


def test_the_api_server_finds_no_fault_in_the_policies(api: Api) -> None:
    policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"

    def checked() -> dict[str, Any]:
        found = {policy["metadata"]["name"]: policy.get("status", {}) for policy in api.call("GET", policies)["items"]}
        return {name: status["typeChecking"] for name, status in found.items() if "typeChecking" in status}

    eventually(lambda: {"carpool-pods", "carpool-node-agent"} <= checked().keys())
    assert [*filter(None, (one.get("expressionWarnings") for one in checked().values()))] == []


PODS = "/api/v1/namespaces/default/pods"
GPU = {"limits": {"carpool.dev/gpu": "1"}}


def pod(resources: Any = GPU, initial: Any = None, **spec: Any) -> dict[str, Any]:
    def container(name: str, resources: Any) -> dict[str, Any]:
        return {"name": name, "image": "localhost/none", "resources": resources}

    first = {"initContainers": [container("first", initial)]} if initial else {}
    spec = {"schedulerName": "carpool-scheduler", "containers": [container("train", resources)], **first, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "rights"}, "spec": spec}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        pytest.param(pod(), "", id="a worker"),
        pytest.param(
            pod(schedulerName="default-scheduler"),
            "a pod that asks for carpool.dev/gpu must have spec.schedulerName carpool-scheduler, found "
            "default-scheduler; submit a GpuTrainingJob, which makes such pods",
            id="another scheduler",
        ),
        pytest.param(
            pod({}, GPU, schedulerName="default-scheduler"),
            "found default-scheduler",
            id="another scheduler, asked by an init container",
        ),
        pytest.param(
            pod(nodeName="anywhere"),
            "a pod that asks for carpool.dev/gpu must leave spec.nodeName to the scheduler, found anywhere; submit a "
            "GpuTrainingJob, and choose GPUs with spec.gpu",
            id="a node of its own choice",
        ),
        pytest.param(pod({}, schedulerName="default-scheduler", nodeName="anywhere"), "", id="no GPU asked for"),
    ],
)
def test_a_pod_cannot_go_round_the_scheduler(api: Api, body: dict[str, Any], sentence: str) -> None:
    said = refusal(api, "POST", PODS, body)
    assert sentence in said
    assert bool(sentence) == bool(said)


@pytest.fixture
def nodes(api: Api) -> Iterator[tuple[str, str]]:
    """Two nodes, each with its GpuNode."""
    names = ("rights-own", "rights-other")
    for name in names:
        api.call("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        api.call("POST", GPU_NODES, gpu_node(name))
    yield names
    for name in names:
        api.call("DELETE", f"{GPU_NODES}/{name}")
        api.call("DELETE", f"/api/v1/nodes/{name}")


def gpu_node(name: str, *reservations: Any) -> dict[str, Any]:
    spec = {"reservations": [*reservations]}
    return {"apiVersion": "carpool.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name}, "spec": spec}


RESERVATION = {
    "podUid": "1", "podNamespace": "default", "podName": "forged", "jobUid": "1", "jobName": "forged",
    "gpuUuids": ["GPU-1"], "mode": "Exclusive",
}  # fmt: skip
STATUS = {"status": {"agentVersion": "forged"}}


def test_an_agent_writes_the_status_of_its_own_gpunode_only(api: Api, nodes: tuple[str, str]) -> None:
    own, other = nodes
    agent = Api(api.server, api.ca_file, api.token_of(NAMESPACE, "carpool-node-agent", own))
    assert refusal(agent, "PATCH", f"{GPU_NODES}/{own}/status", STATUS, JSON_MERGE) == ""
    said = refusal(agent, "PATCH", f"{GPU_NODES}/{other}/status", STATUS, JSON_MERGE)
    assert f"the node agent of {own} may write only the GpuNode {own}, not {other}" in said


def test_an_agents_token_without_a_node_writes_nothing(api: Api, nodes: tuple[str, str]) -> None:
    anywhere = Api(api.server, api.ca_file, api.token_of(NAMESPACE, "carpool-node-agent"))
    said = refusal(anywhere, "PATCH", f"{GPU_NODES}/{nodes[0]}/status", STATUS, JSON_MERGE)
    assert "expected a node agent's token that names its node, found one that does not" in said


def test_an_agent_creates_its_own_gpunode_without_reservations(api: Api, nodes: tuple[str, str]) -> None:
    own, _ = nodes
    agent = Api(api.server, api.ca_file, api.token_of(NAMESPACE, "carpool-node-agent", own))
    api.call("DELETE", f"{GPU_NODES}/{own}")
    assert "not rights-new" in refusal(agent, "POST", GPU_NODES, gpu_node("rights-new"))
    said = refusal(agent, "POST", GPU_NODES, gpu_node(own, RESERVATION))
    assert "a node agent creates its GpuNode without reservations; only the scheduler reserves GPUs" in said
    agent.call("POST", GPU_NODES, gpu_node(own))


def test_reservations_are_the_schedulers(api: Api, nodes: tuple[str, str]) -> None:
    path, patch = f"{GPU_NODES}/{nodes[0]}", {"spec": {"reservations": [RESERVATION]}}
    for name, allowed in (("carpool-scheduler", True), ("carpool-operator", False), ("carpool-node-agent", False)):
        caller = Api(api.server, api.ca_file, api.token_of(NAMESPACE, name))
        said = refusal(caller, "PATCH", path, patch, JSON_MERGE)
        assert (said == "") == allowed, said
