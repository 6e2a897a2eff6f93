"""Worker pods and their Service, validation of templates, messages of the API server."""

import re
from typing import Any

import msgspec
import pytest
from carpool_core import keys
from carpool_core.kube.api import POD_DISRUPTION_BUDGETS, PODS, SERVICES
from carpool_core.kube.errors import Invalid
from carpool_core.kube.pods import Pod
from carpool_core.pod_template import is_about_the_pod, template_error, template_message
from carpool_operator.pods import (
    attempt_of,
    build_pod,
    build_service,
    controller_of,
    service_name,
    worker_of,
)
from operator_fixtures import UID, job, template
from operator_world import World, submitted

SAFE_TO_EVICT, DO_NOT_DISRUPT = "cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt"


def container(name: str = "train", **resources: Any) -> dict[str, Any]:
    return {"name": name, "image": "train:1", "resources": {"limits": resources}}


def test_pod_has_scheduler_owner_labels_and_gpus() -> None:
    of = job(gpusPerWorker=2)
    body = build_pod(of, 1, 3)
    read = msgspec.convert(body, Pod)
    assert body["metadata"]["name"] == "x-worker-1-3"
    assert (worker_of(read), attempt_of(read), controller_of(read.metadata)) == (1, 3, "job-uid")
    assert read.metadata.labels[keys.LABEL_JOB_UID] == "job-uid"
    spec = body["spec"]
    assert (spec["schedulerName"], spec["restartPolicy"]) == ("carpool-scheduler", "Never")
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    assert spec["containers"][0]["resources"] == {"limits": {"carpool.dev/gpu": "2"}}
    assert spec["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert "resources" not in of.spec.template["spec"]["containers"][0], "the template is not changed"


def test_container_that_requests_gpus_gets_them() -> None:
    own = template(containers=[container("log", cpu="1"), container("train", **{keys.RESOURCE_GPU: 1})])
    containers = build_pod(job(template=own), 0, 1)["spec"]["containers"]
    assert [keys.RESOURCE_GPU in c["resources"]["limits"] for c in containers] == [False, True]
    assert containers[0]["resources"]["limits"]["cpu"] == "1"


def affinity(*terms: list[str], also: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A node affinity whose terms want these labels to exist."""
    found = [
        {"matchExpressions": [*({"key": key, "operator": "Exists"} for key in term), *(also or [])]} for term in terms
    ]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": found}}}


@pytest.mark.parametrize(
    "own",
    [{"priorityClassName": "urgent"}, {"priority": 0}, {"preemptionPolicy": "PreemptLowerPriority"}],
    ids=lambda own: next(iter(own)),
)
def test_priority_of_the_template_stays(own: dict[str, Any]) -> None:
    assert build_pod(job(template=template(**own)), 0, 1)["spec"].items() >= own.items()


def test_labels_annotations_and_tolerations_of_the_template_stay() -> None:
    own = template(tolerations=[{"key": "team", "operator": "Exists"}])
    own["metadata"] = {"labels": {"team": "a"}, "annotations": {"note": "b"}}
    body = build_pod(job(template=own), 0, 1)
    assert body["metadata"]["labels"]["team"] == "a"
    assert body["metadata"]["annotations"]["note"] == "b"
    assert len(body["spec"]["tolerations"]) == 2


@pytest.mark.parametrize(
    ("probe", "env", "expected"),
    [
        pytest.param("Auto", [], "Auto", id="measured-by-default"),
        pytest.param("Off", [], "Off", id="declined"),
        pytest.param("Auto", [{"name": "PYTHONUSERBASE", "value": "/own"}], "Off", id="the-template-has-its-own-base"),
        pytest.param("Auto", [{"name": "PYTHONPATH", "value": "/own"}], "Auto", id="another-variable"),
    ],
)
def test_pods_ask_the_agent_for_the_probe(probe: str, env: list[dict[str, str]], expected: str) -> None:
    """The template cannot ask for more than the job."""
    own = template() | {"metadata": {"annotations": {"carpool.dev/probe": "Auto"}}}
    own["spec"]["containers"][0]["env"] = env
    assert build_pod(job(template=own, probe=probe), 0, 1)["metadata"]["annotations"]["carpool.dev/probe"] == expected


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        pytest.param(None, ("false", "true"), id="by default"),
        pytest.param({SAFE_TO_EVICT: "true"}, ("true", "true"), id="the template allows evictions"),
        pytest.param({DO_NOT_DISRUPT: "false"}, ("false", "false"), id="the template allows disruptions"),
    ],
)
def test_autoscalers_keep_the_nodes_of_workers(annotations: dict[str, str] | None, expected: tuple[str, str]) -> None:
    body = build_pod(job(template=template() | {"metadata": {"annotations": annotations}}), 0, 1)
    found = body["metadata"]["annotations"]
    assert (found[SAFE_TO_EVICT], found[DO_NOT_DISRUPT]) == expected


@pytest.mark.parametrize(
    ("own", "terms"),
    [
        pytest.param({}, [[]], id="no affinity"),
        pytest.param({"affinity": None}, [[]], id="null"),
        pytest.param({"affinity": {"podAffinity": {}}}, [[]], id="other affinity"),
        pytest.param({"affinity": affinity(["zone"], ["pool", "rack"])}, [["zone"], ["pool", "rack"]], id="two terms"),
    ],
)
def test_autoscalers_see_that_unsuitable_products_do_not_help(own: dict[str, Any], terms: list[list[str]]) -> None:
    body = build_pod(job(template=template(**own)), 0, 1, ["NVIDIA A10", "Tesla T4"])
    avoid = {"key": "nvidia.com/gpu.product", "operator": "NotIn", "values": ["NVIDIA-A10", "Tesla-T4"]}
    assert body["spec"]["affinity"] == (own.get("affinity") or {}) | affinity(*terms, also=[avoid])
    assert build_pod(job(template=template(**own)), 0, 1)["spec"].get("affinity") == own.get("affinity")


@pytest.mark.parametrize(
    ("own", "field"),
    [
        pytest.param(template() | {"metadata": {"lables": {"team": "a"}}}, "metadata.lables", id="in the metadata"),
        pytest.param(template() | {"sepc": {}}, "sepc", id="beside the spec"),
    ],
)
def test_misspelt_field_of_a_template_is_an_error(own: dict[str, Any], field: str) -> None:
    expected = f"spec.template.{field}: a template has no such field; correct its spelling or remove it"
    assert template_error(job(template=own)) == expected


def test_valid_template() -> None:
    assert template_error(job()) is None
    printed = {"metadata": {"creationTimestamp": None, "name": "train", "labels": None}}
    assert template_error(job(template=template() | printed)) is None


def variables(pod: dict[str, Any], container: int = 0) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pod["spec"]["containers"][container].get("env", [])}


def test_workers_get_rank_and_master_address() -> None:
    of = job(workers=3, gpusPerWorker=2)
    service = build_service(of)
    pods = [build_pod(of, worker, 1) for worker in range(3)]
    assert [variables(pod)["RANK"] for pod in pods] == ["0", "1", "2"]
    first, *_ = pods
    address = f"{first['spec']['hostname']}.{service['metadata']['name']}"
    for pod in pods:
        env = variables(pod)
        assert (env["MASTER_ADDR"], env["WORLD_SIZE"]) == (address, "3")
        assert (env["PET_MASTER_ADDR"], env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == (address, "3", "2")
        assert env["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])
        assert pod["spec"]["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert len({pod["spec"]["hostname"] for pod in pods}) == 3
    assert service["metadata"]["ownerReferences"][0]["uid"] == UID
    assert service["spec"]["publishNotReadyAddresses"], "workers resolve names before they are ready"


def test_nulls_of_the_template_are_no_values() -> None:
    """Regression: with `subdomain: null` the address of worker 0 was `worker-0-1.None`."""
    nulls = dict.fromkeys(("affinity", "hostname", "subdomain", "tolerations", "schedulingGates"))
    own = template(
        **nulls, containers=[container() | {"env": None, "resources": None, "terminationMessagePolicy": None}]
    )
    plain = template(containers=[{"name": "train", "image": "train:1"}])
    built, expected = (build_pod(job(workers=2, template=of), 1, 1, ["Tesla T4"]) for of in (own, plain))
    assert built == expected


def test_rendezvous_values_of_the_template_stay() -> None:
    own = [{"name": "MASTER_ADDR", "value": "elsewhere"}, {"name": "RANK", "value": "7"}]
    containers = [{"name": "train", "image": "train:1", "env": own}]
    pod = build_pod(job(workers=2, template=template(containers=containers, subdomain="mine")), 1, 1)
    env = variables(pod)
    assert (env["MASTER_ADDR"], env["RANK"], env["WORLD_SIZE"]) == ("elsewhere", "7", "2")
    assert pod["spec"]["subdomain"] == "mine"
    assert env["PET_MASTER_ADDR"] == "worker-0-1.mine"


@pytest.mark.parametrize(
    ("resources", "env", "threads"),
    [
        ({"limits": {"cpu": "10"}}, [], "2"),
        ({"requests": {"cpu": "500m"}}, [], "1"),
        ({}, [], None),
        ({"limits": {"cpu": "10"}}, [{"name": "OMP_NUM_THREADS", "value": "7"}], "7"),
    ],
    ids=["limit", "request", "none", "template"],
)
def test_single_worker_with_several_gpus_starts_a_process_for_each(
    resources: dict[str, Any], env: list[dict[str, str]], threads: str | None
) -> None:
    one = template()
    one["spec"]["containers"][0] |= {"resources": resources, "env": env}
    found = variables(build_pod(job(template=one, workers=1, gpusPerWorker=4), 0, 1))
    assert (found["PET_NPROC_PER_NODE"], found.get("OMP_NUM_THREADS")) == ("4", threads)
    assert "MASTER_ADDR" not in found


def test_single_worker_gets_no_rendezvous() -> None:
    pod = build_pod(job(), 0, 1)
    assert variables(pod) == {}
    assert "hostname" not in pod["spec"]


@pytest.mark.parametrize("name", ["resnet", "7b", "a.b", "a-b", f"9{'.x' * 23}y", "a" * 48])
def test_service_name_is_valid(name: str) -> None:
    of = job()
    found = service_name(type(of)(metadata=type(of.metadata)(name=name), spec=of.spec))
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found)
    assert len(found) <= 63


async def test_no_running_worker_of_a_gang_may_be_evicted() -> None:
    world = await submitted(workers=3)
    budget = world.kube.dump(POD_DISRUPTION_BUDGETS, "x-workers", "default")
    job_uid = world.job().metadata.uid
    assert budget["metadata"]["ownerReferences"][0]["uid"] == job_uid, "it is deleted with the job"
    assert budget["spec"]["selector"] == {"matchLabels": {keys.LABEL_JOB_UID: job_uid}}
    assert budget["spec"]["minAvailable"] >= 1024, "more than any job has, also after it was resized"
    assert "maxUnavailable" not in budget["spec"], "it needs a scale subresource"


async def test_single_worker_has_no_disruption_budget() -> None:
    world = await submitted()
    assert "poddisruptionbudgets" not in {call.plural for call in world.kube.calls}


async def test_service_is_created_before_the_workers_and_owned_by_the_job() -> None:
    world = await submitted(workers=2)
    made = [call.plural for call in world.kube.calls if call.verb == "create" and call.plural != "events"]
    assert made == ["services", "poddisruptionbudgets", "pods", "pods"]
    (owner,) = world.kube.dump(SERVICES, "x-workers", "default")["metadata"]["ownerReferences"]
    assert owner["uid"] == world.job().metadata.uid


async def test_service_of_another_owner_is_not_used() -> None:
    world = World()
    world.kube.seed(SERVICES, {"metadata": {"name": "x-workers"}})
    await world.submit(workers=2)
    placed = world.condition("Placed")
    assert placed.reason == "ServiceNameTaken"
    assert "Service x-workers exists already and has no controller" in placed.message
    assert world.pods() == []


MISSPELT = (
    'Pod in version "v1" cannot be handled as a Pod: strict decoding error: '
    'unknown field "spec.containers[0].comand", unknown field "spec.restartpolicy"'
)
POD = {
    "spec": {
        "terminationGracePeriodSeconds": 1.5,
        "containers": [
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "B", "value": 5}, {"name": "C", "value": "c"}]},
        ],
    }
}
CASES = [
    pytest.param(
        MISSPELT,
        "spec.template.spec.containers[0].comand, spec.template.spec.restartpolicy: a pod has no such field; "
        "correct its spelling or remove it",
        id="fields that do not exist",
    ),
    pytest.param(
        'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal string into Go struct field '
        "Container.spec.containers.command of type []string",
        "spec.template.spec.containers.command: expected []string, found a value of type string",
        id="a field of another type",
    ),
    pytest.param(
        'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal number into Go struct field '
        "EnvVar.spec.containers.env.value of type string",
        "spec.template.spec.containers[1].env[0].value: expected string, found a value of type number",
        id="a value of another type in a list",
    ),
    pytest.param(
        'Pod "x-worker-0-1" is invalid: [spec.volumes[0].name: Required value, spec.tolerations[0].key: Invalid value]',
        "spec.template: [spec.volumes[0].name: Required value, spec.tolerations[0].key: Invalid value]",
        id="several at once",
    ),
]


@pytest.mark.parametrize(("answer", "message"), CASES)
def test_message_names_the_field_of_the_template(answer: str, message: str) -> None:
    error = Invalid(f"POST pods default: {answer}", server_message=answer)
    assert template_message(error, POD) == message
    assert is_about_the_pod(error)


async def test_invalid_template_fails_each_job_before_its_model_is_traced() -> None:
    world = World()
    for name in ("x", "y"):
        refused = Invalid(f"POST pods default: {MISSPELT}", status=400, server_message=MISSPELT)
        world.kube.fail_next("check", PODS, refused)
        await world.submit(name, model={"catalog": {"name": "timm/resnet50"}})
        failed = world.condition("Failed", name)
        assert failed.message.startswith("spec.template.spec.containers[0].comand, ")
    assert world.tracer.traced == []
    assert world.pods() == []


async def test_webhook_without_dry_run_fails_no_job() -> None:
    world = World()
    answer = 'admission webhook "a.example" does not support dry run'
    world.kube.fail_next("check", PODS, Invalid(f"POST pods default: {answer}", status=400, server_message=answer))
    await world.submit()
    assert world.living() == ["x-worker-0-1"]


async def test_valid_template_is_checked_once() -> None:
    world = World()
    for name in ("x", "y"):
        await world.submit(name)
        assert world.living(name) == [f"{name}-worker-0-1"]
    assert [call.verb for call in world.kube.calls].count("check") == 1
    await world.submit("z", template={"spec": {"containers": [{"name": "train", "image": "train:2"}]}})
    assert [call.verb for call in world.kube.calls].count("check") == 2
