"""The program `carpool agent` on a Node without NVIDIA's driver, against the real API server."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from carpool_e2e.cluster import Cluster, carpool_command
from carpool_e2e.nodes import MANAGED_LABELS
from kubectl import Watcher

pytestmark = pytest.mark.e2e

NODE = "driverless"


@pytest.fixture
def node(watcher: Watcher) -> Iterator[str]:
    cluster = watcher.cluster
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": MANAGED_LABELS}})
    yield NODE
    cluster.kubectl("delete", f"node/{NODE}")
    cluster.kubectl("delete", f"gpunode/{NODE}", "--ignore-not-found")


def run_agent(cluster: Cluster, node: str, state: Path) -> subprocess.CompletedProcess[str]:
    token = cluster.plane.api.token_of("carpool-system", "carpool-node-agent", node)
    kubeconfig = cluster.plane.write_kubeconfig(f"agent-{node}", token)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("CARPOOL_", "KUBE"))},
        "KUBECONFIG": str(kubeconfig), "CARPOOL_NODE_NAME": node, "CARPOOL_STATE_DIR": str(state),
        "CARPOOL_METRICS_PORT": "0",
    }  # fmt: skip
    return subprocess.run(
        [carpool_command(), "agent"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def conditions(watcher: Watcher) -> dict[str, Any]:
    return {c["type"]: c for c in watcher.read("gpunode", NODE)["status"]["conditions"]}


def test_a_node_without_a_driver_says_so_in_its_gpunode(watcher: Watcher, node: str, tmp_path: Path) -> None:
    cluster = watcher.cluster
    ended = run_agent(cluster, node, tmp_path)
    assert ended.returncode != 0
    assert "driver" in ended.stderr.splitlines()[-1]
    found = conditions(watcher)
    assert {kind: one["status"] for kind, one in found.items()} == dict.fromkeys(
        ("Ready", "MpsAvailable", "Preflight"), "False"
    )
    assert found["Ready"]["reason"] == "DriverUnusable"
    assert "libnvidia-ml.so.1" in found["Ready"]["message"]
    assert "driver" in found["Preflight"]["message"]
    owner = watcher.read("gpunode", node)["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"]) == ("Node", node)

    again = run_agent(cluster, node, tmp_path)  # as its pod is restarted
    assert again.returncode == ended.returncode
    assert conditions(watcher)["Ready"]["lastTransitionTime"] == found["Ready"]["lastTransitionTime"]
