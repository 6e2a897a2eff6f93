"""The pod of (job, worker, attempt), and templates that are refused."""

from typing import Any

import msgspec
import pytest
from carpool_core import keys
from carpool_core.kube.pods import Pod
from carpool_operator.pods import attempt_of, build_pod, controller_of, template_error, worker_of
from operator_fixtures import job, template


def container(name: str = "train", **resources: Any) -> dict[str, Any]:
    return {"name": name, "image": "train:1", "resources": {"limits": resources}}


def test_pod_has_what_the_scheduler_and_the_operator_need() -> None:
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
    assert "resources" not in of.spec.template["spec"]["containers"][0], "the job itself stays as it is"


def test_container_that_asks_gets_the_gpu() -> None:
    own = template(containers=[container("log", cpu="1"), container("train", **{keys.RESOURCE_GPU: 1})])
    containers = build_pod(job(template=own), 0, 1)["spec"]["containers"]
    assert [keys.RESOURCE_GPU in c["resources"]["limits"] for c in containers] == [False, True]
    assert containers[0]["resources"]["limits"]["cpu"] == "1"


@pytest.mark.parametrize(
    "own",
    [
        {"priorityClassName": "urgent"},
        {"priority": 0},
        {"preemptionPolicy": "PreemptLowerPriority"},
    ],
    ids=lambda own: next(iter(own)),
)
def test_a_priority_of_its_own_stays(own: dict[str, Any]) -> None:
    assert build_pod(job(template=template(**own)), 0, 1)["spec"].items() >= own.items()


@pytest.mark.parametrize("nothing", ["", None])
def test_empty_priority_class_is_none(nothing: str | None) -> None:
    """A pod to which the cluster's default class was given would look foreign."""
    assert "priorityClassName" not in build_pod(job(template=template(priorityClassName=nothing)), 0, 1)["spec"]


def test_own_labels_annotations_and_tolerations_stay() -> None:
    own = template(tolerations=[{"key": "team", "operator": "Exists"}])
    own["metadata"] = {"labels": {"team": "a"}, "annotations": {"note": "b"}}
    body = build_pod(job(template=own), 0, 1)
    assert body["metadata"]["labels"]["team"] == "a"
    assert body["metadata"]["annotations"] == {"note": "b"}
    assert len(body["spec"]["tolerations"]) == 2


GPU = {keys.RESOURCE_GPU: 1}


@pytest.mark.parametrize(
    ("own", "told"),
    [
        pytest.param({}, "spec.template.spec: expected a pod spec", id="no spec"),
        pytest.param(template(containers=[]), "at least one container", id="no container"),
        pytest.param(template(containers=["train"]), "at least one container", id="container is a word"),
        pytest.param(template(nodeName="n1"), "nodeName is set to n1", id="nodeName"),
        pytest.param(template(schedulerName="default"), "schedulerName is set to default", id="schedulerName"),
        pytest.param(template(restartPolicy="Always"), "restartPolicy is Always", id="restartPolicy"),
        pytest.param(
            template(containers=[container("a", **GPU), container("b", **GPU)]), "containers a, b ask", id="two ask"
        ),
        pytest.param(
            template(containers=[container(**{keys.RESOURCE_GPU: 4})]), "asks for 4 carpool.dev/gpu", id="other number"
        ),
        pytest.param(template(containers=[container(**{"nvidia.com/gpu": 1})]), "nvidia.com/gpu", id="foreign GPU"),
        pytest.param(
            {**template(), "spec": {**template()["spec"], "initContainers": [container("i", **GPU)]}},
            "init container i",
            id="init container",
        ),
        pytest.param(
            template() | {"metadata": {"lables": {"team": "a"}}},
            "template.metadata.lables: a template has no such field",
            id="misspelt",
        ),
        pytest.param(template() | {"metadata": {"labels": ["a"]}}, "metadata.labels: expected names", id="list"),
        pytest.param(template() | {"metadata": "a"}, "metadata: expected labels", id="word"),
        pytest.param(
            template() | {"sepc": {}}, "template.sepc: a template has no such field", id="misspelt beside the spec"
        ),
        pytest.param(
            template() | {"metadata": {"annotations": {"carpool.dev/gpus": "GPU-0"}}},
            "metadata.annotations sets carpool.dev/gpus",
            id="own annotation",
        ),
    ],
)
def test_template_that_makes_no_sense(own: dict[str, Any], told: str) -> None:
    error = template_error(job(template=own))
    assert error is not None
    assert error.startswith("spec.template")
    assert told in error


def test_good_template() -> None:
    assert template_error(job()) is None
    printed = {"metadata": {"creationTimestamp": None, "name": "train", "labels": None}}
    assert template_error(job(template=template() | printed)) is None


def test_forged_controller_of_another_group_is_not_ours() -> None:
    owner = {"apiVersion": "evil.dev/v1", "kind": "GpuTrainingJob", "name": "x", "uid": "job-uid", "controller": True}
    read = msgspec.convert({"metadata": {"name": "p", "ownerReferences": [owner]}}, Pod)
    assert controller_of(read.metadata) is None
