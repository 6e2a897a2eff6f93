"""Manifests that a real API server refuses, with its sentence, and those that it admits."""

import json
from pathlib import Path
from typing import Any

import pytest
from carpool_e2e.cluster import Cluster, KubectlError

ROOT = Path(__file__).parents[2]
BAD = sorted((ROOT / "tests/crds/bad").glob("*.yaml"))
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))

pytestmark = pytest.mark.e2e


def _job(name: str, **spec: Any) -> str:
    template = {"spec": {"containers": [{"name": "c", "image": "i", "command": ["a"]}]}}
    head = {"apiVersion": "carpool.dev/v1alpha1", "kind": "GpuTrainingJob", "metadata": {"name": name}}
    return json.dumps(head | {"spec": {"template": template} | spec})


@pytest.mark.parametrize("file", BAD, ids=lambda f: f.stem)
def test_invalid_manifest_is_refused_with_its_sentence(control_plane: Cluster, file: Path) -> None:
    expected = file.read_text().splitlines()[0].removeprefix("# expect: ")
    with pytest.raises(KubectlError) as caught:
        control_plane.kubectl("apply", "--validate=strict", "--dry-run=server", "-f", str(file))
    assert expected in str(caught.value)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.stem)
def test_example_is_admitted(control_plane: Cluster, file: Path) -> None:
    control_plane.kubectl("apply", "--validate=strict", "--dry-run=server", "-f", str(file))


@pytest.mark.parametrize("limit", ["12Gi", "1.5Gi", "1e9", "1P", "+2Mi", "1048576", 1048576, "1Pi", "1048576000m"])
def test_memory_amounts_are_admitted(control_plane: Cluster, limit: int | str) -> None:
    manifest = _job("amount", memory={"limit": limit}, gpu={"minMemory": limit})
    control_plane.kubectl("create", "--validate=strict", "--dry-run=server", "-f", "-", stdin=manifest)


def test_null_counts_as_absent(control_plane: Cluster) -> None:
    gpu = dict.fromkeys(("product", "minMemory", "minComputeCapability"))
    policy = dict.fromkeys(("activeDeadlineSeconds", "ttlSecondsAfterFinished"))
    manifest = _job("nulls", model=None, training={"steps": None}, memory={"limit": None}, gpu=gpu, runPolicy=policy)
    control_plane.kubectl("create", "--validate=strict", "--dry-run=server", "-f", "-", stdin=manifest)


PLACEMENT = [
    {"worker": 0, "pod": "p", "podUid": "u", "node": "n", "gpuUuids": ["GPU-1"], "product": "Tesla T4", "mode": "MPS"}
]
ENDED_AT = "2026-01-01T00:00:00Z"
CHANGES: dict[str, Any] = {
    "model": {"catalog": {"name": "timm/resnet18"}},
    "workers": 2,
    "gpusPerWorker": 2,
    "training": {"batchSize": 64},
    "sharing": {"maxSlowdown": 2},
    "memory": {"limit": "2Gi"},
    "gpu": {"product": "L4"},
    "template": {"spec": {"containers": [{"name": "c", "image": "i", "command": ["b"]}]}},
}


@pytest.fixture(scope="module")
def placed(control_plane: Cluster) -> str:
    """Name of a job that has a placement."""
    control_plane.kubectl("create", "-f", "-", stdin=_job("placed"))
    status = json.dumps({"status": {"placement": PLACEMENT}})
    control_plane.kubectl("patch", "gtj", "placed", "--subresource=status", "--type=merge", "-p", status)
    return "placed"


def _patch(control_plane: Cluster, name: str, **spec: Any) -> str:
    return control_plane.kubectl("patch", "gtj", name, "--type=merge", "-p", json.dumps({"spec": spec}))


@pytest.mark.parametrize("field", CHANGES)
def test_spec_of_a_placed_job_cannot_change(control_plane: Cluster, placed: str, field: str) -> None:
    with pytest.raises(KubectlError) as caught:
        _patch(control_plane, placed, **{field: CHANGES[field]})
    assert f"spec.{field} cannot change once the job is placed; only spec.runPolicy can" in str(caught.value)


