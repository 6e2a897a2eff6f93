"""The setting `autoscaling` on the real control plane, with a real kube-scheduler and kubelet.

No autoscaler runs here. The tests play one: they read the condition that it reads, and add a node.
"""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from carpool_core.keys import GATE_ADMISSION
from carpool_e2e.cluster import Cluster
from carpool_e2e.demo.manifests import H100, sleeper
from carpool_e2e.fleet import FleetNode, node_status
from carpool_e2e.nodes import MANAGED_LABELS, REPORT_INTERVAL_S
from kubectl import Watcher, eventually

pytestmark = pytest.mark.e2e

PROCESSES = ("operator", "extender", "agent-h100")
ADDED = "added"
B200S = [
    {
        "uuid": f"GPU-added-{index}",
        "index": index,
        "product": "Simulated NVIDIA B200",
        "memoryMib": 183359,
        "computeCapability": "10.0",
        "modes": ["Exclusive", "TimeSlicing", "MPS"],
        "health": "Healthy",
    }
    for index in range(2)
]
ALL_SLOTS = 4 * 8
SETTINGS = {"CARPOOL_AUTOSCALING": "true", "CARPOOL_ADMISSION_TIMEOUT_SECONDS": "10"}


@pytest.fixture(scope="module")
def autoscaling(cluster: Cluster) -> Iterator[None]:
    """Turn the setting on."""
    before = {name: cluster[name].environment for name in PROCESSES}
    for name in PROCESSES:
        cluster[name].environment = {**before[name], **SETTINGS}
        cluster[name].restart()
    yield
    for name in PROCESSES:
        cluster[name].environment = before[name]
        cluster[name].restart()


@pytest.fixture
def autoscaled(autoscaling: None, watcher: Watcher) -> Iterator[Watcher]:
    """The cluster with the setting on."""
    eventually("the agent's slots", lambda: slots(watcher, "h100") == ALL_SLOTS)
    yield watcher
    watcher.cluster.kubectl("delete", "gputrainingjobs", "--all", "--wait=false")
    watcher.cluster.kubectl("delete", "pods", "--all", "--grace-period=0", "--force", timeout_s=120)
    watcher.cluster.kubectl("delete", f"gpunode/{ADDED}", f"node/{ADDED}", "--ignore-not-found")


def scheduled(watcher: Watcher, job: str) -> list[tuple[str, str]]:
    """Return status and reason of the condition PodScheduled of each pod of a job."""
    conditions = [c for pod in watcher.pods(job) for c in pod["status"].get("conditions", [])]
    return [(c["status"], c.get("reason", "")) for c in conditions if c["type"] == "PodScheduled"]


def slots(watcher: Watcher, node: str) -> int:
    return int(watcher.read("node", node)["status"]["allocatable"].get("carpool.dev/gpu", 0))


def reported_at(watcher: Watcher) -> str:
    """Return the time of the last report of the kubelet."""
    return max(str(c["lastHeartbeatTime"]) for c in watcher.read("node", "h100")["status"]["conditions"])


def add_node(watcher: Watcher) -> None:
    """Add a node with two large GPUs; `report` plays its agent."""
    cluster, meta = watcher.cluster, {"name": ADDED}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Node", "metadata": {**meta, "labels": MANAGED_LABELS}},
        {"apiVersion": "carpool.dev/v1alpha1", "kind": "GpuNode", "metadata": meta, "spec": {}},
    )
    status = json.dumps(node_status(FleetNode(ADDED, 16), datetime.now(UTC)))
    cluster.kubectl("patch", "node", ADDED, "--subresource=status", "--type=merge", "-p", status)


def report(watcher: Watcher) -> list[dict[str, Any]]:
    """Report the reservations of the added node as prepared, and return them."""
    reservations = watcher.read("gpunode", ADDED)["spec"].get("reservations", [])
    ready = [{"podUid": r["podUid"], "generation": r["generation"], "state": "Ready"} for r in reservations]
    status = {"agentVersion": "played", "devices": B200S}
    patch = json.dumps({"status": status | {"partitions": ready}})
    watcher.cluster.kubectl("patch", "gpunode", ADDED, "--subresource=status", "--type=merge", "-p", patch)
    return list(reservations)


