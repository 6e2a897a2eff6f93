"""Pods as Carpool reads them, and names of workers."""

import msgspec
import pytest
from carpool_core.kube.nodes import Node
from carpool_core.kube.pods import (
    OwnerReference,
    Pod,
    PodMeta,
    PodSpec,
    WorkerName,
    job_owner_reference,
    parse_worker_name,
)
from hypothesis import given
from hypothesis import strategies as st


def test_pod_with_null_times_is_decoded() -> None:
    """Regression: the kubelet sends null times then, and the pod was skipped as malformed."""
    wire = {
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "status": {
            "phase": "Failed",
            "containerStatuses": [
                {"name": "c", "state": {"terminated": {"exitCode": 137, "startedAt": None, "finishedAt": None}}}
            ],
        },
    }
    pod = msgspec.json.decode(msgspec.json.encode(wire), type=Pod)
    terminated = pod.status.container_statuses[0].state.terminated
    assert terminated is not None
    assert terminated.finished_at is None
    assert pod.is_finished


JOB = {"api_version": "carpool.dev/v1alpha1", "kind": "GpuTrainingJob", "name": "x", "uid": "u", "controller": True}


@given(
    st.builds(
        WorkerName,
        st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True) | st.just("a-worker-0-1"),
        st.integers(0, 999_999),
        st.integers(1, 999_999_999),
    )
)
def test_worker_name_is_parsed(named: WorkerName) -> None:
    assert parse_worker_name(named.pod) == named


@pytest.mark.parametrize(
    "name", ["x", "x-worker-0", "x-worker-0-0", "x-worker-00-1", "x-worker-0-01", "-worker-0-1", "x-worker-0-1-a"]
)
def test_other_names_are_not_workers(name: str) -> None:
    assert parse_worker_name(name) is None


@pytest.mark.parametrize(
    ("changes", "is_ours"),
    [
        pytest.param({}, True, id="the controller"),
        pytest.param({"api_version": "carpool.dev/v9"}, True, id="another version"),
        pytest.param({"api_version": "carpool.dev"}, True, id="no version"),
        pytest.param({"api_version": "carpool.dev.example/v1"}, False, id="another group"),
        pytest.param({"kind": "Job"}, False, id="another kind"),
        pytest.param({"controller": None}, False, id="an owner only"),
    ],
)
def test_only_a_controller_of_our_kind_counts(changes: dict[str, str | None], is_ours: bool) -> None:
    owner = OwnerReference(**(JOB | changes))  # type: ignore[arg-type]
    assert job_owner_reference(PodMeta(name="x", owner_references=[owner])) == (owner if is_ours else None)


TAINT = {"key": "team", "value": "vision", "effect": "NoSchedule"}
LABELS = {"zone": "b", "generation": "8"}
TERMS = "nodeSelectorTerms"


def tolerating(**toleration: str) -> dict[str, object]:
    return {"tolerations": [{"key": "other", "operator": "Exists"}, toleration]}


def requiring(*terms: dict[str, object]) -> dict[str, object]:
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {TERMS: list(terms)}}}}


def expression(key: str, operator: str, *values: str) -> dict[str, object]:
    return {"key": key, "operator": operator, "values": list(values)}


def expressions(*those: dict[str, object]) -> dict[str, object]:
    return requiring({"matchExpressions": list(those)})


@pytest.mark.parametrize(
    ("pod", "node", "refusal"),
    [
        ({}, {}, ""),
        ({}, {"taints": [TAINT]}, "has the taint team=vision:NoSchedule, which the job does not tolerate"),
        ({}, {"taints": [TAINT | {"effect": "NoExecute"}]}, "team=vision:NoExecute"),
        ({}, {"taints": [TAINT | {"effect": "PreferNoSchedule"}]}, ""),
        ({}, {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]}, ""),
        (tolerating(key="team", operator="Exists"), {"taints": [TAINT]}, ""),
        (tolerating(key="team", value="vision"), {"taints": [TAINT]}, ""),
        (tolerating(key="team", operator="Equal", value="speech"), {"taints": [TAINT]}, "taint"),
        (tolerating(key="team", operator="Exists", effect="NoSchedule"), {"taints": [TAINT]}, ""),
        (tolerating(key="team", operator="Exists", effect="NoExecute"), {"taints": [TAINT]}, "taint"),
        (tolerating(key="te", operator="Exists"), {"taints": [TAINT]}, "taint"),
        (tolerating(operator="Exists"), {"taints": [TAINT, {"key": "a", "effect": "NoExecute"}]}, ""),
        (tolerating(key="team", operator="Exists"), {"taints": [TAINT, {"key": "a", "effect": "NoExecute"}]}, "a:NoEx"),
        ({}, {"unschedulable": True}, "its node is cordoned"),
        (tolerating(key="node.kubernetes.io/unschedulable", operator="Exists"), {"unschedulable": True}, ""),
        ({"nodeSelector": {"zone": "b"}}, {}, ""),
        ({"nodeSelector": {"zone": "b", "disk": "ssd"}}, {}, "lacks the label disk=ssd of the job's nodeSelector"),
        (expressions(expression("zone", "In", "a", "b")), {}, ""),
        (expressions(expression("zone", "In", "a")), {}, "required node affinity"),
        (expressions(expression("disk", "In", "ssd")), {}, "affinity"),
        (expressions(expression("zone", "NotIn", "b")), {}, "affinity"),
        (expressions(expression("disk", "NotIn", "ssd")), {}, ""),
        (expressions(expression("zone", "Exists")), {}, ""),
        (expressions(expression("zone", "DoesNotExist")), {}, "affinity"),
        (expressions(expression("generation", "Gt", "7")), {}, ""),
        (expressions(expression("generation", "Gt", "8")), {}, "affinity"),
        (expressions(expression("generation", "Lt", "10")), {}, ""),
        (expressions(expression("zone", "Gt", "1")), {}, "affinity"),
        (expressions(expression("disk", "Lt", "1")), {}, "affinity"),
        (expressions(expression("zone", "In", "b"), expression("generation", "Lt", "8")), {}, "affinity"),
        (requiring({"matchFields": [expression("metadata.name", "In", "n")]}), {}, ""),
        (requiring({"matchFields": [expression("metadata.name", "NotIn", "n")]}), {}, "affinity"),
        (requiring(*({"matchExpressions": [expression(key, "Exists")]} for key in ("disk", "zone"))), {}, ""),
        (requiring({}), {}, "affinity"),
    ],
)  # fmt: skip
def test_nodes_that_a_pod_accepts(pod: dict[str, object], node: dict[str, object], refusal: str) -> None:
    """The rules of kube-scheduler's TaintToleration, NodeUnschedulable and NodeAffinity."""
    constraints = msgspec.convert(pod, PodSpec).node_constraints
    found = constraints.refusal(msgspec.convert({"metadata": {"name": "n", "labels": LABELS}, "spec": node}, Node))
    assert (found is None) == (not refusal)
    assert refusal in (found or "")