def test_run_policy_of_a_placed_job_can_change(control_plane: Cluster, placed: str) -> None:
    _patch(control_plane, placed, runPolicy={"suspend": True})


def test_spec_can_change_before_placement(control_plane: Cluster) -> None:
    control_plane.kubectl("create", "-f", "-", stdin=_job("unplaced"))
    _patch(control_plane, "unplaced", **CHANGES)
    assert control_plane.kubectl("get", "gtj", "unplaced", "-o", "jsonpath={.spec.workers}") == "2"


@pytest.fixture(scope="module")
def ended(control_plane: Cluster) -> str:
    """Name of a job that failed before it had a place."""
    control_plane.kubectl("create", "-f", "-", stdin=_job("ended"))
    failed = {"type": "Failed", "status": "True", "reason": "InvalidTemplate", "lastTransitionTime": ENDED_AT}
    status = json.dumps({"status": {"state": "Failed", "completionTime": ENDED_AT, "conditions": [failed]}})
    control_plane.kubectl("patch", "gtj", "ended", "--subresource=status", "--type=merge", "-p", status)
    return "ended"


@pytest.mark.parametrize(
    "change",
    [
        *({field: value} for field, value in CHANGES.items()),
        {"runPolicy": {"suspend": True}},
        {"runPolicy": {"backoffLimit": 7}},
        {"runPolicy": {"activeDeadlineSeconds": 60}},
    ],
    ids=str,
)
def test_spec_of_an_ended_job_cannot_change(control_plane: Cluster, ended: str, change: dict[str, Any]) -> None:
    """Regression: a corrected template was accepted as `configured`, and nothing ever happened."""
    with pytest.raises(KubectlError) as caught:
        _patch(control_plane, ended, **change)
    assert "this job has ended" in str(caught.value)
    assert "delete it and apply it again" in str(caught.value)


def test_time_to_live_and_status_of_an_ended_job_can_change(control_plane: Cluster, ended: str) -> None:
    _patch(control_plane, ended, runPolicy={"ttlSecondsAfterFinished": 3600})
    control_plane.kubectl("label", "gtj", ended, "team=research")
    status = json.dumps({"status": {"attempts": [{"number": 1, "learned": True}]}})
    control_plane.kubectl("patch", "gtj", ended, "--subresource=status", "--type=merge", "-p", status)


def test_template_may_select_pods_and_tolerate_taints(control_plane: Cluster) -> None:
    job = json.loads(_job("allowed"))
    worker = {"labelSelector": {"matchLabels": {"carpool.dev/job": "allowed"}}, "topologyKey": "kubernetes.io/hostname"}
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
    required = {"nodeSelectorTerms": zones}
    job["spec"]["template"]["spec"] |= {
        "tolerations": [{"key": "carpool.dev/kubelet", "operator": "Exists"}, {"operator": "Exists"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": required,
                "preferredDuringSchedulingIgnoredDuringExecution": None,
            },
            "podAffinity": None,
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [worker]},
        },
    }
    control_plane.kubectl("create", "--validate=strict", "--dry-run=server", "-f", "-", stdin=json.dumps(job))


def test_explain_shows_text_and_defaults(control_plane: Cluster) -> None:
    text = " ".join(control_plane.kubectl("explain", "gtj.spec.sharing").split())
    assert "Whether and with which jobs it shares a GPU." in text
    assert "Default: 1.5." in text
    assert "GPU memory" in control_plane.kubectl("explain", "gtj.spec.memory.limit")


def test_kubectl_get_has_short_names_and_columns(control_plane: Cluster, placed: str) -> None:
    header, *rows = control_plane.kubectl("get", "gtj", "-o", "wide").splitlines()
    assert header.split() == [
        "NAME", "STATE", "NODE", "GPU", "MODE", "PREDICTION", "PREDMEM", "PREDUTIL", "RESTARTS", "AGE",
        "MEMBOUND", "OBSMEM", "OBSUTIL", "SLOWDOWN", "STEPTIME", "MEASSLOW", "STEPS", "END",
    ]  # fmt: skip
    assert placed in {row.split()[0] for row in rows}
    assert placed in control_plane.kubectl("get", "carpool")
    assert control_plane.kubectl("get", "gpn", "-o", "wide") is not None
