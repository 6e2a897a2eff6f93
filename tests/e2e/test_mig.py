"""MIG instances from a job's manifest to its binding, on the real control plane.

Simulated GPUs cannot be divided, so the node and its agent are played here: a Node without a kubelet, a GpuNode whose
GPU offers an A100's profiles, and reports of what was reserved as prepared.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from carpool_e2e.cluster import Cluster, KubectlError
from carpool_e2e.demo.manifests import sleeper
from carpool_e2e.fleet import FleetNode, node_status
from carpool_e2e.nodes import MANAGED_LABELS
from kubectl import Watcher, eventually

pytestmark = pytest.mark.e2e

NODE, GPU, ELSEWHERE = "divided", "GPU-divided-0", "strangers"
SMALLEST = "3g.20gb"
"""The smallest profile that has 4 GiB and as many SMs as the job was predicted to fill (0.32 of all)."""
DEVICE = {
    "uuid": GPU,
    "index": 0,
    "product": "Simulated NVIDIA A100-SXM4-40GB",
    "memoryMib": 40960,
    "reservedMib": 512,
    "computeCapability": "8.0",
    "modes": ["Exclusive", "TimeSlicing", "MPS", "MIG"],
    "migProfiles": ["1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"],
    "health": "Healthy",
}


class PlayedAgent:
    """The agent of one node that has no kubelet."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def report(self, reservations: list[dict[str, Any]]) -> None:
        """Say that the GPU is there, and that these reservations are prepared."""
        ready = [{"podUid": r["podUid"], "generation": r["generation"], "state": "Ready"} for r in reservations]
        status = {"agentVersion": "played", "devices": [DEVICE], "partitions": ready}
        patch = json.dumps({"status": status})
        self._cluster.kubectl("patch", "gpunode", NODE, "--subresource=status", "--type=merge", "-p", patch)


@pytest.fixture
def agent(watcher: Watcher) -> Iterator[PlayedAgent]:
    cluster = watcher.cluster
    meta = {"name": NODE}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ELSEWHERE}},
        {"apiVersion": "v1", "kind": "Node", "metadata": {**meta, "labels": MANAGED_LABELS}},
        {"apiVersion": "carpool.dev/v1alpha1", "kind": "GpuNode", "metadata": meta, "spec": {}},
    )
    status = json.dumps(node_status(FleetNode(NODE, 8), datetime.now(UTC)))
    cluster.kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", "-p", status)
    played = PlayedAgent(cluster)
    played.report([])
    yield played
    for namespace in (ELSEWHERE, "default"):
        cluster.kubectl("delete", "gputrainingjobs", "--all", "-n", namespace)
        cluster.kubectl("delete", "pods", "--all", "-n", namespace, "--grace-period=0", "--force", timeout_s=120)
    eventually("no reservation left", lambda: not watcher.reservations())
    cluster.kubectl("delete", f"gpunode/{NODE}", f"node/{NODE}")
    cluster.kubectl("delete", f"namespace/{ELSEWHERE}", timeout_s=120)


def wanting(name: str, namespace: str, mode: str) -> dict[str, Any]:
    sharing = {"mode": mode, "tenancy": "Cluster"}
    made = sleeper(name, sharing=sharing, memory={"limit": "4Gi"})
    made["metadata"]["namespace"] = namespace
    return made


def placed(watcher: Watcher, agent: PlayedAgent, name: str, namespace: str) -> dict[str, Any]:
    """Wait for a job's reservation, see that its pod is bound once the agent has prepared it, and not before."""

    def node_of() -> str:
        (pod,) = watcher.read("pods", "-n", namespace, "-l", f"carpool.dev/job={name}")["items"]
        return str(pod["spec"].get("nodeName", ""))

    eventually(f"a reservation of {name}", lambda: watcher.reserved(name))
    held = watcher.reserved(name)[0]
    assert node_of() == "", "the pod was bound before its instance was there"
    agent.report(watcher.read("gpunode", NODE)["spec"]["reservations"])
    eventually(f"{name} bound", lambda: node_of() == NODE)
    return held


def test_instances_are_reserved_prepared_and_bound_also_for_jobs_of_two_namespaces(
    watcher: Watcher, agent: PlayedAgent
) -> None:
    watcher.cluster.apply(wanting("asks-for-mig", "default", "MIG"))
    held = placed(watcher, agent, "asks-for-mig", "default")
    assert (held["mode"], held["migProfile"], held["gpuUuids"]) == ("MIG", SMALLEST, [GPU])
    assert "memoryLimitMib" not in held
    assert "MIG as the job asks" in held["reason"]
    watcher.cluster.apply(wanting("leaves-it-open", ELSEWHERE, "Auto"))
    held = placed(watcher, agent, "leaves-it-open", ELSEWHERE)
    assert (held["mode"], held["migProfile"], held["gpuUuids"]) == ("MIG", SMALLEST, [GPU])
    assert "beside default/asks-for-mig" in held["reason"]
    assert "MIG as its tenants have it" in held["reason"]
    shown = eventually("the placement", lambda: watcher.job("asks-for-mig").get("status", {}).get("placement"))
    assert SMALLEST in json.dumps(shown)


def test_an_instance_for_several_gpus_is_refused_when_it_is_asked_for(watcher: Watcher) -> None:
    with pytest.raises(KubectlError, match="a MIG instance is a part of one GPU"):
        watcher.cluster.apply(sleeper("two", sharing={"mode": "MIG"}, gpusPerWorker=2))