def test_a_gang_that_no_present_gpu_can_hold_is_seen_by_autoscalers_and_starts_on_a_new_node(
    autoscaled: Watcher,
) -> None:
    wants = {"gpu": {"product": "B200"}, "sharing": {"mode": "Exclusive"}, "workers": 2}
    autoscaled.cluster.apply(sleeper("large", **wants))
    unschedulable = [("False", "Unschedulable")] * 2
    eventually("pods that autoscalers see", lambda: scheduled(autoscaled, "large") == unschedulable)
    uids = {pod["metadata"]["uid"] for pod in autoscaled.pods("large")}
    deadline = time.monotonic() + 15  # longer than the admission timeout
    while time.monotonic() < deadline:
        assert scheduled(autoscaled, "large") == unschedulable, (
            "kube-scheduler leaves the condition of a gated pod alone"
        )
        time.sleep(1)
    pods = autoscaled.pods("large")
    assert {pod["metadata"]["uid"] for pod in pods} == uids
    assert {gate["name"] for pod in pods for gate in pod["spec"]["schedulingGates"]} == {GATE_ADMISSION}
    (term,) = pods[0]["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    (avoided,) = term["matchExpressions"]
    assert (avoided["key"], avoided["operator"]) == ("nvidia.com/gpu.product", "NotIn")
    assert "Simulated-Tesla-T4" in avoided["values"]
    add_node(autoscaled)
    eventually("reservations on the new node", lambda: len(report(autoscaled)) == 2)
    eventually(
        "both workers bound there",
        lambda: report(autoscaled) and [p["spec"].get("nodeName") for p in autoscaled.pods("large")] == [ADDED, ADDED],
    )


def test_a_node_whose_gpus_are_used_alone_looks_full_until_the_job_ends(autoscaled: Watcher) -> None:
    whole = {"gpu": {"product": H100}, "sharing": {"mode": "Exclusive"}}
    autoscaled.cluster.apply(sleeper("three", gpusPerWorker=3, **whole))
    autoscaled.placed_once("three")
    eventually("slots of one free GPU", lambda: slots(autoscaled, "h100") == 3 + 8)
    autoscaled.cluster.apply(sleeper("last", **whole))
    autoscaled.placed_once("last")
    eventually("no free slot", lambda: slots(autoscaled, "h100") == 4)
    autoscaled.cluster.apply(sleeper("next", **whole))
    eventually("next to be seen", lambda: scheduled(autoscaled, "next") == [("False", "Unschedulable")])
    restarted_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    autoscaled.cluster["agent-h100"].restart()
    autoscaled.cluster["kubelet-h100"].restart()
    eventually("the slots again", lambda: reported_at(autoscaled) > restarted_at and slots(autoscaled, "h100") == 4)
    time.sleep(2 * REPORT_INTERVAL_S)
    for job in ("three", "last"):
        (pod,) = autoscaled.pods(job)
        assert pod["status"]["phase"] == "Running", f"{job} keeps its slots when kubelet and agent start again"
    autoscaled.cluster.kubectl("delete", "gputrainingjob", "last", "--wait=false")
    autoscaled.placed_once("next")
    autoscaled.cluster.kubectl("delete", "gputrainingjobs", "three", "next")
    eventually("all slots", lambda: slots(autoscaled, "h100") == ALL_SLOTS)


def test_pods_that_share_a_gpu_after_an_exclusive_one_all_get_slots(autoscaled: Watcher) -> None:
    whole = {"gpu": {"product": H100}, "gpusPerWorker": 4, "sharing": {"mode": "Exclusive"}}
    autoscaled.cluster.apply(sleeper("alone", **whole))
    autoscaled.placed_once("alone")
    eventually("no free slot", lambda: slots(autoscaled, "h100") == 4)
    shared = {"gpu": {"product": H100}, "sharing": {"mode": "TimeSlicing"}, "memory": {"limit": "8Gi"}}
    names = [f"sharer-{number}" for number in range(6)]
    autoscaled.cluster.apply(*(sleeper(name, **shared) for name in names))
    autoscaled.cluster.kubectl("delete", "gputrainingjob", "alone", "--wait=false")
    for name in names:
        autoscaled.running(name, 90)
        phases = [pod["status"]["phase"] for pod in autoscaled.pods(name)]
        assert phases == ["Running"], "no pod was refused by the kubelet for lack of a slot"
